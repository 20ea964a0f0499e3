mod tls;

use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;

use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use futures::StreamExt;
use futures::future::join_all;
use http::{HeaderMap, Method};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn call(path: &str) -> Call {
    Call { method: Method::POST, path: path.to_owned(), headers: HeaderMap::new(), body: Bytes::from_static(b"{}") }
}

fn plain(address: SocketAddr) -> CallConnections {
    CallConnections::new(&format!("http://{address}"), &Transport::default(), SECOND, 64).unwrap()
}

async fn text(mut reply: Reply) -> String {
    let mut text = String::new();
    while let Some(piece) = reply.body.next().await {
        text += std::str::from_utf8(&piece.unwrap()).unwrap();
    }
    text
}

/// A text, an endless reply and a slow one.
fn router() -> Router {
    let endless =
        || async { Body::from_stream(futures::stream::repeat(Ok::<_, String>(Bytes::from(vec![b'x'; 4096])))) };
    let slow = || async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        "well"
    };
    let router = Router::new().route("/", post(|| async { "well" })).route("/", get(|| async { "well" }));
    router.route("/endless", post(endless)).route("/slow", post(slow))
}

/// Serves these routes, to at most so many HTTP/2 calls on a connection. Counts its connections.
async fn serve(router: Router, tls: Option<TlsAcceptor>, max_calls: u32) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let n_connections = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&n_connections);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let service = TowerToHyperService::new(router.clone());
            let tls = tls.clone();
            tokio::spawn(async move {
                let mut builder = Builder::new(TokioExecutor::new());
                builder.http2().max_concurrent_streams(max_calls);
                match tls {
                    Some(tls) => {
                        let stream = TokioIo::new(tls.accept(stream).await.unwrap());
                        let _ = builder.serve_connection(stream, service).await;
                    }
                    None => drop(builder.serve_connection(TokioIo::new(stream), service).await),
                }
            });
        }
    });
    (address, n_connections)
}

#[tokio::test]
async fn waves_of_calls_open_no_more_connections_than_calls_run_at_once() {
    let (address, n_connections) = serve(router(), None, 200).await;
    let server = plain(address);
    for n in [16, 20, 32, 32, 32] {
        let calls = (0..n).map(|_| async { text(server.send(&call("/slow")).await.unwrap()).await });
        assert!(join_all(calls).await.iter().all(|text| text == "well"));
    }
    assert_eq!(n_connections.load(Ordering::SeqCst), 32);
}

#[tokio::test]
async fn a_reply_that_is_dropped_or_finished_early_closes_or_keeps_its_connection() {
    let (address, n_connections) = serve(router(), None, 200).await;
    let server = plain(address);
    let mut endless = server.send(&call("/endless")).await.unwrap();
    assert!(endless.body.next().await.unwrap().is_ok());
    drop(endless);
    let mut reply = server.send(&call("/")).await.unwrap();
    assert_eq!(n_connections.load(Ordering::SeqCst), 2, "the first connection is closed");
    assert_eq!(reply.body.next().await.unwrap().unwrap(), "well");
    // The end of the body was not read yet.
    reply.body.finish();
    assert_eq!(text(server.send(&call("/")).await.unwrap()).await, "well");
    assert_eq!(n_connections.load(Ordering::SeqCst), 2);
}

const REPLY: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nwell";

/// Reads a request. `None` if the connection ends first.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut seen = Vec::new();
    while !seen.ends_with(b"{}") {
        if !matches!(stream.read_buf(&mut seen).await, Ok(1..)) {
            return None;
        }
    }
    String::from_utf8(seen).ok()
}

/// The request id in a request's head.
fn id_of(request: &str) -> &str {
    request.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap()
}

#[tokio::test]
async fn a_connection_that_the_server_closed_meanwhile_costs_no_call_and_shows_no_id_twice() {
    // The server closes it before the second call, or when that call's request has come.
    for closes_late in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = plain(listener.local_addr().unwrap());
        let closed = Arc::new(tokio::sync::Notify::new());
        let has_closed = Arc::clone(&closed);
        let served = tokio::spawn(async move {
            let mut ids = Vec::new();
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().await.unwrap();
                ids.push(id_of(&read_request(&mut stream).await.unwrap()).to_owned());
                stream.write_all(REPLY).await.unwrap();
                if closes_late && let Some(request) = read_request(&mut stream).await {
                    ids.push(id_of(&request).to_owned());
                }
                drop(stream);
                has_closed.notify_one();
            }
            ids
        });
        let with_id = |id: &'static str| {
            let mut call = call("/");
            call.headers.insert(X_REQUEST_ID, http::HeaderValue::from_static(id));
            call
        };
        assert_eq!(text(server.send(&with_id("first")).await.unwrap()).await, "well");
        if !closes_late {
            closed.notified().await;
        }
        assert_eq!(text(server.send(&with_id("second")).await.unwrap()).await, "well", "{closes_late}");
        drop(server);
        let ids = served.await.unwrap();
        assert_eq!(ids[..2], ["first", "second"]);
        assert_eq!(ids[2..].iter().filter(|id| uuid::Uuid::try_parse(id).is_ok()).count(), usize::from(closes_late));
        assert_eq!(ids.len(), 2 + usize::from(closes_late));
    }
}

#[tokio::test]
async fn a_call_is_sent_again_only_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = plain(listener.local_addr().unwrap());
    let n_requests = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&n_requests);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            while read_request(&mut stream).await.is_some() {
                if counted.fetch_add(1, Ordering::SeqCst) > 0 {
                    break;
                }
                stream.write_all(REPLY).await.unwrap();
            }
        }
    });
    assert_eq!(text(server.send(&call("/")).await.unwrap()).await, "well");
    let Err(error) = server.send(&call("/")).await else { panic!() };
    let UpstreamError::Failed { failure, .. } = error else { panic!("{error:?}") };
    assert_eq!((failure, n_requests.load(Ordering::SeqCst)), (UpstreamFailure::Unreachable, 3));
}

#[tokio::test]
async fn a_port_without_a_server_is_explained() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = listener.local_addr().unwrap();
    drop(listener);
    let Err(error) = plain(closed).send(&call("/")).await else { panic!() };
    assert!(error.to_string().contains("refused"), "{error}");
}

/// By one of the two lengths the body ends early, and the next reply would be what follows it.
#[tokio::test]
async fn a_connection_whose_reply_has_two_lengths_is_not_used_again() {
    let reply = |headers: &str| format!("HTTP/1.1 200 OK\r\n{headers}\r\n4\r\nwell\r\n0\r\n\r\n");
    for (headers, n_expected) in [
        ("content-length: 4\r\ntransfer-encoding: chunked\r\n", 2),
        ("transfer-encoding: chunked\r\ncontent-length: 14\r\n", 2),
        ("transfer-encoding: chunked\r\n", 1),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let n_opened = Arc::<AtomicUsize>::default();
        let (counted, reply) = (Arc::clone(&n_opened), reply(headers));
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                let reply = reply.clone();
                tokio::spawn(async move {
                    let mut request = [0; 4096];
                    while stream.read(&mut request).await.is_ok_and(|n| n > 0) {
                        stream.write_all(reply.as_bytes()).await.unwrap();
                    }
                });
            }
        });
        let connections = plain(address);
        for _ in 0..2 {
            assert_eq!(text(connections.send(&call("/")).await.unwrap()).await, "well");
        }
        assert_eq!(n_opened.load(Ordering::SeqCst), n_expected, "{headers}");
    }
}
