//! Real pulls that take the time of a simulated link.
//!
//! Frames cross a real connection and are verified as always, but they carry little ([`SimConfig::kv_bytes_carried`]). Each
//! is handed on when the link would have carried the model's whole KV, and reports give those bytes.
//!
//! [`SimConfig::kv_bytes_carried`]: super::SimConfig::kv_bytes_carried

use std::sync::Arc;

use baton_link::handoff::{KvPuller, LocalKv, PULL_WINDOW, PullEnd, PullEvent, PullOrder};
use baton_schemas::handoff::{HandoffFailure, HandoffReport, KvSource, LinkMeasurement};
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::link::{SimWire, Transmission};
use super::{SimMachine, millis};

/// A puller whose pulls share a simulated link, chunk by chunk.
pub struct PacedPuller {
    inner: Arc<dyn KvPuller>,
    wire: Arc<SimWire>,
    bytes_per_token: f64,
}

impl PacedPuller {
    /// Paces the pulls of `inner` by the link of a machine.
    pub fn new(inner: Arc<dyn KvPuller>, machine: &SimMachine) -> PacedPuller {
        let wire = Arc::new(SimWire::new(machine.link()));
        PacedPuller { inner, wire, bytes_per_token: machine.kv_bytes_per_token.into() }
    }
}

impl KvPuller for PacedPuller {
    fn introduce(&self, local: LocalKv) {
        self.inner.introduce(local);
    }

    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent> {
        let (sender, receiver) = mpsc::channel(PULL_WINDOW);
        let arriving = self.inner.pull(order, Arc::new(|| ()));
        let pace = PullOnLink {
            wire: Arc::clone(&self.wire),
            bytes_per_token: self.bytes_per_token,
            n_bytes: 0.0,
            from: None,
        };
        tokio::spawn(async move {
            tokio::select! {
                () = pace.forward(arriving, &sender, &*notify) => {}
                // The sequence was cancelled: dropping the inner receiver cancels its pull.
                () = sender.closed() => {}
            }
        });
        receiver
    }

    fn takes_other_weights(&self) -> bool {
        self.inner.takes_other_weights()
    }

    fn measure_link(&self, source: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        let reached = self.inner.measure_link(source);
        let wire = Arc::clone(&self.wire);
        Box::pin(async move {
            // The real measurement shows that the other machine is there.
            reached.await?;
            Ok(wire.measure().await)
        })
    }
}

/// One pull on the link.
struct PullOnLink {
    wire: Arc<SimWire>,
    bytes_per_token: f64,
    /// Bytes that the link has carried for this pull.
    n_bytes: f64,
    /// When its first byte was sent.
    from: Option<Instant>,
}

impl PullOnLink {
    async fn forward(
        mut self,
        mut arriving: mpsc::Receiver<PullEvent>,
        sender: &mpsc::Sender<PullEvent>,
        notify: &(dyn Fn() + Send + Sync),
    ) {
        while let Some(event) = arriving.recv().await {
            let event = match event {
                PullEvent::Chunk(kv) => {
                    let n_bytes = f64::from(kv.span().p1 - kv.span().p0) * self.bytes_per_token;
                    self.n_bytes += n_bytes;
                    let Transmission { begins_at, ends_at } = self.wire.send(n_bytes);
                    self.from.get_or_insert(begins_at);
                    sleep_until(ends_at + self.wire.speed.round_trip / 2).await;
                    PullEvent::Chunk(kv)
                }
                PullEvent::State(state) => {
                    let n_bytes = state.layout().state_bytes() as f64;
                    self.n_bytes += n_bytes;
                    sleep_until(self.wire.send(n_bytes).ends_at + self.wire.speed.round_trip / 2).await;
                    PullEvent::State(state)
                }
                PullEvent::Begun => PullEvent::Begun,
                PullEvent::End(end) => PullEvent::End(self.end(end)),
            };
            // Fails only if the reader has left.
            if sender.send(event).await.is_err() {
                return;
            }
            notify();
        }
    }

    /// The report with the simulated link's figures.
    fn end(&self, end: PullEnd) -> PullEnd {
        let transfer_ms = self.from.map_or(0.0, |from| millis(from.elapsed()));
        PullEnd { report: HandoffReport { n_bytes: self.n_bytes as u64, transfer_ms, ..end.report }, ..end }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_link::engine::Engine;
    use baton_schemas::SequenceRequest;
    use baton_schemas::sequence::SequenceEvent;
    use futures::StreamExt;

    use super::super::link::{LinkEnd, LinkSpeed, SimLink};
    use super::super::{SimConfig, SimEngine};
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pull_takes_the_time_of_the_whole_kv_and_reports_it() {
        let machine = SimMachine {
            name: "Spark".into(),
            prefill_tps: 5_570.0,
            decode_tps: 50.0,
            decode_sharing_cost: 0.0,
            kv_bytes_per_token: 131_072,
            link_bytes_per_second: 0.125e9,
            link_round_trip_ms: 2.0,
        };
        let config = machine.configure(SimConfig::default());
        let speed = LinkSpeed { bytes_per_second: 0.0, round_trip: Duration::ZERO };
        let engine = Arc::new(SimEngine::new(config.clone()));
        let inner = SimLink::new([LinkEnd { url: "sim://spark".into(), engine, speed }]);
        let puller = PacedPuller::new(Arc::new(inner), &machine);
        let measured = puller.measure_link(&KvSource::at("sim://spark")).await.unwrap();
        assert!((measured.n_bytes as f64 / measured.seconds / 0.125e9 - 1.0).abs() < 1e-3, "{measured:?}");
        let decode = SimEngine::with_puller(config, Some(Arc::new(puller)));
        let request = SequenceRequest {
            prompt: (0..8_192).map(|i| i % 251).collect(),
            max_tokens: Some(1),
            ignore_eos: true,
            kv_source: Some(KvSource::at("sim://spark")),
            ..SequenceRequest::default()
        };
        let began = Instant::now();
        let mut events = decode.generate(request).await.unwrap();
        let mut handoff = None;
        while let Some(event) = events.next().await {
            if let SequenceEvent::Handoff(report) = event.unwrap() {
                handoff = Some(report);
            }
        }
        // 1 GiB at 0.125 GB/s, after the first chunk was computed, and a decode step.
        let seconds = began.elapsed().as_secs_f64();
        assert!((8.6..8.9).contains(&seconds), "{seconds}");
        let handoff = handoff.unwrap();
        assert_eq!((handoff.n_bytes, handoff.failure), (8_191 * 131_072, None));
        // The link holds the prefill up, or is waited for after it.
        assert!(handoff.stalled_ms + handoff.after_prefill_ms > 7_000.0, "{handoff:?}");
    }
}
