//! Ends a connection whose endpoint takes too little of what the node sends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::time::{Instant, Sleep};

use super::super::connection::DEADLINES;
use crate::awake;
use crate::connections::MIN_PROGRESS_BYTES;

/// The deadline for the endpoint of a connection. It runs while bytes wait.
pub(super) struct EndpointDeadline {
    timer: Pin<Box<Sleep>>,
    /// Bytes that the endpoint has to take before the deadline starts anew. `None`: none wait.
    n_due: Option<usize>,
}

impl EndpointDeadline {
    pub(super) fn new() -> EndpointDeadline {
        EndpointDeadline { timer: Box::pin(tokio::time::sleep(DEADLINES.read)), n_due: None }
    }

    /// The socket has taken all bytes.
    pub(super) fn stop(&mut self) {
        self.n_due = None;
    }

    /// The socket has taken some bytes, and others wait. Ready once the endpoint has missed the deadline. Time in which
    /// this process was stopped does not count.
    pub(super) fn poll_missed(&mut self, context: &mut Context<'_>, n_taken: usize, n_waiting: usize) -> Poll<()> {
        match self.n_due {
            Some(n_due) if n_due > n_taken => self.n_due = Some(n_due - n_taken),
            _ => self.start(n_waiting),
        }
        loop {
            ready!(self.timer.as_mut().poll(context));
            if !awake::has_overslept(self.timer.deadline()) {
                return Poll::Ready(());
            }
            self.start(n_waiting);
        }
    }

    fn start(&mut self, n_waiting: usize) {
        // None wait here if TLS still has some.
        self.n_due = Some(n_waiting.clamp(1, MIN_PROGRESS_BYTES));
        self.timer.as_mut().reset(Instant::now() + DEADLINES.read);
    }
}
