//! Sockets: accepting, bounding and, at the end, draining connections.

use std::convert::Infallible;
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
use hyper_util::server::graceful::GracefulShutdown;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::draining::Awaited;
use super::open_files::max_connections;
use super::parse_errors::Enveloped;
use super::request_steps::{DrainDeadline, Stopping};

/// Time for a request's head to arrive, and so the time a kept-alive connection may be idle. A connection that sends
/// nothing takes one of the [`max_connections`]. Longer than common clients keep an idle connection (5 s in Python, 4 s
/// in Node), so that the client closes first: a request that crossed our close would fail.
const HEAD_DEADLINE: Duration = Duration::from_secs(60);

/// How long a client may read nothing of what is sent to it. Its request keeps a slot until then. Slow clients are
/// unaffected as long as they read something.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// The size of the send buffer; Linux doubles it. By default it is megabytes, and a client that stopped reading is
/// noticed only when the buffer is full. This size holds seconds of the fastest stream.
const SEND_BUFFER: usize = 64 << 10;

/// The maximum size of a request's head. Browsers share the cookies of localhost between all ports, so they can be
/// large.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Concurrent requests on one HTTP/2 connection.
const MAX_H2_STREAMS: u32 = 128;

/// The interval of HTTP/2 keep-alive pings on silent connections.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);

/// The pause after an accept fails because no file descriptor is free. An immediate retry would only use up CPU.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time after the drain deadline for streams to send their error event.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Time limits of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionDeadlines {
    /// Time for the client to send a request's head.
    pub head: Duration,
    /// Time for the client to read anything of what is sent to it.
    pub write: Duration,
}

impl Default for ConnectionDeadlines {
    fn default() -> Self {
        ConnectionDeadlines { head: HEAD_DEADLINE, write: WRITE_DEADLINE }
    }
}

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
    serve_with(ConnectionDeadlines::default(), listener, router, shutdown, drain_deadline).await
}

/// [`serve`] with deadlines that a test can wait for.
pub(super) async fn serve_with(
    ConnectionDeadlines { head: head_deadline, write: write_deadline }: ConnectionDeadlines,
    listener: TcpListener,
    router: Router,
    shutdown: Shutdown,
    drain_deadline: Duration,
) -> io::Result<()> {
    let drained = DrainDeadline::default();
    let server = Arc::new(Server {
        builder: builder(head_deadline),
        router,
        head_deadline,
        write_deadline,
        drain: drained.clone(),
        stopping: Stopping(shutdown.begin.clone()),
        running: shutdown.running.clone(),
    });
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(max_connections()));
    let mut connections = JoinSet::new();

    let mut over = std::pin::pin!(shutdown.is_over(drain_deadline));
    let mut idle = std::pin::pin!(shutdown.is_idle());
    let is_over = loop {
        // The losing arm is an accept, which is safe to drop: a connection not yet returned stays in the backlog.
        let (stream, permit) = tokio::select! {
            accepted = accept_bounded(&listener, &permits) => accepted?,
            () = &mut idle => break false,
            () = &mut over => break true,
        };
        let server = server.clone();
        let watcher = graceful.watcher();
        connections.spawn(async move {
            let _permit = permit;
            server.serve(stream, watcher).await;
        });
        while connections.try_join_next().is_some() {}
    };
    drop(listener);

    // Close idle connections; others close after their current reply is sent.
    let mut all_closed = std::pin::pin!(graceful.shutdown());
    let is_over = is_over
        || tokio::select! {
            () = &mut all_closed => false,
            () = &mut over => true,
        };
    if is_over {
        drained.0.cancel();
        // On timeout, the remaining clients do not read. Dropping `connections` closes their connections.
        let _ = tokio::time::timeout(LAST_WORDS, all_closed).await;
    }
    Ok(())
}

fn builder(head_deadline: Duration) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(head_deadline).max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_H2_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES as u32)
        .keep_alive_interval(H2_PING_INTERVAL);
    builder
}

/// Accepts the next connection. Errors: the socket no longer listens; with endless retries the server would look alive
/// but answer nothing. Other errors concern one connection and are retried.
async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    loop {
        match listener.accept().await {
            Ok((stream, _peer)) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed; retrying");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Accepts the next connection once a permit is free.
async fn accept_bounded(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let stream = accept(listener).await?;
    let permit = Arc::clone(permits).acquire_owned().await.map_err(io::Error::other)?;
    Ok((stream, permit))
}

/// State shared by all connections.
struct Server {
    builder: Builder<TokioExecutor>,
    router: Router,
    head_deadline: Duration,
    write_deadline: Duration,
    drain: DrainDeadline,
    stopping: Stopping,
    running: TaskTracker,
}

impl Server {
    async fn serve(&self, stream: TcpStream, watcher: hyper_util::server::graceful::Watcher) {
        // A token is a small packet; Nagle's algorithm would delay it until the client's next acknowledgement.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "setting TCP_NODELAY failed; tokens may be delayed");
        }
        if let Err(error) = SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER) {
            tracing::debug!(%error, "setting the send buffer's size failed; the system's default stays");
        }
        let spoken = AtomicBool::new(false);
        let service = hyper::service::service_fn(|request: Request<Incoming>| {
            spoken.store(true, Ordering::Relaxed);
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(self.drain.clone());
            request.extensions_mut().insert(self.stopping.clone());
            // A request that arrives during the shutdown is refused, so it must not delay it.
            let running = (!self.stopping.0.is_cancelled()).then(|| self.running.token());
            let reply = self.router.clone().oneshot(request);
            async move {
                let reply = reply.await?;
                Ok::<_, Infallible>(match running {
                    Some(running) => reply.map(|body| Body::new(Awaited::new(body, running))),
                    None => reply,
                })
            }
        });
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.write_deadline));
        let stream = Enveloped::new(Box::pin(stream));
        let connection = self.builder.serve_connection(TokioIo::new(stream), service);
        tokio::select! {
            // Most errors are clients that disconnected.
            result = watcher.watch(connection) => if let Err(error) = result {
                tracing::debug!(error, "connection ended early");
            },
            // Dropping the connection closes it.
            () = silence(&spoken, self.head_deadline) => tracing::debug!("connection closed: no request in time"),
        }
    }
}

/// Returns if no request has arrived in time. hyper's own timer does not run while it detects the HTTP version.
async fn silence(spoken: &AtomicBool, head_deadline: Duration) {
    tokio::time::sleep(head_deadline).await;
    if spoken.load(Ordering::Relaxed) {
        std::future::pending().await
    }
}
