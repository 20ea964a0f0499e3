use super::*;

#[tokio::test]
async fn text_becomes_tokens_and_tokens_text() {
    let server = start(hello()).await;
    let tokens = server.post_to("/tokenize", json!({"content": "ab", "add_special": true})).await;
    assert_eq!(tokens.json(), json!({"tokens": [97, 98, 1, 1]}));
    let text = server.post_to("/detokenize", json!({"tokens": [97, 98], "model": "m"})).await;
    assert_eq!(text.json(), json!({"content": "<97><98>", "prompt": "<97><98>"}));
    let pieces = server.post_to("/tokenize", json!({"content": "aé", "with_pieces": true})).await.json();
    assert_eq!(pieces["tokens"][0], json!({"id": 97, "piece": "a"}));
    assert_eq!(pieces["tokens"][1], json!({"id": 195, "piece": [195]}));
    let vllms = server.post_to("/tokenize", json!({"prompt": "ab", "add_special_tokens": false})).await;
    assert_eq!(vllms.json(), json!({"tokens": [97, 98, 0, 1], "count": 4, "max_model_len": 64}));
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]);
    let prompt = server.post_to("/apply-template", json!({ "messages": messages })).await;
    assert_eq!(prompt.json(), json!({"prompt": "system: s\nuser: u\n"}));
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let prompt = server.post_to("/apply-template", json!({ "messages": messages, "tools": tools })).await;
    assert_eq!(prompt.json(), json!({"prompt": "tool: f\nsystem: s\nuser: u\n"}));
    server.post_to("/tokenize", json!({"content": 3})).await.failed(400, "invalid_request_error", None);
    let unknown = json!({"content": "a", "model": "x"});
    server.post_to("/tokenize", unknown).await.failed(404, "not_found_error", Some("model_not_found"));
}

#[tokio::test]
async fn props_tell_the_model_and_no_path() {
    let server = start(hello()).await;
    let props = server.get("/props").await.json();
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(2), &json!("m")));
    assert_eq!(props["default_generation_settings"]["n_ctx"], 64);
    assert_eq!(props["chat_template"], "{{ messages }}");
    let tokenizer = server.get("/tokenizer_info").await.json();
    assert_eq!((&tokenizer["chat_template"], &tokenizer["model_max_length"]), (&json!("{{ messages }}"), &json!(64)));
    assert_eq!(tokenizer["pad_token"], Value::Null);
    assert_eq!(server.get("/props?model=org/name:q4").await.json()["model_alias"], "org/name:q4");
    server.get("/props?model=x").await.failed(404, "not_found_error", Some("model_not_found"));
}

#[tokio::test]
async fn slots_tell_how_many_are_taken() {
    let busy = |active_slots| Fake { active_slots, ..Fake::default() };
    let slots = start(busy(1)).await.get("/slots").await.json();
    let slot =
        |id: u32, is_processing| json!({"id": id, "n_ctx": 64, "speculative": false, "is_processing": is_processing});
    assert_eq!(slots, json!([slot(0, true), slot(1, false)]));
    let server = start(busy(2)).await;
    assert_eq!(server.get("/slots").await.status, 200);
    server.get("/slots?fail_on_no_slot=1").await.failed(503, "unavailable_error", Some("queue_full"));
}

