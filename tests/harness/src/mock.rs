//! An upstream that follows a script and records its requests.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A request that a mock got.
#[derive(Debug, Clone)]
pub struct MockRequest {
    /// With its query.
    pub path: String,
    /// The request line and the headers, in lower case.
    pub head: String,
    /// Null if it is not JSON.
    pub body: Value,
    /// The body as it was sent.
    pub text: String,
}

/// A step of an answer.
#[derive(Debug, Clone)]
pub enum Step {
    /// Sends this text.
    Send(String),
    /// Sends these bytes.
    SendBytes(Vec<u8>),
    /// Waits this long, or until the client leaves.
    Wait(Duration),
    /// Waits until the client leaves.
    Hang,
}

type Script = dyn Fn(usize, &MockRequest) -> Vec<Step> + Send + Sync;

/// What a mock records.
#[derive(Default)]
pub struct MockLog {
    /// All `POST` requests, in order.
    pub requests: Mutex<Vec<MockRequest>>,
    /// Lists of models that were asked for.
    pub n_lists: AtomicUsize,
    /// Clients that left before their answer was complete.
    pub n_left: AtomicUsize,
    /// Requests whose last step is still to come. A client that has read the whole answer is no longer counted.
    pub n_running: AtomicUsize,
    /// The largest value of `n_running`.
    pub most_running: AtomicUsize,
}

/// A running mock. Its tasks end with the test's runtime.
pub struct Mock {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    /// What it recorded so far.
    pub log: Arc<MockLog>,
    /// The body of the list of models.
    models: Arc<Mutex<Value>>,
}

impl Mock {
    /// Answers each `POST` with the script's result for the number of earlier ones, and each `GET` with a list of these
    /// models.
    pub async fn listing(
        models: &[&str],
        script: impl Fn(usize, &MockRequest) -> Vec<Step> + Send + Sync + 'static,
    ) -> Mock {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mock = Mock::at(listener, script);
        mock.list(models);
        mock
    }

    /// Answers at a listener of the test's, with no models in its list.
    pub fn at(
        listener: std::net::TcpListener,
        script: impl Fn(usize, &MockRequest) -> Vec<Step> + Send + Sync + 'static,
    ) -> Mock {
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let models = Arc::new(Mutex::new(entries(&[])));
        let log = Arc::<MockLog>::default();
        let script: Arc<Script> = Arc::new(script);
        let (recorder, listed) = (Arc::clone(&log), Arc::clone(&models));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&listed), Arc::clone(&script), Arc::clone(&recorder)));
            }
        });
        Mock { url, log, models }
    }

    /// The same with no models in its list.
    pub async fn start(script: impl Fn(usize, &MockRequest) -> Vec<Step> + Send + Sync + 'static) -> Mock {
        Mock::listing(&[], script).await
    }

    /// From now on lists these models.
    pub fn list(&self, models: &[&str]) {
        *self.models.lock().unwrap() = entries(models);
    }

    /// From now on lists this model with the size of its context, as vLLM does.
    pub fn list_with_context(&self, model: &str, n_ctx: u32) {
        self.list_as(json!({ "object": "list", "data": [{ "id": model, "max_model_len": n_ctx }] }));
    }

    /// From now on sends this for the list of models.
    pub fn list_as(&self, body: Value) {
        *self.models.lock().unwrap() = body;
    }

    /// The number of `POST` requests so far to a path.
    pub fn n_asked_at(&self, path: &str) -> usize {
        self.log.requests.lock().unwrap().iter().filter(|asked| asked.path == path).count()
    }

    /// The number of `POST` requests so far.
    pub fn n_asked(&self) -> usize {
        self.log.requests.lock().unwrap().len()
    }

    /// The `POST` request of this index.
    pub fn asked(&self, i: usize) -> MockRequest {
        self.log.requests.lock().unwrap()[i].clone()
    }

    /// Clients that left before their answer was complete.
    pub fn n_left(&self) -> usize {
        self.log.n_left.load(Ordering::SeqCst)
    }
}

fn entries(models: &[&str]) -> Value {
    let models: Vec<Value> = models.iter().map(|id| json!({ "id": id })).collect();
    json!({ "object": "list", "data": models })
}

async fn serve(mut stream: TcpStream, listed: Arc<Mutex<Value>>, script: Arc<Script>, log: Arc<MockLog>) -> Option<()> {
    let asked = read(&mut stream).await?;
    let is_list = asked.head.starts_with("get ");
    let steps = if is_list {
        log.n_lists.fetch_add(1, Ordering::SeqCst);
        whole(200, "", &listed.lock().unwrap())
    } else {
        let n_before = {
            let mut all = log.requests.lock().unwrap();
            all.push(asked.clone());
            all.len() - 1
        };
        script(n_before, &asked)
    };
    // It ends before the last step, since the client may send its next request as soon as it has read that.
    let mut running = (!is_list).then(|| Running::begin(&log));
    let n_steps = steps.len();
    for (i, step) in steps.into_iter().enumerate() {
        if i + 1 == n_steps && matches!(step, Step::Send(_) | Step::SendBytes(_)) {
            running = None;
        }
        let is_there = match step {
            Step::Send(text) => stream.write_all(text.as_bytes()).await.is_ok(),
            Step::SendBytes(bytes) => stream.write_all(&bytes).await.is_ok(),
            Step::Wait(time) => {
                let mut byte = [0];
                !matches!(tokio::time::timeout(time, stream.read(&mut byte)).await, Ok(Ok(0) | Err(_)))
            }
            Step::Hang => {
                let mut byte = [0];
                let _ = stream.read(&mut byte).await;
                false
            }
        };
        if !is_there {
            log.n_left.fetch_add(1, Ordering::SeqCst);
            break;
        }
    }
    drop(running);
    stream.shutdown().await.ok()
}

/// A request that counts as running until this is dropped.
struct Running<'a>(&'a MockLog);

impl<'a> Running<'a> {
    fn begin(log: &'a MockLog) -> Self {
        let now = log.n_running.fetch_add(1, Ordering::SeqCst) + 1;
        log.most_running.fetch_max(now, Ordering::SeqCst);
        Running(log)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.n_running.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn read(stream: &mut TcpStream) -> Option<MockRequest> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok()).unwrap_or(0);
    while bytes.len() < end + length {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let path = head.split_whitespace().nth(1)?.to_owned();
    let text = String::from_utf8_lossy(&bytes[end..]).into_owned();
    Some(MockRequest { path, body: serde_json::from_str(&text).unwrap_or_default(), text, head })
}

/// A whole reply with a status and further headers, each of which ends with its line break.
pub fn whole(status: u16, headers: &str, body: &Value) -> Vec<Step> {
    let body = body.to_string();
    vec![Step::Send(format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    ))]
}

/// The head of a stream.
pub fn head() -> Step {
    Step::Send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n".to_owned())
}

/// A chunk with text.
pub fn text(text: &str) -> Step {
    event(&json!({ "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": null }] }))
}

/// A server-sent event.
pub fn event(json: &Value) -> Step {
    Step::Send(format!("data: {json}\n\n"))
}

/// The end of a stream, with its usage.
pub fn done() -> Step {
    let finish = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }] });
    let usage = json!({ "choices": [], "usage": { "prompt_tokens": 5, "completion_tokens": 2 } });
    Step::Send(format!("data: {finish}\n\ndata: {usage}\n\ndata: [DONE]\n\n"))
}

/// A whole stream with this text.
pub fn says(words: &str) -> Vec<Step> {
    vec![head(), text(words), done()]
}
