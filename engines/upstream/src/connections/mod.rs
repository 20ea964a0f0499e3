//! HTTP calls to one server, over connections that are kept.
//!
//! Whoever reads a reply polls its HTTP/1.1 connection (`local`): a piece of the reply then passes through no second
//! task. An idle connection is not polled; one that the server has closed is found when it is taken, and the call goes
//! out on another. Where TLS negotiates HTTP/2, calls share connections, which have tasks of their own (`shared`).

mod call;
mod idle;
mod local;
mod open;
mod reply;
mod shared;
mod signal;
mod unpack;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_link::remote::call_failure;
use baton_link::transport::Transport;
use bytes::Bytes;
use http::{HeaderValue, Request, Uri, header};
use http_body_util::Full;
use tokio::sync::Mutex;
use tokio::time::Instant;

pub(super) use self::call::{Call, X_REQUEST_ID};
use self::call::{CallError, RequestFate};
use self::idle::IdleConnections;
use self::local::LocalConnection;
use self::open::{HttpVersion, Opener};
pub(super) use self::reply::{BodyError, Reply, ReplyBody};
use self::shared::{SharedConnection, SharedConnections};
use self::unpack::UnknownPacking;
use crate::{UpstreamError, UpstreamFailure};

/// How long a request may be on its way to a server that closes the connection meanwhile.
const MAX_ON_ITS_WAY: Duration = Duration::from_secs(1);

/// How often a call is sent at most. A server that shuts down may refuse it on several connections.
const MAX_SENDS: usize = 3;

/// The most idle connections to one server, and so the most open files that they take.
const MAX_IDLE: usize = 1_024;

/// The connections to one server.
#[derive(Debug)]
pub(super) struct CallConnections {
    opener: Opener,
    host: HeaderValue,
    idle: Arc<IdleConnections>,
    shared: SharedConnections,
    /// Held while a connection is opened that other calls may share.
    opening: Mutex<()>,
    /// The server has negotiated HTTP/1.1, so its connections cannot be shared.
    is_unshared: AtomicBool,
}

/// A connection that a call may use.
enum Usable {
    Local(Box<LocalConnection>),
    Shared(SharedConnection),
}

impl CallConnections {
    /// Connections to the server at `url`, of which at most `n_calls` are in use at once. Errors, for the operator: the
    /// URL is not valid, or TLS cannot be set up.
    pub(super) fn new(
        url: &str,
        transport: &Transport,
        connect_deadline: Duration,
        n_calls: usize,
    ) -> Result<CallConnections, String> {
        let opener = Opener::new(url, transport, connect_deadline)?;
        let host = HeaderValue::try_from(opener.authority()).map_err(|_| "the URL has no valid host".to_owned())?;
        Ok(CallConnections {
            is_unshared: AtomicBool::new(!opener.is_https()),
            opener,
            host,
            idle: Arc::new(IdleConnections::new(n_calls.min(MAX_IDLE))),
            shared: SharedConnections::default(),
            opening: Mutex::new(()),
        })
    }

    /// Sends a call. Returns with the reply's head. Dropping the future cancels the call.
    pub(super) async fn send(&self, call: &Call) -> Result<Reply, UpstreamError> {
        let mut call = Cow::Borrowed(call);
        let mut kept = self.kept();
        let mut n_sent = 0;
        loop {
            let is_kept = kept.is_some();
            let connection = match kept.take() {
                Some(kept) => kept,
                // Every kept connection may be one that the server shuts down.
                None if n_sent + 1 == MAX_SENDS => self.in_time(self.open_now()).await?,
                None => self.open().await?,
            };
            let sent = Instant::now();
            let CallError { error, fate } = match self.send_on(connection, &call).await {
                Ok(reply) => return reply.map_err(UpstreamError::malformed),
                Err(failed) => failed,
            };
            n_sent += 1;
            match fate {
                RequestFate::Unprocessed if n_sent < MAX_SENDS => {
                    tracing::debug!(%error, "the server did not process a call; it goes out once more");
                }
                // The server closed the idle connection while the request was on its way. But it may have read the
                // request, so a server that uses the id as a key must not get it twice.
                RequestFate::Closed if is_kept && sent.elapsed() < MAX_ON_ITS_WAY => {
                    tracing::debug!(%error, "a kept connection was closed; the call goes out on a new one");
                    call = Cow::Owned(call.with_new_id());
                }
                _ => return Err(self.unreachable(&error)),
            }
        }
    }

