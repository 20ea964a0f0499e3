//! The node protocol's server: an axum router around any engine.
//!
//! `baton node` serves it on a Unix socket or on TCP. Every call needs the cluster key but one, which proves that this node
//! has it (`proof`). A caller without it learns nothing else, not even which paths exist.

mod cluster_key;
mod connection;
mod drafting;
mod late;
mod listen;
mod loads;
mod prefill;
mod proof;
mod requests;
mod server;
mod streams;
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
use baton_schemas::handoff::KvSource;
use baton_schemas::held::HeldKey;
use baton_schemas::node::{
    BASE_PATH, DetokenizedText, NodeDescription, NodeErrorReply, NodeInfo, PairRequest, RenderRequest, Role, TokenList,
    TokenPieces, TokenizeRequest,
};
use baton_schemas::stream_versions::StreamVersions;
use baton_schemas::streams::MAX_BODY_BYTES;
use baton_schemas::{EngineError, ScopeList, Token, kv};
use bytes::BytesMut;
use http::StatusCode;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

pub use self::cluster_key::ClusterKey;
pub use self::late::LateEngine;
pub use self::listen::{ListenAddress, ListenError, Listener};
pub use self::loads::HEARTBEAT;
pub use self::requests::{NodeRequest, NodeRequestCounts, NodeRequests};
use self::streams::StreamLimits;
pub use self::tls::ServerTls;
use crate::connections::{CloseConnection, UpgradeOffer};
use crate::engine::Engine;
use crate::handoff::MAX_NOISE_BYTES;

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
    /// The limits that all streams share.
    stream_limits: Arc<StreamLimits>,
    /// [`NodeInfo::process`].
    process: u64,
    /// The versions of the stream protocol that it speaks.
    versions: StreamVersions,
}

impl NodeService {
    fn new(
        versions: StreamVersions,
        engine: Arc<dyn Engine>,
        role: Role,
        key: ClusterKey,
        stop: CancellationToken,
    ) -> NodeService {
        NodeService {
            engine,
            role,
            key,
            stop,
            load_streams: Arc::new(Semaphore::new(loads::MAX_STREAMS)),
            stream_limits: Arc::new(StreamLimits::new()),
            process: rand::random(),
            versions,
        }
    }
}

/// The routes of a node around `engine`. Calls that its role does not allow are refused.
pub fn router(engine: Arc<dyn Engine>, role: Role, key: ClusterKey) -> Router {
    stoppable_router(engine, role, key, CancellationToken::new())
}

/// Like [`router`], for a node that reports in its load that it is stopping once `stop` is cancelled.
pub fn stoppable_router(engine: Arc<dyn Engine>, role: Role, key: ClusterKey, stop: CancellationToken) -> Router {
    router_speaking(StreamVersions::OURS, engine, role, key, stop)
}

/// Like [`stoppable_router`], for a node that speaks other versions of the stream protocol.
pub fn router_speaking(
    versions: StreamVersions,
    engine: Arc<dyn Engine>,
    role: Role,
    key: ClusterKey,
    stop: CancellationToken,
) -> Router {
    let service = NodeService::new(versions, engine, role, key.clone(), stop);
    let routes = Router::new()
        .route("/info", get(info))
        .route("/load", get(load))
        .route("/held", post(held))
        .route("/streams", get(open_streams))
        .route("/render", post(render))
        .route("/tokenize", post(tokenize))
        .route("/pair", post(pair))
        .route("/detokenize", post(detokenize))
        .route("/pieces", post(pieces))
        .route("/prefill", post(prefill))
        .route("/link", post(link))
        .route("/forget", post(forget))
        .route("/noise", get(noise))
        .route("/generate", post(replaced))
        .route("/embed", post(replaced))
        .route("/load/stream", get(replaced))
        .layer(middleware::from_fn(traced::traced))
        .with_state(service.clone());
    Router::new()
        .nest(BASE_PATH, routes)
        .fallback(|| async { refusal(StatusCode::NOT_FOUND, EngineError::invalid("no such call")) })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(middleware::from_fn_with_state(key, authenticate))
        // After the layer, which it must not pass.
        .route(&format!("{BASE_PATH}/proof"), get(proof::prove).with_state(service))
}

/// Refuses calls without the cluster key.
pub async fn authenticate(State(key): State<ClusterKey>, request: Request, next: Next) -> Response {
    if key.admits(request.headers()) {
        next.run(request).await
    } else {
        let mut refused = refusal(StatusCode::UNAUTHORIZED, EngineError::Unauthorized);
        refused.extensions_mut().insert(CloseConnection);
        refused
    }
}

