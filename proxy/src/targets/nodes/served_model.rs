//! A model under its public names, and the nodes that may serve it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use baton_planner::deadlines::Deadlines;
use baton_planner::policy::{Policy, PolicyName};
use baton_planner::reason::BarReason;
use baton_schemas::node::NodeInfo;
use baton_schemas::sampling_fields::SamplingFields;
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use super::succession::History;
use super::{FallbackReason, Fallbacks, Identity, Life, Node, Pairs, READY_WAIT, Routes, Sight, Task, unavailable};
use crate::error::RequestError;
use crate::model_name;
use crate::targets::model_loading::Resident;

/// See the module. Its lists may hold nodes that turn out to run another model; those are barred.
pub struct ServedModel {
    /// The name in `/v1/models`. Unset until a node has said what it runs, if nobody gave it another name.
    pub name: OnceLock<String>,
    /// Other names that find it.
    pub aliases: Vec<String>,
    /// When it was put into service, for `created`.
    pub since: SystemTime,
    /// Nodes that may generate, at least one.
    pub decode: Vec<Arc<Node>>,
    /// Nodes that may compute prompts for them.
    pub prefill: Vec<Arc<Node>>,
    /// How requests are planned unless they ask for another way.
    pub policy: &'static dyn Policy,
    /// How long is waited for what a plan predicts.
    pub deadlines: Deadlines,
    /// What was learned about routes.
    pub routes: Arc<Routes>,
    /// Keep handoffs away from pairs of nodes that cannot do one together.
    pub pairs: Arc<Pairs>,
    /// How often its requests had to go another way than planned.
    pub fallbacks: Arc<Fallbacks<FallbackReason>>,
    /// Its first decode node is this endpoint's own engine, and says what the model is. If it cannot start, a node may
    /// that has the model under one of these names.
    pub has_own_engine: bool,
    /// The operator has named it, and not a node.
    pub name_is_configured: bool,
    /// How tokens are drawn where a client does not say.
    pub sampling: SamplingFields,
    /// Its process comes and goes with its requests, which hold a [`Stay`](crate::targets::model_loading::Stay).
    pub resident: Option<Arc<Resident>>,
    /// Which decode nodes have run it; see [`succession`](super::succession).
    pub(super) history: History,
    identity: OnceLock<Identity>,
}

impl ServedModel {
    /// A model served by these nodes.
    pub fn new(
        name: OnceLock<String>,
        aliases: Vec<String>,
        decode: Vec<Arc<Node>>,
        prefill: Vec<Arc<Node>>,
    ) -> ServedModel {
        let routes = Arc::new(Routes::new(prefill.len(), decode.len()));
        let pairs = Arc::new(Pairs::new(prefill.len(), decode.len()));
        ServedModel {
            name_is_configured: name.get().is_some(),
            name,
            aliases,
            since: SystemTime::now(),
            history: History::of(decode.len()),
            decode,
            prefill,
            policy: PolicyName::default().policy(),
            deadlines: Deadlines::default(),
            routes,
            pairs,
            fallbacks: Arc::default(),
            has_own_engine: false,
            sampling: SamplingFields::default(),
            resident: None,
            identity: OnceLock::new(),
        }
    }

    /// The same, of a model that a node has told of.
    pub fn with_identity(self, identity: Identity) -> ServedModel {
        ServedModel { identity: OnceLock::from(identity), name_is_configured: false, ..self }
    }

    /// Takes the place of `old`, under the same names, for what its nodes run now.
    pub(super) fn succeeding(old: &ServedModel, now: &NodeInfo) -> ServedModel {
        let name = if old.name_is_configured { old.name.clone() } else { OnceLock::from(now.model.clone()) };
        let new = ServedModel::new(name, old.aliases.clone(), old.decode.clone(), old.prefill.clone());
        ServedModel {
            fallbacks: Arc::clone(&old.fallbacks),
            has_own_engine: old.has_own_engine,
            name_is_configured: old.name_is_configured,
            sampling: old.sampling,
            resident: old.resident.clone(),
            identity: OnceLock::from(Identity::of(now)),
            ..new
        }
    }

