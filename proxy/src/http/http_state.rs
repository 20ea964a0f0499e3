//! State shared by all request handlers.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::access::SharedAccess;
use super::body::parser_threads::ParserThreads;
use super::config::HttpConfig;
use super::http_backend::HttpBackend;
use crate::request::caller::Caller;
use crate::request::models::OfferedModel;

/// State streams open at once: enough for some dashboards and terminals. Each may hold its connection forever.
pub(super) const MAX_WATCHERS: usize = 32;

/// State shared by all request handlers.
#[derive(Clone)]
pub struct HttpState {
    /// Answers requests.
    pub backend: Arc<dyn HttpBackend>,
    /// Limits and times.
    pub config: Arc<HttpConfig>,
    /// The callers and pages that may use the server. It is replaced when the configuration is reloaded.
    pub access: SharedAccess,
    /// Limits the number of state streams.
    pub watchers: Watchers,
    /// Limits the bodies that are parsed at once.
    pub parser_threads: ParserThreads,
    /// `METHOD PATH` of each route, for people who asked for an unknown one.
    pub routes: Arc<[String]>,
}

impl HttpState {
    /// Lists the models that a caller may use.
    pub(super) fn models_for(&self, caller: &Caller) -> Vec<OfferedModel> {
        let mut models = self.backend.models();
        models.retain(|model| caller.account.may_use(model.names.iter()));
        models
    }
}

/// One permit for each stream of `/baton/state`.
#[derive(Debug, Clone)]
pub struct Watchers(pub(super) Arc<Semaphore>);

impl Default for Watchers {
    fn default() -> Self {
        Watchers(Arc::new(Semaphore::new(MAX_WATCHERS)))
    }
}
