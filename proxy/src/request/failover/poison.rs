//! The poison mark: the engine processes that ended under a request, and its quarantine.
//!
//! A request that crashes its engine would crash the next one, too, and failover would carry it through the cluster. Every
//! choice is in the [`Quarantine`](crate::targets::nodes::Quarantine) of its node, as a possible cause until the node has
//! given it [`TRUST_TOKENS`] tokens. The rules for a choice that has lost an engine:
//!
//! 1. It is isolated until it has [`CLEARING_TOKENS`] tokens: it waits until it is alone there, other choices keep away from
//!    its node if they can, and its prompt is not handed over. If the lost engine had given it as many tokens, it is only
//!    watched: it goes on at once.
//! 2. The choices of a request, of all its prompts, are in quarantine one after another.
//! 3. If a second process ends under a choice that is alone in quarantine, its request is the cause. It ends with
//!    [`EngineError::Poison`]. Processes are counted for each prompt: the prompts of a request run on several nodes at once,
//!    and nodes that end together would else be blamed on the request.
//! 4. From its third lost process on, a choice stays isolated until its end, since it may be the cause of ends that come
//!    later than so many tokens. It then waits to be alone on its node, and nothing else counts as alone.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_link::awake;
use baton_schemas::EngineError;
use futures::future::join_all;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::request::poison_case::PoisonCase;
use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::nodes::{Node, QuarantineLevel, QuarantineStay, Task, probe};

/// The tokens from one engine that end a choice's quarantine.
const CLEARING_TOKENS: u32 = 16;

/// The tokens from one engine after which the choice is no longer suspected if the engine ends under others, too. More: what
/// waits in quarantine begins as soon as no other choice is suspected, which must not be just before a late end.
const TRUST_TOKENS: u32 = 64;

/// The processes that may end under a prompt if the last of them ends while its choice is alone in quarantine.
const MAX_ALONE: usize = 2;

/// The lost processes of a prompt after which its choices stay isolated until their end.
const LOST_FOR_LIFE: usize = 3;

/// How long a choice that has lost no engine waits for a node without an isolated one. As many tokens as end a quarantine
/// take less.
const FREE_PATIENCE: Duration = Duration::from_secs(2);

/// How long an isolated choice waits for a node where it is alone.
const ALONE_PATIENCE: Duration = Duration::from_secs(8);

/// The pause before an isolated choice looks again if it is alone on its node.
const ALONE_PAUSE: Duration = Duration::from_millis(20);

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
    entered: Option<Entered>,
}

/// The turn of a choice in quarantine. Until all clones are dropped, the other choices of the request wait for their turn. `None` after a wait in vain.
type Turn = Option<Arc<OwnedSemaphorePermit>>;

/// The stay that a choice has before it is sent to its node.
#[derive(Clone)]
struct Entered {
    stay: Arc<QuarantineStay>,
    process: u64,
}

/// A process on which a prompt was lost. It may still run: the link may have failed, or the machine may be cut off.
#[derive(Clone)]
struct LostProcess {
    node: Arc<Node>,
    process: u64,
}

/// The time that a choice, or its prompt, spends on a node and in its quarantine.
pub struct Visit {
    node: Arc<Node>,
    process: u64,
    n_tokens: u32,
    stay: Arc<QuarantineStay>,
}

impl LostProcess {
    fn is_of(&self, node: &Arc<Node>, process: u64) -> bool {
        Arc::ptr_eq(&self.node, node) && self.process == process
    }
}

