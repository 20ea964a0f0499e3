//! One upstream: its client, its capacity, its health and its models.

mod models;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use baton_schemas::printable::printable_within;
use baton_upstream::{ListedModel, ModelListing, Upstream, UpstreamError, UpstreamFailure};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::busy_models::BusyModels;
use super::described_sight::DescribedSight;
use super::measures::UpstreamMeasures;
use super::prefill_servers::{PrefillServer, PrefillServers};
use super::reply_reports::ReplyReports;
use crate::admission::TargetPlaces;
use crate::targets::nodes::Breaker;

/// The interval at which a healthy upstream is asked for its models.
const LIST_INTERVAL: Duration = Duration::from_secs(15);

/// The interval while an upstream generates the only reply that it can generate, and a probe may interrupt that reply. It
/// gets no other request meanwhile.
const BUSY_LIST_INTERVAL: Duration = Duration::from_secs(300);

/// The interval for an upstream that does not answer or has failed. An open breaker lets a request through only after an
/// answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The shortest time between two probes, however many requests fail.
const PROBE_PAUSE: Duration = Duration::from_millis(100);

/// A busy upstream that sets no time gets no requests for this long.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// Longer pauses are logged as warnings.
const LONG_PAUSE: Duration = Duration::from_secs(5);

/// The maximum number of models kept from an upstream's list. A hosted upstream has hundreds.
const MAX_LISTED: usize = 2_000;

/// Bytes of a model's name.
const MAX_NAME_BYTES: usize = 512;

/// The health of an upstream, as probes of its list of models show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamHealth {
    /// It has not answered or failed yet.
    Unknown,
    /// It answers.
    Answering,
    /// It does not answer.
    Silent {
        /// The cause.
        failure: UpstreamFailure,
    },
}

/// One upstream.
pub struct UpstreamServer {
    /// Its client.
    pub client: Upstream,
    /// Keeps requests away while it fails.
    pub breaker: Breaker<UpstreamFailure>,
    /// Its places: one for each choice that it generates, `max_concurrent` in all.
    pub places: Arc<TargetPlaces>,
    /// The servers that compute prompts for it.
    pub prefill: PrefillServers,
    /// Oddities of its replies.
    pub reports: ReplyReports,
    /// Its descriptions of its models' image support.
    pub(super) sight: DescribedSight,
    /// Its measured speed and cache.
    pub(super) measures: Arc<UpstreamMeasures>,
    /// When it was put into service.
    pub since: SystemTime,
    has_failed: Arc<Notify>,
    known: Mutex<KnownFacts>,
}

struct KnownFacts {
    health: UpstreamHealth,
    listed: Vec<ListedModel>,
    /// Every entry of the last list could be read.
    is_list_readable: bool,
    busy: BusyModels,
}

impl UpstreamServer {
    /// Creates an upstream, and polls its list of models until it is dropped. `before` is an earlier client of the same server,
    /// whose list and measurements it takes over.
    pub fn new(client: Upstream, before: Option<&Arc<UpstreamServer>>) -> Arc<UpstreamServer> {
        let server = Arc::new(UpstreamServer {
            places: TargetPlaces::new(client.settings().max_concurrent),
            prefill: PrefillServers::new(&client),
            client,
            breaker: Breaker::default(),
            reports: ReplyReports::default(),
            sight: DescribedSight::default(),
            measures: before.map(|before| Arc::clone(&before.measures)).unwrap_or_default(),
            since: SystemTime::now(),
            has_failed: Arc::default(),
            known: Mutex::new(KnownFacts {
                health: UpstreamHealth::Unknown,
                listed: before.map(|before| before.lock().listed.clone()).unwrap_or_default(),
                is_list_readable: true,
                busy: BusyModels::default(),
            }),
        });
        tokio::spawn(poll(Arc::downgrade(&server), Arc::clone(&server.has_failed)));
        for prefill in &server.prefill.servers {
            tokio::spawn(poll_prefill_server(Arc::downgrade(&server), Arc::clone(prefill)));
        }
        server
    }

