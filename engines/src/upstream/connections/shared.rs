//! HTTP/2 connections, each of which several calls use at once.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::time::Instant;

use super::call::CallError;
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

/// The connections that are open.
#[derive(Debug, Default)]
pub(super) struct SharedConnections {
    open: Mutex<Vec<OpenConnection>>,
}

#[derive(Debug)]
struct OpenConnection {
    sender: SendRequest<Full<Bytes>>,
    /// The calls that use it.
    n_calls: Arc<AtomicUsize>,
    /// The calls that may use it.
    max_calls: Arc<AtomicUsize>,
    /// When its last call ended.
    last_used: Arc<Mutex<Instant>>,
}

/// A place for one call on a connection.
pub(super) struct SharedConnection {
    sender: SendRequest<Full<Bytes>>,
    n_calls: Arc<AtomicUsize>,
    last_used: Arc<Mutex<Instant>>,
}

impl SharedConnections {
    /// A place on a connection that has one.
    pub(super) fn take(&self) -> Option<SharedConnection> {
        let mut open = self.lock();
        open.retain(|connection| {
            let is_idle = connection.n_calls.load(Ordering::Relaxed) == 0;
            let is_expired = is_idle && locked(&connection.last_used).elapsed() > IDLE_TIMEOUT;
            !is_expired && !connection.sender.is_closed()
        });
        open.iter().find_map(OpenConnection::place)
    }

    /// Opens a connection on this socket, and takes a place on it.
    pub(super) async fn add(&self, socket: Socket) -> hyper::Result<SharedConnection> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(CALL_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_INTERVAL);
        let (sender, mut driver) = builder.handshake(TokioIo::new(socket)).await?;
        let max_calls = Arc::new(AtomicUsize::new(MAX_CALLS));
        let limit = Arc::clone(&max_calls);
        // Ends when the server closes the connection, or when nobody can send on it any more.
        tokio::spawn(async move {
            let driven = poll_fn(|cx| {
                let polled = Pin::new(&mut driver).poll(cx);
                // The server may change its limit.
                limit.store(driver.current_max_send_streams().min(MAX_CALLS), Ordering::Relaxed);
                polled
            });
            if let Err(error) = driven.await {
                tracing::debug!(%error, "a shared connection to an upstream broke");
            }
        });
        let last_used = Arc::new(Mutex::new(Instant::now()));
        let connection = OpenConnection { sender, n_calls: Arc::default(), max_calls, last_used };
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

impl OpenConnection {
    fn place(&self) -> Option<SharedConnection> {
        // Places are given under the lock alone, so the number cannot grow meanwhile.
        if self.n_calls.load(Ordering::Relaxed) >= self.max_calls.load(Ordering::Relaxed) {
            return None;
        }
        Some(self.added_place())
    }

    fn added_place(&self) -> SharedConnection {
        self.n_calls.fetch_add(1, Ordering::Relaxed);
        SharedConnection {
            sender: self.sender.clone(),
            n_calls: Arc::clone(&self.n_calls),
            last_used: Arc::clone(&self.last_used),
        }
    }
}

impl SharedConnection {
    /// Sends a request. Returns with the head of the reply.
    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, CallError> {
        self.sender.try_send_request(request).await.map_err(|failed| {
            let is_unanswered = failed.message().is_some();
            CallError { error: failed.into_error(), is_unanswered }
        })
    }
}

impl Drop for SharedConnection {
    fn drop(&mut self) {
        // Before the place is free: without calls, this time decides.
        *locked(&self.last_used) = Instant::now();
        self.n_calls.fetch_sub(1, Ordering::Relaxed);
    }
}
