//! `baton-bench mock`: a server that speaks enough of OpenAI's API to measure what stands in front of it.
//!
//! It must cost far less than that, so it reads only what it needs of a request and writes prepared bytes. Each token of a
//! stream is a write of its own. It is for loopback; it checks no key.

use std::cell::{Cell, RefCell};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use baton_proxy::http::edge::open_files;
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, signals};
use clap::Args;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::serve::stamps::clock_ns;

/// Limits of what a client may send and keep open.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_BODY_BYTES: usize = 64 << 20;
const MAX_HEADERS: usize = 100;
const MAX_CONNECTIONS: usize = 16_384;
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
const WRITE_DEADLINE: Duration = Duration::from_secs(60);

/// The most tokens of a reply.
const MAX_TOKENS: u32 = 1_000_000;

const MAX_INTERVAL_MS: u64 = 600_000;

/// A request to `/mock/interval-ms/N` changes the interval of later streams.
const INTERVAL_PATH: &str = "/mock/interval-ms/";

/// Options of `baton-bench mock`.
#[derive(Args)]
pub(crate) struct MockArgs {
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Milliseconds between two tokens of a stream; 0 writes without pause
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=MAX_INTERVAL_MS))]
    interval_ms: u64,
    /// Tokens of a reply if the request has no max_tokens
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_TOKENS)))]
    tokens: u32,
}

/// The state that all connections share.
struct MockServer {
    interval: Cell<Duration>,
    n_tokens: u32,
    n_connections: Cell<u64>,
    n_open: Cell<usize>,
    n_requests: Cell<u64>,
    /// JSON replies by their number of tokens, of the last request.
    prepared: RefCell<Option<PreparedReply>>,
}

/// A JSON reply, which is the same for all requests for it.
#[derive(Clone)]
struct PreparedReply {
    asked: AskedReply,
    response: Rc<[u8]>,
}

/// The parts of a request that change the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AskedReply {
    is_chat: bool,
    is_stream: bool,
    has_usage: bool,
    n_tokens: u32,
}

/// A request's line and where its body is.
struct RequestHead {
    is_post: bool,
    path: String,
    body: Range<usize>,
}

/// Serves until a signal stops it. Prints its address on the first line.
#[allow(clippy::print_stdout, reason = "the address is for the caller")]
pub(crate) async fn run(args: MockArgs) -> Result<(), CommandFailure> {
    open_files::raise_limit();
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    let unbound = |error| CommandFailure(format!("cannot listen on {}: {error}", args.listen));
    let listener = TcpListener::bind(args.listen).await.map_err(unbound)?;
    println!("baton-bench mock listens on http://{}", listener.local_addr()?);
    let server = Rc::new(MockServer {
        interval: Cell::new(Duration::from_millis(args.interval_ms)),
        n_tokens: args.tokens,
        n_connections: Cell::new(0),
        n_open: Cell::new(0),
        n_requests: Cell::new(0),
        prepared: RefCell::new(None),
    });
    tokio::select! {
        error = accept(&listener, &server) => Err(error.into()),
        () = stop.cancelled() => Ok(()),
    }
}

async fn accept(listener: &TcpListener, server: &Rc<MockServer>) -> io::Error {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => return error,
        };
        server.n_connections.set(server.n_connections.get() + 1);
        if server.n_open.get() >= MAX_CONNECTIONS {
            continue;
        }
        server.n_open.set(server.n_open.get() + 1);
        let server = Rc::clone(server);
        tokio::task::spawn_local(async move {
            // A client that leaves is no event here.
            let _ = serve(stream, &server).await;
            server.n_open.set(server.n_open.get() - 1);
        });
    }
}

/// Answers the requests of a connection one after another.
async fn serve(mut stream: TcpStream, server: &MockServer) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(16 << 10);
    loop {
        let reading = timeout(IDLE_DEADLINE, read_request(&mut stream, &mut buffer)).await?;
        let Some(request) = reading? else { return Ok(()) };
        server.answer(&mut stream, &request, &buffer[request.body.clone()]).await?;
        buffer.drain(..request.body.end);
    }
}

