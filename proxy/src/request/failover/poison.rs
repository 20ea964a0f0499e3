//! The poison mark: the engine processes that ended under a request, which decide if another engine gets it.
//!
//! A request that crashes its engine would crash the next one, too, and failover would carry it through the cluster. So a
//! choice that has lost an engine is a suspect until another engine has given it [`CLEARING_TOKENS`] tokens. It is a weak
//! suspect if the lost engine had given it as many. The rules:
//!
//! 1. A suspect goes to a node without another suspect, and waits for one unless it is a weak suspect. If the lost engine
//!    gave no token, the prompt is not handed over, so that only one process works on it.
//! 2. The suspected choices of a request, of all its prompts, are tried one after another ([`Turn`]).
//! 3. A prompt is the cause if two processes have ended under its suspected choices, and no other request's suspect was in
//!    the last of them; if three have ended, whoever was there; or if four have ended in the prompt's life. The whole
//!    request ends with [`EngineError::Poison`]. The prompts of one request run on several nodes at once, so processes are
//!    counted for each of them: nodes that end together under many prompts would else be blamed on the request.
//!
//! Innocent requests become suspects together with the cause. They are cleared one after another by their next tokens.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_link::awake;
use baton_schemas::EngineError;
use futures::future::join_all;
use tokio::sync::OwnedSemaphorePermit;

use crate::request::poison_case::{CaseState, PoisonCase};
use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::nodes::{Node, SuspectStay, Suspicion, Task, probe};

/// The tokens from one engine that clear a suspect.
const CLEARING_TOKENS: u32 = 16;

/// The processes that may end under a request's suspects if the last of them ends under one that is alone there.
const MAX_ALONE: usize = 2;

/// The same if other suspects were always there.
const MAX_SUSPECTED: usize = 3;

/// The processes that may end under a request in its life.
const MAX_IN_LIFE: usize = 4;

/// How long a suspect without any token from its lost engine waits for a node without other suspects. Most crashes happen
/// in the prompt, so such a suspect is the likely cause.
const PROMPT_PATIENCE: Duration = Duration::from_secs(8);

/// The same for a suspect that had begun to generate. Its reader waits for the next token. Also how long a weak suspect
/// waits for its turn.
const STREAM_PATIENCE: Duration = Duration::from_secs(3);

/// How long another suspect waits for its turn: as long as a stream looks for an engine.
const TURN_PATIENCE: Duration = Duration::from_secs(30);

/// The poison mark of one choice of a prompt. It travels with the choice from engine to engine. A clone is the mark of
/// another choice of the same prompt.
pub struct PoisonMark {
    choice: u64,
    history: Arc<LossHistory>,
}

/// The processes that a prompt has lost. Its choices share it.
struct LossHistory {
    case: PoisonCase,
    n_choices: AtomicU64,
    lost: Mutex<Vec<LostProcess>>,
}

/// The turn of a suspected choice. Until all clones are dropped, the other suspected choices of the request wait.
#[derive(Clone)]
pub struct Turn {
    /// `None` for a choice that has waited in vain.
    _permit: Option<Arc<OwnedSemaphorePermit>>,
}

/// A process on which a prompt was lost.
struct LostProcess {
    node: Arc<Node>,
    process: u64,
    /// False for a process that may still run (the link may have failed, or the machine may be cut off), or that was told
    /// to stop.
    has_crashed: bool,
    /// No other request's suspect was there.
    was_alone: bool,
    /// The choices that were lost here and have not been cleared.
    suspects: BTreeMap<u64, LossPhase>,
}

/// The state of a choice when its engine was lost. The most suspect one comes last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LossPhase {
    /// It had received [`CLEARING_TOKENS`] from the engine.
    Stream,
    /// It had received fewer tokens.
    FirstTokens,
    /// It had received none.
    Prompt,
}

/// The time that a choice spends on a node.
pub struct Visit {
    node: Arc<Node>,
    process: u64,
    n_tokens: u32,
    stay: Option<SuspectStay>,
    turn: Option<Turn>,
}

impl Default for PoisonMark {
    /// The mark of a request with one prompt.
    fn default() -> PoisonMark {
        PoisonMark::of_prompt(&PoisonCase::default())
    }
}

impl Clone for PoisonMark {
    /// If this choice is a suspect, the other one is.
    fn clone(&self) -> PoisonMark {
        let choice = self.history.n_choices.fetch_add(1, Ordering::Relaxed);
        for lost in self.history.lost().iter_mut() {
            if let Some(phase) = lost.suspects.get(&self.choice).copied() {
                lost.suspects.insert(choice, phase);
            }
        }
        PoisonMark { choice, history: Arc::clone(&self.history) }
    }
}

