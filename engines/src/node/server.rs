//! A node's connections: accepted, bounded, and at the end drained.
//!
//! Strangers reach this before any key is checked: what a connection may hold, and how long it may be silent, is
//! bounded here.

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

/// Connections at most; the next one waits in the kernel's backlog. More than thousands of streams of an endpoint and
/// the pulls of a cluster's decode nodes take.
const MAX_CONNECTIONS: usize = 4_096;

/// For a handshake and the first request's head. Nodes and endpoints send them at once.
const FIRST_HEAD_DEADLINE: Duration = Duration::from_secs(10);

/// For a later head, and so how long a connection may be idle. Longer than [`Transport`](crate::transport::Transport)
/// keeps one.
const HEAD_DEADLINE: Duration = Duration::from_secs(60);

/// Bytes of a request's head; ours have some hundreds.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Requests at once on one HTTP/2 connection.
const MAX_H2_STREAMS: u32 = 128;

/// How often a silent HTTP/2 client is asked whether it is still there.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);

/// After an accept fails for want of file descriptors. Trying at once would only burn the processor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long running calls may go on after a stop was asked for.
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);

impl Listener {
    /// Serves until `stop`, then lets running calls end, within a deadline.
    pub async fn serve(self, router: Router, stop: CancellationToken) -> std::io::Result<()> {
        serve(self, router, stop).await
    }
}

/// Serves until `stop` and for a moment ([`NOTICE`]) beyond it, then lets running calls end, for as long as
/// [`DRAIN_DEADLINE`]. Fails only if the socket no longer listens.
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
        let (shared, watcher) = (Arc::clone(&shared), graceful.watcher());
        connections.spawn(async move {
            let _permit = permit;
            shared.serve(accepted, watcher).await;
        });
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    if tokio::time::timeout(DRAIN_DEADLINE, graceful.shutdown()).await.is_err() {
        // Dropping `connections` closes them, which their readers take for what it is: a stream that was cut.
        tracing::warn!("calls still run at the drain deadline; closing their connections");
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

/// The next connection. An error belongs to one connection or to the moment, unless the socket does not listen any
/// more: a node that tried again for ever would look alive and answer nobody.
async fn accept(listener: &Listener) -> io::Result<AcceptedConnection> {
    loop {
        match listener.accept().await {
            Ok(accepted) => return Ok(accepted),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// What connections share.
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
            // Most errors are clients that left.
            if let Err(error) = watcher.watch(connection).await {
                tracing::debug!(error, "connection ended early");
            }
        };
        tokio::select! {
            () = connection => {}
            // Dropping the connection closes it.
            () = silence(&spoken) => tracing::debug!("connection closed: no request in time"),
        }
    }
}

/// Ends if no request has come in time. hyper's own timer does not run while it waits to see which HTTP is spoken.
async fn silence(spoken: &AtomicBool) {
    tokio::time::sleep(FIRST_HEAD_DEADLINE).await;
    if spoken.load(Ordering::Relaxed) {
        std::future::pending().await
    }
}
