//! Log-probabilities of a prompt's tokens, as evaluators read them. The tests of the engines compare them with a plain loop.

use harness::{BatonServer, MAX_NOISE, long_prompt};
use serde_json::{Value, json};

const TEXT: &str = "The capital of France is Paris, and the capital of Norway is Oslo. In winter it is cold there.";

async fn complete(server: &BatonServer, fields: Value) -> (u16, Value) {
    let mut body = json!({ "model": "smollm2", "temperature": 0, "prompt": TEXT });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let url = format!("{}/v1/completions", server.base);
    let reply = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
    (reply.status().as_u16(), reply.json().await.unwrap())
}

fn numbers(logprobs: &Value) -> Vec<Option<f64>> {
    logprobs["token_logprobs"].as_array().unwrap().iter().map(Value::as_f64).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_with_log_probabilities_serves_evaluators() {
    let server = BatonServer::start(&[]);
    let (_, said) = complete(&server, json!({ "max_tokens": 12, "logprobs": 2 })).await;
    let said = &said["choices"][0];
    let whole = format!("{TEXT}{}", said["text"].as_str().unwrap());

    // A reply that is read back as a prompt has the log-probabilities with which it was generated.
    let (status, echoed) =
        complete(&server, json!({ "prompt": whole, "max_tokens": 0, "logprobs": 2, "echo": true })).await;
    assert_eq!(status, 200, "{echoed}");
    let choice = &echoed["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(whole), &json!("length")));
    let logprobs = &choice["logprobs"];
    let all = numbers(logprobs);
    assert_eq!(all.len() as u64, echoed["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!((all[0], &logprobs["top_logprobs"][0]), (None, &Value::Null));
    let generated = numbers(&said["logprobs"]);
    assert_eq!(generated.len(), 12);
    for (read, written) in all[all.len() - 12..].iter().zip(&generated) {
        assert!((read.unwrap() - written.unwrap()).abs() < f64::from(MAX_NOISE), "{all:?} {generated:?}");
    }
    let texts: String = logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(texts, whole);
    for (offset, token) in
        logprobs["text_offset"].as_array().unwrap().iter().zip(logprobs["tokens"].as_array().unwrap())
    {
        let rest: String = whole.chars().skip(offset.as_u64().unwrap() as usize).collect();
        assert!(rest.starts_with(token.as_str().unwrap()), "{token} at {offset}");
    }

    // As lm-eval asks: tokens, one token more, and all entries but the last. A model that ends there has one, too.
    let tokens = reqwest::Client::new().post(format!("{}/tokenize", server.base)).json(&json!({ "prompt": TEXT }));
    let tokens: Value = tokens.send().await.unwrap().json().await.unwrap();
    let n_tokens = tokens["count"].as_u64().unwrap() as usize;
    let info = reqwest::get(format!("{}/tokenizer_info", server.base)).await.unwrap();
    let end = info.json::<Value>().await.unwrap()["eos_token"].clone();
    let end = reqwest::Client::new()
        .post(format!("{}/tokenize", server.base))
        .json(&json!({ "prompt": end, "add_special_tokens": false }));
    let end = end.send().await.unwrap().json::<Value>().await.unwrap()["tokens"][0].to_string();
    let asked = json!({ "prompt": [tokens["tokens"]], "max_tokens": 1, "logprobs": 1, "echo": true });
    let (_, plain) = complete(&server, asked.clone()).await;
    assert_eq!(numbers(&plain["choices"][0]["logprobs"]).len(), n_tokens + 1, "{plain}");
    let mut ending = asked;
    ending["logit_bias"] = json!({ end: 100 });
    let (_, ended) = complete(&server, ending).await;
    let choice = &ended["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(TEXT), &json!("stop")), "{ended}");
    assert_eq!(numbers(&choice["logprobs"]).len(), n_tokens + 1, "{ended}");
    for (one, other) in
        numbers(&choice["logprobs"])[1..n_tokens].iter().zip(&numbers(&plain["choices"][0]["logprobs"])[1..])
    {
        assert!((one.unwrap() - other.unwrap()).abs() < f64::from(MAX_NOISE), "{ended} {plain}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vllms_prompt_logprobs_are_answered_and_bounded() {
    let server = BatonServer::start(&[]);
    let (_, reply) = complete(&server, json!({ "max_tokens": 2, "prompt_logprobs": 3 })).await;
    let entries = reply["choices"][0]["prompt_logprobs"].as_array().unwrap();
    let (cached, computed) = (&reply["usage"]["prompt_tokens_details"]["cached_tokens"], &reply["timings"]["prompt_n"]);
    assert_eq!((cached, computed), (&json!(0), &reply["usage"]["prompt_tokens"]), "they were computed: {reply}");
    assert_eq!(entries.len() as u64, reply["usage"]["prompt_tokens"].as_u64().unwrap(), "{reply}");
    assert_eq!((&entries[0], &reply["choices"][0]["logprobs"]), (&Value::Null, &Value::Null));
    for entry in &entries[1..] {
        let tokens = entry.as_object().unwrap();
        assert!((3..=4).contains(&tokens.len()), "{entry}");
        assert!(tokens.values().any(|token| token["rank"] == 1 && token["decoded_token"].is_string()), "{entry}");
    }
    let many = json!({ "prompt": [long_prompt("a", 900), "b"], "n": 16, "max_tokens": 1, "prompt_logprobs": 20 });
    let (status, error) = complete(&server, many).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("prompt_logprobs")), "{error}");
}
