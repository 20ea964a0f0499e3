//! Admission: keys, their limits, and the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt;
use harness::{BatonServer, NewKey, eventually_async};
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// A generation of 600 tokens takes half a minute.
const SIM: [&str; 4] = ["--engine", "sim", "--sim-decode-tps", "20"];

/// Starts an endpoint whose file begins with these lines and has a key for each of these limits. Returns the keys and the
/// file, too, because the endpoint watches it.
pub(crate) fn with_keys<const N: usize>(
    front: &str,
    limits: [&str; N],
) -> (BatonServer, [String; N], tempfile::TempPath) {
    let mut file = format!("{front}\n");
    let keys = std::array::from_fn(|i| {
        let key = NewKey::of(&format!("key-{i}"), limits[i]);
        file += &key.lines;
        key.secret
    });
    let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::write(&path, file).unwrap();
    (BatonServer::with(&[&SIM[..], &["--config", path.to_str().unwrap()]].concat()), keys, path)
}

fn ask(server: &BatonServer, key: &str, n_tokens: u32) -> RequestBuilder {
    let body = json!({
        "model": "sim", "stream": true, "max_tokens": n_tokens, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "hi" }],
    });
    let url = format!("{}/v1/chat/completions", server.base);
    reqwest::Client::new().post(url).bearer_auth(key).json(&body)
}

/// Sends a request and waits for its first token, which shows that it was admitted.
pub(crate) async fn begun(request: RequestBuilder) -> impl Future<Output = String> {
    let reply = request.send().await.unwrap();
    assert_eq!(reply.status(), 200);
    let mut bytes = reply.bytes_stream();
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("\"content\"") {
        text.extend(bytes.next().await.expect("a token").unwrap());
    }
    async move {
        while let Some(more) = bytes.next().await {
            text.extend(more.unwrap());
        }
        String::from_utf8(text).unwrap()
    }
}

/// Requests that wait in the endpoint's queue.
pub(crate) async fn n_waiting(server: &BatonServer, key: &str) -> usize {
    let url = format!("{}/metrics", server.base);
    let text = reqwest::Client::new().get(url).bearer_auth(key).send().await.unwrap().text().await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("baton_requests_waiting ")).expect(&text);
    line.parse::<f64>().unwrap() as usize
}

