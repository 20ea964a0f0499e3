//! The calls of the node protocol about the model files on this machine. Each needs the cluster key.

use std::io::{self, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_RANGE, RANGE};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::middleware;
use axum::response::{IntoResponse, Response as Reply};
use axum::routing::get;
use baton_link::kv_streams::pause_after;
use baton_link::no_sleep::StayAwake;
use baton_link::node::{CallBody, ClusterKey, NodeRequest, NodeRequests, answer, authenticate, failure, refusal};
use baton_proxy::serve::models_folder::ModelsFolder;
use baton_schemas::EngineError;
use baton_schemas::machine_models::{FileOnDisk, ModelOrder};
use baton_schemas::node::BASE_PATH;
use bytes::{Bytes, BytesMut};
use futures::Stream;
use serde::Deserialize;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Files that are sent at once. Each machine receives one model at a time, so more are for other machines.
const MAX_FILES_SENT: usize = 4;

/// Bytes that are read at once.
const PIECE_BYTES: usize = 256 << 10;

/// An order has a name and some addresses.
const MAX_ORDER_BYTES: usize = 64 << 10;

#[derive(Clone)]
struct ModelCalls {
    folder: ModelsFolder,
    sends: Arc<Semaphore>,
    requests: NodeRequests,
}

/// Held while a file is sent: its place among those that are, and what keeps the machine from sleep.
struct FileSending {
    _place: OwnedSemaphorePermit,
    _open: NodeRequest,
    _awake: StayAwake,
}

/// The routes, to be merged with those of the node's engine. A file that is sent counts among `requests`.
pub(crate) fn router(folder: ModelsFolder, key: ClusterKey, requests: NodeRequests) -> Router {
    let calls = ModelCalls { folder, sends: Arc::new(Semaphore::new(MAX_FILES_SENT)), requests };
    let routes = Router::new()
        .route("/models", get(report).post(order))
        .route("/models/offer", get(offer))
        .route("/models/file", get(file))
        .with_state(calls);
    Router::new()
        .nest(BASE_PATH, routes)
        .layer(DefaultBodyLimit::max(MAX_ORDER_BYTES))
        .layer(middleware::from_fn_with_state(key, authenticate))
}

async fn report(State(calls): State<ModelCalls>) -> Reply {
    answer(Ok(calls.folder.report().await))
}

async fn order(State(calls): State<ModelCalls>, CallBody(order): CallBody<ModelOrder>) -> Reply {
    answer(calls.folder.order(order).await)
}

/// The query of [`offer`].
#[derive(Deserialize)]
struct OfferQuery {
    model: String,
}

async fn offer(State(calls): State<ModelCalls>, Query(OfferQuery { model }): Query<OfferQuery>) -> Reply {
    answer(calls.folder.offer(&model).await)
}

/// The query of [`file`]: a model, and the path of one of its files.
#[derive(Deserialize)]
struct FileQuery {
    model: String,
    file: String,
}

/// Sends a file, or its end (`Range: bytes=N-`).
async fn file(State(calls): State<ModelCalls>, Query(asked): Query<FileQuery>, headers: HeaderMap) -> Reply {
    let Ok(place) = Arc::clone(&calls.sends).try_acquire_owned() else {
        return failure(EngineError::Unavailable { reason: "this machine sends other files".into() });
    };
    let (path, described) = match calls.folder.file(&asked.model, &asked.file).await {
        Ok(found) => found,
        Err(error) => return failure(error),
    };
    let Some(start) = first_byte(&described, &headers) else {
        return refusal(StatusCode::RANGE_NOT_SATISFIABLE, EngineError::invalid("the file is shorter"));
    };
    let sending = FileSending { _place: place, _open: calls.requests.begin(), _awake: StayAwake::begin() };
    match send(&path, &described, start, sending).await {
        Ok(reply) => reply,
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "a model's file cannot be sent");
            failure(EngineError::internal("the file cannot be read"))
        }
    }
}

/// The entity tag of a file: its checksum.
fn etag(file: &FileOnDisk) -> Option<String> {
    file.sha256.as_ref().map(|sha256| format!("\"{sha256}\""))
}

/// The first byte that is wanted. `None`: the file has no such byte. Without the tag that `If-Range` names, it is the first one.
fn first_byte(file: &FileOnDisk, headers: &HeaderMap) -> Option<u64> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let is_same = text(IF_RANGE).is_none_or(|tag| etag(file).is_some_and(|own| own == tag));
    let wanted = text(RANGE).and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    match wanted.filter(|_| is_same) {
        Some(start) if start >= file.n_bytes => None,
        start => Some(start.unwrap_or(0)),
    }
}

async fn send(path: &Path, described: &FileOnDisk, start: u64, sending: FileSending) -> io::Result<Reply> {
    let mut opened = File::open(path).await?;
    opened.seek(SeekFrom::Start(start)).await?;
    let n_bytes = described.n_bytes;
    let mut reply = Response::builder()
        .status(if start == 0 { StatusCode::OK } else { StatusCode::PARTIAL_CONTENT })
        .header(ACCEPT_RANGES, "bytes")
        .header(CONTENT_LENGTH, n_bytes - start);
    if start > 0 {
        reply = reply.header(CONTENT_RANGE, format!("bytes {start}-{}/{n_bytes}", n_bytes - 1));
    }
    if let Some(tag) = etag(described) {
        reply = reply.header(ETAG, tag);
    }
    let body = Body::from_stream(pieces(opened, n_bytes - start, sending));
    reply.body(body).map(IntoResponse::into_response).map_err(io::Error::other)
}

/// The next `left` bytes of a file, which give way to KV. A file that has become shorter breaks the reply off.
fn pieces(file: File, left: u64, sending: FileSending) -> impl Stream<Item = io::Result<Bytes>> {
    futures::stream::try_unfold((file, left, sending), |(mut file, left, sending)| async move {
        if left == 0 {
            return Ok(None);
        }
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(PIECE_BYTES);
        let mut piece = BytesMut::with_capacity(most);
        let n_read = (&mut file).take(most as u64).read_buf(&mut piece).await?;
        if n_read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let pause = pause_after(n_read as u64);
        // A pause of nothing would last a millisecond.
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        Ok(Some((piece.freeze(), (file, left - n_read as u64, sending))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_begins_where_it_is_asked_if_the_file_is_the_same() {
        let file = FileOnDisk { path: "a".into(), n_bytes: 10, sha256: Some("ab".into()) };
        let check = |range: Option<&str>, tag: Option<&str>, expected| {
            let mut headers = HeaderMap::new();
            range.and_then(|range| headers.insert(RANGE, range.parse().unwrap()));
            tag.and_then(|tag| headers.insert(IF_RANGE, tag.parse().unwrap()));
            assert_eq!(first_byte(&file, &headers), expected, "{range:?} {tag:?}");
        };
        check(None, None, Some(0));
        check(Some("bytes=4-"), None, Some(4));
        check(Some("bytes=4-"), Some("\"ab\""), Some(4));
        check(Some("bytes=4-"), Some("\"other\""), Some(0));
        check(Some("bytes=10-"), None, None);
        check(Some("bytes=99999999999999999999-"), None, Some(0));
        check(Some("bytes=-5"), None, Some(0));
    }
}
