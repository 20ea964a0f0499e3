//! `POST /completion`, `POST /infill` and `POST /embedding`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::json_output::write_event;
use baton_schemas::llama_server::generate::{
    LlamaCompletion, LlamaCompletionChunk, LlamaContent, LlamaEmbedding, LlamaEnd, LlamaGenerate, LlamaReply,
    LlamaTokenProb, parse_embedding,
};
use baton_schemas::openai::usage::TimingsReport;
use baton_schemas::openai::{ErrorEnvelope, InvalidRequest};
use bytes::BytesMut;
use futures::StreamExt;
use http::HeaderMap;

use super::model_or_first;
use crate::admission::RequestAdmission;
use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::reply::collected::collected;
use crate::http::reply::event_stream::write_comment;
use crate::http::reply::refusals_as_text::refusals_as_text;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::http::reply::request_steps::{Drain, or_drained, side_by_side, steps};
use crate::http::reply::streamed::{self, StreamWriter};
use crate::http::{HttpFailure, HttpState};
use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::caller::Caller;
use crate::request::generate::EventStream;

/// `POST /completion`.
pub(super) async fn complete(
    state: State<HttpState>,
    caller: Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    generate(LlamaGenerate::parse_completion, state, caller, drain, body).await
}

/// `POST /infill`.
pub(super) async fn infill(
    state: State<HttpState>,
    caller: Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    generate(LlamaGenerate::parse_infill, state, caller, drain, body).await
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

async fn generate(
    parse: fn(&[u8], u64) -> Result<LlamaGenerate, InvalidRequest>,
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    let LlamaGenerate(mut prompts) = body.parse(move |body| parse(body, rand::random())).await?;
    let named = prompts.first_mut().map(|first| std::mem::take(&mut first.model)).unwrap_or_default();
    let model = model_or_first(named, &state, &caller);
    prompts.iter_mut().for_each(|prompt| prompt.model.clone_from(&model));
    let (is_streamed, has_probs) =
        prompts.first().map_or((false, false), |first| (first.is_streamed, first.top_logprobs.is_some()));
    let replies = LlamaReplies { model, has_probs, each: prompts.iter().map(|_| LlamaText::new()).collect() };
    let caller = Caller { admission: RequestAdmission::of_prompts(prompts.len()), ..caller };
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    let start = |prompt| steps(Arc::clone(&state.backend), prompt, caller.clone(), drain.clone());
    let steps = refusals_as_text(side_by_side(prompts.into_iter().map(start).collect(), 1));
    let response = match is_streamed {
        true => streamed::respond(steps, LlamaWriter(replies), &state.config, &caller).await,
        false => whole(collected(steps, &caller.memory), replies).await,
    };
    response.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

/// Collects whole replies. Dropping the future cancels the requests.
async fn whole(mut steps: EventStream, mut replies: LlamaReplies) -> Result<Response, RequestError> {
    let mut contents = vec![LlamaContent::default(); replies.each.len()];
    while let Some(event) = steps.next().await {
        let event = event?;
        let (text, probabilities) = replies.record(&event);
        if let Some(content) = contents.get_mut(event.choice as usize) {
            content.text.push_str(text);
            if let Some(new) = probabilities {
                content.probabilities.get_or_insert_default().extend(new);
            }
        }
    }
    let mut headers = HeaderMap::new();
    if let Some(first) = replies.each.first() {
        first.totals.insert_into(&mut headers);
    }
    let mut ended = Vec::with_capacity(contents.len());
    for (index, mut content) in (0..).zip(contents) {
        if replies.has_probs {
            content.probabilities.get_or_insert_default();
        }
        ended.extend(replies.end(index, content));
    }
    let reply = match ended.pop() {
        Some(only) if ended.is_empty() => LlamaReply::One(Box::new(only)),
        last => LlamaReply::Many(ended.into_iter().chain(last).collect()),
    };
    let mut response = Json(reply).into_response();
    response.headers_mut().extend(headers);
    Ok(response)
}

/// The replies to the prompts of a body.
struct LlamaReplies {
    model: String,
    /// The client asks for tokens with their log-probabilities.
    has_probs: bool,
    each: Vec<LlamaText>,
}

/// What a reply's end shows.
struct LlamaText {
    totals: ReplyTotals,
    has_new_line: bool,
    end: Option<(FinishReason, Option<String>)>,
}

impl LlamaText {
    fn new() -> Self {
        LlamaText { totals: ReplyTotals::new(1), has_new_line: false, end: None }
    }
}

impl LlamaReplies {
    /// Takes an event. Returns its text, and its tokens if the client asks for them.
    fn record<'e>(&mut self, event: &'e ReplyEvent) -> (&'e str, Option<Vec<LlamaTokenProb>>) {
        let Some(reply) = self.each.get_mut(event.choice as usize) else { return ("", None) };
        reply.totals.record(event);
        match &event.kind {
            EventKind::Text { text, tokens } => {
                reply.has_new_line |= text.contains('\n');
                let prob = |token: &TokenLogprobs| LlamaTokenProb::new(token.id, &token.bytes, &token.logprobs);
                (text, (self.has_probs && !tokens.is_empty()).then(|| tokens.iter().map(prob).collect()))
            }
            EventKind::Finished { reason, stop, .. } => {
                reply.end = Some((*reason, stop.clone()));
                ("", None)
            }
            _ => ("", None),
        }
    }

    /// Writes the end of the reply to prompt `index`, with what the client has not got. `None`: it has not finished, or was
    /// written before.
    fn end(&mut self, index: u32, content: LlamaContent) -> Option<LlamaCompletion> {
        let reply = self.each.get_mut(index as usize)?;
        let (reason, stop) = reply.end.take()?;
        let totals = &reply.totals;
        let end = LlamaEnd {
            index,
            reason,
            stop,
            n_prompt: totals.counts.n_prompt,
            n_completion: totals.counts.n_completion,
            timings: TimingsReport::new(totals.n_cached(), &totals.timings, totals.counts.handoff),
        };
        Some(LlamaCompletion::new(self.model.clone(), content, reply.has_new_line, end))
    }
}

/// Writes the stream of the replies. Each event has the index of its prompt.
struct LlamaWriter(LlamaReplies);

impl StreamWriter for LlamaWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, out: &mut BytesMut, event: &ReplyEvent) {
        let index = event.choice;
        let (text, probabilities) = self.0.record(event);
        if !text.is_empty() || probabilities.is_some() {
            write_event(out, &LlamaCompletionChunk::new(index, text, probabilities));
        }
        if let Some(end) = self.0.end(index, LlamaContent::default()) {
            write_event(out, &end);
        }
    }

    /// Each reply's own end was written with its last event.
    fn finish(&mut self, _: &mut BytesMut) {}

    fn fail(&mut self, out: &mut BytesMut, failure: HttpFailure) {
        write_event(out, &ErrorEnvelope { error: failure.error });
    }

    fn heartbeat(&self, out: &mut BytesMut, place: Option<usize>) {
        write_comment(out, place);
    }
}
