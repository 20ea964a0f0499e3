use serde_json::{Value, json};

use super::*;
use crate::MessageRole;
use crate::generate::{Message, Sampling, Thinking};
use crate::sampling_fields::SamplingFields;
use crate::tools::ToolUse;

/// A smallest body with `extra` fields.
fn body(extra: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn parsed(extra: &Value) -> Result<ChatRequest, InvalidRequest> {
    ChatRequest::parse(body(extra.clone()).to_string().as_bytes(), 7)
}

/// The request a smallest body becomes, changed by `change`.
fn check(extra: Value, change: impl FnOnce(&mut ChatRequest)) {
    let user = Message::new(MessageRole::User, "hi".into());
    let mut expected = ChatRequest {
        generate: GenerateRequest {
            model: "m".into(),
            input: Input::Chat(Conversation { messages: vec![user], ..Conversation::default() }),
            n: 1,
            max_tokens: None,
            stop: [].into(),
            sampling: Sampling { seed: 7, ..Sampling::default() },
            chosen: SamplingFields::default(),
            top_logprobs: None,
            ignore_eos: false,
            constraint: None,
            tools: ToolUse::default(),
            thinking: Thinking::AsSaid,
            keep_alive: None,
            num_ctx: None,
            context: None,
            prompt_logprobs: None,
            predicted: None,
            is_streamed: false,
        },
        include_usage: false,
        has_functions: false,
    };
    change(&mut expected);
    let parsed = parsed(&extra).unwrap();
    // What was chosen is in `sampling`, too.
    expected.generate.chosen = parsed.generate.chosen;
    assert_eq!(parsed, expected, "{extra}");
}

fn refused(extra: Value, param: &str) {
    assert_eq!(parsed(&extra).unwrap_err().param.as_deref(), Some(param), "{extra}");
}

#[test]
fn fields_reach_the_request() {
    check(json!({}), |_| ());
    check(json!({"n": 16}), |r| r.generate.n = 16);
    check(json!({"n": null}), |_| ());
    check(json!({"max_tokens": 5}), |r| r.generate.max_tokens = Some(5));
    check(json!({"max_tokens": 0}), |r| r.generate.max_tokens = Some(0));
    check(json!({"max_tokens": -1}), |_| ());
    check(json!({"max_tokens": null, "max_completion_tokens": null}), |_| ());
    check(json!({"max_tokens": 5, "max_completion_tokens": 9}), |r| r.generate.max_tokens = Some(9));
    check(json!({"max_tokens": 5, "max_completion_tokens": -1}), |_| ());
    check(json!({"max_tokens": 5, "max_completion_tokens": null}), |r| r.generate.max_tokens = Some(5));
    check(json!({"stop": "x"}), |r| r.generate.stop = ["x".into()].into());
    check(json!({"stop": ["x", "yz"]}), |r| r.generate.stop = ["x".into(), "yz".into()].into());
    check(json!({"stop": []}), |_| ());
    check(json!({"stop": null}), |_| ());
    check(json!({"logprobs": true}), |r| r.generate.top_logprobs = Some(0));
    check(json!({"logprobs": true, "top_logprobs": 20}), |r| r.generate.top_logprobs = Some(20));
    check(json!({"logprobs": false, "top_logprobs": 0}), |_| ());
    check(json!({"ignore_eos": true}), |r| r.generate.ignore_eos = true);
    check(json!({"ignore_eos": null}), |_| ());
    check(json!({"stream": true}), |r| r.generate.is_streamed = true);
    check(json!({"stream": true, "stream_options": {"include_usage": true}}), |r| {
        r.generate.is_streamed = true;
        r.include_usage = true;
    });
    check(json!({"stream_options": null}), |_| ());
    check(json!({"stream_options": {}}), |_| ());
    check(json!({"temperature": 0, "seed": 3}), |r| {
        r.generate.sampling.temperature = 0.0;
        (r.generate.sampling.seed, r.generate.sampling.repeatable) = (3, true);
    });
}

#[test]
fn fields_that_mean_nothing_here_never_fail_a_request() {
    check(
        json!({
            "store": true, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
            "prompt_cache_retention": "24h", "safety_identifier": "s", "verbosity": "low", "user": "u", "parallel_tool_calls": true,
            "tool_choice": "auto", "tools": [], "response_format": {"type": "text"}, "something_new": [1, {"a": null}],
        }),
        |_| (),
    );
}

#[test]
fn a_prediction_is_a_text_or_parts_of_text() {
    let predicted = |text: &str| Some(text.into());
    check(json!({"prediction": {"type": "content", "content": "x"}}), |r| r.generate.predicted = predicted("x"));
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    check(json!({"prediction": {"type": "content", "content": parts}}), |r| r.generate.predicted = predicted("a\nb"));
    check(json!({"prediction": null}), |_| ());
    refused(json!({"prediction": {"type": "tokens", "content": "x"}}), "prediction.type");
    refused(json!({"prediction": {"type": "content"}}), "prediction.content");
    refused(json!({"prediction": "x"}), "prediction");
    let image = json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]);
    refused(json!({"prediction": {"type": "content", "content": image}}), "prediction");
}

