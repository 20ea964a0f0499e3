//! The streams of a connection, and what a node may send for each of them.

use std::collections::{HashMap, HashSet};

use baton_schemas::draft::DraftedTokens;
use baton_schemas::embed::EmbedEvent;
use baton_schemas::node::NodeErrorReply;
use baton_schemas::sequence::{GeneratedToken, SequenceEvent};
use baton_schemas::streams::{
    NewStream, NodeFrame, RawFrame, StreamFrameError, StreamWork, Vector, put_body, put_cancel, put_credit, put_start,
    put_told,
};
use baton_schemas::{EngineError, Token};
use bytes::BytesMut;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use super::super::calls::from_node;
use super::event::{EventSender, Inbox, MAX_FREE_EVENTS, StreamEvent};

/// Bytes of credits and cancels that a node may leave unread. It has read so little for a long time that it is lost.
const MAX_UNREAD_BYTES: usize = 4 << 20;

/// Numbers of streams after which a new connection is opened. The rest is for the streams that start meanwhile.
const MANY_STREAMS: u32 = u32::MAX - (1 << 20);

/// A fault in a node's frames, which ends the connection.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NodeFault {
    #[error("it sent {0}")]
    Frame(#[from] StreamFrameError),
    #[error("it sent a frame of a stream that was never started")]
    UnknownStream,
    #[error("it sent a frame of a stream that it has not accepted")]
    NotAccepted,
    #[error("it accepted one stream twice")]
    AcceptedTwice,
    #[error("it sent more of a stream than it has credit for")]
    NoCredit,
    #[error("it sent a frame that does not belong to the stream's work")]
    OtherWork,
}

/// The effect of an event on its stream.
enum EventMeaning {
    GoesOn,
    IsLast,
    /// This endpoint does not know it, or knows no further one, because the node is newer or at fault.
    IsUnknown,
}

/// A stream that has not ended.
struct OpenStream {
    inbox: Inbox,
    /// Hears once whether the node accepts the request.
    acceptance: Option<oneshot::Sender<Result<(), EngineError>>>,
    credit: u32,
    /// Events without credit that may still come.
    n_free: u32,
    /// The batch of frames that the last piece of its body so far is in.
    batch: u64,
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

    /// Takes candidates. They end the stream if no draft node sends them.
    fn drafted(&self, drafted: &DraftedTokens) -> Result<EventMeaning, NodeFault> {
        self.check_accepted()?;
        let Inbox::Drafts(board) = &self.inbox else { return Err(NodeFault::OtherWork) };
        Ok(if board.receive(drafted).is_ok() { EventMeaning::GoesOn } else { EventMeaning::IsUnknown })
    }

