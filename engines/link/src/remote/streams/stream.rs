//! One stream of a connection, as its reader has it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use baton_schemas::streams::StreamWork;
use baton_schemas::{EngineError, Token};
use futures::Stream;
use tokio::sync::mpsc;

use super::super::calls::{ANSWER_TIMEOUT, timed_out};
use super::connection::NodeConnection;
use super::event::{Inbox, MAX_FREE_EVENTS, StreamEvent};
use super::state::StartedStream;
use crate::drafts::DraftBoard;

/// A stream that the node has accepted. Dropping it cancels the stream, if it has not ended.
struct AcceptedStream {
    stream: u32,
    connection: Arc<NodeConnection>,
}

impl AcceptedStream {
    /// Starts a stream. Returns once the node has accepted it. Dropping the future cancels the stream. Errors: the node's
    /// refusal, or that the connection ends.
    async fn start(
        connection: Arc<NodeConnection>,
        inbox: Inbox,
        work: StreamWork,
        body: Vec<u8>,
    ) -> Result<AcceptedStream, EngineError> {
        let turn = connection.body_turn(body.len()).await;
        let StartedStream { stream, acceptance } = connection.start(inbox, work, &body).await?;
        let started = AcceptedStream { stream, connection: Arc::clone(&connection) };
        connection.send_rest(stream, &body).await;
        drop(turn);
        let accepted = tokio::time::timeout(ANSWER_TIMEOUT, acceptance).await.map_err(|_| timed_out())?;
        accepted.unwrap_or_else(|_| Err(EngineError::lost("the connection was dropped")))?;
        Ok(started)
    }
}

impl Drop for AcceptedStream {
    fn drop(&mut self) {
        self.connection.cancel(self.stream);
    }
}

/// The drafts of a sequence, whose candidates go to their board. Dropping it ends them.
pub(crate) struct RemoteDraftStream(AcceptedStream);

impl RemoteDraftStream {
    /// Starts to draft. Errors: the node's refusal, or that the connection ends.
    pub(super) async fn start(
        connection: Arc<NodeConnection>,
        board: Arc<DraftBoard>,
        body: Vec<u8>,
    ) -> Result<RemoteDraftStream, EngineError> {
        let started = AcceptedStream::start(connection, Inbox::Drafts(board), StreamWork::Draft, body);
        started.await.map(RemoteDraftStream)
    }

    /// The sequence has these tokens, the first one at position `at`.
    pub(crate) fn tell(&self, at: u32, tokens: &[Token]) {
        self.0.connection.tell(self.0.stream, at, tokens);
    }
}

/// A stream's events. Dropping it cancels the stream.
pub(crate) struct RemoteStream<D> {
    accepted: AcceptedStream,
    events: mpsc::Receiver<Result<D, EngineError>>,
    /// Credit that has been used up and not granted again.
    n_used: u32,
    has_ended: bool,
}

impl<D: StreamEvent> RemoteStream<D> {
    /// Starts a stream; see [`AcceptedStream::start`].
    pub(super) async fn start(
        connection: Arc<NodeConnection>,
        work: StreamWork,
        body: Vec<u8>,
    ) -> Result<RemoteStream<D>, EngineError> {
        // Room for all that the node may send.
        let (sender, events) = mpsc::channel((D::CREDIT + MAX_FREE_EVENTS + 1) as usize);
        let accepted = AcceptedStream::start(connection, D::inbox(sender), work, body).await?;
        Ok(RemoteStream { accepted, events, n_used: 0, has_ended: false })
    }
}

impl<D: StreamEvent> Stream for RemoteStream<D> {
    type Item = Result<D, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let event = ready!(self.events.poll_recv(context));
        match &event {
            Some(Ok(event)) if event.takes_credit() => self.use_credit(),
            Some(Ok(event)) => self.has_ended = event.is_last(),
            Some(Err(_)) => self.has_ended = true,
            None => {
                self.has_ended = true;
                if !D::MAY_END {
                    return Poll::Ready(Some(Err(EngineError::lost("the stream ended early"))));
                }
            }
        }
        Poll::Ready(event)
    }
}

impl<D: StreamEvent> RemoteStream<D> {
    /// Credit that has been used up is granted again in portions, because each takes a frame.
    fn use_credit(&mut self) {
        let portion = D::CREDIT / 2;
        self.n_used += 1;
        if self.n_used == portion {
            self.n_used = 0;
            self.accepted.connection.grant(self.accepted.stream, portion);
        }
    }
}
