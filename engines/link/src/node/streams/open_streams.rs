//! The streams of an endpoint's connection: starts them when their bodies are whole, and cancels them.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::streams::{ClientFrame, MAX_PARTIAL_BODIES, RawFrame, StartFrame, StreamFrameError, StreamWork};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument, Span};

use super::super::connection::DEADLINES;
use super::super::drafting::TOLD_WINDOW;
use super::super::traced::stream_span;
use super::super::{NodeService, loads};
use super::limits::MAX_STREAMS;
use super::run::{Outbox, RunPhase, StreamControl, StreamRun};
use super::work::{RequestBody, begin};

/// Refusals are added to the bytes that wait for the socket only up to this length. Streams leave less.
const MAX_UNSENT_WITH_REFUSALS: usize = 2 << 20;

/// A fault in an endpoint's frames, which ends the connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum EndpointFault {
    /// Bytes that do not keep to the protocol.
    #[error("the endpoint sent {0}")]
    Frame(#[from] StreamFrameError),
    /// Frames that make no sense in their order.
    #[error("the endpoint broke the protocol of streams: {0}")]
    Order(&'static str),
}

/// The streams of a connection.
pub(super) struct OpenStreams {
    node: NodeService,
    /// The frames that wait for the socket.
    pub(super) outbox: Outbox,
    running: FuturesUnordered<StreamRun>,
    open: HashMap<u32, Arc<StreamControl>>,
    /// Streams whose body is not complete.
    partial: HashMap<u32, PartialBody>,
    /// The highest number of a stream so far.
    newest: u32,
    refuses_new: bool,
}

/// A stream whose body is not complete.
struct PartialBody {
    n_left: usize,
    /// How long no piece has come.
    silent: Duration,
    /// `None`: it was refused, so the rest of its body is dropped.
    opened: Option<OpenedStream>,
}

/// A stream that was not refused.
struct OpenedStream {
    body: RequestBody,
    place: Option<OwnedSemaphorePermit>,
    work: StreamWork,
    span: Span,
    control: Arc<StreamControl>,
}

impl OpenStreams {
    pub(super) fn new(node: NodeService) -> OpenStreams {
        OpenStreams {
            node,
            outbox: Outbox::default(),
            running: FuturesUnordered::new(),
            open: HashMap::new(),
            partial: HashMap::new(),
            newest: 0,
            refuses_new: false,
        }
    }

    /// Returns true if there are no streams and no bytes of any, and none may come.
    pub(super) fn is_drained(&self) -> bool {
        self.refuses_new && self.open.is_empty() && self.outbox.lock().is_empty()
    }

    /// The number of streams that have not ended.
    pub(super) fn n_open(&self) -> usize {
        self.open.len()
    }

    /// The number of streams whose engine was asked.
    pub(super) fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Returns true if new streams are refused.
    pub(super) fn refuses_new(&self) -> bool {
        self.refuses_new
    }

    /// From now on, new streams are refused. Those of drafts end: a reply never needs them.
    pub(super) fn refuse_new(&mut self) {
        self.refuses_new = true;
        self.open.values().for_each(|control| control.end_telling());
    }

    /// Polls the streams that were woken.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Some(ended)) = self.running.poll_next_unpin(context) {
            self.open.remove(&ended);
        }
    }

    /// Wakes the streams that waited until fewer bytes wait for the socket.
    pub(super) fn wake_if_room(&self) {
        if self.outbox.has_room_again() {
            self.open.values().for_each(|control| control.wake());
        }
    }

    /// Takes a frame of the endpoint. Errors: it breaks the protocol, so the connection has to end.
    pub(super) fn receive(&mut self, frame: RawFrame<'_>) -> Result<(), EndpointFault> {
        let stream = frame.stream;
        match ClientFrame::parse(frame)? {
            ClientFrame::Start(start) => self.start(stream, &start),
            ClientFrame::Body(piece) => self.add(stream, piece),
            // Frames for a stream that has ended may have crossed its last frame.
            _ if stream > self.newest => Err(EndpointFault::Order("a frame for a stream that was never started")),
            ClientFrame::Credit(credit) => match self.open.get(&stream) {
                Some(control) if !control.grant(credit) => {
                    Err(EndpointFault::Order("more credit than a stream may have"))
                }
                _ => Ok(()),
            },
            ClientFrame::Told(tokens) => match self.open.get(&stream) {
                Some(control) if !control.tell(tokens) => {
                    Err(EndpointFault::Order("tokens for a stream that drafts nothing"))
                }
                _ => Ok(()),
            },
            ClientFrame::Cancel => {
                if self.partial.remove(&stream).is_some() {
                    self.open.remove(&stream);
                }
                self.open.get(&stream).into_iter().for_each(|control| control.cancel());
                Ok(())
            }
        }
    }

    fn start(&mut self, stream: u32, start: &StartFrame<'_>) -> Result<(), EndpointFault> {
        if stream <= self.newest {
            return Err(EndpointFault::Order("a stream's number does not follow the one before"));
        }
        self.newest = stream;
        let n_left = start.body_bytes - start.piece.len();
        if n_left > 0 && self.partial.len() >= MAX_PARTIAL_BODIES {
            return Err(EndpointFault::Order("too many bodies at once"));
        }
        let opened = match self.open(stream, start) {
            Ok(opened) => Some(opened),
            Err(reason) => {
                let mut out = self.outbox.lock();
                if out.len() >= MAX_UNSENT_WITH_REFUSALS {
                    return Err(EndpointFault::Order("streams are started while their refusals are not read"));
                }
                out.error(stream, EngineError::Unavailable { reason: reason.into() });
                None
            }
        };
        self.advance(stream, PartialBody { n_left, silent: Duration::ZERO, opened });
        Ok(())
    }

    /// Opens a stream and charges what it holds. Errors: the reason to refuse it.
    fn open(&mut self, stream: u32, start: &StartFrame<'_>) -> Result<OpenedStream, &'static str> {
        const TOO_MANY: &str = "the node has too many streams";
        if self.refuses_new {
            return Err("the node is stopping");
        }
        if self.open.len() >= MAX_STREAMS + loads::MAX_STREAMS {
            return Err(TOO_MANY);
        }
        let limits = &self.node.stream_limits;
        let place = match start.work {
            // These have a limit of their own.
            StreamWork::Loads => None,
            StreamWork::Generate | StreamWork::Embed => Some(limits.stream().ok_or(TOO_MANY)?),
            StreamWork::Draft => Some(limits.draft().ok_or(TOO_MANY)?),
        };
        let charge = if start.piece.len() < start.body_bytes {
            Some(limits.body(start.body_bytes).ok_or("the node receives too many long requests")?)
        } else {
            None
        };
        let (tell, told) = match start.work {
            StreamWork::Draft => Some(mpsc::channel(TOLD_WINDOW)).unzip(),
            StreamWork::Generate | StreamWork::Embed | StreamWork::Loads => (None, None),
        };
        let control = StreamControl::new(start, tell);
        self.open.insert(stream, Arc::clone(&control));
        Ok(OpenedStream {
            body: RequestBody { bytes: start.piece.to_vec(), charge, told },
            place,
            work: start.work,
            span: stream_span(start.work, start.traceparent),
            control,
        })
    }

    /// Ends streams whose body does not come. Their numbers stay, in case the rest comes late.
    pub(super) fn age_bodies(&mut self, passed: Duration) {
        for (stream, partial) in &mut self.partial {
            partial.silent += passed;
            if partial.silent >= DEADLINES.read && partial.opened.take().is_some() {
                self.open.remove(stream);
                tracing::info!("a stream is ended: the rest of its request did not come before the deadline");
                let error = EngineError::lost("the rest of the request did not come in time");
                self.outbox.lock().error(*stream, error);
            }
        }
    }

    fn add(&mut self, stream: u32, piece: &[u8]) -> Result<(), EndpointFault> {
        let Some(mut partial) = self.partial.remove(&stream) else {
            return Err(EndpointFault::Order("a piece of a body that is complete or was never begun"));
        };
        let n_left = partial.n_left.checked_sub(piece.len());
        partial.n_left = n_left.ok_or(EndpointFault::Order("a body that is longer than it said"))?;
        partial.silent = Duration::ZERO;
        if let Some(opened) = &mut partial.opened {
            opened.body.bytes.extend_from_slice(piece);
        }
        self.advance(stream, partial);
        Ok(())
    }

    /// Runs a stream once its body is complete.
    fn advance(&mut self, stream: u32, partial: PartialBody) {
        match partial {
            PartialBody { n_left: 0, opened: Some(opened), .. } => self.run(stream, opened),
            PartialBody { n_left: 0, opened: None, .. } => {}
            partial => drop(self.partial.insert(stream, partial)),
        }
    }

    fn run(&mut self, stream: u32, opened: OpenedStream) {
        let OpenedStream { body, place, work, span, control } = opened;
        let begun = tokio::spawn(begin(self.node.clone(), work, body).instrument(span.clone()));
        self.running.push(StreamRun {
            stream,
            control,
            outbox: self.outbox.clone(),
            span,
            phase: RunPhase::Beginning(AbortOnDropHandle::new(begun)),
            held: None,
            shortage: None,
            _place: place,
        });
    }
}
