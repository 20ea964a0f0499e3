//! The connection to a node that carries all streams (docs/node-streams.md): opened by the first call that needs it, and
//! opened again by the next call after it was lost.

mod connection;
mod event;
mod open;
mod state;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use baton_schemas::EngineError;
use baton_schemas::streams::{MAX_BODY_BYTES, StreamWork};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};

use self::connection::NodeConnection;
pub(super) use self::event::StreamEvent;
use self::open::open;
pub(crate) use self::stream::RemoteDraftStream;
use self::stream::RemoteStream;
use super::calls::NodeCalls;
use crate::drafts::DraftBoard;

type Opening = Shared<BoxFuture<'static, Result<Arc<NodeConnection>, EngineError>>>;

/// The streams of a node.
#[derive(Default)]
pub(super) struct NodeStreams {
    /// The last attempt to connect. All calls share it, so a node that does not answer is tried by one of them.
    opening: Mutex<Option<Opening>>,
}

impl NodeStreams {
    /// Starts a stream. Returns once the node has accepted it. Dropping the future or the stream cancels it. Errors: the
    /// node's refusal, or that it cannot be reached.
    pub(super) async fn start<D: StreamEvent>(
        &self,
        calls: &Arc<NodeCalls>,
        work: StreamWork,
        body: Vec<u8>,
    ) -> Result<RemoteStream<D>, EngineError> {
        check_length(&body)?;
        RemoteStream::start(self.connection(calls).await?, work, body).await
    }

    /// Starts to draft. Like [`NodeStreams::start`].
    pub(super) async fn draft(
        &self,
        calls: &Arc<NodeCalls>,
        board: Arc<DraftBoard>,
        body: Vec<u8>,
    ) -> Result<RemoteDraftStream, EngineError> {
        check_length(&body)?;
        RemoteDraftStream::start(self.connection(calls).await?, board, body).await
    }

    async fn connection(&self, calls: &Arc<NodeCalls>) -> Result<Arc<NodeConnection>, EngineError> {
        let opening = {
            let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
            let current = opening.as_ref().filter(|opening| match opening.peek() {
                None => true,
                Some(opened) => opened.as_ref().is_ok_and(|connection| connection.takes_streams()),
            });
            match current {
                Some(current) => current.clone(),
                None => {
                    // A task, so that it goes on if the caller is dropped.
                    let opened = tokio::spawn(open(Arc::clone(calls)));
                    let opened = async { opened.await.unwrap_or_else(|error| Err(EngineError::lost(error))) };
                    opening.insert(opened.boxed().shared()).clone()
                }
            }
        };
        opening.await
    }
}

/// Errors: a body is longer than one may be.
fn check_length(body: &[u8]) -> Result<(), EngineError> {
    match body.len() {
        ..=MAX_BODY_BYTES => Ok(()),
        _ => Err(EngineError::invalid(format!("the request has more than {MAX_BODY_BYTES} bytes"))),
    }
}
