//! A node's health: where it is in its life and why, who is told of it, and how often it got there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use baton_planner::reason::FailureReason;
use baton_schemas::EngineError;
use baton_schemas::node::NodeInfo;
use tokio::sync::watch;

use super::life::{Life, Machine, News};

/// Why a node came into its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateReason {
    /// Nothing is known of it yet.
    New,
    /// Its process is being started.
    Starts,
    /// It says that its model is loading.
    Loading,
    /// Its process has ended and is started again.
    Ended,
    /// Its process could not be started, or keeps ending.
    StartFailed,
    /// Its model is no longer wanted, and its process is ending.
    Unloads,
    /// Its model is no longer wanted, and its process has ended.
    Unloaded,
    /// It answers.
    Answers,
    /// It says that it was told to stop.
    ToldToStop,
    /// It was told to stop, and its load stream has ended.
    Stopped,
    /// It serves again after it was told to stop: another process.
    Restarted,
    /// Its load stream has ended.
    StreamEnded,
    /// Its load stream broke.
    StreamLost,
    /// It did not answer in time.
    Silent,
    /// It cannot be reached.
    Unreachable,
    /// It refused the cluster key.
    Unauthorized,
    /// What answers does not speak the node protocol.
    NoNode,
    /// Its breaker opened.
    Failure(FailureReason),
    /// Its breakers have closed.
    BreakerClosed,
}

impl StateReason {
    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            StateReason::New => "new",
            StateReason::Starts => "starts",
            StateReason::Loading => "loading",
            StateReason::Ended => "ended",
            StateReason::StartFailed => "start_failed",
            StateReason::Unloads => "unloads",
            StateReason::Unloaded => "unloaded",
            StateReason::Answers => "answers",
            StateReason::ToldToStop => "told_to_stop",
            StateReason::Stopped => "stopped",
            StateReason::Restarted => "restarted",
            StateReason::StreamEnded => "stream_ended",
            StateReason::StreamLost => "stream_lost",
            StateReason::Silent => "silent",
            StateReason::Unreachable => "unreachable",
            StateReason::Unauthorized => "unauthorized",
            StateReason::NoNode => "no_node",
            StateReason::Failure(reason) => reason.as_str(),
            StateReason::BreakerClosed => "breaker_closed",
        }
    }
}

/// Why a node is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why {
    /// Its kind.
    pub reason: StateReason,
    /// In words that clients may see: no addresses.
    pub words: String,
    /// For the operator.
    pub cause: String,
}

impl Why {
    /// The same words for everybody.
    pub fn plainly(reason: StateReason, words: &str) -> Why {
        Why { reason, words: words.to_owned(), cause: words.to_owned() }
    }
}

impl From<&EngineError> for Why {
    fn from(error: &EngineError) -> Why {
        let (reason, words) = match error {
            EngineError::Unauthorized => (StateReason::Unauthorized, "the node refused the cluster key"),
            EngineError::Unavailable { .. } => (StateReason::Silent, "the node cannot be reached"),
            EngineError::Lost { .. } => (StateReason::Unreachable, "the node cannot be reached"),
            _ => (StateReason::NoNode, "the node does not answer as it should"),
        };
        // Without the words that would stand around it in a request's log line.
        let cause = match error {
            EngineError::Lost { detail } | EngineError::Internal { detail } => detail.clone(),
            other => other.to_string(),
        };
        Why { reason, words: words.to_owned(), cause }
    }
}

/// A node's health at one moment.
#[derive(Debug, Clone)]
pub struct Status {
    machine: Machine,
    info: Option<Arc<NodeInfo>>,
    /// Why it is in this state, in one word.
    pub reason: StateReason,
    /// The same for clients.
    pub words: String,
    /// If it is down: until it is asked or started again.
    pub retry_in: Duration,
    /// When it came into this state.
    pub since: SystemTime,
}

impl Status {
    /// Where it is in its life.
    pub fn life(&self) -> Life {
        self.machine.life()
    }

    /// What it is, if it can be sent requests.
    pub fn usable(&self) -> Option<&Arc<NodeInfo>> {
        self.info.as_ref().filter(|_| matches!(self.life(), Life::Ready | Life::Suspect))
    }

    /// What it is, if it runs.
    pub fn running(&self) -> Option<&Arc<NodeInfo>> {
        self.info.as_ref().filter(|_| !matches!(self.life(), Life::Unloaded | Life::Starting | Life::Down))
    }

    /// It has left its last question unanswered.
    pub fn is_silent(&self) -> bool {
        self.machine.is_silent()
    }
}

/// A change of a node's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transition {
    /// What it was.
    pub from: Life,
    /// What it is.
    pub to: Life,
    /// Why, in one word.
    pub reason: StateReason,
}