/// Reads a whole request into `buffer`. `None` at the end of the connection.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<RequestHead>> {
    loop {
        if let Some(head) = parse_head(buffer)? {
            let n_missing = head.body.end.saturating_sub(buffer.len());
            if n_missing > 0 {
                let start = buffer.len();
                buffer.resize(head.body.end, 0);
                stream.read_exact(&mut buffer[start..]).await?;
            }
            return Ok(Some(head));
        }
        if buffer.len() > MAX_HEAD_BYTES {
            return Err(io::Error::other("the head is too long"));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

/// The request at the start of `buffer`. `None` if its head is not complete.
fn parse_head(buffer: &[u8]) -> io::Result<Option<RequestHead>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(start) = request.parse(buffer).map_err(io::Error::other)? else { return Ok(None) };
    let mut length = 0;
    for header in request.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            let value = std::str::from_utf8(header.value).ok().and_then(|value| value.trim().parse().ok());
            length = value.filter(|n| *n <= MAX_BODY_BYTES).ok_or_else(|| io::Error::other("a wrong length"))?;
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(io::Error::other("a body without a length"));
        }
    }
    let path = request.path.unwrap_or_default().to_owned();
    Ok(Some(RequestHead { is_post: request.method == Some("POST"), path, body: start..start + length }))
}

impl MockServer {
    async fn answer(&self, stream: &mut TcpStream, request: &RequestHead, body: &[u8]) -> io::Result<()> {
        if let Some(ms) = request.path.strip_prefix(INTERVAL_PATH) {
            let interval = ms.parse().ok().filter(|ms| *ms <= MAX_INTERVAL_MS).map(Duration::from_millis);
            self.interval.set(interval.ok_or_else(|| io::Error::other("not an interval"))?);
            return write_whole(stream, &http_json("{}")).await;
        }
        if !request.is_post {
            return write_whole(stream, &self.listing(&request.path)).await;
        }
        self.n_requests.set(self.n_requests.get() + 1);
        let asked = AskedReply {
            is_chat: request.path.contains("chat"),
            is_stream: field(body, b"\"stream\"").is_some_and(|value| value.starts_with(b"true")),
            has_usage: field(body, b"\"include_usage\"").is_some_and(|value| value.starts_with(b"true")),
            n_tokens: n_tokens(body).unwrap_or(self.n_tokens),
        };
        if asked.is_stream {
            return self.stream(stream, asked).await;
        }
        let prepared = self.prepared.borrow().clone().filter(|prepared| prepared.asked == asked);
        let prepared = prepared.unwrap_or_else(|| {
            let prepared = PreparedReply { asked, response: http_json(&whole_reply(asked)).into() };
            self.prepared.replace(Some(prepared.clone()));
            prepared
        });
        write_whole(stream, &prepared.response).await
    }

