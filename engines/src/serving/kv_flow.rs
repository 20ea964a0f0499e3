//! The progress of KV into and out of a sequence, as the scheduler tracks it.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use baton_link::engine::{CHUNK_WINDOW, KvEvent};
use baton_link::handoff::{PullEnd, PullEvent};
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::kv::{Chunk, Span, StatePart, VerifiedKv, VerifiedState};
use baton_store::{Restore, StoredPrefix};
use bytes::Bytes;
use tokio::sync::mpsc;

/// The export of a sequence's KV to another node, chunk by chunk, as soon as it is computed. The states of its end leave while
/// the last chunk is computed, or follow it; those of checkpoints follow the rows before them.
pub(crate) struct Export {
    chunks: mpsc::Sender<Exported>,
    /// The first position that was not sent yet.
    next: u32,
    /// One past the last requested position.
    end: u32,
    /// The checkpoints whose states were not sent yet, ascending.
    checkpoints: VecDeque<PromisedStates>,
    /// The states at the end that still have to be sent. The channel has room for them beside the chunks.
    n_states: usize,
    /// The time that the link takes for the states, if it was measured.
    state_time: Option<Duration>,
    /// When a computed chunk began to wait for room in the channel.
    waits_since: Option<Instant>,
}

/// The states at a checkpoint, which the head of the stream names.
struct PromisedStates {
    position: u32,
    /// The slot's own checkpoint, if the slot has tokens beyond it from the beginning.
    copy: Option<Bytes>,
}

/// KV for another node, the time that copying it out took, and the time it waited for room before that.
pub(crate) struct Exported {
    pub(crate) kv: ExportedKv,
    pub(crate) took: Duration,
    pub(crate) waited: Duration,
}

pub(crate) enum ExportedKv {
    Chunk(Chunk),
    State(StatePart),
}

/// The next part of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NextExport {
    /// The rows of these positions.
    Rows(Range<u32>),
    /// The states at this position: those of the slot's end, or of a checkpoint.
    States(u32, Option<Bytes>),
}

impl Export {
    /// An export of the positions `[start, end)`, of the model's `n_states` states at the end, and of those at `checkpoints`
    /// before it, ascending. Also returns what it yields.
    pub(crate) fn new(start: u32, end: u32, n_states: usize, checkpoints: &[u32]) -> (Self, mpsc::Receiver<Exported>) {
        let (chunks, exported) = mpsc::channel(CHUNK_WINDOW + n_states);
        let promised = checkpoints.iter().filter(|_| n_states > 0);
        let checkpoints = promised.map(|&position| PromisedStates { position, copy: None }).collect();
        (Export { chunks, next: start, end, checkpoints, n_states, state_time: None, waits_since: None }, exported)
    }

    /// The same over a link that takes this time for the states.
    pub(crate) fn over(self, state_time: Option<Duration>) -> Self {
        Export { state_time, ..self }
    }

    /// The position up to which the reader has everything.
    pub(crate) fn start(&self) -> usize {
        self.next as usize
    }

    /// The prompt tokens that an engine with this rate computes while the states travel. `None`: a rate is not known.
    pub(crate) fn tokens_beside_states(&self, tps: f64) -> Option<usize> {
        self.state_time.filter(|_| tps > 0.0).map(|time| (time.as_secs_f64() * tps) as usize)
    }

    /// The checkpoints that the slot must still have, or come to.
    pub(crate) fn checkpoints(&self) -> impl Iterator<Item = usize> {
        self.checkpoints.iter().map(|promised| promised.position as usize)
    }

    /// Takes the copies of states from the slot's own checkpoints, before the slot may lose these.
    pub(crate) fn take_copies(&mut self, mut copy: impl FnMut(usize) -> Option<Bytes>) {
        self.checkpoints.iter_mut().for_each(|promised| promised.copy = copy(promised.position as usize));
    }

    /// Returns true if a slot with `n_kv` tokens has reached the end, whose states were not sent.
    pub(crate) fn owes_states_at(&self, n_kv: usize) -> bool {
        self.n_states > 0 && self.is_computed(n_kv)
    }

    /// Returns true if positions below `n_kv`, or states, still have to be sent. Until then the sequence computes nothing more: a
    /// sliding window would overwrite them, and a slow reader must not make chunks pile up.
    pub(crate) fn is_behind(&self, n_kv: usize) -> bool {
        self.next < self.reach(n_kv) || self.due(n_kv).is_some() || self.owes_states_at(n_kv)
    }