    /// Closes the connections that were idle for too long. Calls do it, too.
    pub(super) fn close_unused(&self) {
        self.idle.close_expired();
        self.shared.close_unused();
    }

    /// A connection that is open and has room.
    fn kept(&self) -> Option<Usable> {
        let shared = || self.shared.take().map(Usable::Shared);
        self.idle.take().map(Usable::Local).or_else(shared)
    }

    /// Opens a connection, or takes a place on one that another call opens now.
    async fn open(&self) -> Result<Usable, UpstreamError> {
        let opened = async {
            let is_unshared = || self.is_unshared.load(Ordering::Relaxed);
            if is_unshared() {
                return self.open_now().await;
            }
            // Calls that come together share one connection, unless the first shows that they cannot.
            let turn = self.opening.lock().await;
            if let Some(shared) = self.shared.take() {
                return Ok(Usable::Shared(shared));
            }
            if is_unshared() {
                drop(turn);
            }
            self.open_now().await
        };
        self.in_time(opened).await
    }

    async fn in_time(
        &self,
        opened: impl Future<Output = Result<Usable, UpstreamError>>,
    ) -> Result<Usable, UpstreamError> {
        let late = || UpstreamError::failed(UpstreamFailure::Unreachable, "no connection in time");
        tokio::time::timeout(self.opener.deadline(), opened).await.map_err(|_| late())?
    }

    async fn open_now(&self) -> Result<Usable, UpstreamError> {
        let failed = |error: &(dyn std::error::Error + 'static)| {
            let detail = call_failure::describe_cause(error, Some(self.opener.url()), true);
            let failure = match call_failure::is_own_lack(error) {
                true => UpstreamFailure::NoResources,
                false => UpstreamFailure::Unreachable,
            };
            UpstreamError::failed(failure, detail)
        };
        let opened = self.opener.open().await.map_err(|error| failed(&*error))?;
        match opened.version {
            HttpVersion::Http1 => {
                self.is_unshared.store(true, Ordering::Relaxed);
                let connection = LocalConnection::open(opened.socket).await.map_err(|error| failed(&error))?;
                Ok(Usable::Local(Box::new(connection)))
            }
            HttpVersion::Http2 => {
                let connection = self.shared.add(opened.socket).await.map_err(|error| failed(&*error))?;
                Ok(Usable::Shared(connection))
            }
        }
    }

    async fn send_on(&self, connection: Usable, call: &Call) -> Result<Result<Reply, UnknownPacking>, CallError> {
        match connection {
            Usable::Local(mut connection) => {
                let response = connection.send(self.request(call, HttpVersion::Http1)).await?;
                Ok(Reply::local(response, connection, Arc::clone(&self.idle)))
            }
            Usable::Shared(mut connection) => {
                let response = connection.send(self.request(call, HttpVersion::Http2)).await?;
                Ok(Reply::shared(response, connection))
            }
        }
    }

    fn request(&self, call: &Call, version: HttpVersion) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(call.body.clone()));
        *request.method_mut() = call.method.clone();
        *request.headers_mut() = call.headers.clone();
        match version {
            HttpVersion::Http1 => {
                // The opener checked the address, and paths are our own.
                *request.uri_mut() = Uri::try_from(&call.path).unwrap_or_default();
                request.headers_mut().insert(header::HOST, self.host.clone());
            }
            HttpVersion::Http2 => {
                *request.uri_mut() = self.opener.absolute(&call.path);
                *request.version_mut() = http::Version::HTTP_2;
            }
        }
        request
    }

    fn unreachable(&self, error: &hyper::Error) -> UpstreamError {
        let detail = call_failure::describe_cause(error, Some(self.opener.url()), false);
        UpstreamError::failed(UpstreamFailure::Unreachable, detail)
    }
}

#[cfg(test)]
mod tests;
