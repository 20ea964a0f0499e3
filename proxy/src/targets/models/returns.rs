//! The conversations whose newest KV is not yet where their prompts are computed. See [`super::returning`].

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{CacheScope, EngineError, SequenceRequest, Token};
use futures::StreamExt;
use tokio::time::Instant;

use crate::targets::nodes::Node;

/// How long a reply's KV waits for idle nodes. By then the client has mostly sent its next turn.
const MAX_AGE: Duration = Duration::from_secs(60);

/// The most conversations that wait; the oldest goes first.
const MAX_WAITING: usize = 16;

/// They wait for their nodes to be idle.
#[derive(Default)]
pub(super) struct KvReturns(Mutex<VecDeque<KvReturn>>);

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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Removes the conversations of some scopes.
    pub(super) fn remove(&self, scopes: &[CacheScope]) {
        self.waiting().retain(|known| !scopes.contains(&known.scope));
    }

    /// Takes the newest conversation whose nodes are idle.
    pub(super) fn next(&self) -> Option<KvReturn> {
        let mut waiting = self.waiting();
        waiting.retain(|known| known.since.elapsed() < MAX_AGE);
        let idx = waiting.iter().rposition(|known| is_idle(&known.decode) && is_idle(&known.prefill))?;
        waiting.remove(idx)
    }
}

impl KvReturn {
    /// Lets the prefill node pull a reply's KV. Returns the number of tokens that came. Dropping the future ends the pull.
    pub(super) async fn bring_back(&self) -> Result<u32, EngineError> {
        let request = SequenceRequest {
            prompt: self.tokens.clone(),
            max_tokens: Some(0),
            cache_scope: self.scope,
            gives_way: true,
            held_only: true,
            kv_source: self.decode.kv_source(),
            ..SequenceRequest::default()
        };
        let mut events = self.prefill.engine.generate(request).await?;
        let mut n_tokens = 0;
        while let Some(event) = events.next().await {
            if let SequenceEvent::Handoff(report) = event? {
                n_tokens += report.n_tokens;
            }
        }
        Ok(n_tokens)
    }
}

fn is_idle(node: &Node) -> bool {
    let load = node.load();
    load.active_slots == 0 && load.queued == 0 && node.info().is_some()
}
