//! KV on its way into and out of a sequence, as the scheduler sees it.

use std::ops::Range;
use std::time::{Duration, Instant};

use baton_schemas::handoff::{HandoffFailure, HandoffTimings};
use baton_schemas::kv::{Chunk, Span, VerifiedKv};
use tokio::sync::mpsc;

use crate::handoff::{PullReport, Pulled};

/// KV that goes to another node, chunk by chunk, as soon as it is computed.
pub(super) struct Export {
    chunks: mpsc::Sender<Exported>,
    /// First position that was not sent yet.
    next: u32,
    /// One past the last position wanted.
    end: u32,
    /// Since when a computed chunk has waited for room.
    waits_since: Option<Instant>,
}

/// A chunk, with the time copying it out took and the time it had to wait for before that.
pub(super) struct Exported {
    pub(super) chunk: Chunk,
    pub(super) took: Duration,
    pub(super) waited: Duration,
}

impl Export {
    /// Sends the positions `[start, end)` to `chunks`.
    pub(super) fn new(chunks: mpsc::Sender<Exported>, start: u32, end: u32) -> Self {
        Export { chunks, next: start, end, waits_since: None }
    }

    /// Whether positions below `n_kv` still have to be sent. Until they are, the sequence computes no further: a
    /// sliding window would overwrite them, and a slow reader must not make chunks pile up.
    pub(super) fn is_behind(&self, n_kv: usize) -> bool {
        self.next < self.reach(n_kv)
    }

    /// Whether all that is wanted is computed.
    pub(super) fn is_computed(&self, n_kv: usize) -> bool {
        self.reach(n_kv) == self.end
    }

    /// The next chunk that can be sent now, at most `max` positions, all computed; and how long it waited for room.
    pub(super) fn next_range(&mut self, n_kv: usize, max: usize) -> Option<(Range<u32>, Duration)> {
        let reach = self.reach(n_kv);
        if self.next >= reach {
            return None;
        }
        if self.chunks.capacity() == 0 {
            self.waits_since.get_or_insert_with(Instant::now);
            return None;
        }
        let waited = self.waits_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        Some((self.next..reach.min(self.next.saturating_add(max as u32)), waited))
    }

    /// Sends a chunk there was room for.
    pub(super) fn send(&mut self, exported: Exported) {
        self.next = exported.chunk.p1;
        if self.chunks.try_send(exported).is_err() {
            tracing::debug!("the reader of a prefill has gone");
        }
    }

    /// One past the last position wanted.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    fn reach(&self, n_kv: usize) -> u32 {
        u32::try_from(n_kv).unwrap_or(u32::MAX).min(self.end)
    }
}

/// KV that comes from another node.
pub(super) struct Import {
    pulled: mpsc::Receiver<Pulled>,
    began: Instant,
    timings: HandoffTimings,
}

/// What an import has next.
pub(super) enum Incoming {
    /// A verified chunk.
    Chunk(VerifiedKv),
    /// Nothing yet.
    Nothing,
    /// It is over; the report tells whether everything came.
    Over(HandoffTimings),
}

impl Import {
    pub(super) fn new(pulled: mpsc::Receiver<Pulled>) -> Self {
        Import { pulled, began: Instant::now(), timings: HandoffTimings::default() }
    }

    /// What has arrived. Never waits.
    pub(super) fn poll(&mut self) -> Incoming {
        match self.pulled.try_recv() {
            Ok(Pulled::Chunk(chunk)) => Incoming::Chunk(chunk),
            Ok(Pulled::End(report)) => Incoming::Over(self.finished(Ok(report))),
            Ok(Pulled::Failed(failure)) => Incoming::Over(self.finished(Err(failure))),
            Err(mpsc::error::TryRecvError::Empty) => Incoming::Nothing,
            // The pulling task died; it never ends without a last word.
            Err(mpsc::error::TryRecvError::Disconnected) => {
                Incoming::Over(self.finished(Err(HandoffFailure::PrefillLost)))
            }
        }
    }

    /// Takes note of a chunk that is in the cache now.
    pub(super) fn took(&mut self, span: &Span, took: Duration) {
        self.timings.n_tokens += span.p1 - span.p0;
        self.timings.import_ms += millis(took);
        self.timings.total_ms = millis(self.began.elapsed());
    }

    /// Ends the import because the engine could not take a chunk.
    pub(super) fn fail(&mut self, failure: HandoffFailure) -> HandoffTimings {
        self.finished(Err(failure))
    }

    fn finished(&mut self, outcome: Result<PullReport, HandoffFailure>) -> HandoffTimings {
        match outcome {
            Ok(report) => {
                let imported = self.began + Duration::from_secs_f64(self.timings.total_ms / 1e3);
                self.timings = HandoffTimings {
                    n_cached: report.n_cached,
                    n_computed: report.n_computed,
                    n_bytes: report.n_bytes,
                    queue_ms: report.queue_ms,
                    prefill_ms: report.prefill_ms,
                    stalled_ms: report.stalled_ms,
                    compute_ms: report.compute_ms,
                    transfer_ms: report.transfer_ms,
                    unhidden_ms: millis(imported.saturating_duration_since(report.prefilled_at)),
                    ..self.timings
                };
            }
            Err(failure) => {
                self.timings.failure = Some(failure);
                self.timings.total_ms = millis(self.began.elapsed());
            }
        }
        self.timings
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
