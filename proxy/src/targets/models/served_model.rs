//! A model under its public names, and the nodes that may serve it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use baton_engines::engine_options::WrittenOptions;
use baton_planner::deadlines::Deadlines;
use baton_planner::policy::{Policy, PolicyName};
use baton_planner::reason::BarReason;
use baton_schemas::node::NodeInfo;
use baton_schemas::sampling_fields::SamplingFields;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::Instant;

use super::image_support::ImageNeed;
use super::learned_routes::LearnedRoutes;
use super::removed_keys::RemovedKeys;
use super::renamed_weights::{ModelFate, ServingHistory};
use super::returns::KvReturns;
use crate::admission::TargetPlaces;
use crate::error::RequestError;
use crate::model_name;
use crate::targets::model_loading::LoadableModel;
use crate::targets::nodes::{
    FallbackReason, Fallbacks, ModelIdentity, Node, NodeState, PairBreakers, READY_WAIT, Task, bars_handoff,
};

/// How often a request that waits for a place looks for nodes that have become ready.
const PLACES_INTERVAL: Duration = Duration::from_millis(250);

/// How long a node that was lost may return soon: as long as a request that waits for a place waits for it, and as a stream looks
/// for another engine.
pub(super) const RETURN_WAIT: Duration = Duration::from_secs(30);

/// How long a request that waits for a place waits for nodes that are starting or lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeWait {
    /// Until they can be given up.
    ForNodes,
    /// Upstreams can answer instead.
    NotAtAll,
}

/// A served model. Its lists may hold nodes that run another model; plans bar those.
pub struct ServedModel {
    /// The name in `/v1/models`. Without a configured name it is unset until a node has reported its model.
    pub name: OnceLock<String>,
    /// Other names that find it.
    pub aliases: Vec<String>,
    /// So many of them, the first ones, are listed like models of their own.
    pub n_listed_aliases: usize,
    /// When it was put into service, for `created`.
    pub since: SystemTime,
    /// Nodes that may generate, at least one.
    pub decode: Vec<Arc<Node>>,
    /// Nodes that may compute prompts for them, and draft nodes.
    pub prefill: Vec<Arc<Node>>,
    /// The policy of its plans, unless a request asks for another one.
    pub policy: &'static dyn Policy,
    /// How long a request waits for predicted events.
    pub deadlines: Deadlines,
    /// The measurements of its routes.
    pub routes: Arc<LearnedRoutes>,
    /// Breakers that keep handoffs away from failing pairs of nodes.
    pub pairs: Arc<PairBreakers>,
    /// Counts of departures from plans.
    pub fallbacks: Arc<Fallbacks<FallbackReason>>,
    /// The options of this endpoint's own engine, if it has one. That engine is the first decode node and determines the
    /// model's identity. If it cannot start, another node with one of these names determines it.
    pub own_engine: Option<Arc<WrittenOptions>>,
    /// This endpoint's other engine, which computes prompts with a worker for the own one. It is the first prefill node.
    pub lending_engine: Option<Arc<Node>>,
    /// Its name comes from the configuration and not from a node.
    pub name_is_configured: bool,
    /// Sampling defaults, for settings that a client does not set.
    pub sampling: SamplingFields,
    /// If it is loaded on demand: its process. Requests hold a [`ModelLease`](crate::targets::model_loading::ModelLease).
    pub loadable: Option<Arc<LoadableModel>>,
    /// The endpoint's removed keys, those of the [`ModelPool`](super::ModelPool).
    pub removed_keys: Arc<RemovedKeys>,
    /// Replies whose KV is to go where their prompts were computed. Its successors share them.
    pub returns: Arc<KvReturns>,
    history: ServingHistory,
    identity: OnceLock<ModelIdentity>,
}

impl ServedModel {
    /// A model served by these nodes.
    pub fn new(
        name: OnceLock<String>,
        aliases: Vec<String>,
        decode: Vec<Arc<Node>>,
        prefill: Vec<Arc<Node>>,
    ) -> ServedModel {
        let routes = Arc::new(LearnedRoutes::new(prefill.len(), decode.len()));
        let pairs = Arc::new(PairBreakers::new(prefill.len(), decode.len()));
        ServedModel {
            name_is_configured: name.get().is_some(),
            name,
            aliases,
            n_listed_aliases: 0,
            since: SystemTime::now(),
            history: ServingHistory::new(decode.len()),
            decode,
            prefill,
            policy: PolicyName::default().policy(),
            deadlines: Deadlines::default(),
            routes,
            pairs,
            fallbacks: Arc::default(),
            own_engine: None,
            lending_engine: None,
            sampling: SamplingFields::default(),
            loadable: None,
            removed_keys: Arc::default(),
            returns: Arc::default(),
            identity: OnceLock::new(),
        }
    }

