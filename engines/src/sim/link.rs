//! A simulated network: pulls between engines of one process, paced by a rate and a round trip.
//!
//! Chunks are written and verified as between two machines. Only the time is simulated: that of the model's whole KV,
//! however little the chunks carry. With tokio's paused time, hours take seconds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use baton_link::engine::{CHUNK_WINDOW, Engine, KvEvent, KvStream};
use baton_link::handoff::{KvPuller, LocalKv, PULL_WINDOW, PullEnd, PullEvent, PullOrder};
use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, KvSource, LinkMeasurement};
use futures::StreamExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::loopback::Loopback;
use super::{SimEngine, millis, seconds};

/// Bytes of a measurement.
const PROBE_BYTES: u32 = 8 << 20;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSpeed {
    /// Payload bytes per second. A rate that is not positive takes no time.
    pub bytes_per_second: f64,
    /// The time of a small message there and back.
    pub round_trip: Duration,
}

/// A decode engine's links to prefill engines. Its pulls share each link, chunk by chunk.
pub struct SimLink {
    peers: HashMap<String, Arc<SimPeer>>,
    local: OnceLock<LocalKv>,
}

struct SimPeer {
    engine: Arc<SimEngine>,
    wire: SimWire,
}

/// The wire of a link, which sends one thing after another.
pub(super) struct SimWire {
    pub(super) speed: LinkSpeed,
    /// When the wire has sent its last byte so far.
    free_at: Mutex<Instant>,
}

/// The prefill engine at the other end of a link.
pub struct LinkEnd {
    /// The address that [`KvSource`]s name it by.
    pub url: String,
    pub engine: Arc<SimEngine>,
    pub speed: LinkSpeed,
}

impl SimLink {
    /// Links to prefill engines.
    pub fn new(ends: impl IntoIterator<Item = LinkEnd>) -> SimLink {
        let peer = |LinkEnd { url, engine, speed }| (url, Arc::new(SimPeer { engine, wire: SimWire::new(speed) }));
        SimLink { peers: ends.into_iter().map(peer).collect(), local: OnceLock::new() }
    }
}

impl KvPuller for SimLink {
    fn introduce(&self, local: LocalKv) {
        if self.local.set(local).is_err() {
            tracing::error!("a link was given a second engine; it keeps serving the first");
        }
    }

    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent> {
        let (sender, receiver) = mpsc::channel(PULL_WINDOW);
        let peer = self.peers.get(&order.source.url).cloned();
        let local = self.local.get().cloned();
        tokio::spawn(async move {
            let pull = async {
                let peer = peer.ok_or(HandoffFailure::PrefillDown)?;
                let local = local.ok_or(HandoffFailure::FingerprintMismatch)?;
                peer.pull(&local, order, &sender, &*notify).await
            };
            let outcome = tokio::select! {
                outcome = pull => outcome,
                () = sender.closed() => return,
            };
            // Fails only if the reader has left.
            let _ = sender.send(PullEvent::End(outcome.unwrap_or_else(PullEnd::from))).await;
            notify();
        });
        receiver
    }

    fn measure_link(&self, source: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        let peer = self.peers.get(&source.url).cloned();
        Box::pin(async move {
            let peer = peer.ok_or(HandoffFailure::PrefillDown)?;
            Ok(peer.wire.measure().await)
        })
    }
}

/// When the first and the last of some bytes leave the sender.
pub(super) struct Transmission {
    pub(super) begins_at: Instant,
    pub(super) ends_at: Instant,
}

impl SimWire {
    pub(super) fn new(speed: LinkSpeed) -> SimWire {
        SimWire { speed, free_at: Mutex::new(Instant::now()) }
    }

    /// Puts bytes on the wire after those that were put there before.
    pub(super) fn send(&self, n_bytes: f64) -> Transmission {
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let begins_at = (*free_at).max(Instant::now());
        *free_at = begins_at + seconds(n_bytes, self.speed.bytes_per_second);
        Transmission { begins_at, ends_at: *free_at }
    }

    /// Takes the time of a measurement.
    pub(super) async fn measure(&self) -> LinkMeasurement {
        let LinkSpeed { bytes_per_second, round_trip } = self.speed;
        sleep_until(self.send(PROBE_BYTES.into()).ends_at + round_trip).await;
        // Computed, because the timer is too coarse for a fast link.
        let took = seconds(PROBE_BYTES.into(), bytes_per_second).max(Duration::from_nanos(1));
        LinkMeasurement { rtt_ms: millis(round_trip), n_bytes: PROBE_BYTES.into(), seconds: took.as_secs_f64() }
    }
}

/// A chunk on the link: when its first and its last byte arrive.
struct InFlight {
    first_byte_at: Instant,
    arrives_at: Instant,
    event: Result<KvEvent, EngineError>,
}

