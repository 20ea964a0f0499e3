//! The models this endpoint serves, and the engines behind them.

mod breaker;
mod calibration;
mod fallbacks;
mod learning;
pub mod names;
mod node;
mod prefixes;
pub mod rates;
mod routes;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use baton_schemas::node::NodeInfo;
use futures::StreamExt;
use futures::stream::FuturesUnordered;

pub use self::breaker::{Breaker, BreakerView};
pub use self::calibration::keep_calibrated;
pub use self::fallbacks::{Fallback, Fallbacks};
pub use self::node::{Claim, Node};
pub use self::routes::{Routes, expected_output};
use crate::admission::Account;
use crate::error::RequestError;
use crate::plan::policy::{POLICIES, Policy};

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
    /// Nodes that generate, at least one.
    pub decode: Vec<Arc<Node>>,
    /// Nodes that compute prompts for them.
    pub prefill: Vec<Arc<Node>>,
    /// How requests are planned unless they ask for another way.
    pub policy: &'static dyn Policy,
    /// What was learned about routes.
    pub routes: Routes,
    /// How often its requests had to go another way than planned.
    pub fallbacks: Fallbacks,
}

impl ServedModel {
    /// A model served by these nodes.
    pub fn new(
        name: OnceLock<String>,
        aliases: Vec<String>,
        decode: Vec<Arc<Node>>,
        prefill: Vec<Arc<Node>>,
    ) -> ServedModel {
        let routes = Routes::new(prefill.len(), decode.len());
        let (since, fallbacks) = (SystemTime::now(), Fallbacks::default());
        ServedModel { name, aliases, since, decode, prefill, policy: POLICIES[0], routes, fallbacks }
    }

    /// All names, the public one first.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.name.get().into_iter().chain(&self.aliases)
    }

    /// While its own name is not known a model answers to any: whoever asks is to come back, and not to be told that
    /// there is no such model.
    fn is_called(&self, name: &str) -> bool {
        self.name.get().is_none() || self.names().any(|known| names::are_same(known, name))
    }

    /// A decode node that is ready, and what it is. Waits for one that is starting.
    pub async fn any_ready(&self) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        let ready = |node: &&Arc<Node>| node.info().is_some();
        let passes = |node: &&Arc<Node>| node.breaker.would_pass();
        let nodes = || self.decode.iter().filter(ready);
        if let Some((node, info)) = nodes().find(passes).or_else(|| nodes().next()).and_then(|n| Some((n, n.info()?))) {
            return Ok((node, info));
        }
        let mut last = unavailable("no engine serves this model", READY_WAIT);
        let waits = self.decode.iter().map(|node| Box::pin(async move { Ok((node, node.ready().await?)) }));
        let mut waits: FuturesUnordered<_> = waits.collect();
        while let Some(outcome) = waits.next().await {
            match outcome {
                Ok(ready) => return Ok(ready),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn unavailable(reason: &str, retry_after: Duration) -> RequestError {
    RequestError::Unavailable { reason: reason.to_owned(), retry_after: retry_after.max(Duration::from_secs(1)) }
}

/// All served models.
pub struct Pool {
    /// In the order of the configuration.
    pub models: Vec<Arc<ServedModel>>,
}

impl Pool {
    /// Slots of the decode nodes that are ready.
    pub fn n_slots(&self) -> usize {
        let nodes = self.models.iter().flat_map(|model| &model.decode);
        nodes.filter_map(|node| node.info()).map(|info| info.n_slots as usize).sum()
    }

    /// The model of that name.
    fn find(&self, name: &str) -> Result<&Arc<ServedModel>, RequestError> {
        let found = self.models.iter().find(|model| model.is_called(name));
        found.ok_or_else(|| RequestError::ModelNotFound { model: name.to_owned() })
    }

    /// The model of that name, if this account may use it; without a name, the first one that it may.
    pub fn find_for(&self, name: Option<&str>, account: &Account) -> Result<&Arc<ServedModel>, RequestError> {
        let is_allowed = |model: &&Arc<ServedModel>| account.may_use(model.names());
        let Some(name) = name else {
            let none = || unavailable("no model is served to this API key", READY_WAIT);
            return self.models.iter().find(is_allowed).ok_or_else(none);
        };
        let model = self.find(name)?;
        match (is_allowed(&model), model.name.get()) {
            (true, _) => Ok(model),
            (false, Some(_)) => Err(RequestError::ModelNotAllowed { model: name.to_owned() }),
            // Whether it is one of the account's is not known yet.
            (false, None) => Err(unavailable("its node has not answered yet", READY_WAIT)),
        }
    }
}
