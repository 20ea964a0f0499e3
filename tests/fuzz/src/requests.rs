//! Clients' requests: a byte that names the route, then the body. What a parser accepts must meet the
//! conditions that later code relies on; what it refuses must have a message.

use baton_schemas::anthropic::{CountRequest, MessagesRequest};
use baton_schemas::generate::{ChatPrompt, GenerateRequest, Input, Message};
use baton_schemas::llama_server::generate::LlamaGenerate;
use baton_schemas::llama_server::rerank::Rerank;
use baton_schemas::openai::{ChatRequest, CompletionRequest, InvalidRequest, ResponsesRequest};
use baton_schemas::{MessageRole, llama_server, ollama, openai, tools};

/// OpenAI's routes.
pub(crate) fn openai(input: &[u8]) -> bool {
    let [route, body @ ..] = input else { return false };
    match route % 4 {
        0 => taken(ChatRequest::parse(body, 1)).is_some_and(|request| generates(&request.generate)),
        1 => taken(CompletionRequest::parse(body, 1)).is_some_and(|request| request.prompts.iter().all(generates)),
        2 => taken(ResponsesRequest::parse(body, 1)).is_some_and(|request| generates(&request.generate)),
        _ => taken(openai::embeddings::EmbeddingsRequest::parse(body)).is_some(),
    }
}

pub(crate) fn anthropic(input: &[u8]) -> bool {
    let [route, body @ ..] = input else { return false };
    match route % 2 {
        0 => taken(MessagesRequest::parse(body, 1)).is_some_and(|request| generates(&request.generate)),
        _ => taken(CountRequest::parse(body)).is_some_and(|request| is_prompt(&request.chat)),
    }
}

pub(crate) fn ollama(input: &[u8]) -> bool {
    let [route, body @ ..] = input else { return false };
    match route % 4 {
        0 => taken(ollama::OllamaChatRequest::parse(body, 1)).is_some_and(|r| generates(&r.generate)),
        1 => taken(ollama::OllamaGenerateRequest::parse(body, 1)).is_some_and(|r| generates(&r.generate)),
        2 => taken(ollama::embed::parse(body)).is_some(),
        _ => taken(ollama::embed::parse_older(body)).is_some(),
    }
}

pub(crate) fn llama_server(input: &[u8]) -> bool {
    let [route, body @ ..] = input else { return false };
    match route % 6 {
        0 => taken(llama_server::Tokenize::parse(body)).is_some(),
        1 => taken(llama_server::Detokenize::parse(body)).is_some(),
        3 => taken(LlamaGenerate::parse_completion(body, 1)).is_some_and(|requests| requests.0.iter().all(generates)),
        4 => taken(LlamaGenerate::parse_infill(body, 1)).is_some_and(|requests| requests.0.iter().all(generates)),
        5 => taken(Rerank::parse(body)).is_some(),
        _ => taken(llama_server::ApplyTemplate::parse(body)).is_some_and(|request| is_prompt(&request.chat)),
    }
}

fn taken<T>(parsed: Result<T, InvalidRequest>) -> Option<T> {
    parsed.inspect_err(|refused| assert!(!refused.message.is_empty(), "a refusal without words")).ok()
}

/// Checks the conditions on a generation request. Always `true`.
fn generates(request: &GenerateRequest) -> bool {
    assert!((1..=64).contains(&request.n), "{} choices", request.n);
    assert!(request.stop.len() <= 16 && request.stop.iter().all(|stop| !stop.is_empty()), "{:?}", request.stop);
    let sampling = &request.sampling;
    for (value, range) in [
        (sampling.temperature, 0.0..=2.0),
        (sampling.top_p, 0.0..=1.0),
        (sampling.min_p, 0.0..=1.0),
        (sampling.frequency_penalty, -2.0..=2.0),
        (sampling.presence_penalty, -2.0..=2.0),
    ] {
        assert!(range.contains(&value), "{value} is not in {range:?}");
    }
    assert!(sampling.repeat_penalty.is_finite() && sampling.logit_bias.iter().all(|(_, bias)| bias.is_finite()));
    assert!(request.top_logprobs.is_none_or(|top| top <= 20));
    assert_eq!(tools::check(&request.tools), Ok(()), "unchecked tools");
    let Input::Chat(conversation) = &request.input else { return true };
    assert!(conversation.tools.is_empty(), "a dialect wrote tools in a form of its own");
    let are_system = |pair: &[Message]| pair.iter().all(|message| message.role == MessageRole::System);
    assert!(!conversation.messages.windows(2).any(are_system), "two system messages in a row");
    true
}

fn is_prompt(chat: &ChatPrompt) -> bool {
    assert_eq!(tools::check(&chat.tools), Ok(()), "unchecked tools");
    true
}