impl SimPeer {
    async fn pull(
        self: Arc<Self>,
        local: &LocalKv,
        order: PullOrder,
        sender: &mpsc::Sender<PullEvent>,
        notify: &(dyn Fn() + Send + Sync),
    ) -> Result<PullEnd, HandoffFailure> {
        let one_way = self.wire.speed.round_trip / 2;
        let bytes_per_token = self.bytes_per_token().await?;
        let (request, mut loopback) = Loopback::begin(local, order)?;
        sleep(one_way).await;
        let events = self.engine.prefill(request).await.map_err(|error| failure_of(&error))?;
        let head_at = Instant::now() + one_way;
        let (link, mut arriving) = mpsc::channel(CHUNK_WINDOW);
        let _engine = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&self).forward(events, bytes_per_token, link)));
        let mut n_bytes = 0.0;
        let mut state_bytes = 0;
        let mut first = None;
        let mut last = None;
        let failure = loop {
            let Some(InFlight { first_byte_at, arrives_at, event }) = arriving.recv().await else {
                break HandoffFailure::PrefillLost;
            };
            sleep_until(arrives_at).await;
            match event {
                Err(error) => break failure_of(&error),
                Ok(KvEvent::Begun) => {
                    if sender.send(PullEvent::Begun).await.is_ok() {
                        notify();
                    }
                }
                Ok(KvEvent::Chunk(chunk)) => {
                    n_bytes += f64::from(chunk.n_positions()) * bytes_per_token;
                    first.get_or_insert(first_byte_at);
                    last = Some(arrives_at);
                    match loopback.pass(&chunk) {
                        Err(failure) => break failure,
                        Ok(chunk) => {
                            if sender.send(PullEvent::Chunk(chunk)).await.is_ok() {
                                notify();
                            }
                        }
                    }
                }
                Ok(KvEvent::State(part)) => {
                    n_bytes += part.n_bytes() as f64;
                    state_bytes += part.n_bytes() as u64;
                    first.get_or_insert(first_byte_at);
                    last = Some(arrives_at);
                    match loopback.pass_states(&part) {
                        Err(failure) => break failure,
                        Ok(None) => {}
                        Ok(Some(state)) => {
                            if sender.send(PullEvent::State(state)).await.is_ok() {
                                notify();
                            }
                        }
                    }
                }
                Ok(KvEvent::End(timings)) => {
                    let since_head = Duration::from_secs_f64((timings.queue_ms + timings.prefill_ms) / 1e3);
                    let report = HandoffReport {
                        n_bytes: n_bytes as u64,
                        state_bytes,
                        transfer_ms: first.zip(last).map_or(0.0, |(first, last)| millis(last - first)),
                        ..HandoffReport::of_prefill(&timings)
                    };
                    return Ok(PullEnd { report, prefilled_at: Some((head_at + since_head).into_std()) });
                }
            }
        };
        Ok(PullEnd::failed(failure, n_bytes as u64))
    }

    /// Bytes of the model's whole KV for each token.
    async fn bytes_per_token(&self) -> Result<f64, HandoffFailure> {
        let info = self.engine.info().await.map_err(|error| failure_of(&error))?;
        Ok(info.kv.map_or(0.0, |kv| kv.bytes_per_token() as f64))
    }

    /// Puts chunks on the link as they are computed, so that the next one is computed while this one is sent.
    async fn forward(self: Arc<Self>, mut events: KvStream, bytes_per_token: f64, link: mpsc::Sender<InFlight>) {
        let one_way = self.wire.speed.round_trip / 2;
        while let Some(event) = events.next().await {
            let n_bytes = match &event {
                Ok(KvEvent::Chunk(chunk)) => f64::from(chunk.n_positions()) * bytes_per_token,
                Ok(KvEvent::State(part)) => part.n_bytes() as f64,
                Ok(KvEvent::Begun | KvEvent::End(_)) | Err(_) => 0.0,
            };
            let Transmission { begins_at, ends_at } = self.wire.send(n_bytes);
            let in_flight = InFlight { first_byte_at: begins_at + one_way, arrives_at: ends_at + one_way, event };
            if link.send(in_flight).await.is_err() {
                return;
            }
        }
    }
}

fn failure_of(error: &EngineError) -> HandoffFailure {
    match error {
        error if error.is_busy() => HandoffFailure::PrefillBusy,
        EngineError::NotFinite => HandoffFailure::NotFinite,
        _ => HandoffFailure::PrefillRefused,
    }
}

#[cfg(test)]
mod tests {
    use baton_link::handoff::ChunkBuffers;
    use baton_schemas::kv::{Contiguous, Placement};
    use baton_schemas::sequence::SequenceEvent;
    use baton_schemas::{CacheScope, SequenceRequest};

    use super::super::{SimConfig, kv};
    use super::*;

