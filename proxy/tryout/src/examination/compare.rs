//! Two replies to one prompt, compared.

use std::time::{Duration, Instant};

use baton_link::Engine;
use baton_link::remote::RemoteEngine;
use baton_proxy::serve::CommandFailure;
use baton_schemas::CacheScope;
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::{HandoffReport, KvSource};
use baton_schemas::sequence::{Alternative, CachedTokens};
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;

/// Tokens whose probabilities are compared at each position; the rest of a vocabulary has next to none.
const N_TOP: u32 = 200;

/// Different from the scope of captured KV: with the same scope, a node would find the prompt in its own cache and take
/// nothing from the other node.
const SCOPE: CacheScope = CacheScope(1);

/// The whole of a reply. A software GPU needs minutes for what others do in a second.
const DEADLINE: Duration = Duration::from_secs(600);

/// A greedy reply with the likeliest tokens at each of its positions.
pub(super) struct ComparedReply {
    tokens: Vec<Token>,
    top: Vec<Vec<Alternative>>,
    pub(super) handoff: Option<HandoffReport>,
    /// Tokens of the prompt whose KV the node had, by where it was.
    pub(super) cached: CachedTokens,
    /// Until what came from the node's store was back.
    pub(super) restore_ms: f64,
    /// From the request to the first token, seconds.
    pub(super) ttft: f64,
    /// From the first token to the last, tokens per second.
    pub(super) decode_tps: f64,
}

/// Continues a prompt greedily by `n_new` tokens. The node keeps none of them in its cache.
pub(super) async fn reply(
    node: &RemoteEngine,
    prompt: &[Token],
    n_new: u32,
    source: Option<&str>,
) -> Result<ComparedReply, CommandFailure> {
    read(node, SequenceRequest { kv_source: source.map(KvSource::at), ..greedy(prompt, n_new) }).await
}

/// Continues a prompt greedily, and keeps both in the node's cache: the same prompt asked again finds them.
pub(super) async fn kept_reply(
    node: &RemoteEngine,
    prompt: &[Token],
    n_new: u32,
) -> Result<ComparedReply, CommandFailure> {
    read(node, SequenceRequest { ephemeral: false, ..greedy(prompt, n_new) }).await
}

/// A request that leaves nothing in the caches. The position of cells decides in which order kernels add numbers, so each
/// reply must start with an equally empty cache.
fn greedy(prompt: &[Token], n_new: u32) -> SequenceRequest {
    SequenceRequest {
        prompt: prompt.to_vec(),
        sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
        max_tokens: Some(n_new),
        ignore_eos: true,
        ephemeral: true,
        cache_scope: SCOPE,
        top_logprobs: Some(N_TOP),
        ..SequenceRequest::default()
    }
}

async fn read(node: &RemoteEngine, request: SequenceRequest) -> Result<ComparedReply, CommandFailure> {
    let read = async {
        let sent = Instant::now();
        let mut first = sent;
        let mut last = sent;
        let mut reply = ComparedReply {
            tokens: Vec::new(),
            top: Vec::new(),
            handoff: None,
            cached: CachedTokens::default(),
            restore_ms: 0.0,
            ttft: 0.0,
            decode_tps: 0.0,
        };
        let mut deltas = node.generate(request).await?;
        while let Some(delta) = deltas.next().await {
            match delta? {
                SequenceEvent::Token(token) => {
                    last = Instant::now();
                    if reply.tokens.is_empty() {
                        first = last;
                    }
                    reply.tokens.push(token.id);
                    reply.top.push(token.logprobs.map(|logprobs| logprobs.top).unwrap_or_default());
                }
                SequenceEvent::Handoff(timings) => reply.handoff = Some(timings),
                SequenceEvent::Started(cached) => reply.cached = cached,
                SequenceEvent::PrefillBegun => {}
                SequenceEvent::Finished { timings, .. } => reply.restore_ms = timings.restore_ms,
            }
        }
        reply.ttft = (first - sent).as_secs_f64();
        reply.decode_tps = reply.tokens.len().saturating_sub(1) as f64 / (last - first).as_secs_f64();
        Ok::<_, CommandFailure>(reply)
    };
    tokio::time::timeout(DEADLINE, read).await.map_err(|_| CommandFailure("a reply takes too long".into()))?
}