    /// Sets the identity of a model that a node has reported.
    pub fn with_identity(self, identity: ModelIdentity) -> ServedModel {
        ServedModel { identity: OnceLock::from(identity), name_is_configured: false, ..self }
    }

    /// The successor of `old`: the same names with the weights that its nodes run now.
    pub(super) fn with_weights_of(old: &ServedModel, now: &NodeInfo) -> ServedModel {
        let name = if old.name_is_configured { old.name.clone() } else { OnceLock::from(now.model.clone()) };
        let new = ServedModel::new(name, old.aliases.clone(), old.decode.clone(), old.prefill.clone());
        ServedModel {
            fallbacks: Arc::clone(&old.fallbacks),
            own_engine: old.own_engine.clone(),
            lending_engine: old.lending_engine.clone(),
            name_is_configured: old.name_is_configured,
            sampling: old.sampling,
            n_listed_aliases: old.n_listed_aliases,
            loadable: old.loadable.clone(),
            removed_keys: Arc::clone(&old.removed_keys),
            returns: Arc::clone(&old.returns),
            identity: OnceLock::from(ModelIdentity::of(now)),
            ..new
        }
    }

    /// The same model on other nodes. What is known about the routes between nodes that stay is kept.
    pub(super) fn with_nodes(&self, decode: Vec<Arc<Node>>, prefill: Vec<Arc<Node>>) -> ServedModel {
        let places = |new: &[Arc<Node>], old: &[Arc<Node>]| -> Vec<Option<usize>> {
            new.iter().map(|node| old.iter().position(|known| Arc::ptr_eq(known, node))).collect()
        };
        let routes = self.routes.moved(&places(&prefill, &self.prefill), &places(&decode, &self.decode));
        ServedModel {
            routes: Arc::new(routes),
            since: self.since,
            fallbacks: Arc::clone(&self.fallbacks),
            own_engine: self.own_engine.clone(),
            lending_engine: self.lending_engine.clone(),
            name_is_configured: self.name_is_configured,
            n_listed_aliases: self.n_listed_aliases,
            sampling: self.sampling,
            loadable: self.loadable.clone(),
            removed_keys: Arc::clone(&self.removed_keys),
            returns: Arc::clone(&self.returns),
            identity: self.identity.clone(),
            ..ServedModel::new(self.name.clone(), self.aliases.clone(), decode, prefill)
        }
    }

    /// The same model on the same nodes with other names and defaults. It keeps its measurements.
    pub fn with_names(&self, name: OnceLock<String>, aliases: Vec<String>, sampling: SamplingFields) -> ServedModel {
        let same = self.with_nodes(self.decode.clone(), self.prefill.clone());
        let same = ServedModel { name_is_configured: name.get().is_some(), name, aliases, n_listed_aliases: 0, ..same };
        ServedModel {
            policy: self.policy,
            deadlines: self.deadlines,
            sampling,
            routes: Arc::clone(&self.routes),
            pairs: Arc::clone(&self.pairs),
            ..same
        }
    }

    /// The nodes that determine the model's identity.
    fn deciding_nodes(&self) -> &[Arc<Node>] {
        if self.own_engine.is_some() { &self.decode[..1] } else { &self.decode }
    }

