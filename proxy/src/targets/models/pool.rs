//! All models that nodes serve, and the undeclared nodes, which may report further models.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use super::removed_keys::RemovedKeys;
use super::served_model::ServedModel;
use crate::admission::TargetPlaces;
use crate::error::RequestError;
use crate::targets::nodes::{Node, READY_WAIT};

/// All models that nodes serve, and undeclared nodes.
pub struct ModelPool {
    /// In the order of the configuration; then in the order in which nodes report them.
    models: RwLock<Vec<Arc<ServedModel>>>,
    undeclared: RwLock<UndeclaredNodes>,
    /// Nodes are searched for in the network, so a model may come at any time.
    is_searching: AtomicBool,
    /// Shared by all models.
    pub removed_keys: Arc<RemovedKeys>,
}

/// Nodes that are not configured for a particular model. Each reports the model that it runs.
#[derive(Default, Clone)]
pub(super) struct UndeclaredNodes {
    pub(super) decode: Vec<Arc<Node>>,
    pub(super) prefill: Vec<Arc<Node>>,
}

impl ModelPool {
    /// A pool of only these models.
    pub fn of(models: Vec<Arc<ServedModel>>) -> ModelPool {
        ModelPool::with_undeclared(models, Vec::new())
    }

    /// A pool that also serves whatever these nodes run; see [`serve_reported_models`](super::serve_reported_models).
    pub fn with_undeclared(models: Vec<Arc<ServedModel>>, undeclared: Vec<Arc<Node>>) -> ModelPool {
        let undeclared = UndeclaredNodes { decode: undeclared, prefill: Vec::new() };
        // The pool's further models get them, too.
        let removed_keys = models.first().map_or_else(Arc::default, |model| Arc::clone(&model.removed_keys));
        ModelPool {
            removed_keys,
            models: RwLock::new(models),
            undeclared: RwLock::new(undeclared),
            is_searching: AtomicBool::new(false),
        }
    }

    /// Nodes are searched for in the network from now on.
    pub fn note_search(&self) {
        self.is_searching.store(true, Ordering::Relaxed);
    }

    /// The models that are served now.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns true if no model is served and no node may report one.
    pub fn is_empty(&self) -> bool {
        self.models().is_empty() && self.undeclared().decode.is_empty()
    }

    /// The places of all ready decode nodes.
    pub fn places(&self) -> Vec<Arc<TargetPlaces>> {
        self.models().iter().flat_map(|model| model.places()).collect()
    }

    /// The nodes on other machines, each once: those that the configuration names, in its order, and those that were found.
    pub fn remote_nodes(&self) -> Vec<Arc<Node>> {
        let UndeclaredNodes { decode, prefill } = self.undeclared();
        let models = self.models();
        let of_models = models.iter().flat_map(|model| model.decode.iter().chain(&model.prefill));
        let mut nodes: Vec<Arc<Node>> = Vec::new();
        for node in of_models.chain(&decode).chain(&prefill).filter(|node| node.url.is_some()) {
            if !nodes.iter().any(|known| Arc::ptr_eq(known, node)) {
                nodes.push(Arc::clone(node));
            }
        }
        nodes
    }

    pub(super) fn undeclared(&self) -> UndeclaredNodes {
        self.undeclared.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the prefill nodes that reported models get.
    pub(super) fn set_undeclared_prefill(&self, prefill: Vec<Arc<Node>>) {
        self.undeclared.write().unwrap_or_else(PoisonError::into_inner).prefill = prefill;
    }

    pub(super) fn add(&self, model: Arc<ServedModel>) {
        self.models.write().unwrap_or_else(PoisonError::into_inner).push(model);
    }

    /// Puts `new` in the place of `old`, or removes `old`.
    pub(super) fn replace(&self, old: &Arc<ServedModel>, new: Option<Arc<ServedModel>>) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = models.iter().position(|model| Arc::ptr_eq(model, old)) {
            models.splice(at..=at, new);
        }
    }

