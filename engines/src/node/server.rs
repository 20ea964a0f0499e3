//! Accepts, limits and drains a node's connections.
//!
//! Callers reach this before their key is checked, so connections, their memory and their silence are limited here.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::connection::AcceptedConnection;
use super::listen::Listener;
use super::loads::NOTICE;

/// The most connections; further ones wait in the kernel's backlog. Enough for thousands of streams of an endpoint and
/// the pulls of a cluster's decode nodes.
const MAX_CONNECTIONS: usize = 4_096;

/// The deadline of the handshake and the first request's head. Nodes and endpoints send them at once.
const FIRST_HEAD_DEADLINE: Duration = Duration::from_secs(10);

/// The deadline of a later head, which is how long a connection may be idle. It is longer than
/// [`Transport`](crate::transport::Transport) keeps an idle connection.
const HEAD_DEADLINE: Duration = Duration::from_secs(60);

/// The longest head of a request, bytes; Baton's have some hundreds.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Requests at once on one HTTP/2 connection.
const MAX_H2_STREAMS: u32 = 128;

/// The interval of pings to silent HTTP/2 clients.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);

/// The pause after an accept that failed, for example for lack of file descriptors. Retrying at once would only use
/// processor time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long running calls may continue after a stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);

impl Listener {
    /// Serves until `stop` is cancelled and for 0.3 s after it, then lets running calls end, for at most 60 s. Errors: the
    /// socket no longer listens.
    pub async fn serve(self, router: Router, stop: CancellationToken) -> std::io::Result<()> {
        serve(self, router, stop).await
    }
}

async fn serve(listener: Listener, router: Router, stop: CancellationToken) -> io::Result<()> {
    let shared = Arc::new(NodeServer { builder: builder(), router });
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    let closing = async {
        stop.cancelled().await;
        tokio::time::sleep(NOTICE).await;
    };
    tokio::pin!(closing);
    loop {
        let next = async {
            let accepted = accept(&listener).await?;
            io::Result::Ok((accepted, Arc::clone(&permits).acquire_owned().await))
        };
        let (accepted, permit) = tokio::select! {
            biased;
            () = &mut closing => break,
            next = next => next?,
        };
        let shared = Arc::clone(&shared);
        let watcher = graceful.watcher();
        connections.spawn(async move {
            let _permit = permit;
            shared.serve(accepted, watcher).await;
        });
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    if tokio::time::timeout(DRAIN_DEADLINE, graceful.shutdown()).await.is_err() {
        // Dropping `connections` closes them. Readers see a stream that was cut.
        tracing::warn!("some calls still run at the drain deadline; their connections are closed");
    }
    Ok(())
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE).max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_H2_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES as u32)
        .keep_alive_interval(H2_PING_INTERVAL);
    builder
}

/// Accepts the next connection. Most errors concern a single connection or are temporary. If the socket no longer
/// listens, this fails: a node that retried forever would look alive and never answer.
async fn accept(listener: &Listener) -> io::Result<AcceptedConnection> {
    loop {
        match listener.accept().await {
            Ok(accepted) => return Ok(accepted),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed; trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The state that connections share.
struct NodeServer {
    builder: Builder<TokioExecutor>,
    router: Router,
}

impl NodeServer {
    async fn serve(&self, accepted: AcceptedConnection, watcher: Watcher) {
        let spoken = AtomicBool::new(false);
        let connection = async {
            let Some(stream) = accepted.open().await else { return };
            let service = hyper::service::service_fn(|request: Request<Incoming>| {
                spoken.store(true, Ordering::Relaxed);
                self.router.clone().oneshot(request.map(Body::new))
            });
            let connection = self.builder.serve_connection(TokioIo::new(stream), service);
            // Most errors mean that the client has left.
            if let Err(error) = watcher.watch(connection).await {
                tracing::debug!(error, "a connection ended early");
            }
        };
        tokio::select! {
            () = connection => {}
            // Dropping the connection closes it.
            () = silence(&spoken) => tracing::debug!("a connection is closed: it sent no request in time"),
        }
    }
}

/// Ends if no request has come in time. hyper's own timer does not run while it detects the version of HTTP.
async fn silence(spoken: &AtomicBool) {
    tokio::time::sleep(FIRST_HEAD_DEADLINE).await;
    if spoken.load(Ordering::Relaxed) {
        std::future::pending().await
    }
}
