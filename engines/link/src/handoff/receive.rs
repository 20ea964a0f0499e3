//! One pull: sends a request to a prefill node and reads the records of its reply.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, PrefillRequest};
use baton_schemas::kv::{
    Codec, Fingerprint, FrameError, Handoff, HandoffEnd, HandoffError, HandoffHead, HandoffId, HandoffReader,
    HandoffRecord, KV_UPGRADE, KvLayout, Mac, Offer, Span, Wait,
};
use baton_schemas::node::BASE_PATH;
use futures::TryStreamExt;
use http::{StatusCode, header};
use reqwest::{Client, Response};
use tokio::io::AsyncRead;
use tokio::sync::Semaphore;
use tokio_util::io::StreamReader;

use super::codecs::{LinkCodecs, Sample};
use super::deadline::PullDeadline;
use super::policy::PullSettings;
use super::read_ahead::ReadAhead;
use super::sources::Sources;
use super::{LocalKv, PullEnd, PullEvent, PullOrder};
use crate::remote::{accepted, unreachable};
use crate::{awake, trace};

/// The client that all pulls of an engine share.
pub(super) struct PullClient {
    pub(super) sources: Sources,
    pub(super) settings: Arc<PullSettings>,
    /// A permit for each byte of [`PullPolicy::read_ahead`](super::policy::PullPolicy::read_ahead).
    pub(super) read_ahead: Semaphore,
    pub(super) links: LinkCodecs,
}

/// A prefill node whose KV is accepted.
pub(super) struct PrefillPeer<'a> {
    pub(super) http: &'a Client,
    pub(super) url: &'a str,
    /// [`KvSource::node`](baton_schemas::handoff::KvSource::node).
    pub(super) node: &'a str,
    /// The fingerprint of its model.
    pub(super) fingerprint: Fingerprint,
    /// The codecs that it may use.
    pub(super) codecs: PeerCodecs<'a>,
}

/// The codecs that a prefill node may use, fastest first.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerCodecs<'a> {
    pub(super) rows: &'a [Codec],
    pub(super) states: &'a [Codec],
}

/// Where chunks and states go as they arrive, and what counts them.
struct Sink<'m, T> {
    take: T,
    meter: &'m mut PullMeter,
}

impl PullClient {
    /// Makes one pull. Verifies chunks and states and passes them to `take`, which may wait.
    pub(super) async fn receive<F: Future<Output = ()>>(
        &self,
        from: PrefillPeer<'_>,
        local: &LocalKv,
        order: PullOrder,
        take: impl Fn(PullEvent) -> F,
    ) -> PullEnd {
        let mut meter = PullMeter::default();
        match self.read(from, local, order, Sink { take, meter: &mut meter }).await {
            Ok(end) => meter.ended(&end),
            Err(failure) => PullEnd::failed(failure, meter.n_bytes),
        }
    }

    /// Reads the records until the end.
    async fn read<F: Future<Output = ()>>(
        &self,
        from: PrefillPeer<'_>,
        local: &LocalKv,
        order: PullOrder,
        sink: Sink<'_, impl Fn(PullEvent) -> F>,
    ) -> Result<HandoffEnd, HandoffFailure> {
        let PrefillPeer { http, url, node, fingerprint, codecs } = from;
        let Sink { take, meter } = sink;
        let id = HandoffId(rand::random());
        let offer = Offer { codecs: codecs.rows, state_codecs: codecs.states, macs: Mac::best_first() };
        let state_bps = self.links.state_bps(node, codecs.states.first().copied().unwrap_or_default());
        let request = PrefillRequest { state_bps, ..request_of(&order, id, offer, local.identity.fingerprint) };
        let layout = local.identity.layout.clone();
        let state_bytes = layout.state_bytes() * (1 + order.checkpoints.len());
        let handoff = Handoff { id, fingerprint, layout, start: order.start, tokens: order.tokens };
        let buffers = order.buffers;
        let placement = move |span: &Span, layout: &KvLayout| (order.placement)(span, layout);
        let mut reader = HandoffReader::with_placement(self.settings.cluster_key.as_bytes(), handoff, offer, placement)
            .map_err(|error| rejected(url, &error))?;
        let predicted = order.source.patience_ms.map(|ms| Duration::from_millis(ms.into()));
        let mut pull_deadline = PullDeadline::new(predicted.unwrap_or(self.settings.policy.allowance), state_bytes);
        let mut bytes = ReadAhead::new(self.open(http, url, &request).await?, &self.read_ahead);
        reader.recycle(buffers.take().unwrap_or_default());
        loop {
            let asked = Instant::now();
            let deadline = pull_deadline.at().min(asked + self.settings.policy.timeouts.stall);
            let n_read = tokio::time::timeout_at(deadline.into(), bytes.read(reader.space())).await;
            let has_overslept = awake::has_overslept(deadline.max(asked).into());
            if has_overslept {
                pull_deadline.extend(asked.elapsed());
                bytes.has_paused(asked.elapsed());
            }
            let n_read = match n_read {
                // Bytes that came while this process was stopped are not read yet.
                Err(_) if has_overslept => continue,
                Err(_) => {
                    let lives = asked.elapsed() < self.settings.policy.timeouts.life_sign;
                    tracing::warn!(url, position = reader.position(), lives, "a pull missed its deadline");
                    return Err(match predicted {
                        Some(_) if lives => HandoffFailure::PrefillLate,
                        _ => HandoffFailure::PrefillStalled,
                    });
                }
                Ok(0) if bytes.may_be_cut_for_slow_reading() => {
                    tracing::warn!(url, "a pull was cut: this engine was busy for too long to take what came");
                    return Err(HandoffFailure::PrefillLate);
                }
                Ok(0) => return Err(HandoffFailure::PrefillLost),
                Ok(n_read) => n_read,
            };
            meter.n_bytes += n_read as u64;
            let record = reader.filled(n_read).map_err(|error| refused(url, &error))?;
            let event = match record {
                Some(HandoffRecord::Wait(wait)) if meter.has_just_begun(wait) => PullEvent::Begun,
                None | Some(HandoffRecord::Wait(_)) => continue,
                Some(HandoffRecord::Head(head)) => {
                    meter.begins(&as_asked(url, head, &request)?);
                    continue;
                }
                Some(HandoffRecord::Frame(kv)) => {
                    meter.rows_arrived(kv.buffer().len(), bytes.came_at().into());
                    pull_deadline.received(kv.span().p1 - kv.span().p0);
                    PullEvent::Chunk(kv)
                }
                Some(HandoffRecord::State(state)) => {
                    meter.states_arrived(bytes.came_at().into());
                    PullEvent::State(state)
                }
                Some(HandoffRecord::End(end)) => {
                    if let Some((codec, sample)) = meter.sample(&end) {
                        self.links.used(node, codec, sample);
                    }
                    return Ok(end);
                }
                Some(HandoffRecord::Error(error)) => {
                    return Err(reported(url, &error, request.held_only));
                }
            };
            let handed_on = Instant::now();
            bytes.read_during(take(event)).await;
            pull_deadline.extend(handed_on.elapsed());
            reader.recycle(buffers.take().unwrap_or_default());
        }
    }

