//! TLS, and connections that calls share.

use h2::Reason;
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio_rustls::server::TlsStream;

use super::*;

/// A server's TLS, and a folder with the certificate that its client trusts.
struct ServerTls {
    acceptor: TlsAcceptor,
    ca: tempfile::TempDir,
}

impl ServerTls {
    /// Offers these protocols.
    fn new(alpn: &[&'static [u8]]) -> ServerTls {
        ServerTls::with_certificate(alpn, rcgen::IsCa::NoCa)
    }

    fn with_certificate(alpn: &[&'static [u8]], is_ca: rcgen::IsCa) -> ServerTls {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.is_ca = is_ca;
        let signing_key = rcgen::KeyPair::generate().unwrap();
        let cert = params.self_signed(&signing_key).unwrap();
        let ca = tempfile::tempdir().unwrap();
        std::fs::write(ca.path().join("ca.pem"), cert.pem()).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        ServerTls { acceptor: TlsAcceptor::from(Arc::new(config)), ca }
    }

    /// A client of the server at this address.
    fn client(&self, address: SocketAddr) -> CallConnections {
        let transport = Transport::new(Some(&self.ca.path().join("ca.pem")), false).unwrap();
        let url = format!("https://localhost:{}", address.port());
        CallConnections::new(&url, &transport, 5 * SECOND, 64).unwrap()
    }
}

const HTTP2: &[&[u8]] = &[b"h2", b"http/1.1"];

/// A client of a server that offers these protocols.
async fn tls_server(alpn: &[&'static [u8]]) -> (CallConnections, Arc<AtomicUsize>) {
    let tls = ServerTls::new(alpn);
    let (address, n_connections) = serve(router(), Some(tls.acceptor.clone()), 200).await;
    (tls.client(address), n_connections)
}

/// A client of a server whose connections this function serves. It gets the connection's number.
async fn scripted<F>(connection: impl Fn(usize, TlsStream<TcpStream>) -> F + Send + 'static) -> CallConnections
where
    F: Future<Output = ()> + Send + 'static,
{
    let tls = ServerTls::new(HTTP2);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = tls.client(listener.local_addr().unwrap());
    tokio::spawn(async move {
        for number in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            let stream = tls.acceptor.accept(stream).await.unwrap();
            tokio::spawn(connection(number, stream));
        }
    });
    client
}

#[tokio::test]
async fn calls_share_a_connection_where_http2_is_offered() {
    let (server, n_connections) = tls_server(HTTP2).await;
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
    let stranger = CallConnections::new(server.opener.url(), &Transport::default(), 5 * SECOND, 1).unwrap();
    let Err(error) = stranger.send(&call("/")).await else { panic!() };
    assert!(error.to_string().contains("not trusted here") && error.to_string().contains("tls_ca"), "{error}");
    // As `openssl req -x509` makes it.
    let tls = ServerTls::with_certificate(&[], rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained));
    let (address, _) = serve(router(), Some(tls.acceptor.clone()), 200).await;
    let Err(error) = tls.client(address).send(&call("/")).await else { panic!() };
    assert!(error.to_string().contains("CA:FALSE") && !error.to_string().contains("Other("), "{error}");
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(20 * SECOND, future).await.expect("it takes too long")
}

#[tokio::test]
async fn calls_beyond_the_servers_own_limit_get_another_connection() {
    // Each call waits until all have come: one that queued behind another would wait forever.
    let all = Arc::new(Barrier::new(16));
    let meet = move || async move {
        all.wait().await;
        "well"
    };
    let tls = ServerTls::new(HTTP2);
    let (address, _) = serve(Router::new().route("/", post(meet)), Some(tls.acceptor.clone()), 4).await;
    let server = tls.client(address);
    let calls = (0..16).map(|_| async { text(server.send(&call("/")).await.unwrap()).await });
    assert!(in_time(join_all(calls)).await.iter().all(|text| text == "well"));
}

#[tokio::test]
async fn a_connection_without_a_limit_yet_gets_a_single_call() {
    let n_connections = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&n_connections);
    // The server sends nothing.
    let server = scripted(move |_, stream| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            let _open = stream;
            std::future::pending().await
        }
    });
    let server = server.await;
    let call = call("/");
    let calls = join_all([server.send(&call), server.send(&call), server.send(&call)]);
    let all_opened = async {
        while n_connections.load(Ordering::SeqCst) < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = calls => panic!("nobody answers"),
        () = in_time(all_opened) => {}
    }
}