    /// All names, the public one first.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.name.get().into_iter().chain(&self.aliases)
    }

    /// Returns true if a name is one of its names. A model whose name is unknown matches any name: the client then gets an
    /// error that asks for a retry, and not the error that there is no such model.
    pub fn has_name(&self, name: &str) -> bool {
        self.name.get().is_none() || self.names().any(|known| model_name::are_same(known, name))
    }

    /// The model's identity: that of the first deciding node that is up. The order of the list counts, and not the order of
    /// the answers. A node that has not answered yet delays the decision until it counts as down after 2 s. Without a
    /// configured name, that node also names the model.
    pub fn identity(&self) -> Option<&ModelIdentity> {
        if let Some(known) = self.identity.get() {
            return Some(known);
        }
        let info = self.deciding_nodes().iter().find_map(|node| {
            let status = node.health.status();
            match status.state() {
                NodeState::Starting | NodeState::Unloaded => Some(None),
                _ => status.running().filter(|info| info.role.decodes()).map(|info| Some(Arc::clone(info))),
            }
        });
        let stands_in = |info: &Arc<NodeInfo>| info.role.decodes() && self.has_name(&info.model);
        let info = match info.flatten() {
            None if self.has_lost_its_engine() => self.decode.iter().filter_map(|node| node.info()).find(stands_in)?,
            info => info?,
        };
        let identity = self.identity.get_or_init(|| ModelIdentity::of(&info));
        if identity.is_same(&ModelIdentity::of(&info)) {
            self.name.get_or_init(|| info.model.clone());
        }
        Some(identity)
    }

    /// Returns true if its own engine could not be started and no other node has determined its identity.
    pub fn has_lost_its_engine(&self) -> bool {
        self.own_engine.is_some() && self.identity.get().is_none() && self.decode[0].is_down()
    }

    /// The reason why a node cannot generate for this model now; `None` if it can.
    pub fn bars_decode(&self, info: &NodeInfo) -> Option<BarReason> {
        match self.identity() {
            _ if !info.role.decodes() => Some(BarReason::WrongRole),
            None => Some(BarReason::Starting),
            Some(ours) => ours.difference(&ModelIdentity::of(info)).map(BarReason::Differs),
        }
    }

    /// The reason why a node cannot compute prompts for this model; `None` if it probably can: the decode node checks again.
    pub fn bars_prefill(&self, info: &NodeInfo) -> Option<BarReason> {
        match self.identity() {
            _ if !info.role.prefills() => Some(BarReason::WrongRole),
            None if self.decode.iter().any(|node| node.health.state() == NodeState::Starting) => {
                Some(BarReason::Starting)
            }
            None => Some(BarReason::NoDecodeNode),
            Some(ours) => ours.bars_kv_of(&ModelIdentity::of(info)).or_else(|| self.refused_by_all(info)),
        }
    }

    /// The reason why no ready decode node takes a node's KV, although it has the right form.
    fn refused_by_all(&self, info: &NodeInfo) -> Option<BarReason> {
        let generating = self.decode.iter().filter_map(|node| self.ready_decode(node));
        let refusals: Option<Vec<BarReason>> = generating.map(|decode| bars_handoff(info, &decode)).collect();
        refusals?.into_iter().next()
    }

    /// The reason why no handoff is planned between two nodes that are ready or sleep, whatever their breaker says.
    pub fn bars_pair(&self, prefill: usize, decode: usize) -> Option<BarReason> {
        let (prefill, decode) = (self.prefill.get(prefill)?, self.decode.get(decode)?);
        if prefill.socket.is_some() && decode.url.is_some() {
            // Another machine does not reach it.
            return Some(BarReason::PREFILL_DOWN);
        }
        bars_handoff(&*prefill.planned_info()?, &*decode.planned_info()?)
    }

    /// The engine's description. While the model is not loaded: the engine's last description, or that from its file.
    pub fn described(&self) -> Option<Arc<NodeInfo>> {
        let ready = self.decode.iter().find_map(|node| self.ready_decode(node));
        let not_loaded = || {
            let loadable = self.loadable.as_ref()?;
            self.decode.first().and_then(|node| node.last_info()).or_else(|| loadable.outline())
        };
        ready.or_else(not_loaded)
    }

    /// The node's description, if the node is ready and generates for this model.
    pub fn ready_decode(&self, node: &Node) -> Option<Arc<NodeInfo>> {
        node.info().filter(|info| self.bars_decode(info).is_none())
    }

    /// The same, if the node also supports the request's images.
    pub fn ready_supporting(&self, node: &Node, need: ImageNeed<'_>) -> Option<Arc<NodeInfo>> {
        self.ready_decode(node).filter(|info| need.is_met_by(info))
    }

    /// The places of the ready decode nodes: as many as their engines have slots.
    pub fn places(&self) -> Vec<Arc<TargetPlaces>> {
        let of_node = |node: &Arc<Node>| {
            node.places.set(self.ready_decode(node)?.n_slots as usize);
            Some(Arc::clone(&node.places))
        };
        self.decode.iter().filter_map(of_node).collect()
    }

    /// Waits until other places than these can be taken. Errors: no node is ready, nor will be soon.
    pub async fn other_places(
        &self,
        name: Option<&str>,
        known: &[Arc<TargetPlaces>],
        wait: NodeWait,
    ) -> Result<(), RequestError> {
        let patience = if wait == NodeWait::ForNodes && !known.is_empty() { RETURN_WAIT } else { Duration::ZERO };
        let mut give_up_at = Instant::now() + patience;
        loop {
            if wait == NodeWait::NotAtAll && self.places().is_empty() {
                return Err(RequestError::unavailable("no engine is ready", Duration::from_secs(1)));
            }
            match self.ready_node(name, &[], ImageNeed::None).await {
                Ok(_) => give_up_at = Instant::now() + patience,
                // Nothing else can answer.
                Err(_) if wait == NodeWait::ForNodes && self.can_wake() => self.wake_one().await,
                Err(error) if Instant::now() >= give_up_at => return Err(error),
                Err(_) => {}
            }
            let now = self.places();
            let is_other = |(now, known): (&Arc<_>, &Arc<_>)| !Arc::ptr_eq(now, known);
            let has_changed = now.len() != known.len() || now.iter().zip(known).any(is_other);
            if has_changed && !now.is_empty() {
                return Ok(());
            }
            tokio::time::sleep(PLACES_INTERVAL).await;
        }
    }

    /// The longest context of the ready nodes and the node that reported `known`.
    pub fn longest_context(&self, known: &NodeInfo) -> u32 {
        let others = self.decode.iter().filter_map(|node| self.ready_decode(node));
        others.map(|info| info.n_ctx).max().unwrap_or(0).max(known.n_ctx)
    }

    /// A ready decode node that supports the request's images, and its description. Waits for nodes that are starting.
    ///
    /// Prefers a node that is not in `failed`, then a trusted one, then the longest context. If no node supports the images,
    /// returns any ready node, whose refusal is the answer. `name` is the model's name in the request, if it has one: a
    /// model whose own name was unknown until now may have another name.
    ///
    /// Errors: no node is ready in time, or the name is not this model's.
    pub async fn ready_node(
        &self,
        name: Option<&str>,
        failed: &[usize],
        need: ImageNeed<'_>,
    ) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        let found = self.wait_for_ready(failed, need).await?;
        if name.is_none_or(|name| self.has_name(name)) {
            return Ok(found);
        }
        let reason = "its nodes have only now reported their models";
        Err(RequestError::unavailable(reason, Duration::from_secs(1)))
    }

    async fn wait_for_ready(
        &self,
        failed: &[usize],
        need: ImageNeed<'_>,
    ) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        if let Some(best) = self.best_ready(failed, need) {
            return Ok(best);
        }
        let mut last = None;
        let mut waits: FuturesUnordered<_> = self.decode.iter().map(|node| node.ready()).collect();
        while let Some(outcome) = waits.next().await {
            // Each answer may determine the model's identity, and so which of the other nodes serve it.
            if let Some(best) = self.best_ready(failed, need) {
                return Ok(best);
            }
            last = outcome.err().or(last);
        }
        Err(last.unwrap_or_else(|| RequestError::unavailable(self.why_unserved(), READY_WAIT)))
    }

    /// Why none of its nodes generates for it, although they answer.
    pub fn why_unserved(&self) -> &'static str {
        match self.decode.iter().all(|node| node.info().is_some_and(|info| !info.role.decodes())) {
            true => "the nodes that are to generate only compute prompts (--role prefill)",
            false => "no node runs what a model's name stands for",
        }
    }

    /// Decides what happens to the model. Call it regularly: it also notes which nodes have served the model.
    pub(super) fn fate(&self) -> ModelFate {
        let Some(ours) = self.identity() else { return ModelFate::Stays };
        // A node that was restarted under the same name, or one that served the model under its configured name.
        let may_take_name =
            |info: &NodeInfo, has_run: bool| self.has_name(&info.model) || (self.name_is_configured && has_run);
        self.history.fate(ours, self.deciding_nodes(), self.name_is_configured, may_take_name)
    }

    fn best_ready(&self, failed: &[usize], need: ImageNeed<'_>) -> Option<(&Arc<Node>, Arc<NodeInfo>)> {
        let need = if self.n_supporting(need) == 0 { ImageNeed::None } else { need };
        let nodes = self.decode.iter().enumerate();
        let ready = nodes.filter_map(|(i, node)| Some((i, node, self.ready_supporting(node, need)?)));
        let best =
            ready.rev().max_by_key(|(i, node, info)| (!failed.contains(i), node.is_trusted(Task::Decode), info.n_ctx));
        best.map(|(_, node, info)| (node, info))
    }
}
