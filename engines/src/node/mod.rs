//! The node protocol's server: an axum router around any engine.
//!
//! `baton node` serves it on a Unix socket or on TCP. Every call needs the cluster key. A caller without it learns
//! nothing, not even which paths exist.

mod cluster_key;
mod connection;
mod late;
mod listen;
mod loads;
mod prefill;
mod server;
mod tls;
mod traced;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequest, Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use baton_schemas::embed::EmbedSequences;
use baton_schemas::handoff::{KvSource, PrefillRequest};
use baton_schemas::node::{
    BASE_PATH, DetokenizedText, NodeErrorReply, NodeInfo, RenderRequest, Role, StreamLine, TokenList, TokenizeRequest,
};
use baton_schemas::{EngineError, SequenceRequest, Token};
use bytes::{BufMut, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{StatusCode, header};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

pub use self::cluster_key::ClusterKey;
pub use self::late::LateEngine;
pub use self::listen::{ListenAddress, ListenError, Listener};
pub use self::loads::HEARTBEAT;
pub use self::tls::ServerTls;
use crate::connections::CloseConnection;
use crate::engine::Engine;
use crate::handoff::MAX_NOISE_BYTES;

/// Largest request body: the endpoint's largest, 32 MiB, with what the endpoint adds. A refused body would look like a
/// node that fails.
const MAX_BODY_BYTES: usize = 48 << 20;

/// The most tokens of a reply, unless the context is longer. For more, the error says how many there are: nothing can be
/// done with them.
const MAX_TOKENS_SENT: usize = 1 << 20;

/// The state of a node's handlers.
#[derive(Clone)]
struct NodeService {
    engine: Arc<dyn Engine>,
    role: Role,
    key: ClusterKey,
    /// Cancelled when the node begins to stop.
    stop: CancellationToken,
    /// Permits for further streams of loads.
    load_streams: Arc<Semaphore>,
    /// [`NodeInfo::process`].
    process: u64,
}

/// The routes of a node around `engine`. Calls that its role does not allow are refused.
pub fn router(engine: Arc<dyn Engine>, role: Role, key: ClusterKey) -> Router {
    stoppable_router(engine, role, key, CancellationToken::new())
}

/// Like [`router`], for a node that reports in its load that it is stopping once `stop` is cancelled.
pub fn stoppable_router(engine: Arc<dyn Engine>, role: Role, key: ClusterKey, stop: CancellationToken) -> Router {
    let load_streams = Arc::new(Semaphore::new(loads::MAX_STREAMS));
    let routes = Router::new()
        .route("/info", get(info))
        .route("/load", get(load))
        .route("/load/stream", get(load_stream))
        .route("/render", post(render))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/generate", post(generate))
        .route("/embed", post(embed))
        .route("/prefill", post(prefill))
        .route("/link", post(link))
        .route("/noise", get(noise))
        .layer(middleware::from_fn(traced::traced))
        .with_state(NodeService { engine, role, key: key.clone(), stop, load_streams, process: rand::random() });
    Router::new()
        .nest(BASE_PATH, routes)
        .fallback(|| async { refusal(StatusCode::NOT_FOUND, EngineError::invalid("no such call")) })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(middleware::from_fn_with_state(key, authenticate))
}

async fn authenticate(State(key): State<ClusterKey>, request: Request, next: Next) -> Response {
    if key.admits(request.headers()) {
        next.run(request).await
    } else {
        let mut refused = refusal(StatusCode::UNAUTHORIZED, EngineError::Unauthorized);
        refused.extensions_mut().insert(CloseConnection);
        refused
    }
}

type Node = State<NodeService>;

async fn info(State(node): Node) -> Response {
    answer(node.engine.info().await.map(|info| NodeInfo { role: node.role, process: node.process, ..info }))
}

async fn load(State(node): Node) -> Response {
    answer(node.load().await)
}

async fn load_stream(State(node): Node) -> Response {
    loads::respond(node)
}

async fn render(State(node): Node, CallBody(request): CallBody<RenderRequest>) -> Response {
    token_list(&node, node.engine.render(&request.conversation).await).await
}

async fn tokenize(State(node): Node, CallBody(request): CallBody<TokenizeRequest>) -> Response {
    token_list(&node, node.engine.tokenize(&request).await).await
}

async fn token_list(node: &NodeService, tokens: Result<Vec<Token>, EngineError>) -> Response {
    match tokens {
        Ok(tokens) if tokens.len() > MAX_TOKENS_SENT => failure(match node.engine.info().await {
            Ok(info) if tokens.len() <= info.n_ctx as usize => return answer(Ok(TokenList { tokens })),
            Ok(info) => EngineError::ContextOverflow { n_prompt: tokens.len() as u32, n_ctx: info.n_ctx },
            Err(error) => error,
        }),
        tokens => answer(tokens.map(|tokens| TokenList { tokens })),
    }
}

async fn detokenize(State(node): Node, CallBody(request): CallBody<TokenList>) -> Response {
    answer(node.engine.detokenize(&request.tokens).await.map(|text| DetokenizedText { text }))
}

/// Streams events, one JSON value in each line. A closed connection drops the response and with it the engine's stream,
/// which cancels the sequence.
async fn generate(State(node): Node, CallBody(request): CallBody<SequenceRequest>) -> Response {
    if !node.role.decodes() {
        return failure(EngineError::Unsupported { feature: "generating: its role is prefill".into() });
    }
    node.engine.generate(request).await.map_or_else(failure, lines)
}

/// Streams vectors, one JSON value in each line. Dropping the response cancels the texts that are not computed yet.
async fn embed(State(node): Node, CallBody(request): CallBody<EmbedSequences>) -> Response {
    if !node.role.decodes() {
        return failure(EngineError::Unsupported { feature: "embeddings: its role is prefill".into() });
    }
    node.engine.embed(request).await.map_or_else(failure, lines)
}

/// A stream of events as lines of JSON, with an empty line after every second without an event.
fn lines<D: Serialize + Send + 'static>(events: BoxStream<'static, Result<D, EngineError>>) -> Response {
    // Events that are ready at the same time are sent as one chunk, which saves writes when many streams run.
    let mut events = events.ready_chunks(MAX_LINES_PER_CHUNK);
    let lines = async_stream::stream! {
        loop {
            match tokio::time::timeout(SIGN_OF_LIFE, events.next()).await {
                Err(_) => yield Ok::<_, Infallible>(Bytes::from_static(b"\n")),
                Ok(Some(events)) => yield Ok(lines_of(events)),
                Ok(None) => break,
            }
        }
    };
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// Streams KV records; see [`baton_schemas::kv`].
async fn prefill(State(node): Node, CallBody(request): CallBody<PrefillRequest>) -> Response {
    prefill::respond(&node, request).await
}

async fn link(State(node): Node, CallBody(source): CallBody<KvSource>) -> Response {
    answer(node.engine.measure_link(&source).await)
}

/// The query of [`noise`]: the number of bytes to send.
#[derive(Deserialize)]
struct Noise {
    bytes: u64,
}

/// Sends bytes for measuring a link. They are incompressible, in case a tunnel compresses.
async fn noise(Query(Noise { bytes }): Query<Noise>) -> Response {
    if bytes > MAX_NOISE_BYTES {
        let message = format!("at most {MAX_NOISE_BYTES} bytes can be requested");
        return refusal(StatusCode::BAD_REQUEST, EngineError::invalid(message));
    }
    let mut piece = BytesMut::zeroed(NOISE_PIECE_BYTES);
    blake3::Hasher::new().update(b"noise").finalize_xof().fill(&mut piece);
    let piece = piece.freeze();
    let sizes = (0..bytes.div_ceil(NOISE_PIECE_BYTES as u64)).map(move |i| {
        let left = bytes - i * NOISE_PIECE_BYTES as u64;
        Ok::<_, Infallible>(piece.slice(..usize::try_from(left).unwrap_or(usize::MAX).min(NOISE_PIECE_BYTES)))
    });
    Body::from_stream(futures::stream::iter(sizes)).into_response()
}

const NOISE_PIECE_BYTES: usize = 256 << 10;

const MAX_LINES_PER_CHUNK: usize = 16;

/// How often a stream without events sends an empty line as a sign of life. A sequence may wait long for a slot or its
/// prefill, and the reader must be able to distinguish that from a frozen node.
pub const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

fn lines_of<D: Serialize>(events: Vec<Result<D, EngineError>>) -> Bytes {
    let mut chunk = BytesMut::with_capacity(128 * events.len());
    for event in events {
        put_line(&mut chunk, &StreamLine::from(event));
    }
    chunk.freeze()
}

fn put_line(chunk: &mut BytesMut, line: &impl Serialize) {
    match serde_json::to_vec(line) {
        Ok(json) => chunk.put_slice(&json),
        // This cannot happen: a log-probability that is not finite becomes null in JSON.
        Err(error) => return tracing::error!(%error, "an event cannot be written as JSON and is dropped"),
    }
    chunk.put_u8(b'\n');
}

/// A call's body, parsed as JSON whatever its content type.
struct CallBody<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for CallBody<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let body = Bytes::from_request(request, state).await.map_err(IntoResponse::into_response)?;
        serde_json::from_slice(&body).map(CallBody).map_err(|e| {
            refusal(StatusCode::BAD_REQUEST, EngineError::invalid(format!("the body is not a valid request: {e}")))
        })
    }
}

fn answer<T: Serialize>(result: Result<T, EngineError>) -> Response {
    result.map_or_else(failure, |value| Json(value).into_response())
}

fn failure(error: EngineError) -> Response {
    refusal(status(&error), error)
}

fn refusal(status: StatusCode, error: EngineError) -> Response {
    (status, Json(NodeErrorReply { error })).into_response()
}

fn status(error: &EngineError) -> StatusCode {
    match error {
        EngineError::ContextOverflow { .. }
        | EngineError::ContextExceeded { .. }
        | EngineError::InvalidRequest { .. }
        | EngineError::Template { .. } => StatusCode::BAD_REQUEST,
        EngineError::Unauthorized => StatusCode::UNAUTHORIZED,
        EngineError::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
        EngineError::QueueFull { .. } | EngineError::Unavailable { .. } | EngineError::GaveWay => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        EngineError::Lost { .. }
        | EngineError::Poison { .. }
        | EngineError::Internal { .. }
        | EngineError::NotFinite => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