    /// Notes that a request to it failed. It is probed at once, unless it did not get the request.
    pub(super) fn failed(&self, failure: UpstreamFailure) {
        if failure == UpstreamFailure::NoResources {
            return;
        }
        self.breaker.failed(failure);
        self.has_failed.notify_one();
    }

    /// Asks for its models. An answer of any kind shows that it is running: some servers have no list.
    async fn probe(&self) {
        // While no prompt comes, nothing else closes them.
        self.client.close_unused();
        let asked = Instant::now();
        let outcome = self.client.models().await;
        let failure = outcome.as_ref().err().and_then(silence);
        let mut known = self.lock();
        if failure == Some(UpstreamFailure::NoResources) && known.health != UpstreamHealth::Unknown {
            tracing::warn!(
                upstream = self.name(),
                "the upstream could not be probed: this process lacks what a connection needs"
            );
            return;
        }
        let health = failure.map_or(UpstreamHealth::Answering, |failure| UpstreamHealth::Silent { failure });
        if known.health != health {
            self.log_health(failure.and(outcome.as_ref().err()));
        }
        known.health = health;
        let is_readable = match &outcome {
            Ok(list) => list.n_unnamed == 0 && list.models.len() <= MAX_LISTED && list.models.iter().all(is_listed),
            Err(error) => !matches!(error, UpstreamError::Failed { failure: UpstreamFailure::Malformed, .. }),
        };
        if std::mem::replace(&mut known.is_list_readable, is_readable) && !is_readable {
            let models = outcome.as_ref().map_or(&[][..], |list| &list.models);
            let n_read = models.iter().filter(|model| is_listed(model)).count().min(MAX_LISTED);
            tracing::warn!(upstream = self.name(), n_read, "the upstream's list of models cannot be read as a whole");
        }
        if let Ok(ModelListing { models: mut listed, .. }) = outcome {
            listed.retain(is_listed);
            listed.truncate(MAX_LISTED);
            // A front end without workers lists nothing until they are back. Until then its models are not unknown but
            // unavailable.
            if !listed.is_empty() {
                known.listed = listed;
            }
        }
        drop(known);
        if failure.is_none() {
            self.breaker.answered(asked);
        }
    }

    fn log_health(&self, error: Option<&UpstreamError>) {
        match error {
            None => tracing::info!(upstream = self.name(), "the upstream answers"),
            // This error comes from the operating system or TLS, and quotes no message of the upstream.
            Some(error @ UpstreamError::Failed { failure: UpstreamFailure::Unreachable, .. }) => {
                tracing::warn!(upstream = self.name(), %error, "the upstream does not answer");
            }
            Some(error) => {
                // An upstream's own message may quote keys.
                tracing::warn!(upstream = self.name(), reason = error.as_str(), "the upstream does not answer");
                tracing::debug!(upstream = self.name(), %error, "the upstream's error");
            }
        }
    }

    /// Returns true while it generates the only reply that it can generate, and a probe may interrupt that reply.
    fn is_undisturbable(&self) -> bool {
        let settings = self.client.settings();
        settings.kind.may_break_off_replies() && settings.max_concurrent == 1 && self.places.n_taken() > 0
    }

    fn is_well(&self) -> bool {
        self.health() == UpstreamHealth::Answering && !self.breaker.view().is_open
    }

    /// The name in `x-baton-route`, logs and metrics.
    pub fn name(&self) -> &str {
        &self.client.settings().name
    }

    /// Its health at the last probe.
    pub fn health(&self) -> UpstreamHealth {
        self.lock().health
    }

    /// Returns true if it did not answer the last probe.
    pub fn is_silent(&self) -> bool {
        matches!(self.health(), UpstreamHealth::Silent { .. })
    }

    /// Returns true if it can probably answer now for models that are not busy. A server that answers late may be
    /// computing.
    pub fn can_answer(&self) -> bool {
        use UpstreamFailure::{Unauthorized, Unreachable};
        !matches!(self.health(), UpstreamHealth::Silent { failure: Unreachable | Unauthorized })
    }

