//! What handlers share.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::config::HttpConfig;
use super::http_backend::HttpBackend;
use crate::request::caller::Caller;
use crate::request::models::ListedModel;

/// Event streams at once: some dashboards and terminals. Each holds a connection for as long as it likes.
pub(super) const MAX_WATCHERS: usize = 32;

/// What handlers share.
#[derive(Clone)]
pub struct HttpState {
    /// What answers requests.
    pub backend: Arc<dyn HttpBackend>,
    /// Limits and times.
    pub config: Arc<HttpConfig>,
    /// Bounds the streams of states.
    pub watchers: Watchers,
}

impl HttpState {
    /// The models that a caller may use.
    pub(super) fn models_for(&self, caller: &Caller) -> Vec<ListedModel> {
        let mut models = self.backend.models();
        models.retain(|model| caller.account.may_use(model.names.iter()));
        models
    }
}

/// A permit for each event stream of states.
#[derive(Debug, Clone)]
pub struct Watchers(pub(super) Arc<Semaphore>);

impl Default for Watchers {
    fn default() -> Self {
        Watchers(Arc::new(Semaphore::new(MAX_WATCHERS)))
    }
}
