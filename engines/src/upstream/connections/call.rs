//! A call, and its failure.

use bytes::Bytes;
use http::{HeaderMap, Method};

/// A call's request. Cheap to send twice.
pub(in crate::upstream) struct Call {
    pub(in crate::upstream) method: Method,
    /// The path with its query.
    pub(in crate::upstream) path: String,
    pub(in crate::upstream) headers: HeaderMap,
    pub(in crate::upstream) body: Bytes,
}

/// Why a call got no reply's head.
pub(super) struct CallError {
    pub(super) error: hyper::Error,
    /// The server had closed the connection, or the request did not leave: nothing of a reply has come.
    pub(super) is_unanswered: bool,
}
