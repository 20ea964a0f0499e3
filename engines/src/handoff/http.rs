//! Pulls over the node protocol.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::kv::{
    Codec, Contiguous, End, Event, Fingerprint, FrameError, Handoff, HandoffError, HandoffId, KvLayout, Placement,
    PrefillTimings, Reader, Span, VerifiedKv,
};
use baton_schemas::node::BASE_PATH;
use baton_schemas::sequence::CacheScope;
use futures::StreamExt;
use futures::future::BoxFuture;
use reqwest::{Client, Response};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::peers::{Match, Peers, compare};
use super::{KvPuller, LocalKv, PULL_WINDOW, PullOrder, PullReport, Pulled, canary, link};
use crate::engine::Engine;
use crate::remote::{NodeAddress, RemoteEngine, accepted};

/// A prefill node in the same network answers well within this, or is gone.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Until the reply's head. The prefill node answers before it computes.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Without a single byte. The prefill node gives a sign of life every second.
const STALL_TIMEOUT: Duration = Duration::from_secs(5);

/// How pulls are made.
#[derive(Debug, Clone, Default)]
pub struct PullPolicy {
    /// Take KV of other weights of the same base model if the canary's distance is at most this.
    pub max_canary_distance: Option<f64>,
    /// What may be asked for, best first. Without any: rows as they are.
    pub codecs: Vec<Codec>,
}

/// Pulls from prefill nodes. Cheap to clone.
#[derive(Clone)]
pub struct HttpPuller(Arc<Inner>);

struct Inner {
    client: Client,
    runtime: Handle,
    cluster_key: String,
    policy: PullPolicy,
    peers: Peers,
    local: OnceLock<LocalKv>,
}

impl HttpPuller {
    /// A puller whose tasks run on the current tokio runtime.
    pub fn new(cluster_key: &str, policy: PullPolicy) -> Result<HttpPuller, EngineError> {
        let builder = Client::builder().connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true).no_proxy();
        Ok(HttpPuller(Arc::new(Inner {
            client: builder.build().map_err(EngineError::internal)?,
            runtime: Handle::try_current().map_err(EngineError::internal)?,
            cluster_key: cluster_key.to_owned(),
            policy,
            peers: Peers::default(),
            local: OnceLock::new(),
        })))
    }
}

impl KvPuller for HttpPuller {
    fn introduce(&self, local: LocalKv) {
        if self.0.local.set(local).is_err() {
            tracing::error!("a puller serves one engine");
        }
    }

    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<Pulled> {
        let (sender, receiver) = mpsc::channel(PULL_WINDOW);
        let inner = Arc::clone(&self.0);
        self.0.runtime.spawn(async move {
            let sink = Sink { sender, notify };
            let outcome = tokio::select! {
                outcome = inner.pull(order, &sink) => outcome,
                // The sequence was cancelled: dropping the pull closes its connection, which ends the prefill.
                () = sink.sender.closed() => return,
            };
            let last = outcome.map_or_else(Pulled::Failed, Pulled::End);
            sink.send(last).await;
        });
        receiver
    }

    fn measure_link(&self, source: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        let (inner, url) = (Arc::clone(&self.0), source.url.trim_end_matches('/').to_owned());
        Box::pin(async move {
            link::measure(&inner.client, &url, &inner.cluster_key).await.map_err(|error| {
                tracing::info!(url, %error, "the link cannot be measured");
                if error.is_timeout() { HandoffFailure::PrefillStalled } else { HandoffFailure::PrefillDown }
            })
        })
    }
}

struct Sink {
    sender: mpsc::Sender<Pulled>,
    notify: Arc<dyn Fn() + Send + Sync>,
}

impl Sink {
    /// Waits for room: this is what slows a prefill node down to the engine's speed.
    async fn send(&self, pulled: Pulled) {
        // A closed channel is noticed where the whole pull is awaited.
        if self.sender.send(pulled).await.is_ok() {
            (self.notify)();
        }
    }
}

