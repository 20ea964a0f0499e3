//! A body → one [`GenerateRequest`].
//!
//! Without effect but echoed: `metadata`, `prompt_cache_key`, `safety_identifier`, `max_tool_calls` and `user`. Accepted
//! and ignored: `service_tier`, `prompt_cache_retention`, `text.verbosity`, `include` of what is never there, and any field
//! nobody here has heard of.

use serde_json::{Map, Value, json};

use super::response::Echo;
use super::{input, tools};
use crate::constraint::{Constraint, check_schema};
use crate::generate::{Conversation, GenerateRequest, Input, Sampling};
use crate::openai::chat_request::TOP_LOGPROBS;
use crate::openai::template_args;
use crate::request::fields::Fields;
use crate::request::images::Images;
use crate::request::{self, InvalidRequest, off, sampling, stop};

/// OpenAI's limits on what it echoes.
pub(crate) const MAX_METADATA: usize = 16;

/// What `include` calls log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

/// A response as the client asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponsesRequest {
    /// What to generate.
    pub generate: GenerateRequest,
    /// As server-sent events.
    pub stream: bool,
    /// What the reply repeats of the request.
    pub echo: Echo,
}

impl ResponsesRequest {
    /// Reads a body. `drawn_seed` is used where the client sent none.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let object = request::json::read_object(body)?;
        let root = Fields::root(&object);
        refuse(root)?;
        let (sampling, chosen) = sampling::parse(root, Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let max_tokens = root.integer("max_output_tokens", 1..=i64::from(u32::MAX))?.map(|n| n as u32);
        let (constraint, format) = format(root)?;
        let effort = effort(root)?;
        let mut template_args = template_args::parse(root)?;
        if let Some(effort) = effort {
            template_args::set_effort(&mut template_args, effort);
        }
        let mut images = Images::default();
        let messages = input::parse(root, &mut images)?;
        let top_logprobs = top_logprobs(root)?;
        let tool_use = tools::parse(root)?;
        let echo = Echo {
            instructions: root.string("instructions")?.map(str::to_owned),
            max_output_tokens: max_tokens,
            metadata: metadata(root)?,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            format,
            effort: effort.map(str::to_owned),
            parallel_tool_calls: tool_use.parallel,
            tool_choice: root.get("tool_choice").cloned().unwrap_or_else(|| "auto".into()),
            tools: tool_use.tools.iter().map(tools::echo).collect(),
            top_logprobs: top_logprobs.unwrap_or(0),
            max_tool_calls: root.integer("max_tool_calls", 1..=i64::from(u32::MAX))?.map(|n| n as u32),
            safety_identifier: root.string("safety_identifier")?.map(str::to_owned),
            prompt_cache_key: root.string("prompt_cache_key")?.map(str::to_owned),
            user: root.string("user")?.map(str::to_owned),
        };
        Ok(ResponsesRequest {
            generate: GenerateRequest {
                model: root.model()?,
                input: Input::Chat(Conversation {
                    messages,
                    tools: Vec::new(),
                    template_args,
                    images: images.into_vec(),
                }),
                n: 1,
                max_tokens,
                stop: stop::parse(root)?,
                sampling,
                chosen,
                top_logprobs,
                ignore_eos: root.boolean("ignore_eos")?.unwrap_or(false),
                constraint,
                tools: tool_use,
                wants_thinking: false,
                keep_alive: None,
                num_ctx: None,
                context: None,
            },
            stream: root.boolean("stream")?.unwrap_or(false),
            echo,
        })
    }
}

/// Refuses what needs a store, and what is not built. Values that ask for nothing pass.
fn refuse(root: Fields<'_>) -> Result<(), InvalidRequest> {
    for field in ["previous_response_id", "conversation", "prompt"] {
        if root.get(field).is_some_and(|value| !off::asks_for_nothing(value, 0.0)) {
            return Err(InvalidRequest::at(field, "nothing is stored here; send the whole history as 'input'"));
        }
    }
    if root.boolean("store")?.unwrap_or(false) {
        return Err(InvalidRequest::at("store", "nothing is stored here; send false, or nothing"));
    }
    if root.boolean("background")?.unwrap_or(false) {
        return Err(InvalidRequest::at("background", "nothing is stored here; stream the response instead"));
    }
    if root.string("truncation")? == Some("auto") {
        return Err(InvalidRequest::unsupported("truncation", "Leaving out the beginning of a conversation"));
    }
    Ok(())
}

/// `text.format`, and its echo.
fn format(root: Fields<'_>) -> Result<(Option<Constraint>, Value), InvalidRequest> {
    const FIELD: &str = "text.format";
    let plain = || json!({"type": "text"});
    let Some(text) = root.get("text") else { return Ok((None, plain())) };
    let Some(format) = Fields::at(text, "text")?.get("format") else { return Ok((None, plain())) };
    match Fields::at(format, FIELD)?.string("type")? {
        None | Some("text") => Ok((None, plain())),
        Some("json_object") => Ok((Some(Constraint::JsonObject), format.clone())),
        Some("json_schema") => {
            let schema = format.get("schema").filter(|schema| !schema.is_null());
            let schema = schema.ok_or_else(|| InvalidRequest::at(FIELD, "needs a schema"))?;
            check_schema(schema).map_err(|e| InvalidRequest::at(FIELD, e))?;
            let schema = schema.clone();
            Ok((Some(Constraint::JsonSchema { schema, field: FIELD.to_owned() }), format.clone()))
        }
        Some(_) => Err(InvalidRequest::at(FIELD, "type must be text, json_object or json_schema")),
    }
}

