//! Any server that speaks OpenAI's dialect: LM Studio, mlx_lm.server, a second Baton, a hosted API. llama-server and
//! vLLM speak it too, with more fields.

pub(super) mod chunks;

use std::collections::VecDeque;

use baton_schemas::constraint::Constraint;
use baton_schemas::generate::{Conversation, Input};
use baton_schemas::tools::{Strictness, ToolChoice};
use serde_json::{Map, Value, json};

use self::chunks::ChunkReader;
use super::fields::{Fields, calls_of};
use super::{Call, Kind, Protocol, ReplyReader, UpstreamError, Wish};

/// What OpenAI itself takes.
pub(super) const FIELDS: [&str; 12] = [
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "logit_bias",
    "logprobs",
    "tools",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "stream_options",
];

/// What some server of this dialect takes.
pub(super) const KNOWN_FIELDS: [&str; 21] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repeat_penalty",
    "repetition_penalty",
    "repeat_last_n",
    "seed",
    "logit_bias",
    "logprobs",
    "ignore_eos",
    "tools",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "reasoning_content",
    "chat_template_kwargs",
    "max_completion_tokens",
    "stream_options",
];

/// See the module.
#[derive(Debug)]
pub(super) struct OpenAi;

impl Protocol for OpenAi {
    fn is_sse(&self) -> bool {
        true
    }

    fn models_path(&self) -> &'static str {
        "models"
    }

    fn model_names(&self, list: &Value) -> Vec<String> {
        let models = list.get("data").and_then(Value::as_array).into_iter().flatten();
        models.filter_map(|model| Some(model.get("id")?.as_str()?.to_owned())).collect()
    }

    fn call(&self, wish: &Wish<'_>) -> Result<Call, UpstreamError> {
        let mut fields = Fields::new(wish);
        fields.set("model", wish.model);
        let path = match &wish.request.input {
            Input::Chat(conversation) => {
                chat(&mut fields, conversation)?;
                "chat/completions"
            }
            Input::Text(text) => prompt(&mut fields, text.as_str().into())?,
            Input::Tokens(tokens) => prompt(&mut fields, tokens.clone().into())?,
            Input::Infill { prefix, suffix } => {
                // llama-server reads a suffix on another route alone, and vLLM refuses it.
                if wish.settings.kind != super::Kind::OpenAi {
                    return Err(fields.unsupported("suffix"));
                }
                fields.set("suffix", suffix.as_str());
                prompt(&mut fields, prefix.as_str().into())?
            }
        };
        fields.sampling()?;
        if let Some(n) = wish.max_tokens() {
            let newer = fields.takes("max_completion_tokens") && path == "chat/completions";
            fields.set(if newer { "max_completion_tokens" } else { "max_tokens" }, n);
        }
        if wish.request.ignore_eos {
            fields.put("ignore_eos", true, true)?;
        }
        // Otherwise they are looked for here, where it is known which one was reached.
        if !wish.settings.abort && !wish.request.stop.is_empty() {
            fields.set("stop", wish.request.stop.clone());
        }
        fields.set("stream", true);
        fields.put("stream_options", json!({ "include_usage": true }), false)?;
        Ok(Call { path, body: fields.body })
    }

    fn reader(&self, call: &Call) -> Box<dyn ReplyReader> {
        Box::new(ChunkReader::new(call.body.contains_key("logprobs")))
    }
}

