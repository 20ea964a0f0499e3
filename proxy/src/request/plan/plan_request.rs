//! The input of a plan: a prompt, its limits, and the nodes that are left out.

use baton_planner::policy::Policy;
use baton_schemas::sequence::SequenceRequest;
use baton_schemas::{CacheScope, GenerateRequest, Token};

use crate::request::caller::Caller;
use crate::request::prompt::PreparedPrompt;

/// The input of a plan.
pub struct PlanRequest<'a> {
    /// The whole prompt, followed by the tokens already generated if the request is resumed.
    pub tokens: &'a [Token],
    /// The number of tokens at the end that are decoded again, one per step.
    pub n_replayed: u32,
    /// The caller's scope in the prefix cache.
    pub scope: CacheScope,
    /// KV that went through a lossy codec is of no use to it.
    pub lossless_kv: bool,
    /// The maximum number of new tokens that the client wants.
    pub max_tokens: Option<u32>,
    /// A policy that replaces the model's own.
    pub policy: Option<&'static dyn Policy>,
    /// The projector that encodes the prompt's images, if it has any.
    pub projector: Option<&'a str>,
    /// The decode node where the request has a place. On another one it would have to wait behind those that wait there.
    pub seat: Option<usize>,
    /// Decode nodes that have just failed or refused this request.
    pub exclude: &'a [usize],
    /// Prefill nodes that this request must not wait for again.
    pub exclude_prefill: &'a [usize],
    /// It waits for a machine that sleeps, if that pays.
    pub may_wake: bool,
}

impl<'a> PlanRequest<'a> {
    /// The input for these tokens: a reply of any length, from any node, by the model's policy.
    pub fn of_tokens(tokens: &'a [Token], scope: CacheScope) -> PlanRequest<'a> {
        PlanRequest {
            tokens,
            n_replayed: 0,
            scope,
            lossless_kv: false,
            max_tokens: None,
            policy: None,
            projector: None,
            seat: None,
            exclude: &[],
            exclude_prefill: &[],
            may_wake: false,
        }
    }

    /// The input for a request that no engine has started.
    pub fn of_prompt(prompt: &'a PreparedPrompt, request: &GenerateRequest, caller: &Caller) -> PlanRequest<'a> {
        PlanRequest {
            lossless_kv: caller.kv_loss.is_refused(&request.sampling),
            max_tokens: prompt.max_tokens,
            policy: caller.policy,
            projector: prompt.projector.as_deref(),
            may_wake: true,
            ..PlanRequest::of_tokens(&prompt.tokens, caller.cache_scope)
        }
    }

    /// The input for a sequence that starts from its beginning.
    pub fn of_sequence(request: &'a SequenceRequest) -> PlanRequest<'a> {
        PlanRequest {
            lossless_kv: request.lossless_kv,
            max_tokens: request.max_tokens,
            projector: request.projector(),
            ..PlanRequest::of_tokens(&request.prompt, request.cache_scope)
        }
    }
}
