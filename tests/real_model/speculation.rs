//! Speculation from a client's request to what the client and the operator see of it.

use std::fs::{self, File};

use harness::{BatonServer, chat, eventually_async};
use serde_json::{Value, json};
use tiny_gguf::Architecture;

async fn ask(server: &BatonServer, body: &Value) -> Value {
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(body);
    let response = call.send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

/// The accepted and the rejected tokens of the client's prediction, as a reply's usage has them.
fn counted(reply: &Value) -> [u64; 2] {
    let details = &reply["usage"]["completion_tokens_details"];
    ["accepted", "rejected"].map(|word| details[format!("{word}_prediction_tokens")].as_u64().unwrap())
}

/// The count of predicted tokens with this result in the metrics.
async fn metric(server: &BatonServer, result: &str) -> u64 {
    let metrics = server.get_text("/metrics").await;
    let of = |line: &&str| {
        let has = |part: &str| line.contains(part);
        has("baton_draft_tokens_total{") && has("drafter=\"prediction\"") && has(&format!("result=\"{result}\""))
    };
    metrics.lines().find(of).map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prediction_is_counted_for_client_and_operator_and_changes_no_text() {
    let server = |speculation| BatonServer::start(&["--speculation", speculation, "--no-calibration"]);
    let content = |reply: &Value| reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let question = chat("Name the planets of the solar system in order.", json!({ "max_tokens": 64 }));

    let off = server("off");
    let expected = ask(&off, &question).await;
    let mut predicted = question;
    predicted["prediction"] = json!({ "type": "content", "content": content(&expected) });
    let without = ask(&off, &predicted).await;
    assert_eq!(content(&without), content(&expected));
    assert!(without["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].is_null(), "{without}");
    assert!(without["timings"]["draft_n"].is_null(), "{without}");
    drop(off);

    let auto = server("auto");
    let reply = ask(&auto, &predicted).await;
    assert_eq!(content(&reply), content(&expected));
    let [accepted, rejected] = counted(&reply);
    assert!(accepted > 0, "{reply}");
    let timing = |field: &str| reply["timings"][field].as_u64().unwrap();
    let [n, n_accepted] = ["draft_n", "draft_n_accepted"].map(timing);
    assert!(n_accepted >= accepted && n >= accepted + rejected, "{reply}");
    eventually_async("the request to be counted", || async { metric(&auto, "accepted").await == accepted }).await;
    assert_eq!(metric(&auto, "rejected").await, rejected);
    let state = auto.state().await;
    let drafts = &state["routes"][0]["drafts"];
    assert_eq!((&drafts["n"], &drafts["n_accepted"]), (&json!(n), &json!(n_accepted)), "{state}");

    // A stop string ends a reply before the engine's last event.
    let text = content(&expected);
    let stop: String = text.chars().skip(text.chars().count() * 3 / 4).take(12).collect();
    let mut stopped = predicted;
    stopped["stop"] = json!(stop);
    let reply = ask(&auto, &stopped).await;
    assert_eq!(content(&reply), text.split(&stop).next().unwrap());
    let [more, more_rejected] = counted(&reply);
    let n_completion = reply["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(more > 0 && more <= n_completion, "{reply}");
    let all = accepted + more;
    eventually_async("the stopped reply to be counted", || async { metric(&auto, "accepted").await == all }).await;
    assert_eq!(metric(&auto, "rejected").await, rejected + more_rejected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_head_cannot_guess_is_served_without_it_and_the_log_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let [model, log] = ["model.gguf", "log"].map(|name| folder.path().join(name));
    tiny_gguf::write_with_heads(&model, Architecture::Glm4Moe, 1, 2);
    let of_model = ["--model", model.to_str().unwrap(), "--name", "head", "--threads", "1"];
    let args = [&of_model[..], &["--speculation", "auto", "--no-calibration"]].concat();
    let server = BatonServer::started(File::create(&log).unwrap(), &args, &[("RUST_LOG", "info")]);
    let body = json!({ "model": "head", "prompt": "the", "max_tokens": 8 });
    let call = reqwest::Client::new().post(format!("{}/v1/completions", server.base)).json(&body);
    assert_eq!(call.send().await.unwrap().status(), 200);
    let log = fs::read_to_string(&log).unwrap();
    let line = log.lines().find(|line| line.contains("own head guesses nothing")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("several blocks"), "{line}");
}
