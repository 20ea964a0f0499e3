//! Sockets: accepting, bounding and, at the end, draining connections.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use baton_link::connections::{ConnectionDeadlines, Connections, tune};
use http::{Request, Response};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tower::ServiceExt;

use super::super::reply::request_steps::{DrainDeadline, Stopping};
use super::draining::DrainedBody;
use super::open_files::max_connections;
use super::parse_errors::Enveloped;

/// The deadlines of a connection.
pub(in crate::http) const DEADLINES: ConnectionDeadlines = ConnectionDeadlines {
    first_head: HEAD_DEADLINE,
    head: HEAD_DEADLINE,
    // Its request keeps a slot until then. Slow clients are unaffected as long as they read.
    read: Duration::from_secs(30),
};

/// Time for a request's head to arrive, and so the time a kept-alive connection may be idle. A connection that sends
/// nothing takes one of the [`max_connections`]. Longer than common clients keep an idle connection (5 s in Python, 4 s
/// in Node), so that the client closes first: a request that crossed our close would fail.
const HEAD_DEADLINE: Duration = Duration::from_secs(60);

/// The size of the send buffer; Linux doubles it. By default it is megabytes, and a client that stopped reading is
/// noticed only when the buffer is full. This size holds seconds of the fastest stream.
const SEND_BUFFER: usize = 64 << 10;

/// The maximum size of a request's head. Browsers share the cookies of localhost between all ports, so they can be
/// large.
const MAX_HEAD_BYTES: u32 = 64 << 10;

/// Time after the drain deadline for streams to send their error event.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

/// Signals that stop a server.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// New requests are refused; running ones may finish.
    pub begin: CancellationToken,
    /// Running requests end at once.
    pub now: CancellationToken,
    /// Tracks requests that arrived before the shutdown began, until their replies end. Every listener waits for all of
    /// them, so that each keeps answering until the last one has ended.
    running: TaskTracker,
}

impl Shutdown {
    /// Waits until the shutdown has begun and no earlier request runs.
    async fn is_idle(&self) {
        self.begin.cancelled().await;
        self.running.close();
        self.running.wait().await;
    }

    /// Waits until the shutdown has begun and running requests must end.
    async fn is_over(&self, drain_deadline: Duration) {
        self.begin.cancelled().await;
        let deadline = tokio::time::sleep(drain_deadline);
        if self.now.run_until_cancelled(deadline).await.is_some() {
            let seconds = drain_deadline.as_secs_f32();
            tracing::warn!(seconds, "requests still run at the drain deadline; ending them");
        }
    }
}

/// Serves until the shutdown begins, then waits for running requests: up to `drain_deadline`, or until
/// [`Shutdown::now`]. Requests that still run then fail with an error; none is cut off as if it were complete. New
/// requests are refused meanwhile.
///
/// Fails only if the listener itself is broken. Dropping the future closes everything at once.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    shutdown: Shutdown,
    drain_deadline: Duration,
) -> io::Result<()> {
    serve_with(DEADLINES, listener, router, shutdown, drain_deadline).await
}

/// [`serve`] with deadlines that a test can wait for.
pub(in crate::http) async fn serve_with(
    deadlines: ConnectionDeadlines,
    listener: TcpListener,
    router: Router,
    shutdown: Shutdown,
    drain_deadline: Duration,
) -> io::Result<()> {
    let drained = DrainDeadline::default();
    let server = Arc::new(Server {
        router,
        drain: drained.clone(),
        stopping: Stopping(shutdown.begin.clone()),
        running: shutdown.running.clone(),
    });
    let mut connections = Connections::new(deadlines, MAX_HEAD_BYTES, max_connections());

    let mut over = std::pin::pin!(shutdown.is_over(drain_deadline));
    let mut idle = std::pin::pin!(shutdown.is_idle());
    let is_over = loop {
        // The losing arm is an accept, which is safe to drop: a connection not yet returned stays in the backlog.
        let (place, (stream, _peer)) = tokio::select! {
            accepted = connections.accept(|| listener.accept()) => accepted?,
            () = &mut idle => break false,
            () = &mut over => break true,
        };
        tune(&stream, deadlines.read, Some(SEND_BUFFER));
        let server = server.clone();
        connections.serve(place, async { Some(Enveloped::new(stream)) }, move |request| server.answer(request));
    };
    drop(listener);

    let is_over = is_over
        || tokio::select! {
            () = connections.close() => false,
            () = &mut over => true,
        };
    if is_over {
        drained.0.cancel();
        // On timeout, the remaining clients do not read. Dropping `connections` closes their connections.
        let _ = tokio::time::timeout(DRAIN_GRACE, connections.close()).await;
    }
    Ok(())
}

/// State shared by all connections.
struct Server {
    router: Router,
    drain: DrainDeadline,
    stopping: Stopping,
    running: TaskTracker,
}

impl Server {
    fn answer(
        &self,
        mut request: Request<Body>,
    ) -> impl Future<Output = Response<DrainedBody<Option<TaskTrackerToken>>>> + Send + use<> {
        request.extensions_mut().insert(self.drain.clone());
        request.extensions_mut().insert(self.stopping.clone());
        // A request that arrives during the shutdown is refused, so it must not delay it.
        let running = (!self.stopping.0.is_cancelled()).then(|| self.running.token());
        let reply = self.router.clone().oneshot(request);
        async move {
            let reply = reply.await.unwrap_or_else(|never| match never {});
            reply.map(|body| DrainedBody::new(body, running))
        }
    }
}
