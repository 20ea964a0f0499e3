//! Estimates how many tokens a prompt has before the upstream reports it: rate limits and the route's record need a number.

use baton_schemas::GenerateRequest;
use baton_schemas::generate::{Input, Message};
use baton_schemas::written_number::AsWritten;
use serde_json::Value;

/// The approximate number of a prompt's tokens.
pub(crate) fn estimated_tokens(request: &GenerateRequest) -> u32 {
    let n_bytes = match &request.input {
        Input::Tokens(tokens) => return u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        Input::Text(text) => text.len(),
        Input::Infill { prefix, suffix, .. } => prefix.len() + suffix.len(),
        Input::Chat(conversation) => {
            let tools: usize = request.tools.offered().iter().map(|tool| json_bytes(&tool.definition())).sum();
            let images = (conversation.images.len() + conversation.linked_images.len()) * IMAGE_BYTES;
            tools + images + conversation.messages.iter().map(message_bytes).sum::<usize>()
        }
    };
    tokens_of(n_bytes).max(1)
}

fn message_bytes(message: &Message) -> usize {
    let reasoning = message.reasoning_content.as_ref().map_or(0, String::len);
    let calls: usize = message.tool_calls.iter().map(json_bytes).sum();
    message.content.len() + reasoning + calls + MESSAGE_BYTES
}

/// Bytes that a template adds to a message.
const MESSAGE_BYTES: usize = 16;

/// Bytes of text that take as many tokens as an image, about 1,000.
const IMAGE_BYTES: usize = 4_096;

/// Bytes of an average token in most tokenizers.
pub(super) const BYTES_PER_TOKEN: usize = 4;

/// The most tokens that an upstream may report for a prompt of `n_estimated` tokens: about two for each byte, and some for
/// what its template or its operator adds. A wrong count would use up a key's rate.
pub(super) fn most_tokens(n_estimated: u32) -> u32 {
    n_estimated.saturating_mul(8).saturating_add(16 << 10)
}

fn json_bytes(value: &Value) -> usize {
    AsWritten(value).to_string().len()
}

pub(super) fn tokens_of(n_bytes: usize) -> u32 {
    u32::try_from(n_bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use baton_schemas::generate::Conversation;
    use baton_schemas::tools::{Described, Strictness, Tool, ToolUse};
    use serde_json::json;

    use super::*;
    use crate::observe::tests::request;

    fn chat(messages: Value) -> GenerateRequest {
        let conversation: Conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
        GenerateRequest { input: Input::Chat(conversation), ..request("m") }
    }

    #[test]
    fn tools_calls_and_reasoning_are_part_of_an_estimated_prompt() {
        let bare = chat(json!([{ "role": "assistant", "content": "x" }]));
        let n_bare = estimated_tokens(&bare);
        let long = "word ".repeat(100);
        let call = json!({ "function": { "arguments": { "a": long } } });
        for more in [
            json!({ "role": "assistant", "content": "x", "reasoning_content": long }),
            json!({ "role": "assistant", "content": "x", "tool_calls": [call] }),
        ] {
            assert!(estimated_tokens(&chat(json!([more]))) > n_bare + 100, "{more}");
        }
        let name = "f".to_owned();
        let description = Some(long);
        let parameters = Tool::no_parameters();
        let tool = Tool {
            name,
            description,
            parameters,
            strict: Strictness::Loose,
            held: None,
            unheld: Default::default(),
            described: Described::InList,
        };
        let told = GenerateRequest { tools: ToolUse { tools: [tool].into(), ..ToolUse::default() }, ..bare };
        assert!(estimated_tokens(&told) > n_bare + 100);
    }
}
