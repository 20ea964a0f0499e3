//! What `/props`, `/slots` and `/api/show` report of models that only upstreams serve, and which model a request without a
//! name means.

use std::time::Duration;

use harness::mock::{Mock, Step, done, head, says, text, whole};
use harness::{BatonServer, eventually_async};
use harness::{ReloadableServer, upstream};
use serde_json::{Value, json};

/// Ollama's report of a model, with fields that must not be passed on.
fn shown() -> Value {
    json!({
        "modelfile": "FROM /home/somebody/model", "template": "{{ .Prompt }}",
        "details": { "parent_model": "/home/somebody", "format": "gguf", "family": "qwen3", "families": ["qwen3"],
            "parameter_size": "8.2B", "quantization_level": "Q4_K_M" },
        "model_info": { "general.architecture": "qwen3", "general.parameter_count": 8_190_735_360_u64,
            "qwen3.context_length": 40_960, "qwen3.embedding_length": 1_u64 << 60, "general.author": "somebody" },
        "capabilities": ["completion", "tools", "thinking", "vision"],
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn props_and_slots_report_an_upstreams_model() {
    let mock = Mock::start(|_, _| vec![head(), text("begun"), Step::Wait(Duration::from_secs(3)), done()]).await;
    let front = ReloadableServer::start(&upstream("one", "openai", &mock.url, "max_concurrent = 3"));
    for path in ["/props", "/props?model=m"] {
        let props = front.get(path).await;
        assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(3), &json!("m")), "{path}: {props}");
        assert_eq!(props["default_generation_settings"]["n_ctx"], 0, "it is unknown: {props}");
        assert_eq!(props["chat_template"], "", "{props}");
    }
    let n_busy = async |path: &str| -> (usize, usize) {
        let slots = front.get(path).await;
        let slots = slots.as_array().unwrap();
        (slots.len(), slots.iter().filter(|slot| slot["is_processing"] == true).count())
    };
    assert_eq!(n_busy("/slots").await, (3, 0));
    let busy = eventually_async("a busy slot", async || n_busy("/slots?model=m").await == (3, 1));
    let (answer, ()) = tokio::join!(front.chat(json!({ "stream": true })), busy);
    assert_eq!(answer.status, 200, "{answer:?}");
    let missing = reqwest::get(format!("{}/props?model=nobody", front.server.base)).await.unwrap();
    assert_eq!(missing.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_context_is_the_configured_or_the_reported_one() {
    let mock = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    let front = ReloadableServer::start(&upstream("one", "ollama", &mock.url, "num_ctx = 16384"));
    assert_eq!(front.get("/props").await["default_generation_settings"]["n_ctx"], 16_384);
    assert_eq!(front.get("/slots").await[0]["n_ctx"], 16_384);

    let second = BatonServer::with(&["--engine", "sim", "--ctx-size", "64"]);
    let front = ReloadableServer::start(&upstream("second", "llama-server", &second.base, "models = { m = \"sim\" }"));
    assert_eq!(front.get("/props").await["default_generation_settings"]["n_ctx"], 64);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_cannot_be_reached_has_no_slots() {
    let second = BatonServer::with(&["--engine", "sim"]);
    let of_second = upstream("second", "llama-server", &second.base, "models = { m = \"sim\" }\nmax_concurrent = 2");
    let front = ReloadableServer::start(&of_second);
    let n_slots = async || front.get("/slots").await.as_array().unwrap().len();
    assert_eq!(n_slots().await, 2);
    drop(second);
    eventually_async("no slots", async || n_slots().await == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn show_passes_on_what_ollama_reports_without_its_secrets() {
    let mock = Mock::start(|_, asked| match asked.path.as_str() {
        "/api/show" => whole(200, "", &shown()),
        _ => whole(500, "", &json!({})),
    })
    .await;
    let front = ReloadableServer::start(&upstream("one", "ollama", &mock.url, "num_ctx = 16384"));
    let answer = front.post("/api/show", &json!({ "model": "M:latest" })).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(mock.asked(0).body, json!({ "model": "theirs" }));
    let show = answer.json();
    assert_eq!(show["capabilities"], json!(["completion", "tools", "thinking", "vision"]));
    let expected = json!({
        "general.architecture": "qwen3", "general.parameter_count": 8_190_735_360_u64, "qwen3.context_length": 40_960,
    });
    assert_eq!(show["model_info"], expected);
    assert_eq!((&show["details"]["family"], &show["details"]["parameter_size"]), (&json!("qwen3"), &json!("8.2B")));
    assert!(!answer.text.contains("somebody"), "{answer:?}");

    // An upstream that does not answer reports nothing, which is no error.
    let gone = ReloadableServer::start(&upstream("gone", "ollama", "http://127.0.0.1:9", ""));
    let answer = gone.post("/api/show", &json!({ "model": "m" })).await;
    assert_eq!((answer.status, &answer.json()["model_info"]), (200, &json!({})), "{answer:?}");
    assert_eq!(answer.json()["capabilities"], json!(["completion", "tools"]), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_model_means_the_first_one() {
    let second = BatonServer::with(&["--engine", "sim"]);
    let front = ReloadableServer::start(&upstream("second", "llama-server", &second.base, "models = { m = \"sim\" }"));
    let tokens = front.post("/tokenize", &json!({ "content": "two words" })).await;
    assert_eq!(tokens.status, 200, "{tokens:?}");
    let back = front.post("/detokenize", &json!({ "tokens": tokens.json()["tokens"] })).await;
    assert_eq!((back.status, &back.json()["content"]), (200, &json!("two words")), "{back:?}");
    let chat = json!({ "messages": [{ "role": "user", "content": "two words" }] });
    let rendered = front.post("/apply-template", &chat).await;
    assert!(rendered.status == 200 && rendered.text.contains("two words"), "{rendered:?}");

    // A kind without this answers 501, without `retry-after`.
    let mock = Mock::start(|_, _| says("well")).await;
    let front = ReloadableServer::start(&upstream("one", "openai", &mock.url, ""));
    for (path, body) in
        [("/tokenize", json!({ "content": "x" })), ("/detokenize", json!({ "tokens": [1] })), ("/apply-template", chat)]
    {
        let answer = front.post(path, &body).await;
        assert_eq!((answer.status, answer.retry_after.as_deref()), (501, None), "{path}: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_is_not_asked_about_its_prompt() {
    let mock = Mock::start(|_, _| says("well")).await;
    let front = ReloadableServer::start(&upstream("one", "vllm", &mock.url, ""));
    for (field, fields) in
        [("logprobs", json!({ "echo": true, "logprobs": 1 })), ("prompt_logprobs", json!({ "prompt_logprobs": 1 }))]
    {
        let mut body = json!({ "model": "m", "prompt": "hi" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = front.post("/v1/completions", &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_of_upstreams_may_not_tokenize() {
    let mock = Mock::start(|_, _| whole(200, "", &json!({ "data": [] }))).await;
    let front = ReloadableServer::start(&upstream("one", "openai", &mock.url, ""));
    let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
    for (path, body, expected) in [
        ("/tokenize", json!({ "model": "m", "content": "hi" }), "an upstream of kind openai serves this model"),
        ("/apply-template", body, "an upstream of kind openai serves this model"),
    ] {
        let call = reqwest::Client::new().post(format!("{}{path}", front.server.base)).json(&body);
        let reply = call.send().await.unwrap();
        assert_eq!(reply.status(), 501, "{path}");
        let error: Value = reply.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("not supported here: ") && message.contains(expected), "{path}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn descriptions_of_a_hung_upstream_keep_nobody_from_those_of_others() {
    let hung = Mock::start(|_, _| vec![Step::Hang]).await;
    let well = Mock::start(|_, _| whole(200, "", &shown())).await;
    let config = upstream("hung", "ollama", &hung.url, "models = { hung = \"theirs\" }")
        + &upstream("well", "ollama", &well.url, "models = { well = \"theirs\" }");
    let front = ReloadableServer::start(&config);
    let show = |model: &str| {
        let body = json!({ "model": model });
        reqwest::Client::new().post(format!("{}/api/show", front.server.base)).json(&body).send()
    };
    // More than may run at once on the endpoint's own nodes.
    let waiting: Vec<_> = (0..100).map(|_| tokio::spawn(show("hung"))).collect();
    eventually_async("all are asked", async || hung.n_asked() >= 100).await;
    assert_eq!(show("well").await.unwrap().status(), 200);
    waiting.iter().for_each(|one| one.abort());
}
