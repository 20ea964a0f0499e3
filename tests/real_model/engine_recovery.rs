//! A local engine that is killed, freezes or cannot start is replaced, and no engine outlives its endpoint.

use std::time::Duration;

use harness::{BatonServer, SseReply, chat, eventually, eventually_async, is_alive, model, skip};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

async fn post(server: &BatonServer, body: &Value) -> (u16, Value) {
    post_as(server, body, None).await
}

async fn post_as(server: &BatonServer, body: &Value, key: Option<&str>) -> (u16, Value) {
    let mut request = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(body);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn health(server: &BatonServer) -> (u16, Value) {
    let response = reqwest::get(format!("{}/health", server.base)).await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("no content in {reply}"))
}

#[tokio::test]
async fn a_killed_engine_is_replaced_and_the_next_request_works() {
    let server = BatonServer::start(&[]);
    let body = chat("What is the capital of France?", json!({}));
    let (_, before) = post(&server, &body).await;
    for _ in 0..3 {
        let killed = server.engine();
        kill_process(killed, Signal::KILL).unwrap();
        let (status, after) = post(&server, &body).await;
        assert_eq!((status, content(&after)), (200, content(&before)));
        assert_ne!(server.engine(), killed);
    }
}

#[tokio::test]
async fn a_stream_continues_when_its_engine_is_killed_or_freezes() {
    let server = BatonServer::start(&[]);
    let body = chat("Count from one to one hundred in words.", json!({ "max_tokens": 96, "ignore_eos": true }));
    let (_, undisturbed) = post(&server, &body).await;
    for signal in [Signal::KILL, Signal::STOP] {
        let engine = server.engine();
        let mut reply = SseReply::open(&server, &body).await;
        reply.read_pieces(60).await;
        kill_process(engine, signal).unwrap();
        let reply = tokio::time::timeout(Duration::from_secs(60), reply.whole()).await.expect("the stream to end");
        assert!(!is_alive(engine));
        assert_eq!((reply.content.as_str(), reply.n_completion), (content(&undisturbed), 96), "{signal:?}");
        assert_eq!(health(&server).await.0, 200);
    }
}

#[tokio::test]
async fn an_engine_that_cannot_start_says_why_and_recovers_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("model.gguf");
    std::fs::copy(model(), &copy).unwrap();
    let server = BatonServer::with(&["--model", copy.to_str().unwrap(), "--name", "smollm2", "--threads", "1"]);
    assert_eq!(health(&server).await, (200, json!({ "status": "ok" })));

    let hidden = folder.path().join("elsewhere");
    std::fs::rename(&copy, &hidden).unwrap();
    kill_process(server.engine(), Signal::KILL).unwrap();
    eventually_async("an unhealthy server", || async { health(&server).await.1.to_string().contains("missing") }).await;
    let (status, report) = health(&server).await;
    assert_eq!(status, 503, "{report}");
    let (status, error) = post(&server, &chat("hello", json!({}))).await;
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(status, 503);
    assert!(message.contains("the model file is missing"), "{message}");
    assert!(!message.contains(folder.path().to_str().unwrap()), "no path is shown to a client: {message}");

    std::fs::rename(&hidden, &copy).unwrap();
    eventually_async("a healthy server", || async { health(&server).await.0 == 200 }).await;
    assert_eq!(post(&server, &chat("hello", json!({}))).await.0, 200);
}

#[test]
fn no_engine_outlives_its_server() {
    for (frozen, signal) in [(false, Signal::KILL), (true, Signal::KILL), (false, Signal::TERM), (false, Signal::INT)] {
        // Only Linux ends a frozen child with its parent. Elsewhere it ends when it is continued.
        if frozen && cfg!(not(target_os = "linux")) {
            skip("a frozen child ends with its parent on Linux only");
            continue;
        }
        let mut server = BatonServer::start(&[]);
        let engine = server.engine();
        if frozen {
            kill_process(engine, Signal::STOP).unwrap();
        }
        server.signal(signal);
        server.wait();
        eventually("the engine's end", || (!is_alive(engine)).then_some(()));
    }
}

#[tokio::test]
async fn ctrl_c_in_a_terminal_lets_a_running_stream_end() {
    let mut server = BatonServer::start(&[]);
    let body = chat("Tell me a story.", json!({ "max_tokens": 60, "stream": true }));
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    // A terminal signals its whole process group. The engine must stay until the stream has ended.
    kill_process(server.engine(), Signal::INT).unwrap();
    kill_process(server.engine(), Signal::TERM).unwrap();
    server.signal(Signal::INT);
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(!text.contains("error"), "{text}");
    drop(client);
    assert!(server.wait().success());
}
