//! A server that does what a script says, and notes what it was asked.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What it was asked.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    /// In small letters.
    pub(crate) head: String,
    pub(crate) body: Value,
}

/// What it does.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Send(String),
    Wait(Duration),
    /// Nothing, until the client leaves.
    Hang,
}

type Script = dyn Fn(usize, &Asked) -> Vec<Step> + Send + Sync;

#[derive(Default)]
pub(crate) struct Noted {
    pub(crate) asked: Mutex<Vec<Asked>>,
    pub(crate) n_left: AtomicUsize,
    pub(crate) n_running: AtomicUsize,
    pub(crate) most_running: AtomicUsize,
}

/// A running mock. Its tasks end with the test's runtime.
pub(crate) struct Mock {
    pub(crate) url: String,
    pub(crate) noted: Arc<Noted>,
}

impl Mock {
    /// Answers each `POST` as the script says, which is told how many came before; `GET` with a list of these models.
    pub(crate) async fn listing(
        models: &[&str],
        script: impl Fn(usize, &Asked) -> Vec<Step> + Send + Sync + 'static,
    ) -> Mock {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let models: Vec<Value> = models.iter().map(|id| json!({ "id": id })).collect();
        let list = whole(200, "", &json!({ "object": "list", "data": models }));
        let (noted, script): (Arc<Noted>, Arc<Script>) = (Arc::default(), Arc::new(script));
        let notes = Arc::clone(&noted);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, list.clone(), Arc::clone(&script), Arc::clone(&notes)));
            }
        });
        Mock { url, noted }
    }

    pub(crate) async fn start(script: impl Fn(usize, &Asked) -> Vec<Step> + Send + Sync + 'static) -> Mock {
        Mock::listing(&[], script).await
    }

    pub(crate) fn n_asked(&self) -> usize {
        self.noted.asked.lock().unwrap().len()
    }

    pub(crate) fn asked(&self, i: usize) -> Asked {
        self.noted.asked.lock().unwrap()[i].clone()
    }

    pub(crate) fn n_left(&self) -> usize {
        self.noted.n_left.load(Ordering::SeqCst)
    }
}

async fn serve(mut stream: TcpStream, list: Vec<Step>, script: Arc<Script>, noted: Arc<Noted>) -> Option<()> {
    let asked = read(&mut stream).await?;
    let is_list = asked.head.starts_with("get ");
    let steps = if is_list {
        list
    } else {
        let n_before = {
            let mut all = noted.asked.lock().unwrap();
            all.push(asked.clone());
            all.len() - 1
        };
        script(n_before, &asked)
    };
    if !is_list {
        let now = noted.n_running.fetch_add(1, Ordering::SeqCst) + 1;
        noted.most_running.fetch_max(now, Ordering::SeqCst);
    }
    for step in steps {
        let is_there = match step {
            Step::Send(text) => stream.write_all(text.as_bytes()).await.is_ok(),
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
            noted.n_left.fetch_add(1, Ordering::SeqCst);
            break;
        }
    }
    if !is_list {
        noted.n_running.fetch_sub(1, Ordering::SeqCst);
    }
    stream.shutdown().await.ok()
}

async fn read(stream: &mut TcpStream) -> Option<Asked> {
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
    Some(Asked { path, body: serde_json::from_slice(&bytes[end..]).unwrap_or_default(), head })
}

/// A whole reply with a status and further headers, each with its line end.
pub(crate) fn whole(status: u16, headers: &str, body: &Value) -> Vec<Step> {
    let body = body.to_string();
    vec![Step::Send(format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    ))]
}

/// The head of a stream.
pub(crate) fn head() -> Step {
    Step::Send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n".to_owned())
}

/// A chunk with text.
pub(crate) fn text(text: &str) -> Step {
    event(&json!({ "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": null }] }))
}

/// A server-sent event.
pub(crate) fn event(json: &Value) -> Step {
    Step::Send(format!("data: {json}\n\n"))
}

/// The end of a reply, with what it took.
pub(crate) fn done() -> Step {
    let finish = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }] });
    let usage = json!({ "choices": [], "usage": { "prompt_tokens": 5, "completion_tokens": 2 } });
    Step::Send(format!("data: {finish}\n\ndata: {usage}\n\ndata: [DONE]\n\n"))
}

/// A whole stream that says this.
pub(crate) fn says(words: &str) -> Vec<Step> {
    vec![head(), text(words), done()]
}
