//! Requests to Ollama: prompts are not truncated, and `keep_alive` is passed on.

use harness::BatonServer;
use harness::mock::{Mock, Step, whole};
use harness::{ReloadableServer, said, upstream};
use serde_json::{Value, json};

/// The last line of an Ollama reply.
fn done(body: &Value) -> Vec<Step> {
    let said = json!({ "role": "assistant", "content": "Hi" });
    let end = json!({ "model": body["model"], "message": said, "response": "", "done": true, "done_reason": "stop" });
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n";
    vec![Step::Send(format!("{head}{end}\n"))]
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_not_cut_and_keep_alive_is_forwarded() {
    let mock = Mock::start(|_, asked| done(&asked.body)).await;
    let front = ReloadableServer::start(&upstream("one", "ollama", &mock.url, ""));
    let mut chat = said("hi", json!({ "stream": false, "keep_alive": "10m" }));
    assert_eq!(front.post("/api/chat", &chat).await.status, 200);
    let asked = mock.asked(0);
    assert_eq!((asked.path.as_str(), &asked.body["keep_alive"]), ("/api/chat", &json!("600s")));
    assert_eq!((&asked.body["truncate"], &asked.body["shift"]), (&json!(false), &json!(false)));

    // Loading and unloading reach the upstream.
    for (keep_alive, reason, sent) in [(json!(-1), "load", json!(-1)), (json!(0), "unload", json!("0s"))] {
        let n_before = mock.n_asked();
        let body = json!({ "model": "m", "keep_alive": keep_alive });
        let answer = front.post("/api/generate", &body).await;
        assert_eq!((answer.status, &answer.json()["done_reason"]), (200, &json!(reason)), "{answer:?}");
        let asked = mock.asked(n_before);
        assert_eq!((asked.path.as_str(), &asked.body["model"]), ("/api/generate", &json!("theirs")));
        assert_eq!((&asked.body["keep_alive"], &asked.body["prompt"]), (&sent, &Value::Null));
    }
    chat["messages"] = json!([]);
    chat["keep_alive"] = json!(0);
    let answer = front.post("/api/chat", &chat).await;
    assert_eq!(answer.json()["done_reason"], "unload", "{answer:?}");
    assert_eq!(mock.asked(mock.n_asked() - 1).body["keep_alive"], "0s");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_kinds_refuse_to_unload() {
    let mock = Mock::start(|_, _| Vec::new()).await;
    let front = ReloadableServer::start(&upstream("one", "llama-server", &mock.url, ""));
    let answer = front.post("/api/generate", &json!({ "model": "m", "keep_alive": 0 })).await;
    assert_eq!((answer.status, mock.n_asked()), (501, 0), "{answer:?}");
    let answer = front.post("/api/generate", &json!({ "model": "m" })).await;
    assert_eq!((answer.status, &answer.json()["done_reason"], mock.n_asked()), (200, &json!("load"), 0), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_come_from_an_ollama_that_returns_them() {
    let mock = Mock::start(|_, asked| {
        let entry = json!({ "token": "Hi", "logprob": -0.5, "bytes": [72, 105] });
        let mut logprob = entry.clone();
        logprob["top_logprobs"] = json!([entry]);
        // Other requests get the reply of an Ollama that is too old for log-probabilities.
        let logprobs = if asked.body["top_logprobs"] == 1 { json!([logprob]) } else { Value::Null };
        let said = json!({ "role": "assistant", "content": "Hi" });
        let end = json!({ "message": said, "logprobs": logprobs, "done": true, "done_reason": "stop" });
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n";
        vec![Step::Send(format!("{head}{end}\n"))]
    })
    .await;
    let wants = |n_top: u32| json!({ "logprobs": true, "top_logprobs": n_top });
    let front = ReloadableServer::start(&upstream("plain", "ollama", &mock.url, ""));
    let refused = front.chat(wants(1)).await;
    assert_eq!((refused.status, mock.n_asked()), (400, 0), "{refused:?}");

    let fields = "fields = [\"temperature\", \"top_k\", \"top_p\", \"seed\", \"logprobs\"]";
    let front = ReloadableServer::start(&upstream("newer", "ollama", &mock.url, fields));
    let answer = front.chat(wants(1)).await;
    assert_eq!((answer.status, &mock.asked(0).body["logprobs"]), (200, &json!(true)), "{answer:?}");
    let entry = answer.json()["choices"][0]["logprobs"]["content"][0].clone();
    assert_eq!((&entry["token"], &entry["logprob"]), (&json!("Hi"), &json!(-0.5)), "{answer:?}");
    assert_eq!(entry["top_logprobs"].as_array().map(Vec::len), Some(1), "{entry}");
    let silent = front.chat(wants(2)).await;
    assert_eq!((silent.status, &silent.json()["error"]["param"]), (400, &json!("logprobs")), "{silent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_does_not_fit_is_reported_as_such() {
    // Ollama's own message has no numbers.
    let mock =
        Mock::start(|_, _| whole(400, "", &json!({ "error": "the input length exceeds the context length" }))).await;
    let front = ReloadableServer::start(&upstream("one", "ollama", &mock.url, ""));
    let answer = front.chat(json!({})).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["code"]),
        (400, &json!("context_length_exceeded")),
        "{answer:?}"
    );

    // A second Baton's message has them, through any kind.
    let second = BatonServer::with(&["--engine", "sim", "--ctx-size", "64"]);
    for kind in ["ollama", "openai", "llama-server"] {
        let front = ReloadableServer::start(&upstream("second", kind, &second.base, "models = { m = \"sim\" }"));
        let answer = front.post("/v1/chat/completions", &said(&"word ".repeat(100), json!({}))).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["code"]), (400, &json!("context_length_exceeded")), "{kind}: {answer:?}");
        assert_eq!(error["n_ctx"], 64, "{kind}: {error}");
        assert!(error["n_prompt_tokens"].as_u64().unwrap() > 64, "{kind}: {error}");
        let answer = front.post("/v1/messages", &said(&"word ".repeat(100), json!({ "max_tokens": 5 }))).await;
        assert!(answer.text.contains("prompt is too long"), "{kind}: {answer:?}");
    }
}