impl Drop for PoisonMark {
    fn drop(&mut self) {
        self.clear();
    }
}

impl LossHistory {
    fn lost(&self) -> MutexGuard<'_, Vec<LostProcess>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true if a request is the cause of the ends of these processes, provided that they have ended.
fn is_cause(lost: &[LostProcess]) -> bool {
    let suspected = || lost.iter().filter(|lost| !lost.suspects.is_empty());
    let was_alone = suspected().next_back().is_some_and(|last| last.was_alone);
    let max_suspected = if was_alone { MAX_ALONE } else { MAX_SUSPECTED };
    suspected().count() >= max_suspected || lost.len() >= MAX_IN_LIFE
}

impl PoisonMark {
    /// The mark of another prompt of the request.
    pub fn of_prompt(case: &PoisonCase) -> PoisonMark {
        let history = LossHistory { case: case.clone(), n_choices: AtomicU64::new(1), lost: Mutex::default() };
        PoisonMark { choice: 0, history: Arc::new(history) }
    }

    fn case(&self) -> &CaseState {
        &self.history.case.0
    }

    /// Returns true if the choice has lost an engine and has not been cleared.
    pub fn is_suspect(&self) -> bool {
        self.phase().is_some()
    }

    /// Returns true if an engine was lost before it gave a token.
    pub fn is_of_prompt(&self) -> bool {
        self.phase() == Some(LossPhase::Prompt)
    }

    /// The most suspect of the choice's losses.
    fn phase(&self) -> Option<LossPhase> {
        self.history.lost().iter().filter_map(|lost| lost.suspects.get(&self.choice).copied()).max()
    }

    fn suspicion(&self) -> Suspicion {
        match self.phase() {
            None => Suspicion::Unsuspected,
            Some(LossPhase::Stream) => Suspicion::Weak,
            Some(LossPhase::FirstTokens | LossPhase::Prompt) => Suspicion::Strong,
        }
    }

    /// How long the choice waits for a node without other suspects. Streams that lost one engine at the same moment lose
    /// their patience at different times.
    pub fn patience(&self) -> Duration {
        let patience = match self.phase() {
            None | Some(LossPhase::Stream) => Duration::ZERO,
            Some(LossPhase::FirstTokens) => STREAM_PATIENCE,
            Some(LossPhase::Prompt) => PROMPT_PATIENCE,
        };
        patience.mul_f64(rand::random_range(0.75..1.25))
    }

    /// Waits until no other suspected choice of the request is being tried, but not for ever. Returns `None` at once if
    /// the choice is no suspect.
    pub async fn turn(&self) -> Option<Turn> {
        let longest = match self.phase()? {
            LossPhase::Stream => STREAM_PATIENCE,
            LossPhase::FirstTokens | LossPhase::Prompt => TURN_PATIENCE,
        };
        let permit = awake::timeout(longest, Arc::clone(&self.case().turns).acquire_owned()).await;
        Some(Turn { _permit: permit.ok().and_then(Result::ok).map(Arc::new) })
    }

    /// The choice goes to this node.
    pub fn visit(&self, node: &Arc<Node>) -> Visit {
        let mut visit = Visit::begin(node, None);
        visit.note_suspect(self);
        visit
    }

    /// The same on a node that the request has visited before, with the same process.
    pub fn visit_again(&self, visit: &Visit) -> Visit {
        Visit { process: visit.process, ..self.visit(&visit.node) }
    }

    /// The choice goes to this node, unless it would have to wait because another suspect is there.
    pub fn visit_alone(&self, node: &Arc<Node>) -> Option<Visit> {
        match self.suspicion() {
            Suspicion::Unsuspected | Suspicion::Weak => Some(self.visit(node)),
            Suspicion::Strong => Some(Visit::begin(node, Some(node.suspects.enter_alone(self.case().request)?))),
        }
    }

