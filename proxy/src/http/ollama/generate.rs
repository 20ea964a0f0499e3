//! `POST /api/chat` and `POST /api/generate`.

use std::time::Instant;

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use baton_schemas::FinishReason;
use baton_schemas::GenerateRequest as Generate;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::ollama::LoadOnly;
use baton_schemas::ollama::OllamaChatRequest;
use baton_schemas::ollama::OllamaGenerateRequest;
use baton_schemas::ollama::reply::OllamaEnd;
use baton_schemas::tools::CallCollector;
use futures::StreamExt;

use super::failure::OllamaFailure;
use super::ndjson::LineWriter;
use super::reply::{LineContent, LineShape, OllamaRoute};
use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::reply_totals::ReplyTotals;
use crate::http::request_steps::{DrainDeadline, RequestStep, RequestSteps, or_drained, steps};
use crate::http::route_header::insert_route;
use crate::http::{HttpFailure, HttpState, streamed};
use crate::reply_event::EventKind;
use crate::request::caller::Caller;

type Body = Result<JsonBody, HttpFailure>;
type Drain = Option<Extension<DrainDeadline>>;

/// `POST /api/chat`.
pub(super) async fn chat(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: Body,
) -> Result<Response, OllamaFailure> {
    let since = Instant::now();
    let OllamaChatRequest { generate, load_only, stream } = OllamaChatRequest::parse(&body?.0, rand::random())?;
    let shape = LineShape { route: OllamaRoute::Chat, model: generate.model.clone(), since };
    answer(state, caller, drain, OllamaJob { generate, load_only, stream }, shape).await
}

/// `POST /api/generate`.
pub(super) async fn generate(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: Body,
) -> Result<Response, OllamaFailure> {
    let since = Instant::now();
    let OllamaGenerateRequest { generate, load_only, stream } = OllamaGenerateRequest::parse(&body?.0, rand::random())?;
    let shape = LineShape { route: OllamaRoute::Generate, model: generate.model.clone(), since };
    answer(state, caller, drain, OllamaJob { generate, load_only, stream }, shape).await
}

/// Serves a request of either route.
struct OllamaJob {
    generate: Generate,
    load_only: Option<LoadOnly>,
    stream: bool,
}

async fn answer(
    state: HttpState,
    caller: Caller,
    drain: Drain,
    OllamaJob { generate, load_only, stream }: OllamaJob,
    shape: LineShape,
) -> Result<Response, OllamaFailure> {
    let response = if let Some(wish) = load_only {
        let keep_alive = generate.keep_alive;
        let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
        let outcome = or_drained(&drain, load_or_unload(&state, &caller, &shape.model, wish, keep_alive)).await;
        outcome
            .and_then(|outcome| outcome)
            .map(|()| Json(shape.last(LineContent::default(), &[], OllamaEnd::loaded(wish))).into_response())
    } else {
        let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
        let steps = steps(state.backend, generate, caller.clone(), drain);
        if stream {
            streamed::respond(steps, LineWriter::new(shape), &state.config, &caller).await
        } else {
            whole(steps, shape).await
        }
    };
    response.map_err(|error| OllamaFailure::of_request(&error, &caller.request_id))
}

/// Loads a model, or starts to unload it if `keep_alive` is 0. A model that is always loaded stays.
async fn load_or_unload(
    state: &HttpState,
    caller: &Caller,
    model: &str,
    wish: LoadOnly,
    keep_alive: Option<KeepAlive>,
) -> Result<(), RequestError> {
    match wish {
        LoadOnly::Load => state.backend.load(model, keep_alive, caller).await,
        LoadOnly::Unload => state.backend.unload(model, caller).await,
    }
}

/// Collects a whole reply. Dropping the future cancels the request.
async fn whole(mut steps: RequestSteps, shape: LineShape) -> Result<Response, RequestError> {
    let (mut all, mut all_tokens) = (LineContent::default(), Vec::new());
    let (mut totals, mut end, mut calls) = (ReplyTotals::new(1), FinishReason::Stop, CallCollector::default());
    while let Some(step) = steps.next().await {
        let step = step?;
        totals.record(&step);
        let RequestStep::Event(event) = step else { continue };
        match event.kind {
            EventKind::Text { text, tokens } => {
                all.text.push_str(&text);
                all_tokens.extend(tokens);
            }
            EventKind::Reasoning { text } => all.thinking.push_str(&text),
            EventKind::ToolCall { call } => {
                all.append(calls.take(&call).map(LineContent::call).unwrap_or_default());
            }
            // Every choice finishes before the steps end.
            EventKind::Finished { reason, .. } => {
                end = reason;
                all.append(calls.rest().as_ref().map(LineContent::unfinished).unwrap_or_default());
            }
            _ => {}
        }
    }
    let mut response = Json(shape.last(all, &all_tokens, shape.end(end, &totals))).into_response();
    insert_route(response.headers_mut(), &totals.route);
    Ok(response)
}
