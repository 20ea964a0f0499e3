//! One upstream, and what is known of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use baton_engines::upstream::{Kind, Upstream, UpstreamError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::busy::Busy;
use crate::model_name;
use crate::targets::nodes::{Breaker, Fallbacks};

/// How often an upstream that answers is asked for its models.
const LIST_INTERVAL: Duration = Duration::from_secs(15);

/// How long one is not asked that does one thing at a time and generates a reply: there are servers that break it off when
/// they are asked for anything else (llama-cpp-python). Nothing else would be sent to it meanwhile.
const BUSY_LIST_INTERVAL: Duration = Duration::from_secs(300);

/// How often one that does not, or has failed: an open breaker lets a request through only after an answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The least time between two looks, however many requests fail.
const PROBE_PAUSE: Duration = Duration::from_millis(100);

/// When one that is busy, and does not say until when, is asked again.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// Leaving a model alone for longer than this is told to the operator.
const LONG_PAUSE: Duration = Duration::from_secs(5);

/// Models of one upstream that are known: a hosted one has hundreds.
const MAX_LISTED: usize = 2_000;

/// Bytes of a model's name.
const MAX_NAME_BYTES: usize = 512;

/// Where an upstream is in its life, as far as its list of models shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Life {
    /// It has not been heard of yet.
    Unknown,
    /// It answers.
    Answers,
    /// It does not.
    Silent {
        /// In one word.
        reason: &'static str,
    },
}

/// See the module.
pub struct Member {
    /// Its client.
    pub client: Upstream,
    /// Keeps requests away while it fails.
    pub breaker: Breaker<&'static str>,
    /// How often its prefill servers could not be used, by reason.
    pub fallbacks: Fallbacks<&'static str>,
    /// When it was put into service.
    pub since: SystemTime,
    room: Arc<Semaphore>,
    n_claimed: AtomicUsize,
    has_failed: Arc<Notify>,
    known: Mutex<Known>,
}

struct Known {
    life: Life,
    listed: Vec<String>,
    busy: Busy,
}

impl Member {
    /// An upstream; its list of models is followed from now on, until it is dropped.
    pub fn new(client: Upstream) -> Arc<Member> {
        let room = Arc::new(Semaphore::new(client.settings().max_concurrent));
        let member = Arc::new(Member {
            client,
            breaker: Breaker::default(),
            fallbacks: Fallbacks::default(),
            since: SystemTime::now(),
            room,
            n_claimed: AtomicUsize::new(0),
            has_failed: Arc::default(),
            known: Mutex::new(Known { life: Life::Unknown, listed: Vec::new(), busy: Busy::default() }),
        });
        let (watched, has_failed) = (Arc::downgrade(&member), Arc::clone(&member.has_failed));
        tokio::spawn(async move {
            let is_well = |member: &Member| member.life() == Life::Answers && !member.breaker.view().is_open;
            while let Some(member) = watched.upgrade() {
                member.look().await;
                drop(member);
                let looked = Instant::now();
                tokio::time::sleep(PROBE_PAUSE).await;
                loop {
                    // One that has failed meanwhile is looked at at once, and each second until it answers.
                    let failed = tokio::time::timeout(PROBE_INTERVAL, has_failed.notified()).await;
                    if failed.is_ok() {
                        break;
                    }
                    let Some(member) = watched.upgrade() else { return };
                    let settings = member.client.settings();
                    let does_one_thing = settings.kind == Kind::OpenAi && settings.max_concurrent == 1;
                    let is_at_it = does_one_thing && member.n_running() > 0;
                    let interval = if is_at_it { BUSY_LIST_INTERVAL } else { LIST_INTERVAL };
                    if !is_well(&member) || looked.elapsed() >= interval {
                        break;
                    }
                }
            }
        });
        member
    }

    /// A request to it failed, for this reason in a word. Whether it still answers is looked at at once.
    pub(super) fn failed(&self, reason: &'static str) {
        self.breaker.failed(reason);
        self.has_failed.notify_one();
    }

    /// Asks for its models. An answer of any kind shows that it is there: some servers have no list.
    async fn look(&self) {
        let asked = Instant::now();
        let outcome = self.client.models().await;
        let reason = match &outcome {
            Err(UpstreamError::Failed { reason: reason @ ("unreachable" | "timed_out" | "cut_short"), .. }) => {
                Some(*reason)
            }
            Err(UpstreamError::Failed { reason: "unauthorized", .. }) => Some("unauthorized"),
            _ => None,
        };
        let mut known = self.lock();
        let life = reason.map_or(Life::Answers, |reason| Life::Silent { reason });
        if known.life != life {
            match &outcome {
                // What the system says of a connection, and TLS, are nobody's words.
                Err(error) if reason == Some("unreachable") => {
                    tracing::warn!(upstream = self.name(), %error, "the upstream does not answer");
                }
                Err(error) if reason.is_some() => {
                    // An upstream's own words may quote keys.
                    tracing::warn!(upstream = self.name(), reason = error.reason(), "the upstream does not answer");
                    tracing::debug!(upstream = self.name(), %error, "what is known of that");
                }
                _ => tracing::info!(upstream = self.name(), "the upstream answers"),
            }
        }
        known.life = life;
        if let Ok(mut listed) = outcome {
            listed.retain(|name| is_name(name));
            listed.truncate(MAX_LISTED);
            known.listed = listed;
        }
        drop(known);
        if reason.is_none() {
            self.breaker.answered(asked);
        }
    }

