//! Clients that leave, that do not read, that break connections, and that send bombs. What they get does not matter, as long
//! as nobody else notices them.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// What a client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Misconduct {
    /// Leaves in the middle of a stream.
    Leaving,
    /// Reads nothing of a long stream over HTTP/1.1.
    Deaf,
    /// Reads nothing of a long stream over HTTP/2, with the smallest window.
    DeafHttp2,
    /// Resets the connection in the middle of its request.
    Reset,
    /// Sends a small body that decompresses into a large one.
    Bomb,
    /// Sends what is no request.
    Garbage,
}

use Misconduct::{Bomb, Deaf, DeafHttp2, Garbage, Leaving, Reset};

impl Misconduct {
    pub(super) const ALL: [Misconduct; 6] = [Leaving, Deaf, DeafHttp2, Reset, Bomb, Garbage];

    /// Time between two of them.
    fn pause(self) -> Duration {
        Duration::from_millis(match self {
            Leaving | Reset | Garbage => 700,
            Deaf | DeafHttp2 => 4_000,
            Bomb => 10_000,
        })
    }
}

/// How many there were of each, and refusals that came with the wrong status.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) n: BTreeMap<Misconduct, u64>,
    pub(super) wrong: Vec<String>,
}

/// The time for which a deaf client keeps its connection.
const DEAF_FOR: Duration = Duration::from_secs(12);

/// Decompressed bytes of a bomb: the largest body that is accepted.
const BOMB_BYTES: usize = 32 << 20;

/// After this time without an answer, a bomb hangs.
const HUNG: Duration = Duration::from_secs(120);

/// Has all of them misbehave until `due`.
pub(super) async fn run(base: &str, model: &str, kinds: &[Misconduct], due: Instant) -> Counts {
    let counts = Mutex::new(Counts::default());
    let bomb = bomb(model);
    let each = kinds.iter().map(async |&kind| {
        while Instant::now() < due {
            // An error of the connection is what some of them want.
            let wrong = match kind {
                Leaving => leave(base, model).await,
                Deaf => deaf(base, model).await.err().map(|_| String::new()),
                DeafHttp2 => deaf_http2(base, model).await,
                Reset => reset(base, model).await.err().map(|_| String::new()),
                Bomb => send_bomb(base, &bomb).await,
                Garbage => garbage(base).await.err().map(|_| String::new()),
            };
            {
                let mut counts = counts.lock().unwrap();
                *counts.n.entry(kind).or_default() += 1;
                counts.wrong.extend(wrong.filter(|wrong| !wrong.is_empty()));
            }
            tokio::time::sleep(kind.pause()).await;
        }
    });
    futures::future::join_all(each).await;
    counts.into_inner().unwrap()
}

fn long_stream(model: &str) -> Value {
    let said = json!([{ "role": "user", "content": "go on" }]);
    json!({ "model": model, "messages": said, "stream": true, "ignore_eos": true, "max_tokens": 4_000, "seed": 7 })
}

fn request(model: &str) -> String {
    let body = long_stream(model).to_string();
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn address(base: &str) -> &str {
    base.trim_start_matches("http://")
}

async fn leave(base: &str, model: &str) -> Option<String> {
    let client = reqwest::Client::new();
    let call = client.post(format!("{base}/v1/chat/completions")).json(&long_stream(model)).send();
    let mut response = tokio::time::timeout(HUNG, call).await.ok()?.ok()?;
    let _ = tokio::time::timeout(Duration::from_secs(5), response.chunk()).await;
    None
}

async fn deaf(base: &str, model: &str) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4 << 10)?;
    let mut stream = socket.connect(address(base).parse().unwrap()).await?;
    stream.write_all(request(model).as_bytes()).await?;
    tokio::time::sleep(DEAF_FOR).await;
    Ok(())
}

async fn deaf_http2(base: &str, model: &str) -> Option<String> {
    let client = reqwest::Client::builder().http2_prior_knowledge().http2_initial_stream_window_size(1);
    let call = client.build().ok()?.post(format!("{base}/v1/chat/completions")).json(&long_stream(model)).send();
    let _unread = tokio::time::timeout(HUNG, call).await.ok()?.ok()?;
    tokio::time::sleep(DEAF_FOR).await;
    None
}

async fn reset(base: &str, model: &str) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address(base)).await?;
    let request = request(model);
    // Half of them in the body, half after it.
    let n = if rand::random() { request.len() / 2 } else { request.len() };
    stream.write_all(&request.as_bytes()[..n]).await?;
    tokio::time::sleep(Duration::from_millis(50)).await;
    stream.set_zero_linger()
}

async fn garbage(base: &str) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address(base)).await?;
    let bytes: [u8; 512] = rand::random();
    stream.write_all(&bytes).await?;
    let _ = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut [0; 512])).await;
    Ok(())
}

fn bomb(model: &str) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    write!(gzip, r#"{{"model":"{model}","messages":[{{"role":"user","content":"hi"}}],"more":[0"#).unwrap();
    gzip.write_all(&b",0".repeat(BOMB_BYTES / 2 - 64)).unwrap();
    gzip.write_all(b"]}").unwrap();
    gzip.finish().unwrap()
}

/// Returns what is wrong with the answer: it may be refused, or served as a short chat.
async fn send_bomb(base: &str, bomb: &[u8]) -> Option<String> {
    let call = reqwest::Client::new().post(format!("{base}/v1/chat/completions"));
    let call = call.header("content-encoding", "gzip").body(bomb.to_vec()).send();
    match tokio::time::timeout(HUNG, call).await {
        Err(_) => Some(format!("a bomb: hung for {HUNG:?}")),
        Ok(Ok(response)) if matches!(response.status().as_u16(), 200 | 400 | 413 | 429 | 503) => None,
        Ok(Ok(response)) => Some(format!("a bomb: HTTP {}", response.status())),
        Ok(Err(_)) => None,
    }
}
