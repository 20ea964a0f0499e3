//! HTTP/2 clients that read nothing, or that flood the server with frames. Frames are written byte by byte here, because
//! no client library sends such ones (RFC 9113).

use h2::client::SendRequest;

use super::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn settings(pairs: &[(u16, u32)]) -> Vec<u8> {
    let pairs = pairs.iter().map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat());
    frame(4, 0, 0, &pairs.collect::<Vec<_>>().concat())
}

/// A head: GET of `/health`, or a POST to it whose body follows. HPACK's static table, and literals without Huffman.
fn head(stream: u32, method: u8, flags: u8) -> Vec<u8> {
    let path = [&[0x04, 7][..], b"/health"].concat();
    let host = [&[0x01, 9][..], b"localhost"].concat();
    frame(1, flags, stream, &[&[method, 0x86][..], &path, &host].concat())
}

const GET: u8 = 0x82;
const POST: u8 = 0x83;

/// The window of a stream grows by `n` bytes.
fn window_update(stream: u32, n: u32) -> Vec<u8> {
    frame(8, 0, stream, &n.to_be_bytes())
}

/// Sends the flood, part by part, until the server closes the connection.
async fn is_closed(server: &TestServer, name: &str, mut flood: impl FnMut(u32) -> Vec<u8>) {
    let client = server.connect().await;
    let (mut replies, mut requests) = client.into_split();
    let reading = tokio::spawn(async move { tokio::io::copy(&mut replies, &mut tokio::io::sink()).await });
    let flooding = async {
        let mut part = [PREFACE, &settings(&[])].concat();
        let mut n_parts = 0;
        while requests.write_all(&part).await.is_ok() {
            part = (0..100).flat_map(|i| flood(n_parts + i)).collect();
            n_parts += 100;
        }
    };
    let closed = tokio::time::timeout(DEADLINE, flooding).await;
    assert!(closed.is_ok(), "a flood of {name} goes on");
    reading.abort();
}

/// The id of the n-th stream of a client.
fn id(n: u32) -> u32 {
    2 * n + 1
}

#[tokio::test]
async fn floods_of_frames_are_bounded_and_closed() {
    let server = start(hello()).await;
    is_closed(&server, "pings", |_| frame(6, 0, 0, &[0; 8])).await;
    is_closed(&server, "settings", |_| settings(&[(4, 1)])).await;
    is_closed(&server, "windows of one byte", |_| window_update(0, 1)).await;
    is_closed(&server, "priorities", |n| frame(2, 0, id(n), &[0, 0, 0, 0, 16])).await;
    is_closed(&server, "unknown frames", |_| frame(99, 0, 0, &[])).await;
    let reset = |n| frame(3, 0, id(n), &8_u32.to_be_bytes());
    is_closed(&server, "resets", |n| [head(id(n), GET, END_HEADERS | END_STREAM), reset(n)].concat()).await;
    // A window of 0 is an error, for which the server must reset the stream.
    let provoke = |n| [head(id(n), POST, END_HEADERS), window_update(id(n), 0)].concat();
    is_closed(&server, "errors that make the server reset", provoke).await;
    is_closed(&server, "refused streams", |n| head(id(n), POST, END_HEADERS)).await;
    let continued = |n| if n == 0 { head(1, GET, 0) } else { frame(9, 0, 1, &[]) };
    is_closed(&server, "continuations", continued).await;
    let empty = |n| if n == 0 { head(1, POST, END_HEADERS) } else { frame(0, 0, 1, &[]) };
    is_closed(&server, "empty data", empty).await;
    assert_eq!(server.get("/health").await.status, 200);
}

