//! The models this endpoint serves, and the engines behind them.

mod breaker;
mod calibration;
mod discovery;
mod fallbacks;
mod follow;
mod health;
mod identity;
mod learning;
mod life;
pub mod names;
mod node;
mod prefixes;
pub mod rates;
mod routes;
mod served_model;
mod succession;
mod unused;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

pub use self::breaker::{Breaker, BreakerView};
pub use self::calibration::keep_calibrated;
pub use self::discovery::{DISCOVERY_INTERVAL, keep_discovering};
pub use self::fallbacks::{Fallback, Fallbacks};
pub use self::health::{Health, Status, Transition, Why};
pub use self::identity::Identity;
pub use self::life::Life;
pub use self::node::{Claim, Node};
pub use self::routes::{Routes, expected_output};
pub use self::served_model::ServedModel;
pub use self::unused::Unused;
use crate::admission::Account;
use crate::error::RequestError;

/// How long a request waits for an engine that is starting. A restart of the default model takes well under this; a
/// client whose engine needs longer is told to come back.
const READY_WAIT: Duration = Duration::from_secs(10);

fn unavailable(reason: &str, retry_after: Duration) -> RequestError {
    RequestError::Unavailable { reason: reason.to_owned(), retry_after: retry_after.max(Duration::from_secs(1)) }
}

/// All served models, and the nodes that may turn out to run more of them.
pub struct Pool {
    /// In the order of the configuration; then as they were discovered.
    models: RwLock<Vec<Arc<ServedModel>>>,
    /// Decode nodes of which nobody has said which model they run: they do.
    undeclared: Vec<Arc<Node>>,
}

impl Pool {
    /// A pool of these models alone.
    pub fn of(models: Vec<Arc<ServedModel>>) -> Pool {
        Pool::with_undeclared(models, Vec::new())
    }

    /// A pool that also serves whatever these nodes run; see [`keep_discovering`].
    pub fn with_undeclared(models: Vec<Arc<ServedModel>>, undeclared: Vec<Arc<Node>>) -> Pool {
        Pool { models: RwLock::new(models), undeclared }
    }

    /// Those that are served now.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Slots of the decode nodes that are ready, whichever model they serve.
    pub fn n_slots(&self) -> usize {
        let of_model = |model: &Arc<ServedModel>| -> usize {
            model.decode.iter().filter_map(|node| model.ready_decode(node)).map(|info| info.n_slots as usize).sum()
        };
        self.models().iter().map(of_model).sum()
    }

    /// The model of that name. Errors: there is none, or a node that may run it has not said yet what it runs.
    fn find(&self, name: &str) -> Result<Arc<ServedModel>, RequestError> {
        if let Some(found) = self.models().into_iter().find(|model| model.is_called(name)) {
            return Ok(found);
        }
        if self.undeclared.iter().any(|node| node.last_info().is_none()) {
            return Err(unavailable("a node has not said yet which model it runs", Duration::from_secs(1)));
        }
        Err(RequestError::ModelNotFound { model: name.to_owned() })
    }

    /// The model of that name, if this account may use it; without a name, the first one that it may.
    pub fn find_for(&self, name: Option<&str>, account: &Account) -> Result<Arc<ServedModel>, RequestError> {
        let is_allowed = |model: &Arc<ServedModel>| account.may_use(model.names());
        let Some(name) = name else {
            let none = || unavailable("no model is served to this API key", READY_WAIT);
            return self.models().into_iter().find(is_allowed).ok_or_else(none);
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

#[cfg(test)]
mod tests;
