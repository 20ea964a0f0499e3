//! Reads the stream of a pull while the engine is busy.
//!
//! An engine imports chunks between its steps, and a step may take many seconds. A prefill node ends a stream that is
//! not read for [`READ_DEADLINE`], because it keeps a slot until then. So the stream is read into memory meanwhile, as
//! far as the budget of all pulls allows.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, BufReader};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// How long a puller may take nothing of the records that wait for it. The prefill keeps its slot until then, and the
/// puller computes by itself what it did not take.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(7);

/// More bytes than the buffers between the two ends hold. What comes after them was sent after a pause, so that the
/// stream has survived it.
const MAX_IN_BUFFERS: usize = 32 << 20;

/// Shorter reads are made from a buffer, so that headers and MACs cost no call of the system each.
const SHORT_READ: usize = 16 << 10;

/// The most bytes of a piece that is read ahead.
const MAX_PIECE: usize = 256 << 10;

/// The stream of a pull, and the pieces of it that were read ahead.
pub(super) struct ReadAhead<'a, R> {
    stream: BufReader<R>,
    has_ended: bool,
    /// A permit for each byte that may be read ahead.
    budget: &'a Semaphore,
    pieces: VecDeque<ReadPiece<'a>>,
    /// Receives pieces before they are copied to memory of their own size. Empty until the first.
    piece: Vec<u8>,
    /// When the bytes had come that [`ReadAhead::read`] returned last.
    came_at: Instant,
    /// When reading stopped because the budget was used up.
    unread_since: Option<Instant>,
    /// How long it had stopped in all.
    unread: Duration,
    /// Bytes read since a pause for which the prefill node may have ended the stream. `None`: there was no such pause, or
    /// the stream has gone on after it.
    n_after_pause: Option<usize>,
}

struct ReadPiece<'a> {
    bytes: Bytes,
    came_at: Instant,
    #[expect(dead_code, reason = "returned to the budget with the piece")]
    permit: SemaphorePermit<'a>,
}

impl<'a, R: AsyncRead + Unpin> ReadAhead<'a, R> {
    pub(super) fn new(stream: R, budget: &'a Semaphore) -> Self {
        ReadAhead {
            stream: BufReader::with_capacity(SHORT_READ, stream),
            has_ended: false,
            budget,
            pieces: VecDeque::new(),
            piece: Vec::new(),
            came_at: Instant::now(),
            unread_since: None,
            unread: Duration::ZERO,
            n_after_pause: None,
        }
    }

    /// Reads the next bytes into a part of `space`, which is not empty. Returns their number: 0 if the stream has ended
    /// or is broken. Dropping the future loses nothing.
    pub(super) async fn read(&mut self, space: &mut [u8]) -> usize {
        let Some(ReadPiece { bytes, came_at, .. }) = self.pieces.front_mut() else {
            if self.has_ended {
                return 0;
            }
            self.goes_on();
            let n_bytes = self.stream.read(space).await.unwrap_or(0);
            self.came_at = self.now();
            self.has_read(n_bytes);
            return n_bytes;
        };
        self.came_at = *came_at;
        let n_bytes = bytes.len().min(space.len());
        bytes.copy_to_slice(&mut space[..n_bytes]);
        if bytes.is_empty() {
            self.pieces.pop_front();
        }
        n_bytes
    }

    /// Runs `work` to its end and reads ahead meanwhile.
    pub(super) async fn read_during(&mut self, work: impl Future<Output = ()>) {
        tokio::pin!(work);
        while !self.has_ended {
            tokio::select! {
                biased;
                () = &mut work => return,
                has_room = self.read_piece() => if !has_room { break },
            }
        }
        work.await;
    }

    /// When the bytes had come that [`ReadAhead::read`] returned last, on a clock that stands still while nothing is read. So a busy
    /// engine is no slow link.
    pub(super) fn came_at(&self) -> Instant {
        self.came_at
    }

