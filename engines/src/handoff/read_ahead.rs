//! Reads the stream of a pull while the engine is busy.
//!
//! An engine imports chunks between its steps, and a step may take many seconds. A prefill node ends a stream that is
//! not read for [`READ_DEADLINE`], because it keeps a slot until then. So the stream is read into memory meanwhile, as
//! far as the budget of all pulls allows.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// How long a puller may take nothing of the records that wait for it. The prefill keeps its slot until then, and the
/// puller computes by itself what it did not take.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(7);

/// More bytes than the buffers between the two ends hold. What comes after them was sent after a pause, so that the
/// stream has survived it.
const MAX_IN_BUFFERS: usize = 32 << 20;

/// The stream of a pull, and the pieces of it that were read ahead.
pub(super) struct ReadAhead<'a, S> {
    stream: S,
    has_ended: bool,
    /// A permit for each byte that may be read ahead.
    budget: &'a Semaphore,
    pieces: VecDeque<Piece<'a>>,
    /// When reading stopped because the budget was used up.
    unread_since: Option<Instant>,
    /// Bytes read since a pause for which the prefill node may have ended the stream. `None`: there was no such pause, or
    /// the stream has gone on after it.
    n_after_pause: Option<usize>,
}

struct Piece<'a> {
    bytes: Bytes,
    /// `None`: there was no room for it, so that it is the last one for now.
    permit: Option<SemaphorePermit<'a>>,
}

impl<'a, S, E> ReadAhead<'a, S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    pub(super) fn new(stream: S, budget: &'a Semaphore) -> Self {
        ReadAhead { stream, has_ended: false, budget, pieces: VecDeque::new(), unread_since: None, n_after_pause: None }
    }

    /// Returns the next piece, or `None` if the stream has ended or is broken. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        match self.pieces.pop_front() {
            Some(piece) => Some(piece.bytes),
            None if self.has_ended => None,
            None => self.read().await,
        }
    }

    /// Runs `work` to its end and reads ahead meanwhile.
    pub(super) async fn read_during(&mut self, work: impl Future<Output = ()>) {
        tokio::pin!(work);
        while !self.has_ended && self.has_room() {
            tokio::select! {
                biased;
                () = &mut work => return,
                Some(bytes) = self.read() => self.pieces.push_back(Piece { bytes, permit: None }),
            }
        }
        work.await;
    }

    /// Notes that this end did not read for so long.
    pub(super) fn has_paused(&mut self, pause: Duration) {
        // Half of its deadline, to be sure.
        if pause >= READ_DEADLINE / 2 {
            self.n_after_pause = Some(0);
        }
    }

    /// Returns true if the prefill node may have ended the stream because this end did not read it.
    pub(super) fn may_be_cut_for_slow_reading(&self) -> bool {
        self.n_after_pause.is_some()
    }

    /// Charges the last piece to the budget. Returns false if there is no room for it.
    fn has_room(&mut self) -> bool {
        let Some(last) = self.pieces.back_mut().filter(|last| last.permit.is_none()) else { return true };
        let n_bytes = u32::try_from(last.bytes.len()).unwrap_or(u32::MAX);
        last.permit = self.budget.try_acquire_many(n_bytes).ok();
        let has_room = last.permit.is_some();
        if !has_room {
            self.unread_since.get_or_insert_with(Instant::now);
        }
        has_room
    }

    async fn read(&mut self) -> Option<Bytes> {
        if let Some(since) = self.unread_since.take() {
            self.has_paused(since.elapsed());
        }
        let piece = self.stream.next().await.and_then(Result::ok);
        self.has_ended = piece.is_none();
        if let (Some(n), Some(piece)) = (&mut self.n_after_pause, &piece) {
            *n += piece.len();
            self.n_after_pause.take_if(|n| *n > MAX_IN_BUFFERS);
        }
        piece
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    fn pieces(n: u8) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Unpin {
        stream::iter((0..n).map(|i| Ok(Bytes::from(vec![i; 100]))))
    }

    async fn step(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_read_as_far_as_the_budget_of_all_pulls_allows() {
        let budget = Semaphore::new(250);
        let mut first = ReadAhead::new(pieces(9), &budget);
        first.read_during(step(1)).await;
        assert_eq!((first.pieces.len(), budget.available_permits()), (3, 50));
        let mut second = ReadAhead::new(pieces(9), &budget);
        second.read_during(step(1)).await;
        assert_eq!(second.pieces.len(), 1, "the size of a piece is known only when it is read");
        for i in 0..9 {
            assert_eq!(first.next().await.unwrap()[0], i);
        }
        assert_eq!((first.next().await, first.next().await), (None, None));
        assert_eq!(budget.available_permits(), 250);
        second.read_during(step(1)).await;
        assert_eq!(second.pieces.len(), 3, "room that others leave is used");
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_stream_that_was_not_read_may_be_cut_for_slow_reading() {
        for (n_bytes, n_steps, expected) in [(10_000, 9, false), (0, 1, false), (0, 3, true)] {
            let budget = Semaphore::new(n_bytes);
            let mut stream = ReadAhead::new(pieces(9), &budget);
            // Steps that are short alone add up as long as nothing is read.
            for _ in 0..n_steps {
                stream.read_during(step(2)).await;
            }
            while stream.next().await.is_some() {}
            assert_eq!(stream.may_be_cut_for_slow_reading(), expected, "{n_steps} steps, {n_bytes} bytes read ahead");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_goes_on_after_a_pause_was_not_cut_for_it() {
        for (n_pieces, expected) in [(MAX_IN_BUFFERS >> 20, true), ((MAX_IN_BUFFERS >> 20) + 1, false)] {
            let budget = Semaphore::new(0);
            let mib = Bytes::from(vec![0; 1 << 20]);
            let pieces = stream::iter((0..n_pieces).map(|_| Ok::<_, std::io::Error>(mib.clone())));
            let mut stream = ReadAhead::new(pieces, &budget);
            stream.has_paused(READ_DEADLINE);
            while stream.next().await.is_some() {}
            assert_eq!(stream.may_be_cut_for_slow_reading(), expected, "{n_pieces} MiB");
        }
    }
}
