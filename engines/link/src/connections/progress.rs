//! Ends replies that their reader does not take.
//!
//! A write deadline of the socket is not enough: an HTTP/2 peer that grants no window holds a reply back while its
//! socket takes everything else. So each byte of a reply is counted twice: when hyper gets it from the body, and when
//! the connection takes it from hyper. The reader is slow if bytes wait between the two for too long. Time in which no
//! bytes wait does not count, because then the engine is slow.
//!
//! Ending a reply drops the whole connection in HTTP/1.1, but only the stream in HTTP/2.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::HttpBody;
use bytes::{Buf, Bytes};
use futures::task::AtomicWaker;
use http::Response;
use hyper::body::{Frame, SizeHint};
use hyper::rt::Executor;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::open_requests::OpenRequest;
use crate::awake;

/// The bytes that a reader must take within its deadline if as many wait for it. Without this minimum, a reader that
/// takes a byte at a time would keep its request for hours. A slow reader over TCP takes more than this at once, because
/// of the system's buffers.
pub(crate) const MIN_PROGRESS_BYTES: usize = 4 << 10;

/// The number of checks within a deadline.
const N_CHECKS: u32 = 4;

/// The read deadline of one reply, in place of the server's default. An extension of the response.
#[derive(Debug, Clone, Copy)]
pub struct ReadDeadline(pub Duration);

tokio::task_local! {
    /// The progress of the replies that this task sends.
    static PROGRESS: Arc<Progress>;
}

/// Runs `work`, which sends replies. Drops it if a reader misses the deadline.
pub(super) async fn watched(work: impl Future, read_deadline: Duration) {
    let progress = Arc::new(Progress::new(read_deadline));
    tokio::select! {
        _ = PROGRESS.scope(Arc::clone(&progress), work) => {}
        deadline = progress.stalls() => {
            let seconds = deadline.as_secs_f32();
            tracing::info!(seconds, "a reply is cut off: its reader took too little of it before the deadline");
        }
    }
}

/// Runs each stream of an HTTP/2 connection in its own task. Dropping it resets the stream.
#[derive(Debug, Clone)]
pub(super) struct StreamExecutor {
    pub(super) read_deadline: Duration,
}

impl<F: Future + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        tokio::spawn(watched(stream, self.read_deadline));
    }
}

/// Counts the bytes of a reply that this task sends. `open_request` lasts as long as the reply.
pub(super) fn counted<B>(reply: Response<B>, open_request: OpenRequest) -> Response<CountedBody<B>> {
    let progress = Progress::of_this_task();
    progress.begin_reply(reply.extensions().get::<ReadDeadline>().copied());
    reply.map(|body| CountedBody { body: Some(body), progress, _open_request: open_request })
}

/// Counts the bytes of a task's replies.
#[derive(Debug, Default)]
pub(super) struct Progress {
    default_deadline: Duration,
    deadline_ms: AtomicU64,
    /// Bytes that hyper got.
    n_given: AtomicU64,
    /// Bytes that the connection took from hyper, or dropped.
    n_taken: AtomicU64,
    /// The watch sleeps until hyper gets bytes. While a reply flows, the watch looks from time to time instead: a wake for
    /// each token would cost as much as the token.
    is_asleep: AtomicBool,
    /// Wakes the watch: for bytes while it sleeps, and for a reply with another deadline.
    given: Notify,
    /// Woken when no bytes wait.
    emptied: AtomicWaker,
}

impl Progress {
    /// The progress of the replies that this task sends.
    pub(super) fn of_this_task() -> Arc<Progress> {
        PROGRESS.try_with(Arc::clone).unwrap_or_default()
    }

    fn new(default_deadline: Duration) -> Progress {
        let progress = Progress { default_deadline, ..Progress::default() };
        progress.begin_reply(None);
        progress
    }

    fn begin_reply(&self, deadline: Option<ReadDeadline>) {
        let deadline = deadline.map_or(self.default_deadline, |deadline| deadline.0);
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        if self.deadline_ms.swap(deadline_ms, Ordering::Relaxed) != deadline_ms {
            self.given.notify_one();
        }
    }

    fn n_given(&self) -> u64 {
        self.n_given.load(Ordering::SeqCst)
    }

    fn n_taken(&self) -> u64 {
        self.n_taken.load(Ordering::Acquire)
    }

    /// Counts bytes that wait for the connection from now on.
    pub(super) fn give(self: &Arc<Self>, bytes: Bytes) -> CountedBytes {
        self.n_given.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.given.notify_one();
        }
        CountedBytes { bytes, progress: Arc::clone(self) }
    }

    fn take(&self, n_bytes: usize) {
        let n_taken = self.n_taken.fetch_add(n_bytes as u64, Ordering::AcqRel) + n_bytes as u64;
        if n_taken == self.n_given() {
            self.emptied.wake();
        }
    }

    fn is_empty(&self) -> bool {
        self.n_taken() == self.n_given()
    }

    fn poll_empty(&self, context: &Context<'_>) -> Poll<()> {
        self.emptied.register(context.waker());
        if self.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Waits until a reader misses its deadline, and returns that deadline. In this time it took neither all bytes that
    /// waited at the beginning, nor [`MIN_PROGRESS_BYTES`].
    async fn stalls(&self) -> Duration {
        loop {
            self.bytes_given().await;
            let mut n_seen = None;
            while n_seen != Some(self.n_given()) || !self.is_empty() {
                let (n_given, n_taken) = (self.n_given(), self.n_taken());
                n_seen = Some(n_given);
                let deadline = Duration::from_millis(self.deadline_ms.load(Ordering::Relaxed));
                if self.is_stalled(n_given.min(n_taken + MIN_PROGRESS_BYTES as u64), deadline).await {
                    return deadline;
                }
            }
        }
    }

    /// Returns true if the reader has not taken so many bytes at the deadline, and false as soon as it has at a check.
    async fn is_stalled(&self, n_expected: u64, deadline: Duration) -> bool {
        for _ in 0..N_CHECKS {
            let due = Instant::now() + deadline / N_CHECKS;
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                // A reply with another deadline begins.
                () = self.given.notified() => return false,
            }
            // While this process was stopped, it sent nothing that the reader could take.
            if awake::has_overslept(due) || self.n_taken() >= n_expected {
                return false;
            }
        }
        true
    }

    /// Sleeps until hyper gets bytes, unless bytes wait.
    async fn bytes_given(&self) {
        let n_given = self.n_given();
        while self.n_given() == n_given && self.is_empty() {
            self.is_asleep.store(true, Ordering::SeqCst);
            // A `give` that saw no sleeper is seen here.
            if self.n_given() == n_given {
                self.given.notified().await;
            }
        }
    }
}

