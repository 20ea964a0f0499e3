//! The log-probabilities of a prompt's tokens, from the node that then continues the prompt.

use std::sync::Arc;

use baton_schemas::generate::PromptLogprobs;
use baton_schemas::sequence::{GeneratedToken, SequenceEvent, Timings};
use baton_schemas::{EngineError, SequenceRequest};
use futures::StreamExt;

use crate::admission::{Place, SlotUse};
use crate::error::RequestError;
use crate::targets::nodes::Node;

/// A prompt with the log-probabilities of its tokens.
pub struct ScoredPrompt {
    /// The tokens, each after the first with its log-probabilities.
    pub tokens: Arc<[GeneratedToken]>,
    /// Where the time went.
    pub timings: Timings,
}

/// Computes the log-probabilities of a prompt's tokens, for a request with this place there. Dropping the future cancels the
/// work.
///
/// Errors: there would be more than the request may ask for; the node cannot; or it is lost.
pub async fn prompt_logprobs(
    node: &Node,
    sequence: &SequenceRequest,
    wanted: PromptLogprobs,
    mut place: Option<&mut Place>,
) -> Result<ScoredPrompt, RequestError> {
    let PromptLogprobs { n_top, most, field } = wanted;
    let n_prompt = sequence.prompt.len();
    let n_reported = n_prompt as u64 * (u64::from(n_top) + 1);
    if n_reported > u64::from(most) {
        let problem = format!(
            "asks for {n_reported} log-probabilities of a prompt of {n_prompt} tokens, but this request may have {most} \
             for each prompt: shorten the prompt, or request fewer alternatives or fewer choices and prompts at once"
        );
        return Err(RequestError::InvalidField { field, problem });
    }
    let request = SequenceRequest {
        max_tokens: Some(0),
        prompt_logprobs: Some(n_top),
        top_logprobs: None,
        reports_end: false,
        constraint: None,
        ..sequence.clone()
    };
    let mut events = node.engine.generate(request).await?;
    let mut tokens = Vec::with_capacity(n_prompt);
    let timings = loop {
        match events.next().await.unwrap_or_else(|| Err(EngineError::lost("no last event")))? {
            SequenceEvent::Started { .. } => place.iter_mut().for_each(|place| place.note(SlotUse::Working)),
            SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
            SequenceEvent::Token(token) => tokens.push(token),
            SequenceEvent::Finished { timings, .. } => break timings,
        }
    };
    if tokens.len() != n_prompt {
        let feature = "log-probabilities of prompts: its version of baton is older than the endpoint's".to_owned();
        return Err(EngineError::Unsupported { feature }.into());
    }
    Ok(ScoredPrompt { tokens: tokens.into(), timings })
}