    /// The same for this model, by the upstream's own name.
    pub fn can_answer_for(&self, model: &str) -> bool {
        self.can_answer() && self.busy_for(model).is_none()
    }

    /// Our names for the models that it cannot serve now.
    pub fn unanswered(&self) -> Vec<String> {
        if !self.can_answer() {
            return self.models();
        }
        let named = &self.client.settings().models;
        let known = self.lock();
        let now = Instant::now();
        let is_busy = |model: &str| known.busy.left(model, now).is_some();
        if named.is_empty() {
            known.listed.iter().filter(|listed| is_busy(&listed.name)).map(|listed| listed.name.clone()).collect()
        } else {
            named.iter().filter(|model| is_busy(&model.theirs)).map(|model| model.ours.clone()).collect()
        }
    }

    /// The time until this model may be requested again, by the upstream's own name. `None`: now.
    pub fn busy_for(&self, model: &str) -> Option<Duration> {
        self.lock().busy.left(model, Instant::now())
    }

    /// The longest of these times over its models.
    pub fn longest_busy(&self) -> Option<Duration> {
        self.lock().busy.longest(Instant::now())
    }

    /// Notes that it has no capacity for this model now, by the upstream's own name.
    pub(super) fn report_busy(&self, model: &str, retry_after: Option<Duration>) {
        let pause = retry_after.unwrap_or(BUSY_PAUSE);
        let before = self.lock().busy.add(model, pause, Instant::now());
        // Concurrent requests get the same answer: one line is enough.
        if pause > LONG_PAUSE && before.is_none_or(|left| left <= LONG_PAUSE) {
            let seconds = pause.as_secs();
            tracing::warn!(
                upstream = self.name(),
                model,
                seconds,
                "an upstream is busy; it gets no requests for this model for a while"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, KnownFacts> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Polls an upstream's list of models until the upstream is dropped.
async fn poll(server: Weak<UpstreamServer>, has_failed: Arc<Notify>) {
    while let Some(polled) = server.upgrade() {
        polled.probe().await;
        drop(polled);
        let last_probe = Instant::now();
        tokio::time::sleep(PROBE_PAUSE).await;
        loop {
            // A request that fails meanwhile causes a probe at once.
            if tokio::time::timeout(PROBE_INTERVAL, has_failed.notified()).await.is_ok() {
                break;
            }
            let Some(polled) = server.upgrade() else { return };
            let interval = if polled.is_undisturbable() { BUSY_LIST_INTERVAL } else { LIST_INTERVAL };
            if !polled.is_well() || last_probe.elapsed() >= interval {
                break;
            }
        }
    }
}

/// Probes a prefill server when it has failed and prompts miss it, until the upstream is dropped.
async fn poll_prefill_server(server: Weak<UpstreamServer>, prefill: Arc<PrefillServer>) {
    loop {
        tokio::time::sleep(PROBE_INTERVAL).await;
        let Some(server) = server.upgrade() else { return };
        if let Some(model) = server.any_model() {
            prefill.probe(&server.client, &model).await;
        }
    }
}

/// The failure if an upstream counts as silent after this error. Other errors are answers.
fn silence(error: &UpstreamError) -> Option<UpstreamFailure> {
    use UpstreamFailure::{CutShort, NoResources, TimedOut, Unauthorized, Unreachable};
    match error {
        UpstreamError::Failed {
            failure: failure @ (Unreachable | NoResources | TimedOut | CutShort | Unauthorized),
            ..
        } => Some(*failure),
        _ => None,
    }
}

/// Returns true for a model with a plausible name. Names are shown in lists and terminals, and sent back to the upstream.
fn is_listed(model: &ListedModel) -> bool {
    let name = model.name.as_str();
    (1..=MAX_NAME_BYTES).contains(&name.len()) && printable_within(name, MAX_NAME_BYTES) == name
}