    /// Sends the request. Returns the stream of records, from the connection itself or in the body of the reply.
    async fn open(
        &self,
        http: &Client,
        url: &str,
        request: &PrefillRequest,
    ) -> Result<Box<dyn AsyncRead + Send + Unpin>, HandoffFailure> {
        let call = http.post(format!("{url}{BASE_PATH}/prefill")).bearer_auth(&self.settings.cluster_key).json(request);
        let call = call.header(header::CONNECTION, "upgrade").header(header::UPGRADE, KV_UPGRADE);
        let call = match trace::traceparent(&tracing::Span::current()) {
            Some(parent) => call.header(trace::TRACEPARENT, parent),
            None => call,
        };
        // The deadline includes the body of a refusal, which can be as late as a head.
        let answer = async {
            let sent = call.send().await;
            match sent {
                Ok(reply) if reply.status() == StatusCode::SWITCHING_PROTOCOLS => {
                    let upgraded = reply.upgrade().await.map_err(unreachable)?;
                    Ok(Box::new(upgraded) as Box<dyn AsyncRead + Send + Unpin>)
                }
                // A node of an earlier version.
                sent => Ok(Box::new(body(accepted(sent).await?)) as Box<dyn AsyncRead + Send + Unpin>),
            }
        };
        let answer = tokio::time::timeout(self.settings.policy.timeouts.head, answer)
            .await
            .map_err(|_| HandoffFailure::PrefillStalled)?;
        answer.map_err(|error: EngineError| {
            tracing::warn!(url, %error, "a pull failed: the prefill node refused it or cannot be reached");
            failure_of(&error)
        })
    }
}

fn request_of(order: &PullOrder, handoff: HandoffId, offer: Offer<'_>, fingerprint: Fingerprint) -> PrefillRequest {
    let is_narrowed = offer.state_codecs.iter().any(|codec| *codec != Codec::None);
    PrefillRequest {
        handoff,
        tokens: order.tokens.clone(),
        images: order.images.clone(),
        start: order.start,
        checkpoints: order.checkpoints.clone(),
        codecs: offer.codecs.iter().map(|codec| *codec as u8).collect(),
        // Every reader takes states as they are: a list that says no more is left out.
        state_codecs: offer.state_codecs.iter().map(|codec| *codec as u8).filter(|_| is_narrowed).collect(),
        state_bps: None,
        macs: offer.macs.iter().map(|mac| *mac as u8).collect(),
        fingerprint,
        cache_scope: order.cache_scope,
        ephemeral: order.ephemeral,
        gives_way: order.gives_way,
        held_only: order.held_only,
    }
}

/// Refuses a head that names states which were not asked for: they would cost a copy of all states each.
fn as_asked(url: &str, head: HandoffHead, request: &PrefillRequest) -> Result<HandoffHead, HandoffFailure> {
    let has_asked = |position: &u32| *position == head.end || request.checkpoints.contains(position);
    match head.states_at.iter().all(has_asked) {
        true => Ok(head),
        false => {
            tracing::warn!(url, positions = ?head.states_at, "a pull failed: the prefill node has unwanted checkpoints");
            Err(HandoffFailure::FrameRejected)
        }
    }
}

