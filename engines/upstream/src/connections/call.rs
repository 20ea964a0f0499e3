//! A call, and its failure.

use std::error::Error;

use bytes::Bytes;
use h2::Reason;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use http_body_util::Full;
use hyper::client::conn::TrySendError;

/// The id of a request, for the server's log. Some servers use it as a key.
pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A call's request. Cheap to send twice.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) method: Method,
    /// The path with its query.
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Call {
    /// The same call under a new request id, for a server that may know the first one already.
    pub(super) fn with_new_id(&self) -> Call {
        let mut headers = self.headers.clone();
        let new = uuid::Uuid::new_v4().to_string();
        if let (Some(old), Ok(id)) = (headers.get_mut(X_REQUEST_ID), HeaderValue::try_from(&new)) {
            // The log must connect both ids.
            tracing::debug!(upstream_request_id = ?old, new, "the call goes out once more under a new request id");
            *old = id;
        }
        Call { headers, ..self.clone() }
    }
}

/// Why a call got no reply's head.
pub(super) struct CallError {
    pub(super) error: hyper::Error,
    pub(super) fate: RequestFate,
}

/// A request that hyper could not send.
pub(super) type SendFailure = TrySendError<Request<Full<Bytes>>>;

/// How far the server got with a request that has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestFate {
    /// Nothing: the request did not leave, or the server says so.
    Unprocessed,
    /// The server closed its HTTP/1.1 connection before it replied.
    Closed,
    Unknown,
}

impl CallError {
    /// A call that had an HTTP/1.1 connection to itself.
    pub(super) fn http1(failed: SendFailure) -> CallError {
        let was_given_back = failed.message().is_some();
        let error = failed.into_error();
        let fate = if was_given_back {
            RequestFate::Unprocessed
        } else if is_closed_by_server(&error) {
            RequestFate::Closed
        } else {
            RequestFate::Unknown
        };
        CallError { error, fate }
    }

    /// A call that shared an HTTP/2 connection. The server says which requests it did not process, and may have processed
    /// all others, even if it then closes the connection.
    pub(super) fn http2(failed: SendFailure) -> CallError {
        let was_given_back = failed.message().is_some();
        let error = failed.into_error();
        let is_unprocessed = was_given_back || is_shut_down(&error) || is_stream_refused(&error);
        CallError { error, fate: if is_unprocessed { RequestFate::Unprocessed } else { RequestFate::Unknown } }
    }
}

/// Returns true if the server shuts the connection down and names an earlier request as its last one (RFC 9113, section
/// 8.7).
fn is_shut_down(error: &hyper::Error) -> bool {
    remote_h2_error(error).is_some_and(|error| error.is_go_away() && error.reason() == Some(Reason::NO_ERROR))
}

/// Returns true if the server refuses this request's stream, and perhaps no other (RFC 9113, section 8.7).
pub(super) fn is_stream_refused(error: &hyper::Error) -> bool {
    remote_h2_error(error).is_some_and(|error| error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM))
}

fn remote_h2_error(error: &hyper::Error) -> Option<&h2::Error> {
    error.source()?.downcast_ref::<h2::Error>().filter(|error| error.is_remote())
}

/// Returns true if the server closed the connection before it sent a reply.
fn is_closed_by_server(error: &hyper::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected};
    let cause = error.source().and_then(|cause| cause.downcast_ref::<std::io::Error>());
    let is_reset = cause
        .is_some_and(|cause| matches!(cause.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected));
    is_reset || error.is_incomplete_message() || error.is_canceled() || error.is_closed()
}
