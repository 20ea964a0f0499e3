//! OpenAI's dialect: its routes, and the translation of request steps to its events. The JSON types are in
//! `baton_schemas::openai`.

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod models;
pub mod responses;

mod chat_choices;
mod choices;
mod stream;
mod text_choices;
mod whole;

use std::time::{SystemTime, UNIX_EPOCH};

use axum::response::Response;
use baton_schemas::openai::chat_response::ReplyHead;
use baton_schemas::openai::usage::{TimingsReport, Usage};

use self::choices::Choices;
use super::HttpConfig;
use super::edge::request_id::random_id;
use super::openapi::Routes;
use super::reply::collected::collected;
use super::reply::reply_totals::ReplyTotals;
use super::reply::streamed;
use crate::error::RequestError;
use crate::request::caller::Caller;
use crate::request::generate::EventStream;

pub(super) fn routes() -> Routes {
    Routes::of("OpenAI")
        .also_without_v1()
        .post("/v1/chat/completions", chat::complete, chat::operation())
        .post("/v1/completions", completions::complete, completions::operation())
        .post("/v1/responses", responses::create, responses::operation())
        .post("/v1/embeddings", embeddings::embed, embeddings::operation())
        .get("/v1/models", models::list, models::list_operation())
        .get("/v1/models/{*id}", models::show, models::operation())
}

/// Identifies the build. When it changes, equal seeds may no longer give equal text.
pub(super) const SYSTEM_FINGERPRINT: &str = concat!("baton-", env!("CARGO_PKG_VERSION"));

/// The parts of a request that its reply depends on, for chats and plain completions.
struct ReplyShape {
    head: ReplyHead,
    n_choices: u32,
    choices_per_prompt: u32,
    include_usage: bool,
    /// [`GenerateRequest::is_streamed`](baton_schemas::GenerateRequest::is_streamed)
    is_streamed: bool,
}

/// Generates, and answers with one object or a stream.
async fn reply<C: Choices>(
    steps: EventStream,
    shape: ReplyShape,
    choices: C,
    config: &HttpConfig,
    caller: &Caller,
) -> Result<Response, RequestError> {
    match shape.is_streamed {
        true => streamed::respond(steps, stream::ChunkWriter::new(shape, choices), config, caller).await,
        false => whole::collect(collected(steps, &caller.memory), shape, choices).await,
    }
}

/// Creates the fields that all chunks of a reply share.
fn head(id_prefix: &str, object: &'static str, model: String) -> ReplyHead {
    ReplyHead {
        id: format!("{id_prefix}-{}", random_id()),
        object,
        created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        model,
        system_fingerprint: SYSTEM_FINGERPRINT.to_owned(),
    }
}

fn usage(totals: &ReplyTotals) -> Usage {
    let usage = Usage::new(totals.counts.n_prompt, totals.n_cached(), totals.counts.n_completion);
    usage.with_reasoning(totals.n_reasoning).with_prediction(totals.timings.drafts.prediction)
}

fn timings(totals: &ReplyTotals) -> TimingsReport {
    TimingsReport::new(totals.n_cached(), &totals.timings, totals.counts.handoff)
}
