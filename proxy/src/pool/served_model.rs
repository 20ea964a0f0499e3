//! A model under its public names, and the nodes that may serve it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use baton_schemas::node::NodeInfo;
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use super::{Fallbacks, Identity, Node, READY_WAIT, Routes, names, unavailable};
use crate::error::RequestError;
use crate::plan::policy::{POLICIES, Policy};

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
    /// What was learned about routes.
    pub routes: Routes,
    /// How often its requests had to go another way than planned.
    pub fallbacks: Fallbacks,
    /// Its first decode node is this endpoint's own engine, and alone says what the model is.
    pub has_own_engine: bool,
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
        let routes = Routes::new(prefill.len(), decode.len());
        let (since, fallbacks) = (SystemTime::now(), Fallbacks::default());
        let (policy, has_own_engine, identity) = (POLICIES[0], false, OnceLock::new());
        ServedModel { name, aliases, since, decode, prefill, policy, routes, fallbacks, has_own_engine, identity }
    }

    /// The same, of a model that a node has told of.
    pub fn with_identity(self, identity: Identity) -> ServedModel {
        ServedModel { identity: OnceLock::from(identity), ..self }
    }

    /// All names, the public one first.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.name.get().into_iter().chain(&self.aliases)
    }

    /// While its own name is not known a model answers to any: whoever asks is to come back, and not to be told that
    /// there is no such model.
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.name.get().is_none() || self.names().any(|known| names::are_same(known, name))
    }

    /// What the model is, once one of its nodes has said so. Where nobody has named it, that also gives it its name.
    pub fn identity(&self) -> Option<&Identity> {
        if let Some(known) = self.identity.get() {
            return Some(known);
        }
        let telling = if self.has_own_engine { &self.decode[..1] } else { &self.decode[..] };
        let info = telling.iter().filter_map(|node| node.info()).find(|info| info.role.decodes())?;
        let identity = self.identity.get_or_init(|| Identity::of(&info));
        if identity.is_same(&Identity::of(&info)) {
            self.name.get_or_init(|| info.model.clone());
        }
        Some(identity)
    }

    /// Why a node cannot generate for this model, as it is now.
    pub fn bars_decode(&self, info: &NodeInfo) -> Option<&'static str> {
        match self.identity() {
            _ if !info.role.decodes() => Some("wrong_role"),
            None => Some("starting"),
            Some(ours) => (!ours.is_same(&Identity::of(info))).then_some("other_model"),
        }
    }

    /// Why a node cannot compute prompts for this model. The decode node has the last word; this saves it the attempt.
    pub fn bars_prefill(&self, info: &NodeInfo) -> Option<&'static str> {
        match self.identity() {
            _ if !info.role.prefills() => Some("wrong_role"),
            None => Some("starting"),
            Some(ours) => (!ours.takes_kv_of(&Identity::of(info))).then_some("fingerprint_mismatch"),
        }
    }

    /// What a node is, if it is ready and generates for this model.
    pub fn ready_decode(&self, node: &Node) -> Option<Arc<NodeInfo>> {
        node.info().filter(|info| self.bars_decode(info).is_none())
    }

    /// [`any_ready_but`](Self::any_ready_but) for a request that names its model. While a model has no name it is taken for
    /// any; by now its node has told which it is.
    pub async fn ready_as(&self, name: &str, failed: &[usize]) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        let found = self.any_ready_but(failed).await?;
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
    ) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        match name {
            Some(name) => self.ready_as(name, failed).await,
            None => self.any_ready_but(failed).await,
        }
    }

    /// A decode node that is ready, and what it is. Waits for one that is starting.
    pub async fn any_ready(&self) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        self.any_ready_but(&[]).await
    }

    /// The same: not one of those that have just failed, if there is another; then one whose breaker is closed; then the one
    /// with the longest context.
    pub async fn any_ready_but(&self, failed: &[usize]) -> Result<(&Arc<Node>, Arc<NodeInfo>), RequestError> {
        let ready = self.decode.iter().enumerate().filter_map(|(i, node)| Some((i, node, self.ready_decode(node)?)));
        let best =
            ready.rev().max_by_key(|(i, node, info)| (!failed.contains(i), node.breaker.would_pass(), info.n_ctx));
        if let Some((_, node, info)) = best {
            return Ok((node, info));
        }
        let mut last = unavailable("no engine serves this model", READY_WAIT);
        let waits = self.decode.iter().map(|node| Box::pin(async move { Ok((node, node.ready().await?)) }));
        let mut waits: FuturesUnordered<_> = waits.collect();
        while let Some(outcome) = waits.next().await {
            match outcome {
                Ok((node, info)) if self.bars_decode(&info).is_none() => return Ok((node, info)),
                // It runs another model.
                Ok(_) => {}
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}
