//! `POST /v1/completions`, OpenAI's older route: a body → one [`GenerateRequest`] for each prompt.

use serde_json::Value;

use super::chat_request::{N_CHOICES, TOP_LOGPROBS, include_usage};
use super::{not_yet, response_format};
use crate::generate::{GenerateRequest, Input, Sampling};
use crate::request::fields::{Fields, wrong_type};
use crate::request::{InvalidRequest, json, sampling, stop, tokens};
use crate::tools::ToolUse;

/// OpenAI's default. A chat ends by itself, a bare text often does not.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Choices over all prompts: each takes a slot or a place in the engine's queue. Libraries send batches of 20 prompts.
pub(crate) const MAX_CHOICES: u32 = 64;

/// A completion as the client asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// What to generate, at least one; they differ in their input and their seeds alone.
    pub prompts: Vec<GenerateRequest>,
    /// Each text begins with its prompt.
    pub echo: bool,
    /// As server-sent events.
    pub stream: bool,
    /// With a last event that carries the usage.
    pub include_usage: bool,
}

impl CompletionRequest {
    /// Reads a body. `drawn_seed` is used where the client sent none.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        not_yet::refuse_in_completion(root)?;
        let inputs = with_suffix(prompts(root)?, root)?;
        let n = root.integer("n", N_CHOICES)?.map_or(1, |n| n as u32);
        let n_prompts = u32::try_from(inputs.len()).unwrap_or(u32::MAX);
        if n_prompts.saturating_mul(n) > MAX_CHOICES {
            let problem =
                format!("times n must be at most {MAX_CHOICES}, but there are {n_prompts} prompts and n is {n}");
            return Err(InvalidRequest::at("prompt", problem));
        }
        let echo = root.boolean("echo")?.unwrap_or(false);
        let top_logprobs = root.integer("logprobs", TOP_LOGPROBS)?.map(|n| n as u32);
        if echo && top_logprobs.is_some() {
            return Err(InvalidRequest::unsupported("logprobs", "Log-probabilities of an echoed prompt"));
        }
        let (sampling, chosen) = sampling::parse(root, Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let first = GenerateRequest {
            model: root.model()?,
            input: Input::Tokens(Vec::new()),
            n,
            max_tokens: max_tokens(root)?,
            stop: stop::parse(root)?,
            sampling,
            chosen,
            top_logprobs,
            ignore_eos: root.boolean("ignore_eos")?.unwrap_or(false),
            constraint: response_format::parse(root)?,
            tools: ToolUse::default(),
            wants_thinking: false,
            keep_alive: None,
            num_ctx: None,
            context: None,
        };
        Ok(CompletionRequest {
            prompts: (0..).zip(inputs).map(|(idx, input)| nth(&first, idx, input)).collect(),
            echo,
            stream: root.boolean("stream")?.unwrap_or(false),
            include_usage: include_usage(root)?,
        })
    }
}

/// The choices of one prompt take the seeds after its own, so the next prompt's begin behind them.
fn nth(first: &GenerateRequest, idx: u64, input: Input) -> GenerateRequest {
    let mut request = GenerateRequest { input, ..first.clone() };
    request.sampling.seed = request.sampling.seed.wrapping_add(idx * u64::from(first.n));
    request
}

/// Null is OpenAI's default too; −1 is llama.cpp's 'until the context ends'.
fn max_tokens(root: Fields<'_>) -> Result<Option<u32>, InvalidRequest> {
    let wanted = root.integer("max_tokens", -1..=i64::from(u32::MAX))?;
    Ok(wanted.map_or(Some(DEFAULT_MAX_TOKENS), |n| u32::try_from(n).ok()))
}

/// A string, tokens, or an array of one of them.
fn prompts(root: Fields<'_>) -> Result<Vec<Input>, InvalidRequest> {
    match root.get("prompt") {
        None => Err(InvalidRequest::at("prompt", "is missing")),
        Some(Value::Array(items)) if items.is_empty() => Err(InvalidRequest::at("prompt", "must not be empty")),
        Some(Value::Array(items)) if items.iter().all(Value::is_number) => {
            Ok(vec![Input::Tokens(tokens::parse(items, "prompt")?)])
        }
        Some(Value::Array(items)) if items.len() > MAX_CHOICES as usize => {
            let problem = format!("must be at most {MAX_CHOICES} prompts, but is {}", items.len());
            Err(InvalidRequest::at("prompt", problem))
        }
        Some(Value::Array(items)) => {
            items.iter().enumerate().map(|(idx, item)| prompt(item, &format!("prompt[{idx}]"))).collect()
        }
        Some(one) => Ok(vec![prompt(one, "prompt")?]),
    }
}

