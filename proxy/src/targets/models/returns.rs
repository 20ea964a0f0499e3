//! The conversations whose newest KV is not yet where their prompts are computed. See [`super::returning`].

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_schemas::handoff::HandoffFailure;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{CacheScope, EngineError, SequenceRequest, Token};
use futures::StreamExt;
use tokio::time::Instant;

use super::removed_keys::RemovedKeys;
use crate::targets::nodes::Node;

/// How long a reply's KV waits for idle nodes. By then the client has mostly sent its next turn.
const MAX_AGE: Duration = Duration::from_secs(60);

/// The most conversations that wait; the oldest goes first.
const MAX_WAITING: usize = 16;

/// Those that wait for their nodes to be idle, and what became of others.
#[derive(Default)]
pub struct KvReturns {
    waiting: Mutex<VecDeque<KvReturn>>,
    counts: Mutex<ReturnCounts>,
    /// Held by the task that brings them back.
    pub(super) turn: tokio::sync::Mutex<()>,
}

/// What became of the returns that were begun.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReturnCounts {
    /// All that the prefill node lacked is there.
    pub returned: u64,
    /// Ended for a request.
    pub gave_way: u64,
    /// Refused, broken off or too slow, or their key was removed.
    pub failed: u64,
    /// Tokens whose KV came back.
    pub tokens: u64,
}

/// A conversation with a reply.
pub(super) struct KvReturn {
    pub(super) decode: Arc<Node>,
    pub(super) prefill: Arc<Node>,
    pub(super) scope: CacheScope,
    /// Prompt and reply. The decode node has the KV of all but the last.
    pub(super) tokens: Vec<Token>,
    pub(super) since: Instant,
}

impl KvReturns {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<KvReturn>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What became of returns so far.
    pub fn counts(&self) -> ReturnCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a return that has ended, and the tokens that it brought.
    pub(super) fn count(&self, returned: &Result<(), EngineError>, n_tokens: u32) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        // Whatever ended it, what has come stays.
        counts.tokens += u64::from(n_tokens);
        match returned {
            Ok(()) => counts.returned += 1,
            Err(EngineError::GaveWay) => counts.gave_way += 1,
            Err(_) => counts.failed += 1,
        }
    }

    /// Adds a conversation, which replaces its earlier turns.
    pub(super) fn add(&self, new: KvReturn) {
        let mut waiting = self.waiting();
        waiting.retain(|known| known.scope != new.scope || !new.tokens.starts_with(&known.tokens));
        waiting.push_back(new);
        if waiting.len() > MAX_WAITING {
            waiting.pop_front();
        }
    }

    /// Takes the newest conversation whose nodes are idle. Those of removed keys stay where they are until they are forgotten there.
    pub(super) fn next(&self, removed: &RemovedKeys) -> Option<KvReturn> {
        let mut waiting = self.waiting();
        waiting.retain(|known| known.since.elapsed() < MAX_AGE && !removed.contains(known.scope));
        let idx = waiting.iter().rposition(|known| is_idle(&known.decode) && is_idle(&known.prefill))?;
        waiting.remove(idx)
    }
}

impl KvReturn {
    /// Lets the prefill node pull a reply's KV, and counts the tokens that came. Dropping the future ends the pull.
    pub(super) async fn bring_back(&self, n_tokens: &mut u32) -> Result<(), EngineError> {
        let request = SequenceRequest {
            prompt: self.tokens.clone(),
            max_tokens: Some(0),
            cache_scope: self.scope,
            gives_way: true,
            held_only: true,
            // The prefill node hands none of it on if it is lossy.
            lossless_kv: true,
            kv_source: self.decode.kv_source(),
            ..SequenceRequest::default()
        };
        let mut events = self.prefill.engine.generate(request).await?;
        while let Some(event) = events.next().await {
            if let SequenceEvent::Handoff(report) = event? {
                *n_tokens += report.n_tokens;
                match report.failure {
                    None => {}
                    // The decode node got a request.
                    Some(HandoffFailure::GaveWay) => return Err(EngineError::GaveWay),
                    Some(failure) => return Err(EngineError::Unavailable { reason: failure.as_str().into() }),
                }
            }
        }
        Ok(())
    }
}

fn is_idle(node: &Node) -> bool {
    let load = node.load();
    load.active_slots == 0 && load.queued == 0 && node.info().is_some()
}
