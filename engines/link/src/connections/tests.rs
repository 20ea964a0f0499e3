use bytes::Bytes;
use futures::StreamExt;
use http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::*;

/// The time that an idle connection has here.
const IDLE: Duration = Duration::from_millis(500);

/// A condition that has not come by then never comes. Less than two of hyper's pings, which also close a connection.
const DEADLINE: Duration = Duration::from_secs(20);

/// Serves one connection. The reply's body takes as long as the request's path says, in milliseconds.
fn connect() -> (Connections, DuplexStream) {
    connect_to(|request| async move {
        let millis = request.uri().path().trim_start_matches('/').parse().unwrap();
        let body = futures::stream::once(async move {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            Ok::<_, Infallible>(Bytes::from_static(b"late"))
        });
        Response::new(Body::from_stream(body))
    })
}

/// Serves one connection with these answers.
fn connect_to<F: Future<Output = Response<Body>> + Send + 'static>(
    answer: impl Fn(Request<Body>) -> F + Send + Sync + 'static,
) -> (Connections, DuplexStream) {
    let long = Duration::from_secs(600);
    let mut connections =
        Connections::new(ConnectionDeadlines { first_head: long, head: IDLE, read: long }, 16 << 10, 1);
    let place = ConnectionPlace(Arc::clone(&connections.places).try_acquire_owned().unwrap());
    let (client, server) = tokio::io::duplex(64 << 10);
    connections.serve(place, std::future::ready(Some(server)), answer);
    (connections, client)
}

/// Upgrades, and sends a piece after each of two pauses.
async fn upgraded(request: Request<Body>) -> Response<Body> {
    let pieces = futures::stream::iter(["one, ", "two"]).then(|piece| async move {
        tokio::time::sleep(2 * IDLE).await;
        vec![Bytes::from(piece), Bytes::new()]
    });
    sending(request, pieces).await
}

async fn sending(
    mut request: Request<Body>,
    pieces: impl futures::Stream<Item = Vec<Bytes>> + Send + 'static,
) -> Response<Body> {
    let offer = UpgradeOffer::of(&mut request, "pieces").unwrap();
    offer.accept(|io, _closing| send_pieces(io, pieces))
}

const UPGRADE_REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: node\r\nconnection: upgrade\r\nupgrade: Pieces\r\n\r\n";

#[tokio::test]
async fn a_stop_waits_for_an_upgraded_connection() {
    let (mut connections, mut client) = connect_to(upgraded);
    client.write_all(UPGRADE_REQUEST).await.unwrap();
    let mut reply = Vec::new();
    while !reply.ends_with(b"\r\n\r\n") {
        reply.push(client.read_u8().await.unwrap());
    }
    let (read, ()) = tokio::join!(client.read_to_end(&mut reply), connections.close());
    read.unwrap();
    assert!(reply.ends_with(b"\r\n\r\none, two"), "{}", String::from_utf8_lossy(&reply));
    assert_eq!(connections.places.available_permits(), 1);
}

#[tokio::test]
async fn an_upgraded_connection_ends_when_its_reader_leaves() {
    let (mut connections, mut client) = connect_to(|request| sending(request, futures::stream::pending()));
    client.write_all(UPGRADE_REQUEST).await.unwrap();
    client.read_u8().await.unwrap();
    assert_eq!(connections.places.available_permits(), 0);
    drop(client);
    let ended = connections.running.join_next();
    tokio::time::timeout(DEADLINE, ended).await.expect("the reply goes on").unwrap().unwrap();
    assert_eq!(connections.places.available_permits(), 1);
}

#[tokio::test]
async fn an_http_2_connection_is_closed_when_it_is_idle_and_not_before() {
    let (_connections, stream) = connect();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    // It answers pings for as long as the connection is open.
    let connection = tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let request = http::Request::get("http://node/2000").body(()).unwrap();
    let (reply, _) = client.send_request(request, true).unwrap();
    let reply = reply.await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
    assert_eq!(reply.into_body().data().await.unwrap().unwrap(), "late", "four times as long as an idle one may be");
    let closed = tokio::time::timeout(DEADLINE, connection).await;
    assert!(closed.expect("an idle connection stays open").unwrap().is_ok(), "the peer is told");
}

#[tokio::test]
async fn an_idle_http_2_connection_that_ignores_the_goodbye_is_cut_off() {
    let (_connections, mut stream) = connect();
    // GET /0, and no answer to any ping.
    let head = [&[0x82, 0x86, 0x04, 2][..], b"/0", &[0x01, 4], b"node"].concat();
    let head = [&[0, 0, head.len() as u8, 1, 5, 0, 0, 0, 1][..], &head].concat();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    stream.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..], &head].concat()).await.unwrap();
    let mut replies = Vec::new();
    let closed = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut replies)).await;
    assert!(closed.is_ok(), "an idle connection stays open");
}