    /// As in `x-baton-route`.
    pub fn name(&self) -> &str {
        &self.client.settings().name
    }

    /// Where it is in its life.
    pub fn life(&self) -> Life {
        self.lock().life.clone()
    }

    /// Whether it did not answer when it was last looked at.
    pub fn is_silent(&self) -> bool {
        matches!(self.life(), Life::Silent { .. })
    }

    /// Whether it could answer now, as far as is known: for any of its models that has room.
    pub fn can_answer(&self) -> bool {
        !matches!(self.life(), Life::Silent { reason: "unreachable" | "unauthorized" })
    }

    /// Whether it could answer now for this model, by its own name.
    pub fn can_answer_for(&self, model: &str) -> bool {
        self.can_answer() && self.busy_for(model).is_none()
    }

    /// Our names for its models that it could not answer for now.
    pub fn unanswered(&self) -> Vec<String> {
        if !self.can_answer() {
            return self.models();
        }
        let (named, known, now) = (&self.client.settings().models, self.lock(), Instant::now());
        let is_busy = |model: &str| known.busy.left(model, now).is_some();
        if named.is_empty() {
            known.listed.iter().filter(|listed| is_busy(listed)).cloned().collect()
        } else {
            named.iter().filter(|(_, theirs)| is_busy(theirs)).map(|(ours, _)| ours.clone()).collect()
        }
    }

    /// Whether its models are those that it lists, and it has listed none yet.
    pub fn is_unlisted(&self) -> bool {
        let known = self.lock();
        self.client.settings().models.is_empty() && known.listed.is_empty() && known.life != Life::Answers
    }

    /// Takes over what another client of the same server knows of its models.
    pub(super) fn inherit(&self, before: &Member) {
        let listed = before.lock().listed.clone();
        self.lock().listed = listed;
    }

    /// Its own name for a model of ours. `discovered`: also for those that nobody has named here.
    pub fn model(&self, name: &str, discovered: bool) -> Option<String> {
        let named = &self.client.settings().models;
        if named.is_empty() && discovered {
            return self.lock().listed.iter().find(|listed| model_name::are_same(listed, name)).cloned();
        }
        named.iter().find(|(ours, _)| model_name::are_same(ours, name)).map(|(_, theirs)| theirs.clone())
    }

    /// Our names for its models, and whether each was configured.
    pub fn models(&self) -> Vec<String> {
        let named = &self.client.settings().models;
        if named.is_empty() { self.lock().listed.clone() } else { named.iter().map(|(ours, _)| ours.clone()).collect() }
    }

    /// Whether its models are those that it lists.
    pub fn is_discovered(&self) -> bool {
        self.client.settings().models.is_empty()
    }

    /// How long it has asked to be left alone with this model, by its own name.
    pub fn busy_for(&self, model: &str) -> Option<Duration> {
        self.lock().busy.left(model, Instant::now())
    }

    /// The longest time for which it is to be left alone with one of its models.
    pub fn longest_busy(&self) -> Option<Duration> {
        self.lock().busy.longest(Instant::now())
    }

    /// It has no room for this model now, by its own name.
    pub(super) fn is_busy(&self, model: &str, retry_after: Option<Duration>) {
        let pause = retry_after.unwrap_or(BUSY_PAUSE);
        let before = self.lock().busy.add(model, pause, Instant::now());
        // Requests that were under way are told the same: one line is enough.
        if pause > LONG_PAUSE && before.is_none_or(|left| left <= LONG_PAUSE) {
            let seconds = pause.as_secs();
            tracing::warn!(upstream = self.name(), model, seconds, "an upstream is busy: a model of it is left alone");
        }
    }

    /// Choices that it works on, or is about to.
    pub fn n_claimed(&self) -> usize {
        self.n_claimed.load(Ordering::Relaxed)
    }

    /// Choices that it works on.
    pub fn n_running(&self) -> usize {
        self.client.settings().max_concurrent.saturating_sub(self.room.available_permits())
    }

    /// Places for so many choices, once they are free. They are taken in the order in which they are asked for, and
    /// claimed from now on; dropping the future gives the claim back.
    pub(super) async fn places(self: &Arc<Self>, n: u32) -> Vec<Place> {
        let claims: Vec<Claim> = (0..n).map(|_| Claim::new(self)).collect();
        // Nobody closes it.
        let Ok(mut permit) = Arc::clone(&self.room).acquire_many_owned(n).await else { return Vec::new() };
        let place = |claim| Some(Place { _claim: claim, _permit: permit.split(1)? });
        claims.into_iter().filter_map(place).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names are shown in lists and terminals, and sent back: what is no name is not taken for one.
fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.chars().any(char::is_control)
}

/// The right to have one choice generated. Given back when dropped.
pub(super) struct Place {
    _claim: Claim,
    _permit: OwnedSemaphorePermit,
}

struct Claim(Arc<Member>);

impl Claim {
    fn new(member: &Arc<Member>) -> Claim {
        member.n_claimed.fetch_add(1, Ordering::Relaxed);
        Claim(Arc::clone(member))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.n_claimed.fetch_sub(1, Ordering::Relaxed);
    }
}
