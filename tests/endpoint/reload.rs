//! A changed configuration takes effect as a whole, at once, and without ending a stream.

use std::process::Stdio;
use std::time::Duration;

use harness::{BatonServer, TempConfigFile, chat, eventually_async};
use serde_json::{Value, json};

const SIM: &str = "engine = \"sim\"\nsim_decode_tps = 50.0\n";

fn own(name: &str, more: &str) -> String {
    format!("[[models]]\nname = {name:?}\nsource = \"smollm2\"\n{more}\n[models.engine]\n{SIM}")
}

async fn status(server: &BatonServer, model: &str) -> u16 {
    let body = chat("hello", json!({ "model": model, "max_tokens": 1 }));
    let url = format!("{}/v1/chat/completions", server.base);
    reqwest::Client::new().post(url).json(&body).send().await.unwrap().status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mistake_changes_nothing_that_precedes_it_in_the_file() {
    let config = TempConfigFile::new(&own("one", ""));
    let log = tempfile::NamedTempFile::new().unwrap();
    let server = config.serve_logging_to(log.reopen().unwrap(), &[]);
    assert_eq!(status(&server, "one").await, 200);
    let bad = "[[models]]\nname = \"bad\"\nsource = \"/nowhere.gguf\"\n";
    let upstream = "[[upstream]]\nname = \"u\"\nkind = \"openai\"\nurl = \"http://127.0.0.1:9\"\n";
    config.reload(&server, &[own("one", "keep_alive = 0\n").as_str(), bad, upstream].concat());
    let logged = || std::fs::read_to_string(log.path()).unwrap();
    eventually_async("the refusal", || async { logged().contains("stays as it was") }).await;
    let state = server.state().await;
    assert_eq!(state["models"][0]["residency"]["life"], "loaded", "{state}");
    assert_eq!(state["upstreams"], json!([]), "all of it, or nothing");
    // Without the mistake `keep_alive = 0` unloads the model, for the first time.
    config.reload(&server, &[own("one", "keep_alive = 0\n").as_str(), upstream].concat());
    let residency = async || server.state().await["models"][0]["residency"].clone();
    eventually_async("the end of the idle model", || async { residency().await["life"] == "unloaded" }).await;
    let residency = residency().await;
    assert_eq!((&residency["loads"], &residency["unloads"]), (&json!(1), &json!({ "asked": 1 })));
    assert_eq!(server.state().await["upstreams"][0]["name"], "u");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_waits_for_a_model_that_has_to_be_fetched() {
    // A hub that accepts connections and never answers.
    let hub = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    let (called, mut calls) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = hub.accept().await {
            held.push(stream);
            let _ = called.send(());
        }
    });
    let config = TempConfigFile::new(&own("one", ""));
    let server = config.serve_logging_to(Stdio::inherit(), &[("HF_ENDPOINT", &endpoint)]);
    let upstream = |name: &str| {
        format!(
            "[[upstream]]\nname = {name:?}\nkind = \"openai\"\nurl = \"http://127.0.0.1:9\"\nmodels = {{ x = \"y\" }}\n"
        )
    };
    let fetched = "[[models]]\nname = \"far\"\nsource = \"nobody/nothing:far.gguf\"\n";
    config.reload(&server, &[own("one", "").as_str(), fetched, &upstream("u")].concat());
    tokio::time::timeout(Duration::from_secs(20), calls.recv()).await.expect("the model is fetched");
    assert_eq!(server.state().await["upstreams"][0]["name"], "u", "the rest is in force");
    assert_eq!((status(&server, "one").await, status(&server, "far").await), (200, 404));
    // The newest file wins.
    config.reload(&server, &[own("two", "").as_str(), &upstream("v")].concat());
    eventually_async("the newest models", || async { server.get("/v1/models").await["data"][0]["id"] == "two" }).await;
    assert_eq!((status(&server, "two").await, status(&server, "one").await), (200, 404));
    assert_eq!(server.state().await["upstreams"][0]["name"], "v");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_main_model_takes_other_names_and_sampling_while_it_streams() {
    let config = |name: &str, more: &str| format!("[model]\nname = {name:?}\n{more}\n[model.engine]\n{SIM}");
    let file = TempConfigFile::new(&config("first", "aliases = [\"a\"]"));
    let server = file.serve();
    assert_eq!((status(&server, "first").await, status(&server, "a").await), (200, 200));
    let engine = server.engine();
    let body = chat("hello", json!({ "model": "first", "max_tokens": 150, "stream": true, "ignore_eos": true }));
    let url = format!("{}/v1/chat/completions", server.base);
    let stream = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
    file.reload(&server, &config("second", "aliases = [\"b\"]\n[model.sampling]\ntemperature = 0.125\n"));
    eventually_async("the new name", || async { status(&server, "second").await == 200 }).await;
    assert_eq!(
        (status(&server, "b").await, status(&server, "first").await, status(&server, "a").await),
        (200, 404, 404)
    );
    let url = format!("{}/v1/responses", server.base);
    let asked = json!({ "model": "b", "input": "hello", "max_output_tokens": 1 });
    let reply: Value = reqwest::Client::new().post(url).json(&asked).send().await.unwrap().json().await.unwrap();
    assert_eq!(reply["temperature"], 0.125, "{reply}");
    let text = stream.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n") && text.matches("\"content\"").count() > 100, "{text}");
    assert_eq!(server.engine(), engine, "no other process");
}
