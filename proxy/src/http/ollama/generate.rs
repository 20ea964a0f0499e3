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
use baton_schemas::ollama::reply::End;
use baton_schemas::tools::CallCollector;
use futures::StreamExt;

use super::failure::OllamaFailure;
use super::ndjson::LineWriter;
use super::reply::{ReplyShape, Route, Said};
use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::route_header::insert_route;
use crate::http::steps::{DrainDeadline, Step, Steps, or_drained, steps};
use crate::http::tally::Tally;
use crate::http::{Failure, HttpState, streamed};
use crate::reply_event::EventKind;
use crate::request::caller::Caller;

type Body = Result<JsonBody, Failure>;
type Drain = Option<Extension<DrainDeadline>>;

/// A conversation's next message.
pub(super) async fn chat(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: Body,
) -> Result<Response, OllamaFailure> {
    let since = Instant::now();
    let OllamaChatRequest { generate, load_only, stream } = OllamaChatRequest::parse(&body?.0, rand::random())?;
    let shape = ReplyShape { route: Route::Chat, model: generate.model.clone(), since };
    answer(state, caller, drain, Wish { generate, load_only, stream }, shape).await
}

/// A prompt's continuation.
pub(super) async fn generate(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: Body,
) -> Result<Response, OllamaFailure> {
    let since = Instant::now();
    let OllamaGenerateRequest { generate, load_only, stream } = OllamaGenerateRequest::parse(&body?.0, rand::random())?;
    let shape = ReplyShape { route: Route::Generate, model: generate.model.clone(), since };
    answer(state, caller, drain, Wish { generate, load_only, stream }, shape).await
}

/// What both routes' requests come down to.
struct Wish {
    generate: Generate,
    load_only: Option<LoadOnly>,
    stream: bool,
}

async fn answer(
    state: HttpState,
    caller: Caller,
    drain: Drain,
    Wish { generate, load_only, stream }: Wish,
    shape: ReplyShape,
) -> Result<Response, OllamaFailure> {
    let response = if let Some(wish) = load_only {
        let keep_alive = generate.keep_alive;
        let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
        let outcome = or_drained(&drain, loaded(&state, &caller, &shape.model, (wish, keep_alive))).await;
        outcome
            .and_then(|outcome| outcome)
            .map(|()| Json(shape.last(Said::default(), &[], End::loaded(wish))).into_response())
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

/// Answers once the model is there, or is to go. What is always there stays; upstreams are asked to do it.
async fn loaded(
    state: &HttpState,
    caller: &Caller,
    model: &str,
    (wish, keep_alive): (LoadOnly, Option<KeepAlive>),
) -> Result<(), RequestError> {
    match wish {
        LoadOnly::Load => state.backend.load(model, keep_alive, caller).await,
        LoadOnly::Unload => state.backend.unload(model, caller).await,
    }
}

/// Waits for all of a request. Dropping the future cancels it.
async fn whole(mut steps: Steps, shape: ReplyShape) -> Result<Response, RequestError> {
    let (mut all, mut all_tokens) = (Said::default(), Vec::new());
    let (mut tally, mut end, mut calls) = (Tally::new(1), FinishReason::Stop, CallCollector::default());
    while let Some(step) = steps.next().await {
        let step = step?;
        tally.record(&step);
        let Step::Event(event) = step else { continue };
        match event.kind {
            EventKind::Text { text, tokens } => {
                all.text.push_str(&text);
                all_tokens.extend(tokens);
            }
            EventKind::Reasoning { text } => all.thinking.push_str(&text),
            EventKind::ToolCall { call } => {
                all.append(calls.take(&call).map(Said::call).unwrap_or_default());
            }
            // Steps end only after this.
            EventKind::Finished { reason, .. } => {
                end = reason;
                all.append(calls.rest().as_ref().map(Said::unfinished).unwrap_or_default());
            }
            _ => {}
        }
    }
    let mut response = Json(shape.last(all, &all_tokens, shape.end(end, &tally))).into_response();
    insert_route(response.headers_mut(), &tally.route);
    Ok(response)
}