    /// Replaces the nodes of all models except those that are loaded on demand. Running streams stay on their nodes.
    /// `first` is served if no model was until now; `found` completes a model.
    pub fn replace_nodes(
        &self,
        decode: &[Arc<Node>],
        prefill: &[Arc<Node>],
        first: impl FnOnce() -> ServedModel,
        found: impl Fn(ServedModel) -> Arc<ServedModel>,
    ) {
        let undeclared = UndeclaredNodes { decode: decode.to_vec(), prefill: prefill.to_vec() };
        *self.undeclared.write().unwrap_or_else(PoisonError::into_inner) = undeclared;
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let is_first = !decode.is_empty() && models.iter().all(|model| model.loadable.is_some());
        let on_these = |model: &Arc<ServedModel>| {
            if model.loadable.is_some() {
                return Some(Arc::clone(model));
            }
            let own = model.decode.iter().take(usize::from(model.own_engine.is_some()));
            let decode: Vec<_> = own.chain(decode).map(Arc::clone).collect();
            let prefill = model.lending_engine.iter().chain(prefill).map(Arc::clone).collect();
            (!decode.is_empty()).then(|| found(model.with_nodes(decode, prefill)))
        };
        let new = is_first.then(|| found(first())).into_iter().chain(models.iter().filter_map(on_these)).collect();
        *models = new;
    }

    /// Replaces the first model that is not loaded on demand. Running streams keep the old one.
    pub fn replace_first(&self, change: impl FnOnce(&ServedModel) -> Arc<ServedModel>) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = models.iter_mut().find(|model| model.loadable.is_none()) {
            *first = change(first);
        }
    }

    /// Replaces the models that are loaded on demand. The new ones take the position of the old ones.
    pub fn replace_loadable(&self, new: Vec<Arc<ServedModel>>) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let is_loadable = |model: &Arc<ServedModel>| model.loadable.is_some();
        let at = models.iter().position(is_loadable).unwrap_or(models.len());
        models.retain(|model| !is_loadable(model));
        models.splice(at..at, new);
    }

    /// The model of this name. Errors: no such model, or a node that may run it has not answered yet.
    fn find(&self, name: &str) -> Result<Arc<ServedModel>, RequestError> {
        if let Some(found) = self.models().into_iter().find(|model| model.has_name(name)) {
            return Ok(found);
        }
        if self.undeclared().decode.iter().any(|node| node.last_info().is_none()) {
            let reason = "a node has not reported its model yet";
            return Err(RequestError::unavailable(reason, Duration::from_secs(1)));
        }
        if self.is_searching.load(Ordering::Relaxed) && self.models().is_empty() {
            let reason = "no node with a model was found in the network yet";
            return Err(RequestError::unavailable(reason, Duration::from_secs(1)));
        }
        Err(RequestError::ModelNotFound { model: name.to_owned() })
    }

    /// The model of this name, or without a name the first one that `may_use` allows. Errors: there is no such model, it
    /// is not allowed, or it is not known yet.
    pub fn find_for(
        &self,
        name: Option<&str>,
        may_use: impl Fn(&ServedModel) -> bool,
    ) -> Result<Arc<ServedModel>, RequestError> {
        let Some(name) = name else {
            let none = || RequestError::unavailable("no model is served to this API key", READY_WAIT);
            return self.models().into_iter().find(|model| may_use(model)).ok_or_else(none);
        };
        let model = self.find(name)?;
        match (may_use(&model), model.name.get()) {
            (true, _) => Ok(model),
            (false, Some(_)) => Err(RequestError::ModelNotAllowed { model: name.to_owned() }),
            // The model's own name is not known yet, so it may still turn out to be allowed.
            (false, None) => Err(RequestError::unavailable("its node has not answered yet", READY_WAIT)),
        }
    }
}