/// See the module. Whoever learns something of the node says it here.
#[derive(Debug)]
pub struct Health {
    /// What it is called in the log.
    who: String,
    /// Somebody restarts it when it is frozen, and says so: silence alone never makes it down.
    is_kept: bool,
    status: watch::Sender<Status>,
    transitions: Mutex<BTreeMap<Transition, u64>>,
}

impl Health {
    /// Of a node that has not answered yet.
    pub fn new(who: impl Into<String>) -> Arc<Health> {
        Health::with(who.into(), false)
    }

    /// The same of one that is kept running, by whoever says that it fails or is started again: while it is silent it is
    /// suspect, and requests wait for it.
    pub fn of_a_kept_one(who: impl Into<String>) -> Arc<Health> {
        Health::with(who.into(), true)
    }

    fn with(who: String, is_kept: bool) -> Arc<Health> {
        let status = Status {
            machine: Machine::default(),
            info: None,
            reason: StateReason::New,
            words: "the model is loading".to_owned(),
            retry_in: Duration::ZERO,
            since: SystemTime::now(),
        };
        Arc::new(Health { who, is_kept, status: watch::Sender::new(status), transitions: Mutex::default() })
    }

    /// It has said what it is.
    pub fn answers(&self, info: Arc<NodeInfo>) {
        self.learn(News::Answers, &Why::plainly(StateReason::Answers, "it answers"), |status| {
            let is_news = status.info.as_ref().is_none_or(|known| **known != *info);
            if is_news {
                status.info = Some(info);
            }
            is_news
        });
    }

    /// The process that is known has shown that it lives. One that is down has to say what it is first.
    pub fn lives(&self) {
        // Looked at before, for the sake of the many signs that are no news; what counts is what it is when it is learned.
        if self.status.borrow().is_silent() {
            self.learn(News::Lives, &Why::plainly(StateReason::Answers, "it answers"), |_| false);
        }
    }

    /// Its process is starting, or its model is loading.
    pub fn loads(&self, reason: StateReason) {
        self.learn(News::Loads, &Why::plainly(reason, "the model is loading"), |_| false);
    }

    /// Nobody needs its model now, and its process is told to end.
    pub fn leaves(&self) {
        self.learn(News::Loads, &Why::plainly(StateReason::Unloads, "the model is being unloaded"), |_| false);
    }

    /// Nobody needs its model now, and its process has ended.
    pub fn unloads(&self) {
        self.learn(News::Unloads, &Why::plainly(StateReason::Unloaded, "the model is not loaded"), |status| {
            status.retry_in = Duration::ZERO;
            false
        });
    }

    /// It was told to stop.
    pub fn stops(&self) {
        self.learn(News::Stops, &Why::plainly(StateReason::ToldToStop, "the node is stopping"), |_| false);
    }

    /// The stream of its loads has ended, or it does not say what its load is.
    pub fn quiets(&self, why: &Why) {
        self.learn(News::Quiets, why, |_| false);
    }

    /// It left a question unanswered. It is asked again after `retry_in`.
    pub fn misses(&self, why: &Why, retry_in: Duration) {
        self.learn(News::Misses, why, |status| {
            status.retry_in = retry_in;
            false
        });
    }

    /// It cannot be used before `retry_in`.
    pub fn fails(&self, why: &Why, retry_in: Duration) {
        self.learn(News::Fails, why, |status| {
            let is_news = status.retry_in != retry_in;
            status.retry_in = retry_in;
            is_news
        });
    }

    /// Requests to it fail, for a reason that its breaker counts.
    pub fn breaker_opens(&self, reason: FailureReason) {
        self.learn(News::Opens, &Why::plainly(StateReason::Failure(reason), reason.as_str()), |_| false);
    }

    /// Requests may be sent to it as to any other.
    pub fn breaker_closes(&self) {
        self.learn(News::Closes, &Why::plainly(StateReason::BreakerClosed, "it answers"), |_| false);
    }

    /// Its health now.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Where it is in its life.
    pub fn life(&self) -> Life {
        self.status.borrow().life()
    }

    /// What it is, if it can be sent requests.
    pub fn usable(&self) -> Option<Arc<NodeInfo>> {
        self.status.borrow().usable().map(Arc::clone)
    }

    /// What it is, or was when it last said so.
    pub fn last_info(&self) -> Option<Arc<NodeInfo>> {
        self.status.borrow().info.clone()
    }

