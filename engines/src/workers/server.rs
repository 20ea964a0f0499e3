//! A worker's node: tells what it lends, and opens sessions.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use baton_link::connections::UpgradeOffer;
use baton_link::node::{ClusterKey, authenticate, refusal};
use baton_schemas::EngineError;
use baton_schemas::node::BASE_PATH;
use baton_schemas::worker::{SESSION_UPGRADE, VERSION_HEADER, WORKER_VERSION, WorkerDescription};

use super::rpc_exchange::{ReportedMemory, RpcExchange};
use super::session::{LendError, Lender};

/// When a refused node should ask again, seconds. A session lasts as long as its engine.
const RETRY_AFTER: &str = "10";

/// The routes of a worker. Every call needs the cluster key.
pub fn worker_router(lender: Arc<Lender>, key: ClusterKey) -> Router {
    let routes = Router::new().route("/worker", get(describe)).route("/worker/session", get(open)).with_state(lender);
    let no_model = || async { refusal(StatusCode::NOT_FOUND, EngineError::invalid("this node is a worker")) };
    Router::new().nest(BASE_PATH, routes).fallback(no_model).layer(middleware::from_fn_with_state(key, authenticate))
}

async fn describe(State(lender): State<Arc<Lender>>) -> Json<WorkerDescription> {
    // A GPU's driver may take longer to start than a node waits: the next call has the new description.
    let refreshed = Arc::clone(&lender);
    tokio::spawn(async move {
        if let Err(error) = refreshed.refresh().await {
            tracing::warn!(%error, "the free memory of the devices is not known anew");
        }
    });
    Json(WorkerDescription {
        version: WORKER_VERSION,
        devices: lender.devices(),
        max_memory: lender.max_memory(),
        is_busy: lender.is_busy(),
    })
}

async fn open(State(lender): State<Arc<Lender>>, mut request: Request) -> Response {
    let version = request.headers().get(VERSION_HEADER).and_then(|value| value.to_str().ok()?.parse::<u16>().ok());
    let offer = UpgradeOffer::of(&mut request, SESSION_UPGRADE);
    let (Some(offer), Some(WORKER_VERSION)) = (offer, version) else {
        let message = format!(
            "a session needs `upgrade: {SESSION_UPGRADE}` over HTTP/1.1, and version {WORKER_VERSION} of the node"
        );
        return refusal(StatusCode::UPGRADE_REQUIRED, EngineError::invalid(message));
    };
    match lender.open().await {
        Ok(session) => {
            tracing::info!("a node uses this worker");
            let memory = ReportedMemory::AtMost(lender.max_memory().unwrap_or(u64::MAX));
            let exchange = RpcExchange::new(memory, &lender.devices());
            offer.accept(move |user, closing| async move {
                if let Some(lost) = session.serve(user, closing, exchange).await {
                    tracing::warn!(reason = lost, "a node has lost this worker; its session is closed");
                }
            })
        }
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &LendError) -> Response {
    let reason = match error {
        LendError::Busy => error.to_string(),
        error => {
            tracing::error!(%error, "no session begins");
            "the worker's devices cannot be used; its log says why".to_owned()
        }
    };
    let reply = refusal(StatusCode::SERVICE_UNAVAILABLE, EngineError::Unavailable { reason });
    ([(header::RETRY_AFTER, RETRY_AFTER)], reply).into_response()
}