    fn event(&mut self, json: &[u8]) -> Result<EventMeaning, NodeFault> {
        if let Inbox::Loads(_) = self.inbox {
            self.take_credit()?;
        } else {
            self.check_accepted()?;
            let Some(n_free) = self.n_free.checked_sub(1) else { return Ok(EventMeaning::IsUnknown) };
            self.n_free = n_free;
        }
        match &self.inbox {
            Inbox::Sequence(sender) => Ok(pass(json, sender)),
            Inbox::Embed(sender) => Ok(pass(json, sender)),
            Inbox::Drafts(_) => Ok(EventMeaning::IsUnknown),
            Inbox::Loads(sender) => {
                let Some(load) = read(json) else { return Ok(EventMeaning::IsUnknown) };
                drop(sender.try_send(Ok(load)));
                Ok(EventMeaning::GoesOn)
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

/// Gives an event that takes no credit to the reader.
fn pass<D: StreamEvent + DeserializeOwned>(json: &[u8], sender: &EventSender<D>) -> EventMeaning {
    let Some(event) = read::<D>(json) else { return EventMeaning::IsUnknown };
    let meaning = if event.is_last() { EventMeaning::IsLast } else { EventMeaning::GoesOn };
    drop(sender.try_send(Ok(event)));
    meaning
}

fn read<T: DeserializeOwned>(json: &[u8]) -> Option<T> {
    serde_json::from_slice(json).ok()
}

fn unreadable(what: &str) -> EngineError {
    EngineError::lost(format!("the node sent {what} that this endpoint cannot read; it may be of a newer version"))
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
    /// Streams whose bodies are not whole. The node keeps a place for each, even if it has refused the stream.
    partial: HashSet<u32>,
    /// Starts and pieces of bodies, and the credits and cancels that must not overtake them.
    outgoing: BytesMut,
    /// Credits and cancels that are sent first.
    urgent: BytesMut,
    /// The number of the batch that waits in `outgoing`.
    batch: u64,
    /// Why the connection has ended.
    end: Option<EngineError>,
}

impl ConnectionState {
    pub(super) fn is_open(&self) -> bool {
        self.end.is_none()
    }

    /// Returns true if it is open and has numbers left for streams.
    pub(super) fn takes_streams(&self) -> bool {
        self.is_open() && self.newest < MANY_STREAMS
    }

    /// The bytes of starts and bodies that wait.
    pub(super) fn n_outgoing(&self) -> usize {
        self.outgoing.len()
    }

    /// Returns true if frames wait that are sent first.
    pub(super) fn has_urgent(&self) -> bool {
        !self.urgent.is_empty()
    }

    /// Moves all frames that wait into this empty buffer.
    pub(super) fn take(&mut self, bytes: &mut BytesMut) {
        std::mem::swap(&mut self.urgent, bytes);
        if bytes.is_empty() {
            std::mem::swap(&mut self.outgoing, bytes);
        } else {
            bytes.extend_from_slice(&self.outgoing);
            self.outgoing.clear();
        }
        self.batch += 1;
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
        let credit = inbox.credit();
        if !put_start(&mut self.outgoing, stream, &NewStream { work, credit, traceparent, body }).is_empty() {
            self.partial.insert(stream);
        }
        let (heard, acceptance) = oneshot::channel();
        let batch = self.batch;
        let open = OpenStream { inbox, acceptance: Some(heard), credit, n_free: MAX_FREE_EVENTS, batch };
        self.open.insert(stream, open);
        Ok(StartedStream { stream, acceptance })
    }

    /// Adds the next piece of a body. Returns the rest; nothing, too, if the stream has ended.
    pub(super) fn add_piece<'a>(&mut self, stream: u32, body: &'a [u8]) -> &'a [u8] {
        let Some(open) = self.open.get_mut(&stream) else { return &[] };
        open.batch = self.batch;
        let rest = put_body(&mut self.outgoing, stream, body);
        if rest.is_empty() {
            self.partial.remove(&stream);
        }
        rest
    }

    /// Grants a stream more credit, if it has not ended.
    pub(super) fn grant(&mut self, stream: u32, credit: u32) {
        if let Some(open) = self.open.get_mut(&stream) {
            open.credit += credit;
            let is_sent = open.batch < self.batch;
            put_credit(if is_sent { &mut self.urgent } else { &mut self.outgoing }, stream, credit);
        }
    }

    /// Tells a stream of drafts the next tokens of its sequence, if it has not ended.
    pub(super) fn tell(&mut self, stream: u32, at: u32, tokens: &[Token]) {
        let Some(open) = self.open.get(&stream) else { return };
        let out = if open.batch < self.batch { &mut self.urgent } else { &mut self.outgoing };
        let (mut at, mut left) = (at, tokens);
        while !left.is_empty() {
            let rest = put_told(out, stream, at, left);
            at += (left.len() - rest.len()) as u32;
            left = rest;
        }
    }

    /// Ends a stream that its reader has left. A stream that has ended is cancelled, too, if its body is not whole.
    pub(super) fn cancel(&mut self, stream: u32) {
        let open = self.open.remove(&stream);
        let is_partial = self.partial.remove(&stream);
        match open {
            Some(open) if open.batch < self.batch => put_cancel(&mut self.urgent, stream),
            Some(_) => put_cancel(&mut self.outgoing, stream),
            None if is_partial => put_cancel(&mut self.outgoing, stream),
            None => {}
        }
    }

    /// The stream ends with an error.
    fn fail(&mut self, stream: u32, error: EngineError) {
        if let Some(open) = self.open.remove(&stream) {
            open.fail(error);
        }
    }

    /// Returns true if the node has read nothing for a long time.
    pub(super) fn is_unread(&self) -> bool {
        self.outgoing.len() + self.urgent.len() > MAX_UNREAD_BYTES
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
                let Some(open) = self.open_stream(stream)? else { return Ok(()) };
                let meaning = open.event(json)?;
                self.go_on(stream, meaning, "an event");
            }
            NodeFrame::Drafted(drafted) => {
                let Some(open) = self.open_stream(stream)? else { return Ok(()) };
                let meaning = open.drafted(&drafted)?;
                self.go_on(stream, meaning, "candidates");
            }
            NodeFrame::Error(json) => {
                self.open_stream(stream)?;
                let error = read::<NodeErrorReply>(json).map(|reply| from_node(reply.error));
                self.fail(stream, error.unwrap_or_else(|| unreadable("an error")));
            }
            NodeFrame::End => {
                if let Some(open) = self.open_stream(stream)? {
                    open.check_accepted()?;
                    open.inbox.end();
                    self.open.remove(&stream);
                }
            }
        }
        Ok(())
    }