    /// The decode nodes that a suspect avoids, because other suspects are there.
    pub fn avoided(&self, model: &ServedModel) -> Vec<usize> {
        let suspicion = self.suspicion();
        let is_avoided = |node: &Arc<Node>| !node.suspects.is_free_for(self.case().request, suspicion);
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

    /// The choice's engine was lost during this visit.
    pub fn lost(&mut self, visit: &Visit) {
        if visit.node.was_stopping(visit.process) {
            return;
        }
        let was_alone = visit.stay.as_ref().is_some_and(SuspectStay::was_alone);
        let is_same = |lost: &&mut LostProcess| Arc::ptr_eq(&lost.node, &visit.node) && lost.process == visit.process;
        let mut list = self.history.lost();
        match list.iter_mut().find(is_same) {
            Some(known) => {
                known.was_alone |= was_alone;
                known.suspects.insert(self.choice, visit.phase());
            }
            None => list.push(LostProcess {
                node: Arc::clone(&visit.node),
                process: visit.process,
                has_crashed: false,
                was_alone,
                suspects: BTreeMap::from([(self.choice, visit.phase())]),
            }),
        }
    }

    /// The choice is no suspect any more. The processes stay in the request's history.
    pub fn clear(&mut self) {
        for lost in self.history.lost().iter_mut() {
            lost.suspects.remove(&self.choice);
        }
    }

    /// Returns the error of a request that is the cause of the ends of its engines. Asks the nodes of the lost processes if
    /// they have crashed, and forgets those that have not.
    pub async fn verdict(&mut self) -> Option<EngineError> {
        if let Some(&n_processes) = self.case().verdict.get() {
            return Some(EngineError::Poison { n_processes });
        }
        if !is_cause(&self.history.lost()) {
            return None;
        }
        let is_unsure = |lost: &&LostProcess| !lost.has_crashed;
        let unsure: Vec<(Arc<Node>, u64)> =
            self.history.lost().iter().filter(is_unsure).map(|lost| (Arc::clone(&lost.node), lost.process)).collect();
        let crashed = join_all(unsure.iter().map(|(node, process)| node.has_crashed(*process))).await;
        let mut list = self.history.lost();
        for ((node, process), has_crashed) in unsure.iter().zip(crashed) {
            let is_same = |lost: &LostProcess| Arc::ptr_eq(&lost.node, node) && lost.process == *process;
            list.iter_mut().filter(|lost| is_same(lost)).for_each(|lost| lost.has_crashed = has_crashed);
            list.retain(|lost| has_crashed || !is_same(lost));
        }
        is_cause(&list).then(|| {
            let nodes: Vec<&str> = list.iter().map(|lost| lost.node.name.as_str()).collect();
            tracing::error!(?nodes, "these nodes' processes ended under one request; no other engine gets the request");
            let n_processes = *self.case().verdict.get_or_init(|| list.len() as u32);
            EngineError::Poison { n_processes }
        })
    }
}

impl Visit {
    fn begin(node: &Arc<Node>, stay: Option<SuspectStay>) -> Visit {
        Visit { node: Arc::clone(node), process: node.process(), n_tokens: 0, stay, turn: None }
    }

    /// The node.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    fn phase(&self) -> LossPhase {
        match self.n_tokens {
            0 => LossPhase::Prompt,
            1..CLEARING_TOKENS => LossPhase::FirstTokens,
            _ => LossPhase::Stream,
        }
    }

    /// If the choice has become a suspect on another node meanwhile, it is one here, too.
    pub fn note_suspect(&mut self, mark: &PoisonMark) {
        let suspicion = mark.suspicion();
        if suspicion > Suspicion::Unsuspected {
            let request = mark.case().request;
            self.stay.get_or_insert_with(|| self.node.suspects.enter(request, suspicion)).suspect(suspicion);
        }
    }

    /// Another node computes the prompt. If both nodes are lost together, this shows who else was here.
    pub fn note_handoff(&mut self, mark: &PoisonMark) {
        let request = mark.case().request;
        self.stay.get_or_insert_with(|| self.node.suspects.enter(request, Suspicion::Unsuspected));
    }

    /// It is the turn of this choice until it is cleared. If it is lost here, it takes its turn along.
    pub fn keep_turn(&mut self, turn: Option<Turn>) {
        self.turn = turn;
    }

    /// The choice leaves the node. It keeps its turn until the verdict, so that no other choice is tried before.
    pub fn take_turn(&mut self) -> Option<Turn> {
        self.turn.take()
    }

    /// Asks the node of a suspect if it still runs. A process that ended before it got the request is no evidence. Errors:
    /// the node does not answer.
    pub async fn check(&mut self) -> Result<(), EngineError> {
        self.process = probe::info(&*self.node.engine).await?.process;
        Ok(())
    }

    /// The choice received a token from this node.
    pub fn token(&mut self, mark: &mut PoisonMark) {
        self.n_tokens = self.n_tokens.saturating_add(1);
        let is_few = self.n_tokens < CLEARING_TOKENS;
        if self.n_tokens == CLEARING_TOKENS || is_few && !mark.is_suspect() {
            self.clear(mark);
        }
    }

    /// The choice is no suspect any more. If the process ends later, it does not excuse the others.
    pub fn clear(&mut self, mark: &mut PoisonMark) {
        mark.clear();
        self.stay.take().into_iter().for_each(SuspectStay::clear);
        self.turn = None;
    }
}