/// The bodies of a dialect, numbered as its routes are.
fn seeds(bodies: &[(u8, &str)]) -> Vec<Vec<u8>> {
    bodies.iter().map(|(route, body)| [&[*route], body.as_bytes()].concat()).collect()
}

pub(crate) fn openai_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        (
            0,
            r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"n":2,"stop":["x"],"seed":3,"logit_bias":{"5":-100},"temperature":0.5,"logprobs":true,"top_logprobs":2,"stream":true}"#,
        ),
        (
            0,
            r#"{"model":"m","messages":[{"role":"developer","content":"be brief"},{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"c","content":"4"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"},"strict":true}}],"tool_choice":{"type":"function","function":{"name":"f"}},"parallel_tool_calls":false}"#,
        ),
        (
            0,
            r#"{"model":"m","messages":[{"role":"assistant","function_call":{"name":"f","arguments":"{}"}},{"role":"function","name":"f","content":"x"}],"functions":[{"name":"f"}],"function_call":{"name":"f"},"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"}}}}"#,
        ),
        (
            0,
            r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"const":12345678901234567890123,"maximum":1e999}}},"chat_template_kwargs":{"a":[1e999,-1e-400]},"seed":3}"#,
        ),
        (1, r#"{"model":"m","prompt":["a","b"],"max_tokens":5,"n":2,"logprobs":3}"#),
        (1, r#"{"model":"m","prompt":[[1,2],[3]],"top_k":4,"top_p":0.9,"min_p":0.1,"repeat_penalty":1.1}"#),
        (
            2,
            r#"{"model":"m","instructions":"be brief","input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]},{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"4"}],"tools":[{"type":"web_search"},{"type":"function","name":"f","parameters":{"type":"object"}}],"tool_choice":{"type":"allowed_tools","mode":"required","tools":[{"type":"function","name":"f"}]},"text":{"format":{"type":"json_object"}},"reasoning":{"effort":"low"},"max_output_tokens":9,"include":["message.output_text.logprobs"]}"#,
        ),
        (3, r#"{"model":"m","input":["a","b"],"encoding_format":"base64"}"#),
        (3, r#"{"model":"m","input":[[1,2],[3]]}"#),
    ])
}

pub(crate) fn anthropic_seeds() -> Vec<Vec<u8>> {
    let chat = r#"{"model":"m","max_tokens":9,"system":[{"type":"text","text":"be brief","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"x"},{"type":"tool_use","id":"t","name":"f","input":{"a":1}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"4"}],"is_error":true},{"type":"document","source":{"type":"text","data":"d"}}]}],"tools":[{"name":"f","input_schema":{"type":"object"}},{"type":"web_search_20250305","name":"w"}],"tool_choice":{"type":"tool","name":"f","disable_parallel_tool_use":true},"thinking":{"type":"enabled","budget_tokens":1024},"output_config":{"effort":"low","format":{"type":"json_schema","schema":{"type":"object"}}},"stop_sequences":["x"],"top_k":5,"stream":true}"#;
    seeds(&[(0, chat), (1, chat)])
}

pub(crate) fn ollama_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        (
            0,
            r#"{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"assistant","thinking":"hm","tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]},{"role":"tool","tool_name":"f","content":"4"}],"tools":[{"type":"function","function":{"name":"f"}}],"think":"low","format":{"type":"object"},"keep_alive":"5m","options":{"num_ctx":64,"num_predict":-1,"seed":3,"stop":["x"],"temperature":0.1,"top_k":2,"repeat_last_n":-1}}"#,
        ),
        (
            1,
            r#"{"model":"m","prompt":"hi","system":"s","stream":false,"raw":false,"format":"json","logprobs":true,"top_logprobs":2}"#,
        ),
        (1, r#"{"model":"m","prompt":"a","suffix":"b","keep_alive":0}"#),
        (2, r#"{"model":"m","input":["a","b"],"truncate":false,"dimensions":0}"#),
        (3, r#"{"model":"m","prompt":"a"}"#),
    ])
}

pub(crate) fn llama_server_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        (0, r#"{"content":"hi","add_special":true,"parse_special":false,"model":"m"}"#),
        (1, r#"{"tokens":[1,2,3]}"#),
        (
            2,
            r#"{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f"}}],"chat_template_kwargs":{"enable_thinking":false}}"#,
        ),
        (3, r#"{"prompt":["hi",[1,2]],"n_predict":4,"n_probs":3,"stop":["x"],"grammar":"root ::= \"a\""}"#),
        (4, r#"{"input_prefix":"a","prompt":"b","input_suffix":"c","input_extra":[{"text":"d"}]}"#),
        (5, r#"{"query":"q","documents":["a",{"text":"b"}],"top_n":1,"return_documents":true}"#),
    ])
}
