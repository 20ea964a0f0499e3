use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};

use super::*;
use crate::account::request_memory::RequestMemory;
use crate::account::{Account, KeyLimits};
use crate::http::{ConfiguredKey, key_hash};

/// Keys with the same limits.
pub(super) fn with_keys(names: &[&str], limits: &KeyLimits) -> AccessConfig {
    let keys = names.iter().map(|name| ConfiguredKey {
        hash: key_hash(name.as_bytes()),
        expires: None,
        account: Arc::new(Account::new(*name, limits.clone())),
    });
    AccessConfig { keys: keys.collect(), ..AccessConfig::default() }
}

/// Uploads of this account that stop when they have filled its share of the memory for large bodies.
pub(super) async fn stalled_uploads(server: &TestServer, account: &Account) -> Vec<TcpStream> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n",
        account.name,
        26 << 20
    );
    let upload = [head.as_bytes(), &vec![b' '; 25 << 20]].concat();
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = server.connect().await;
        client.write_all(&upload).await.unwrap();
        clients.push(client);
    }
    let memory = account.memory.as_ref().unwrap();
    eventually("the key's memory to be full", async || memory.large_left() == 0).await;
    clients
}

const LIMIT: usize = 64 << 10;

async fn small_server() -> TestServer {
    start_with(hello(), HttpConfig { max_body_bytes: LIMIT, ..HttpConfig::default() }).await
}