/// A reply's body with counted bytes.
pub(super) struct CountedBody<B> {
    /// `None` once it is complete.
    body: Option<B>,
    progress: Arc<Progress>,
    _open_request: OpenRequest,
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for CountedBody<B> {
    type Data = CountedBytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<CountedBytes>, B::Error>>> {
        if let Some(body) = &mut self.body {
            if let Some(frame) = ready!(Pin::new(body).poll_frame(context)) {
                return Poll::Ready(Some(frame.map(|frame| frame.map_data(|bytes| self.progress.give(bytes)))));
            }
            // The body is complete: drop it, which frees the request's slot. But end the stream only when its last
            // bytes are taken. Otherwise h2 would keep them for a peer that grants no window, without a deadline.
            self.body = None;
        }
        self.progress.poll_empty(context).map(|()| None)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream) && self.progress.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

/// Bytes that count as taken when the connection takes or drops them.
pub(super) struct CountedBytes {
    bytes: Bytes,
    progress: Arc<Progress>,
}

impl Buf for CountedBytes {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, n_bytes: usize) {
        self.bytes.advance(n_bytes);
        self.progress.take(n_bytes);
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.progress.take(self.bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Wake, Waker};

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn only_time_in_which_bytes_wait_counts() {
        let progress = Arc::new(Progress::new(DEADLINE));
        let began = Instant::now();
        let slow_engine = async {
            for _ in 0..3 {
                drop(progress.give(Bytes::from_static(b"token")));
                tokio::time::sleep(100 * DEADLINE).await;
            }
            // From here on, a byte at a time.
            let mut waiting = progress.give(Bytes::from(vec![0; 1000]));
            loop {
                tokio::time::sleep(DEADLINE / 20).await;
                waiting.advance(1);
            }
        };
        tokio::select! {
            _ = slow_engine => unreachable!("it never ends"),
            deadline = progress.stalls() => assert_eq!(deadline, DEADLINE),
        }
        let stalled = began.elapsed() - 300 * DEADLINE;
        assert!((DEADLINE..=DEADLINE * 3 / 2).contains(&stalled), "{stalled:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_are_taken_at_once_wake_the_watch_only_once() {
        #[derive(Default)]
        struct Wakes(AtomicU64);
        impl Wake for Wakes {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let context = &mut Context::from_waker(&waker);
        let progress = Arc::new(Progress::new(DEADLINE));
        let mut stalls = std::pin::pin!(progress.stalls());
        for _ in 0..100 {
            assert!(stalls.as_mut().poll(context).is_pending());
            drop(progress.give(Bytes::from_static(b"token")));
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_is_slow_but_reads_gets_everything() {
        let progress = Arc::new(Progress::new(DEADLINE));
        let slow_reader = async {
            let mut waiting = progress.give(Bytes::from(vec![0; 1 << 20]));
            while waiting.has_remaining() {
                tokio::time::sleep(DEADLINE / 3).await;
                waiting.advance(2 << 10);
            }
        };
        tokio::select! {
            () = slow_reader => assert!(progress.is_empty()),
            deadline = progress.stalls() => panic!("cut off after {deadline:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_of_the_process_is_not_slow_reading() {
        let progress = Arc::new(Progress::new(DEADLINE));
        let began = Instant::now();
        let _waiting = progress.give(Bytes::from_static(b"token"));
        let stop = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            tokio::time::advance(Duration::from_secs(120)).await;
        };
        let (deadline, ()) = tokio::join!(progress.stalls(), stop);
        let after_stop = began.elapsed() - Duration::from_secs(121);
        assert!(after_stop >= deadline, "{after_stop:?} after it runs again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_may_have_its_own_deadline() {
        let progress = Arc::new(Progress::new(DEADLINE));
        progress.begin_reply(Some(ReadDeadline(DEADLINE / 10)));
        let began = Instant::now();
        let _waiting = progress.give(Bytes::from_static(b"frame"));
        assert_eq!(progress.stalls().await, DEADLINE / 10);
        assert!(began.elapsed() < DEADLINE / 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_reply_is_watched_by_its_own_deadline_at_once() {
        let progress = Arc::new(Progress::new(DEADLINE));
        let began = Instant::now();
        let replies = async {
            drop(progress.give(Bytes::from_static(b"reply")));
            tokio::time::sleep(DEADLINE / 100).await;
            progress.begin_reply(Some(ReadDeadline(DEADLINE / 10)));
            let _waiting = progress.give(Bytes::from_static(b"frame"));
            std::future::pending::<()>().await;
        };
        tokio::select! {
            deadline = progress.stalls() => assert_eq!(deadline, DEADLINE / 10),
            () = replies => unreachable!("it never ends"),
        }
        assert!(began.elapsed() < DEADLINE / 5, "{:?}", began.elapsed());
    }
}