#[tokio::test]
async fn a_server_that_allows_no_calls_is_unreachable() {
    let tls = ServerTls::new(HTTP2);
    let (address, _) = serve(router(), Some(tls.acceptor.clone()), 0).await;
    let server = tls.client(address);
    let Err(error) = in_time(server.send(&call("/"))).await else { panic!() };
    let UpstreamError::Failed { failure, detail } = error else { panic!("{error:?}") };
    assert!(failure == UpstreamFailure::Unreachable && detail.contains("allows no requests"), "{failure} {detail}");
}

/// Serves HTTP/2. Refuses the calls for which this returns true.
async fn refuse(stream: TlsStream<TcpStream>, refuses: impl Fn(&str) -> bool) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, mut answer))) = connection.accept().await {
        if refuses(request.uri().path()) {
            answer.send_reset(Reason::REFUSED_STREAM);
        } else {
            let mut body = answer.send_response(http::Response::new(()), false).unwrap();
            body.send_data(Bytes::from_static(b"well"), true).unwrap();
        }
    }
}

#[tokio::test]
async fn a_call_that_the_server_refuses_goes_out_on_another_connection() {
    let server = scripted(|number, stream| refuse(stream, move |path| number == 0 && path == "/refused")).await;
    assert_eq!(text(server.send(&call("/")).await.unwrap()).await, "well");
    let calls = (0..8).map(|_| async { text(server.send(&call("/refused")).await.unwrap()).await });
    assert!(in_time(join_all(calls)).await.iter().all(|text| text == "well"));
    // A server that always refuses is unreachable.
    let server = scripted(|_, stream| refuse(stream, |_| true)).await;
    let Err(error) = in_time(server.send(&call("/"))).await else { panic!() };
    assert!(matches!(error, UpstreamError::Failed { failure: UpstreamFailure::Unreachable, .. }), "{error:?}");
}

/// A frame (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Reads frames until one has this kind.
async fn read_frame(stream: &mut TlsStream<TcpStream>, kind: u8) {
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header).await.unwrap();
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        stream.read_exact(&mut vec![0; length as usize]).await.unwrap();
        if header[3] == kind {
            return;
        }
    }
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Begins a reply to the first call, and shuts down when the second one has come, with this stream as the last one that it
/// processes. Returns after it has ended the first reply.
async fn shut_down(stream: &mut TlsStream<TcpStream>, last: u8) {
    stream.read_exact(&mut [0; 24]).await.unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    read_frame(stream, HEADERS).await;
    // The field `:status: 200` (RFC 7541, appendix A).
    stream.write_all(&frame(HEADERS, END_HEADERS, 1, &[0x88])).await.unwrap();
    read_frame(stream, HEADERS).await;
    let last_and_no_error = [0, 0, 0, last, 0, 0, 0, 0];
    stream.write_all(&frame(GOAWAY, 0, 0, &last_and_no_error)).await.unwrap();
    stream.write_all(&frame(DATA, END_STREAM, 1, b"well")).await.unwrap();
}

#[tokio::test]
async fn a_call_that_came_after_the_servers_last_one_goes_out_on_another_connection() {
    let server = scripted(|number, mut stream| async move {
        if number == 0 {
            shut_down(&mut stream, 1).await;
            std::future::pending().await
        }
        refuse(stream, |_| false).await;
    });
    let server = server.await;
    let first = in_time(server.send(&call("/"))).await.unwrap();
    let second = in_time(server.send(&call("/"))).await.unwrap();
    assert_eq!([text(first).await, text(second).await], ["well", "well"]);
}

#[tokio::test]
async fn a_call_that_the_server_may_have_processed_goes_out_once() {
    let n_connections = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&n_connections);
    // The second call has stream 3: the server takes it, and closes the connection.
    let server = scripted(move |_, mut stream| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move { shut_down(&mut stream, 3).await }
    });
    let server = server.await;
    let first = in_time(server.send(&call("/"))).await.unwrap();
    let Err(error) = in_time(server.send(&call("/"))).await else { panic!() };
    assert!(matches!(error, UpstreamError::Failed { failure: UpstreamFailure::Unreachable, .. }), "{error:?}");
    assert_eq!((text(first).await.as_str(), n_connections.load(Ordering::SeqCst)), ("well", 1));
}
