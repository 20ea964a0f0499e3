//! One pull: a request to a prefill node, and the records that answer it.

use std::time::{Duration, Instant};

use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, PrefillRequest};
use baton_schemas::kv::{
    Codec, Fingerprint, FrameError, Handoff, HandoffEnd, HandoffError, HandoffId, HandoffReader, HandoffRecord,
    KvLayout, Span, VerifiedKv,
};
use baton_schemas::node::BASE_PATH;
use futures::StreamExt;
use reqwest::{Client, Response};

use super::codecs::{LinkCodecs, Sample};
use super::patience::PullPatience;
use super::policy::PullPolicy;
use super::{LocalKv, PullEnd, PullOrder};
use crate::remote::accepted;
use crate::trace;

/// What all pulls of an engine share.
pub(super) struct PullClient {
    pub(super) http: Client,
    pub(super) cluster_key: String,
    pub(super) policy: PullPolicy,
    pub(super) links: LinkCodecs,
}

/// A prefill node whose KV is taken.
pub(super) struct PrefillPeer<'a> {
    pub(super) url: &'a str,
    /// What it runs.
    pub(super) fingerprint: Fingerprint,
    /// What it may answer with, best first.
    pub(super) codecs: &'a [Codec],
}

impl PullClient {
    /// One pull. What arrives is verified here and handed to `take`, which may wait.
    pub(super) async fn receive<F: Future<Output = ()>>(
        &self,
        from: PrefillPeer<'_>,
        local: &LocalKv,
        order: PullOrder,
        take: impl Fn(VerifiedKv) -> F,
    ) -> Result<PullEnd, HandoffFailure> {
        let PrefillPeer { url, fingerprint, codecs } = from;
        let id = HandoffId(rand::random());
        let request = PrefillRequest {
            handoff: id,
            tokens: order.tokens.clone(),
            start: order.start,
            codecs: codecs.iter().map(|codec| *codec as u8).collect(),
            fingerprint: local.identity.fingerprint,
            cache_scope: order.cache_scope,
            ephemeral: order.ephemeral,
        };
        let layout = local.identity.layout.clone();
        let handoff = Handoff { id, fingerprint, layout, start: order.start, tokens: order.tokens };
        let (place, buffers) = (order.placement, order.buffers);
        let placement = move |span: &Span, layout: &KvLayout| place(span, layout);
        let mut reader = HandoffReader::with_placement(self.cluster_key.as_bytes(), handoff, codecs, placement)
            .map_err(|error| rejected(url, &error))?;
        let predicted = order.source.patience_ms.map(|ms| Duration::from_millis(ms.into()));
        let mut patience = PullPatience::new(predicted.unwrap_or(self.policy.allowance));
        let mut bytes = self.open(url, &request).await?.bytes_stream();
        let mut progress = PullProgress::default();
        reader.recycle(buffers.take());
        loop {
            let asked = Instant::now();
            let deadline = patience.deadline().min(asked + self.policy.timeouts.stall);
            let piece = match tokio::time::timeout_at(deadline.into(), bytes.next()).await {
                Err(_) => {
                    let lives = asked.elapsed() < self.policy.timeouts.life_sign;
                    tracing::warn!(url, position = reader.position(), lives, "the prefill node stalls");
                    return Err(match predicted {
                        Some(_) if lives => HandoffFailure::PrefillLate,
                        _ => HandoffFailure::PrefillStalled,
                    });
                }
                Ok(Some(Ok(piece))) => piece,
                Ok(Some(Err(_)) | None) => return Err(HandoffFailure::PrefillLost),
            };
            progress.n_bytes += piece.len() as u64;
            let mut input = &piece[..];
            while let Some(event) = reader.read(&mut input).map_err(|error| refused(url, &error))? {
                match event {
                    HandoffRecord::Head(head) => progress.begins(head.codec),
                    HandoffRecord::Wait(_) => {}
                    HandoffRecord::Frame(kv) => {
                        progress.frame_arrived(&kv);
                        patience.received(kv.span().p1 - kv.span().p0);
                        let handed_on = Instant::now();
                        take(kv).await;
                        patience.excuse(handed_on.elapsed());
                        reader.recycle(buffers.take());
                    }
                    HandoffRecord::End(end) => {
                        if let Some((codec, sample)) = progress.sample(&end) {
                            self.links.used(url, codec, sample);
                        }
                        return Ok(progress.ended(&end));
                    }
                    HandoffRecord::Error(error) => {
                        tracing::warn!(url, %error, "the prefill failed");
                        return Err(failure_of(&error));
                    }
                }
            }
        }
    }