#[tokio::test]
async fn resets_of_requests_that_have_begun_are_bounded_too() {
    let server = start(hello()).await;
    let client = server.connect().await;
    let (mut replies, mut requests) = client.into_split();
    requests.write_all(&[PREFACE, &settings(&[])].concat()).await.unwrap();
    // The server has begun with these requests before they are reset, because it has answered the ping after them.
    let mut answered = async || loop {
        let mut header = [0; 9];
        replies.read_exact(&mut header).await?;
        let mut payload = vec![0; u32::from_be_bytes([0, header[0], header[1], header[2]]) as usize];
        replies.read_exact(&mut payload).await?;
        if header[3..5] == [6, 1] {
            return std::io::Result::Ok(());
        }
    };
    let resetting = async {
        for first in (0..).step_by(50) {
            let streams = || (first..first + 50).map(id);
            let heads = streams().flat_map(|id| head(id, POST, END_HEADERS)).chain(frame(6, 0, 0, &[0; 8]));
            let resets = streams().flat_map(|id| frame(3, 0, id, &8_u32.to_be_bytes()));
            let sent = requests.write_all(&heads.collect::<Vec<_>>()).await;
            if sent.is_err() || answered().await.is_err() {
                break;
            }
            if requests.write_all(&resets.collect::<Vec<_>>()).await.is_err() {
                break;
            }
        }
    };
    assert!(tokio::time::timeout(DEADLINE, resetting).await.is_ok(), "resets go on");
}

/// A client whose streams get a first window of this size, and whose connection has a large one.
async fn client_with_window(server: &TestServer, window: u32) -> SendRequest<bytes::Bytes> {
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window).initial_connection_window_size(1 << 24);
    let (client, connection) = builder.handshake(server.connect().await).await.unwrap();
    // It answers pings.
    tokio::spawn(connection);
    client.ready().await.unwrap()
}

/// Posts a chat and returns the head and the body, which is not read.
async fn post_chat(client: &mut SendRequest<bytes::Bytes>, stream: bool) -> http::Response<h2::RecvStream> {
    let request =
        http::Request::post("http://localhost/v1/chat/completions").header("content-type", "application/json");
    let (reply, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
    body.send_data(chat_body(json!({"stream": stream})).to_string().into(), true).unwrap();
    reply.await.unwrap()
}

/// Reads to the end of a body. Returns the error that cut it off.
async fn end_of(body: &mut h2::RecvStream) -> Option<h2::Error> {
    let end = async {
        while let Some(data) = body.data().await {
            if let Err(error) = data {
                return Some(error);
            }
        }
        None
    };
    tokio::time::timeout(DEADLINE, end).await.expect("the body ends")
}

/// Short, but long enough for a busy machine to send a reply meanwhile.
fn short_read_deadline() -> Limits {
    let connection = ConnectionDeadlines { read: Duration::from_secs(1), ..DEADLINES };
    Limits { connection, ..Limits::default() }
}

#[tokio::test]
async fn a_client_that_grants_no_window_loses_its_stream() {
    let long = "x".repeat(100 << 10);
    for (window, is_stream) in [(0, true), (0, false), (1, true), (1, false), (65_535, true)] {
        let events = (0..20).map(|_| text(0, &long)).chain([finished(0)]);
        let server = start_limited(emits(events), HttpConfig::default(), short_read_deadline()).await;
        let mut client = client_with_window(&server, window).await;
        let mut reply = post_chat(&mut client, is_stream).await;
        server.until_live(0).await;
        let error = end_of(reply.body_mut()).await;
        assert!(error.is_some_and(|error| error.is_reset()), "a window of {window}, a stream: {is_stream}");
    }
}

#[tokio::test]
async fn other_streams_of_a_connection_outlive_one_that_is_not_read() {
    let long = "x".repeat(100 << 10);
    let end_comes = Latch::default();
    let fake = acts([Act::Emit(text(0, &long)), Act::WaitFor(end_comes.clone()), Act::Emit(finished(0))]);
    let server = start_limited(fake, HttpConfig::default(), short_read_deadline()).await;
    let mut client = client_with_window(&server, 65_535).await;
    let mut read = post_chat(&mut client, true).await;
    let mut unread = post_chat(&mut client, true).await;
    server.until_live(2).await;
    let mut n_bytes = 0;
    while n_bytes < long.len() {
        let data = read.body_mut().data().await.unwrap().unwrap();
        read.body_mut().flow_control().release_capacity(data.len()).unwrap();
        n_bytes += data.len();
    }
    server.until_live(1).await;
    assert!(end_of(unread.body_mut()).await.is_some());
    // Its engine was silent for longer than the deadline; only time in which bytes wait counts.
    end_comes.open();
    assert!(end_of(read.body_mut()).await.is_none());
}
