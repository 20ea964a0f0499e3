//! The one call without the cluster key: it proves to the caller that this node has it. See [`proof`](crate::proof).

use axum::Json;
use axum::extract::{Query, Request, State};
use axum::response::{IntoResponse, Response};
use baton_schemas::EngineError;
use http::StatusCode;
use serde::Deserialize;

use super::{NodeService, refusal};
use crate::connections::CloseConnection;
use crate::proof::{self, ConnectionEnd, Proven};

/// The query: the caller's message, hexadecimal.
#[derive(Deserialize)]
struct ProofQuery {
    message: String,
}

/// Answers a question over TCP. The end comes with each request of a connection. A Unix socket has none, and its
/// callers have the key. Computing an answer costs about as much as a handshake of TLS, and the connection closes after
/// it.
pub(super) async fn prove(State(node): State<NodeService>, request: Request) -> Response {
    let mut reply = reply(&node, &request);
    reply.extensions_mut().insert(CloseConnection);
    reply
}

fn reply(node: &NodeService, request: &Request) -> Response {
    let Some(end) = request.extensions().get::<ConnectionEnd>() else {
        return refusal(StatusCode::UNAUTHORIZED, EngineError::Unauthorized);
    };
    let proven = Proven { process: node.process, role: node.role };
    let question = Query::<ProofQuery>::try_from_uri(request.uri()).ok();
    match question.and_then(|Query(asked)| proof::answer(node.key.secret(), &asked.message, *end, proven)) {
        Some(proof) => Json(proof).into_response(),
        None => refusal(StatusCode::BAD_REQUEST, EngineError::invalid("message must be one of SPAKE2, hexadecimal")),
    }
}