impl Inner {
    async fn pull(&self, order: PullOrder, sink: &Sink) -> Result<PullReport, HandoffFailure> {
        let local = self.local.get().ok_or(HandoffFailure::FingerprintMismatch)?;
        let url = order.source.url.trim_end_matches('/').to_owned();
        let url = url.as_str();
        let fingerprint = match self.peers.known(url) {
            Some(known) => known?,
            None => {
                let outcome = self.examine(url, local).await;
                // A peer that cannot be reached is asked again with the next request.
                if !matches!(outcome, Err(HandoffFailure::PrefillDown | HandoffFailure::PrefillStalled)) {
                    self.peers.remember(url, outcome);
                }
                outcome?
            }
        };
        let outcome = {
            let peer = Peer { url, fingerprint, local };
            self.receive(&peer, order, &self.codecs(), |kv| sink.send(Pulled::Chunk(kv))).await
        };
        if outcome.as_ref().is_err_and(|f| *f == HandoffFailure::FingerprintMismatch) {
            self.peers.forget(url);
        }
        outcome
    }

    fn codecs(&self) -> Vec<Codec> {
        if self.policy.codecs.is_empty() { vec![Codec::None] } else { self.policy.codecs.clone() }
    }

    /// Finds out whether a peer's KV may be taken.
    async fn examine(&self, url: &str, local: &LocalKv) -> Result<Fingerprint, HandoffFailure> {
        let node = RemoteEngine::new(&NodeAddress::Url(url.to_owned()), &self.cluster_key)
            .map_err(|_| HandoffFailure::PrefillDown)?;
        let info = tokio::time::timeout(HEAD_TIMEOUT, node.info()).await.map_err(|_| HandoffFailure::PrefillStalled)?;
        let info = info.map_err(|error| {
            tracing::warn!(url, %error, "the prefill node does not answer");
            failure_of(&error)
        })?;
        let Some(peer) = info.kv else {
            tracing::warn!(url, "the prefill node's model cannot be handed over");
            return Err(HandoffFailure::FingerprintMismatch);
        };
        match (compare(&local.identity, &peer), self.policy.max_canary_distance) {
            (Match::Exact, _) => Ok(peer.fingerprint),
            (Match::Impossible(why), _) => {
                tracing::warn!(url, why, "the prefill node's KV does not fit this model");
                Err(HandoffFailure::FingerprintMismatch)
            }
            (Match::OtherWeights, None) => {
                tracing::warn!(url, "the prefill node has other weights; --max-canary-distance would allow it");
                Err(HandoffFailure::FingerprintMismatch)
            }
            (Match::OtherWeights, Some(limit)) => {
                let distance = self.canary_distance(Peer { url, fingerprint: peer.fingerprint, local }).await?;
                let admitted = distance <= limit;
                tracing::warn!(url, distance, limit, admitted, "the prefill node has other weights: canary");
                if admitted { Ok(peer.fingerprint) } else { Err(HandoffFailure::CanaryFailed) }
            }
        }
    }

    /// Has the peer prefill the canary's tokens, and compares.
    async fn canary_distance(&self, peer: Peer<'_>) -> Result<f64, HandoffFailure> {
        let Peer { url, local, .. } = peer;
        let order = PullOrder {
            source: KvSource { url: url.to_owned(), codecs: Vec::new() },
            tokens: local.identity.canary.clone(),
            start: 0,
            cache_scope: CacheScope::SHARED,
            placement: Arc::new(|span, layout| Contiguous.place(span, layout)),
            buffers: mpsc::channel(1).1,
        };
        let theirs = Mutex::new(Vec::new());
        let keep = |kv: VerifiedKv| {
            theirs.lock().unwrap_or_else(PoisonError::into_inner).push(kv.into_chunk());
            std::future::ready(())
        };
        self.receive(&peer, order, &[Codec::None], keep).await?;
        let theirs = theirs.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(canary::distance_of_parts(&local.identity.layout, &local.canary, &theirs))
    }

