//! The streams of a connection, and what a node may send for each of them.

use std::collections::HashMap;

use baton_schemas::EngineError;
use baton_schemas::embed::EmbedEvent;
use baton_schemas::node::NodeErrorReply;
use baton_schemas::sequence::{GeneratedToken, SequenceEvent};
use baton_schemas::streams::{
    FrameError, NewStream, NodeFrame, RawFrame, StreamWork, Vector, put_cancel, put_credit, put_start,
};
use bytes::BytesMut;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use super::super::calls::from_node;
use super::event::{CREDIT, Inbox, MAX_FREE_EVENTS};

/// Bytes of credits and cancels that a node may leave unread. It has read so little for a long time that it is lost.
const MAX_UNREAD_BYTES: usize = 4 << 20;

/// What is wrong with a node's frames. The connection ends.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NodeFault {
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("a frame of a stream that was never started")]
    UnknownStream,
    #[error("a frame of a stream that it has not accepted")]
    NotAccepted,
    #[error("a stream that it has accepted twice")]
    AcceptedTwice,
    #[error("more of a stream than there is credit for")]
    NoCredit,
    #[error("more events of a stream than there can be")]
    TooManyEvents,
    #[error("a frame that does not belong to the stream's work")]
    OtherWork,
    #[error("an unreadable event")]
    Unreadable,
}

/// A stream that has not ended.
struct OpenStream {
    inbox: Inbox,
    /// Hears once whether the node accepts the request.
    acceptance: Option<oneshot::Sender<Result<(), EngineError>>>,
    credit: u32,
    /// Events without credit that may still come.
    n_free: u32,
}

impl OpenStream {
    fn check_accepted(&self) -> Result<(), NodeFault> {
        if self.acceptance.is_none() { Ok(()) } else { Err(NodeFault::NotAccepted) }
    }

    fn take_credit(&mut self) -> Result<(), NodeFault> {
        self.check_accepted()?;
        self.credit = self.credit.checked_sub(1).ok_or(NodeFault::NoCredit)?;
        Ok(())
    }

    fn take_free(&mut self) -> Result<(), NodeFault> {
        self.check_accepted()?;
        self.n_free = self.n_free.checked_sub(1).ok_or(NodeFault::TooManyEvents)?;
        Ok(())
    }

    fn token(&mut self, token: GeneratedToken) -> Result<(), NodeFault> {
        self.take_credit()?;
        let Inbox::Sequence(sender) = &self.inbox else { return Err(NodeFault::OtherWork) };
        // It fails only if the reader has left: there is room for as much as there was credit.
        drop(sender.try_send(Ok(SequenceEvent::Token(token))));
        Ok(())
    }

    fn vector(&mut self, vector: Vector<'_>) -> Result<(), NodeFault> {
        self.take_credit()?;
        let Inbox::Embed(sender) = &self.inbox else { return Err(NodeFault::OtherWork) };
        drop(sender.try_send(Ok(EmbedEvent::Vector(vector.values().collect()))));
        Ok(())
    }

    /// Returns true if the stream has ended.
    fn event(&mut self, json: &[u8]) -> Result<bool, NodeFault> {
        if let Inbox::Loads(_) = self.inbox {
            self.take_credit()?;
        } else {
            self.take_free()?;
        }
        match &self.inbox {
            Inbox::Sequence(sender) => match read(json)? {
                SequenceEvent::Token(_) => Err(NodeFault::OtherWork),
                event => {
                    let is_last = matches!(event, SequenceEvent::Finished { .. });
                    drop(sender.try_send(Ok(event)));
                    Ok(is_last)
                }
            },
            Inbox::Embed(sender) => match read(json)? {
                EmbedEvent::Vector(_) => Err(NodeFault::OtherWork),
                event @ EmbedEvent::Finished { .. } => {
                    drop(sender.try_send(Ok(event)));
                    Ok(true)
                }
            },
            Inbox::Loads(sender) => {
                drop(sender.try_send(Ok(read(json)?)));
                Ok(false)
            }
        }
    }

    /// The stream ends with an error.
    fn fail(mut self, error: EngineError) {
        match self.acceptance.take() {
            Some(acceptance) => drop(acceptance.send(Err(error))),
            None => self.inbox.fail(error),
        }
    }
}

fn read<T: DeserializeOwned>(json: &[u8]) -> Result<T, NodeFault> {
    serde_json::from_slice(json).map_err(|_| NodeFault::Unreadable)
}

