//! `POST /completion`, `POST /infill` and `POST /embedding`.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::json_output::write_event;
use baton_schemas::llama_server::generate::{
    LlamaCompletion, LlamaCompletionChunk, LlamaEmbedding, LlamaEnd, LlamaGenerate, parse_embedding,
};
use baton_schemas::openai::ErrorEnvelope;
use baton_schemas::openai::usage::TimingsReport;
use baton_schemas::{FinishReason, GenerateRequest};
use bytes::BytesMut;
use futures::StreamExt;

use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::event_stream::write_comment;
use crate::http::reply_totals::ReplyTotals;
use crate::http::request_steps::{DrainDeadline, RequestStep, RequestSteps, or_drained, steps};
use crate::http::route_header::insert_route;
use crate::http::streamed::{self, StreamWriter};
use crate::http::{HttpFailure, HttpState};
use crate::reply_event::EventKind;
use crate::request::caller::Caller;

type Drain = Option<Extension<DrainDeadline>>;

/// `POST /completion`.
pub(super) async fn complete(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    let request = body.parse(|body| LlamaGenerate::parse_completion(body, rand::random())).await?;
    generate(state, request.0, caller, drain).await
}

/// `POST /infill`.
pub(super) async fn infill(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    let request = body.parse(|body| LlamaGenerate::parse_infill(body, rand::random())).await?;
    generate(state, request.0, caller, drain).await
}

/// `POST /embedding`. When the client disconnects, the server drops this future and cancels the rest.
pub(super) async fn embed(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Json<Vec<LlamaEmbedding>>, HttpFailure> {
    let mut request = body.parse(parse_embedding).await?;
    request.model = model_or_first(request.model, &state, &caller);
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    let embedded = or_drained(&drain, state.backend.embed(request, &caller)).await.and_then(|outcome| outcome);
    let embedded = embedded.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    Ok(Json(LlamaEmbedding::list(embedded.vectors)))
}

/// Returns the first model that the caller may use if the client named none.
fn model_or_first(model: String, state: &HttpState, caller: &Caller) -> String {
    if !model.is_empty() {
        return model;
    }
    let first = state.models_for(caller).first().and_then(|model| model.names.first().cloned());
    first.unwrap_or_default()
}

async fn generate(
    state: HttpState,
    mut request: GenerateRequest,
    caller: Caller,
    drain: Drain,
) -> Result<Response, HttpFailure> {
    request.model = model_or_first(request.model, &state, &caller);
    let text = LlamaText { model: request.model.clone(), totals: ReplyTotals::new(1), has_new_line: false, end: None };
    let is_streamed = request.is_streamed;
    let steps = steps(state.backend, request, caller.clone(), drain.map(|Extension(drain)| drain).unwrap_or_default());
    let response = match is_streamed {
        true => streamed::respond(steps, LlamaWriter(text), &state.config, &caller).await,
        false => whole(steps, text).await,
    };
    response.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

/// Collects a whole reply. Dropping the future cancels the request.
async fn whole(mut steps: RequestSteps, mut text: LlamaText) -> Result<Response, RequestError> {
    let mut content = String::new();
    while let Some(step) = steps.next().await {
        content.push_str(text.record(&step?));
    }
    let mut response = Json(text.end(content)).into_response();
    insert_route(response.headers_mut(), &text.totals.route);
    Ok(response)
}

/// What a reply's end shows.
struct LlamaText {
    model: String,
    totals: ReplyTotals,
    has_new_line: bool,
    end: Option<(FinishReason, Option<String>)>,
}

impl LlamaText {
    /// Takes a step. Returns its text.
    fn record<'s>(&mut self, step: &'s RequestStep) -> &'s str {
        self.totals.record(step);
        let RequestStep::Event(event) = step else { return "" };
        match &event.kind {
            EventKind::Text { text, .. } => {
                self.has_new_line |= text.contains('\n');
                text
            }
            EventKind::Finished { reason, stop, .. } => {
                self.end = Some((*reason, stop.clone()));
                ""
            }
            _ => "",
        }
    }

    /// Writes the reply, with the text that the client has not got.
    fn end(&mut self, content: String) -> LlamaCompletion {
        // Every choice finishes before the steps end.
        let (reason, stop) = self.end.take().unwrap_or((FinishReason::Stop, None));
        let totals = &self.totals;
        let end = LlamaEnd {
            reason,
            stop,
            n_prompt: totals.n_prompt,
            n_completion: totals.n_completion,
            timings: TimingsReport::new(totals.n_cached, &totals.timings, totals.handoff),
        };
        LlamaCompletion::new(std::mem::take(&mut self.model), content, self.has_new_line, end)
    }
}

/// Writes the stream of one reply.
struct LlamaWriter(LlamaText);

impl StreamWriter for LlamaWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, out: &mut BytesMut, step: &RequestStep) {
        let text = self.0.record(step);
        if !text.is_empty() {
            write_event(out, &LlamaCompletionChunk::new(text));
        }
    }

    /// Writes the last event. Without a finish reason the reply has not ended, so nothing is written.
    fn finish(&mut self, out: &mut BytesMut) {
        if self.0.end.is_some() {
            write_event(out, &self.0.end(String::new()));
        }
    }

    fn fail(&mut self, out: &mut BytesMut, failure: HttpFailure) {
        write_event(out, &ErrorEnvelope { error: failure.error });
    }

    fn heartbeat(&self, out: &mut BytesMut, place: Option<usize>) {
        write_comment(out, place);
    }
}
