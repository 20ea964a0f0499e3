//! The models that requests may name: lists, describes, loads and unloads them.

use std::sync::Arc;
use std::time::SystemTime;

use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::{NodeInfo, NodeLoad};
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use baton_schemas::sampling_fields::SamplingFields;

use super::caller::Caller;
use crate::admission::{Admission, RequestAdmission};
use crate::error::RequestError;
use crate::model_name;
use crate::targets::model_loading::{KeepWish, LoadReport, LoadState};
use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::{Target, Targets, upstreams};

/// A model that requests may name.
#[derive(Debug, Clone, PartialEq)]
pub struct OfferedModel {
    /// All names, the public one first. Empty until a remote node has reported its model.
    pub names: Vec<String>,
    /// So many of them, the first ones, are listed like models of their own.
    pub n_listed: usize,
    /// When the model was put into service.
    pub since: SystemTime,
    /// The engine's description; `None` while no engine is ready. For a model that is not loaded, the last known
    /// description.
    pub info: Option<Arc<NodeInfo>>,
    /// The loading state, for a model that is loaded on demand.
    pub load_report: Option<LoadReport>,
    /// Only upstreams serve the model, so `info` and `load_report` are `None`.
    pub is_upstream: bool,
}

impl OfferedModel {
    /// Returns true if the model could answer at once.
    pub fn is_loaded(&self) -> bool {
        self.info.is_some()
            && self.load_report.as_ref().is_none_or(|load_report| load_report.state == LoadState::Loaded)
    }

    /// Returns the names under which lists show it.
    pub fn listed_names(&self) -> impl Iterator<Item = &String> {
        self.names.iter().take(self.n_listed)
    }

    /// Returns the model's bytes in memory: as in `/baton/state` for a model that is loaded on demand, otherwise weights
    /// and KV cache.
    pub fn memory_bytes(&self) -> u64 {
        match (&self.load_report, &self.info) {
            (Some(load_report), _) => load_report.bytes,
            (None, Some(info)) => info.memory.bytes(),
            (None, None) => 0,
        }
    }

    /// Returns true if `name` is one of the model's names.
    pub fn is_called(&self, name: &str) -> bool {
        self.names.iter().any(|known| model_name::are_same(known, name))
    }
}

/// Finds the listed model of that name.
pub fn find(models: Vec<OfferedModel>, name: &str) -> Result<OfferedModel, RequestError> {
    let found = models.into_iter().find(|model| model.is_called(name));
    found.ok_or_else(|| RequestError::ModelNotFound { model: name.to_owned() })
}

/// A description of a model and of the engine that runs it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelDescription {
    /// The model's public name.
    pub name: String,
    /// When the model was put into service.
    pub since: SystemTime,
    /// The engine's own description.
    pub info: Arc<NodeInfo>,
    pub load: NodeLoad,
    /// Sampling defaults of this endpoint.
    pub sampling: SamplingFields,
    /// The model is not in memory; the next request loads it.
    pub is_sleeping: bool,
}

/// Lists all models: those of nodes, then those that only upstreams serve.
pub fn list(targets: &Targets) -> Vec<OfferedModel> {
    let on_nodes = |model: &Arc<ServedModel>| OfferedModel {
        names: model.names().cloned().collect(),
        n_listed: 1 + model.n_listed_aliases,
        since: model.since,
        info: model.described(),
        load_report: model.loadable.as_ref().map(|loadable| loadable.report()),
        is_upstream: false,
    };
    let mut models: Vec<OfferedModel> = targets.pool.models().iter().map(on_nodes).collect();
    let n_own = models.len();
    for (name, member) in targets.upstreams.load().models() {
        if !models[..n_own].iter().any(|model| model.is_called(&name)) {
            let since = member.since;
            models.push(OfferedModel {
                names: vec![name],
                n_listed: 1,
                since,
                info: None,
                load_report: None,
                is_upstream: true,
            });
        }
    }
    models
}

