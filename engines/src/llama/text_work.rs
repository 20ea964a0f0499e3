//! Bounds the threads that render templates and tokenize text. A client's long text takes one for seconds, and clients
//! send such texts without generating: to count tokens, or to see a prompt.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use tokio::sync::Semaphore;

/// Texts worked on at once. More threads would take processor time from decoding.
const MAX_RUNNING: usize = 4;

/// Texts that wait: as many as the endpoint admits at once from a few hundred clients.
const MAX_WAITING: usize = 256;

/// How long a text waits for a thread.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Runs work on texts: some at once, others wait, further ones are refused.
pub(super) struct TextWork {
    running: Arc<Semaphore>,
    waiting: Semaphore,
}

impl Default for TextWork {
    fn default() -> Self {
        TextWork { running: Arc::new(Semaphore::new(MAX_RUNNING)), waiting: Semaphore::new(MAX_WAITING) }
    }
}

impl TextWork {
    /// Runs `work` on a thread of its own. Dropping the future leaves the queue; work that has begun goes on, and counts
    /// until it ends.
    ///
    /// Errors: too many texts wait, or no thread became free in time.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, EngineError> {
        let full = || EngineError::QueueFull { limit: MAX_WAITING as u32 };
        let place = self.waiting.try_acquire().map_err(|_| full())?;
        let turn = tokio::time::timeout(MAX_WAIT, Arc::clone(&self.running).acquire_owned()).await;
        let turn = turn.ok().and_then(Result::ok).ok_or_else(full)?;
        drop(place);
        let done = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        done.await.map_err(EngineError::internal)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use futures::FutureExt;
    use futures::future::join_all;

    use super::*;

    #[tokio::test]
    async fn work_of_callers_that_left_still_counts_and_the_queue_has_a_bound() {
        let texts = TextWork::default();
        let (begun, begins) = channel();
        let mut gates = Vec::new();
        for _ in 0..MAX_RUNNING {
            let (gate, end) = channel::<()>();
            let begun = begun.clone();
            let work = move || {
                begun.send(()).unwrap();
                let _ = end.recv();
            };
            // The caller leaves as soon as the work has begun.
            assert!(texts.run(work).now_or_never().is_none());
            begins.recv().unwrap();
            gates.push(gate);
        }
        let mut waiting: Vec<_> = (0..MAX_WAITING).map(|_| Box::pin(texts.run(|| ()))).collect();
        for one in &mut waiting {
            assert!(one.as_mut().now_or_never().is_none(), "no thread is free");
        }
        let refused = texts.run(|| ()).await;
        assert!(matches!(refused, Err(EngineError::QueueFull { .. })), "{refused:?}");
        drop(gates);
        assert!(join_all(waiting).await.iter().all(Result::is_ok));
    }

    #[tokio::test(start_paused = true)]
    async fn a_text_does_not_wait_for_ever() {
        let texts = TextWork::default();
        let _busy = Arc::clone(&texts.running).acquire_many_owned(MAX_RUNNING as u32).await.unwrap();
        assert!(matches!(texts.run(|| ()).await, Err(EngineError::QueueFull { .. })));
    }
}
