use bytes::Bytes;
use http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::*;

/// The time that an idle connection has here.
const IDLE: Duration = Duration::from_millis(500);

/// A condition that has not come by then never comes. Less than two of hyper's pings, which also close a connection.
const DEADLINE: Duration = Duration::from_secs(20);

/// Serves one connection. The reply's body takes as long as the request's path says, in milliseconds.
fn connect() -> (Connections, DuplexStream) {
    let long = Duration::from_secs(600);
    let mut connections =
        Connections::new(ConnectionDeadlines { first_head: long, head: IDLE, read: long }, 16 << 10, 1);
    let place = ConnectionPlace(Arc::clone(&connections.places).try_acquire_owned().unwrap());
    let (client, server) = tokio::io::duplex(64 << 10);
    connections.serve(place, std::future::ready(Some(server)), |request| async move {
        let millis = request.uri().path().trim_start_matches('/').parse().unwrap();
        let body = futures::stream::once(async move {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            Ok::<_, Infallible>(Bytes::from_static(b"late"))
        });
        Response::new(Body::from_stream(body))
    });
    (connections, client)
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