type ServiceState = State<NodeService>;

async fn info(State(node): ServiceState) -> Response {
    answer(node.engine.info().await.map(|info| NodeDescription {
        info: NodeInfo {
            role: node.role,
            process: node.process,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..info
        },
        streams: node.versions,
    }))
}

async fn load(State(node): ServiceState) -> Response {
    answer(node.load().await)
}

async fn held(State(node): ServiceState, CallBody(key): CallBody<HeldKey>) -> Response {
    answer(node.engine.held(&key).await)
}

async fn open_streams(State(node): ServiceState, request: Request) -> Response {
    streams::respond(node, request)
}

/// Refuses a call of endpoints from before the stream protocol.
async fn replaced(State(node): ServiceState) -> Response {
    let feature = format!(
        "a call of an older endpoint. Update the endpoint: this node speaks versions {} of the stream protocol",
        node.versions
    );
    failure(EngineError::Unsupported { feature })
}

async fn render(State(node): ServiceState, CallBody(request): CallBody<RenderRequest>) -> Response {
    token_list(&node, node.engine.render(&request.conversation, request.key).await).await
}

async fn tokenize(State(node): ServiceState, CallBody(request): CallBody<TokenizeRequest>) -> Response {
    token_list(&node, node.engine.tokenize(&request).await).await
}

async fn pair(State(node): ServiceState, CallBody(request): CallBody<PairRequest>) -> Response {
    token_list(&node, node.engine.pair(&request).await).await
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

async fn detokenize(State(node): ServiceState, CallBody(request): CallBody<TokenList>) -> Response {
    answer(node.engine.detokenize(&request.tokens).await.map(|text| DetokenizedText { text }))
}

async fn pieces(State(node): ServiceState, CallBody(request): CallBody<TokenList>) -> Response {
    answer(node.engine.pieces(&request.tokens).await.map(|pieces| TokenPieces { pieces }))
}

/// Streams KV records; see [`baton_schemas::kv`].
async fn prefill(State(node): ServiceState, mut request: Request) -> Response {
    let offer = UpgradeOffer::of(&mut request, kv::KV_UPGRADE);
    match CallBody::from_request(request, &()).await {
        Ok(CallBody(request)) => prefill::respond(&node, offer, request).await,
        Err(refused) => refused,
    }
}

async fn link(State(node): ServiceState, CallBody(source): CallBody<KvSource>) -> Response {
    answer(node.engine.measure_link(&source).await)
}

async fn forget(State(node): ServiceState, CallBody(list): CallBody<ScopeList>) -> Response {
    answer(node.engine.forget(&list.scopes).await)
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

/// How long a node sends nothing until it sends a sign of life. A sequence may wait long for a slot or its prefill, and
/// the reader must be able to distinguish that from a frozen node.
pub const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// A call's body, parsed as JSON whatever its content type.
pub struct CallBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for CallBody<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let body = Bytes::from_request(request, state).await.map_err(IntoResponse::into_response)?;
        serde_json::from_slice(&body).map(CallBody).map_err(|e| {
            refusal(StatusCode::BAD_REQUEST, EngineError::invalid(format!("the body is not a valid request: {e}")))
        })
    }
}

/// The reply to a call that succeeded or failed.
pub fn answer<T: Serialize>(result: Result<T, EngineError>) -> Response {
    result.map_or_else(failure, |value| Json(value).into_response())
}

/// The reply to a call that failed, with the status of its error.
pub fn failure(error: EngineError) -> Response {
    refusal(status(&error), error)
}

/// The reply to a refused call.
pub fn refusal(status: StatusCode, error: EngineError) -> Response {
    (status, Json(NodeErrorReply { error })).into_response()
}

fn status(error: &EngineError) -> StatusCode {
    match error {
        EngineError::ContextOverflow { .. }
        | EngineError::ContextExceeded { .. }
        | EngineError::InvalidRequest { .. }
        | EngineError::Template { .. } => StatusCode::BAD_REQUEST,
        EngineError::Unauthorized => StatusCode::UNAUTHORIZED,
        EngineError::VersionMismatch(_) => StatusCode::UPGRADE_REQUIRED,
        EngineError::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
        EngineError::QueueFull { .. }
        | EngineError::NoTurn { .. }
        | EngineError::NoResources { .. }
        | EngineError::Unavailable { .. }
        | EngineError::GaveWay => StatusCode::SERVICE_UNAVAILABLE,
        EngineError::Lost { .. }
        | EngineError::Poison { .. }
        | EngineError::Internal { .. }
        | EngineError::NotFinite => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
