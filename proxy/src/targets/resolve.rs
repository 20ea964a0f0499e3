//! Finds the target of a request by its model's name, among nodes first and upstreams second.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;

use super::model_loading::{KeepWish, ModelLease, ModelLoader};
use super::models::ModelPool;
use super::target::Target;
use super::upstreams::{ServedByUpstreams, UpstreamPool};
use crate::account::Account;
use crate::admission::TargetPlaces;
use crate::error::RequestError;

/// When to ask again for a model that an upstream may still list.
const RETRY_UNLISTED: Duration = Duration::from_secs(1);

/// Everything that can answer requests.
pub struct Targets {
    /// The models that nodes serve.
    pub pool: Arc<ModelPool>,
    /// Loads and unloads the endpoint's own models.
    pub model_loader: Arc<ModelLoader>,
    /// Other servers.
    pub upstreams: ArcSwap<UpstreamPool>,
    /// Held by whoever changes them, because what the configuration names and what was found change apart.
    changes: Mutex<()>,
}

impl Targets {
    /// Nodes alone.
    pub fn of_nodes(pool: Arc<ModelPool>) -> Targets {
        Targets::new(pool, Arc::default(), UpstreamPool::default())
    }

    /// Nodes and upstreams.
    pub fn new(pool: Arc<ModelPool>, model_loader: Arc<ModelLoader>, upstreams: UpstreamPool) -> Targets {
        Targets { pool, model_loader, upstreams: ArcSwap::from_pointee(upstreams), changes: Mutex::new(()) }
    }

    /// Replaces the upstreams by what `change` makes of them, unless that is nothing. Errors: those of `change`.
    pub fn change_upstreams<E>(
        &self,
        change: impl FnOnce(&UpstreamPool) -> Result<Option<UpstreamPool>, E>,
    ) -> Result<(), E> {
        let _turn = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(new) = change(&self.upstreams.load())? {
            self.upstreams.store(Arc::new(new));
        }
        Ok(())
    }

    /// Finds the target of a model. Without a name: the first model that this account may use.
    ///
    /// Errors: no target serves the model, or the account may not use it.
    pub fn resolve(&self, name: Option<&str>, account: &Account) -> Result<Target, RequestError> {
        let Some(name) = name else { return self.first(account) };
        let upstreams = self.upstreams.load_full();
        match self.pool.find_for(Some(name), |model| account.may_use(model.names())) {
            Ok(model) => {
                // An upstream that only happens to list this name may mean another model.
                let fallback = upstreams.serving(name, model.name.get().is_none());
                Ok(Target::Nodes { model, fallback })
            }
            Err(error) => match upstreams.serving(name, true) {
                Some(serving) if account.may_use(std::iter::once(&serving.name)) => Ok(Target::Upstreams(serving)),
                Some(_) => Err(RequestError::ModelNotAllowed { model: name.to_owned() }),
                None if upstreams.may_yet_list() && matches!(error, RequestError::ModelNotFound { .. }) => {
                    Err(RequestError::unavailable("an upstream has not listed its models yet", RETRY_UNLISTED))
                }
                None => Err(error),
            },
        }
    }

    /// The first model of nodes that an account may use; of upstreams, if there are no nodes.
    fn first(&self, account: &Account) -> Result<Target, RequestError> {
        let upstreams = if self.pool.is_empty() { self.first_on_upstreams(account) } else { None };
        match upstreams {
            Some(serving) => Ok(Target::Upstreams(serving)),
            None => Ok(Target::Nodes {
                model: self.pool.find_for(None, |model| account.may_use(model.names()))?,
                fallback: None,
            }),
        }
    }

    fn first_on_upstreams(&self, account: &Account) -> Option<ServedByUpstreams> {
        let upstreams = self.upstreams.load_full();
        let (name, _) = upstreams.models().into_iter().find(|(name, _)| account.may_use(std::iter::once(name)))?;
        upstreams.serving(&name, true)
    }

    /// Loads the target's model if it is not in memory, and keeps it there while the lease lives. `None` if the model is
    /// not loaded on demand.
    pub async fn lease(&self, target: &Target, wish: KeepWish) -> Result<Option<ModelLease>, RequestError> {
        match target.served_model().and_then(|model| model.loadable.as_ref()) {
            Some(loadable) => self.model_loader.lease(loadable, wish).await.map(Some),
            None => Ok(None),
        }
    }

    /// The places of all targets that can serve now.
    pub fn places(&self) -> Vec<Arc<TargetPlaces>> {
        let mut places = self.pool.places();
        places.extend(self.upstreams.load().places());
        places
    }
}
