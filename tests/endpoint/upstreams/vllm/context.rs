//! A prompt and its reply must fit into the model's context: what does not is cut or refused before a pair computes anything.

use harness::mock::{Mock, MockRequest, Step, says, whole};
use harness::{ReloadableServer, eventually_async, upstream};
use serde_json::{Value, json};

use super::{CHAT, pair, prefill};

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_is_too_long_says_nothing_of_the_upstream() {
    let decoder = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    decoder.list_with_context("theirs", 100);
    let front = ReloadableServer::start(&upstream("v", "vllm", &decoder.url, "models = {}"));
    eventually_async("the list", async || front.get("/v1/models").await["data"][0]["id"] == "theirs").await;
    assert_eq!(front.chat(json!({ "model": "theirs" })).await.status, 503);
    let tokens = json!({ "model": "theirs", "prompt": vec![7; 100], "max_tokens": 1 });
    let refused = front.post("/v1/completions", &tokens).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    assert_eq!(decoder.n_asked(), 1);
    let state = front.get("/baton/state").await;
    assert_eq!(state["upstreams"][0]["breaker"]["is_open"], true, "{state}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_fits_no_replica_is_refused_although_one_is_busy() {
    let [free, busy] = [
        Mock::start(|_, _| says("well")).await,
        Mock::start(|_, _| whole(429, "retry-after: 60\r\n", &json!({}))).await,
    ];
    [&free, &busy].into_iter().for_each(|mock| mock.list_with_context("theirs", 100));
    let config =
        [("free", &free), ("busy", &busy)].map(|(name, mock)| upstream(name, "vllm", &mock.url, "models = {}"));
    let front = ReloadableServer::start(&config.concat());
    eventually_async("both lists", async || {
        front.chat(json!({ "model": "theirs" })).await;
        busy.n_asked_at(CHAT) == 1
    })
    .await;
    let tokens = json!({ "model": "theirs", "prompt": vec![7; 100], "max_tokens": 1 });
    let refused = front.post("/v1/completions", &tokens).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
}

/// A server that counts 30 tokens in every prompt, and refuses requests that exceed its context of 100.
fn with_a_context(asked: &MockRequest) -> Vec<Step> {
    match asked.path.as_str() {
        "/tokenize" => whole(200, "", &json!({ "count": 30, "max_model_len": 100, "tokens": vec![7; 30] })),
        _ if asked.body["max_tokens"].as_u64().unwrap_or(0) > 70 => {
            let message = "This model's maximum context length is 100 tokens.";
            whole(400, "", &json!({ "object": "error", "message": message, "code": 400 }))
        }
        _ => says("well"),
    }
}

/// A pair whose decode server lists its model `theirs` with this context.
async fn pair_with_context(prefiller: &Mock, decoder: &Mock, n_ctx: u32) -> ReloadableServer {
    decoder.list_with_context("theirs", n_ctx);
    let front = pair(prefiller, decoder, "models = {}");
    eventually_async("the list", async || front.get("/v1/models").await["data"][0]["id"] == "theirs").await;
    front
}

#[tokio::test(flavor = "multi_thread")]
async fn more_tokens_than_the_context_has_left_are_cut_before_anything_is_computed() {
    let prefiller = Mock::start(|_, asked| prefill(asked)).await;
    let decoder = Mock::start(|_, asked| with_a_context(asked)).await;
    let front = pair_with_context(&prefiller, &decoder, 100).await;
    for (max_tokens, sent) in [(32_000, 70), (71, 70), (70, 70), (9, 9)] {
        let n_before = decoder.n_asked();
        let answer = front.chat(json!({ "model": "theirs", "stream": true, "max_tokens": max_tokens })).await;
        assert!(answer.status == 200 && answer.text.contains("well"), "{answer:?}");
        let question = decoder.asked(n_before);
        assert_eq!((question.path.as_str(), &question.body["messages"][0]["content"]), ("/tokenize", &json!("hi")));
        assert_eq!(decoder.asked(n_before + 1).body["max_tokens"], sent);
        assert!(decoder.asked(n_before + 1).body.get("kv_transfer_params").is_some());
    }
    let text = json!({ "model": "theirs", "prompt": "hi", "max_tokens": 32_000 });
    assert_eq!(front.post("/v1/completions", &text).await.status, 200);
    assert_eq!(decoder.asked(decoder.n_asked() - 1).body["max_tokens"], 70);
    // Tokens need no counting.
    let n_before = decoder.n_asked();
    let tokens = json!({ "model": "theirs", "prompt": vec![7; 60], "max_tokens": 50 });
    assert_eq!(front.post("/v1/completions", &tokens).await.status, 200);
    assert_eq!((decoder.n_asked(), &decoder.asked(n_before).body["max_tokens"]), (n_before + 1, &json!(40)));
    assert_eq!(prefiller.n_asked(), 6);
    let tokens = json!({ "model": "theirs", "prompt": vec![7; 100], "max_tokens": 1 });
    let refused = front.post("/v1/completions", &tokens).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    assert_eq!((prefiller.n_asked(), decoder.n_asked()), (6, n_before + 1), "nothing is computed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_counted_only_if_the_reply_may_not_fit() {
    let prefiller = Mock::start(|_, asked| prefill(asked)).await;
    let decoder = Mock::start(|_, asked| match asked.path.as_str() {
        "/tokenize" => whole(404, "", &json!({ "detail": "Not Found" })),
        _ => says("well"),
    })
    .await;
    let front = pair_with_context(&prefiller, &decoder, 32_768).await;
    for more in [json!({}), json!({ "max_tokens": 1_000 })] {
        let mut more = more;
        more["model"] = json!("theirs");
        assert_eq!(front.chat(more).await.content(), "well");
    }
    assert_eq!(decoder.n_asked_at("/tokenize"), 0);
    // Nobody counts: the request goes out as it is.
    assert_eq!(front.chat(json!({ "model": "theirs", "max_tokens": 32_000 })).await.content(), "well");
    assert_eq!((decoder.n_asked_at("/tokenize"), &decoder.asked(3).body["max_tokens"]), (1, &json!(32_000)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_counted_as_it_will_be_sent_and_by_the_server_of_now() {
    let decoder = Mock::start(|_, asked| match asked.path.as_str() {
        // The list is older: the server has restarted with a smaller context.
        "/tokenize" => whole(200, "", &json!({ "count": 30, "max_model_len": 60, "tokens": [] })),
        _ => says("well"),
    })
    .await;
    decoder.list_with_context("theirs", 100);
    let front = ReloadableServer::start(&upstream("v", "vllm", &decoder.url, "models = {}"));
    eventually_async("the list", async || front.get("/v1/models").await["data"][0]["id"] == "theirs").await;
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } });
    let more = json!({ "model": "theirs", "max_tokens": 90, "tools": [tool], "tool_choice": "required",
        "chat_template_kwargs": { "enable_thinking": false } });
    assert_eq!(front.chat(more).await.status, 200);
    let [counted, sent] = [0, 1].map(|i| decoder.asked(i));
    assert_eq!(counted.path, "/tokenize");
    for field in ["model", "messages", "tools", "chat_template_kwargs"] {
        assert!(sent.body[field] != Value::Null && counted.body[field] == sent.body[field], "{field}: {counted:?}");
    }
    assert_eq!(counted.body["tools"][0]["function"]["strict"], true, "a forced call is strict");
    assert_eq!(sent.body["max_tokens"], 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_is_sent_twice_only_if_it_did_not_fit() {
    let decoder = Mock::start(|_, asked| match asked.path.as_str() {
        "/tokenize" => whole(200, "", &json!({ "count": 32_000, "max_model_len": 32_768 })),
        _ if asked.body["max_tokens"].as_u64().unwrap_or(0) > 768 => {
            let message = "This model's maximum context length is 32768 tokens.";
            whole(400, "", &json!({ "object": "error", "message": message, "code": 400 }))
        }
        _ => says("well"),
    })
    .await;
    let prefiller = Mock::start(|_, asked| prefill(asked)).await;
    let front = pair_with_context(&prefiller, &decoder, 32_768).await;
    // 40 kB, which are 20,000 tokens at most if none has less than two bytes.
    let mut long = harness::said(&"word ".repeat(8_000), json!({ "model": "theirs", "max_tokens": 700 }));
    assert_eq!(front.post(CHAT, &long).await.status, 200);
    assert_eq!((decoder.n_asked_at("/tokenize"), decoder.n_asked()), (0, 1));
    long["max_tokens"] = json!(1_000);
    assert_eq!(front.post(CHAT, &long).await.status, 200);
    let asked = [1, 2, 3].map(|i| decoder.asked(i));
    assert_eq!(asked.each_ref().map(|asked| asked.path.as_str()), [CHAT, "/tokenize", CHAT]);
    assert_eq!((&asked[0].body["max_tokens"], &asked[2].body["max_tokens"]), (&json!(1_000), &json!(768)));
    assert!(asked[2].body.get("kv_transfer_params").is_some());
}
