//! The ollama-rs crate: whole, streamed, tools, structured output, vectors, what there is, and its errors.

use futures::StreamExt as _;
use ollama_rs::Ollama;
use ollama_rs::generation::chat::ChatMessage;
use ollama_rs::generation::chat::request::ChatMessageRequest;
use ollama_rs::generation::completion::request::GenerationRequest;
use ollama_rs::generation::embeddings::request::GenerateEmbeddingsRequest;
use ollama_rs::generation::parameters::FormatType;
use ollama_rs::models::ModelOptions;
use serde_json::{Value, from_value, json};

const MODEL: &str = "smollm2";
const ASK: &str = "What is the capital of France?";

fn client() -> Ollama {
    Ollama::try_new(std::env::var("BATON_OLLAMA_URL").unwrap().as_str()).unwrap()
}

fn ask(model: &str, n_predict: i32) -> ChatMessageRequest {
    ChatMessageRequest::new(model.into(), vec![ChatMessage::user(ASK.into())])
        .options(ModelOptions::default().temperature(0.0).num_predict(n_predict))
}

#[tokio::test]
async fn a_stream_says_what_the_whole_reply_says() {
    let whole = client().send_chat_messages(ask(MODEL, 12)).await.unwrap();
    assert!(!whole.message.content.is_empty() && whole.done && whole.final_data.unwrap().eval_count > 0);
    let mut stream = client().send_chat_messages_stream(ask(MODEL, 12)).await.unwrap();
    let mut text = String::new();
    let mut n_done = 0;
    while let Some(line) = stream.next().await {
        let line = line.unwrap();
        text += &line.message.content;
        n_done += usize::from(line.done);
    }
    assert_eq!((text, n_done), (whole.message.content, 1));
}

#[tokio::test]
async fn generate_says_what_chat_says() {
    let options = ModelOptions::default().temperature(0.0).num_predict(12);
    let request = GenerationRequest::new(MODEL.into(), ASK).options(options);
    let said = client().generate(request).await.unwrap().response;
    assert_eq!(said, client().send_chat_messages(ask(MODEL, 12)).await.unwrap().message.content);
}

/// Ollama's API cannot force a tool: whether one is called is the model's choice.
#[tokio::test]
async fn tools_are_taken() {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    let function = json!({ "name": "get_weather", "description": "The weather in a city.", "parameters": parameters });
    let tool = from_value(json!({ "type": "function", "function": function })).unwrap();
    let reply = client().send_chat_messages(ask(MODEL, 40).tools(vec![tool])).await.unwrap();
    let calls = &reply.message.tool_calls;
    assert!(!reply.message.content.is_empty() || calls.iter().all(|call| call.function.name == "get_weather"));
    assert!(!reply.message.content.is_empty() || !calls.is_empty());
}

#[tokio::test]
async fn structured_output() {
    let schema = json!({
        "type": "object", "properties": { "is_large": { "type": "boolean" } }, "required": ["is_large"],
        "additionalProperties": false });
    let format = FormatType::StructuredJson(Box::new(from_value(schema).unwrap()));
    let reply = client().send_chat_messages(ask(MODEL, 60).format(format)).await.unwrap();
    let said: Value = serde_json::from_str(&reply.message.content).unwrap();
    assert!(said["is_large"].is_boolean());
}

#[tokio::test]
async fn vectors() {
    let request = GenerateEmbeddingsRequest::new(MODEL.into(), vec!["The cat sits.", "Interest rates rose."].into());
    let vectors = client().generate_embeddings(request).await.unwrap().embeddings;
    assert_eq!(vectors.iter().map(Vec::len).collect::<Vec<_>>(), [576, 576]);
}

#[tokio::test]
async fn what_there_is() {
    let listed = client().list_local_models().await.unwrap();
    assert!(listed.iter().any(|model| model.name == "smollm2:latest"));
    let shown = client().show_model_info(MODEL.into()).await.unwrap();
    assert!(shown.template.contains("<|im_start|>"));
    client().pull_model(MODEL.into(), false).await.unwrap();
}

#[tokio::test]
async fn mistakes_are_its_own_errors() {
    let error = client().send_chat_messages(ask("nope", 1)).await.unwrap_err().to_string();
    assert!(error.contains("model 'nope' not found"), "{error}");
    let error = client().send_chat_messages_stream(ask("nope", 1)).await.err().unwrap().to_string();
    assert!(error.contains("model 'nope' not found"), "{error}");
    let long = ChatMessageRequest::new(MODEL.into(), vec![ChatMessage::user("word ".repeat(20_000))]);
    let error = client().send_chat_messages(long).await.unwrap_err().to_string();
    assert!(error.contains("maximum context length"), "{error}");
}
