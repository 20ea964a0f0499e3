//! Replies of the real model: the prefix cache, limits, choices, stop strings, templates, and clients that leave.

use std::time::Instant;

use harness::{BatonServer, chat, eventually_async, long_prompt};
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

fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("no content in {reply}"))
}

fn cached_tokens(reply: &Value) -> u64 {
    reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{reply}"))
}

#[tokio::test]
async fn cached_tokens_are_correct_and_never_cross_keys() {
    let server = BatonServer::start(&[]);
    let body = chat(&long_prompt("one", 150), json!({ "max_tokens": 4 }));
    let (_, first) = post_as(&server, &body, Some("alice")).await;
    assert_eq!(cached_tokens(&first), 0);
    let n_prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let (_, again) = post_as(&server, &body, Some("alice")).await;
    assert_eq!(cached_tokens(&again), n_prompt - 1, "all but the last token, which is decoded");
    assert_eq!(content(&again), content(&first));
    let (_, other) = post_as(&server, &body, Some("bob")).await;
    assert_eq!(cached_tokens(&other), 0, "bob must not learn what alice asked");
    assert_eq!(content(&other), content(&first));

    // The second turn of the same chat computes only what is new.
    let turn = json!([
        { "role": "user", "content": long_prompt("one", 150) },
        { "role": "assistant", "content": content(&first) },
        { "role": "user", "content": "And then?" },
    ]);
    let (_, second) = post_as(&server, &chat("", json!({ "messages": turn })), Some("alice")).await;
    assert!(cached_tokens(&second) >= n_prompt - 1, "{second}");
}

#[tokio::test]
async fn a_later_system_message_keeps_the_cached_prompt() {
    // The model's own template renders a later system message; Gemma's takes none, and its text joins the user's.
    let gemma = concat!(env!("CARGO_MANIFEST_DIR"), "/engines/tests/fixtures/templates/gemma.jinja");
    for args in [vec![], vec!["--chat-template-file", gemma]] {
        let server = BatonServer::start(&args);
        let mut turns = json!([
            { "role": "system", "content": "Be helpful." },
            { "role": "user", "content": long_prompt("agent", 300) },
        ]);
        let ask = async |turns: &Value| post(&server, &chat("", json!({ "messages": turns, "max_tokens": 8 }))).await.1;
        let mut reply = ask(&turns).await;
        for role in ["system", "developer"] {
            let more = [
                json!({ "role": "assistant", "content": content(&reply) }),
                json!({ "role": role, "content": "Answer in French." }),
                json!({ "role": "user", "content": "And then?" }),
            ];
            turns.as_array_mut().unwrap().extend(more);
            reply = ask(&turns).await;
            let n_prompt = reply["usage"]["prompt_tokens"].as_u64().unwrap();
            let n_computed = n_prompt - cached_tokens(&reply);
            println!("{args:?}, {role}: {n_computed} of {n_prompt} tokens computed");
            assert!(n_prompt > 300 && n_computed < 60, "{n_computed} of {n_prompt}: {args:?}, {role}");
        }
    }
}

#[tokio::test]
async fn callers_may_share_the_cache_if_configured() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("baton.toml");
    std::fs::write(&config, "share_prefix_cache = true\n").unwrap();
    let server = BatonServer::start(&["--config", config.to_str().unwrap()]);
    let body = chat(&long_prompt("shared", 60), json!({ "max_tokens": 1 }));
    post_as(&server, &body, Some("alice")).await;
    let (_, other) = post_as(&server, &body, Some("bob")).await;
    assert!(cached_tokens(&other) > 50, "{other}");
}

