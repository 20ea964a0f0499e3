//! Bounds the threads that render templates and tokenize text. A client's long text takes one for seconds, and clients
//! send such texts without generating: to count tokens, or to see a prompt.

use baton_schemas::{EngineError, KeyTag};

use super::lane::Lane;

/// Texts worked on at once. More threads would take processor time from decoding.
const MAX_RUNNING: u32 = 4;

/// Long texts worked on at once, which leaves threads free for others.
const MAX_LONG_RUNNING: u32 = 2;

/// The longest text that is not long, bytes. It takes at most some tens of milliseconds.
const MAX_SHORT_BYTES: usize = 64 << 10;

/// Texts that wait: as many as the endpoint admits at once from a few hundred clients.
const MAX_WAITING: u32 = 256;

/// Long texts that wait.
const MAX_LONG_WAITING: u32 = 64;

/// Runs work on texts: some at once, others wait, further ones are refused. Most chats are short texts, and never wait
/// until long ones are done. Keys take turns.
pub(crate) struct TextWork {
    all: Lane,
    /// For long texts, before they wait for a turn among all.
    long: Lane,
}

impl TextWork {
    pub(crate) fn new() -> Self {
        TextWork { all: Lane::new(MAX_RUNNING, MAX_WAITING), long: Lane::new(MAX_LONG_RUNNING, MAX_LONG_WAITING) }
    }

    /// Runs `work` for a key on a text of `n_bytes` on a thread of its own. Dropping the future leaves the queue; work that has
    /// begun goes on, and counts until it ends.
    ///
    /// Errors: too many texts wait, or no thread became free in time.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        key: KeyTag,
        n_bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, EngineError> {
        let long_turn = match n_bytes > MAX_SHORT_BYTES {
            true => Some(self.long.turn(key).await?),
            false => None,
        };
        let turn = self.all.turn(key).await?;
        let done = tokio::task::spawn_blocking(move || {
            let _turns = (turn, long_turn);
            work()
        });
        done.await.map_err(EngineError::internal)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use futures::FutureExt;

    use super::*;

    const KEY: KeyTag = KeyTag(1);

    /// Work that runs until the returned sender is dropped. Its caller leaves as soon as it has begun.
    fn abandoned(texts: &TextWork, n_bytes: usize, begun: &Sender<()>, begins: &Receiver<()>) -> Sender<()> {
        let (gate, end) = channel();
        let begun = begun.clone();
        let work = move || {
            begun.send(()).unwrap();
            let _ = end.recv();
        };
        assert!(texts.run(KEY, n_bytes, work).now_or_never().is_none());
        begins.recv().unwrap();
        gate
    }

    #[tokio::test]
    async fn work_of_callers_that_left_still_counts() {
        let texts = TextWork::new();
        let (begun, begins) = channel();
        let gates: Vec<_> = (0..MAX_RUNNING).map(|_| abandoned(&texts, MAX_SHORT_BYTES, &begun, &begins)).collect();
        let mut waiting = Box::pin(texts.run(KEY, 1, || ()));
        assert!(waiting.as_mut().now_or_never().is_none(), "no thread is free");
        drop(gates);
        assert_eq!(waiting.await, Ok(()));
    }

    #[tokio::test]
    async fn a_short_text_does_not_wait_for_long_ones() {
        let texts = TextWork::new();
        let (begun, begins) = channel();
        let gates: Vec<_> =
            (0..MAX_LONG_RUNNING).map(|_| abandoned(&texts, MAX_SHORT_BYTES + 1, &begun, &begins)).collect();
        let mut long: Vec<_> =
            (0..MAX_LONG_WAITING).map(|_| Box::pin(texts.run(KEY, MAX_SHORT_BYTES + 1, || ()))).collect();
        assert!(long.iter_mut().all(|one| one.now_or_never().is_none()), "two long texts at once");
        let refused = texts.run(KEY, MAX_SHORT_BYTES + 1, || ()).await;
        assert_eq!(refused, Err(EngineError::QueueFull { limit: MAX_LONG_WAITING }));
        assert_eq!(texts.run(KEY, MAX_SHORT_BYTES, || ()).await, Ok(()), "a short text has a thread, and a place");
        drop(gates);
        assert!(futures::future::join_all(long).await.iter().all(Result::is_ok));
    }
}