fn prompt(value: &Value, name: &str) -> Result<Input, InvalidRequest> {
    match value {
        Value::String(text) if text.is_empty() => Err(InvalidRequest::at(name, "must not be empty")),
        Value::String(text) => Ok(Input::Text(text.clone())),
        Value::Array(items) if items.is_empty() => Err(InvalidRequest::at(name, "must not be empty")),
        Value::Array(items) => tokens::parse(items, name).map(Input::Tokens),
        other => Err(wrong_type(name, "a string or an array of tokens", other)),
    }
}

/// With a `suffix`, each prompt is the text before what is wanted.
fn with_suffix(inputs: Vec<Input>, root: Fields<'_>) -> Result<Vec<Input>, InvalidRequest> {
    let Some(suffix) = root.string("suffix")?.filter(|suffix| !suffix.is_empty()) else { return Ok(inputs) };
    let infill = |input: Input| match input {
        Input::Text(prefix) => Ok(Input::Infill { prefix, suffix: suffix.to_owned() }),
        _ => Err(InvalidRequest::at("suffix", "needs the prompt as text")),
    };
    inputs.into_iter().map(infill).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(extra: Value) -> Result<CompletionRequest, InvalidRequest> {
        let mut body = json!({"model": "m", "prompt": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        CompletionRequest::parse(body.to_string().as_bytes(), 7)
    }

    fn check(extra: Value, expected: &[Input]) {
        let inputs: Vec<_> = parsed(extra.clone()).unwrap().prompts.into_iter().map(|prompt| prompt.input).collect();
        assert_eq!(inputs, expected, "{extra}");
    }

    fn refused(extra: Value, param: &str) {
        assert_eq!(parsed(extra.clone()).unwrap_err().param.as_deref(), Some(param), "{extra}");
    }

    fn text(text: &str) -> Input {
        Input::Text(text.into())
    }

    #[test]
    fn every_form_of_a_prompt_is_read() {
        check(json!({}), &[text("hi")]);
        check(json!({"prompt": ["a", "b"]}), &[text("a"), text("b")]);
        check(json!({"prompt": [1, 2]}), &[Input::Tokens(vec![1, 2])]);
        check(json!({"prompt": [[1], [2, 3]]}), &[Input::Tokens(vec![1]), Input::Tokens(vec![2, 3])]);
        check(json!({"prompt": ["a", [1]]}), &[text("a"), Input::Tokens(vec![1])]);
        check(json!({"suffix": "x"}), &[Input::Infill { prefix: "hi".into(), suffix: "x".into() }]);
        check(json!({"suffix": ""}), &[text("hi")]);
    }

    #[test]
    fn the_defaults_are_openais() {
        let request = parsed(json!({})).unwrap();
        assert!(!request.echo && !request.stream && !request.include_usage);
        let prompt = &request.prompts[0];
        assert_eq!((prompt.n, prompt.max_tokens, prompt.top_logprobs), (1, Some(16), None));
        let max_tokens = |value: Value| parsed(json!({ "max_tokens": value })).unwrap().prompts[0].max_tokens;
        assert_eq!((max_tokens(json!(null)), max_tokens(json!(0)), max_tokens(json!(-1))), (Some(16), Some(0), None));
        let asked = parsed(json!({"logprobs": 0, "stream": true, "stream_options": {"include_usage": true}})).unwrap();
        assert_eq!((asked.prompts[0].top_logprobs, asked.stream, asked.include_usage), (Some(0), true, true));
    }

    #[test]
    fn no_two_choices_share_a_seed() {
        let request = parsed(json!({"prompt": ["a", "b", "c"], "n": 2, "seed": 10})).unwrap();
        let seeds: Vec<_> = request.prompts.iter().map(|prompt| prompt.sampling.seed).collect();
        assert_eq!(seeds, [10, 12, 14]);
    }

    #[test]
    fn what_cannot_be_read_or_honoured_is_named() {
        refused(json!({"prompt": null}), "prompt");
        refused(json!({"prompt": ""}), "prompt");
        refused(json!({"prompt": []}), "prompt");
        refused(json!({"prompt": {}}), "prompt");
        refused(json!({"prompt": [-1]}), "prompt");
        refused(json!({"prompt": [1.5]}), "prompt");
        refused(json!({"prompt": [4294967296_u64]}), "prompt");
        refused(json!({"prompt": ["a", 1]}), "prompt[1]");
        refused(json!({"prompt": ["a", ""]}), "prompt[1]");
        refused(json!({"prompt": [[]]}), "prompt[0]");
        refused(json!({"prompt": vec!["a"; 65]}), "prompt");
        refused(json!({"prompt": vec!["a"; 33], "n": 2}), "prompt");
        refused(json!({"prompt": [1], "suffix": "x"}), "suffix");
        refused(json!({"logprobs": true}), "logprobs");
        refused(json!({"logprobs": 21}), "logprobs");
        refused(json!({"logprobs": 1, "echo": true}), "logprobs");
        refused(json!({"best_of": 3}), "best_of");
        refused(json!({"max_tokens": -2}), "max_tokens");
        refused(json!({"n": 17}), "n");
    }
}