    /// The first checkpoint, if the slot has come to it.
    fn due(&self, n_kv: usize) -> Option<&PromisedStates> {
        self.checkpoints.front().filter(|promised| promised.position <= self.reach(n_kv))
    }

    /// Returns true if all requested positions are computed.
    pub(crate) fn is_computed(&self, n_kv: usize) -> bool {
        self.reach(n_kv) == self.end
    }

    /// The next part that can be sent now, at most `max` positions, and how long it waited for room.
    pub(crate) fn next(&mut self, n_kv: usize, max: usize) -> Option<(NextExport, Duration)> {
        if !self.is_behind(n_kv) {
            return None;
        }
        if self.chunks.capacity() <= self.n_states {
            self.waits_since.get_or_insert_with(Instant::now);
            return None;
        }
        let waited = self.waits_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        let reach = self.due(n_kv).map_or(self.reach(n_kv), |promised| promised.position);
        let next = match (self.next < reach, self.due(n_kv)) {
            // The reader imports states at the end of a chunk.
            (true, _) => NextExport::Rows(self.next..reach.min(self.next.saturating_add(max as u32))),
            (false, Some(PromisedStates { position, copy })) => NextExport::States(*position, copy.clone()),
            (false, None) => NextExport::States(self.end, None),
        };
        Some((next, waited))
    }

    /// Sends what [`Export::next`] named, or states that were just computed.
    pub(crate) fn send(&mut self, exported: Exported) {
        match &exported.kv {
            ExportedKv::Chunk(chunk) => self.next = chunk.p1,
            ExportedKv::State(part) if part.position == self.end => {
                self.n_states = self.n_states.saturating_sub(part.tensors.len());
            }
            ExportedKv::State(_) => drop(self.checkpoints.pop_front()),
        }
        if self.chunks.try_send(exported).is_err() {
            tracing::debug!("the reader of a prefill has left");
        }
    }

    /// One past the last requested position.
    pub(crate) fn end(&self) -> u32 {
        self.end
    }

    fn reach(&self, n_kv: usize) -> u32 {
        u32::try_from(n_kv).unwrap_or(u32::MAX).min(self.end)
    }
}

/// The import of KV from another node.
pub(crate) struct Import {
    pulled: mpsc::Receiver<PullEvent>,
    /// The address of the node that it pulls from.
    url: String,
    /// The first position that it brings.
    pub(crate) start: usize,
    /// States that have arrived before the rows up to their position.
    state: Option<VerifiedState>,
    began: Instant,
    /// When the store had given what comes before it, if the pull began before that.
    restored_at: Option<Instant>,
    n_tokens: u32,
    /// What came is not what the other node has computed.
    pub(crate) is_lossy: bool,
    took: Duration,
    last_chunk: Instant,
}

impl Import {
    pub(crate) fn new(url: String, start: usize, pulled: mpsc::Receiver<PullEvent>) -> Self {
        let began = Instant::now();
        let (took, last_chunk) = (Duration::ZERO, began);
        let (state, restored_at, n_tokens, is_lossy) = (None, None, 0, false);
        Import { pulled, url, start, state, began, restored_at, n_tokens, is_lossy, took, last_chunk }
    }

