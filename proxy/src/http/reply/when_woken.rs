//! A stream that is polled only after it was woken.
//!
//! hyper polls a body again after each chunk, and with each event of its connection. A poll of a request's steps goes
//! through all stages of the request, so this layer answers such polls itself.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;
use futures::{Stream, StreamExt};

/// Answers polls between two wakes with [`Poll::Pending`].
pub(in crate::http) struct WhenWoken<S> {
    stream: S,
    wakes: Arc<Wakes>,
    /// Wakes `wakes`.
    waker: Waker,
}

/// Passes wakes on to the task, and remembers them.
struct Wakes {
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl<S> WhenWoken<S> {
    pub(in crate::http) fn new(stream: S) -> Self {
        let wakes = Arc::new(Wakes { is_woken: AtomicBool::new(true), task: AtomicWaker::new() });
        WhenWoken { stream, waker: Arc::clone(&wakes).into(), wakes }
    }
}

impl<S: Stream + Unpin> Stream for WhenWoken<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let this = &mut *self;
        // Before the look at `is_woken`: a wake after it must reach the task.
        this.wakes.task.register(context.waker());
        if !this.wakes.is_woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let next = this.stream.poll_next_unpin(&mut Context::from_waker(&this.waker));
        if next.is_ready() {
            this.wakes.is_woken.store(true, Ordering::Release);
        }
        next
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::stream::poll_fn;
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_stream_is_polled_only_after_a_wake_and_misses_none() {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let mut n_polls = 0;
        let counted = poll_fn(|context| {
            n_polls += 1;
            receiver.poll_recv(context)
        });
        let mut stream = WhenWoken::new(counted);
        for _ in 0..10 {
            assert_eq!(stream.next().now_or_never(), None);
        }
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert_eq!((stream.next().await, stream.next().await), (Some(1), Some(2)));
        for _ in 0..10 {
            assert_eq!(stream.next().now_or_never(), None);
        }
        // The task sleeps when the wake comes.
        let (next, _) = tokio::join!(stream.next(), async {
            tokio::task::yield_now().await;
            sender.send(3).unwrap();
        });
        assert_eq!(next, Some(3));
        drop(stream);
        assert_eq!(n_polls, 1 + 3 + 1);
    }
}