/// The body of a reply, as a stream of bytes.
fn body(reply: Response) -> impl AsyncRead + Send + Unpin {
    StreamReader::new(Box::pin(reply.bytes_stream().map_err(io::Error::other)))
}

/// The measurements of one pull.
#[derive(Default)]
struct PullMeter {
    /// Bytes received.
    n_bytes: u64,
    /// Bytes of the decoded rows.
    n_plain: u64,
    /// Bytes of states in the stream, which the codec of rows does not encode.
    n_state: u64,
    /// Bytes of the states of one position in the stream.
    bytes_of_states: u64,
    codec: Option<Codec>,
    head_at: Option<Instant>,
    /// The prefill node has said that it has begun.
    has_begun: bool,
    /// When the first and the last rows or states had come.
    first: Option<Instant>,
    last: Option<Instant>,
}

impl PullMeter {
    fn begins(&mut self, head: &HandoffHead) {
        self.codec = Some(head.codec);
        self.bytes_of_states = head.layout.states.iter().map(|state| head.state_codec.state_bytes(state) as u64).sum();
        self.head_at = Some(Instant::now());
    }

    /// Returns true for the first sign that the prefill node has begun.
    fn has_just_begun(&mut self, wait: Wait) -> bool {
        wait.has_begun && !std::mem::replace(&mut self.has_begun, true)
    }

    /// Rows have come: a frame with a buffer of `n_bytes`.
    fn rows_arrived(&mut self, n_bytes: usize, at: Instant) {
        self.n_plain += n_bytes as u64;
        self.arrived(at);
    }

    /// All states of a position have come.
    fn states_arrived(&mut self, at: Instant) {
        self.n_state += self.bytes_of_states;
        self.arrived(at);
    }

    fn arrived(&mut self, at: Instant) {
        self.first.get_or_insert(at);
        self.last = Some(at);
    }

    /// The codec's effect. `None` before the head has come.
    fn sample(&self, end: &HandoffEnd) -> Option<(Codec, Sample)> {
        let encode_ms = end.timings.encode_ms;
        let n_wire = self.n_bytes.saturating_sub(self.n_state);
        Some((self.codec?, Sample { n_plain: self.n_plain, n_wire, encode_ms }))
    }

    fn ended(&self, end: &HandoffEnd) -> PullEnd {
        // The prefill node's times count from the head, which it sends at once. They are exact up to the link's
        // latency, and the reader has checked that they are possible.
        let prefill_ms = end.timings.queue_ms + end.timings.prefill_ms;
        let since_head = Duration::from_secs_f64(prefill_ms.clamp(0.0, 1e9) / 1e3);
        let transfer = self.first.zip(self.last).map_or(Duration::ZERO, |(first, last)| last - first);
        let report = HandoffReport {
            n_bytes: self.n_bytes,
            state_bytes: self.n_state,
            checkpoint_bytes: self.n_state.saturating_sub(self.bytes_of_states),
            transfer_ms: transfer.as_secs_f64() * 1e3,
            ..HandoffReport::of_prefill(&end.timings)
        };
        PullEnd { report, prefilled_at: Some(self.head_at.unwrap_or_else(Instant::now) + since_head) }
    }
}

fn rejected(url: &str, error: &HandoffError) -> HandoffFailure {
    tracing::warn!(url, %error, "a pull was not started: this prompt cannot be handed over");
    HandoffFailure::FingerprintMismatch
}

fn refused(url: &str, error: &FrameError) -> HandoffFailure {
    tracing::warn!(url, %error, "a pull failed: the prefill node sent an invalid stream");
    match error {
        FrameError::Fingerprint | FrameError::Layout => HandoffFailure::FingerprintMismatch,
        FrameError::NotFinite { .. } | FrameError::StateNotFinite { .. } => HandoffFailure::NotFinite,
        _ => HandoffFailure::FrameRejected,
    }
}

/// The other node ended the stream. That it no longer holds all of a reply is no fault.
fn reported(url: &str, error: &EngineError, held_only: bool) -> HandoffFailure {
    match held_only {
        true => tracing::debug!(url, %error, "a return of KV ended early"),
        false => tracing::warn!(url, %error, "a pull failed: the prefill node reported an error"),
    }
    failure_of(error)
}

/// The failure for a prefill node's error.
pub(super) fn failure_of(error: &EngineError) -> HandoffFailure {
    match error {
        EngineError::Lost { .. } => HandoffFailure::PrefillDown,
        EngineError::Unavailable { .. } => HandoffFailure::PrefillStalled,
        EngineError::Unauthorized => HandoffFailure::KeyRefused,
        // This node lacks what a connection needs, so the prefill node is not to blame.
        EngineError::NoResources { .. } => HandoffFailure::PrefillLate,
        error if error.is_busy() => HandoffFailure::PrefillBusy,
        EngineError::GaveWay => HandoffFailure::GaveWay,
        EngineError::NotFinite => HandoffFailure::NotFinite,
        _ => HandoffFailure::PrefillRefused,
    }
}