/// A stream that was just started.
pub(super) struct StartedStream {
    pub(super) stream: u32,
    /// Resolves once the node has accepted or refused the request.
    pub(super) acceptance: oneshot::Receiver<Result<(), EngineError>>,
}

/// All streams of a connection, and the bytes that wait for it.
#[derive(Default)]
pub(super) struct ConnectionState {
    open: HashMap<u32, OpenStream>,
    /// The number of the newest stream.
    newest: u32,
    /// Frames in the order in which they are sent.
    pub(super) outgoing: BytesMut,
    /// Why the connection has ended.
    end: Option<EngineError>,
}

impl ConnectionState {
    pub(super) fn is_open(&self) -> bool {
        self.end.is_none()
    }

    /// Adds a stream and its start, with the first piece of the body. Errors: the connection has ended.
    pub(super) fn start(
        &mut self,
        inbox: Inbox,
        work: StreamWork,
        traceparent: Option<&str>,
        body: &[u8],
    ) -> Result<StartedStream, EngineError> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        let stream = self.newest.checked_add(1).ok_or_else(|| EngineError::lost("the connection is used up"))?;
        self.newest = stream;
        put_start(&mut self.outgoing, stream, &NewStream { work, credit: CREDIT, traceparent, body });
        let (heard, acceptance) = oneshot::channel();
        let open = OpenStream { inbox, acceptance: Some(heard), credit: CREDIT, n_free: MAX_FREE_EVENTS };
        self.open.insert(stream, open);
        Ok(StartedStream { stream, acceptance })
    }

    /// Grants a stream more credit, if it has not ended.
    pub(super) fn grant(&mut self, stream: u32, credit: u32) {
        if let Some(open) = self.open.get_mut(&stream) {
            open.credit += credit;
            put_credit(&mut self.outgoing, stream, credit);
        }
    }

    /// Ends a stream that its reader has left.
    pub(super) fn cancel(&mut self, stream: u32) {
        if self.open.remove(&stream).is_some() {
            put_cancel(&mut self.outgoing, stream);
        }
    }

    /// Returns true if the node has read nothing for a long time.
    pub(super) fn is_unread(&self) -> bool {
        self.outgoing.len() > MAX_UNREAD_BYTES
    }

    /// Takes a frame of the node. Errors: it breaks the protocol.
    pub(super) fn receive(&mut self, frame: RawFrame<'_>) -> Result<(), NodeFault> {
        let stream = frame.stream;
        match NodeFrame::parse(frame)? {
            NodeFrame::Alive => {}
            NodeFrame::Step(tokens) => {
                for token in tokens {
                    let token = token?;
                    if let Some(open) = self.open_stream(token.stream)? {
                        open.token(token.token)?;
                    }
                }
            }
            NodeFrame::Accepted => {
                if let Some(open) = self.open_stream(stream)? {
                    let acceptance = open.acceptance.take().ok_or(NodeFault::AcceptedTwice)?;
                    // It fails if the caller has left.
                    drop(acceptance.send(Ok(())));
                }
            }
            NodeFrame::Vector(vector) => {
                if let Some(open) = self.open_stream(stream)? {
                    open.vector(vector)?;
                }
            }
            NodeFrame::Event(json) => {
                if let Some(open) = self.open_stream(stream)?
                    && open.event(json)?
                {
                    self.open.remove(&stream);
                }
            }
            NodeFrame::Error(json) => {
                let reply: NodeErrorReply = read(json)?;
                if self.open_stream(stream)?.is_some()
                    && let Some(open) = self.open.remove(&stream)
                {
                    open.fail(from_node(reply.error));
                }
            }
            NodeFrame::End => {
                if let Some(open) = self.open_stream(stream)? {
                    open.check_accepted()?;
                    self.open.remove(&stream);
                }
            }
        }
        Ok(())
    }

    /// The stream of a frame. `None` if it has ended: its cancel may have crossed the frame.
    fn open_stream(&mut self, stream: u32) -> Result<Option<&mut OpenStream>, NodeFault> {
        if stream == 0 || stream > self.newest {
            return Err(NodeFault::UnknownStream);
        }
        Ok(self.open.get_mut(&stream))
    }

    /// Ends the connection and all its streams.
    pub(super) fn end(&mut self, error: &EngineError) {
        if self.end.is_none() {
            self.end = Some(error.clone());
            self.open.drain().for_each(|(_, open)| open.fail(error.clone()));
        }
    }
}
