//! A file server for tests, with the faults that real ones have.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::Response;
use futures::{StreamExt, stream};
use http::header::{ACCEPT_RANGES, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_RANGE, LOCATION, RANGE};
use http::{HeaderMap, StatusCode};
use sha2::{Digest, Sha256};

use super::client::DownloadLimits;

/// What goes wrong with one request. Requests beyond the listed faults are served well.
#[derive(Debug, Clone, Copy)]
pub(super) enum ServerFault {
    /// The connection breaks after so many bytes of this response's body.
    CutAfter(usize),
    /// So many bytes come, then nothing more, ever.
    HangAfter(usize),
    /// This status, without a file.
    Status(u16),
    /// The whole file with 200, whatever part was asked for.
    IgnoreRange,
    /// A 206 that begins at the first byte, whatever part was asked for.
    WrongRange,
    /// The right bytes, one of them flipped.
    FlipBit,
    /// The whole file, without its length.
    NoLength,
}

/// What a request asked for.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Seen {
    pub range: Option<String>,
    pub if_range: Option<String>,
    pub authorization: Option<String>,
}

/// A running server of one file, at any path. It stops with the test's runtime.
#[derive(Clone)]
pub(super) struct FakeServer {
    pub address: String,
    state: Arc<Mutex<ServerState>>,
}

struct ServerState {
    file: Bytes,
    etag: Option<&'static str>,
    redirect: Option<String>,
    faults: VecDeque<ServerFault>,
    seen: Vec<Seen>,
}

impl FakeServer {
    pub(super) async fn serving(file: &[u8]) -> Self {
        let state = ServerState {
            file: Bytes::copy_from_slice(file),
            etag: Some("\"one\""),
            redirect: None,
            faults: VecDeque::new(),
            seen: Vec::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let address = start(axum::Router::new().fallback(serve).with_state(state.clone())).await;
        FakeServer { address, state }
    }

    pub(super) fn with_faults(self, faults: &[ServerFault]) -> Self {
        self.state.lock().unwrap().faults.extend(faults);
        self
    }

    pub(super) fn replace(&self, file: &[u8], etag: Option<&'static str>) {
        let mut state = self.state.lock().unwrap();
        state.file = Bytes::copy_from_slice(file);
        state.etag = etag;
    }

    /// From now on, every request is sent elsewhere.
    pub(super) fn redirect_to(&self, url: String) {
        self.state.lock().unwrap().redirect = Some(url);
    }

    pub(super) fn url(&self, path: &str) -> reqwest::Url {
        format!("{}{path}", self.address).parse().unwrap()
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.state.lock().unwrap().seen.clone()
    }
}

/// Serves a router on a free local port and returns `http://HOST:PORT`.
pub(super) async fn start(router: axum::Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

/// Nothing in a test is worth waiting for.
pub(super) fn short_limits() -> DownloadLimits {
    DownloadLimits {
        connect: Duration::from_secs(5),
        idle: Duration::from_millis(400),
        max_attempts: 3,
        backoff: Duration::from_millis(1),
        max_backoff: Duration::from_millis(5),
        pip: Duration::from_secs(20),
        most_unannounced: 1 << 20,
    }
}

/// Bytes that look different everywhere, so that a shifted or repeated piece is noticed.
pub(super) fn noise(n_bytes: usize) -> Vec<u8> {
    let mut state = 1u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(n_bytes).collect()
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn serve(State(state): State<Arc<Mutex<ServerState>>>, request: Request) -> Result<Response, Infallible> {
    let mut state = state.lock().unwrap();
    let header =
        |headers: &HeaderMap, name| headers.get(name).map(|v: &http::HeaderValue| v.to_str().unwrap().to_owned());
    let seen = Seen {
        range: header(request.headers(), RANGE),
        if_range: header(request.headers(), IF_RANGE),
        authorization: header(request.headers(), AUTHORIZATION),
    };
    state.seen.push(seen.clone());
    if let Some(url) = &state.redirect {
        return Ok(Response::builder().status(302).header(LOCATION, url).body(Body::empty()).unwrap());
    }
    let fault = state.faults.pop_front();
    if let Some(ServerFault::Status(status)) = fault {
        return Ok(Response::builder().status(status).body(Body::from("no")).unwrap());
    }
    Ok(answer(&state.file, state.etag, &seen, fault))
}

fn answer(file: &Bytes, etag: Option<&'static str>, seen: &Seen, fault: Option<ServerFault>) -> Response {
    let total = file.len();
    let mut response = Response::builder().header(ACCEPT_RANGES, "bytes");
    if let Some(etag) = etag {
        response = response.header(ETAG, etag);
    }
    let asked = seen.range.as_ref().map(|range| range.strip_prefix("bytes=").unwrap().split_once('-').unwrap());
    let same_file = seen.if_range.as_deref().is_none_or(|wanted| Some(wanted) == etag);
    let (start, end) = match asked {
        Some(_) if matches!(fault, Some(ServerFault::IgnoreRange)) || !same_file => (0, total),
        Some((start, end)) => {
            let start: usize = start.parse().unwrap();
            if start >= total {
                return response
                    .status(416)
                    .header(CONTENT_RANGE, format!("bytes */{total}"))
                    .body(Body::empty())
                    .unwrap();
            }
            let end = end.parse::<usize>().map_or(total, |last| total.min(last + 1));
            let start = if matches!(fault, Some(ServerFault::WrongRange)) { 0 } else { start };
            response = response
                .status(StatusCode::PARTIAL_CONTENT)
                .header(CONTENT_RANGE, format!("bytes {start}-{}/{total}", end - 1));
            (start, end)
        }
        None => (0, total),
    };
    let mut piece = file.slice(start..end);
    if matches!(fault, Some(ServerFault::FlipBit)) {
        let mut flipped = piece.to_vec();
        flipped[0] ^= 1;
        piece = flipped.into();
    }
    if !matches!(fault, Some(ServerFault::NoLength)) {
        response = response.header(CONTENT_LENGTH, piece.len());
    }
    response.body(body(piece, fault)).unwrap()
}

fn body(piece: Bytes, fault: Option<ServerFault>) -> Body {
    let cut = match fault {
        Some(ServerFault::CutAfter(n) | ServerFault::HangAfter(n)) => n.min(piece.len()),
        _ => piece.len(),
    };
    let chunks: Vec<Result<Bytes, io::Error>> =
        piece[..cut].chunks(4096).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
    let sent = stream::iter(chunks);
    match fault {
        // The pause lets what was sent before the break reach the client.
        Some(ServerFault::CutAfter(_)) => Body::from_stream(sent.chain(stream::once(async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            Err(io::Error::other("cut"))
        }))),
        Some(ServerFault::HangAfter(_)) => Body::from_stream(sent.chain(stream::pending())),
        _ => Body::from_stream(sent),
    }
}
