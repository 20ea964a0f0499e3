//! Ollama, by its own API: its `/v1` ignores `tool_choice`, `n` and the context's size, and forces a temperature.

use baton_schemas::FinishReason;
use baton_schemas::constraint::Constraint;
use baton_schemas::generate::{Conversation, Input, Message};
use baton_schemas::tools::{Strictness, ToolCallDelta};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::fields::{Fields, calls_of};
use super::openai::chunks::listed;
use super::{
    Call, Kind, Protocol, ReplyReader, TextDelta, TextEnd, TextToken, TextUsage, UpstreamError, Wish, memory, new_id,
    refusal,
};

/// What it takes. The first ones are options.
pub(super) const FIELDS: [&str; 12] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "seed",
    "tools",
    "response_format",
    "reasoning_effort",
];

/// What some version of it takes: one from before 0.12.11 ignores `logprobs` without a word.
pub(super) const KNOWN_FIELDS: [&str; 13] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "seed",
    "tools",
    "response_format",
    "reasoning_effort",
    "logprobs",
];

/// Calls in one reply: more are no reply.
const MAX_CALLS: u32 = 128;

/// See the module.
#[derive(Debug)]
pub(super) struct Ollama;

impl Protocol for Ollama {
    fn is_sse(&self) -> bool {
        false
    }

    fn models_path(&self) -> &'static str {
        "api/tags"
    }

    fn model_names(&self, list: &Value) -> Vec<String> {
        let models = list.get("models").and_then(Value::as_array).into_iter().flatten();
        models.filter_map(|model| Some(model.get("name")?.as_str()?.to_owned())).collect()
    }

    fn call(&self, wish: &Wish<'_>) -> Result<Call, UpstreamError> {
        let (request, mut fields) = (wish.request, Fields::new(wish));
        fields.sampling()?;
        if let Some(n) = wish.max_tokens() {
            fields.set("num_predict", n);
        }
        // Another size has Ollama load the model anew, under everybody else: where there is one of its own, it stays.
        if let Some(num_ctx) = wish.settings.num_ctx.or(request.num_ctx) {
            fields.set("num_ctx", num_ctx);
        }
        if !wish.settings.abort && !request.stop.is_empty() {
            fields.set("stop", request.stop.clone());
        }
        if request.ignore_eos {
            return Err(fields.unsupported("ignore_eos"));
        }
        let options = std::mem::take(&mut fields.body);
        fields.set("options", options);
        fields.set("model", wish.model);
        if let Some(n_top) = request.top_logprobs {
            fields.put("logprobs", true, true)?;
            fields.set("top_logprobs", n_top);
        }
        fields.set("stream", true);
        // It would cut the beginning off a prompt that does not fit, and later off what was said, without a word.
        fields.set("truncate", false);
        fields.set("shift", false);
        if let Some(keep_alive) = request.keep_alive {
            fields.set(memory::FIELD, memory::value(keep_alive));
        }
        match &request.constraint {
            None => {}
            Some(Constraint::JsonObject) => format(&mut fields, "json".into())?,
            Some(Constraint::JsonSchema { schema, .. }) => format(&mut fields, schema.clone())?,
            Some(Constraint::Grammar { .. }) => return Err(fields.unsupported("grammar")),
        }
        let path = match &request.input {
            Input::Chat(conversation) => {
                chat(&mut fields, conversation)?;
                "api/chat"
            }
            // The whole prompt: no template is put around it.
            Input::Text(text) => {
                fields.set("prompt", text.as_str());
                fields.set("raw", true);
                "api/generate"
            }
            Input::Infill { prefix, suffix } => {
                fields.set("prompt", prefix.as_str());
                fields.set("suffix", suffix.as_str());
                "api/generate"
            }
            Input::Tokens(_) => return Err(fields.unsupported("prompt")),
        };
        Ok(Call { path, body: fields.body })
    }

    fn reader(&self, call: &Call) -> Box<dyn ReplyReader> {
        Box::new(LineReader { lacks_logprobs: call.body.contains_key("logprobs"), ..LineReader::default() })
    }
}

fn format(fields: &mut Fields<'_>, format: Value) -> Result<(), UpstreamError> {
    if !fields.takes("response_format") {
        return Err(fields.unsupported("response_format"));
    }
    fields.set("format", format);
    Ok(())
}

fn chat(fields: &mut Fields<'_>, conversation: &Conversation) -> Result<(), UpstreamError> {
    let request = fields.wish.request;
    fields.set("messages", conversation.messages.iter().map(message).collect::<Vec<_>>());
    let tools = &request.tools;
    // It has no way to insist on a call.
    if tools.is_forced() {
        return Err(fields.unsupported("tool_choice"));
    }
    if !tools.offered().is_empty() {
        if tools.offered().iter().any(|tool| tool.strict == Strictness::Strict) {
            return Err(fields.unsupported("tools.strict"));
        }
        fields.put("tools", tools.offered().iter().map(|tool| tool.definition()).collect::<Vec<_>>(), true)?;
    }
    let args = &conversation.template_args;
    if args.keys().any(|name| !matches!(name.as_str(), "enable_thinking" | "reasoning_effort")) {
        return Err(fields.unsupported("chat_template_kwargs"));
    }
    let switch = args.get("enable_thinking").and_then(Value::as_bool);
    let think: Value = match (switch, args.get("reasoning_effort").and_then(Value::as_str)) {
        (None, None) => return Ok(()),
        (Some(false), _) | (_, Some("none")) => false.into(),
        (_, Some("minimal" | "low")) => "low".into(),
        (_, Some("medium")) => "medium".into(),
        (_, Some(_)) => "high".into(),
        (Some(true), None) => true.into(),
    };
    if !fields.takes("reasoning_effort") {
        return Err(fields.unsupported("reasoning_effort"));
    }
    fields.set("think", think);
    Ok(())
}