#[tokio::test]
async fn an_overlong_prompt_is_refused_before_the_stream_starts() {
    let server = BatonServer::start(&["--ctx-size", "256"]);
    for stream in [false, true] {
        let body = chat(&long_prompt("long", 600), json!({ "stream": stream }));
        let (status, error) = post(&server, &body).await;
        let error = &error["error"];
        assert_eq!((status, error["code"].as_str().unwrap()), (400, "context_length_exceeded"), "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("maximum context length is 256 tokens"), "{message}");
        assert!(message.contains("exceeds the available context size"), "{message}");
        assert!(message.contains("--ctx-size") && message.contains("ctx_size in the configuration"), "{message}");
        assert_eq!(error["n_ctx"], 256);
        assert!(error["n_prompt_tokens"].as_u64().unwrap() > 600);
    }
    // Generation stops at the end of the context, with the reason `length`.
    let (_, full) = post(&server, &chat("Count for ever.", json!({ "max_tokens": null, "ignore_eos": true }))).await;
    assert_eq!(full["choices"][0]["finish_reason"], "length");
    assert_eq!(full["usage"]["total_tokens"], 256, "{full}");
}

#[tokio::test]
async fn the_prompt_of_several_choices_is_computed_once() {
    let server = BatonServer::start(&[]);
    let body = chat(&long_prompt("choices", 100), json!({ "n": 4, "temperature": 1.0, "seed": 7, "max_tokens": 8 }));
    let (_, reply) = post(&server, &body).await;
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    let texts: std::collections::HashSet<&str> =
        choices.iter().map(|c| c["message"]["content"].as_str().unwrap()).collect();
    assert!(texts.len() > 1, "choices draw with seeds of their own: {texts:?}");
    // One choice computes the prompt and the others share it: its tokens are counted and computed once.
    let n_prompt = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(cached_tokens(&reply), 0);
    assert!(n_prompt > 100);
    let (_, again) = post(&server, &body).await;
    assert_eq!(again["choices"], reply["choices"], "the same seed gives the same output");
}

#[tokio::test]
async fn stop_strings_and_limits_end_a_reply_exactly() {
    let server = BatonServer::start(&[]);
    let (_, whole) = post(&server, &chat("Count from one to twenty.", json!({ "max_tokens": 40 }))).await;
    let text = content(&whole).to_owned();
    // A stop string that starts and ends inside tokens.
    let middle: String = text.chars().skip(text.chars().count() / 2).take(5).collect();
    let at = text.find(&middle).unwrap();
    let body = chat("Count from one to twenty.", json!({ "max_tokens": 40, "stop": [middle] }));
    let (_, cut) = post(&server, &body).await;
    assert_eq!(content(&cut), &text[..at]);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    let (_, none) = post(&server, &chat("Count.", json!({ "max_tokens": 0 }))).await;
    assert_eq!((content(&none), &none["choices"][0]["finish_reason"]), ("", &json!("length")));
    assert_eq!(none["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn an_operators_template_replaces_the_models() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("t.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ raise_exception('no ' + m.role + ' here') }}{% endfor %}")
        .unwrap();
    let server = BatonServer::start(&["--chat-template-file", template.to_str().unwrap()]);
    let (status, error) = post(&server, &chat("hi", json!({}))).await;
    assert_eq!(status, 400);
    assert!(error["error"]["message"].as_str().unwrap().contains("no user here"), "{error}");
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_frees_its_slot() {
    let server = BatonServer::start(&["--slots", "1"]);
    let prompt = |tag: &str, n_words| chat(&long_prompt(tag, n_words), json!({ "max_tokens": 1 }));
    // A tenth of the prompt measures the machine's current speed.
    let began = Instant::now();
    assert_eq!(post(&server, &prompt("a tenth", 700)).await.0, 200);
    let tenth = began.elapsed();
    let slow = prompt("leaving", 7_000);
    for stream in [true, false] {
        let mut body = slow.clone();
        body["stream"] = json!(stream);
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        let client = tokio::spawn(async move { call.send().await.unwrap().text().await });
        eventually_async("the prefill", async || server.state().await["models"][0]["nodes"][0]["active_slots"] == 1)
            .await;
        client.abort();
        assert!(client.await.unwrap_err().is_cancelled(), "the client left during prefill");
        // The only slot must be free before the next request is answered.
        let began = Instant::now();
        let (status, _) = post(&server, &chat("hi", json!({ "max_tokens": 1 }))).await;
        assert_eq!(status, 200);
        println!("stream={stream}: the next request was answered after {:?}", began.elapsed());
        assert!(began.elapsed() < 4 * tenth, "the prefill of a client that left went on: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn more_choices_than_can_ever_queue_are_refused_at_once() {
    // Choices start together, so they wait together even while slots are free.
    let server = BatonServer::start(&["--max-queued", "2"]);
    let (status, error) = post(&server, &chat("hi", json!({ "n": 3 }))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("n")), "{error}");
    // The refused choices give their places back within a step.
    let two = chat("hi", json!({ "n": 2 }));
    eventually_async("two choices", || async { post(&server, &two).await.0 == 200 }).await;
}
