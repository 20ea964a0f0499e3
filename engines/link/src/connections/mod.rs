//! HTTP connections: accepts them, bounds them, and closes those that break a limit. The endpoint and every node serve
//! with it.
//!
//! Peers reach this before any key is checked. So it bounds their number, their silence, what they do not read
//! (`progress`, and a deadline for the socket itself), and frames that only cost work (`floods`).

mod bound;
mod floods;
mod open_requests;
mod pieces;
mod progress;
mod sockets;
#[cfg(test)]
mod tests;
mod upgrade;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, HttpBody};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use http::{HeaderValue, Request, Response, Version, header};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;

pub use self::bound::{accept_any, bind_host};
use self::floods::FloodGuard;
use self::open_requests::OpenRequests;
pub use self::pieces::send_pieces;
pub(crate) use self::progress::MIN_PROGRESS_BYTES;
pub use self::progress::ReadDeadline;
use self::progress::{StreamExecutor, watched};
pub use self::sockets::tune;
use self::upgrade::UpgradedWork;
pub use self::upgrade::{UpgradeOffer, UpgradedIo};
use crate::awake;

/// Concurrent requests on one HTTP/2 connection.
const MAX_H2_STREAMS: u32 = 128;

/// The interval of HTTP/2 keep-alive pings on silent connections.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);

/// Streams of one HTTP/2 connection that this end may reset because of the peer's errors, in the connection's life.
/// Clients without errors cause none.
const MAX_H2_ERROR_RESETS: usize = 64;

/// The pause after an accept that failed, for example for lack of file descriptors. Retrying at once would only use
/// processor time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time for the reply to a refused peer to leave, before its connection is closed.
const REFUSAL_GRACE: Duration = Duration::from_secs(1);

/// Time limits of a connection.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionDeadlines {
    /// Time for the handshake and the head of the first request.
    pub first_head: Duration,
    /// Time for the head of a later request, and so the time that a connection may be open without a request.
    pub head: Duration,
    /// Time for the peer to take some of the bytes that wait for it. A reply may have another one: [`ReadDeadline`].
    pub read: Duration,
}

/// Marks a reply after which the connection closes, because its peer may not use this server.
#[derive(Debug, Clone, Copy)]
pub struct CloseConnection;

/// The connections of one listener. Dropping them closes them at once.
pub struct Connections {
    server: Arc<ConnectionServer>,
    places: Arc<Semaphore>,
    running: JoinSet<()>,
    closing: CancellationToken,
}