    /// One pull. What arrives is verified here and handed to `take`, which may wait.
    async fn receive<F: Future<Output = ()>>(
        &self,
        peer: &Peer<'_>,
        order: PullOrder,
        codecs: &[Codec],
        take: impl Fn(VerifiedKv) -> F,
    ) -> Result<PullReport, HandoffFailure> {
        let Peer { url, fingerprint, local } = *peer;
        let id = HandoffId(rand::random());
        let request = PrefillRequest {
            handoff: id,
            tokens: order.tokens.clone(),
            start: order.start,
            codecs: codecs.iter().map(|codec| *codec as u8).collect(),
            fingerprint: local.identity.fingerprint,
            cache_scope: order.cache_scope,
        };
        let layout = local.identity.layout.clone();
        let handoff = Handoff { id, fingerprint, layout, start: order.start, tokens: order.tokens };
        let (place, mut buffers) = (order.placement, order.buffers);
        let placement = move |span: &Span, layout: &KvLayout| place(span, layout);
        let mut reader = Reader::with_placement(self.cluster_key.as_bytes(), handoff, codecs, placement)
            .map_err(|error| rejected(url, &error))?;
        let mut bytes = self.open(url, &request).await?.bytes_stream();
        let mut progress = Progress::default();
        loop {
            let piece = match tokio::time::timeout(STALL_TIMEOUT, bytes.next()).await {
                Err(_) => return Err(HandoffFailure::PrefillStalled),
                Ok(Some(Ok(piece))) => piece,
                Ok(Some(Err(_)) | None) => return Err(HandoffFailure::PrefillLost),
            };
            progress.n_bytes += piece.len() as u64;
            while let Ok(buffer) = buffers.try_recv() {
                reader.recycle(buffer);
            }
            let mut input = &piece[..];
            while let Some(event) = reader.read(&mut input).map_err(|error| refused(url, &error))? {
                match event {
                    Event::Head(_) => progress.head_at = Some(Instant::now()),
                    Event::Wait(_) => {}
                    Event::Frame(kv) => {
                        progress.frame_arrived();
                        take(kv).await;
                    }
                    Event::End(end) => return Ok(progress.report(&end)),
                    Event::Error(error) => {
                        tracing::warn!(url, %error, "the prefill failed");
                        return Err(failure_of(&error));
                    }
                }
            }
        }
    }

    async fn open(&self, url: &str, request: &PrefillRequest) -> Result<Response, HandoffFailure> {
        let call = self.client.post(format!("{url}{BASE_PATH}/prefill")).bearer_auth(&self.cluster_key).json(request);
        let sent = tokio::time::timeout(HEAD_TIMEOUT, call.send()).await.map_err(|_| HandoffFailure::PrefillStalled)?;
        let response = sent.map_err(|error| {
            tracing::warn!(url, %error, "the prefill node cannot be reached");
            HandoffFailure::PrefillDown
        })?;
        match accepted(Ok(response)).await {
            Ok(response) => Ok(response),
            Err(error) => {
                tracing::warn!(url, %error, "the prefill node refused");
                Err(failure_of(&error))
            }
        }
    }
}

/// Whom a pull goes to, and what both sides run.
#[derive(Clone, Copy)]
struct Peer<'a> {
    url: &'a str,
    fingerprint: Fingerprint,
    local: &'a LocalKv,
}

/// What is measured on the way.
#[derive(Default)]
struct Progress {
    n_bytes: u64,
    head_at: Option<Instant>,
    first_frame: Option<Instant>,
    last_frame: Option<Instant>,
}

impl Progress {
    fn frame_arrived(&mut self) {
        let now = Instant::now();
        self.first_frame.get_or_insert(now);
        self.last_frame = Some(now);
    }

    fn report(&self, end: &End) -> PullReport {
        let PrefillTimings { queue_ms, prefill_ms, stalled_ms, n_cached, n_computed, .. } = end.timings;
        // The prefill node's clock starts with the head, which came at once: its times are times after that, up to the
        // link's latency. The reader has checked that they are possible.
        let since_head = Duration::from_secs_f64((queue_ms + prefill_ms).clamp(0.0, 1e9) / 1e3);
        let transfer = self.first_frame.zip(self.last_frame).map_or(Duration::ZERO, |(first, last)| last - first);
        PullReport {
            n_cached,
            n_computed,
            n_bytes: self.n_bytes,
            queue_ms,
            prefill_ms,
            stalled_ms,
            transfer_ms: transfer.as_secs_f64() * 1e3,
            prefilled_at: self.head_at.unwrap_or_else(Instant::now) + since_head,
        }
    }
}

fn rejected(url: &str, error: &HandoffError) -> HandoffFailure {
    tracing::warn!(url, %error, "this prompt cannot be handed over");
    HandoffFailure::FingerprintMismatch
}

fn refused(url: &str, error: &FrameError) -> HandoffFailure {
    tracing::warn!(url, %error, "the prefill node's stream was refused");
    match error {
        FrameError::Fingerprint | FrameError::Layout => HandoffFailure::FingerprintMismatch,
        _ => HandoffFailure::FrameRejected,
    }
}

fn failure_of(error: &EngineError) -> HandoffFailure {
    match error {
        EngineError::Lost { .. } => HandoffFailure::PrefillDown,
        EngineError::Unavailable { .. } => HandoffFailure::PrefillStalled,
        EngineError::QueueFull { .. } => HandoffFailure::PrefillBusy,
        _ => HandoffFailure::PrefillRefused,
    }
}