    /// Whether it has not come out of its first start: it has neither answered yet nor failed.
    pub fn is_new(&self) -> bool {
        self.transitions.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Whether it runs, as far as is known.
    pub fn is_running(&self) -> bool {
        self.status.borrow().running().is_some()
    }

    /// It has left its last question unanswered.
    pub fn is_silent(&self) -> bool {
        self.status.borrow().is_silent()
    }

    /// Is told of changes.
    pub fn subscribe(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// How often its state has changed, and how.
    pub fn transitions(&self) -> BTreeMap<Transition, u64> {
        self.transitions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes news into account; `note` notes what else they say, and whether that is a change by itself.
    fn learn(&self, news: News, why: &Why, note: impl FnOnce(&mut Status) -> bool) {
        let mut transition = None;
        self.status.send_if_modified(|status| {
            let is_news = note(status);
            let (from, was_silent) = (status.life(), status.is_silent());
            let is_silence = matches!(news, News::Misses | News::Quiets);
            if !(self.is_kept && was_silent && is_silence) {
                status.machine = status.machine.learn(news);
            }
            let to = status.life();
            if from != to {
                transition = Some(Transition { from, to, reason: why.reason });
                status.since = SystemTime::now();
            }
            // Of a node that stays down the last word counts.
            if from != to || matches!(to, Life::Down | Life::Unloaded) {
                status.reason = why.reason;
                status.words.clone_from(&why.words);
            }
            is_news || from != to || was_silent != status.is_silent()
        });
        if let Some(transition) = transition {
            *self.transitions.lock().unwrap_or_else(PoisonError::into_inner).entry(transition).or_default() += 1;
            self.log(transition, &why.cause);
        }
    }

    fn log(&self, transition: Transition, cause: &str) {
        let (who, from, to) = (&self.who, transition.from.as_str(), transition.to.as_str());
        let reason = transition.reason.as_str();
        match transition.to {
            Life::Ready if transition.from == Life::Starting => tracing::info!(from, to, reason, "{who} answers"),
            Life::Ready => tracing::warn!(from, to, reason, "{who} answers"),
            Life::Unloaded => tracing::debug!(from, to, reason, "{who} has let its model go"),
            Life::Starting if transition.reason == StateReason::Unloads => {
                tracing::debug!(from, to, reason, "{who} lets its model go")
            }
            Life::Starting => tracing::info!(from, to, reason, "{who} is loading its model"),
            Life::Draining => tracing::warn!(from, to, reason, "{who} was told to stop, and finishes what it runs"),
            // It answers; a task's breaker is open still.
            Life::Suspect if matches!(transition.from, Life::Down | Life::Starting) => {
                tracing::warn!(from, to, reason, "{who} answers again; a request will try it");
            }
            Life::Suspect => tracing::warn!(from, to, reason, "{who} may be lost: {cause}"),
            // Told by who started it, to the operator who waits for it or in the log.
            Life::Down if transition.reason == StateReason::StartFailed => {
                tracing::info!(from, to, reason, "{who} cannot be used: {cause}")
            }
            Life::Down => tracing::warn!(from, to, reason, "{who} cannot be used: {cause}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_engines::Engine;
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_schemas::handoff::HandoffFailure;

    use super::*;

    #[tokio::test]
    async fn each_change_is_counted_once_with_its_reason_and_told() {
        let info = Arc::new(SimEngine::new(SimConfig::default()).info().await.unwrap());
        let (health, silent) = (Health::new("it"), Why::plainly(StateReason::Silent, "no answer"));
        let mut told = health.subscribe();
        health.loads(StateReason::Starts);
        assert!(health.is_new());
        for _ in 0..2 {
            health.answers(Arc::clone(&info));
        }
        assert!(told.has_changed().unwrap());
        told.mark_unchanged();
        health.answers(Arc::clone(&info));
        assert!(!told.has_changed().unwrap(), "nothing new");
        health.misses(&silent, Duration::ZERO);
        assert!(health.status().usable().is_some(), "better than none");
        health.lives();
        health.lives();
        health.breaker_opens(FailureReason::DecodeLost);
        health.breaker_opens(FailureReason::Handoff(HandoffFailure::PrefillLost));
        health.breaker_closes();
        health.stops();
        assert!(health.status().usable().is_none() && health.status().running().is_some());
        health.misses(&Why::plainly(StateReason::Stopped, "it was stopped"), Duration::ZERO);
        health.lives();
        assert_eq!((health.life(), health.status().words.as_str()), (Life::Down, "it was stopped"));
        let kept = Health::of_a_kept_one("it");
        kept.answers(info);
        for _ in 0..3 {
            kept.quiets(&silent);
        }
        assert_eq!(kept.life(), Life::Suspect);
        kept.loads(StateReason::Ended);
        assert_eq!((kept.life(), kept.is_new()), (Life::Starting, false));
        let counted: Vec<_> = health
            .transitions()
            .into_iter()
            .map(|(t, n)| (t.from.as_str(), t.to.as_str(), t.reason.as_str(), n))
            .collect();
        let expected = [
            ("starting", "ready", "answers", 1),
            ("ready", "draining", "told_to_stop", 1),
            ("ready", "suspect", "silent", 1),
            ("ready", "suspect", "decode_lost", 1),
            ("draining", "down", "stopped", 1),
            ("suspect", "ready", "answers", 1),
            ("suspect", "ready", "breaker_closed", 1),
        ];
        assert_eq!(counted, expected);
    }
}
