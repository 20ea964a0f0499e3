use super::*;

async fn complete(server: &TestServer, fields: Value) -> Reply {
    let mut body = json!({"model": "m", "prompt": "hi"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post_to("/v1/completions", body).await
}

#[tokio::test]
async fn a_whole_reply() {
    let server = start(hello()).await;
    let reply = complete(&server, json!({"seed": 3})).await;
    assert_eq!((reply.status, reply.header("x-baton-route")), (200, "direct test"));
    let body = reply.json();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["choices"], json!([{"text": "Hello", "index": 0, "logprobs": null, "finish_reason": "stop"}]));
    assert_eq!((&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]), (&json!(5), &json!(4)));
    let requests = server.fake.requests.lock().unwrap();
    assert_eq!((&requests[0].0.input, requests[0].0.max_tokens), (&Input::Text("hi".into()), Some(16)));
}

#[tokio::test]
async fn several_prompts_are_answered_side_by_side_and_in_order() {
    let server = start(hello()).await;
    let fields = json!({"prompt": ["a", "b", [7, 8]], "echo": true});
    let body = complete(&server, fields.clone()).await.json();
    let texts: Vec<_> = body["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["aHello", "bHello", "<7><8>Hello"]);
    assert_eq!((&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]), (&json!(15), &json!(12)));
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 6);

    let mut fields = fields;
    fields["stream"] = json!(true);
    let reply = complete(&server, fields).await;
    assert_eq!(reply.events().last(), Some(&"[DONE]"));
    let mut texts = vec![String::new(); 3];
    for chunk in reply.chunks() {
        let choice = &chunk["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert_eq!(texts, ["aHello", "bHello", "<7><8>Hello"]);
    let ends = reply.chunks().iter().filter(|chunk| chunk["choices"][0]["finish_reason"] == "stop").count();
    assert_eq!(ends, 3);
}

#[tokio::test]
async fn one_prompt_that_fails_ends_all() {
    let fails = || {
        acts([
            Act::Emit(started(0)),
            Act::Emit(text(0, "a")),
            Act::Fail(RequestError::Unavailable { reason: "gone".into(), retry_after: SOON }),
        ])
    };
    let server = start(fails()).await;
    complete(&server, json!({"prompt": ["a", "b"]})).await.failed(503, "unavailable_error", None);
    server.until_live(0).await;
    let reply = complete(&server, json!({"prompt": ["a", "b"], "stream": true})).await;
    assert!(reply.chunks().last().unwrap()["error"]["message"].as_str().unwrap().contains("gone"));
    assert_ne!(reply.events().last(), Some(&"[DONE]"));
    server.until_live(0).await;
}

#[tokio::test]
async fn log_probabilities_have_the_older_shape() {
    let events = [started(0), text_with_logprobs(0, "é"), text_with_logprobs(0, "x"), finished(0)];
    let server = start(emits(events)).await;
    let body = complete(&server, json!({"logprobs": 1})).await.json();
    assert_eq!(
        body["choices"][0]["logprobs"],
        json!({"tokens": ["é", "x"], "token_logprobs": [-0.5, -0.5], "top_logprobs": [{"é": -0.5}, {"x": -0.5}],
               "text_offset": [0, 1]})
    );
    let chunks = complete(&server, json!({"logprobs": 1, "stream": true})).await.chunks();
    assert_eq!(chunks[1]["choices"][0]["logprobs"]["text_offset"], json!([1]));
}

/// The prompt `hi`, with a token before it that its text does not have.
fn prompt() -> ReplyEvent {
    let token = |id: u32, bytes: &str, special, logprob: Option<f32>| GeneratedToken {
        id,
        bytes: bytes.into(),
        special,
        logprobs: logprob.map(|chosen| {
            let top = vec![
                Alternative { id: 9, bytes: b"no".to_vec(), logprob: -0.25 },
                Alternative { id: 8, bytes: b"so".to_vec(), logprob: -0.75 },
            ];
            Logprobs { chosen, rank: None, top }
        }),
        drafts: None,
    };
    let tokens = [token(1, "<s>", true, None), token(2, "h", false, Some(-2.0)), token(3, "i", false, Some(-3.0))];
    EventKind::Prompt { tokens: tokens.into() }.of(0)
}

#[tokio::test]
async fn an_echo_with_log_probabilities_begins_each_choice() {
    let events = [
        prompt(),
        started(0),
        text_with_logprobs(0, "x"),
        finished(0),
        started(1),
        text_with_logprobs(1, "y"),
        finished(1),
    ];
    let server = start(emits(events)).await;
    let asked = json!({"logprobs": 1, "echo": true, "n": 2});
    let body = complete(&server, asked.clone()).await.json();
    for (choice, said) in body["choices"].as_array().unwrap().iter().zip(["x", "y"]) {
        assert_eq!(choice["text"], format!("hi{said}"));
        let top = json!([null, {"no": -0.25}, {"no": -0.25}, {said: -0.5}]);
        assert_eq!(
            choice["logprobs"],
            json!({"tokens": ["<s>", "h", "i", said], "token_logprobs": [null, -2.0, -3.0, -0.5],
                   "top_logprobs": top, "text_offset": [0, 0, 1, 2]})
        );
        assert_eq!(choice.get("prompt_logprobs"), None);
    }
    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let reply = complete(&server, streamed).await;
    for index in [0, 1] {
        let chunks = reply.chunks();
        let of_choice: Vec<_> =
            chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|c| c["index"] == index).collect();
        assert_eq!(
            (&of_choice[0]["text"], &of_choice[0]["logprobs"]["text_offset"]),
            (&json!("hi"), &json!([0, 0, 1]))
        );
        assert_eq!(of_choice[1]["logprobs"]["text_offset"], json!([2]));
    }
    let requests = server.fake.requests.lock().unwrap();
    assert!(requests.iter().all(|(request, _)| request.prompt_logprobs.is_some() && request.reports_end()));
}

#[tokio::test]
async fn a_prompts_tokens_come_in_vllms_shape() {
    let server = start(emits([prompt(), started(0), text(0, "x"), finished(0)])).await;
    let body = complete(&server, json!({"prompt_logprobs": 1})).await.json();
    let choice = &body["choices"][0];
    assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("x"), &Value::Null));
    let entry = |id: &str, logprob: f32, text: &str| {
        json!({"9": {"logprob": -0.25, "rank": 1, "decoded_token": "no"},
               id: {"logprob": logprob, "rank": null, "decoded_token": text}})
    };
    assert_eq!(choice["prompt_logprobs"], json!([null, entry("2", -2.0, "h"), entry("3", -3.0, "i")]));
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused_in_the_envelope() {
    let server = start(hello()).await;
    let refused = |fields: Value| complete(&server, fields);
    refused(json!({"best_of": 4})).await.failed(400, "invalid_request_error", Some("unsupported_parameter"));
    refused(json!({"prompt": []})).await.failed(400, "invalid_request_error", None);
    refused(json!({"echo": true, "prompt": [[1]], "model": "x"})).await.failed(
        404,
        "not_found_error",
        Some("model_not_found"),
    );
    assert!(server.fake.requests.lock().unwrap().is_empty());
}
