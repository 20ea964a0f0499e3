//! From the body of a start to the engine's stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use baton_schemas::EngineError;
use baton_schemas::embed::EmbedEvent;
use baton_schemas::node::NodeLoad;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::streams::StreamWork;
use futures::Stream;
use serde::de::DeserializeOwned;

use super::super::{NodeService, loads};
use crate::engine::{EmbedStream, LoadStream, SequenceStream};
use crate::long_json;

/// A stream of the engine.
pub(super) enum WorkStream {
    Sequence(SequenceStream),
    Embed(EmbedStream),
    Loads(LoadStream),
}

/// An event of a [`WorkStream`].
pub(super) enum WorkEvent {
    Sequence(SequenceEvent),
    Embed(EmbedEvent),
    Load(NodeLoad),
}

impl WorkStream {
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<WorkEvent, EngineError>>> {
        match self {
            WorkStream::Sequence(stream) => {
                Pin::new(stream).poll_next(context).map(|event| event.map(|event| event.map(WorkEvent::Sequence)))
            }
            WorkStream::Embed(stream) => {
                Pin::new(stream).poll_next(context).map(|event| event.map(|event| event.map(WorkEvent::Embed)))
            }
            WorkStream::Loads(stream) => {
                Pin::new(stream).poll_next(context).map(|load| load.map(|load| load.map(WorkEvent::Load)))
            }
        }
    }
}

/// Reads a request and gives it to the engine. Returns once it is in the engine's queue. Dropping the future takes the
/// request back.
pub(super) async fn begin(node: NodeService, work: StreamWork, body: Vec<u8>) -> Result<WorkStream, EngineError> {
    let refuse = |what: &str| Err(EngineError::Unsupported { feature: format!("{what}: its role is prefill") });
    match work {
        StreamWork::Generate if !node.role.decodes() => refuse("generating"),
        StreamWork::Embed if !node.role.decodes() => refuse("embeddings"),
        StreamWork::Generate => Ok(WorkStream::Sequence(node.engine.generate(parsed(body).await?).await?)),
        StreamWork::Embed => Ok(WorkStream::Embed(node.engine.embed(parsed(body).await?).await?)),
        StreamWork::Loads => Ok(WorkStream::Loads(loads::stream(node)?)),
    }
}

async fn parsed<T: DeserializeOwned + Send + 'static>(body: Vec<u8>) -> Result<T, EngineError> {
    let parsed = long_json::parsed(body, |body| serde_json::from_slice(body)).await.map_err(EngineError::internal)?;
    parsed.map_err(|e| EngineError::invalid(format!("the body is not a valid request: {e}")))
}