    async fn open(&self, url: &str, request: &PrefillRequest) -> Result<Response, HandoffFailure> {
        let call = self.http.post(format!("{url}{BASE_PATH}/prefill")).bearer_auth(&self.cluster_key).json(request);
        let call = match trace::traceparent(&tracing::Span::current()) {
            Some(parent) => call.header(trace::TRACEPARENT, parent),
            None => call,
        };
        // With the body of a refusal, which could be as long in coming as a head.
        let answer = async { accepted(call.send().await).await };
        let answer = tokio::time::timeout(self.policy.timeouts.head, answer)
            .await
            .map_err(|_| HandoffFailure::PrefillStalled)?;
        answer.map_err(|error| {
            tracing::warn!(url, %error, "the prefill node refused or cannot be reached");
            failure_of(&error)
        })
    }
}

/// What is measured on the way.
#[derive(Default)]
struct PullProgress {
    n_bytes: u64,
    /// Bytes of the rows as they are held here.
    n_plain: u64,
    codec: Option<Codec>,
    head_at: Option<Instant>,
    first_frame: Option<Instant>,
    last_frame: Option<Instant>,
}

impl PullProgress {
    fn begins(&mut self, codec: Codec) {
        self.codec = Some(codec);
        self.head_at = Some(Instant::now());
    }

    fn frame_arrived(&mut self, kv: &VerifiedKv) {
        self.n_plain += kv.buffer().len() as u64;
        let now = Instant::now();
        self.first_frame.get_or_insert(now);
        self.last_frame = Some(now);
    }

    /// What the codec did to this KV.
    fn sample(&self, end: &HandoffEnd) -> Option<(Codec, Sample)> {
        let encode_ms = end.timings.encode_ms;
        Some((self.codec?, Sample { n_plain: self.n_plain, n_wire: self.n_bytes, encode_ms }))
    }

    fn ended(&self, end: &HandoffEnd) -> PullEnd {
        // The prefill node's clock starts with the head, which came at once: its times are times after that, up to the
        // link's latency. The reader has checked that they are possible.
        let prefill_ms = end.timings.queue_ms + end.timings.prefill_ms;
        let since_head = Duration::from_secs_f64(prefill_ms.clamp(0.0, 1e9) / 1e3);
        let transfer = self.first_frame.zip(self.last_frame).map_or(Duration::ZERO, |(first, last)| last - first);
        let report = HandoffReport {
            n_bytes: self.n_bytes,
            transfer_ms: transfer.as_secs_f64() * 1e3,
            ..HandoffReport::of_prefill(&end.timings)
        };
        PullEnd { report, prefilled_at: Some(self.head_at.unwrap_or_else(Instant::now) + since_head) }
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

/// Why there is no pull, by what the node answered or did not.
pub(super) fn failure_of(error: &EngineError) -> HandoffFailure {
    match error {
        EngineError::Lost { .. } => HandoffFailure::PrefillDown,
        EngineError::Unavailable { .. } => HandoffFailure::PrefillStalled,
        EngineError::QueueFull { .. } => HandoffFailure::PrefillBusy,
        _ => HandoffFailure::PrefillRefused,
    }
}
