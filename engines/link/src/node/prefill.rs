//! `POST /node/v1/prefill`: writes an engine's chunks as records of a handoff.
//!
//! If the reader offers the upgrade ([`KV_UPGRADE`](baton_schemas::kv::KV_UPGRADE)), the connection carries the records
//! alone, and the reader reads rows to where they belong. To other readers the records are the body of the reply.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use baton_schemas::EngineError;
use baton_schemas::handoff::PrefillRequest;
use baton_schemas::kv::{Codec, Handoff, HandoffWriter, KvLayout, Mac, ModelKnowledge, StreamChoice, Wait, WriteError};
use futures::{Stream, StreamExt};
use http::header;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tracing::{Instrument, Span};

use super::{NodeService, SIGN_OF_LIFE, failure};
use crate::connections::{ReadDeadline, UpgradeOffer, send_pieces};
use crate::engine::{KvEvent, KvStream};
use crate::handoff::READ_DEADLINE;
use crate::kv_streams::KvStreamOpen;

/// Encoded records that are made ahead of the socket.
const RECORD_WINDOW: usize = 1;

/// Replies with a stream of records. A closed connection drops the response, which cancels the prefill.
pub(super) async fn respond(node: &NodeService, offer: Option<UpgradeOffer>, request: PrefillRequest) -> Response {
    let records = match begin(node, request).await {
        Err(error) => return failure(error),
        Ok(records) => records,
    };
    let deadline = Extension(ReadDeadline(READ_DEADLINE));
    match offer {
        Some(offer) => {
            // The span of the call lasts until the last record.
            let span = Span::current();
            // A stop of the node waits for the last record.
            let reply = offer.accept(|io, _closing| send_pieces(io, records).instrument(span));
            (deadline, reply).into_response()
        }
        None => {
            let pieces = records.flat_map(|record| futures::stream::iter(record.into_iter().map(Ok::<_, Infallible>)));
            let content_type = [(header::CONTENT_TYPE, "application/x-baton-kv")];
            (deadline, content_type, Body::from_stream(pieces)).into_response()
        }
    }
}

async fn begin(
    node: &NodeService,
    request: PrefillRequest,
) -> Result<impl Stream<Item = Vec<Bytes>> + use<>, EngineError> {
    if !node.role.prefills() && !request.held_only {
        return Err(EngineError::Unsupported {
            feature: format!("prefilling for others: its role is {}", node.role.as_str()),
        });
    }
    let info = node.engine.info().await?;
    let kv = info.kv.ok_or_else(|| EngineError::Unsupported { feature: "handing this model's KV over".into() })?;
    let codec = choose(&request.codecs, &kv.layout)?;
    let state_codec = choose_for_states(&request.state_codecs, &kv.layout);
    let mac = Mac::choose(&request.macs);
    let handoff = Handoff {
        id: request.handoff,
        fingerprint: kv.fingerprint,
        layout: kv.layout,
        start: request.start,
        tokens: request.tokens.clone(),
    };
    let known = ModelKnowledge {
        rotation: kv.rotation.as_ref(),
        tensors: kv.profile.as_ref().map_or(&[], |profile| &profile.tensors),
    };
    let choice = StreamChoice { codec, state_codec, mac, checkpoints: &request.checkpoints, known };
    let (writer, head) = HandoffWriter::begin_as(node.key.secret(), handoff, choice).map_err(invalid)?;
    let events = node.engine.prefill(request).await?;
    let (records, reader) = mpsc::channel(RECORD_WINDOW);
    // A separate task, so that the next record is encoded while this one is sent.
    tokio::spawn(async move {
        let _open = KvStreamOpen::new();
        tokio::select! {
            () = write(writer, head, events, &records) => {}
            () = records.closed() => {}
        }
    });
    Ok(ReceiverStream::new(reader))
}

async fn write(mut writer: HandoffWriter, head: Vec<Bytes>, mut events: KvStream, records: &mpsc::Sender<Vec<Bytes>>) {
    let mut record = Ok(head);
    let mut wait = Wait::default();
    loop {
        match record {
            Ok(record) => {
                if records.send(record).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::error!(%error, "a record cannot be written; the pull ends with an error");
                return finish(writer.error(&not_written()), records).await;
            }
        }
        let event = match tokio::time::timeout(SIGN_OF_LIFE, events.next()).await {
            Err(_) => {
                record = writer.wait(wait);
                continue;
            }
            Ok(Some(Ok(event))) => event,
            Ok(Some(Err(error))) => return finish(writer.error(&error), records).await,
            Ok(None) => return finish(writer.error(&EngineError::internal("the prefill ended early")), records).await,
        };
        if let KvEvent::Chunk(chunk) = &event {
            wait.n_done += chunk.n_positions();
        }
        if matches!(event, KvEvent::Begun) {
            wait.has_begun = true;
        }
        let is_last = matches!(event, KvEvent::End(_));
        let work = move |writer: &mut HandoffWriter| match event {
            KvEvent::Begun => writer.wait(wait),
            KvEvent::Chunk(chunk) => writer.frame(&chunk),
            KvEvent::State(part) => writer.state(&part),
            KvEvent::End(timings) => writer.end(timings),
        };
        let Some((returned, encoded)) = encode(writer, work).await else {
            return tracing::debug!("a pull is cut: the node stops");
        };
        writer = returned;
        record = match encoded {
            Some(record) if is_last => return finish(record, records).await,
            Some(record) => record,
            None => return finish(writer.error(&not_written()), records).await,
        };
    }
}

