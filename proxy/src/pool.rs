//! The models this endpoint serves, and the engines behind them.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use baton_engines::Engine;
use baton_schemas::node::NodeInfo;
use tokio::sync::watch;

use crate::error::RequestError;

/// How long a request waits for an engine that is starting. A restart of the default model takes well under this; a
/// client whose engine needs longer is told to come back.
const READY_WAIT: Duration = Duration::from_secs(10);

/// Where an engine is in its life.
#[derive(Debug, Clone)]
pub enum EngineState {
    /// The process is starting or the model loading.
    Starting,
    /// Requests can be sent.
    Ready(Arc<NodeInfo>),
    /// It could not start; another attempt follows.
    Failed {
        /// Why, safe to show to clients.
        reason: String,
        /// Until the next attempt.
        retry_in: Duration,
    },
}

/// A model under its public names.
pub struct ServedModel {
    /// The name in `/v1/models`. Unset until a remote node has said what it runs, if nobody gave it another name.
    pub name: OnceLock<String>,
    /// Other names that find it.
    pub aliases: Vec<String>,
    /// When it was put into service, for `created`.
    pub since: SystemTime,
    /// What the engine's node is called in `x-baton-route`: no address.
    pub node: &'static str,
    /// The engine that runs it.
    pub engine: Arc<dyn Engine>,
    /// The engine's life.
    pub state: watch::Receiver<EngineState>,
}

impl ServedModel {
    /// All names, the public one first.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.name.get().into_iter().chain(&self.aliases)
    }

    /// While its own name is not known a model answers to any: whoever asks is to come back, and not to be told that
    /// there is no such model.
    fn is_called(&self, name: &str) -> bool {
        self.name.get().is_none() || self.names().any(|known| known.eq_ignore_ascii_case(name))
    }

    /// What the engine is, once it is ready. Waits for one that is starting, but not for one that cannot start.
    pub async fn ready(&self) -> Result<Arc<NodeInfo>, RequestError> {
        let mut state = self.state.clone();
        let settled = state.wait_for(|state| !matches!(state, EngineState::Starting));
        match tokio::time::timeout(READY_WAIT, settled).await {
            Ok(Ok(state)) => match &*state {
                EngineState::Ready(info) => Ok(Arc::clone(info)),
                EngineState::Failed { reason, retry_in } => Err(unavailable(reason, *retry_in)),
                EngineState::Starting => Err(unavailable("the model is loading", READY_WAIT)),
            },
            Ok(Err(_)) => Err(unavailable("the engine has been stopped", READY_WAIT)),
            Err(_) => Err(unavailable("the model is loading", READY_WAIT)),
        }
    }
}

fn unavailable(reason: &str, retry_after: Duration) -> RequestError {
    RequestError::Unavailable { reason: reason.to_owned(), retry_after: retry_after.max(Duration::from_secs(1)) }
}

/// All served models.
pub struct Pool {
    /// In the order of the configuration.
    pub models: Vec<ServedModel>,
}

impl Pool {
    /// The model of that name, whatever its case.
    pub fn find(&self, name: &str) -> Result<&ServedModel, RequestError> {
        let found = self.models.iter().find(|model| model.is_called(name));
        found.ok_or_else(|| RequestError::ModelNotFound { model: name.to_owned() })
    }
}
