//! The answer to `/api/chat` and `/api/generate`: a stream, a whole reply, or the loading of a model.

use axum::response::Response;
use baton_schemas::GenerateRequest;
use baton_schemas::ollama::LoadOnly;
use baton_schemas::ollama::reply::OllamaEnd;

use super::failure::OllamaFailure;
use super::line::{LineContent, LineShape};
use super::stream::LineWriter;
use super::whole;
use crate::error::RequestError;
use crate::http::HttpState;
use crate::http::reply::collected::collected;
use crate::http::reply::refusals_as_text::refusals_as_text;
use crate::http::reply::request_steps::{DrainDeadline, or_drained, steps};
use crate::http::reply::streamed;
use crate::request::caller::Caller;

/// A request of either route.
pub(super) struct OllamaJob {
    pub(super) generate: GenerateRequest,
    /// The client only loads or unloads the model.
    pub(super) load_only: Option<LoadOnly>,
    pub(super) shape: LineShape,
}

/// Serves a request of either route.
pub(super) async fn answer(
    state: HttpState,
    caller: &Caller,
    drain: &DrainDeadline,
    job: OllamaJob,
) -> Result<Response, OllamaFailure> {
    let response = match job.load_only {
        Some(load_only) => load_or_unload(&state, caller, drain, &job, load_only).await,
        None => reply(state, caller, drain, job).await,
    };
    response.map_err(|error| OllamaFailure::of_request(&error, &caller.request_id))
}

async fn reply(
    state: HttpState,
    caller: &Caller,
    drain: &DrainDeadline,
    job: OllamaJob,
) -> Result<Response, RequestError> {
    let OllamaJob { generate, shape, .. } = job;
    let is_streamed = generate.is_streamed;
    let steps = refusals_as_text(steps(state.backend, generate, caller.clone(), drain.clone()));
    match is_streamed {
        true => streamed::respond(steps, LineWriter::new(shape), &state.config, caller).await,
        false => whole::collect(collected(steps, &caller.memory), shape).await,
    }
}

/// Loads a model, or starts to unload it if `keep_alive` is 0. A model that is always loaded stays.
async fn load_or_unload(
    state: &HttpState,
    caller: &Caller,
    drain: &DrainDeadline,
    job: &OllamaJob,
    load_only: LoadOnly,
) -> Result<Response, RequestError> {
    let model = &job.shape.model;
    let outcome = match load_only {
        LoadOnly::Load => or_drained(drain, state.backend.load(model, job.generate.keep_alive, caller)).await?,
        LoadOnly::Unload => or_drained(drain, state.backend.unload(model, caller)).await?,
    };
    outcome?;
    Ok(job.shape.whole(&LineContent::default(), &[], OllamaEnd::loaded(load_only)))
}
