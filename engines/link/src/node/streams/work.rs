//! From the body of a start to the engine's stream.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use baton_schemas::draft::{DraftRequest, DraftedTokens};
use baton_schemas::embed::EmbedEvent;
use baton_schemas::node::NodeLoad;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::streams::{StreamWork, ToldTokens};
use baton_schemas::{EngineError, SequenceRequest};
use futures::Stream;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::super::drafting::{self, DraftStream};
use super::super::{NodeService, loads};
use super::limits::StreamLimits;
use crate::engine::{EmbedStream, LoadStream, SequenceStream};
use crate::long_json;

/// A stream of the engine.
pub(super) enum WorkStream {
    Sequence(SequenceStream),
    Embed(EmbedStream),
    Loads(LoadStream),
    Drafts(DraftStream),
}

/// An event of a [`WorkStream`].
pub(super) enum WorkEvent {
    Sequence(SequenceEvent),
    Embed(EmbedEvent),
    Load(NodeLoad),
    Drafted(DraftedTokens),
}

impl WorkEvent {
    /// Returns true if the reader has to grant a credit for it.
    pub(super) fn takes_credit(&self) -> bool {
        match self {
            WorkEvent::Sequence(SequenceEvent::Token(_)) | WorkEvent::Embed(EmbedEvent::Vector(_)) => true,
            WorkEvent::Load(_) => true,
            WorkEvent::Sequence(
                SequenceEvent::Started { .. }
                | SequenceEvent::PrefillBegun
                | SequenceEvent::Handoff(_)
                | SequenceEvent::Finished { .. },
            )
            | WorkEvent::Embed(EmbedEvent::Begun | EmbedEvent::Finished { .. })
            | WorkEvent::Drafted(_) => false,
        }
    }
}

impl WorkStream {
    /// The next event. A panic of the engine is an error of this stream alone, and its last event.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<WorkEvent, EngineError>>> {
        let next = catch_unwind(AssertUnwindSafe(|| match self {
            WorkStream::Sequence(stream) => {
                Pin::new(stream).poll_next(context).map(|event| event.map(|event| event.map(WorkEvent::Sequence)))
            }
            WorkStream::Embed(stream) => {
                Pin::new(stream).poll_next(context).map(|event| event.map(|event| event.map(WorkEvent::Embed)))
            }
            WorkStream::Loads(stream) => {
                Pin::new(stream).poll_next(context).map(|load| load.map(|load| load.map(WorkEvent::Load)))
            }
            WorkStream::Drafts(stream) => Pin::new(stream)
                .poll_next(context)
                .map(|drafted| drafted.map(|drafted| drafted.map(WorkEvent::Drafted))),
        }));
        next.unwrap_or_else(|_panic| Poll::Ready(Some(Err(EngineError::internal("the engine's stream panicked")))))
    }
}

/// The body of a request.
pub(super) struct RequestBody {
    pub(super) bytes: Vec<u8>,
    /// Its bytes in the node's budget, if it came in pieces.
    pub(super) charge: Option<OwnedSemaphorePermit>,
    /// The further tokens of a sequence to draft for.
    pub(super) told: Option<mpsc::Receiver<ToldTokens>>,
}

/// Reads a request and gives it to the engine. Returns once it is in the engine's queue. Dropping the future takes the
/// request back.
pub(super) async fn begin(
    node: NodeService,
    work: StreamWork,
    mut body: RequestBody,
) -> Result<WorkStream, EngineError> {
    let role = node.role.as_str();
    let refuse = |what: &str| Err(EngineError::Unsupported { feature: format!("{what}: its role is {role}") });
    match work {
        StreamWork::Draft if !node.role.drafts() => refuse("drafting"),
        StreamWork::Draft => {
            let told = body.told.take().ok_or_else(|| EngineError::internal("nobody tells the sequence's tokens"))?;
            let request: DraftRequest = parsed(&node.stream_limits, body).await?;
            Ok(WorkStream::Drafts(drafting::follow(node.engine, request, told).await?))
        }
        StreamWork::Embed if !node.role.decodes() => refuse("embeddings"),
        StreamWork::Generate => {
            let request: SequenceRequest = parsed(&node.stream_limits, body).await?;
            match node.role.decodes() || (request.held_only && node.role.prefills()) {
                true => Ok(WorkStream::Sequence(node.engine.generate(request).await?)),
                false => refuse("generating"),
            }
        }
        StreamWork::Embed => Ok(WorkStream::Embed(node.engine.embed(parsed(&node.stream_limits, body).await?).await?)),
        StreamWork::Loads => Ok(WorkStream::Loads(loads::stream(node)?)),
    }
}

/// Parses a body. The bodies that wait for it are freed when their stream ends, because few are given to other threads.
async fn parsed<T: DeserializeOwned + Send + 'static>(
    limits: &StreamLimits,
    RequestBody { bytes, charge, .. }: RequestBody,
) -> Result<T, EngineError> {
    // A body in one piece is short enough to be parsed in this task.
    let parser = if charge.is_some() { Some(limits.parser().await?) } else { None };
    let parse = move |bytes: &[u8]| {
        let _held_until_parsed = [charge, parser];
        serde_json::from_slice(bytes)
    };
    let parsed = long_json::parsed(bytes, parse).await.map_err(EngineError::internal)?;
    parsed.map_err(|e| EngineError::invalid(format!("the body is not a valid request: {e}")))
}