    /// The same model on other nodes. What was learned of its routes is learned anew.
    pub(super) fn on(&self, decode: Vec<Arc<Node>>, prefill: Vec<Arc<Node>>) -> ServedModel {
        ServedModel {
            since: self.since,
            fallbacks: Arc::clone(&self.fallbacks),
            has_own_engine: self.has_own_engine,
            name_is_configured: self.name_is_configured,
            sampling: self.sampling,
            resident: self.resident.clone(),
            identity: self.identity.clone(),
            ..ServedModel::new(self.name.clone(), self.aliases.clone(), decode, prefill)
        }
    }

    /// The same model on the same nodes under other names, with other defaults. What was learned of it stays.
    pub fn under(&self, name: OnceLock<String>, aliases: Vec<String>, sampling: SamplingFields) -> ServedModel {
        let (decode, prefill) = (self.decode.clone(), self.prefill.clone());
        let same = ServedModel { name_is_configured: name.get().is_some(), name, aliases, ..self.on(decode, prefill) };
        let (policy, deadlines, pairs) = (self.policy, self.deadlines, Arc::clone(&self.pairs));
        ServedModel { policy, deadlines, sampling, routes: Arc::clone(&self.routes), pairs, ..same }
    }

    /// The nodes that say what the model is.
    pub(super) fn telling(&self) -> &[Arc<Node>] {
        if self.has_own_engine { &self.decode[..1] } else { &self.decode }
    }

