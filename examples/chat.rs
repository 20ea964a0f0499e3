//! Streams one answer with the async-openai crate. Usage: chat "Why is the sky blue?"

use std::env::{args, var};
use std::io::{Write as _, stdout};

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::types::chat::{
    ChatCompletionRequestUserMessage, CreateChatCompletionRequest, CreateChatCompletionRequestArgs,
};
use futures::StreamExt as _;

fn request() -> Result<CreateChatCompletionRequest, async_openai::error::OpenAIError> {
    let question = args().nth(1).unwrap_or_else(|| "Why is the sky blue?".into());
    CreateChatCompletionRequestArgs::default()
        .model(var("BATON_MODEL").unwrap_or_else(|_| "smollm2".into()))
        .messages([ChatCompletionRequestUserMessage::from(question).into()])
        .build()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base = var("BATON_URL").unwrap_or_else(|_| "http://127.0.0.1:8080/v1".into());
    let key = var("BATON_API_KEY").unwrap_or_else(|_| "none".into());
    let client = Client::with_config(OpenAIConfig::new().with_api_base(base).with_api_key(key));
    let mut stream = client.chat().create_stream(request()?).await?;
    while let Some(chunk) = stream.next().await {
        for choice in chunk?.choices {
            print!("{}", choice.delta.content.unwrap_or_default());
            stdout().flush()?;
        }
    }
    println!();
    Ok(())
}