/// Encodes a record on a thread that may block, because hashing and encoding take milliseconds. Returns the writer, and
/// `None` for the record if encoding panicked. Returns nothing if the runtime shuts down.
async fn encode<T: Send + 'static>(
    mut writer: HandoffWriter,
    work: impl FnOnce(&mut HandoffWriter) -> T + Send + 'static,
) -> Option<(HandoffWriter, Option<T>)> {
    let encoded = tokio::task::spawn_blocking(move || {
        // A writer changes only with its last, infallible step, so it can still write an error afterwards.
        let encoded = catch_unwind(AssertUnwindSafe(|| work(&mut writer)));
        if encoded.is_err() {
            tracing::error!("encoding a record panicked; the pull ends with an error");
        }
        (writer, encoded.ok())
    });
    encoded.await.ok()
}

fn not_written() -> EngineError {
    EngineError::internal("the prefill node cannot write a record of this handoff")
}

async fn finish(record: Result<Vec<Bytes>, WriteError>, records: &mpsc::Sender<Vec<Bytes>>) {
    match record {
        // Fails only if the reader has left.
        Ok(record) => drop(records.send(record).await),
        Err(error) => tracing::error!(%error, "the last record cannot be written; the stream is cut"),
    }
}

/// The first codec in the reader's list that this node knows and that fits the rows.
fn choose(codecs: &[u8], layout: &KvLayout) -> Result<Codec, EngineError> {
    let mut known = codecs.iter().filter_map(|&number| Codec::from_number(number));
    let fitting = known.find(|codec| codec.check(layout).is_ok());
    fitting.ok_or_else(|| EngineError::invalid("none of the codecs can be used here"))
}

/// The same for states. Every reader takes them as they are.
fn choose_for_states(codecs: &[u8], layout: &KvLayout) -> Codec {
    let mut known = codecs.iter().filter_map(|&number| Codec::from_number(number));
    known.find(|codec| codec.check_states(layout).is_ok()).unwrap_or_default()
}

fn invalid(error: WriteError) -> EngineError {
    EngineError::invalid(error.to_string())
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{
        Dtype, Fingerprint, HandoffId, HandoffReader, HandoffRecord, KvLayout, LayerShape, RopePairing, Rows, Section,
    };

    use super::*;

    #[tokio::test]
    async fn a_stream_whose_encoding_panics_ends_with_an_error() {
        let rows = Rows { dtype: Dtype::F16, n_values: 64 };
        let handoff = Handoff {
            id: HandoffId([1; 16]),
            fingerprint: Fingerprint { vocabulary: [1; 32], weights: [1; 32] },
            layout: KvLayout {
                rope: RopePairing::Interleaved,
                sections: vec![Section {
                    window: None,
                    n_rot: [0; 2],
                    tokens_per_row: 1,
                    layers: vec![LayerShape { k: rows, v: Some(rows) }],
                }],
                states: Vec::new(),
            },
            start: 0,
            tokens: vec![1, 2, 3],
        };
        let (writer, head) = HandoffWriter::begin(b"key", handoff.clone(), Codec::None, Mac::Blake3).unwrap();
        let panicking = |_: &mut HandoffWriter| -> Vec<Bytes> { panic!("a fault in a codec") };
        let (mut writer, record) = encode(writer, panicking).await.unwrap();
        assert!(record.is_none());
        let error = writer.error(&not_written()).unwrap();
        let stream = [head, error].concat().concat();
        let mut reader = HandoffReader::new(b"key", handoff, &[Codec::None]).unwrap();
        let mut input = &stream[..];
        assert!(matches!(reader.read(&mut input).unwrap(), Some(HandoffRecord::Head(_))));
        let last = reader.read(&mut input).unwrap();
        assert!(matches!(last, Some(HandoffRecord::Error(error)) if error == not_written()));
    }
}
