use futures::StreamExt;
use tower::ServiceExt;

use super::*;

const ASKED: &[u8] = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Reads from a raw connection until the text is there.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut read = Vec::new();
    let found = async {
        while !String::from_utf8_lossy(&read).contains(text) {
            assert_ne!(
                stream.read_buf(&mut read).await.unwrap(),
                0,
                "closed after {:?}",
                String::from_utf8_lossy(&read)
            );
        }
    };
    let waited = tokio::time::timeout(DEADLINE, found).await;
    assert!(waited.is_ok(), "{:?} never came", text);
    String::from_utf8(read).unwrap()
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_wherever_it_is() {
    let streaming = || Act::Emit(text(0, "a"));
    for (fake, stream) in [
        (before([Act::Hang]), false),
        (before([Act::Hang]), true),
        (acts([Act::Emit(started(0)), Act::Hang]), false),
        (acts([Act::Emit(started(0)), Act::Hang]), true),
        (acts([streaming(), Act::Hang]), false),
        (acts([streaming(), Act::Hang]), true),
    ] {
        let server = start(fake).await;
        let mut client = server.connect().await;
        client.write_all(chat_bytes(json!({"stream": stream}), "keep-alive").as_bytes()).await.unwrap();
        until(&server.fake.n_hanging, 1).await;
        assert_eq!(server.n_live(), 1);
        drop(client);
        server.until_live(0).await;
    }
}

#[tokio::test]
async fn a_connection_is_good_for_more_after_a_stream() {
    let server = start(hello()).await;
    let mut client = server.connect().await;
    for _ in 0..3 {
        client.write_all(chat_bytes(json!({"stream": true}), "keep-alive").as_bytes()).await.unwrap();
        let reply = read_until(&mut client, "\r\n0\r\n\r\n").await;
        assert!(reply.contains("HTTP/1.1 200") && reply.contains("[DONE]"), "{reply}");
        client.write_all(chat_bytes(json!({}), "keep-alive").as_bytes()).await.unwrap();
        assert!(read_until(&mut client, "timings").await.contains("HTTP/1.1 200"));
        // And after a refusal.
        client.write_all(chat_bytes(json!({"n": 0}), "keep-alive").as_bytes()).await.unwrap();
        assert!(read_until(&mut client, "\"error\"").await.contains("HTTP/1.1 400"));
    }
}

#[tokio::test]
async fn a_stream_arrives_token_by_token() {
    let server = start(acts([Act::Emit(text(0, "first")), Act::Hang])).await;
    let mut client = server.connect().await;
    client.write_all(chat_bytes(json!({"stream": true}), "keep-alive").as_bytes()).await.unwrap();
    read_until(&mut client, "first").await;
}

