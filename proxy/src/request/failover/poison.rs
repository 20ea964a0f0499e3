//! The poison mark: the engine processes that ended under a request, and its quarantine.
//!
//! A request that crashes its engine would crash the next one, too, and failover would carry it through the cluster. So a
//! choice that has lost an engine goes on in the [`Quarantine`](crate::targets::nodes::Quarantine) of a node until the node
//! has given it [`CLEARING_TOKENS`] tokens. The rules:
//!
//! 1. It waits until it is alone there, and its prompt is not handed over. If the lost engine had given it as many tokens,
//!    it is only watched: it goes on at once.
//! 2. The choices of a request, of all its prompts, are in quarantine one after another.
//! 3. If a process ends under a choice that is alone in quarantine, its request is the cause. So is one that has lost
//!    [`MAX_IN_LIFE`] processes. It ends with [`EngineError::Poison`]. Processes are counted for each prompt: the prompts
//!    of a request run on several nodes at once, and nodes that end together would else be blamed on the request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_link::awake;
use baton_schemas::EngineError;
use futures::future::join_all;
use tokio::sync::OwnedSemaphorePermit;

use crate::request::poison_case::PoisonCase;
use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::nodes::{Node, QuarantineLevel, QuarantineStay, Task, probe};

/// The tokens from one engine that end a quarantine.
const CLEARING_TOKENS: u32 = 16;

/// The processes that may end under a prompt if one of them ends while its choice is alone in quarantine.
const MAX_ALONE: usize = 2;

/// The processes that may end under a prompt in its life.
const MAX_IN_LIFE: usize = 4;

/// How long an isolated choice waits for a node where it is alone.
const ALONE_PATIENCE: Duration = Duration::from_secs(8);

/// How long it waits for its turn: as long as a stream looks for an engine.
const TURN_PATIENCE: Duration = Duration::from_secs(30);

/// The same for a watched choice, whose reader waits for the next token.
const WATCHED_TURN_PATIENCE: Duration = Duration::from_secs(3);

/// The poison mark of one choice of a prompt. It travels with the choice from engine to engine. A clone is the mark of
/// another choice of the same prompt, in the same quarantine.
#[derive(Clone)]
pub struct PoisonMark {
    case: PoisonCase,
    /// The processes that the prompt has lost. Its choices share them.
    lost: Arc<Mutex<Vec<LostProcess>>>,
    level: QuarantineLevel,
    /// A process was lost in quarantine while the choice was alone there.
    was_alone: bool,
    turn: Option<Turn>,
    stay: Option<Arc<Stay>>,
}

/// The turn of a choice in quarantine. Until all clones are dropped, the other choices of the request wait for their turn. `None` after a wait in vain.
type Turn = Option<Arc<OwnedSemaphorePermit>>;

/// The stay in the quarantine of this process's node.
struct Stay {
    quarantine: QuarantineStay,
    process: u64,
}

/// A process on which a prompt was lost. It may still run: the link may have failed, or the machine may be cut off.
#[derive(Clone)]
struct LostProcess {
    node: Arc<Node>,
    process: u64,
}

/// The time that a choice spends on a node.
#[derive(Clone)]
pub struct Visit {
    node: Arc<Node>,
    process: u64,
    n_tokens: u32,
}

impl LostProcess {
    fn is_of(&self, node: &Arc<Node>, process: u64) -> bool {
        Arc::ptr_eq(&self.node, node) && self.process == process
    }
}

impl Visit {
    /// A visit that begins, for a prompt only or for a choice.
    pub fn of_prompt(node: &Arc<Node>) -> Visit {
        Visit { node: Arc::clone(node), process: node.process(), n_tokens: 0 }
    }

    /// The node.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }
}

impl Default for PoisonMark {
    /// The mark of a request with one prompt.
    fn default() -> PoisonMark {
        PoisonMark::of_prompt(&PoisonCase::default())
    }
}

impl PoisonMark {
    /// The mark of another prompt of the request.
    pub fn of_prompt(case: &PoisonCase) -> PoisonMark {
        let lost = Arc::default();
        PoisonMark { case: case.clone(), lost, level: QuarantineLevel::Free, was_alone: false, turn: None, stay: None }
    }

    /// The mark of a choice that starts later, in a quarantine of its own.
    pub fn of_late_choice(&self) -> PoisonMark {
        PoisonMark { turn: None, stay: None, ..self.clone() }
    }

    fn lost_processes(&self) -> MutexGuard<'_, Vec<LostProcess>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the choice has lost an engine since its last `CLEARING_TOKENS` tokens.
    pub fn is_quarantined(&self) -> bool {
        self.level > QuarantineLevel::Free
    }

    /// Waits until no other choice of the request is in quarantine, but not for ever. Returns true if the choice had to get
    /// its turn.
    pub async fn take_turn(&mut self) -> bool {
        let longest = match self.level {
            QuarantineLevel::Free => return false,
            QuarantineLevel::Watched => WATCHED_TURN_PATIENCE,
            QuarantineLevel::Isolated => TURN_PATIENCE,
        };
        if self.turn.is_some() {
            return false;
        }
        let permit = awake::timeout(longest, Arc::clone(&self.case.turns).acquire_owned()).await;
        self.turn = Some(permit.ok().and_then(Result::ok).map(Arc::new));
        true
    }