    /// A prompt of 8,192 tokens from a machine that prefills 5,570 tokens/s; its KV is 1 GiB. Returns the seconds to
    /// the first token, and the handoff's report.
    async fn handoff(bytes_per_second: f64, kv_bytes_carried: Option<u32>) -> (f64, HandoffReport) {
        let config = SimConfig {
            prefill_tps: 5_570.0,
            decode_tps: 50.0,
            kv_bytes_per_token: 131_072,
            kv_bytes_carried,
            ..SimConfig::default()
        };
        let prefill = Arc::new(SimEngine::new(config.clone()));
        let speed = LinkSpeed { bytes_per_second, round_trip: Duration::from_millis(2) };
        let link = SimLink::new([LinkEnd { url: "sim://spark".to_owned(), engine: prefill, speed }]);
        let decode = SimEngine::with_puller(SimConfig { prefill_tps: 1_000.0, ..config }, Some(Arc::new(link)));
        let request = SequenceRequest {
            prompt: (0..8_192).map(|i| i % 251).collect(),
            max_tokens: Some(2),
            ignore_eos: true,
            kv_source: Some(KvSource::at("sim://spark")),
            ..SequenceRequest::default()
        };
        let began = Instant::now();
        let mut timings = None;
        let mut first = None;
        let mut events = decode.generate(request).await.unwrap();
        while let Some(event) = events.next().await {
            match event.unwrap() {
                SequenceEvent::Handoff(handoff) => timings = Some(handoff),
                SequenceEvent::Token(_) => {
                    first.get_or_insert(began.elapsed());
                }
                SequenceEvent::Started { .. } | SequenceEvent::PrefillBegun | SequenceEvent::Finished { .. } => {}
            }
        }
        (first.unwrap().as_secs_f64(), timings.unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn the_wire_hides_behind_the_prefill_or_the_prefill_behind_the_wire() {
        let (ttft, fast) = handoff(1.25e9, Some(8)).await;
        // 1.47 s of prefill, 7 ms for the last chunk, a round trip, and a decode step.
        assert!((1.48..1.51).contains(&ttft), "{ttft}");
        assert_eq!((fast.n_tokens, fast.n_bytes, fast.failure), (8_191, 8_191 * 131_072, None));
        assert!(fast.after_prefill_ms < 20.0, "{fast:?}");
        let (ttft, slow) = handoff(0.125e9, Some(8)).await;
        assert!((8.5..8.7).contains(&ttft), "1 GiB takes 8.6 s, not {ttft}");
        assert!((slow.transfer_ms - slow.n_bytes as f64 / 0.125e9 * 1e3).abs() < 50.0, "{slow:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefill_node_computes_what_comes_before_the_wanted_positions_unless_it_has_it() {
        let config = SimConfig { prefill_tps: 1_000.0, ..SimConfig::default() };
        let local = kv::local(&config);
        let spark = SimEngine::new(config);
        let prefill = async |n_tokens: u32, start: u32| {
            let order = PullOrder {
                images: None,
                source: KvSource::at("sim://spark"),
                tokens: (0..n_tokens).map(|i| i % 251).collect(),
                start,
                checkpoints: Vec::new(),
                cache_scope: CacheScope::SHARED,
                ephemeral: false,
                gives_way: false,
                held_only: false,
                lossless: false,
                placement: Arc::new(|span, layout| Contiguous.place(span, layout)),
                buffers: ChunkBuffers::default(),
            };
            let (request, _) = Loopback::begin(&local, order).unwrap();
            let began = Instant::now();
            let mut events = spark.prefill(request).await.unwrap();
            let mut sent = 0;
            loop {
                match events.next().await.unwrap().unwrap() {
                    KvEvent::Chunk(chunk) => sent += chunk.n_positions(),
                    KvEvent::Begun | KvEvent::State(_) => {}
                    KvEvent::End(timings) => return (sent, timings.n_computed, began.elapsed().as_millis()),
                }
            }
        };
        assert_eq!(prefill(1_000, 900).await, (100, 1_000, 1_000));
        assert_eq!(prefill(1_100, 900).await, (200, 100, 100), "the first 1,000 are cached now");
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_chunks_carry_does_not_matter() {
        let light = handoff(2.5e9, Some(8)).await;
        let heavy = handoff(2.5e9, Some(1_024)).await;
        assert!((light.0 - heavy.0).abs() < 2e-3 && light.1.n_bytes == heavy.1.n_bytes, "{light:?} {heavy:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_measurement_gives_the_configured_speed() {
        let speed = LinkSpeed { bytes_per_second: 12.5e9, round_trip: Duration::from_micros(300) };
        let engine = Arc::new(SimEngine::new(SimConfig::default()));
        let link = SimLink::new([LinkEnd { url: "sim://a".to_owned(), engine, speed }]);
        let source = |url: &str| KvSource::at(url);
        let measured = link.measure_link(&source("sim://a")).await.unwrap();
        assert!((measured.n_bytes as f64 / measured.seconds / 12.5e9 - 1.0).abs() < 1e-3, "{measured:?}");
        assert_eq!(measured.rtt_ms, 0.3);
        assert_eq!(link.measure_link(&source("sim://b")).await, Err(HandoffFailure::PrefillDown));
    }
}
