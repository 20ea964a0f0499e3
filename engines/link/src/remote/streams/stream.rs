//! One stream of a connection, as its reader has it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use baton_schemas::EngineError;
use baton_schemas::streams::StreamWork;
use futures::Stream;
use tokio::sync::mpsc;

use super::super::calls::{ANSWER_TIMEOUT, timed_out};
use super::connection::NodeConnection;
use super::event::{MAX_FREE_EVENTS, StreamEvent};
use super::state::StartedStream;

/// A stream's events. Dropping it cancels the stream.
pub(crate) struct RemoteStream<D> {
    stream: u32,
    connection: Arc<NodeConnection>,
    events: mpsc::Receiver<Result<D, EngineError>>,
    /// Credit that has been used up and not granted again.
    n_used: u32,
    has_ended: bool,
}

impl<D: StreamEvent> RemoteStream<D> {
    /// Starts a stream. Returns once the node has accepted it. Dropping the future cancels the stream. Errors: the node's
    /// refusal, or that the connection ends.
    pub(super) async fn start(
        connection: Arc<NodeConnection>,
        work: StreamWork,
        body: Vec<u8>,
    ) -> Result<RemoteStream<D>, EngineError> {
        let turn = connection.body_turn(body.len()).await;
        // Room for all that the node may send.
        let (sender, events) = mpsc::channel((D::CREDIT + MAX_FREE_EVENTS + 1) as usize);
        let StartedStream { stream, acceptance } = connection.start(D::inbox(sender), work, &body).await?;
        let events = RemoteStream { stream, connection: Arc::clone(&connection), events, n_used: 0, has_ended: false };
        connection.send_rest(stream, &body).await;
        drop(turn);
        let accepted = tokio::time::timeout(ANSWER_TIMEOUT, acceptance).await.map_err(|_| timed_out())?;
        accepted.unwrap_or_else(|_| Err(EngineError::lost("the connection was dropped")))?;
        Ok(events)
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
            self.connection.grant(self.stream, portion);
        }
    }
}

impl<D> Drop for RemoteStream<D> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.connection.cancel(self.stream);
        }
    }
}
