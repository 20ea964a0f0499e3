//! Calls to a node: what they carry, and how far a node's replies are believed.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::node::{BASE_PATH, NodeErrorReply};
use baton_schemas::stream_versions::StreamVersions;
use http::header::CONTENT_TYPE;
use reqwest::{Client, Method, RequestBuilder, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tracing::Span;

use super::call_failure;
use crate::transport::{ShortBodyError, short_body};
use crate::{long_json, trace};

/// The deadline of a reply's head, and of a whole reply that is not a stream. Callers decide by the node's signs of
/// life how long to wait; this deadline only ends calls that would never end. It equals the default of `max_ms` in an
/// endpoint's deadlines.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);

/// Bytes of each text of a node's error. A template's or a grammar's complaint is shorter.
const MAX_ERROR_BYTES: usize = 2 << 10;

/// Largest JSON reply that is read into memory.
const MAX_REPLY_BYTES: usize = 64 << 20;

/// The longest silence of a connection for streams. The node sends a sign of life every second, so a longer silence means
/// that it is frozen or cut off.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline of calls for which the node computes nothing: its description, its load, measurements.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Calls with less text do not wait for room.
const SHORT_TEXT: usize = 64 << 10;

/// The KiB of text in calls to a node that are being written and sent. Each is copied, and written as JSON. A node whose
/// calls wait holds up no other node.
const MAX_LONG_KIB: usize = 8 << 10;

/// The parts that calls to a node have in common.
#[derive(Clone)]
pub(super) struct NodeCalls {
    pub(super) client: Client,
    pub(super) base: String,
    /// The node's URL or socket, for logs.
    pub(super) address: String,
    pub(super) key: String,
    /// The versions of the stream protocol that this endpoint speaks.
    pub(super) versions: StreamVersions,
    /// Permits for long texts, one for each KiB.
    pub(super) long: Arc<Semaphore>,
}

impl NodeCalls {
    pub(super) fn new(client: Client, base: String, address: String, key: String) -> NodeCalls {
        let long = Arc::new(Semaphore::new(MAX_LONG_KIB));
        NodeCalls { client, base, address, key, versions: StreamVersions::OURS, long }
    }

    /// Waits for room to copy and send about so many bytes. Keep it until the node has them. Errors: there was none in time.
    pub(super) async fn room(&self, n_bytes: usize) -> Result<Option<SemaphorePermit<'_>>, EngineError> {
        if n_bytes <= SHORT_TEXT {
            return Ok(None);
        }
        let n_kib = (n_bytes >> 10).min(MAX_LONG_KIB) as u32;
        let permit = timeout(ANSWER_TIMEOUT, self.long.acquire_many(n_kib)).await;
        permit.ok().and_then(Result::ok).map(Some).ok_or_else(timed_out)
    }

    pub(super) fn request(&self, method: Method, call: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{BASE_PATH}/{call}", self.base)).bearer_auth(&self.key);
        match trace::traceparent(&Span::current()) {
            Some(parent) => request.header(trace::TRACEPARENT, parent),
            None => request,
        }
    }

    pub(super) async fn get<T: DeserializeOwned + Send + 'static>(&self, call: &str) -> Result<T, EngineError> {
        read(self.request(Method::GET, call).timeout(CALL_TIMEOUT).send().await).await
    }

    pub(super) async fn post<T: DeserializeOwned + Send + 'static>(
        &self,
        call: &str,
        body: impl Serialize + Send + 'static,
        timeout: Duration,
    ) -> Result<T, EngineError> {
        let call = with_json(self.request(Method::POST, call), body).await?;
        read(call.timeout(timeout).send().await).await
    }
}

async fn with_json(call: RequestBuilder, body: impl Serialize + Send + 'static) -> Result<RequestBuilder, EngineError> {
    let body = long_json::written(body).await.map_err(EngineError::internal)?;
    Ok(call.header(CONTENT_TYPE, "application/json").body(body))
}

/// A successful response, or the node's error. The caller sets the deadline, since an error's body may be late.
pub(crate) async fn accepted(sent: reqwest::Result<Response>) -> Result<Response, EngineError> {
    let response = sent.map_err(unreachable)?;
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    let body = bounded_body(response).await?;
    match serde_json::from_slice::<NodeErrorReply>(&body) {
        Ok(reply) => Err(from_node(reply.error)),
        // A node gives a reason with every refusal.
        Err(_) => Err(EngineError::lost(format!("what answers there is not a Baton node (HTTP {})", status.as_u16()))),
    }
}

pub(super) async fn read<T: DeserializeOwned + Send + 'static>(
    sent: reqwest::Result<Response>,
) -> Result<T, EngineError> {
    let body = bounded_body(accepted(sent).await?).await?;
    let parsed = long_json::parsed(body, |body| serde_json::from_slice(body)).await.map_err(EngineError::internal)?;
    parsed.map_err(|e| {
        EngineError::lost(format!("what answers there is not a Baton node, or one of another version ({e})"))
    })
}

async fn bounded_body(response: Response) -> Result<Vec<u8>, EngineError> {
    short_body(response, MAX_REPLY_BYTES).await.map_err(|error| match error {
        ShortBodyError::TooLong(_) => EngineError::lost(error),
        ShortBodyError::Lost(error) => unreachable(error),
    })
}

/// A node's error as far as it is believed: in few words, and nothing that only an endpoint can know.
pub(super) fn from_node(error: EngineError) -> EngineError {
    match error {
        EngineError::Poison { .. } => EngineError::internal("the node claims that its engines died of this request"),
        EngineError::NoResources { .. } => EngineError::Unavailable { reason: "the node lacks resources".into() },
        error => error.shortened(MAX_ERROR_BYTES),
    }
}

pub(crate) fn unreachable(error: reqwest::Error) -> EngineError {
    // A slow node is not lost: retrying would only add to its work.
    if error.is_timeout() && !error.is_connect() {
        timed_out()
    } else if call_failure::is_own_lack(&error) {
        EngineError::NoResources { detail: call_failure::describe(&error) }
    } else {
        EngineError::lost(call_failure::describe(&error))
    }
}

pub(super) fn timed_out() -> EngineError {
    EngineError::Unavailable { reason: "the engine did not answer in time".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nodes_error_is_believed_within_bounds() {
        let long = "ü".repeat(600 << 10);
        let EngineError::InvalidRequest { message, field } = from_node(EngineError::invalid_field(&long, &long)) else {
            panic!("the kind stays");
        };
        assert!(message.len() <= MAX_ERROR_BYTES + 3 && field.is_some_and(|field| field.len() <= MAX_ERROR_BYTES + 3));
        assert!(matches!(from_node(EngineError::Poison { n_processes: u32::MAX }), EngineError::Internal { .. }));
        let lacking = EngineError::NoResources { detail: long };
        assert!(matches!(from_node(lacking), EngineError::Unavailable { .. }), "it speaks of itself");
        let usual = EngineError::invalid_field("n", "must be at most 4");
        assert_eq!(from_node(usual.clone()), usual);
    }
}
