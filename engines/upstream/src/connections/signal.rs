//! [`LocalSignal`]: wakes the task that polls a connection, but not while it polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// How often a poll goes round before it lets other tasks run. Two rounds are usual: the connection gives a piece, the
/// reader takes it, and the connection reads on.
const MAX_ROUNDS: usize = 4;

/// Connection and reader wake each other with every piece, although one task polls both. This signal keeps such a wake
/// inside the poll, where the task would otherwise be scheduled once more.
#[derive(Default)]
pub(super) struct LocalSignal {
    is_polling: AtomicBool,
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl Wake for LocalSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::SeqCst);
        if !self.is_polling.load(Ordering::SeqCst) {
            self.task.wake();
        }
    }
}

/// A signal, and the waker that sends it.
pub(super) struct SignalledPoll {
    signal: Arc<LocalSignal>,
    waker: Waker,
}

impl SignalledPoll {
    pub(super) fn new() -> SignalledPoll {
        let signal = Arc::<LocalSignal>::default();
        SignalledPoll { waker: Waker::from(Arc::clone(&signal)), signal }
    }

    /// Polls until the result is ready, or nothing was woken meanwhile.
    pub(super) fn poll<T>(&self, task: &Context<'_>, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        let LocalSignal { is_polling, is_woken, task: waiting } = &*self.signal;
        waiting.register(task.waker());
        for _ in 0..MAX_ROUNDS {
            is_polling.store(true, Ordering::SeqCst);
            is_woken.store(false, Ordering::SeqCst);
            let polled = poll(&mut Context::from_waker(&self.waker));
            is_polling.store(false, Ordering::SeqCst);
            // A wake from another thread sees that the poll is over, or is seen here.
            if polled.is_ready() || !is_woken.load(Ordering::SeqCst) {
                return polled;
            }
        }
        task.waker().wake_by_ref();
        Poll::Pending
    }

    /// Polls without a task: nobody is woken later.
    pub(super) fn poll_once<T>(&self, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.signal.task.take();
        poll(&mut Context::from_waker(&self.waker))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct CountedWakes(AtomicUsize);

    impl Wake for CountedWakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_wake_within_the_poll_repeats_it_and_one_after_it_wakes_the_task() {
        let task = Arc::<CountedWakes>::default();
        let waker = Waker::from(Arc::clone(&task));
        let cx = Context::from_waker(&waker);
        let signalled = SignalledPoll::new();
        let mut rounds = 0;
        let mut kept = None;
        let polled = signalled.poll(&cx, |cx| {
            rounds += 1;
            if rounds == 1 {
                cx.waker().wake_by_ref();
            }
            kept = Some(cx.waker().clone());
            Poll::<()>::Pending
        });
        assert_eq!((polled, rounds, task.0.load(Ordering::SeqCst)), (Poll::Pending, 2, 0));
        kept.unwrap().wake();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_poll_that_wakes_itself_forever_lets_other_tasks_run() {
        let task = Arc::<CountedWakes>::default();
        let waker = Waker::from(Arc::clone(&task));
        let mut rounds = 0;
        let polled = SignalledPoll::new().poll(&Context::from_waker(&waker), |cx| {
            rounds += 1;
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert_eq!((polled, rounds, task.0.load(Ordering::SeqCst)), (Poll::Pending, MAX_ROUNDS, 1));
    }
}
