//! The poison mark: the engine processes that ended under a request, which decide if another engine gets it.
//!
//! A request that crashes its engine would crash the next one, too, and failover would carry it through the cluster. So a
//! request that has lost an engine is a suspect until it receives a token. Two rules follow:
//!
//! 1. A suspect goes to a node without another suspect, if it finds one before its patience is over. A suspect without any
//!    token from the lost engine is not handed over either, so that only one process works on it.
//! 2. If two processes have ended under a request since its last token, and the request shared the last of them with no
//!    other suspect, the request is the cause: it ends with [`EngineError::Poison`].
//!
//! Innocent requests become suspects together with the cause. They are cleared one after another by their next tokens.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use futures::future::join_all;

use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::nodes::{Node, SuspectStay, Task, probe};

/// The processes that may end under a request before it counts as the cause.
const MAX_PROCESSES: usize = 2;

/// How long a suspect without any token from its lost engine waits for a node without other suspects. Most crashes happen
/// in the prompt, so such a suspect is the likely cause.
const PROMPT_PATIENCE: Duration = Duration::from_secs(8);

/// The same for a suspect that was generating. Its reader waits for the next token.
const STREAM_PATIENCE: Duration = Duration::from_secs(3);

/// A request's poison mark. It travels with the request from engine to engine. A clone is the mark of another choice of the
/// same request.
#[derive(Clone)]
pub struct PoisonMark {
    /// Identifies the request on nodes.
    request: u64,
    /// The processes that were lost since the last token.
    lost: Vec<LostProcess>,
}

/// A process on which a request was lost. It may still run: the link may have failed, or the machine may be cut off.
#[derive(Clone)]
struct LostProcess {
    node: Arc<Node>,
    process: u64,
    /// The request had received no token from it.
    in_prompt: bool,
    /// No other suspect was there.
    was_alone: bool,
}

/// The time that a request spends on a node.
pub struct Visit {
    node: Arc<Node>,
    process: u64,
    stay: Option<SuspectStay>,
}

impl Default for PoisonMark {
    fn default() -> PoisonMark {
        PoisonMark { request: rand::random(), lost: Vec::new() }
    }
}

impl PoisonMark {
    /// Returns true if an engine was lost since the last token.
    pub fn is_suspect(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Returns true if an engine was lost before it gave a token.
    pub fn is_of_prompt(&self) -> bool {
        self.lost.iter().any(|lost| lost.in_prompt)
    }

    /// How long the request waits for a node without other suspects.
    pub fn patience(&self) -> Duration {
        if self.is_of_prompt() { PROMPT_PATIENCE } else { STREAM_PATIENCE }
    }

    /// The request goes to this node.
    pub fn visit(&self, node: &Arc<Node>) -> Visit {
        let mut visit = Visit { node: Arc::clone(node), process: node.process(), stay: None };
        visit.note_suspect(self);
        visit
    }

    /// The same on a node that the request has visited before, with the same process.
    pub fn visit_again(&self, visit: &Visit) -> Visit {
        Visit { process: visit.process, ..self.visit(&visit.node) }
    }

    /// The request goes to this node, unless it is a suspect and another suspect is there.
    pub fn visit_alone(&self, node: &Arc<Node>) -> Option<Visit> {
        if !self.is_suspect() {
            return Some(self.visit(node));
        }
        let stay = node.suspects.enter_alone(self.request)?;
        Some(Visit { node: Arc::clone(node), process: node.process(), stay: Some(stay) })
    }

    /// The decode nodes that a suspect avoids, because other suspects are there.
    pub fn avoided(&self, model: &ServedModel) -> Vec<usize> {
        let is_avoided = |node: &Arc<Node>| self.is_suspect() && !node.suspects.is_free_for(self.request);
        (0..model.decode.len()).filter(|i| is_avoided(&model.decode[*i])).collect()
    }

    /// Returns true if a ready and trusted decode node is not in `avoided`.
    pub fn has_other_node(model: &ServedModel, avoided: &[usize], need: ImageNeed<'_>) -> bool {
        let is_open = |node: &Arc<Node>| node.is_trusted(Task::Decode) && model.ready_supporting(node, need).is_some();
        model.decode.iter().enumerate().any(|(i, node)| !avoided.contains(&i) && is_open(node))
    }

    /// The prefill nodes that the request may not use.
    pub fn avoided_prefill(&self, model: &ServedModel) -> Vec<usize> {
        if self.is_of_prompt() { (0..model.prefill.len()).collect() } else { Vec::new() }
    }

    /// The request's engine was lost during this visit, after or before its first token.
    pub fn lost(&mut self, visit: &Visit, has_token: bool) {
        let was_alone = visit.stay.as_ref().is_some_and(SuspectStay::was_alone);
        let is_same = |lost: &&mut LostProcess| Arc::ptr_eq(&lost.node, &visit.node) && lost.process == visit.process;
        match self.lost.iter_mut().find(is_same) {
            Some(known) => known.was_alone |= was_alone,
            None => self.lost.push(LostProcess {
                node: Arc::clone(&visit.node),
                process: visit.process,
                in_prompt: !has_token,
                was_alone,
            }),
        }
    }

    fn was_alone(&self) -> bool {
        self.lost.last().is_some_and(|lost| lost.was_alone)
    }

    /// The request received a token.
    pub fn clear(&mut self) {
        self.lost.clear();
    }

    /// Returns the error of a request that is the cause of the ends of its engines. Asks the nodes of the lost processes if
    /// they have ended; the request stays a suspect only for those.
    pub async fn verdict(&mut self) -> Option<EngineError> {
        if self.lost.len() < MAX_PROCESSES || !self.was_alone() {
            return None;
        }
        let ended = join_all(self.lost.iter().map(|lost| lost.node.has_ended(lost.process))).await;
        let mut ended = ended.into_iter();
        self.lost.retain(|_| ended.next().unwrap_or(false));
        let is_cause = self.lost.len() >= MAX_PROCESSES && self.was_alone();
        is_cause.then(|| {
            let nodes: Vec<&str> = self.lost.iter().map(|lost| lost.node.name.as_str()).collect();
            tracing::error!(?nodes, "these nodes' processes ended under one request; no other engine gets the request");
            EngineError::Poison { n_processes: self.lost.len() as u32 }
        })
    }
}

impl Visit {
    /// The node.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// If the request has become a suspect on another node meanwhile, it is one here, too.
    pub fn note_suspect(&mut self, mark: &PoisonMark) {
        if mark.is_suspect() {
            self.stay.get_or_insert_with(|| self.node.suspects.enter(mark.request)).suspect();
        }
    }

    /// Another node computes the prompt. If both nodes are lost together, this shows who else was here.
    pub fn note_handoff(&mut self, mark: &PoisonMark) {
        self.stay.get_or_insert_with(|| self.node.suspects.enter_unsuspected(mark.request));
    }

    /// Asks the node of a suspect if it still runs. A process that ended before it got the request is no evidence. Errors:
    /// the node does not answer.
    pub async fn check(&mut self) -> Result<(), EngineError> {
        self.process = probe::info(&*self.node.engine).await?.process;
        Ok(())
    }

    /// The request received a token from this node.
    pub fn clear(&mut self) {
        self.stay.take().into_iter().for_each(SuspectStay::clear);
    }
}
