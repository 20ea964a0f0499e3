//! HTTP/2 connections, each of which several calls use at once.

use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::call::{CallError, RequestFate, is_stream_refused};
use super::idle::IDLE_TIMEOUT;
use super::open::Socket;

/// Calls that share a connection. Servers must allow about as many (RFC 9113, section 6.5.2), and a call beyond the
/// server's limit would wait for another to end.
pub(super) const MAX_CALLS: usize = 100;

/// Bytes of a reply that wait for a slow client. A call whose window is full holds up no other, because the connection's
/// window has room for all of them.
const CALL_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = CALL_WINDOW * MAX_CALLS as u32;

/// The interval of pings while calls run, and how long each may take: a dead connection would hold up all its calls.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// How long a new connection waits for its server's limit. Without one it gets a single call.
const SETTINGS_WAIT: Duration = Duration::from_millis(100);

/// The time between two looks at the server's limit: before the first one, while a call waits for it, and later.
const FIRST_LIMIT_CHECK: Duration = Duration::from_millis(5);
const LIMIT_CHECK: Duration = Duration::from_secs(1);

/// The limit that hyper reports before the server's first SETTINGS frame. No server sends it.
const NO_LIMIT_YET: usize = usize::MAX - 1;

type Http2Driver = http2::Connection<TokioIo<Socket>, Full<Bytes>, TokioExecutor>;

/// The connections that are open.
#[derive(Debug, Default)]
pub(super) struct SharedConnections {
    open: Mutex<Vec<OpenConnection>>,
}

#[derive(Debug)]
struct OpenConnection {
    sender: SendRequest<Full<Bytes>>,
    usage: Arc<ConnectionUsage>,
}

/// How a connection is used.
#[derive(Debug)]
struct ConnectionUsage {
    /// The calls that use it.
    n_calls: AtomicUsize,
    /// The calls that may use it. `None` before the server's first SETTINGS frame.
    max_calls: watch::Sender<Option<usize>>,
    /// When its last call ended.
    last_used: Mutex<Instant>,
    /// The server shuts it down, so it gets no more calls. Those that run go on.
    is_retired: AtomicBool,
}

/// A place for one call on a connection.
pub(super) struct SharedConnection {
    sender: SendRequest<Full<Bytes>>,
    usage: Arc<ConnectionUsage>,
}

impl SharedConnections {
    /// A place on a connection that has one.
    pub(super) fn take(&self) -> Option<SharedConnection> {
        self.close_unused();
        self.lock().iter().find_map(OpenConnection::place)
    }

    /// Closes the connections that were idle for too long, and forgets those that take no more calls.
    pub(super) fn close_unused(&self) {
        self.lock().retain(|OpenConnection { sender, usage }| {
            let is_idle = usage.n_calls.load(Ordering::Relaxed) == 0;
            let is_expired = is_idle && locked(&usage.last_used).elapsed() > IDLE_TIMEOUT;
            !is_expired && !usage.is_retired.load(Ordering::Relaxed) && !sender.is_closed()
        });
    }

    /// Opens a connection on this socket, and takes a place on it. Waits for the server's limit for a moment, so that
    /// the calls after this one know how many may share the connection. Errors: it may carry no calls.
    pub(super) async fn add(&self, socket: Socket) -> Result<SharedConnection, Box<dyn Error + Send + Sync>> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .initial_max_send_streams(NO_LIMIT_YET)
            .initial_stream_window_size(CALL_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_INTERVAL);
        let (sender, driver) = builder.handshake(TokioIo::new(socket)).await?;
        let (max_calls, mut limit) = watch::channel(None);
        let usage = Arc::new(ConnectionUsage {
            n_calls: AtomicUsize::new(0),
            max_calls,
            last_used: Mutex::new(Instant::now()),
            is_retired: AtomicBool::new(false),
        });
        tokio::spawn(drive(driver, Arc::clone(&usage)));
        let limit = timeout(SETTINGS_WAIT, limit.wait_for(Option::is_some)).await.ok().and_then(Result::ok);
        if limit.is_some_and(|limit| *limit == Some(0)) {
            return Err(io::Error::other("the server allows no requests on its HTTP/2 connections").into());
        }
        let connection = OpenConnection { sender, usage };
        let place = connection.added_place();
        self.lock().push(connection);
        Ok(place)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<OpenConnection>> {
        locked(&self.open)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a connection until the server closes it, or until nobody can send on it any more.
async fn drive(mut driver: Http2Driver, usage: Arc<ConnectionUsage>) {
    let ended = loop {
        let driven = poll_fn(|cx| {
            let polled = Pin::new(&mut driver).poll(cx);
            // The server may change its limit.
            usage.note_limit(driver.current_max_send_streams());
            polled
        });
        // hyper wakes nobody when a limit comes.
        let pause = if usage.max_calls.borrow().is_some() { LIMIT_CHECK } else { FIRST_LIMIT_CHECK };
        if let Ok(ended) = timeout(pause, driven).await {
            break ended;
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a shared connection to an upstream broke");
    }
}

impl ConnectionUsage {
    /// Notes the limit that hyper reports.
    fn note_limit(&self, limit: usize) {
        let known = (limit != NO_LIMIT_YET).then_some(limit.min(MAX_CALLS));
        self.max_calls.send_if_modified(|max_calls| {
            let is_new = *max_calls != known;
            *max_calls = known;
            is_new
        });
    }
}

impl OpenConnection {
    fn place(&self) -> Option<SharedConnection> {
        // Places are given under the lock alone, so the number cannot grow meanwhile.
        if self.usage.n_calls.load(Ordering::Relaxed) >= self.usage.max_calls.borrow().unwrap_or(1) {
            return None;
        }
        Some(self.added_place())
    }

    fn added_place(&self) -> SharedConnection {
        self.usage.n_calls.fetch_add(1, Ordering::Relaxed);
        SharedConnection { sender: self.sender.clone(), usage: Arc::clone(&self.usage) }
    }
}

impl SharedConnection {
    /// Sends a request. Returns with the head of the reply.
    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, CallError> {
        self.sender.try_send_request(request).await.map_err(|failed| {
            let failed = CallError::http2(failed);
            // A server that refuses one request for lack of room still answers the others.
            if failed.fate == RequestFate::Unprocessed && !is_stream_refused(&failed.error) {
                self.usage.is_retired.store(true, Ordering::Relaxed);
            }
            failed
        })
    }
}

impl Drop for SharedConnection {
    fn drop(&mut self) {
        // Before the place is free: without calls, this time decides.
        *locked(&self.usage.last_used) = Instant::now();
        self.usage.n_calls.fetch_sub(1, Ordering::Relaxed);
    }
}