/// A place among the connections of a listener.
pub struct ConnectionPlace(#[expect(dead_code, reason = "dropped with the connection")] OwnedSemaphorePermit);

impl Connections {
    /// No connection yet, and room for `max_connections`. Request heads may have `max_head_bytes`.
    pub fn new(deadlines: ConnectionDeadlines, max_head_bytes: u32, max_connections: usize) -> Connections {
        let executor = StreamExecutor { read_deadline: deadlines.read };
        let mut builder = Builder::new(executor);
        let timer = TokioTimer::new;
        builder.http1().timer(timer()).header_read_timeout(deadlines.head).max_buf_size(max_head_bytes as usize);
        builder
            .http2()
            .timer(timer())
            .max_concurrent_streams(MAX_H2_STREAMS)
            .max_local_error_reset_streams(MAX_H2_ERROR_RESETS)
            .max_header_list_size(max_head_bytes)
            .keep_alive_interval(H2_PING_INTERVAL);
        Connections {
            server: Arc::new(ConnectionServer { builder, deadlines }),
            places: Arc::new(Semaphore::new(max_connections)),
            running: JoinSet::new(),
            closing: CancellationToken::new(),
        }
    }

    /// Accepts the next connection and waits for a place. Most errors concern one connection or are temporary: they are
    /// retried. Errors: the socket no longer listens; with endless retries the server would look alive but answer
    /// nothing. Dropping the future loses at most a connection that waits for a place.
    pub async fn accept<C, F>(&self, accept: impl Fn() -> F) -> io::Result<(ConnectionPlace, C)>
    where
        F: Future<Output = io::Result<C>>,
    {
        let accepted = loop {
            match accept().await {
                Ok(accepted) => break accepted,
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection failed; retrying");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(io::Error::other)?;
        Ok((ConnectionPlace(place), accepted))
    }

    /// Serves a connection in its own task. `open` makes the handshake; it returns `None` if that fails.
    pub fn serve<S, F, B>(
        &mut self,
        place: ConnectionPlace,
        open: impl Future<Output = Option<S>> + Send + 'static,
        answer: impl Fn(Request<Body>) -> F + Send + Sync + 'static,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Unpin + Send + 'static,
    {
        let server = Arc::clone(&self.server);
        let closing = self.closing.clone();
        self.running.spawn(async move {
            let _place = place;
            server.serve(open, &closing, answer).await;
        });
        while self.running.try_join_next().is_some() {}
    }

    /// Closes idle connections now and the others after their current replies. Waits until all are closed.
    pub async fn close(&mut self) {
        self.closing.cancel();
        while self.running.join_next().await.is_some() {}
    }
}

/// The state that all connections share.
struct ConnectionServer {
    builder: Builder<StreamExecutor>,
    deadlines: ConnectionDeadlines,
}

impl ConnectionServer {
    async fn serve<S, F, B>(
        &self,
        open: impl Future<Output = Option<S>>,
        closing: &CancellationToken,
        answer: impl Fn(Request<Body>) -> F,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Unpin + Send + 'static,
    {
        let has_asked = AtomicBool::new(false);
        let connection = async {
            if let Some(stream) = open.await
                && let Some(upgraded_work) = self.exchange(stream, closing, &has_asked, answer).await
            {
                upgraded_work.await;
            }
        };
        tokio::select! {
            // HTTP/1.1 sends its replies in this task.
            () = watched(connection, self.deadlines.read) => {}
            // Dropping the connection closes it. hyper's own timer does not run while it detects the HTTP version.
            () = silence(&has_asked, self.deadlines.first_head) => {
                tracing::debug!("a connection is closed: it sent no request in time");
            }
        }
    }

    /// Reads requests and writes replies until the connection ends or is upgraded. Returns the work that then uses it.
    async fn exchange<S, F, B>(
        &self,
        stream: S,
        closing: &CancellationToken,
        has_asked: &AtomicBool,
        answer: impl Fn(Request<Body>) -> F,
    ) -> Option<UpgradedWork>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Unpin + Send + 'static,
    {
        // A connection is upgraded once.
        let (to_connection, mut upgraded_work) = mpsc::channel(1);
        let refused = CancellationToken::new();
        let open_requests = OpenRequests::default();
        let service = hyper::service::service_fn(|mut request: Request<Incoming>| {
            has_asked.store(true, Ordering::Relaxed);
            let version = request.version();
            let open_request = open_requests.begin();
            UpgradeOffer::add(&mut request, &to_connection, closing);
            let reply = answer(request.map(Body::new));
            let refused = refused.clone();
            async move {
                let mut reply = reply.await;
                if reply.extensions().get::<CloseConnection>().is_some() {
                    match version < Version::HTTP_2 {
                        true => _ = reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close")),
                        false => refused.cancel(),
                    }
                }
                Ok::<_, Infallible>(progress::counted(reply, open_request))
            }
        });
        let mut stream = TimeoutStream::new(FloodGuard::new(stream));
        stream.set_write_timeout(Some(self.deadlines.read));
        let connection = self.builder.serve_connection_with_upgrades(TokioIo::new(Box::pin(stream)), service);
        let mut connection = std::pin::pin!(connection);
        // Most errors are peers that disconnected.
        let ended = |result| {
            if let Err(error) = result {
                tracing::debug!(error, "a connection ended early");
            }
        };
        let must_close = async {
            tokio::select! {
                () = closing.cancelled() => {}
                () = refused.cancelled() => {}
                // hyper has no such limit for HTTP/2: a peer that answers pings could keep its place for ever.
                () = open_requests.idle_for(self.deadlines.head) => {}
            }
        };
        // Polled only after it was woken, and not with every token: each look takes locks that all connections share.
        let mut must_close = FuturesUnordered::from_iter([must_close]);
        tokio::select! {
            // A request that waits in the socket is read before the time of an idle connection ends.
            biased;
            result = connection.as_mut() => {
                ended(result);
                return upgraded_work.try_recv().ok();
            }
            _ = must_close.next() => {}
        }
        connection.as_mut().graceful_shutdown();
        let is_overdue = async {
            refused.cancelled().await;
            tokio::time::sleep(REFUSAL_GRACE).await;
        };
        tokio::select! {
            biased;
            result = connection => ended(result),
            () = is_overdue => tracing::debug!("a connection is closed: its peer was refused, but goes on"),
            () = open_requests.idle_for(self.deadlines.head) => {
                tracing::debug!("a connection is closed: it is idle, and its peer does not close it");
            }
        }
        upgraded_work.try_recv().ok()
    }
}

/// Returns if no request has arrived in time.
async fn silence(has_asked: &AtomicBool, deadline: Duration) {
    // Time in which this process is stopped does not count.
    let mut deadline = std::pin::pin!(awake::timeout(deadline, std::future::pending::<()>()));
    poll_fn(|context| match has_asked.load(Ordering::Relaxed) {
        // The deadline no longer applies, so its timer must not wake the connection.
        true => Poll::Pending,
        false => deadline.as_mut().poll(context).map(|_| ()),
    })
    .await
}
