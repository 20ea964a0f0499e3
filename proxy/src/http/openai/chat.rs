//! `POST /v1/chat/completions`.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::openai::ChatRequest;
use baton_schemas::openai::chat_response::ReplyHead;

use super::{ReplyShape, collect, insert_route, sse};
use crate::error::RequestError;
use crate::generate::Caller;
use crate::http::body::JsonBody;
use crate::http::steps::{DrainDeadline, steps};
use crate::http::{Failure, HttpState};

/// Which build answered: a change of it tells a client that equal seeds may no longer give equal text.
const SYSTEM_FINGERPRINT: &str = concat!("baton-", env!("CARGO_PKG_VERSION"));

/// Reads, generates, answers: as one object or as a stream.
///
/// When the client leaves, the server drops this future or the reply's body, and with it everything the request holds.
pub async fn complete(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Option<Extension<DrainDeadline>>,
    JsonBody(body): JsonBody,
) -> Result<Response, Failure> {
    let ChatRequest { generate, stream, include_usage } = ChatRequest::parse(&body, rand::random())?;
    // Not held while the answer is made: 32 slow streams would keep 32 bodies.
    drop(body);
    let shape = ReplyShape {
        head: head(stream, generate.model.clone()),
        n: generate.n,
        logprobs: generate.top_logprobs.is_some(),
        include_usage,
    };
    let steps = steps(state.backend, generate, caller.clone(), drain.map(|Extension(drain)| drain).unwrap_or_default());
    let response = if stream {
        sse::respond(steps, shape, &state.config, &caller).await
    } else {
        collect::collect(steps, shape).await.map(|(route, completion)| {
            let mut response = Json(completion).into_response();
            insert_route(response.headers_mut(), &route);
            response
        })
    };
    response.map_err(|error: RequestError| Failure::of_request(&error, &caller.request_id))
}

fn head(stream: bool, model: String) -> ReplyHead {
    ReplyHead {
        id: format!("chatcmpl-{}", uuid::Uuid::new_v4().simple()),
        object: if stream { ReplyHead::CHUNK } else { ReplyHead::COMPLETION },
        created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        model,
        system_fingerprint: SYSTEM_FINGERPRINT.to_owned(),
    }
}