#[tokio::test]
async fn half_sent_requests_do_not_delay_others() {
    let server = start(hello()).await;
    let mut idle = Vec::new();
    let whole = chat_bytes(json!({}), "close");
    for n in 0..64 {
        let mut client = server.connect().await;
        client.write_all(&whole.as_bytes()[..n * 2]).await.unwrap();
        idle.push(client);
    }
    assert_eq!(server.chat(json!({})).await.status, 200);
    // And each of them is still answered.
    for (n, client) in idle.iter_mut().enumerate().step_by(9) {
        client.write_all(&whole.as_bytes()[n * 2..]).await.unwrap();
        assert!(read_until(client, "timings").await.starts_with("HTTP/1.1 200"));
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = start(hello()).await;
    let requests = chat_bytes(json!({"stream": true}), "keep-alive")
        + "GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n"
        + &chat_bytes(json!({}), "close");
    let replies = server.raw(requests.as_bytes()).await;
    let at = |part: &str| replies.find(part).unwrap_or_else(|| panic!("{part:?} is not in {replies}"));
    assert!(at("[DONE]") < at("404 Not Found") && at("404 Not Found") < at("\"chat.completion\""));
}

#[tokio::test]
async fn http_1_0_is_spoken() {
    let server = start(hello()).await;
    let reply = server.raw(b"GET /health HTTP/1.0\r\n\r\n").await;
    assert!(reply.starts_with("HTTP/1.0 200") && reply.ends_with(r#"{"status":"ok"}"#), "{reply}");
    let body = chat_body(json!({"stream": true})).to_string();
    let request = format!("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let reply = server.raw(request.as_bytes()).await;
    assert!(reply.ends_with("data: [DONE]\n\n") && !reply.contains("chunked"), "{reply}");
}

#[tokio::test]
async fn http_2_is_spoken_without_tls() {
    let server = start(hello()).await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let post = client.post(server.url("/v1/chat/completions")).json(&chat_body(json!({"stream": true})));
    let response = post.send().await.unwrap();
    assert_eq!(response.version(), reqwest::Version::HTTP_2);
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn nonsense_and_giant_heads_end_one_connection_only() {
    let server = start(hello()).await;
    let giant = format!("GET /health HTTP/1.1\r\nHost: localhost\r\nCookie: {}\r\n\r\n", "x".repeat(200 << 10));
    let mut client = server.connect().await;
    // The server may close while we still write.
    let _ = client.write_all(giant.as_bytes()).await;
    server.raw(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").await;
    assert_eq!(server.get("/health").await.status, 200);
}

#[tokio::test]
async fn a_connection_that_never_asks_is_closed() {
    let connection = ConnectionDeadlines { first_head: SOON, ..DEADLINES };
    let server = start_limited(hello(), HttpConfig::default(), Limits { connection, ..Limits::default() }).await;
    for sent in [&b""[..], b"PRI * HT", b"GET /health HTTP/1.1\r\nHost: loc"] {
        let mut client = server.connect().await;
        client.write_all(sent).await.unwrap();
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(DEADLINE, client.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "still open after {:?}", String::from_utf8_lossy(sent));
    }
}

#[tokio::test]
async fn a_stopping_server_lets_streams_finish() {
    let end_comes = Latch::default();
    let mut server =
        start(acts([Act::Emit(text(0, "a")), Act::WaitFor(end_comes.clone()), Act::Emit(finished(0))])).await;
    let mut client = server.connect().await;
    client.write_all(chat_bytes(json!({"stream": true}), "keep-alive").as_bytes()).await.unwrap();
    read_until(&mut client, "assistant").await;
    let mut idle = server.connect().await;
    server.shutdown.begin.cancel();
    assert!(server.raw(ASKED).await.contains("stopping"), "the shutdown has begun");
    end_comes.open();
    read_until(&mut client, "[DONE]").await;
    assert_eq!(idle.read(&mut [0; 1]).await.unwrap(), 0, "an idle connection is closed");
    tokio::time::timeout(DEADLINE, &mut server.task).await.expect("the server ends").unwrap().unwrap();
    assert!(TcpStream::connect(server.address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn a_stopping_server_refuses_requests_until_its_streams_have_ended() {
    let fake = acts([Act::Emit(text(0, "a")), Act::Hang]);
    let mut server = start(fake).await;
    let mut streaming = server.connect().await;
    streaming.write_all(chat_bytes(json!({"stream": true}), "keep-alive").as_bytes()).await.unwrap();
    read_until(&mut streaming, "assistant").await;
    let mut kept = server.connect().await;
    kept.write_all(ASKED).await.unwrap();
    assert!(read_until(&mut kept, "\"ok\"}").await.starts_with("HTTP/1.1 200"));
    server.shutdown.begin.cancel();

    let check = |reply: &str| {
        let head = reply.to_lowercase();
        assert!(head.starts_with("http/1.1 503") && head.contains("connection: close"), "{reply}");
        assert!(reply.contains("the server is stopping"), "{reply}");
    };
    // `raw` reads until the server closes.
    check(&server.raw(ASKED).await);
    check(&server.raw(chat_bytes(json!({}), "keep-alive").as_bytes()).await);
    check(&server.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n").await);
    kept.write_all(ASKED).await.unwrap();
    let mut reply = String::new();
    kept.read_to_string(&mut reply).await.unwrap();
    check(&reply);
    assert_eq!(server.n_live(), 1, "what is refused is not begun");

    drop(streaming);
    let served = tokio::time::timeout(DEADLINE, &mut server.task).await;
    assert!(served.is_ok(), "nothing runs any more");
    assert!(TcpStream::connect(server.address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn requests_fail_with_an_error_at_the_drain_deadline_or_a_second_signal() {
    for waits in [true, false] {
        let drain_deadline = if waits { SOON } else { Duration::from_secs(600) };
        let fake = acts([Act::Emit(text(0, "a")), Act::Hang]);
        let limits = Limits { drain: drain_deadline, ..Limits::default() };
        let mut server = start_limited(fake, HttpConfig::default(), limits).await;
        let mut streaming = server.connect().await;
        streaming.write_all(chat_bytes(json!({"stream": true}), "keep-alive").as_bytes()).await.unwrap();
        read_until(&mut streaming, "assistant").await;
        let mut waiting = server.connect().await;
        waiting.write_all(chat_bytes(json!({}), "keep-alive").as_bytes()).await.unwrap();
        server.until_live(2).await;
        server.shutdown.begin.cancel();
        if !waits {
            assert!(server.raw(ASKED).await.contains("stopping"), "the shutdown has begun");
            assert_eq!(server.n_live(), 2, "the first signal ends nothing");
            server.shutdown.now.cancel();
        }
        let end = read_until(&mut streaming, "\r\n0\r\n\r\n").await;
        assert!(end.contains(r#"data: {"error":"#) && !end.contains("[DONE]"), "{end}");
        assert!(read_until(&mut waiting, "stopping").await.starts_with("HTTP/1.1 503"));
        let served = tokio::time::timeout(DEADLINE, &mut server.task).await;
        assert!(served.is_ok(), "the server ends");
        assert_eq!(server.n_live(), 0);
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_is_dropped_and_others_are_not_kept_waiting() {
    // More than the sockets' buffers take.
    let long = "x".repeat(64 << 10);
    let fake = acts((0..400).map(|_| Act::Emit(text(0, &long))).chain([Act::Emit(finished(0))]));
    // Long enough for a busy machine to start all streams meanwhile.
    let connection = ConnectionDeadlines { read: Duration::from_secs(1), ..DEADLINES };
    let server = start_limited(fake, HttpConfig::default(), Limits { connection, ..Limits::default() }).await;
    let mut deaf = Vec::new();
    for _ in 0..8 {
        let mut client = server.connect().await;
        client.write_all(chat_bytes(json!({"stream": true}), "keep-alive").as_bytes()).await.unwrap();
        deaf.push(client);
    }
    server.until_live(8).await;
    let reply = server.chat(json!({"stream": true})).await;
    assert!(reply.text.ends_with("data: [DONE]\n\n"), "a client that reads gets everything");
    server.until_live(0).await;
    drop(deaf);
}

#[tokio::test]
async fn invalid_http_is_answered_in_the_envelope() {
    let server = start(hello()).await;
    // All that a head may be, and no end. With more, what was not read would be answered with a reset.
    let start_of_long = "GET /health HTTP/1.1\r\nHost: localhost\r\ncookie: ";
    let long = format!("{start_of_long}{}", "x".repeat((64 << 10) - start_of_long.len()));
    let many = (0..200).map(|i| format!("h{i}: x\r\n")).collect::<String>();
    for (bytes, status) in [
        ("GET /health HTTP/1.1\r\nbad header\r\n\r\n".to_owned(), 400),
        ("nonsense\r\n\r\n".to_owned(), 400),
        (long, 431),
        (format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n"), 431),
    ] {
        let reply = server.raw(bytes.as_bytes()).await;
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")) && head.contains("x-request-id: req_"), "{reply}");
        let error: Value = serde_json::from_str(body).unwrap();
        assert_eq!(error["error"]["type"], "invalid_request_error", "{reply}");
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{reply}");
    }
    // And a sound request after them is answered.
    assert_eq!(server.get("/health").await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn the_first_byte_of_a_stream_leaves_within_ten_seconds() {
    let router = super::super::router(Arc::new(before([Act::Hang])), HttpConfig::default());
    for (path, body) in [
        ("/v1/chat/completions", chat_body(json!({"stream": true}))),
        ("/v1/responses", json!({"model": "m", "input": "hi", "stream": true})),
        (
            "/v1/messages",
            json!({"model": "m", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": "hi"}]}),
        ),
    ] {
        let asked = tokio::time::Instant::now();
        let request = http::Request::post(path).header("host", "localhost").header("content-type", "application/json");
        let reply =
            router.clone().oneshot(request.body(axum::body::Body::from(body.to_string())).unwrap()).await.unwrap();
        let first = reply.into_body().into_data_stream().next().await.unwrap().unwrap();
        assert!(!first.is_empty() && asked.elapsed() <= Duration::from_secs(10), "{path}: {:?}", asked.elapsed());
    }
}