impl Visit {
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
        PoisonMark {
            case: case.clone(),
            lost,
            level: QuarantineLevel::Free,
            was_alone: false,
            turn: None,
            entered: None,
        }
    }

    /// The mark of a choice that starts later, in a quarantine of its own.
    pub fn of_late_choice(&self) -> PoisonMark {
        PoisonMark { turn: None, entered: None, ..self.clone() }
    }

    fn lost_processes(&self) -> MutexGuard<'_, Vec<LostProcess>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The processes that the prompt has lost.
    pub fn n_lost(&self) -> usize {
        self.lost_processes().len()
    }

    /// Returns true if the choice is isolated until its end.
    fn is_isolated_for_life(&self) -> bool {
        self.n_lost() >= LOST_FOR_LIFE
    }

    /// Returns true if the choice has lost an engine since its last `CLEARING_TOKENS` tokens.
    pub fn is_quarantined(&self) -> bool {
        self.level > QuarantineLevel::Free
    }

    /// Waits until no other choice of the request is in quarantine, but not for ever. Returns true if the choice had to get
    /// its turn.
    pub async fn take_turn(&mut self) -> bool {
        let longest = match self.level {
            QuarantineLevel::Cleared | QuarantineLevel::Free => return false,
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

    /// How long the choice waits for a node that it need not keep away from. Streams that lost one engine at the same moment
    /// lose their patience at different times.
    pub fn patience(&self) -> Duration {
        match self.level {
            QuarantineLevel::Cleared | QuarantineLevel::Free => FREE_PATIENCE,
            QuarantineLevel::Watched => Duration::ZERO,
            QuarantineLevel::Isolated => ALONE_PATIENCE.mul_f64(rand::random_range(0.75..1.25)),
        }
    }

    /// The decode nodes that the choice keeps away from.
    pub(super) fn avoided(&self, model: &ServedModel) -> Vec<usize> {
        let is_avoided = |i: &usize| !model.decode[*i].quarantine.is_open_for(self.level);
        (0..model.decode.len()).filter(is_avoided).collect()
    }

    /// The decode nodes that the next attempt leaves out: those that `failed` it, and those that the choice keeps away from. `None`
    /// if no ready and trusted one would be left: a node with others in quarantine is still better than one that has failed.
    pub fn left_out(&self, model: &ServedModel, failed: &[usize], need: ImageNeed<'_>) -> Option<Vec<usize>> {
        let avoided = self.avoided(model);
        let left_out = [failed, &avoided].concat();
        let is_open = |node: &Arc<Node>| node.is_trusted(Task::Decode) && model.ready_supporting(node, need).is_some();
        let has_other = model.decode.iter().enumerate().any(|(i, node)| !left_out.contains(&i) && is_open(node));
        (avoided.is_empty() || has_other).then_some(left_out)
    }

    /// The prefill nodes that the choice may not use: only one process works on an isolated one, and the others keep away from
    /// it.
    pub fn avoided_prefill(&self, model: &ServedModel) -> Vec<usize> {
        let is_isolated = self.level == QuarantineLevel::Isolated;
        let is_avoided = |i: &usize| is_isolated || !model.prefill[*i].quarantine.is_open_for(self.level);
        (0..model.prefill.len()).filter(is_avoided).collect()
    }

    /// Prepares the choice's way to this node. An isolated one waits there until `patient_until` to be alone. Returns false
    /// if the choice is patient and keeps away from others that are there. Errors: the node does not answer.
    pub async fn enter(&mut self, node: &Arc<Node>, patient_until: Instant) -> Result<bool, EngineError> {
        let is_patient = || Instant::now() < patient_until;
        if !self.is_quarantined() {
            return Ok(!is_patient() || node.quarantine.is_open_for(self.level));
        }
        let stay = match is_patient() {
            true => node.quarantine.enter(self.level),
            false => Some(node.quarantine.enter_anyway(self.level)),
        };
        let Some(stay) = stay else { return Ok(false) };
        // Others keep away from now on. Those that are here get their tokens or leave.
        while self.level == QuarantineLevel::Isolated && !stay.is_alone(self.is_isolated_for_life()) && is_patient() {
            tokio::time::sleep(ALONE_PAUSE).await;
        }
        // A process that ended before it got the request is no evidence.
        let process = probe::info(&*node.engine).await?.process;
        self.entered = Some(Entered { stay: Arc::new(stay), process });
        Ok(true)
    }

    /// Leaves the quarantine of a node that did not get the choice.
    pub fn leave(&mut self) {
        self.entered = None;
    }

    /// The choice, or its prompt, goes to this node.
    pub fn visit(&self, node: &Arc<Node>) -> Visit {
        let (stay, process) = match self.entered.clone().filter(|entered| entered.stay.is_in(&node.quarantine)) {
            Some(entered) => (entered.stay, entered.process),
            None => (Arc::new(node.quarantine.enter_anyway(self.level)), node.process()),
        };
        Visit { node: Arc::clone(node), process, n_tokens: 0, stay }
    }

    /// The choice has lost another engine, and goes on where it is.
    pub fn stay_at(&self, visit: &Visit) {
        visit.stay.set_level(self.level);
    }

    /// The choice's engine was lost during this visit.
    pub fn lost(&mut self, visit: &Visit) {
        if visit.node.was_stopping(visit.process) {
            return;
        }
        let is_late = visit.n_tokens >= CLEARING_TOKENS;
        self.was_alone |= visit.stay.lose(is_late) && self.is_quarantined();
        self.entered.take_if(|entered| entered.stay.is_in(&visit.node.quarantine));
        let mut list = self.lost_processes();
        if !list.iter().any(|lost| lost.is_of(&visit.node, visit.process)) {
            list.push(LostProcess { node: Arc::clone(&visit.node), process: visit.process });
        }
        drop(list);
        let level = match is_late && !self.is_isolated_for_life() {
            true => QuarantineLevel::Watched,
            false => QuarantineLevel::Isolated,
        };
        self.level = self.level.max(level);
    }

    /// The choice received a token during this visit.
    pub fn token(&mut self, visit: &mut Visit) {
        visit.n_tokens = visit.n_tokens.saturating_add(1);
        let level = match visit.n_tokens {
            CLEARING_TOKENS => QuarantineLevel::Free,
            TRUST_TOKENS => QuarantineLevel::Cleared,
            _ => return,
        };
        if !self.is_isolated_for_life() {
            visit.stay.set_level(level);
            self.clear();
        }
    }

    /// The quarantine ends. The processes stay in the prompt's history.
    pub fn clear(&mut self) {
        self.level = QuarantineLevel::Free;
        (self.was_alone, self.turn, self.entered) = (false, None, None);
    }

    /// Returns the error of a request that is the cause of the ends of its engines. Asks the nodes of the lost processes if
    /// they have crashed, and forgets those that have not.
    pub async fn verdict(&mut self) -> Option<EngineError> {
        if let Some(&n_processes) = self.case.verdict.get() {
            return Some(EngineError::Poison { n_processes });
        }
        let is_cause = |n_lost| self.was_alone && n_lost >= MAX_ALONE;
        let asked = self.lost_processes().clone();
        if !is_cause(asked.len()) {
            return None;
        }
        let crashed = join_all(asked.iter().map(|lost| lost.node.has_crashed(lost.process))).await;
        let mut list = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        for (asked, _) in asked.iter().zip(crashed).filter(|(_, has_crashed)| !has_crashed) {
            list.retain(|lost| !lost.is_of(&asked.node, asked.process));
        }
        if !is_cause(list.len()) {
            self.was_alone = false;
            return None;
        }
        let nodes: Vec<&str> = list.iter().map(|lost| lost.node.name.as_str()).collect();
        tracing::error!(?nodes, "these nodes' processes ended under one request; no other engine gets the request");
        let n_processes = *self.case.verdict.get_or_init(|| list.len() as u32);
        Some(EngineError::Poison { n_processes })
    }
}