    /// How long the choice waits to be alone. Streams that lost one engine at the same moment lose their patience at
    /// different times.
    pub fn patience(&self) -> Duration {
        match self.level {
            QuarantineLevel::Free | QuarantineLevel::Watched => Duration::ZERO,
            QuarantineLevel::Isolated => ALONE_PATIENCE.mul_f64(rand::random_range(0.75..1.25)),
        }
    }

    /// The decode nodes that the choice keeps away from.
    pub fn avoided(&self, model: &ServedModel) -> Vec<usize> {
        let is_avoided = |i: &usize| !model.decode[*i].quarantine.is_open_for(self.level);
        (0..model.decode.len()).filter(is_avoided).collect()
    }

    /// Returns true if a ready and trusted decode node is not in `avoided`.
    pub fn has_other_node(model: &ServedModel, avoided: &[usize], need: ImageNeed<'_>) -> bool {
        let is_open = |node: &Arc<Node>| node.is_trusted(Task::Decode) && model.ready_supporting(node, need).is_some();
        model.decode.iter().enumerate().any(|(i, node)| !avoided.contains(&i) && is_open(node))
    }

    /// The prefill nodes that the choice may not use: only one process works on an isolated one.
    pub fn avoided_prefill(&self, model: &ServedModel) -> Vec<usize> {
        if self.level == QuarantineLevel::Isolated { (0..model.prefill.len()).collect() } else { Vec::new() }
    }

    /// Enters the quarantine of this node, if the choice needs one. Returns false if it is patient and others are there.
    /// Errors: the node does not answer.
    pub async fn enter(&mut self, node: &Arc<Node>, is_patient: bool) -> Result<bool, EngineError> {
        if !self.is_quarantined() {
            return Ok(true);
        }
        let quarantine = match is_patient {
            true => node.quarantine.enter(self.level),
            false => Some(node.quarantine.enter_anyway(self.level)),
        };
        let Some(quarantine) = quarantine else { return Ok(false) };
        // A process that ended before it got the request is no evidence.
        let process = probe::info(&*node.engine).await?.process;
        self.stay = Some(Arc::new(Stay { quarantine, process }));
        Ok(true)
    }

    /// Leaves the quarantine of a node that did not get the choice.
    pub fn leave(&mut self) {
        self.stay = None;
    }

    /// The choice goes to this node, and into its quarantine if it needs one or another node computes its prompt.
    pub fn visit(&mut self, node: &Arc<Node>, is_handed_over: bool) -> Visit {
        let mut visit = Visit::of_prompt(node);
        match self.stay.as_ref().filter(|stay| stay.quarantine.is_in(&node.quarantine)) {
            Some(stay) => visit.process = stay.process,
            None if self.is_quarantined() || is_handed_over => self.stay_at(&visit),
            None => {}
        }
        visit
    }

    /// Enters the quarantine of the node where the choice is.
    pub fn stay_at(&mut self, visit: &Visit) {
        let quarantine = visit.node.quarantine.enter_anyway(self.level);
        self.stay = Some(Arc::new(Stay { quarantine, process: visit.process }));
    }

    /// The choice's engine was lost during this visit.
    pub fn lost(&mut self, visit: &Visit) {
        if visit.node.was_stopping(visit.process) {
            return;
        }
        let level = if visit.n_tokens < CLEARING_TOKENS { QuarantineLevel::Isolated } else { QuarantineLevel::Watched };
        self.level = self.level.max(level);
        let stay = self.stay.take_if(|stay| stay.quarantine.is_in(&visit.node.quarantine));
        self.was_alone |= stay.is_some_and(|stay| stay.quarantine.lose());
        let mut list = self.lost_processes();
        if !list.iter().any(|lost| lost.is_of(&visit.node, visit.process)) {
            list.push(LostProcess { node: Arc::clone(&visit.node), process: visit.process });
        }
    }

    /// The choice received a token during this visit.
    pub fn token(&mut self, visit: &mut Visit) {
        visit.n_tokens = visit.n_tokens.saturating_add(1);
        if visit.n_tokens == CLEARING_TOKENS || !self.is_quarantined() && self.stay.is_some() {
            self.clear();
        }
    }

    /// The quarantine ends. The processes stay in the prompt's history.
    pub fn clear(&mut self) {
        self.level = QuarantineLevel::Free;
        (self.was_alone, self.turn, self.stay) = (false, None, None);
    }

    /// Returns the error of a request that is the cause of the ends of its engines. Asks the nodes of the lost processes if
    /// they have crashed, and forgets those that have not.
    pub async fn verdict(&mut self) -> Option<EngineError> {
        if let Some(&n_processes) = self.case.verdict.get() {
            return Some(EngineError::Poison { n_processes });
        }
        let is_cause = |n_lost| n_lost >= if self.was_alone { MAX_ALONE } else { MAX_IN_LIFE };
        let asked = self.lost_processes().clone();
        if !is_cause(asked.len()) {
            return None;
        }
        let crashed = join_all(asked.iter().map(|lost| lost.node.has_crashed(lost.process))).await;
        let mut list = self.lost_processes();
        for (asked, _) in asked.iter().zip(crashed).filter(|(_, has_crashed)| !has_crashed) {
            list.retain(|lost| !lost.is_of(&asked.node, asked.process));
        }
        is_cause(list.len()).then(|| {
            let nodes: Vec<&str> = list.iter().map(|lost| lost.node.name.as_str()).collect();
            tracing::error!(?nodes, "these nodes' processes ended under one request; no other engine gets the request");
            let n_processes = *self.case.verdict.get_or_init(|| list.len() as u32);
            EngineError::Poison { n_processes }
        })
    }
}
