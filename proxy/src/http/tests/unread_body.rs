use std::io::{self, Read, Write};
use std::net;

use super::bodies::{stalled_uploads, with_keys};
use super::*;
use crate::account::KeyLimits;

/// Posts 16 MB, more than the system buffers, as a client that writes the whole body before it reads.
async fn write_then_read(server: &TestServer, key: &str) -> io::Result<String> {
    let address = server.address;
    let body = chat_body(json!({"user": "x".repeat(16_000_000)})).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\
         Connection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let exchange = move || {
        let mut client = net::TcpStream::connect(address)?;
        client.set_read_timeout(Some(DEADLINE))?;
        client.write_all(head.as_bytes())?;
        client.write_all(body.as_bytes())?;
        let mut reply = String::new();
        client.read_to_string(&mut reply)?;
        Ok(reply)
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}

/// A reply to a head whose body comes later, or never, and what the connection does then.
struct Early<'a> {
    head: &'a str,
    n_body: usize,
}

impl Early<'_> {
    /// Sends the head, then the body once the server has decided the reply. Returns the connection and the reply.
    async fn sent(&self, server: &TestServer, sends: bool) -> (TcpStream, String) {
        let mut client = server.connect().await;
        let head = format!("{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", self.head, self.n_body);
        let n_replied = || server.fake.replies.lock().unwrap().len();
        let n_before = n_replied();
        client.write_all(head.as_bytes()).await.unwrap();
        if sends {
            eventually("the reply to the head", async || n_replied() > n_before).await;
            client.write_all(&vec![b' '; self.n_body]).await.unwrap();
        }
        let reply = read_reply(&mut client).await;
        (client, reply)
    }
}

/// One reply with a `content-length`, and nothing of the next.
async fn read_reply(client: &mut TcpStream) -> String {
    let mut read = Vec::new();
    let whole = async {
        loop {
            let text = String::from_utf8_lossy(&read).to_ascii_lowercase();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let len = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
                if body.len() >= len.parse::<usize>().unwrap() {
                    return;
                }
            }
            assert_ne!(client.read_buf(&mut read).await.unwrap(), 0, "closed after {text:?}");
        }
    };
    tokio::time::timeout(Duration::from_secs(10), whole).await.expect("no reply came");
    String::from_utf8(read).unwrap()
}

fn says_close(reply: &str) -> bool {
    reply.to_ascii_lowercase().contains("\r\nconnection: close\r\n")
}

#[tokio::test]
async fn a_reply_that_needs_no_body_leaves_the_connection_good() {
    let server = start(hello()).await;
    for (head, status) in [("POST /v1/responses/compact", 404), ("POST /v1/models", 405), ("DELETE /v1/messages", 405)]
    {
        let (mut client, reply) = Early { head, n_body: 5_000 }.sent(&server, true).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")) && !says_close(&reply), "{head}: {reply}");
        client.write_all(chat_bytes(json!({}), "keep-alive").as_bytes()).await.unwrap();
        let next = read_reply(&mut client).await;
        assert!(next.starts_with("HTTP/1.1 200 "), "{head}: {next}");
    }
}

#[tokio::test]
async fn a_reply_to_a_caller_without_a_key_leaves_the_connection_good() {
    let access = AccessConfig { api_keys: vec!["one".into()], ..AccessConfig::default() };
    let server = start_with(hello(), HttpConfig { access, ..HttpConfig::default() }).await;
    let (mut client, reply) = Early { head: "POST /v1/chat/completions", n_body: 5_000 }.sent(&server, true).await;
    assert!(reply.starts_with("HTTP/1.1 401 ") && !says_close(&reply), "{reply}");
    client.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    assert!(read_reply(&mut client).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_body_that_does_not_arrive_or_end_closes_the_connection_with_a_notice() {
    let server = start(hello()).await;
    for (n_body, sends) in [(5_000, false), (5 << 20, false)] {
        let (mut client, reply) = Early { head: "POST /nope", n_body }.sent(&server, sends).await;
        assert!(reply.starts_with("HTTP/1.1 404 ") && says_close(&reply), "{reply}");
        assert_eq!(client.read(&mut [0; 1]).await.unwrap_or(0), 0, "the connection is closed");
    }
    let mut waiting = server.connect().await;
    let head = "POST /nope HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n";
    waiting.write_all(head.as_bytes()).await.unwrap();
    let reply = read_reply(&mut waiting).await;
    assert!(reply.starts_with("HTTP/1.1 404 ") && says_close(&reply), "{reply}");
}

#[tokio::test]
async fn a_body_without_an_end_is_not_read_for_ever() {
    let server = start_with(hello(), HttpConfig { max_body_bytes: 1 << 20, ..HttpConfig::default() }).await;
    let mut client = server.connect().await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    let chunk = [b"100000\r\n".as_slice(), &vec![b' '; 1 << 20], b"\r\n"].concat();
    let (mut reader, mut writer) = client.split();
    let sends = async {
        for n_mib in 0..1_024 {
            if writer.write_all(&chunk).await.is_err() {
                return n_mib;
            }
        }
        panic!("a gibibyte was read");
    };
    let mut reply = Vec::new();
    let (n_mib, _) = tokio::join!(sends, reader.read_to_end(&mut reply));
    assert!(n_mib < 128, "{n_mib} MiB were read");
    let reply = String::from_utf8_lossy(&reply);
    assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 413 ") && says_close(&reply), "{reply}");
}

#[tokio::test]
async fn a_client_that_sends_a_long_body_learns_when_to_try_again() {
    let limits = KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() };
    let access = with_keys(&["limited"], &limits);
    let server = start_with(hello(), HttpConfig { access, ..HttpConfig::default() }).await;
    let refused = server.post().bearer_auth("limited").body("[]").send().await.unwrap();
    assert_eq!(refused.status(), 400, "that is the request of this minute");
    let limited = write_then_read(&server, "limited").await.unwrap();
    assert!(limited.starts_with("HTTP/1.1 429 ") && limited.contains("\r\nretry-after: "), "{limited}");

    let access = with_keys(&["greedy"], &KeyLimits::default());
    let greedy = Arc::clone(&access.keys[0].account);
    let server = start_with(hello(), HttpConfig { access, ..HttpConfig::default() }).await;
    let _stalled = stalled_uploads(&server, &greedy).await;
    let refused = write_then_read(&server, "greedy").await.unwrap();
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("\r\nretry-after: "), "{refused}");
}