fn message(message: &Message) -> Value {
    let mut written = Map::new();
    written.insert("role".to_owned(), message.role.as_str().into());
    written.insert("content".to_owned(), message.content.as_str().into());
    if !message.tool_calls.is_empty() {
        written.insert("tool_calls".to_owned(), calls_of(message, false).into());
    }
    let tool = message.name.as_ref().filter(|_| message.role == "tool");
    for (name, value) in [
        ("thinking", message.reasoning_content.as_ref()),
        ("tool_call_id", message.tool_call_id.as_ref()),
        ("tool_name", tool),
    ] {
        if let Some(value) = value {
            written.insert(name.to_owned(), value.as_str().into());
        }
    }
    Value::Object(written)
}

#[derive(Deserialize)]
struct Line {
    message: Option<Said>,
    /// Of `/api/generate`.
    response: Option<String>,
    thinking: Option<String>,
    #[serde(default)]
    done: bool,
    done_reason: Option<String>,
    prompt_eval_count: Option<u32>,
    eval_count: Option<u32>,
    /// Of this line's tokens, whatever they are part of.
    logprobs: Option<Vec<Value>>,
    error: Option<Value>,
}

#[derive(Default, Deserialize)]
struct Said {
    content: Option<String>,
    thinking: Option<String>,
    tool_calls: Option<Vec<WholeCall>>,
}

#[derive(Deserialize)]
struct WholeCall {
    id: Option<String>,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    arguments: Map<String, Value>,
}

#[derive(Default)]
struct LineReader {
    end: Option<TextEnd>,
    n_calls: u32,
    /// Log-probabilities were asked for, and none have come yet.
    lacks_logprobs: bool,
    /// Tokens whose text has not come yet.
    held: Vec<TextToken>,
}

impl ReplyReader for LineReader {
    fn read(&mut self, event: &[u8], out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let line: Line = serde_json::from_slice(event).map_err(UpstreamError::malformed)?;
        if line.error.is_some() {
            return Err(refusal::in_stream(event));
        }
        let said = line.message.unwrap_or_default();
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        let (reasoning, calls) = (filled(said.thinking.or(line.thinking)), said.tool_calls.unwrap_or_default());
        self.hold(&line.logprobs.unwrap_or_default());
        if let Some(text) = filled(said.content.or(line.response)) {
            if self.lacks_logprobs {
                // An older Ollama, or a model that tells none.
                return Err(UpstreamError::Unsupported { field: "logprobs", kind: Kind::Ollama.as_str() });
            }
            out.extend(reasoning.map(TextDelta::Reasoning));
            let tokens = self.spelled(&text);
            out.push(TextDelta::Text { text, tokens });
        } else if reasoning.is_some() || !calls.is_empty() {
            // They were tokens of these, which are told without.
            self.held.clear();
            out.extend(reasoning.map(TextDelta::Reasoning));
        }
        for call in calls {
            self.call(call, out)?;
        }
        if line.done {
            let reason = match line.done_reason.as_deref() {
                Some("length") => FinishReason::Length,
                _ if self.n_calls > 0 => FinishReason::ToolCalls,
                _ => FinishReason::Stop,
            };
            let (n_prompt, n_completion) = (line.prompt_eval_count, line.eval_count);
            self.end = Some(TextEnd { reason, usage: TextUsage { n_prompt, n_completion, ..TextUsage::default() } });
        }
        Ok(())
    }

    fn end(&mut self, _out: &mut Vec<TextDelta>) -> Option<TextEnd> {
        self.end
    }
}

impl LineReader {
    /// Keeps a line's tokens for the text that they are part of: it may come later, when it is clear that it is text.
    fn hold(&mut self, logprobs: &[Value]) {
        let tokens = listed(logprobs);
        self.lacks_logprobs &= tokens.is_empty();
        self.held.extend(tokens);
    }

    /// The held tokens of this text: those behind what it does not show, as the marks around what was thought.
    fn spelled(&mut self, text: &str) -> Vec<TextToken> {
        let (mut n_bytes, mut spelled) = (0, None);
        for (at, token) in self.held.iter().enumerate().rev() {
            n_bytes += token.bytes.len();
            let Some(rest) = text.len().checked_sub(n_bytes) else { break };
            let tail = self.held[at..].iter().flat_map(|token| &token.bytes);
            if tail.eq(&text.as_bytes()[rest..]) {
                spelled = Some(at);
            }
        }
        let mut held = std::mem::take(&mut self.held);
        held.split_off(spelled.unwrap_or(0))
    }

    /// Ollama tells of whole calls.
    fn call(&mut self, call: WholeCall, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let index = self.n_calls;
        if index >= MAX_CALLS {
            return Err(UpstreamError::malformed("too many calls in one reply"));
        }
        self.n_calls += 1;
        let id = call.id.filter(|id| !id.is_empty()).unwrap_or_else(new_id);
        let fragment = Value::Object(call.function.arguments).to_string();
        let steps = [
            ToolCallDelta::Begin { index, id, name: call.function.name },
            ToolCallDelta::Arguments { index, fragment },
            ToolCallDelta::End { index },
        ];
        out.extend(steps.map(TextDelta::Call));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