impl TestServer {
    async fn send(&self, encoding: &str, body: impl Into<reqwest::Body>) -> Reply {
        Reply::of(self.post().header("content-encoding", encoding).body(body).send().await.unwrap()).await
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn bare_deflate(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 19).unwrap()
}

/// A sound request of this many bytes.
fn padded(len: usize) -> Vec<u8> {
    let empty = chat_body(json!({"user": ""})).to_string().len();
    chat_body(json!({"user": "x".repeat(len - empty)})).to_string().into_bytes()
}

#[tokio::test]
async fn json_is_read_whatever_its_type_says() {
    let server = small_server().await;
    for kind in
        ["application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8", "multipart/nonsense"]
    {
        let post = server.post().header("content-type", kind).body(chat_body(json!({})).to_string());
        assert_eq!(post.send().await.unwrap().status(), 200, "{kind}");
    }
    assert_eq!(server.post().body(chat_body(json!({})).to_string()).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn compressed_bodies_are_read() {
    let server = small_server().await;
    let body = padded(LIMIT);
    for (encoding, compressed) in [
        ("identity", body.clone()),
        ("gzip", gzip(&body)),
        ("zstd", zstd(&body)),
        ("deflate", zlib(&body)),
        ("deflate", bare_deflate(&body)),
    ] {
        let reply = server.send(encoding, compressed).await;
        assert_eq!(reply.status, 200, "{encoding}: {}", reply.text);
    }
}

#[tokio::test]
async fn what_a_body_becomes_is_charged_while_it_is_held() {
    let gate = Latch::default();
    let config = HttpConfig::default();
    let memory = Arc::clone(&config.memory);
    let server = start_with(Fake { before: vec![Act::WaitFor(gate.clone())], ..hello() }, config).await;
    let schema = json!({ "enum": vec![json!([0]); 5_000] });
    let body = chat_body(json!({ "json_schema": schema })).to_string();
    assert!(body.len() < 24 << 10);
    let reply = tokio::spawn(server.post().body(body).send());
    eventually("its values to be charged", async || memory.in_use().held > 500 << 10).await;
    gate.open();
    assert_eq!(reply.await.unwrap().unwrap().status(), 200);
    eventually("it to be given back", async || memory.in_use().held == 0).await;
    assert_eq!(memory.in_use().n_refused, 0);
}

#[tokio::test]
async fn a_reply_without_end_that_is_collected_is_503_before_it_fills_the_memory() {
    let config = HttpConfig { memory: RequestMemory::new(40 << 20, 8 << 20), ..HttpConfig::default() };
    let memory = Arc::clone(&config.memory);
    let long = "x".repeat(1 << 20);
    let server = start_with(emits([started(0)].into_iter().chain((0..64).map(|_| text(0, &long)))), config).await;
    for path in ["/v1/chat/completions", "/v1/messages", "/api/chat"] {
        let reply = server.post_to(path, chat_body(json!({ "stream": false, "max_tokens": 5 }))).await;
        assert_eq!(reply.status, 503, "{path}: {}", reply.text);
    }
    assert_eq!(memory.in_use().n_refused, 3);
    // The backend keeps what it was asked, and with it each request's hold.
    server.fake.requests.lock().unwrap().clear();
    eventually("the memory to be given back", async || memory.in_use().held == 0).await;
}

#[tokio::test]
async fn overlong_bodies_are_413_before_and_after_decompression() {
    let server = small_server().await;
    let plain = padded(LIMIT + 1);
    let bomb = vec![b' '; 50 << 20];
    for (encoding, body) in [
        ("identity", plain.clone()),
        ("identity", vec![b' '; 20 << 20]),
        ("gzip", gzip(&plain)),
        ("gzip", gzip(&bomb)),
        ("zstd", zstd(&plain)),
        ("zstd", zstd(&bomb)),
        ("deflate", zlib(&bomb)),
        ("deflate", bare_deflate(&bomb)),
    ] {
        server.send(encoding, body).await.failed(413, "invalid_request_error", None);
    }
    // Without a declared length it is the count that tells.
    let chunks = futures::stream::iter((0..100).map(|_| Ok::<_, std::io::Error>(vec![b' '; 4096])));
    let post = server.post().body(reqwest::Body::wrap_stream(chunks));
    Reply::of(post.send().await.unwrap()).await.failed(413, "invalid_request_error", None);
    // A client that sends `Expect: 100-continue` gets the error before it sends a body.
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        LIMIT + 1
    );
    let reply = server.raw(head.as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 413") && reply.contains(r#"{"error""#), "{reply}");
}

#[tokio::test]
async fn unknown_and_corrupt_encodings_are_refused() {
    let server = small_server().await;
    for encoding in ["br", "gzip, zstd", "nonsense"] {
        server.send(encoding, "{}").await.failed(415, "invalid_request_error", None);
    }
    let body = padded(4000);
    for (encoding, corrupt) in [
        ("gzip", b"not gzip".to_vec()),
        ("gzip", gzip(&body)[..30].to_vec()),
        ("zstd", b"not zstd".to_vec()),
        ("zstd", zstd(&body)[..20].to_vec()),
        ("deflate", zlib(&body)[..20].to_vec()),
        ("zstd", vec![]),
    ] {
        server.send(encoding, corrupt).await.failed(400, "invalid_request_error", None);
    }
}

#[tokio::test]
async fn bodies_that_are_no_request_are_400_and_never_500() {
    let server = small_server().await;
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"{".to_vec(),
        b"[]".to_vec(),
        b"null".to_vec(),
        b"prompt=hello&max_tokens=3".to_vec(),
        b"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"\xFF\xFE\"}]}".to_vec(),
        br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":NaN}"#.to_vec(),
        br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":Infinity}"#.to_vec(),
        br#"{"model":"m","model":"n","messages":[{"role":"user","content":"hi"}]}"#.to_vec(),
        br#"{"model":"m","messages":[{"role":"assistant","tool_calls":[{"function":{}}]}]}"#.to_vec(),
        "[".repeat(50_000).into_bytes(),
        chat_body(json!({"temperature": 9})).to_string().into_bytes(),
    ];
    for body in bodies {
        server.send("identity", body).await.failed(400, "invalid_request_error", None);
    }
    let error = server.chat(json!({"top_logprobs": 21, "logprobs": true})).await;
    assert_eq!(error.failed(400, "invalid_request_error", None)["param"], "top_logprobs");
    let tools = server.chat(json!({"tools": [{"type": "function", "function": {"name": "a b"}}]})).await;
    assert_eq!(tools.failed(400, "invalid_request_error", None)["param"], "tools[0].function.name");
    let old = server.chat(json!({"functions": [{"name": "a b"}]})).await;
    assert_eq!(old.failed(400, "invalid_request_error", None)["param"], "functions[0].name");
    assert!(server.fake.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_408() {
    let config = HttpConfig { body_deadline: SOON * 3, ..HttpConfig::default() };
    let server = start_with(hello(), config).await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{";
    let reply = server.raw(head.as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 408") && reply.contains(r#""type":"invalid_request_error""#), "{reply}");
}

#[tokio::test]
async fn a_compressed_body_grows_a_hundredfold_at_most() {
    let server = start(hello()).await;
    let bomb = padded(8 << 20);
    for (encoding, body) in [("gzip", gzip(&bomb)), ("zstd", zstd(&bomb)), ("deflate", bare_deflate(&bomb))] {
        let reply = server.send(encoding, body).await;
        let error = reply.failed(413, "invalid_request_error", None);
        assert!(error["message"].as_str().unwrap().contains("100 times"), "{encoding}: {error}");
    }
    assert_eq!(server.send("gzip", gzip(&padded(1 << 20))).await.status, 200, "a small body may grow more");
    assert_eq!(server.send("identity", bomb).await.status, 200);
    assert_eq!(server.fake.requests.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_body_of_countless_values_is_400() {
    let server = start(hello()).await;
    for unit in ["0", "{}", r#"{"a":0}"#] {
        let array = format!("[{unit}{}]", format!(",{unit}").repeat(1 << 20));
        let schema = format!(r#"{{"name":"f","parameters":{{"enum":{array}}}}}"#);
        let tools = format!(r#""tools":[{{"type":"function","function":{schema}}}]"#);
        for field in [format!(r#""messages":{array}"#), tools, format!(r#""chat_template_kwargs":{{"a":{array}}}"#)] {
            let head = chat_body(json!({})).to_string();
            let body = format!("{},{field}}}", head.strip_suffix('}').unwrap().replace("\"messages\"", "\"m\""));
            let error = server.send("identity", body).await.failed(400, "invalid_request_error", None);
            assert!(error["message"].as_str().unwrap().contains("too many values"), "{error}");
        }
        let ignored = chat_body(json!({"ignored": null})).to_string().replace("null", &array);
        assert_eq!(server.send("identity", ignored).await.status, 200, "what is skipped takes nothing: {unit}");
    }
}

#[tokio::test]
async fn a_refused_body_costs_a_request_and_without_one_no_body_is_read() {
    let limits = KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() };
    let access = with_keys(&["k"], &limits);
    let server = start_with(hello(), HttpConfig { access, ..HttpConfig::default() }).await;
    let invalid = server.post().bearer_auth("k").body("[]").send().await.unwrap();
    Reply::of(invalid).await.failed(400, "invalid_request_error", None);
    // The body never comes: a server that waited for it would first answer '100 Continue'.
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n\
                Expect: 100-continue\r\nContent-Length: 100\r\n\r\n";
    let reply = server.raw(head.as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 429") && reply.contains("rate_limit_exceeded"), "{reply}");
}

#[tokio::test]
async fn a_body_that_is_too_long_or_too_late_costs_a_request() {
    for (n_body, status) in [(LIMIT + 1, 413), (100, 408)] {
        let limits = KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() };
        let access = with_keys(&["k"], &limits);
        let config = HttpConfig { access, max_body_bytes: LIMIT, body_deadline: SOON * 3, ..HttpConfig::default() };
        let server = start_with(hello(), config).await;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n\
             Expect: 100-continue\r\nContent-Length: {n_body}\r\n\r\n"
        );
        let reply = server.raw(head.as_bytes()).await;
        assert!(reply.contains(&format!("HTTP/1.1 {status}")), "{reply}");
        let next = server.post().bearer_auth("k").json(&chat_body(json!({}))).send().await.unwrap();
        assert_eq!(next.status(), 429, "after {status}");
    }
}

#[tokio::test]
async fn uploads_that_stall_leave_room_for_other_keys() {
    let access = with_keys(&["greedy", "other"], &KeyLimits::default());
    let greedy = Arc::clone(&access.keys[0].account);
    let server = start_with(hello(), HttpConfig { access, ..HttpConfig::default() }).await;
    let _stalled = stalled_uploads(&server, &greedy).await;
    let refused = server.post().bearer_auth("greedy").body(padded(2 << 20)).send().await.unwrap();
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    for n_mib in [30, 1] {
        let post = server.post().bearer_auth("other").body(padded(n_mib << 20)).send().await.unwrap();
        assert_eq!(post.status(), 200, "{n_mib} MiB");
    }
}

#[tokio::test]
async fn running_streams_give_back_the_memory_of_their_bodies() {
    let server = start(acts([Act::Emit(started(0)), Act::Emit(text(0, "Hel")), Act::Hang])).await;
    let body = chat_body(json!({"stream": true, "user": "x".repeat(31 << 20)})).to_string();
    let mut running = Vec::new();
    for n in 0..5 {
        let post = server.post().body(body.clone()).send().await.unwrap();
        assert_eq!(post.status(), 200, "stream {n}");
        running.push(post);
    }
    server.until_live(5).await;
}

/// Starts two streams with bodies of 31 MiB, and returns the status of a third large body.
async fn third_large_body(server: &TestServer, path: &str, fields: Value) -> (Vec<reqwest::Response>, u16) {
    let body = Bytes::from(fields.to_string());
    let post = || reqwest::Client::new().post(server.url(path)).body(body.clone()).send();
    let mut running = Vec::new();
    for n in 0..2 {
        let post = post().await.unwrap();
        assert_eq!(post.status(), 200, "stream {n}");
        running.push(post);
    }
    (running, post().await.unwrap().status().as_u16())
}

#[tokio::test]
async fn prompts_that_wait_keep_the_memory_of_their_body() {
    let gate = Latch::default();
    let before = vec![Act::WaitUnless("first", gate.clone())];
    let server = start(Fake { before, ..acts([Act::Emit(started(0)), Act::Emit(text(0, "Hel")), Act::Hang]) }).await;
    let fields = json!({"model": "m", "prompt": ["first", "x".repeat(31 << 20)], "stream": true});
    let body = chat_body(json!({"stream": true, "user": "x".repeat(31 << 20)})).to_string();
    let (_running, status) = third_large_body(&server, "/v1/completions", fields).await;
    assert_eq!(status, 503, "the second prompt of each waits with its text");
    gate.open();
    let fits = async || server.post().body(body.clone()).send().await.unwrap().status() == 200;
    eventually("the memory to be given back", fits).await;
}

#[tokio::test]
async fn a_reply_keeps_the_memory_of_its_tools_and_what_it_repeats() {
    let long = "x".repeat(31 << 20);
    let tool = json!({"type": "function", "function": {"name": "f", "description": long}});
    let message = json!([{"role": "user", "content": "hi"}]);
    for (path, fields) in [
        ("/v1/chat/completions", json!({"model": "m", "messages": message, "tools": [tool], "stream": true})),
        ("/v1/completions", json!({"model": "m", "prompt": long, "echo": true, "stream": true})),
    ] {
        let server = start(acts([Act::Emit(started(0)), Act::Emit(text(0, "Hel")), Act::Hang])).await;
        let (_running, status) = third_large_body(&server, path, fields).await;
        assert_eq!(status, 503, "{path}");
    }
}

#[tokio::test]
async fn a_hundred_agents_with_histories_of_a_megabyte_wait_for_their_places() {
    let gate = Latch::default();
    let server = start(Fake { before: vec![Act::WaitFor(gate.clone())], ..hello() }).await;
    let client = reqwest::Client::new();
    let url = server.url("/v1/chat/completions");
    let body = Bytes::from(padded(1_000_000));
    let mut posts = Vec::new();
    for n in 1..=130 {
        posts.push(tokio::spawn(client.post(&url).body(body.clone()).send()));
        if n % 10 == 0 {
            // They hold their bodies.
            server.until_live(n).await;
        }
    }
    gate.open();
    for post in posts {
        assert_eq!(post.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test]
async fn a_field_without_effect_is_named_in_the_header_of_every_dialects_reply() {
    let server = start(hello()).await;
    let said = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "m", "messages": said})),
        ("/v1/completions", json!({"model": "m", "prompt": "hi"})),
        ("/v1/responses", json!({"model": "m", "input": "hi"})),
        ("/v1/messages", json!({"model": "m", "messages": said, "max_tokens": 9})),
        ("/api/chat", json!({"model": "m", "messages": said})),
        ("/api/generate", json!({"model": "m", "prompt": "hi"})),
        ("/completion", json!({"prompt": "hi"})),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            assert_eq!(server.post_to(path, body.clone()).await.header("x-baton-warning"), "", "{path}");
            body["made_up"] = json!(1);
            let reply = server.post_to(path, body).await;
            assert_eq!(
                (reply.status, reply.header("x-baton-warning")),
                (200, "fields without effect: made_up"),
                "{path}"
            );
        }
    }
}
