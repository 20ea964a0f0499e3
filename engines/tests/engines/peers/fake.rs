//! A prefill node that follows a test's script.

use std::future::Future;
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::recording::Recording;

/// A received request.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Call {
    /// Returns true if the request is for KV, and not for the node's description.
    pub(crate) fn is_pull(&self) -> bool {
        self.head.starts_with("POST /node/v1/prefill ")
    }

    /// Sends the same request to a real node, as HTTP alone. Returns the whole reply with its head.
    pub(crate) async fn relay(&self, address: &str) -> Recording {
        let mut upstream = TcpStream::connect(address).await.unwrap();
        let (first, rest) = self.head.split_once("\r\n").unwrap();
        let replaced = |line: &str| {
            let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
            ["content-length", "connection", "upgrade"].contains(&name.as_str())
        };
        let headers = rest.lines().filter(|line| !replaced(line));
        let headers: String = headers.map(|line| format!("{line}\r\n")).collect();
        let length = self.body.len();
        let head = format!("{first}\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n");
        upstream.write_all(head.as_bytes()).await.unwrap();
        upstream.write_all(&self.body).await.unwrap();
        let mut raw = Vec::new();
        upstream.read_to_end(&mut raw).await.unwrap();
        Recording::new(raw)
    }
}

type Script = Arc<dyn Fn(Call, TcpStream) -> BoxFuture<'static, ()> + Send + Sync>;

/// Replies to calls with a script, one on each connection. Dropping it closes all connections.
pub(crate) struct FakeNode {
    pub(crate) url: String,
    script: Arc<Mutex<Script>>,
    n_connections: Arc<Mutex<usize>>,
    _task: JoinSet<()>,
}

impl FakeNode {
    /// Listens on a new port. A connection closes when its script ends.
    pub(crate) async fn start<F: Future<Output = ()> + Send + 'static>(
        script: impl Fn(Call, TcpStream) -> F + Send + Sync + 'static,
    ) -> FakeNode {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let script: Arc<Mutex<Script>> = Arc::new(Mutex::new(boxed(script)));
        let n_connections = Arc::new(Mutex::new(0));
        let mut task = JoinSet::new();
        let scripts = Arc::clone(&script);
        let counter = Arc::clone(&n_connections);
        task.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                *counter.lock().unwrap() += 1;
                let scripts = Arc::clone(&scripts);
                connections.spawn(async move {
                    // A client may leave without a request.
                    let Some(call) = read_call(&mut stream).await else { return };
                    let script = Arc::clone(&scripts.lock().unwrap());
                    script(call, stream).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        FakeNode { url, script, n_connections, _task: task }
    }

    /// Uses this script from now on.
    pub(crate) fn follow<F: Future<Output = ()> + Send + 'static>(
        &self,
        script: impl Fn(Call, TcpStream) -> F + Send + Sync + 'static,
    ) {
        *self.script.lock().unwrap() = boxed(script);
    }

    /// The number of connections so far.
    pub(crate) fn n_connections(&self) -> usize {
        *self.n_connections.lock().unwrap()
    }
}

fn boxed<F: Future<Output = ()> + Send + 'static>(
    script: impl Fn(Call, TcpStream) -> F + Send + Sync + 'static,
) -> Script {
    Arc::new(move |call, stream| Box::pin(script(call, stream)))
}

async fn read_call(stream: &mut TcpStream) -> Option<Call> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end + 2].to_vec()).unwrap();
            let lower = head.to_ascii_lowercase();
            let length = lower.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
            if bytes.len() >= end + 4 + length {
                return Some(Call { head, body: bytes[end + 4..][..length].to_vec() });
            }
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
}

/// Sends bytes and closes the connection. A reader may leave early.
pub(crate) async fn say(mut stream: TcpStream, bytes: impl AsRef<[u8]>) {
    drop(stream.write_all(bytes.as_ref()).await);
    drop(stream.shutdown().await);
    // Read the rest of the peer's bytes, so that closing does not reset the connection.
    let mut rest = [0; 1024];
    while stream.read(&mut rest).await.is_ok_and(|n| n > 0) {}
}

/// Sends bytes one by one with a pause after each, and then more of them, until the reader leaves.
pub(crate) async fn drip(mut stream: TcpStream, bytes: Vec<u8>, pause: std::time::Duration) {
    for byte in bytes.into_iter().chain(std::iter::repeat(b'x')) {
        if stream.write_all(&[byte]).await.is_err() {
            return;
        }
        tokio::time::sleep(pause).await;
    }
}
