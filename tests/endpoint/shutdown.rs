//! An endpoint that receives SIGTERM finishes its streams and takes no new requests.

use harness::{BatonNode, BatonServer, chat, eventually, eventually_async};
use rustix::process::Signal;
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

#[tokio::test]
async fn a_bias_on_a_token_that_does_not_exist_names_the_field() {
    let server = BatonServer::with(&["--engine", "sim"]);
    let (status, error) = post(&server, &chat("hi", json!({ "model": "sim", "logit_bias": { "999": 1 } }))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("logit_bias")), "{error}");
}

#[test]
fn an_open_server_in_the_network_is_warned_about_once() {
    for (args, n_warnings) in
        [(&["--listen", "0.0.0.0:0"][..], 1), (&["--listen", "0.0.0.0:0", "--api-key", "k"], 0), (&[], 0)]
    {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut server = BatonServer::logging_to(log.reopen().unwrap(), &[&["--engine", "sim"], args].concat());
        server.signal(Signal::TERM);
        server.wait();
        let log = std::fs::read_to_string(log.path()).unwrap();
        assert_eq!(
            (log.lines().count(), log.contains("requires no key")),
            (n_warnings, n_warnings == 1),
            "{args:?}: {log}"
        );
    }
}

#[tokio::test]
async fn a_load_balancer_sees_that_the_server_stops_while_streams_finish() {
    let mut server = BatonServer::with(&["--engine", "sim", "--sim-decode-tps", "10"]);
    let body = chat("hi", json!({ "model": "sim", "max_tokens": 10_000, "stream": true, "ignore_eos": true }));
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    assert_eq!(reqwest::get(format!("{}/health", server.base)).await.unwrap().status(), 200);
    server.signal(Signal::TERM);
    // Each call uses a new connection.
    let health = async || reqwest::get(format!("{}/health", server.base)).await.unwrap();
    eventually_async("a word of the stop", || async { health().await.status() == 503 }).await;
    let said = health().await;
    assert_eq!(said.headers()["connection"], "close");
    assert!(said.text().await.unwrap().contains("stopping"));
    assert_eq!(post(&server, &chat("hi", json!({ "model": "sim" }))).await.0, 503);
    assert!(stream.chunk().await.unwrap().is_some(), "the stream continues");
    drop((stream, client));
    assert!(server.wait().success(), "nothing runs any more");
}

#[tokio::test]
async fn a_closed_terminal_lets_streams_finish() {
    let mut server = BatonServer::with(&["--engine", "sim", "--sim-decode-tps", "20"]);
    let body = chat("hi", json!({ "model": "sim", "max_tokens": 40, "stream": true, "ignore_eos": true }));
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    server.signal(Signal::HUP);
    let rest = stream.text().await.unwrap();
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    drop(client);
    assert!(server.wait().success());
}

#[tokio::test]
async fn a_second_signal_ends_running_streams_with_an_error() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut server = BatonServer::logging_to(log.reopen().unwrap(), &["--engine", "sim", "--sim-decode-tps", "10"]);
    let body = chat("hi", json!({ "model": "sim", "max_tokens": 10_000, "stream": true, "ignore_eos": true }));
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    server.signal(Signal::INT);
    eventually("a word about the stream", || {
        std::fs::read_to_string(log.path()).unwrap().contains("finishing 1 request").then_some(())
    });
    server.signal(Signal::INT);
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.contains(r#"data: {"error":"#) && text.contains("stopping") && !text.contains("[DONE]"), "{text}");
    assert!(server.wait().success());
}

#[tokio::test]
async fn a_regular_stop_beside_a_node_on_another_machine_says_nothing_of_lost_streams() {
    let node = BatonNode::with(&["--engine", "sim", "--role", "prefill"]);
    let log = tempfile::NamedTempFile::new().unwrap();
    let args = ["--engine", "sim", "--prefill", &node.url];
    let mut server = BatonServer::logging_to(log.reopen().unwrap(), &args);
    assert_eq!(post(&server, &chat("hi", json!({ "model": "sim" }))).await.0, 200);
    server.signal(Signal::TERM);
    server.wait();
    let log = std::fs::read_to_string(log.path()).unwrap();
    // A busy machine may miss a sign of life before, which is said in other words.
    assert!(!log.contains("the connection to a node"), "{log}");
}