    /// The answer to a GET: counts, and otherwise what lists of models and checks of health need.
    fn listing(&self, path: &str) -> Vec<u8> {
        http_json(&match path {
            "/mock/counts" => {
                let (connections, requests) = (self.n_connections.get(), self.n_requests.get());
                format!(r#"{{"connections":{connections},"requests":{requests}}}"#)
            }
            _ => {
                let model = r#"{"id":"mock","object":"model","created":1,"owned_by":"mock"}"#;
                format!(r#"{{"object":"list","model_path":"mock","served_model_name":"mock","data":[{model}]}}"#)
            }
        })
    }

    /// Writes a stream. Streams tick at different times of the interval.
    async fn stream(&self, stream: &mut TcpStream, asked: AskedReply) -> io::Result<()> {
        let mut out = Vec::with_capacity(1 << 10);
        out.extend_from_slice(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n",
        );
        if asked.is_chat {
            chunk(&mut out, r#"{"role":"assistant","content":""}"#, None, asked);
        }
        write_whole(stream, &out).await?;
        let interval = self.interval.get();
        let phase = interval.mul_f64(self.n_requests.get().wrapping_mul(7919) as f64 % 997.0 / 997.0);
        let mut due = Instant::now() + phase;
        for index in 0..asked.n_tokens {
            if interval.is_zero() {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep_until(due).await;
                due += interval;
            }
            out.clear();
            let ns = clock_ns();
            match asked.is_chat {
                true => chunk(&mut out, &format!(r#"{{"content":"{index}:{ns} "}}"#), None, asked),
                false => chunk(&mut out, &format!(r#""{index}:{ns} ""#), None, asked),
            }
            write_whole(stream, &out).await?;
        }
        out.clear();
        chunk(&mut out, if asked.is_chat { "{}" } else { "\"\"" }, Some("length"), asked);
        if asked.has_usage {
            event(&mut out, &format!("{}\"choices\":[],\"usage\":{}}}", reply_head(asked), usage(asked)));
        }
        event(&mut out, "[DONE]");
        out.extend_from_slice(b"0\r\n\r\n");
        write_whole(stream, &out).await
    }
}

/// What follows a field's name and colon in a body, without parsing the body: its clients are known.
fn field<'a>(body: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let at = memchr::memmem::rfind(body, name)?;
    body[at + name.len()..].trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start)
}

fn n_tokens(body: &[u8]) -> Option<u32> {
    let value = field(body, b"\"max_tokens\"").or_else(|| field(body, b"\"max_completion_tokens\""))?;
    let n_digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let n: u32 = std::str::from_utf8(&value[..n_digits]).ok()?.parse().ok()?;
    Some(n.clamp(1, MAX_TOKENS))
}

/// The start of an event or a JSON reply, up to its choices.
fn reply_head(asked: AskedReply) -> &'static str {
    match (asked.is_chat, asked.is_stream) {
        (true, true) => r#"{"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1,"model":"mock","#,
        (true, false) => r#"{"id":"chatcmpl-mock","object":"chat.completion","created":1,"model":"mock","#,
        (false, _) => r#"{"id":"cmpl-mock","object":"text_completion","created":1,"model":"mock","#,
    }
}

/// A chunk with one choice. `text` is the value of its `delta` or `text`.
fn chunk(out: &mut Vec<u8>, text: &str, finish: Option<&str>, asked: AskedReply) {
    let name = if asked.is_chat { "delta" } else { "text" };
    let head = reply_head(asked);
    let data = match finish {
        None => format!(r#"{head}"choices":[{{"index":0,"{name}":{text},"logprobs":null,"finish_reason":null}}]}}"#),
        Some(finish) => {
            format!(r#"{head}"choices":[{{"index":0,"{name}":{text},"logprobs":null,"finish_reason":"{finish}"}}]}}"#)
        }
    };
    event(out, &data);
}

/// An event as one chunk of HTTP.
fn event(out: &mut Vec<u8>, data: &str) {
    // Writing to a Vec cannot fail.
    let _ = write!(out, "{:x}\r\ndata: {data}\n\n\r\n", data.len() + "data: \n\n".len());
}

fn usage(asked: AskedReply) -> String {
    let n = asked.n_tokens;
    format!(r#"{{"prompt_tokens":10,"completion_tokens":{n},"total_tokens":{}}}"#, n + 10)
}

fn whole_reply(asked: AskedReply) -> String {
    let text: String = (0..asked.n_tokens).map(|index| format!("{index}:0 ")).collect();
    let text = match asked.is_chat {
        true => format!(r#""message":{{"role":"assistant","content":"{text}"}}"#),
        false => format!(r#""text":"{text}""#),
    };
    let choice = format!(r#"{{"index":0,{text},"logprobs":null,"finish_reason":"length"}}"#);
    format!(r#"{}"choices":[{choice}],"usage":{}}}"#, reply_head(asked), usage(asked))
}

fn http_json(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into()
}

/// Writes at once what the socket takes. Only a client that does not read costs a timer.
async fn write_whole(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    let n = match stream.try_write(bytes) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
        written => written.unwrap_or(0),
    };
    if n < bytes.len() {
        timeout(WRITE_DEADLINE, stream.write_all(&bytes[n..])).await??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_far_as_it_matters() {
        let request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloGET";
        let head = parse_head(request).unwrap().unwrap();
        assert!(head.is_post && head.path == "/v1/chat/completions");
        assert_eq!(&request[head.body], b"hello");
        assert!(parse_head(b"POST / HTTP/1.1\r\nContent-Le").unwrap().is_none());
        assert!(parse_head(b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n").is_err());
        assert_eq!(n_tokens(br#"{"a":1,"max_tokens" : 17}"#), Some(17));
        assert_eq!(n_tokens(br#"{"max_completion_tokens":4,"b":1}"#), Some(4));
        assert_eq!(n_tokens(br#"{"max_tokens":null}"#), None);
    }

    #[test]
    fn replies_are_json() {
        for is_chat in [true, false] {
            let asked = AskedReply { is_chat, is_stream: false, has_usage: true, n_tokens: 3 };
            let reply: serde_json::Value = serde_json::from_str(&whole_reply(asked)).unwrap();
            assert_eq!(reply["usage"]["total_tokens"], 13);
        }
    }
}