#[test]
fn what_is_wrong_is_named() {
    refused(json!({"model": null}), "model");
    refused(json!({"model": ""}), "model");
    refused(json!({"model": 7}), "model");
    refused(json!({"messages": null}), "messages");
    refused(json!({"n": 0}), "n");
    refused(json!({"n": 17}), "n");
    refused(json!({"n": 1.5}), "n");
    refused(json!({"n": "1"}), "n");
    refused(json!({"max_tokens": -2}), "max_tokens");
    refused(json!({"max_tokens": 1e18}), "max_tokens");
    refused(json!({"max_tokens": "many"}), "max_tokens");
    refused(json!({"max_tokens": -2, "max_completion_tokens": 5}), "max_tokens");
    refused(json!({"max_completion_tokens": 0.5}), "max_completion_tokens");
    refused(json!({"stop": ""}), "stop");
    refused(json!({"stop": ["a", ""]}), "stop");
    refused(json!({"stop": ["a", 1]}), "stop");
    refused(json!({"stop": 1}), "stop");
    refused(json!({"stop": vec!["x"; 17]}), "stop");
    refused(json!({"stop": "x".repeat(1025)}), "stop");
    refused(json!({"logprobs": 5}), "logprobs");
    refused(json!({"top_logprobs": 5}), "top_logprobs");
    refused(json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs");
    refused(json!({"logprobs": true, "top_logprobs": -1}), "top_logprobs");
    refused(json!({"stream": "yes"}), "stream");
    refused(json!({"stream_options": true}), "stream_options");
    refused(json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage");
    refused(json!({"temperature": 3}), "temperature");
    refused(json!({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}), "tools[0].function.name");
    refused(json!({"response_format": {"type": "xml"}}), "response_format");
}

#[test]
fn a_message_shows_the_range_and_the_value() {
    let message = |extra: Value| parsed(&extra).unwrap_err().message;
    assert_eq!(message(json!({"temperature": 3})), "Invalid 'temperature': must be from 0 to 2, but is 3.");
    assert_eq!(message(json!({"n": 0})), "Invalid 'n': must be an integer from 1 to 16, but is 0.");
    assert_eq!(message(json!({"top_p": "x"})), "Invalid 'top_p': must be a number, but is a string.");
}

#[test]
fn arbitrary_bytes_never_panic() {
    use proptest::prelude::*;
    let json = prop_oneof![
        any::<Vec<u8>>(),
        r#"\{"(model|messages|n|stop|seed|logit_bias|tools)":[\[\]{}0-9a-z",:.-]{0,40}\}"#.prop_map(String::into_bytes),
    ];
    proptest!(|(body in json)| {
        let _ = ChatRequest::parse(&body, 0);
    });
}
