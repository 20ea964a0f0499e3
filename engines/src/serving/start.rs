//! What engines share of starting the scheduler's thread.

use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc as std_mpsc};

use baton_schemas::Token;
use baton_schemas::node::NodeLoad;
use tokio::sync::watch;

use super::jobs::{EngineLoad, SchedulerMessage};

/// Wakes the scheduler.
pub(crate) type Wake = Arc<dyn Fn() + Send + Sync>;

/// Creates a [`Wake`] with a weak sender: the scheduler owns a `Wake` itself and ends when the last sender is dropped.
pub(crate) fn wake(messages: &Arc<std_mpsc::Sender<SchedulerMessage>>) -> Wake {
    let messages = Arc::downgrade(messages);
    Arc::new(move || {
        if let Some(messages) = messages.upgrade() {
            // It fails if the scheduler has ended, which needs no waking.
            let _ = messages.send(SchedulerMessage::Wake);
        }
    })
}

/// Aborts the process if the scheduler panics: otherwise the engine would accept requests and never answer them. The
/// supervisor then starts a new process.
pub(crate) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the scheduler has panicked; the process aborts so that its supervisor can restart it");
            std::process::abort();
        }
    }
}

/// The load that an engine's handles share with its scheduler, and where they read it.
pub(crate) fn engine_load() -> (Arc<EngineLoad>, watch::Receiver<NodeLoad>) {
    let (load, receiver) = watch::channel(NodeLoad::default());
    (Arc::new(EngineLoad { n_queued: AtomicUsize::new(0), load }), receiver)
}

/// The name of a model whose file names none.
pub(crate) fn file_stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned())
}

/// The text of the canary, by whose KV two engines are compared ([`crate::handoff::canary`]): prose with numbers and
/// punctuation, for tokens of many kinds.
pub(crate) const CANARY: &str = "In 1851 the cable between Dover and Calais carried its first message; by 1866 another one, \
    3,000 km long, joined Ireland to Newfoundland. \"What hath been done,\" a clerk wrote, \"cannot be undone: two cities, one \
    clock.\"";

/// The most tokens of the canary: every layer attends over several positions, and the cost is negligible.
const MAX_CANARY: usize = 48;

/// The canary's tokens, at most `limit`, from those of [`CANARY`]. They depend on the vocabulary alone, so that two nodes
/// agree on them.
pub(crate) fn canary_tokens(mut of_text: Vec<Token>, n_vocab: u32, limit: usize) -> Vec<Token> {
    if of_text.is_empty() {
        // A model without a tokenizer still has embeddings.
        of_text = (0..MAX_CANARY as u32).map(|i| i % n_vocab.max(1)).collect();
    }
    of_text.truncate(MAX_CANARY.min(limit));
    of_text
}