fn llama_events(reply: &Reply) -> Vec<Value> {
    reply.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[tokio::test]
async fn a_completion_has_llama_servers_form() {
    let server = start(hello()).await;
    let whole = server.post_to("/completion", json!({"prompt": "hi", "n_predict": 4})).await;
    assert_eq!(whole.header("x-baton-route"), "direct test");
    let reply = whole.json();
    assert_eq!((&reply["content"], &reply["stop"]), (&json!("Hello"), &json!(true)), "{reply}");
    assert_eq!((&reply["tokens_evaluated"], &reply["tokens_predicted"]), (&json!(5), &json!(4)));
    assert!(reply["timings"]["predicted_n"].is_u64() && reply["stop_type"].is_string(), "{reply}");
    // Without a name, the first model answers.
    let name = server.get("/v1/models").await.json()["data"][0]["id"].clone();
    assert_eq!(reply["model"], name);
    let streamed = server.post_to("/completion", json!({"prompt": "hi", "stream": true})).await;
    let events = llama_events(&streamed);
    let (last, first) = events.split_last().unwrap();
    let text: String = first.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!((text.as_str(), &last["content"], &last["stop"]), ("Hello", &json!(""), &json!(true)));
    let wrong = server.post_to("/completion", json!({"prompt": "hi", "post_sampling_probs": true})).await;
    let error = wrong.failed(400, "invalid_request_error", Some("unsupported_parameter"));
    assert_eq!(error["param"], "post_sampling_probs");
}

#[tokio::test]
async fn a_completion_reports_its_tokens_if_asked() {
    let server = start(emits([started(0), text_with_logprobs(0, "He"), text_with_logprobs(0, "y"), finished(0)])).await;
    let token = |text: &str| {
        let prob = json!({"id": 1, "token": text, "bytes": text.as_bytes(), "logprob": -0.5});
        let mut token = prob.clone();
        token["top_logprobs"] = json!([prob]);
        token
    };
    let body = json!({"prompt": "hi", "n_probs": 1});
    let reply = server.post_to("/completion", body.clone()).await.json();
    assert_eq!(reply["completion_probabilities"], json!([token("He"), token("y")]), "{reply}");
    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = llama_events(&server.post_to("/completion", streamed).await);
    assert_eq!(events[0]["completion_probabilities"], json!([token("He")]));
    assert_eq!((&events[2]["stop"], events[2].get("completion_probabilities")), (&json!(true), None));
    let plain = server.post_to("/completion", json!({"prompt": "hi"})).await.json();
    assert_eq!(plain.get("completion_probabilities"), None);
}

#[tokio::test]
async fn several_prompts_get_a_reply_each() {
    let server = start(hello()).await;
    let replies = server.post_to("/completion", json!({"prompt": ["a", [1, 2], "c"]})).await.json();
    let of = |at: usize| (&replies[at]["index"], &replies[at]["content"], &replies[at]["tokens_evaluated"]);
    for at in 0..3 {
        assert_eq!(of(at), (&json!(at), &json!("Hello"), &json!(5)), "{replies}");
    }
    assert_eq!(replies.as_array().map(Vec::len), Some(3));
    let events = llama_events(&server.post_to("/completion", json!({"prompt": ["a", "b"], "stream": true})).await);
    for index in 0..2 {
        let own: Vec<&Value> = events.iter().filter(|event| event["index"] == index).collect();
        let text: String = own.iter().map(|event| event["content"].as_str().unwrap()).collect();
        let ends = own.iter().filter(|event| event["stop"] == true).count();
        assert_eq!((text.as_str(), ends, &own.last().unwrap()["stop"]), ("Hello", 1, &json!(true)));
    }
    let one = server.post_to("/completion", json!({"prompt": ["a"]})).await.json();
    assert_eq!(one["content"], "Hello", "one prompt has one reply: {one}");
}

#[tokio::test]
async fn infill_and_embedding_have_llama_servers_form() {
    let server = start(hello()).await;
    let gap = json!({"input_prefix": "a", "prompt": "b", "input_suffix": "c", "n_predict": 4});
    assert_eq!(server.post_to("/infill", gap).await.json()["content"], "Hello");
    let input = server.fake.requests.lock().unwrap()[0].0.input.clone();
    let is_gap = matches!(&input, Input::Infill { prefix, suffix, .. } if &**prefix == "ab" && &**suffix == "c");
    assert!(is_gap, "{input:?}");
    let vectors = server.post_to("/embedding", json!({"content": ["a", "b"], "model": "m"})).await.json();
    let of = |at: usize| vectors[at]["embedding"][0].as_array().map(Vec::len);
    assert_eq!((vectors[1]["index"].as_u64(), of(0).is_some(), of(0)), (Some(1), true, of(1)), "{vectors}");
}

#[tokio::test]
async fn documents_are_scored_under_each_name_of_the_route() {
    let server = start(hello()).await;
    let body =
        json!({"query": "abc", "documents": ["a", {"text": "abcde"}, "abcd"], "top_n": 2, "return_documents": true});
    for path in ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking", "/v2/rerank"] {
        let reply = server.post_to(path, body.clone()).await.json();
        let results = json!([{"index": 1, "relevance_score": 2.0, "document": {"text": "abcde"}},
            {"index": 2, "relevance_score": 1.0, "document": {"text": "abcd"}}]);
        assert_eq!((&reply["results"], &reply["usage"]["total_tokens"]), (&results, &json!(9)), "{path}: {reply}");
        let name = server.get("/v1/models").await.json()["data"][0]["id"].clone();
        assert_eq!((&reply["object"], &reply["model"]), (&json!("list"), &name));
    }
    let plain = server.post_to("/v1/rerank", json!({"model": "m", "query": "abc", "documents": ["a"]})).await.json();
    assert_eq!(plain["results"], json!([{"index": 0, "relevance_score": -2.0}]));
    let wrong = server.post_to("/v1/rerank", json!({"query": "q", "documents": [1]})).await;
    assert_eq!(wrong.failed(400, "invalid_request_error", None)["param"], "documents[0]");
    let too_long = RequestError::DocumentTooLong { idx: 1, n_tokens: 9, n_ctx: 8 };
    let server = start(before([Act::Fail(too_long)])).await;
    let failed = server.post_to("/v1/rerank", json!({"query": "q", "documents": ["a", "b"]})).await;
    let error = failed.failed(400, "invalid_request_error", Some("context_length_exceeded"));
    assert_eq!((&error["param"], &error["n_ctx"]), (&json!("documents[1]"), &json!(8)));
}