    /// The consequence of an event of a stream.
    fn go_on(&mut self, stream: u32, meaning: EventMeaning, what: &str) {
        match meaning {
            EventMeaning::GoesOn => {}
            EventMeaning::IsLast => drop(self.open.remove(&stream)),
            EventMeaning::IsUnknown => {
                put_cancel(&mut self.urgent, stream);
                self.fail(stream, unreadable(what));
            }
        }
    }

    /// The stream of a frame. `None` if it has ended: its cancel may have crossed the frame.
    fn open_stream(&mut self, stream: u32) -> Result<Option<&mut OpenStream>, NodeFault> {
        if stream == 0 || stream > self.newest {
            return Err(NodeFault::UnknownStream);
        }
        Ok(self.open.get_mut(&stream))
    }

    /// Ends the connection and all its streams, if it is open. Returns how many streams with somebody's work are lost: the
    /// stream of loads ends with each connection.
    pub(super) fn end(&mut self, error: &EngineError) -> usize {
        if self.end.is_some() {
            return 0;
        }
        self.end = Some(error.clone());
        let n_lost = self.open.values().filter(|open| open.inbox.is_work()).count();
        self.open.drain().for_each(|(_, open)| open.fail(error.clone()));
        n_lost
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::streams::{FrameBuffer, FrameKind, MAX_CLIENT_PAYLOAD};
    use tokio::sync::mpsc;

    use super::*;

    fn start(state: &mut ConnectionState, body: &[u8]) -> u32 {
        let (sender, _) = mpsc::channel(1);
        state.start(Inbox::Sequence(sender), StreamWork::Generate, None, body).unwrap().stream
    }

    fn sent(state: &mut ConnectionState) -> Vec<(u32, FrameKind)> {
        let mut frames = FrameBuffer::new(MAX_CLIENT_PAYLOAD);
        let mut bytes = BytesMut::new();
        state.take(&mut bytes);
        frames.space().extend_from_slice(&bytes);
        std::iter::from_fn(|| frames.next_frame().unwrap().map(|frame| (frame.stream, frame.kind))).collect()
    }

    #[test]
    fn credits_and_cancels_overtake_bodies_but_not_their_own() {
        use FrameKind::{Body, Cancel, Credit, Start};
        let long = vec![b' '; 150_000];
        let mut state = ConnectionState::default();
        start(&mut state, b"{}");
        start(&mut state, b"{}");
        assert_eq!(sent(&mut state), [(1, Start), (2, Start)]);
        start(&mut state, &long);
        state.add_piece(3, &long[65_536..]);
        state.grant(1, 1);
        state.cancel(2);
        start(&mut state, b"{}");
        state.cancel(3);
        state.grant(4, 1);
        let expected = [(1, Credit), (2, Cancel), (3, Start), (3, Body), (4, Start), (3, Cancel), (4, Credit)];
        assert_eq!(sent(&mut state), expected);
        assert_eq!(sent(&mut state), []);
    }

    #[test]
    fn a_connection_that_runs_out_of_numbers_takes_no_streams() {
        let mut state = ConnectionState { newest: MANY_STREAMS - 1, ..ConnectionState::default() };
        assert!(state.takes_streams());
        assert_eq!(start(&mut state, b"{}"), MANY_STREAMS);
        assert!(!state.takes_streams() && state.is_open());
    }
}