    /// All names, the public one first.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.name.get().into_iter().chain(&self.aliases)
    }

    /// While its own name is not known a model answers to any: whoever asks is to come back, and not to be told that
    /// there is no such model.
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.name.get().is_none() || self.names().any(|known| model_name::are_same(known, name))
    }

    /// What the model is: what the first of its nodes runs that is up. So nodes that have not answered yet are waited
    /// for (they count as down after 2 s), and which of two is faster decides nothing. Where nobody has named the model,
    /// that also gives it its name.
    pub fn identity(&self) -> Option<&Identity> {
        if let Some(known) = self.identity.get() {
            return Some(known);
        }
        let info = self.telling().iter().find_map(|node| {
            let status = node.health.status();
            match status.life() {
                Life::Starting | Life::Unloaded => Some(None),
                _ => status.running().filter(|info| info.role.decodes()).map(|info| Some(Arc::clone(info))),
            }
        });
        let stands_in = |info: &Arc<NodeInfo>| info.role.decodes() && self.is_called(&info.model);
        let info = match info.flatten() {
            None if self.has_lost_its_engine() => self.decode.iter().filter_map(|node| node.info()).find(stands_in)?,
            info => info?,
        };
        let identity = self.identity.get_or_init(|| Identity::of(&info));
        if identity.is_same(&Identity::of(&info)) {
            self.name.get_or_init(|| info.model.clone());
        }
        Some(identity)
    }

    /// Its own engine could not be started, and nobody else has said what the model is.
    pub fn has_lost_its_engine(&self) -> bool {
        self.has_own_engine && self.identity.get().is_none() && self.decode[0].has_failed()
    }

    /// Why a node cannot generate for this model, as it is now.
    pub fn bars_decode(&self, info: &NodeInfo) -> Option<BarReason> {
        match self.identity() {
            _ if !info.role.decodes() => Some(BarReason::WrongRole),
            None => Some(BarReason::Starting),
            Some(ours) => (!ours.is_same(&Identity::of(info))).then_some(BarReason::OtherModel),
        }
    }

    /// Why a node cannot compute prompts for this model. The decode node has the last word; this saves it the attempt.
    pub fn bars_prefill(&self, info: &NodeInfo) -> Option<BarReason> {
        match self.identity() {
            _ if !info.role.prefills() => Some(BarReason::WrongRole),
            None => Some(BarReason::Starting),
            Some(ours) => (!ours.takes_kv_of(&Identity::of(info))).then_some(BarReason::FINGERPRINT_MISMATCH),
        }
    }

    /// What is known of it: what its engine says, or while it is not loaded what it or its file said.
    pub fn described(&self) -> Option<Arc<NodeInfo>> {
        let ready = self.decode.iter().find_map(|node| self.ready_decode(node));
        let resident = || {
            let resident = self.resident.as_ref()?;
            self.decode.first().and_then(|node| node.last_info()).or_else(|| resident.outline())
        };
        ready.or_else(resident)
    }

    /// What a node is, if it is ready and generates for this model.
    pub fn ready_decode(&self, node: &Node) -> Option<Arc<NodeInfo>> {
        node.info().filter(|info| self.bars_decode(info).is_none())
    }

    /// The same, if it sees what a request needs it to see.
    pub fn ready_seeing(&self, node: &Node, sight: Sight<'_>) -> Option<Arc<NodeInfo>> {
        self.ready_decode(node).filter(|info| sight.is_met_by(info))
    }

    /// Decode nodes that see it, now or when they are back. One that has not said yet what it runs may be one of them.
    pub fn n_seeing(&self, sight: Sight<'_>) -> usize {
        let sees = |info: &NodeInfo| self.bars_decode(info).is_none() && sight.is_met_by(info);
        self.decode.iter().filter(|node| node.last_info().is_none_or(|info| sees(&info))).count()
    }

    /// Tokens that one sequence may hold on the best of the nodes that are up, of which one is this.
    pub fn longest_context(&self, known: &NodeInfo) -> u32 {
        let others = self.decode.iter().filter_map(|node| self.ready_decode(node));
        others.map(|info| info.n_ctx).max().unwrap_or(0).max(known.n_ctx)
    }

    /// [`any_ready_but`](Self::any_ready_but) for a request that names its model. While a model has no name it is taken for
    /// any; by now its node has told which it is.
    pub async fn ready_as(
        &self,
        name: &str,
        failed: &[usize],
        sight: Sight<'_>,
    ) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        let found = self.any_ready_but(failed, sight).await?;
        if self.is_called(name) {
            return Ok(found);
        }
        Err(unavailable("its nodes have only now said which models they run", Duration::from_secs(1)))
    }

    /// [`ready_as`](Self::ready_as) for a request that names its model, else [`any_ready_but`](Self::any_ready_but).
    pub async fn ready_for(
        &self,
        name: Option<&str>,
        failed: &[usize],
        sight: Sight<'_>,
    ) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        match name {
            Some(name) => self.ready_as(name, failed, sight).await,
            None => self.any_ready_but(failed, sight).await,
        }
    }

    /// A decode node that is ready and sees what it needs to, and what it is. Waits for one that is starting. Not one
    /// of those that have just failed, if there is another; then one that is trusted; then the one with the longest
    /// context. Where all nodes are known not to see it, any that is ready: it tells.
    pub async fn any_ready_but(
        &self,
        failed: &[usize],
        sight: Sight<'_>,
    ) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        if let Some(best) = self.best_ready(failed, sight) {
            return Ok(best);
        }
        let mut last = unavailable("no engine serves this model", READY_WAIT);
        let mut waits: FuturesUnordered<_> = self.decode.iter().map(|node| node.ready()).collect();
        while let Some(outcome) = waits.next().await {
            // Each of them may settle what the model is, and so which of the others serve it.
            if let Some(best) = self.best_ready(failed, sight) {
                return Ok(best);
            }
            if let Err(error) = outcome {
                last = error;
            }
        }
        Err(last)
    }

    fn best_ready(&self, failed: &[usize], sight: Sight<'_>) -> Option<(&Arc<Node>, Arc<NodeInfo>)> {
        let sight = if self.n_seeing(sight) == 0 { Sight::Unneeded } else { sight };
        let nodes = self.decode.iter().enumerate();
        let ready = nodes.filter_map(|(i, node)| Some((i, node, self.ready_seeing(node, sight)?)));
        let best =
            ready.rev().max_by_key(|(i, node, info)| (!failed.contains(i), node.is_trusted(Task::Decode), info.n_ctx));
        best.map(|(_, node, info)| (node, info))
    }
}