/// `reasoning.effort`; templates read it under the name that chats have for it.
fn effort<'a>(root: Fields<'a>) -> Result<Option<&'a str>, InvalidRequest> {
    let Some(reasoning) = root.get("reasoning") else { return Ok(None) };
    template_args::effort(Fields::at(reasoning, "reasoning")?, "effort")
}

/// Wanted if `include` names them, or if there is a number of alternatives.
fn top_logprobs(root: Fields<'_>) -> Result<Option<u32>, InvalidRequest> {
    let top = root.integer("top_logprobs", TOP_LOGPROBS)?.map(|n| n as u32);
    let included = root.array("include")?.unwrap_or_default().iter().any(|name| name == LOGPROBS);
    Ok(top.filter(|&top| top > 0 || included).or(included.then_some(0)))
}

fn metadata(root: Fields<'_>) -> Result<Map<String, Value>, InvalidRequest> {
    let metadata = root.object("metadata")?.cloned().unwrap_or_default();
    if metadata.len() > MAX_METADATA {
        return Err(InvalidRequest::at("metadata", format_args!("must have at most {MAX_METADATA} entries")));
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(extra: Value) -> Result<ResponsesRequest, InvalidRequest> {
        let mut body = json!({"model": "m", "input": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ResponsesRequest::parse(body.to_string().as_bytes(), 7)
    }

    fn refused(extra: Value, param: &str) {
        assert_eq!(parsed(extra.clone()).unwrap_err().param.as_deref(), Some(param), "{extra}");
    }

    #[test]
    fn fields_reach_the_request_and_its_echo() {
        let request = parsed(json!({})).unwrap();
        assert_eq!((request.stream, request.generate.max_tokens, request.generate.n), (false, None, 1));
        assert_eq!((request.generate.sampling.seed, request.generate.top_logprobs), (7, None));
        assert_eq!((request.echo.format, request.echo.parallel_tool_calls), (json!({"type": "text"}), true));
        let schema = json!({"type": "object"});
        let format = json!({"type": "json_schema", "name": "n", "strict": true, "schema": schema});
        let request = parsed(json!({"stream": true, "max_output_tokens": 5, "temperature": 0, "top_p": 0.5,
            "instructions": "be brief", "text": {"format": format, "verbosity": "low"}, "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"}, "store": false, "include": [LOGPROBS],
            "tools": [{"type": "web_search"}], "tool_choice": "auto", "previous_response_id": null}))
        .unwrap();
        assert!(request.stream && request.generate.sampling.temperature == 0.0);
        assert_eq!((request.generate.max_tokens, request.generate.top_logprobs), (Some(5), Some(0)));
        assert_eq!(
            request.generate.constraint,
            Some(Constraint::JsonSchema { schema, field: "text.format".to_owned() })
        );
        assert_eq!((request.echo.format, request.echo.metadata["a"].as_str()), (format, Some("b")));
        let Input::Chat(conversation) = request.generate.input else { panic!("not a chat") };
        assert_eq!(conversation.messages.len(), 2);
        assert_eq!(conversation.template_args["reasoning_effort"], "low");
    }

    #[test]
    fn what_has_no_effect_is_echoed_and_what_has_is_as_it_takes_effect() {
        let echo = parsed(json!({})).unwrap().echo;
        assert_eq!((echo.presence_penalty, echo.frequency_penalty, echo.max_tool_calls), (0.0, 0.0, None));
        assert_eq!((echo.safety_identifier, echo.prompt_cache_key, echo.user), (None, None, None));
        let echo = parsed(json!({"presence_penalty": 0.5, "frequency_penalty": -1, "max_tool_calls": 3,
            "safety_identifier": "s", "prompt_cache_key": "k", "user": "u"}))
        .unwrap()
        .echo;
        assert_eq!((echo.presence_penalty, echo.frequency_penalty, echo.max_tool_calls), (0.5, -1.0, Some(3)));
        let said = [echo.safety_identifier, echo.prompt_cache_key, echo.user];
        assert_eq!(said, ["s", "k", "u"].map(|said| Some(said.to_owned())));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        refused(json!({"previous_response_id": "resp_1"}), "previous_response_id");
        refused(json!({"conversation": {"id": "x"}}), "conversation");
        refused(json!({"prompt": {"id": "x"}}), "prompt");
        refused(json!({"store": true}), "store");
        refused(json!({"background": true}), "background");
        refused(json!({"truncation": "auto"}), "truncation");
        refused(json!({"tools": [{"type": "function", "name": ""}]}), "tools[0].name");
        refused(json!({"tool_choice": "required"}), "tool_choice");
        refused(json!({"text": {"format": {"type": "xml"}}}), "text.format");
        refused(json!({"text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format");
        refused(json!({"reasoning": {"effort": "huge"}}), "reasoning.effort");
        refused(json!({"max_output_tokens": 0}), "max_output_tokens");
        refused(json!({"temperature": 3}), "temperature");
        refused(json!({"top_logprobs": 21}), "top_logprobs");
        refused(json!({"max_tool_calls": 0}), "max_tool_calls");
        refused(json!({"prompt_cache_key": 7}), "prompt_cache_key");
        refused(json!({"safety_identifier": []}), "safety_identifier");
        refused(json!({"model": null}), "model");
        refused(json!({"input": null}), "input");
    }
}