async fn refusal(reply: Response) -> (u16, Value, reqwest::header::HeaderMap) {
    let status = reply.status().as_u16();
    let headers = reply.headers().clone();
    (status, reply.json().await.unwrap(), headers)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_waiting_key_with_the_higher_priority_is_next() {
    let (server, [low, high], _file) = with_keys("max_requests = 1", ["operator = true", "priority = 9"]);
    let running = begun(ask(&server, &low, 600)).await;
    let (tell, mut order) = tokio::sync::mpsc::unbounded_channel();
    for (at, key) in [&low, &low, &high].into_iter().enumerate() {
        let request = ask(&server, key, 1);
        let tell = tell.clone();
        tokio::spawn(async move {
            let text = request.send().await.unwrap().text().await.unwrap();
            tell.send((at, text)).unwrap();
        });
        eventually_async("it waits", || async { n_waiting(&server, &low).await == at + 1 }).await;
    }
    drop(running);
    let mut came = Vec::new();
    for _ in 0..3 {
        let (at, text) = order.recv().await.unwrap();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        came.push(at);
    }
    assert_eq!(came, [2, 0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_client_sees_its_place_in_the_queue() {
    let (server, [key], _file) = with_keys("max_requests = 1", ["operator = true"]);
    // It runs for longer than the 8 s after which a waiting stream gets its head.
    let running = begun(ask(&server, &key, 600)).await;
    let first = tokio::spawn(ask(&server, &key, 1).send());
    eventually_async("it waits", || async { n_waiting(&server, &key).await == 1 }).await;
    let second = ask(&server, &key, 1).send().await.unwrap();
    let mut bytes = second.bytes_stream();
    let line = bytes.next().await.unwrap().unwrap();
    assert_eq!(line, ": place 2 in the queue\n\n");
    // Dropping a connection gives up its place, also that of the running request.
    drop(running);
    let first = first.await.unwrap().unwrap().text().await.unwrap();
    let second = bytes.map(|part| part.unwrap().to_vec()).concat().await;
    assert!(first.ends_with("data: [DONE]\n\n") && second.ends_with(b"data: [DONE]\n\n"), "{first}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keys_tokens_and_its_requests_at_once_are_limited() {
    let (server, [tokens, one], _file) =
        with_keys("", ["tokens_per_minute = 60", "max_concurrent = 1\noperator = true"]);
    let reply = ask(&server, &tokens, 100).send().await.unwrap();
    assert_eq!((reply.status().as_u16(), &reply.headers()["x-ratelimit-limit-tokens"]), (200, &"60".parse().unwrap()));
    assert!(reply.text().await.unwrap().ends_with("data: [DONE]\n\n"), "what was begun is not cut off");
    let (status, error, headers) = refusal(ask(&server, &tokens, 1).send().await.unwrap()).await;
    assert_eq!((status, &error["error"]["code"]), (429, &json!("rate_limit_exceeded")), "{error}");
    assert_eq!(headers["x-ratelimit-remaining-tokens"], "0");
    let wait: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=120).contains(&wait), "{wait}");

    let running = begun(ask(&server, &one, 60)).await;
    let second = tokio::spawn(ask(&server, &one, 1).send());
    eventually_async("the key's second request to wait for its first", || async {
        n_waiting(&server, &one).await == 1
    })
    .await;
    assert!(running.await.ends_with("data: [DONE]\n\n"));
    assert_eq!(second.await.unwrap().unwrap().status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_page_or_host_is_refused() {
    let (server, [key], _file) = with_keys("allowed_origins = [\"https://chat.example\"]", [""]);
    for (name, value, status) in [
        ("origin", "https://evil.example", 403),
        ("origin", "https://chat.example", 200),
        ("origin", "http://localhost:3000", 200),
        ("host", "evil.example", 403),
        ("host", "localhost", 200),
    ] {
        let reply = ask(&server, &key, 1).header(name, value).send().await.unwrap();
        assert_eq!(reply.status().as_u16(), status, "{name}: {value}");
        let allowed = reply.headers().get("access-control-allow-origin").map(|origin| origin.to_str().unwrap());
        assert_eq!(allowed, (name == "origin" && status == 200).then_some(value));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn counting_and_showing_a_prompt_cost_its_tokens() {
    let (server, keys, _file) = with_keys("", ["tokens_per_minute = 100"; 5]);
    let text = "word ".repeat(1000);
    let chat = json!({ "model": "sim", "max_tokens": 1, "messages": [{ "role": "user", "content": text }] });
    let calls = [
        ("/tokenize", json!({ "content": text })),
        ("/detokenize", json!({ "tokens": vec![1; 1000] })),
        ("/apply-template", chat.clone()),
        ("/v1/messages/count_tokens", chat.clone()),
        ("/baton/plan", chat),
    ];
    for (key, (path, body)) in keys.iter().zip(calls) {
        let post = || reqwest::Client::new().post(format!("{}{path}", server.base)).bearer_auth(key).json(&body).send();
        let first = post().await.unwrap();
        assert_eq!(first.status(), 200, "{path}: {}", first.text().await.unwrap());
        // Refilling the key takes minutes.
        let (status, error, _) = refusal(post().await.unwrap()).await;
        assert!(status == 429 && error.to_string().contains("tokens per minute"), "{path}: {status} {error}");
    }
}

/// A stream of many choices, read in the background, with the number of choices that have ended.
struct Choices {
    n_ended: Arc<AtomicUsize>,
    whole: JoinHandle<String>,
}

impl Choices {
    /// Sends a request for 16 choices and waits for the first token.
    async fn begun(request: RequestBuilder) -> Choices {
        let mut bytes = request.send().await.unwrap().bytes_stream();
        let n_ended = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&n_ended);
        let (tell, begun) = tokio::sync::oneshot::channel();
        let whole = tokio::spawn(async move {
            let mut tell = Some(tell);
            let mut text = String::new();
            while let Some(part) = bytes.next().await {
                text += std::str::from_utf8(&part.unwrap()).unwrap();
                counted.store(text.matches("\"finish_reason\":\"").count(), Ordering::Release);
                if let Some(tell) = tell.take_if(|_| text.contains("\"content\":\"")) {
                    tell.send(()).unwrap();
                }
            }
            text
        });
        begun.await.unwrap();
        Choices { n_ended, whole }
    }
}

fn choices(server: &BatonServer, key: &str, n: u32, n_tokens: u32) -> RequestBuilder {
    let body = json!({
        "model": "sim", "stream": true, "n": n, "max_tokens": n_tokens, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "many" }],
    });
    reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).bearer_auth(key).json(&body)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_many_choices_delays_another_key_by_one_of_them() {
    let (server, [greedy, modest], _file) = with_keys("", ["operator = true", ""]);
    let many = Choices::begun(choices(&server, &greedy, 16, 20)).await;
    let url = format!("{}/baton/state", server.base);
    let state = reqwest::Client::new().get(url).bearer_auth(&greedy).send().await.unwrap();
    let state: Value = state.json().await.unwrap();
    let requests = &state["requests"];
    assert_eq!((&requests["running"], &requests["slots"]), (&json!(1), &json!(4)), "four slots: {requests}");
    let reply = ask(&server, &modest, 5).send().await.unwrap().text().await.unwrap();
    let n_ended = many.n_ended.load(Ordering::Acquire);
    assert!(reply.ends_with("data: [DONE]\n\n"), "{reply}");
    // It gets the first slot that is free; a round of four choices may end together.
    println!("{n_ended} of 16 choices had ended when the other key had its reply");
    assert!(n_ended <= 8, "{n_ended} choices went before it");
    let whole = many.whole.await.unwrap();
    assert!(whole.ends_with("data: [DONE]\n\n"), "{whole}");
    for choice in 0..16 {
        assert!(whole.contains(&format!("\"index\":{choice},")), "no choice {choice}");
    }
    assert_eq!(many.n_ended.load(Ordering::Acquire), 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_and_prompts_count_for_the_limits_of_their_key() {
    let limits = ["requests_per_minute = 3", "max_concurrent = 1\nrequests_per_minute = 10"];
    let (server, [rated, one], _file) = with_keys("", limits);
    let complete = async |key: &str, n_prompts: usize, n: u32| {
        let prompts: Vec<String> = (0..n_prompts).map(|i| format!("prompt {i}")).collect();
        let body = json!({ "model": "sim", "prompt": prompts, "n": n, "max_tokens": 2, "ignore_eos": true });
        let url = format!("{}/v1/completions", server.base);
        let reply = reqwest::Client::new().post(url).bearer_auth(key).json(&body).send().await.unwrap();
        refusal(reply).await
    };
    // A key with one place generates one after another.
    let (status, reply, headers) = complete(&one, 3, 2).await;
    assert_eq!((status, reply["choices"].as_array().map(Vec::len)), (200, Some(6)), "{reply}");
    // Six of ten are used; one is refilled every 6 s.
    let left: u32 = headers["x-ratelimit-remaining-requests"].to_str().unwrap().parse().unwrap();
    assert!((4..=5).contains(&left), "{left}");
    // More than the rate has left is served, and the key waits afterwards.
    let (status, reply, _) = complete(&rated, 2, 2).await;
    assert_eq!((status, reply["choices"].as_array().map(Vec::len)), (200, Some(4)), "{reply}");
    let (status, reply, headers) = complete(&rated, 1, 1).await;
    assert_eq!((status, &reply["error"]["code"]), (429, &json!("rate_limit_exceeded")), "{reply}");
    assert_eq!(headers["x-ratelimit-remaining-requests"], "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_at_its_rate_limit_loads_no_model() {
    let model = "[[models]]\nname = \"big\"\nsource = \"sim\"\n[models.engine]\nengine = \"sim\"\n";
    let (server, [key, owner], _file) =
        with_keys(model, ["requests_per_minute = 1", "operator = true\nrequests_per_minute = 100"]);
    let client = reqwest::Client::new();
    let post = async |path: &str, body: Value| {
        let request = client.post(format!("{}{path}", server.base)).bearer_auth(&key).json(&body);
        request.send().await.unwrap().status().as_u16()
    };
    let message = json!([{ "role": "user", "content": "hi" }]);
    let chat = |model: &str| json!({ "model": model, "max_tokens": 1, "messages": message });
    assert_eq!(post("/v1/chat/completions", chat("sim")).await, 200);
    for (path, body) in [
        ("/v1/chat/completions", chat("big")),
        ("/v1/messages", chat("big")),
        ("/v1/completions", json!({ "model": "big", "prompt": ["a", "b"], "max_tokens": 1 })),
        ("/v1/responses", json!({ "model": "big", "input": "hi" })),
        ("/v1/embeddings", json!({ "model": "big", "input": "hi" })),
        ("/v1/messages/count_tokens", json!({ "model": "big", "messages": message })),
        ("/tokenize", json!({ "model": "big", "content": "hi" })),
        ("/baton/plan", chat("big")),
        ("/api/chat", json!({ "model": "big", "messages": message, "stream": false })),
        ("/api/generate", json!({ "model": "big", "stream": false })),
        ("/api/embed", json!({ "model": "big", "input": "hi" })),
    ] {
        assert_eq!(post(path, body).await, 429, "{path}");
        let state = client.get(format!("{}/baton/state", server.base)).bearer_auth(&owner).send().await.unwrap();
        let state: Value = state.json().await.unwrap();
        let big = state["models"].as_array().unwrap().iter().find(|model| model["name"] == "big").unwrap();
        assert_eq!((&big["residency"]["life"], &big["residency"]["loads"]), (&json!("unloaded"), &json!(0)), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_waits_longer_than_its_head_names_its_route_once_it_has_one() {
    let server = BatonServer::with(&[&SIM[..], &["--slots", "1"]].concat());
    // Fifteen seconds on the only slot. Heads leave after eight.
    let first = begun(ask(&server, "", 300)).await;
    let body = json!({
        "model": "sim", "stream": true, "messages": [{ "role": "user", "content": "hi" }],
        "options": { "num_predict": 1 },
    });
    let ollama = reqwest::Client::new().post(format!("{}/api/chat", server.base)).json(&body).send();
    let (openai, ollama) = tokio::join!(ask(&server, "", 1).send(), ollama);
    let (openai, ollama) = (openai.unwrap(), ollama.unwrap());
    for reply in [&openai, &ollama] {
        let route = reply.headers()["x-baton-route"].to_str().unwrap();
        assert!(route.starts_with("pending; place="), "{route}");
    }
    let (openai, ollama) = (openai.text().await.unwrap(), ollama.text().await.unwrap());
    let named = openai.matches("\n: x-baton-route: direct; decode=local; policy=").count();
    assert_eq!((named, openai.ends_with("data: [DONE]\n\n")), (1, true), "{openai}");
    let last: Value = serde_json::from_str(ollama.lines().last().unwrap()).unwrap();
    assert!(last["route"].as_str().is_some_and(|route| route.starts_with("direct; decode=local; ")), "{ollama}");
    first.await;
}