/// The fields of a plain completion.
fn prompt(fields: &mut Fields<'_>, prompt: Value) -> Result<&'static str, UpstreamError> {
    fields.set("prompt", prompt);
    if let Some(n_top) = fields.wish.request.top_logprobs {
        fields.put("logprobs", alternatives(fields.wish, n_top), true)?;
    }
    if fields.wish.request.constraint.is_some() {
        return Err(fields.unsupported("response_format"));
    }
    Ok("completions")
}

/// Alternatives to ask for. llama-server takes none for no log-probabilities at all; those too many are left out later.
fn alternatives(wish: &Wish<'_>, n_top: u32) -> u32 {
    if wish.settings.kind == Kind::LlamaServer { n_top.max(1) } else { n_top }
}

/// The fields of a chat.
fn chat(fields: &mut Fields<'_>, conversation: &Conversation) -> Result<(), UpstreamError> {
    let request = fields.wish.request;
    let with_reasoning = fields.takes("reasoning_content");
    let mut messages = messages(conversation, with_reasoning);
    if fields.wish.settings.kind == Kind::OpenAi {
        // Servers with the dialect's older schema take no null (llama-cpp-python); OpenAI's own takes both.
        messages.iter_mut().filter(|message| message["content"].is_null()).for_each(|m| m["content"] = "".into());
    }
    fields.set("messages", messages);
    if let Some(n_top) = request.top_logprobs {
        fields.put("logprobs", true, true)?;
        fields.set("top_logprobs", alternatives(fields.wish, n_top));
    }
    match &request.constraint {
        None => {}
        Some(Constraint::JsonObject) => fields.put("response_format", json!({ "type": "json_object" }), true)?,
        Some(Constraint::JsonSchema { schema, .. }) => {
            let named = json!({ "name": "reply", "strict": true, "schema": schema });
            fields.put("response_format", json!({ "type": "json_schema", "json_schema": named }), true)?;
        }
        Some(Constraint::Grammar { .. }) => return Err(fields.unsupported("grammar")),
    }
    tools(fields)?;
    thinking(fields, &conversation.template_args)
}

/// What was said, in OpenAI's words.
pub(super) fn messages(conversation: &Conversation, with_reasoning: bool) -> Vec<Value> {
    let mut ids = CallIds::default();
    conversation.messages.iter().map(|m| ids.complete(message(m, with_reasoning))).collect()
}

fn message(message: &baton_schemas::generate::Message, with_reasoning: bool) -> Value {
    let mut written = Map::new();
    written.insert("role".to_owned(), message.role.as_str().into());
    let has_calls = !message.tool_calls.is_empty();
    let content = if has_calls && message.content.is_empty() { Value::Null } else { message.content.as_str().into() };
    written.insert("content".to_owned(), content);
    if has_calls {
        written.insert("tool_calls".to_owned(), calls_of(message, true).into());
    }
    // What a model thought earlier is context that most servers have no field for, and templates leave out.
    let reasoning = message.reasoning_content.as_ref().filter(|_| with_reasoning);
    for (name, value) in [
        ("tool_call_id", message.tool_call_id.as_ref()),
        ("name", message.name.as_ref()),
        ("reasoning_content", reasoning),
    ] {
        if let Some(value) = value {
            written.insert(name.to_owned(), value.as_str().into());
        }
    }
    Value::Object(written)
}

/// Ids of calls and of their results, where the client's dialect has none: this one insists on them.
#[derive(Default)]
struct CallIds {
    n_made: u32,
    unanswered: VecDeque<Value>,
}

impl CallIds {
    fn complete(&mut self, mut message: Value) -> Value {
        if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            self.unanswered.clear();
            for call in calls.iter_mut().filter_map(Value::as_object_mut) {
                let id = call.entry("id").or_insert_with(|| {
                    self.n_made += 1;
                    format!("call_{}", self.n_made).into()
                });
                self.unanswered.push_back(id.clone());
            }
        }
        if message["role"] == "tool" {
            match message.get("tool_call_id").cloned() {
                Some(id) => self.unanswered.retain(|unanswered| *unanswered != id),
                None => message["tool_call_id"] = self.unanswered.pop_front().unwrap_or_else(|| "call_0".into()),
            }
        }
        message
    }
}

fn tools(fields: &mut Fields<'_>) -> Result<(), UpstreamError> {
    let tools = &fields.wish.request.tools;
    if tools.offered().is_empty() {
        return Ok(());
    }
    // llama-server knows no name here, and would leave it to the model whether to call anything (server-common.cpp of
    // llama.cpp). Of one tool, any call is the one that was named.
    let only = match &tools.choice {
        ToolChoice::Named(name) if fields.wish.settings.kind == Kind::LlamaServer => Some(name),
        _ => None,
    };
    let offered = tools.offered().iter().filter(|tool| only.is_none_or(|name| tool.name == *name));
    let definitions = offered.map(|tool| {
        let mut definition = tool.definition();
        // Other servers refuse schemas that they cannot hold.
        if tool.strict == Strictness::Strict {
            definition["function"]["strict"] = true.into();
        }
        definition
    });
    fields.put("tools", definitions.collect::<Vec<_>>(), true)?;
    match &tools.choice {
        ToolChoice::Auto | ToolChoice::None => {}
        ToolChoice::Required => fields.set("tool_choice", "required"),
        ToolChoice::Named(_) if only.is_some() => fields.set("tool_choice", "required"),
        ToolChoice::Named(name) => {
            fields.set("tool_choice", json!({ "type": "function", "function": { "name": name } }));
        }
    }
    // Where it is not taken, the reply ends here with its first call.
    if tools.parallel { Ok(()) } else { fields.put("parallel_tool_calls", false, false) }
}

/// How hard the model is to think: as variables of its template where the server takes those, else as an effort, the
/// one switch that OpenAI's own dialect has.
fn thinking(fields: &mut Fields<'_>, args: &Map<String, Value>) -> Result<(), UpstreamError> {
    if args.is_empty() {
        return Ok(());
    }
    if fields.takes("chat_template_kwargs") {
        fields.set("chat_template_kwargs", args.clone());
        return Ok(());
    }
    if args.keys().any(|name| !matches!(name.as_str(), "enable_thinking" | "reasoning_effort")) {
        return Err(fields.unsupported("chat_template_kwargs"));
    }
    let effort = args.get("reasoning_effort").cloned();
    let switch = args.get("enable_thinking").and_then(Value::as_bool);
    let effort = effort.unwrap_or_else(|| if switch == Some(false) { "none" } else { "medium" }.into());
    fields.put("reasoning_effort", effort, true)
}

#[cfg(test)]
pub(super) mod tests;
