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

fn plain(address: SocketAddr) -> Connections {
    Connections::new(&format!("http://{address}"), &Transport::default(), SECOND, 64).unwrap()
}

async fn text(mut reply: Reply) -> String {
    let mut text = String::new();
    while let Some(piece) = reply.body.next().await {
        text += std::str::from_utf8(&piece.unwrap()).unwrap();
    }
    text
}

/// Serves a text, an endless reply and a slow one. Counts its connections.
async fn server(tls: Option<TlsAcceptor>) -> (SocketAddr, Arc<AtomicUsize>) {
    let endless =
        || async { Body::from_stream(futures::stream::repeat(Ok::<_, String>(Bytes::from(vec![b'x'; 4096])))) };
    let slow = || async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        "well"
    };
    let router = Router::new().route("/", post(|| async { "well" })).route("/", get(|| async { "well" }));
    let router = router.route("/endless", post(endless)).route("/slow", post(slow));
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
                let builder = Builder::new(TokioExecutor::new());
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
    let (address, n_connections) = server(None).await;
    let server = plain(address);
    for n in [16, 20, 32, 32, 32] {
        let calls = (0..n).map(|_| async { text(server.send(&call("/slow")).await.unwrap()).await });
        assert!(join_all(calls).await.iter().all(|text| text == "well"));
    }
    assert_eq!(n_connections.load(Ordering::SeqCst), 32);
}

#[tokio::test]
async fn a_reply_that_is_dropped_or_finished_early_closes_or_keeps_its_connection() {
    let (address, n_connections) = server(None).await;
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

/// Reads a request. Returns false if the connection ends first.
async fn read_request(stream: &mut TcpStream) -> bool {
    let mut seen = Vec::new();
    while !seen.ends_with(b"{}") {
        if !matches!(stream.read_buf(&mut seen).await, Ok(1..)) {
            return false;
        }
    }
    true
}

#[tokio::test]
async fn a_connection_that_the_server_closed_meanwhile_costs_no_call() {
    // The server closes it before the second call, or when that call's request has come.
    for closes_late in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = plain(listener.local_addr().unwrap());
        let closed = Arc::new(tokio::sync::Notify::new());
        let has_closed = Arc::clone(&closed);
        let served = tokio::spawn(async move {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().await.unwrap();
                assert!(read_request(&mut stream).await);
                stream.write_all(REPLY).await.unwrap();
                if closes_late {
                    read_request(&mut stream).await;
                }
                drop(stream);
                has_closed.notify_one();
            }
        });
        assert_eq!(text(server.send(&call("/")).await.unwrap()).await, "well");
        if !closes_late {
            closed.notified().await;
        }
        assert_eq!(text(server.send(&call("/")).await.unwrap()).await, "well", "{closes_late}");
        served.abort();
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
            while read_request(&mut stream).await {
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

/// A server with a certificate that its client trusts, which offers these protocols.
async fn tls_server(alpn: &[&'static [u8]]) -> (Connections, Arc<AtomicUsize>) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, made.cert.pem()).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let (address, n_connections) = server(Some(TlsAcceptor::from(Arc::new(config)))).await;
    let transport = Transport::new(Some(&ca), false).unwrap();
    let url = format!("https://localhost:{}", address.port());
    (Connections::new(&url, &transport, 5 * SECOND, 64).unwrap(), n_connections)
}

#[tokio::test]
async fn calls_share_a_connection_where_http2_is_offered() {
    let (server, n_connections) = tls_server(&[b"h2", b"http/1.1"]).await;
    // A reply that nobody reads holds up no other.
    let _unread = server.send(&call("/endless")).await.unwrap();
    let calls = (0..32).map(|_| async { text(server.send(&call("/slow")).await.unwrap()).await });
    assert!(join_all(calls).await.iter().all(|text| text == "well"));
    assert_eq!(n_connections.load(Ordering::SeqCst), 1);
    // Beyond the calls of one connection there is a second one.
    let endless = call("/endless");
    let held = join_all((0..shared::MAX_CALLS).map(|_| server.send(&endless))).await;
    assert!(held.iter().all(Result::is_ok));
    assert_eq!(n_connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn tls_without_http2_uses_connections_again() {
    let (server, n_connections) = tls_server(&[b"http/1.1"]).await;
    for _ in 0..3 {
        let calls = (0..8).map(|_| async { text(server.send(&call("/slow")).await.unwrap()).await });
        assert!(join_all(calls).await.iter().all(|text| text == "well"));
    }
    assert_eq!(n_connections.load(Ordering::SeqCst), 8);
}

#[tokio::test]
async fn a_certificate_that_is_not_trusted_is_explained() {
    let (server, _) = tls_server(&[]).await;
    let stranger = Connections::new(server.opener.url(), &Transport::default(), 5 * SECOND, 1).unwrap();
    let Err(error) = stranger.send(&call("/")).await else { panic!() };
    assert!(error.to_string().contains("not trusted here"), "{error}");
}

#[tokio::test]
async fn a_port_without_a_server_is_explained() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = listener.local_addr().unwrap();
    drop(listener);
    let Err(error) = plain(closed).send(&call("/")).await else { panic!() };
    assert!(error.to_string().contains("refused"), "{error}");
}