    fn now(&self) -> Instant {
        Instant::now() - self.unread
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

    /// Reads a piece ahead, as large as the budget allows. Returns false if it allows none. Dropping the future loses
    /// nothing.
    async fn read_piece(&mut self) -> bool {
        let n_room = self.budget.available_permits().min(MAX_PIECE);
        let permit = (n_room > 0).then(|| self.budget.try_acquire_many(n_room as u32).ok()).flatten();
        let Some(mut permit) = permit else {
            self.unread_since.get_or_insert_with(Instant::now);
            return false;
        };
        self.goes_on();
        self.piece.resize(MAX_PIECE, 0);
        let n_bytes = self.stream.read(&mut self.piece[..n_room]).await.unwrap_or(0);
        self.has_read(n_bytes);
        if n_bytes > 0 {
            drop(permit.split(n_room - n_bytes));
            let (bytes, came_at) = (Bytes::copy_from_slice(&self.piece[..n_bytes]), self.now());
            self.pieces.push_back(ReadPiece { bytes, came_at, permit });
        }
        true
    }

    /// Notes how long nothing was read for lack of room.
    fn goes_on(&mut self) {
        if let Some(since) = self.unread_since.take() {
            self.unread += since.elapsed();
            self.has_paused(since.elapsed());
        }
    }

    fn has_read(&mut self, n_bytes: usize) {
        self.has_ended = n_bytes == 0;
        if let Some(n_after_pause) = &mut self.n_after_pause {
            *n_after_pause += n_bytes;
            self.n_after_pause.take_if(|n| *n > MAX_IN_BUFFERS);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{Stream, StreamExt, stream};
    use tokio_util::io::StreamReader;

    use super::*;

    fn pieces(n: u8) -> impl AsyncRead + Unpin {
        reader(stream::iter((0..n).map(|i| Ok(Bytes::from(vec![i; 100])))))
    }

    fn reader(pieces: impl Stream<Item = std::io::Result<Bytes>> + Unpin) -> impl AsyncRead + Unpin {
        StreamReader::new(pieces)
    }

    async fn step(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    /// Reads up to the end.
    async fn rest(stream: &mut ReadAhead<'_, impl AsyncRead + Unpin>) -> Vec<u8> {
        let mut rest = Vec::new();
        let mut space = [0; 70];
        loop {
            match stream.read(&mut space).await {
                0 => return rest,
                n_bytes => rest.extend_from_slice(&space[..n_bytes]),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_read_as_far_as_the_budget_of_all_pulls_allows() {
        let budget = Semaphore::new(250);
        let n_ahead = |stream: &ReadAhead<'_, _>| stream.pieces.iter().map(|piece| piece.bytes.len()).sum::<usize>();
        let mut first = ReadAhead::new(pieces(9), &budget);
        first.read_during(step(1)).await;
        assert_eq!((n_ahead(&first), budget.available_permits()), (250, 0));
        let mut second = ReadAhead::new(pieces(9), &budget);
        second.read_during(step(1)).await;
        assert_eq!(n_ahead(&second), 0);
        let expected = (0..9).flat_map(|i| [i; 100]).collect::<Vec<u8>>();
        assert_eq!(rest(&mut first).await, expected);
        assert_eq!(first.read(&mut [0]).await, 0);
        assert_eq!(budget.available_permits(), 250);
        second.read_during(step(1)).await;
        assert_eq!(n_ahead(&second), 250, "room that others leave is used");
        assert_eq!(rest(&mut second).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_for_the_engine_is_not_late_and_what_the_link_brings_late_is() {
        for n_room in [0, 250, 10_000] {
            let budget = Semaphore::new(n_room);
            let late = stream::once(async {
                step(60).await;
                Ok(Bytes::from_static(b"late"))
            });
            let early = stream::iter((0..9).map(|_| Ok(Bytes::from(vec![0; 100]))));
            let began = Instant::now();
            let mut stream = ReadAhead::new(reader(Box::pin(early.chain(late))), &budget);
            stream.read_during(step(3)).await;
            let mut ages = Vec::new();
            let mut space = [0; 70];
            while stream.read(&mut space).await > 0 {
                ages.push((stream.came_at() - began).as_secs());
            }
            assert!(ages.pop() >= Some(57) && ages.iter().all(|age| *age == 0), "{n_room}: {ages:?}");
        }
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
            rest(&mut stream).await;
            assert_eq!(stream.may_be_cut_for_slow_reading(), expected, "{n_steps} steps, {n_bytes} bytes read ahead");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_for_the_prefill_node_is_no_slow_reading() {
        let budget = Semaphore::new(100);
        let late = stream::once(async {
            step(60).await;
            Ok(Bytes::from_static(b"late"))
        });
        let mut stream =
            ReadAhead::new(reader(Box::pin(stream::iter([Ok(Bytes::from(vec![0; 100]))]).chain(late))), &budget);
        stream.read_during(step(1)).await;
        assert_eq!(rest(&mut stream).await.len(), 104);
        assert!(!stream.may_be_cut_for_slow_reading());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_goes_on_after_a_pause_was_not_cut_for_it() {
        for (n_pieces, expected) in [(MAX_IN_BUFFERS >> 20, true), ((MAX_IN_BUFFERS >> 20) + 1, false)] {
            let budget = Semaphore::new(0);
            let mib = Bytes::from(vec![0; 1 << 20]);
            let mut stream = ReadAhead::new(reader(stream::iter((0..n_pieces).map(|_| Ok(mib.clone())))), &budget);
            stream.has_paused(READ_DEADLINE);
            let mut space = vec![0; 1 << 20];
            while stream.read(&mut space).await > 0 {}
            assert_eq!(stream.may_be_cut_for_slow_reading(), expected, "{n_pieces} MiB");
        }
    }
}
