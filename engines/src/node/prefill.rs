//! `POST /node/v1/prefill`: writes an engine's chunks as records of a handoff.

use std::convert::Infallible;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use baton_schemas::EngineError;
use baton_schemas::handoff::PrefillRequest;
use baton_schemas::kv::{Codec, Handoff, HandoffWriter, Wait, WriteError};
use futures::{Stream, StreamExt};
use http::header;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{NodeService, SIGN_OF_LIFE, failure};
use crate::connections::ReadDeadline;
use crate::engine::{KvEvent, KvStream};
use crate::handoff::READ_DEADLINE;

/// Encoded records that are made ahead of the socket.
const RECORD_WINDOW: usize = 1;

/// Replies with a stream of records. A closed connection drops the response, which cancels the prefill.
pub(super) async fn respond(node: &NodeService, request: PrefillRequest) -> Response {
    match begin(node, request).await {
        Err(error) => failure(error),
        Ok(records) => {
            let pieces = records.flat_map(|record| futures::stream::iter(record.into_iter().map(Ok::<_, Infallible>)));
            let deadline = Extension(ReadDeadline(READ_DEADLINE));
            let content_type = [(header::CONTENT_TYPE, "application/x-baton-kv")];
            (deadline, content_type, Body::from_stream(pieces)).into_response()
        }
    }
}

async fn begin(
    node: &NodeService,
    request: PrefillRequest,
) -> Result<impl Stream<Item = Vec<Bytes>> + use<>, EngineError> {
    if !node.role.prefills() {
        return Err(EngineError::Unsupported { feature: "prefilling for others: its role is decode".into() });
    }
    let info = node.engine.info().await?;
    let kv = info.kv.ok_or_else(|| EngineError::Unsupported { feature: "handing this model's KV over".into() })?;
    let codec = choose(&request.codecs)?;
    let handoff = Handoff {
        id: request.handoff,
        fingerprint: kv.fingerprint,
        layout: kv.layout,
        start: request.start,
        tokens: request.tokens.clone(),
    };
    let (writer, head) = HandoffWriter::begin(node.key.secret(), handoff, codec).map_err(invalid)?;
    let events = node.engine.prefill(request).await?;
    let (records, reader) = mpsc::channel(RECORD_WINDOW);
    // A separate task, so that the next record is encoded while this one is sent.
    tokio::spawn(async move {
        tokio::select! {
            () = write(writer, head, events, &records) => {}
            () = records.closed() => {}
        }
    });
    Ok(ReceiverStream::new(reader))
}

async fn write(mut writer: HandoffWriter, head: Vec<Bytes>, mut events: KvStream, records: &mpsc::Sender<Vec<Bytes>>) {
    let mut record = Ok(head);
    let mut n_done = 0;
    loop {
        match record {
            Ok(record) => {
                if records.send(record).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::error!(%error, "a record cannot be written; the pull ends with an error");
                let error = EngineError::internal("the prefill node cannot write a record of this handoff");
                return finish(writer.error(&error), records).await;
            }
        }
        record = match tokio::time::timeout(SIGN_OF_LIFE, events.next()).await {
            Err(_) => writer.wait(Wait { n_done, ..Wait::default() }),
            Ok(Some(Ok(KvEvent::Chunk(chunk)))) => {
                n_done += chunk.n_positions();
                // Hashing and encoding take milliseconds, which would block an async thread.
                let encoded = tokio::task::spawn_blocking(move || {
                    let record = writer.frame(&chunk);
                    (writer, record)
                });
                match encoded.await {
                    Ok((returned, record)) => {
                        writer = returned;
                        record
                    }
                    Err(panic) => return tracing::error!(%panic, "encoding a record panicked; the stream is cut"),
                }
            }
            Ok(Some(Ok(KvEvent::End(timings)))) => return finish(writer.end(timings), records).await,
            Ok(Some(Err(error))) => return finish(writer.error(&error), records).await,
            Ok(None) => return finish(writer.error(&EngineError::internal("the prefill ended early")), records).await,
        };
    }
}

async fn finish(record: Result<Vec<Bytes>, WriteError>, records: &mpsc::Sender<Vec<Bytes>>) {
    match record {
        // Fails only if the reader has left.
        Ok(record) => drop(records.send(record).await),
        Err(error) => tracing::error!(%error, "the last record cannot be written; the stream is cut"),
    }
}

/// The first codec in the reader's list that this node supports.
fn choose(codecs: &[u8]) -> Result<Codec, EngineError> {
    let known = codecs.iter().find_map(|&number| Codec::from_number(number));
    known.ok_or_else(|| EngineError::invalid("none of the codecs is known here"))
}

fn invalid(error: WriteError) -> EngineError {
    EngineError::invalid(error.to_string())
}
