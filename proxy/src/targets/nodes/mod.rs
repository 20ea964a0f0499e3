//! The models this endpoint serves, and the engines behind them.

mod breaker;
mod breakers;
mod calibration;
mod discovery;
mod fallbacks;
mod follow;
mod health;
mod identity;
mod learning;
mod life;
mod node;
mod prefixes;
pub mod probe;
pub mod remote_watch;
mod routes;
mod served_model;
mod sight;
mod succession;
mod unused;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

pub use self::breaker::{Breaker, BreakerView};
pub use self::breakers::{Breakers, Pairs, Task};
pub use self::calibration::keep_calibrated;
pub use self::discovery::{DISCOVERY_INTERVAL, keep_discovering};
pub use self::fallbacks::{Fallback, FallbackReason, Fallbacks};
pub use self::health::{Health, StateReason, Status, Transition, Why};
pub use self::identity::Identity;
pub use self::life::Life;
pub use self::node::{Claim, Node};
pub use self::routes::{Routes, expected_output};
pub use self::served_model::ServedModel;
pub use self::sight::Sight;
pub use self::unused::Unused;
use crate::account::Account;
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
    /// Nodes of which nobody has said which model they run: they do.
    undeclared: RwLock<Undeclared>,
}

/// Nodes that were configured for no model in particular.
#[derive(Default, Clone)]
struct Undeclared {
    decode: Vec<Arc<Node>>,
    prefill: Vec<Arc<Node>>,
}

impl Pool {
    /// A pool of these models alone.
    pub fn of(models: Vec<Arc<ServedModel>>) -> Pool {
        Pool::with_undeclared(models, Vec::new())
    }

    /// A pool that also serves whatever these nodes run; see [`keep_discovering`].
    pub fn with_undeclared(models: Vec<Arc<ServedModel>>, undeclared: Vec<Arc<Node>>) -> Pool {
        let undeclared = Undeclared { decode: undeclared, prefill: Vec::new() };
        Pool { models: RwLock::new(models), undeclared: RwLock::new(undeclared) }
    }

    /// Those that are served now.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether nothing is served here, and no node is there that may turn out to run something.
    pub fn is_empty(&self) -> bool {
        self.models().is_empty() && self.undeclared().decode.is_empty()
    }

    /// Slots of the decode nodes that are ready, whichever model they serve, and of models that can be loaded.
    pub fn n_slots(&self) -> usize {
        let of_model = |model: &Arc<ServedModel>| -> usize {
            let ready: usize =
                model.decode.iter().filter_map(|node| model.ready_decode(node)).map(|info| info.n_slots as usize).sum();
            // Its requests have to be let in for it to be loaded.
            ready.max(model.resident.as_ref().map_or(0, |resident| resident.n_slots()))
        };
        self.models().iter().map(of_model).sum()
    }

    fn undeclared(&self) -> Undeclared {
        self.undeclared.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Other nodes from now on, for all models but those that come and go. Streams go on on the nodes that they have.
    /// `first` is served if nothing was until now; `found` adds what a model has beside its nodes.
    pub fn replace_nodes(
        &self,
        decode: &[Arc<Node>],
        prefill: &[Arc<Node>],
        first: impl FnOnce() -> ServedModel,
        found: impl Fn(ServedModel) -> Arc<ServedModel>,
    ) {
        let undeclared = Undeclared { decode: decode.to_vec(), prefill: prefill.to_vec() };
        *self.undeclared.write().unwrap_or_else(PoisonError::into_inner) = undeclared;
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let is_first = !decode.is_empty() && models.iter().all(|model| model.resident.is_some());
        let on_these = |model: &Arc<ServedModel>| {
            if model.resident.is_some() {
                return Some(Arc::clone(model));
            }
            let own = model.decode.iter().take(usize::from(model.has_own_engine));
            let decode: Vec<_> = own.chain(decode).map(Arc::clone).collect();
            (!decode.is_empty()).then(|| found(model.on(decode, prefill.to_vec())))
        };
        let new = is_first.then(|| found(first())).into_iter().chain(models.iter().filter_map(on_these)).collect();
        *models = new;
    }

    /// Serves the first of the models that stay otherwise from now on. Streams go on as they are.
    pub fn replace_first(&self, change: impl FnOnce(&ServedModel) -> Arc<ServedModel>) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = models.iter_mut().find(|model| model.resident.is_none()) {
            *first = change(first);
        }
    }

    /// Serves these own models that come and go instead of those before. They stand where those stood.
    pub fn replace_residents(&self, new: Vec<Arc<ServedModel>>) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let is_resident = |model: &Arc<ServedModel>| model.resident.is_some();
        let at = models.iter().position(is_resident).unwrap_or(models.len());
        models.retain(|model| !is_resident(model));
        models.splice(at..at, new);
    }

    /// The model of that name. Errors: there is none, or a node that may run it has not said yet what it runs.
    fn find(&self, name: &str) -> Result<Arc<ServedModel>, RequestError> {
        if let Some(found) = self.models().into_iter().find(|model| model.is_called(name)) {
            return Ok(found);
        }
        if self.undeclared().decode.iter().any(|node| node.last_info().is_none()) {
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