/// Describes a model without loading it. Waits for a starting engine.
pub async fn describe(
    admission: &Admission,
    targets: &Targets,
    name: Option<&str>,
    caller: &Caller,
) -> Result<ModelDescription, RequestError> {
    caller.account.take_request()?;
    let permit = admission.admit_brief(&caller.account).await?;
    let model = match targets.resolve(name, &caller.account)? {
        Target::Nodes { model, .. } => model,
        Target::Upstreams(serving) => {
            // A slow upstream must not take the places of brief calls to others.
            drop(permit);
            let (info, load) = upstreams::node_info(&serving, &caller.request_id).await;
            return Ok(ModelDescription {
                since: serving.since(),
                name: serving.name,
                info: Arc::new(info),
                load,
                sampling: SamplingFields::default(),
                is_sleeping: false,
            });
        }
    };
    let is_ready = model.decode.iter().any(|node| model.ready_decode(node).is_some());
    let (info, load, is_sleeping) = match (&model.loadable, model.described()) {
        (Some(_), Some(info)) if !is_ready => (info, NodeLoad::default(), true),
        _ => {
            let (node, info) = model.ready_node(name, &[], ImageNeed::None).await?;
            let load = node.load();
            let queued = load.queued.saturating_add(u32::try_from(node.places.n_wanted()).unwrap_or(u32::MAX));
            (info, NodeLoad { queued, ..load }, false)
        }
    };
    let name = model.name.get().cloned().unwrap_or_else(|| info.model.clone());
    Ok(ModelDescription { name, since: model.since, info, load, sampling: model.sampling, is_sleeping })
}

/// Returns what upstreams report about a model that only they serve; `None` for a model of nodes.
pub async fn describe_upstream(
    admission: &Admission,
    targets: &Targets,
    model: &str,
    caller: &Caller,
) -> Result<UpstreamModelInfo, RequestError> {
    caller.account.take_request()?;
    drop(admission.admit_brief(&caller.account).await?);
    match targets.resolve(Some(model), &caller.account)? {
        Target::Nodes { .. } => Ok(UpstreamModelInfo::default()),
        Target::Upstreams(serving) => Ok(upstreams::model_info(&serving, &caller.request_id).await),
    }
}

/// Loads a model, and keeps it in memory for at least `keep_alive`, if given.
pub async fn load(
    admission: &Admission,
    targets: &Targets,
    model: &str,
    keep_alive: Option<KeepAlive>,
    caller: &Caller,
) -> Result<(), RequestError> {
    let target = targets.resolve(Some(model), &caller.account)?;
    caller.account.take_request()?;
    let _lease = targets.lease(&target, KeepWish::of(keep_alive, &caller.account)).await?;
    match target {
        Target::Nodes { model: served, .. } => {
            let _permit = admission.admit_brief(&caller.account).await?;
            served.ready_node(Some(model), &[], ImageNeed::None).await.map(drop)
        }
        Target::Upstreams(serving) => {
            let permit = admission.enter(&caller.account, &RequestAdmission::default());
            let keep_alive = keep_alive.filter(|_| caller.account.limits.is_operator);
            upstreams::load(&serving, &permit.places(&Arc::default()), keep_alive, &caller.request_id).await
        }
    }
}

/// Unloads a model as soon as nothing uses it. A model that is always loaded stays. Errors: the key is not an operator's.
pub async fn unload(
    admission: &Admission,
    targets: &Targets,
    model: &str,
    caller: &Caller,
) -> Result<(), RequestError> {
    caller.account.take_request()?;
    if !caller.account.limits.is_operator {
        return Err(RequestError::OperatorOnly { what: "unload models" });
    }
    drop(admission.admit_brief(&caller.account).await?);
    let served = match targets.resolve(Some(model), &caller.account)? {
        Target::Nodes { model, .. } => model,
        Target::Upstreams(serving) => return upstreams::unload(&serving, &caller.request_id).await,
    };
    match &served.loadable {
        Some(loadable) => targets.model_loader.unload(loadable),
        // The model stays loaded, but the name must be valid.
        None => drop(served.ready_node(Some(model), &[], ImageNeed::None).await?),
    }
    Ok(())
}