    /// Takes note that what comes before it has come from the store.
    pub(crate) fn has_its_beginning(&mut self) {
        self.restored_at = Some(Instant::now());
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The next event, if one has arrived: a verified chunk, or the end with the whole handoff's report. Never waits.
    pub(crate) fn poll(&mut self) -> Option<KvEvent<VerifiedKv, VerifiedState, HandoffReport>> {
        match self.pulled.try_recv() {
            Ok(KvEvent::Begun) => Some(KvEvent::Begun),
            Ok(KvEvent::Chunk(chunk)) => Some(KvEvent::Chunk(chunk)),
            Ok(KvEvent::State(state)) => Some(KvEvent::State(state)),
            Ok(KvEvent::End(end)) => Some(KvEvent::End(self.report(end))),
            Err(mpsc::error::TryRecvError::Empty) => None,
            // The pulling task panicked: otherwise it always sends an end.
            Err(mpsc::error::TryRecvError::Disconnected) => {
                Some(KvEvent::End(self.report(HandoffFailure::PrefillLost.into())))
            }
        }
    }

    /// Keeps states until the rows reach their position. Only the newest are kept.
    pub(crate) fn keep_state(&mut self, state: VerifiedState) {
        self.state = Some(state);
    }

    /// The states of a slot that ends after `n_kv` tokens, if they have arrived.
    pub(crate) fn take_state(&mut self, n_kv: usize) -> Option<VerifiedState> {
        self.state.take_if(|state| state.position() as usize == n_kv)
    }

    /// Returns true if another sequence should wait for `n_missing` further positions of this pull, instead of computing
    /// them here in `compute`. `None`: that time is unknown.
    pub(crate) fn is_worth_waiting(&self, n_missing: usize, compute: Option<Duration>) -> bool {
        is_worth_waiting(self.began.elapsed(), self.n_tokens, n_missing, compute)
    }

    /// Counts a chunk that was imported in `took`.
    pub(crate) fn count(&mut self, span: &Span, took: Duration) {
        self.n_tokens += span.p1 - span.p0;
        self.spent(took);
    }

    /// Counts the time in which something was imported.
    pub(crate) fn spent(&mut self, took: Duration) {
        self.took += took;
        self.last_chunk = Instant::now();
    }

    /// The whole handoff's report, from the end of its pull.
    pub(crate) fn report(&self, end: PullEnd) -> HandoffReport {
        let ended = if end.report.failure.is_some() { Instant::now() } else { self.last_chunk };
        // A prefill that a restore has outlasted says nothing of how long a transfer takes after it.
        let shows = |prefilled_at: &Instant| self.restored_at.is_none_or(|restored_at| restored_at <= *prefilled_at);
        let end = PullEnd { prefilled_at: end.prefilled_at.filter(shows), ..end };
        HandoffReport {
            n_tokens: self.n_tokens,
            import_ms: millis(self.took),
            total_ms: millis(ended - self.began),
            is_lossy: self.is_lossy,
            ..end.report(self.last_chunk)
        }
    }
}

/// KV on its way from the store into a slot.
pub(crate) struct Restoring {
    pub(crate) restore: Restore,
    /// The state of the slot's end.
    pub(crate) prefix: StoredPrefix,
    /// The tokens that the sequence has in common with some conversation.
    pub(crate) n_common: usize,
    /// The states of the newest block's end.
    pub(crate) state: Option<StatePart>,
    pub(crate) began: Instant,
    /// When the last block came.
    pub(crate) waits_since: Instant,
}

/// The longest wait for the first chunk of another sequence's pull, counted from its start. Before that chunk nothing
/// shows when the prefill node will begin.
const FIRST_CHUNK_WAIT: Duration = Duration::from_millis(200);

/// Compares when a pull that began `elapsed` ago and has brought `n_arrived` positions will have brought `n_missing` more
/// with the time to compute them here. A pull that falls silent is predicted to take ever longer.
fn is_worth_waiting(elapsed: Duration, n_arrived: u32, n_missing: usize, compute: Option<Duration>) -> bool {
    let compute = compute.unwrap_or(FIRST_CHUNK_WAIT);
    if n_arrived == 0 {
        return elapsed < FIRST_CHUNK_WAIT.min(compute);
    }
    elapsed.as_secs_f64() * n_missing as f64 / f64::from(n_arrived) < compute.as_secs_f64()
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_is_worth_waiting_for_if_it_is_predicted_to_be_faster_than_computing() {
        let check = |elapsed_ms, n_arrived, n_missing, compute_ms: Option<u64>, expected| {
            let worth = is_worth_waiting(
                Duration::from_millis(elapsed_ms),
                n_arrived,
                n_missing,
                compute_ms.map(Duration::from_millis),
            );
            assert_eq!(worth, expected, "{n_arrived} in {elapsed_ms} ms, {n_missing} more, or {compute_ms:?} ms here");
        };
        // Before the first chunk: at most 200 ms, and no longer than computing takes.
        check(0, 0, 60, Some(300), true);
        check(199, 0, 60, Some(300), true);
        check(200, 0, 60, Some(300), false);
        check(8_000, 0, 6_000, Some(30_000), false);
        check(25, 0, 60, Some(20), false);
        check(199, 0, 60, None, true);
        check(200, 0, 60, None, false);
        // Then by its rate so far.
        check(1_000, 512, 512, Some(1_100), true);
        check(1_000, 512, 512, Some(900), false);
        check(1_000, 512, 51, Some(150), true);
        check(9_000, 512, 512, Some(1_100), false);
        check(100, 512, 512, None, true);
        check(1_000, 512, 512, None, false);
    }
}
