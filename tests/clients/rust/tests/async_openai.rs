//! The async-openai crate: whole, streamed, tools, structured output, vectors, responses, and its errors.

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::ChatCompletionMessageToolCalls;
use futures::StreamExt as _;
use serde_json::{Value, from_value, json};

const MODEL: &str = "smollm2";

fn client() -> Client<OpenAIConfig> {
    let base = std::env::var("BATON_URL").unwrap();
    Client::with_config(OpenAIConfig::new().with_api_base(base).with_api_key("none"))
}

/// A greedy request with these further fields.
fn ask(more: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "What is the capital of France?" }]);
    let mut body = json!({ "model": MODEL, "messages": messages, "temperature": 0.0, "max_completion_tokens": 100 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_stream_says_what_the_whole_reply_says() {
    let body = ask(json!({ "max_completion_tokens": 12 }));
    let whole = client().chat().create(from_value(body.clone()).unwrap()).await.unwrap();
    let expected = whole.choices[0].message.content.clone().unwrap();
    assert!(!expected.is_empty() && whole.usage.unwrap().completion_tokens > 0);
    let mut stream = client().chat().create_stream(from_value(body).unwrap()).await.unwrap();
    let mut text = String::new();
    let mut reasons = Vec::new();
    while let Some(chunk) = stream.next().await {
        for choice in chunk.unwrap().choices {
            text += &choice.delta.content.unwrap_or_default();
            reasons.extend(choice.finish_reason);
        }
    }
    assert_eq!(text, expected);
    assert_eq!(reasons, [whole.choices[0].finish_reason.unwrap()]);
}

#[tokio::test]
async fn a_named_tool_is_called() {
    let parameters = json!({
        "type": "object", "properties": { "city": { "type": "string", "maxLength": 20 } }, "required": ["city"] });
    let body = ask(json!({
        "tools": [{ "type": "function", "function": { "name": "get_weather", "parameters": parameters } }],
        "tool_choice": { "type": "function", "function": { "name": "get_weather" } } }));
    let reply = client().chat().create(from_value(body.clone()).unwrap()).await.unwrap();
    let calls = reply.choices[0].message.tool_calls.as_ref().unwrap();
    let [ChatCompletionMessageToolCalls::Function(call)] = &calls[..] else { panic!("{calls:?}") };
    assert_eq!(call.function.name, "get_weather");
    let arguments: Value = serde_json::from_str(&call.function.arguments).unwrap();
    assert!(arguments["city"].is_string());

    let mut stream = client().chat().create_stream(from_value(body).unwrap()).await.unwrap();
    let mut name = String::new();
    let mut streamed = String::new();
    while let Some(chunk) = stream.next().await {
        let calls = chunk.unwrap().choices.into_iter().flat_map(|choice| choice.delta.tool_calls.unwrap_or_default());
        for function in calls.filter_map(|call| call.function) {
            name += &function.name.unwrap_or_default();
            streamed += &function.arguments.unwrap_or_default();
        }
    }
    assert_eq!((name, streamed), ("get_weather".into(), call.function.arguments.clone()));
}

#[tokio::test]
async fn structured_output() {
    let schema = json!({
        "type": "object", "properties": { "is_large": { "type": "boolean" } }, "required": ["is_large"],
        "additionalProperties": false });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "city", "strict": true, "schema": schema } });
    let body = ask(json!({ "response_format": format }));
    let reply = client().chat().create(from_value(body).unwrap()).await.unwrap();
    let said: Value = serde_json::from_str(reply.choices[0].message.content.as_ref().unwrap()).unwrap();
    assert!(said["is_large"].is_boolean() && said.as_object().unwrap().len() == 1);
}

#[tokio::test]
async fn vectors_in_both_encodings() {
    let body = json!({ "model": MODEL, "input": ["The cat sits on the mat.", "Interest rates rose."] });
    let floats = client().embeddings().create(from_value(body.clone()).unwrap()).await.unwrap();
    assert!(floats.data.iter().all(|item| item.embedding.len() == 576) && floats.data.len() == 2);
    let mut body = body;
    body["encoding_format"] = "base64".into();
    let encoded = client().embeddings().create_base64(from_value(body).unwrap()).await.unwrap();
    let decoded: Vec<f32> = encoded.data[0].embedding.clone().into();
    let dot: f32 = decoded.iter().zip(&floats.data[0].embedding).map(|(a, b)| a * b).sum();
    assert!((dot - 1.0).abs() < 1e-3, "{dot}");
}

#[tokio::test]
async fn a_response_and_its_events() {
    let body = json!({ "model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 12,
        "temperature": 0.0 });
    let whole = client().responses().create(from_value(body.clone()).unwrap()).await.unwrap();
    assert!(!whole.output_text().unwrap().is_empty());
    let mut stream = client().responses().create_stream(from_value(body).unwrap()).await.unwrap();
    let mut n_events = 0;
    while let Some(event) = stream.next().await {
        event.unwrap();
        n_events += 1;
    }
    assert!(n_events > 8);
}

#[tokio::test]
async fn mistakes_are_its_own_errors() {
    let long = json!([{ "role": "user", "content": "word ".repeat(20_000) }]);
    let cases = [
        (json!({ "model": "nope" }), 404, Some("model_not_found")),
        (json!({ "temperature": 7.0 }), 400, None),
        (json!({ "messages": long }), 400, Some("context_length_exceeded")),
    ];
    for (change, status, code) in cases {
        let error = client().chat().create(from_value(ask(change)).unwrap()).await.unwrap_err();
        let OpenAIError::ApiError(error) = error else { panic!("{error}") };
        assert_eq!(error.status_code.as_u16(), status);
        assert!(!error.api_error.message.is_empty());
        assert!(code.is_none() || error.api_error.code.as_deref() == code);
    }
}
