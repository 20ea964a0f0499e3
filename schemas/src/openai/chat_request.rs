//! `POST /v1/chat/completions`: a body → one [`GenerateRequest`].
//!
//! Accepted and ignored: `store`, `metadata`, `service_tier`, `prompt_cache_*`, `prediction`, `safety_identifier`,
//! `verbosity`, `user`, and any field nobody here has heard of. What would change the answer and cannot be honoured
//! yet is refused in `not_yet.rs`.

use std::ops::RangeInclusive;

use super::{functions, messages, not_yet, response_format, template_args};
use crate::generate::{Conversation, GenerateRequest, Input, Sampling};
use crate::request::fields::Fields;
use crate::request::images::Images;
use crate::request::{InvalidRequest, json, sampling, stop, tools};

/// Each choice takes a slot of its own, or waits for one: more than this from one request would keep everybody else
/// out of the engine. OpenAI allows 128 on far larger machines.
pub(crate) const N_CHOICES: RangeInclusive<i64> = 1..=16;
/// OpenAI's limit; each alternative costs bytes on every token.
pub(crate) const TOP_LOGPROBS: RangeInclusive<i64> = 0..=20;

/// A chat completion as the client asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// What to generate.
    pub generate: GenerateRequest,
    /// As server-sent events.
    pub stream: bool,
    /// With a last event that carries the usage.
    pub include_usage: bool,
    /// Tools came as `functions`, and a call is to be answered in that form.
    pub has_functions: bool,
}

impl ChatRequest {
    /// Reads a body. `drawn_seed` is used where the client sent none.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        not_yet::refuse(root)?;
        let conversation = conversation(root)?;
        let functions = functions::parse(root)?;
        let has_functions = functions.is_some();
        let (sampling, chosen) = sampling::parse(root, Sampling { seed: drawn_seed, ..Sampling::default() })?;
        Ok(ChatRequest {
            generate: GenerateRequest {
                model: root.model()?,
                input: Input::Chat(conversation),
                n: root.integer("n", N_CHOICES)?.map_or(1, |n| n as u32),
                max_tokens: max_tokens(root)?,
                stop: stop::parse(root)?,
                sampling,
                chosen,
                top_logprobs: top_logprobs(root)?,
                ignore_eos: root.boolean("ignore_eos")?.unwrap_or(false),
                constraint: response_format::parse(root)?,
                tools: functions.map_or_else(|| tools::parse(root), Ok)?,
                wants_thinking: false,
                keep_alive: None,
                num_ctx: None,
                context: None,
            },
            stream: root.boolean("stream")?.unwrap_or(false),
            include_usage: include_usage(root)?,
            has_functions,
        })
    }
}

/// What the chat template gets. llama-server's `/apply-template` has the same fields.
pub(crate) fn conversation(root: Fields<'_>) -> Result<Conversation, InvalidRequest> {
    let mut images = Images::default();
    Ok(Conversation {
        messages: messages::parse(root, &mut images)?,
        tools: Vec::new(),
        template_args: template_args::parse(root)?,
        images: images.into_vec(),
    })
}

/// `max_completion_tokens` wins over the older `max_tokens`; both are checked.
fn max_tokens(root: Fields<'_>) -> Result<Option<u32>, InvalidRequest> {
    let range = -1..=i64::from(u32::MAX);
    let older = root.integer("max_tokens", range.clone())?;
    let newer = root.integer("max_completion_tokens", range)?;
    // -1 is llama.cpp's 'until the context ends'.
    Ok(newer.or(older).and_then(|n| u32::try_from(n).ok()))
}

fn top_logprobs(root: Fields<'_>) -> Result<Option<u32>, InvalidRequest> {
    let wanted = root.boolean("logprobs")?.unwrap_or(false);
    let top = root.integer("top_logprobs", TOP_LOGPROBS)?.unwrap_or(0);
    // A bare `top_logprobs: 0` asks for nothing.
    if top > 0 && !wanted {
        return Err(InvalidRequest::at("top_logprobs", "needs 'logprobs' to be true"));
    }
    Ok(wanted.then_some(top as u32))
}

pub(super) fn include_usage(root: Fields<'_>) -> Result<bool, InvalidRequest> {
    let Some(options) = root.get("stream_options") else { return Ok(false) };
    Ok(Fields::at(options, "stream_options")?.boolean("include_usage")?.unwrap_or(false))
}

#[cfg(test)]
#[path = "chat_request_tests.rs"]
mod tests;