/// How far a reply lies from the one it should be, position by position until a token differs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Difference {
    /// KL(expected ‖ reply), nats: its mean.
    pub(super) mean_kl: f64,
    /// Positions that were compared.
    pub(super) n_compared: usize,
    /// Positions whose likeliest token is the same.
    pub(super) n_agreed: usize,
    /// True if every number is equal.
    pub(super) is_exact: bool,
}

impl Difference {
    /// The smallest difference that there is.
    pub(super) const NONE: Difference =
        Difference { mean_kl: 0.0, n_compared: usize::MAX, n_agreed: usize::MAX, is_exact: true };

    /// The larger difference of two, each figure on its own.
    pub(super) fn or_worse(self, other: Difference) -> Difference {
        Difference {
            mean_kl: self.mean_kl.max(other.mean_kl),
            n_compared: self.n_compared.min(other.n_compared),
            n_agreed: self.n_agreed.min(other.n_agreed),
            is_exact: self.is_exact && other.is_exact,
        }
    }

    /// Compares two replies up to the first different token: after it, they continue different texts.
    pub(super) fn between(expected: &ComparedReply, reply: &ComparedReply) -> Difference {
        let common = expected.tokens.iter().zip(&reply.tokens).take_while(|(a, b)| a == b).count();
        let n_compared = (common + 1).min(expected.tokens.len()).min(reply.tokens.len());
        let pairs = || expected.top.iter().zip(&reply.top).take(n_compared);
        let mean_kl = pairs().map(|(a, b)| divergence(a, b)).sum::<f64>() / n_compared.max(1) as f64;
        let is_exact = expected.tokens == reply.tokens && !reply.tokens.is_empty() && expected.top == reply.top;
        Difference { mean_kl, n_compared, n_agreed: common.min(n_compared), is_exact }
    }
}

/// KL divergence, nats, over the tokens that `expected` lists. A token that `other` does not list is
/// at most as likely there as the last listed one.
fn divergence(expected: &[Alternative], other: &[Alternative]) -> f64 {
    let least = other.last().map_or(f64::NEG_INFINITY, |alternative| f64::from(alternative.logprob));
    let terms = expected.iter().map(|alternative| {
        let logprob = f64::from(alternative.logprob);
        let found = other.iter().find(|a| a.id == alternative.id).map_or(least, |a| f64::from(a.logprob));
        logprob.exp() * (logprob - found)
    });
    let sum: f64 = terms.sum();
    // `max` would take it for 0, which is equality.
    if sum.is_nan() { f64::INFINITY } else { sum.max(0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply_of(tokens: &[Token], p: f32) -> ComparedReply {
        let top = |id: Token| {
            let alternative = |id, p: f32| Alternative { id, logprob: p.ln(), bytes: Vec::new() };
            vec![alternative(id, p), alternative(id + 1, 1.0 - p)]
        };
        let top = tokens.iter().map(|&id| top(id)).collect();
        let (cached, restore_ms, tokens) = (CachedTokens::default(), 0.0, tokens.to_vec());
        ComparedReply { tokens, top, handoff: None, cached, restore_ms, ttft: 1.0, decode_tps: 1.0 }
    }

    #[test]
    fn equal_replies_are_exact_and_others_are_as_far_as_their_distributions() {
        let expected = reply_of(&[1, 2, 3], 0.75);
        let same = Difference::between(&expected, &reply_of(&[1, 2, 3], 0.75));
        assert_eq!(same, Difference { mean_kl: 0.0, n_compared: 3, n_agreed: 3, is_exact: true });
        let moved = Difference::between(&expected, &reply_of(&[1, 2, 3], 0.5));
        let kl = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((moved.mean_kl - kl).abs() < 1e-6, "{moved:?}");
        assert!(!moved.is_exact);
        // After the first other token there is nothing to compare.
        let other = Difference::between(&expected, &reply_of(&[1, 9, 3], 0.75));
        assert_eq!((other.n_compared, other.n_agreed, other.is_exact), (2, 1, false));
        assert!(other.mean_kl > 0.0);
        assert_eq!(Difference::NONE.or_worse(same), same);
        assert_eq!(same.or_worse(other), other);
        assert!(!Difference::between(&reply_of(&[], 0.5), &reply_of(&[], 0.5)).is_exact, "nothing proves nothing");
    }
}
