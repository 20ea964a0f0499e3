//! The kinds of events that a stream can have, and where they go.

use std::sync::Arc;

use baton_schemas::EngineError;
use baton_schemas::draft::DrafterLoss;
use baton_schemas::embed::EmbedEvent;
use baton_schemas::node::NodeLoad;
use baton_schemas::sequence::SequenceEvent;
use tokio::sync::mpsc;

use crate::drafts::{DraftBoard, loss_of};

/// Events of a stream that take no credit: started, prefill begun, handoff, finished or an error. Of vectors: begun, finished or an
/// error.
pub(super) const MAX_FREE_EVENTS: u32 = 4;

pub(in super::super) type EventSender<D> = mpsc::Sender<Result<D, EngineError>>;

/// Where a stream's events go. The receiver has room for all that the node may send, so nothing ever waits here.
pub(in super::super) enum Inbox {
    Sequence(EventSender<SequenceEvent>),
    Embed(EventSender<EmbedEvent>),
    Loads(EventSender<NodeLoad>),
    /// Keeps a bounded number of candidates by itself.
    Drafts(Arc<DraftBoard>),
}

impl Inbox {
    /// The credit of a new stream.
    pub(super) fn credit(&self) -> u32 {
        match self {
            Inbox::Sequence(_) => SequenceEvent::CREDIT,
            Inbox::Embed(_) => EmbedEvent::CREDIT,
            Inbox::Loads(_) => NodeLoad::CREDIT,
            Inbox::Drafts(_) => 0,
        }
    }

    pub(super) fn fail(&self, error: EngineError) {
        // It fails if the reader has left.
        match self {
            Inbox::Sequence(sender) => drop(sender.try_send(Err(error))),
            Inbox::Embed(sender) => drop(sender.try_send(Err(error))),
            Inbox::Loads(sender) => drop(sender.try_send(Err(error))),
            Inbox::Drafts(board) => board.end(loss_of(&error)),
        }
    }

    /// The node has ended the stream, without an error.
    pub(super) fn end(&self) {
        if let Inbox::Drafts(board) = self {
            board.end(DrafterLoss::Lost);
        }
    }

    /// Returns true if its end is the loss of somebody's work.
    pub(super) fn is_work(&self) -> bool {
        matches!(self, Inbox::Sequence(_) | Inbox::Embed(_))
    }
}

/// An event of a kind of stream.
pub(in super::super) trait StreamEvent: Sized + Send + Unpin + 'static {
    /// The most tokens, vectors or loads of a stream that its reader has not taken. Further ones wait in the engine.
    const CREDIT: u32;

    /// The stream may end without a last event.
    const MAY_END: bool = false;

    /// Puts the sender of such a stream into its inbox.
    fn inbox(sender: EventSender<Self>) -> Inbox;

    /// Returns true if the event takes a credit.
    fn takes_credit(&self) -> bool;

    /// Returns true if nothing follows.
    fn is_last(&self) -> bool;
}

impl StreamEvent for SequenceEvent {
    const CREDIT: u32 = 64;

    fn inbox(sender: EventSender<Self>) -> Inbox {
        Inbox::Sequence(sender)
    }

    fn takes_credit(&self) -> bool {
        matches!(self, SequenceEvent::Token(_))
    }

    fn is_last(&self) -> bool {
        matches!(self, SequenceEvent::Finished { .. })
    }
}

impl StreamEvent for EmbedEvent {
    /// A vector may take a megabyte.
    const CREDIT: u32 = 16;

    fn inbox(sender: EventSender<Self>) -> Inbox {
        Inbox::Embed(sender)
    }

    fn takes_credit(&self) -> bool {
        matches!(self, EmbedEvent::Vector(_))
    }

    fn is_last(&self) -> bool {
        matches!(self, EmbedEvent::Finished { .. })
    }
}

impl StreamEvent for NodeLoad {
    const CREDIT: u32 = 16;
    const MAY_END: bool = true;

    fn inbox(sender: EventSender<Self>) -> Inbox {
        Inbox::Loads(sender)
    }

    fn takes_credit(&self) -> bool {
        true
    }

    fn is_last(&self) -> bool {
        false
    }
}
