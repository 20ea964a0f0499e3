//! `POST /v1/completions`: continues one or several plain texts.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_schemas::GenerateRequest;
use baton_schemas::generate::Input;
use baton_schemas::openai::chat_response::{Completion, CompletionChunk, ReplyHead};
use baton_schemas::openai::completion_response::TextChoice;
use baton_schemas::openai::{CompletionBody, CompletionRequest};

use super::text_choices::{TextChoices, TextForm};
use super::{ReplyShape, head, reply};
use crate::admission::RequestAdmission;
use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::openapi::Operation;
use crate::http::reply::refusals_as_text::refusals_as_text;
use crate::http::reply::request_steps::{Drain, DrainDeadline, keeping, side_by_side, steps};
use crate::http::{HttpBackend, HttpFailure, HttpState};
use crate::request::caller::Caller;

pub(super) fn operation() -> Operation {
    Operation::new("Continue texts")
        .takes::<CompletionBody>()
        .replies::<Completion<TextChoice<'static>>>()
        .streams_marked(|generator| generator.subschema_for::<CompletionChunk<'_, TextChoice<'_>>>())
        .planned()
}

/// `POST /v1/completions`. The prompts are admitted together, and each of their choices takes a place.
pub async fn complete(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    let request = body.parse(|body| CompletionRequest::parse(body, rand::random())).await?;
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    let response = answer(state, request, &caller, drain).await;
    response.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

async fn answer(
    state: HttpState,
    request: CompletionRequest,
    caller: &Caller,
    drain: DrainDeadline,
) -> Result<Response, RequestError> {
    let CompletionRequest { prompts, echo, prompt_logprobs, include_usage } = request;
    let mut echoes = Vec::new();
    if echo {
        for prompt in &prompts {
            echoes.push(echoed(&*state.backend, prompt, caller).await?);
        }
    }
    // Parsing ensures at least one prompt and the same number of choices for each.
    let (n, model) = prompts.first().map_or((1, String::new()), |first| (first.n, first.model.clone()));
    let top_logprobs = prompts.first().and_then(|first| first.top_logprobs);
    let n_prompts = u32::try_from(prompts.len()).unwrap_or(u32::MAX);
    let shape = ReplyShape {
        head: head("cmpl", ReplyHead::TEXT, model),
        n_choices: n_prompts.saturating_mul(n),
        choices_per_prompt: n,
        include_usage,
        is_streamed: prompts.first().is_some_and(|first| first.is_streamed),
    };
    // The reply repeats these texts.
    let mut echoed = caller.memory.part();
    let n_echoed = echoes.iter().map(String::len).sum();
    if !shape.is_streamed {
        // Each choice begins with its prompt.
        caller.memory.collect(n_echoed * n as usize)?;
    }
    let choices = TextChoices::new(n_prompts, n, TextForm { top_logprobs, echoes, prompt_logprobs });
    let admission = RequestAdmission::of_prompts(shape.n_choices as usize);
    let caller = &Caller { admission, ..caller.clone() };
    let start = |prompt| steps(Arc::clone(&state.backend), prompt, caller.clone(), drain.clone());
    let steps = refusals_as_text(side_by_side(prompts.into_iter().map(start).collect(), n));
    echoed.shrink_to(n_echoed);
    let steps = if n_echoed == 0 { steps } else { keeping(echoed, steps) };
    reply(steps, shape, choices, &state.config, caller).await
}

/// Returns the prompt as text.
async fn echoed(backend: &dyn HttpBackend, request: &GenerateRequest, caller: &Caller) -> Result<String, RequestError> {
    match &request.input {
        Input::Text(text) | Input::Infill { prefix: text, .. } => Ok(text.to_string()),
        Input::Tokens(tokens) => {
            let text = backend.detokenize(Some(&request.model), tokens.clone(), caller).await;
            text.map_err(|error| error.in_field("prompt"))
        }
        // This route has no chat prompts.
        Input::Chat(_) => Ok(String::new()),
    }
}
