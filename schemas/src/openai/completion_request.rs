//! `POST /v1/completions`, OpenAI's older route: a body → one [`GenerateRequest`] per prompt.

use std::sync::Arc;

use serde_json::json;

use super::chat_request::{NChoices, StreamOptions, TopLogprobs};
use super::reply_length::{MaxTokens, ReplyLengthBody};
use super::structured::StructuredBody;
use crate::generate::{GenerateRequest, InfillNames, Input, PromptLogprobs, Sampling, Thinking};
use crate::request::InvalidRequest;
use crate::request::demand::Off;
use crate::request::field::{Field, Required, object};
use crate::request::foreign::{Foreign, ForeignFields, OwnName, RefusedField};
use crate::request::inputs::{Inputs, TextOrTokens};
use crate::request::read::read;
use crate::request::sampling::SamplingBody;
use crate::request::stop::StopBody;
use crate::request::values::{Integer, ModelName};
use crate::tools::ToolUse;

/// OpenAI's default. Unlike a chat, a plain text often does not end by itself.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// The most choices over all prompts: each needs a slot or a place in the engine's queue. Libraries send 20 prompts at
/// once.
pub(crate) const MAX_CHOICES: usize = 64;
/// The most log-probabilities of prompts in one reply: each takes about 200 bytes until the reply is written. A prompt of
/// 16,384 tokens may have 30 at each position.
const MAX_PROMPT_LOGPROBS: u32 = 500_000;

object! {
    /// Texts to continue.
    #[schemars(rename = "CompletionRequest", example = json!({
        "model": "smollm2", "max_tokens": 8, "prompt": "Once upon a time"
    }))]
    pub struct CompletionBody {
        /// A model's name, as `/v1/models` lists it.
        model: Required<ModelName>,
        /// The text to continue, or several. The number of prompts times `n` is at most 64.
        prompt: Required<Inputs<MAX_CHOICES>>,
        /// The text after the gap to fill; `prompt` is the text before it. Needs a model with infilling tokens, and the
        /// prompt as text.
        suffix: Field<String>,
        /// How many choices to generate for each prompt.
        n: Field<NChoices>,
        /// The most tokens in a choice. Null: 16. -1: until the context ends.
        max_tokens: Field<MaxTokens>,
        #[schemars(skip)]
        length: ReplyLengthBody,
        /// Texts before which a choice ends.
        #[schemars(flatten)]
        stop: StopBody,
        /// How tokens are sampled.
        #[schemars(flatten)]
        sampling: SamplingBody,
        /// Report log-probabilities, and this many of the most likely tokens at each position. With `echo`, those of the
        /// prompt, too.
        logprobs: Field<TopLogprobs>,
        /// Begin each choice with its prompt.
        echo: Field<bool>,
        /// Report the log-probabilities of the prompt's tokens in `prompt_logprobs`, with this many of the most likely
        /// tokens at each position. Not in a stream.
        prompt_logprobs: Field<TopLogprobs>,
        /// Stream the reply as server-sent events.
        stream: Field<bool>,
        /// Options of a stream.
        stream_options: Field<StreamOptions>,
        /// The form that the text must have.
        #[schemars(flatten)]
        structured: StructuredBody,
        /// Continue after the model has ended its text.
        ignore_eos: Field<bool>,
        #[schemars(skip)]
        foreign: Foreign<PlainPromptFields>,
    }
}

/// Fields of chats that a route without a chat template does not declare.
#[derive(Debug)]
pub(crate) struct PlainPromptFields;

impl ForeignFields for PlainPromptFields {
    const REFUSED: &'static [RefusedField] = &[
        // The whole prompt is the client's.
        RefusedField::new("add_special_tokens", Off::TRUE, "A prompt without the token that begins it", "send tokens"),
        RefusedField::new("chat_template_kwargs", Off::ZERO, "A chat template", "use /v1/chat/completions"),
    ];
    const NAMES: &'static [OwnName] = &[
        OwnName::new("reasoning_effort", "a prompt without the opening of reasoning"),
        OwnName::new("top_logprobs", "'logprobs'"),
        OwnName::new("tools", ""),
        OwnName::new("tool_choice", ""),
    ];
}

/// A checked body of `/v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// The requests to run, at least one. They differ only in their inputs and seeds, and share the rest.
    pub prompts: Vec<GenerateRequest>,
    /// Begin each choice with its prompt.
    pub echo: bool,
    /// `Some(k)`: report the log-probabilities of the prompt's tokens and of the k most likely ones, besides those of an
    /// echo.
    pub prompt_logprobs: Option<u32>,
    /// Send a last event with the usage.
    pub include_usage: bool,
}

impl CompletionRequest {
    /// Parses and checks a body. `drawn_seed` is used if the client sent no seed.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        read::<CompletionBody>(body)?.check(drawn_seed)
    }
}

impl CompletionBody {
    fn check(self, drawn_seed: u64) -> Result<CompletionRequest, InvalidRequest> {
        self.foreign.check()?;
        let inputs = self.prompt.get("")?.check("prompt", "prompts")?;
        let suffix = self.suffix.get("")?.filter(|suffix| !suffix.is_empty()).map(Arc::from);
        let has_suffix = suffix.is_some();
        let inputs = with_suffix(inputs, suffix)?;
        let n = self.n.get("")?.and_then(Integer::count).unwrap_or(1);
        if inputs.len() * n as usize > MAX_CHOICES {
            let n_prompts = inputs.len();
            let problem =
                format!("times n must be at most {MAX_CHOICES}, but there are {n_prompts} prompts and n is {n}");
            return Err(InvalidRequest::at("prompt", problem));
        }
        let echo = self.echo.get("")?.unwrap_or(false);
        let top_logprobs = self.logprobs.get("")?.and_then(Integer::count);
        let is_streamed = self.stream.get("")?.unwrap_or(false);
        let of_prompt = self.prompt_logprobs.get("")?.and_then(Integer::count);
        if is_streamed && of_prompt.is_some() {
            return Err(InvalidRequest::at(
                "prompt_logprobs",
                "is not available in a stream: 'echo' with 'logprobs' is",
            ));
        }
        let of_echo = top_logprobs.filter(|_| echo);
        let n_choices = inputs.len() as u32 * n;
        let prompt_logprobs = of_prompt.max(of_echo).map(|n_top| PromptLogprobs {
            n_top,
            most: MAX_PROMPT_LOGPROBS / n_choices.max(1),
            field: if of_prompt.is_some() { "prompt_logprobs" } else { "logprobs" },
        });
        if let Some(PromptLogprobs { field, .. }) = prompt_logprobs.filter(|_| has_suffix) {
            return Err(InvalidRequest::unsupported(field, "Log-probabilities of a prompt with a suffix"));
        }
        let (sampling, chosen) = self.sampling.check("", Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let first = GenerateRequest {
            is_streamed,
            model: self.model.get("")?.0,
            input: Input::Tokens(Vec::new()),
            n,
            // Null also means OpenAI's default.
            max_tokens: self
                .length
                .check(&[("max_tokens", self.max_tokens.get("")?)])?
                .map_or(Some(DEFAULT_MAX_TOKENS), Integer::count),
            stop: self.stop.check()?,
            sampling,
            chosen,
            top_logprobs,
            prompt_logprobs,
            predicted: None,
            ignore_eos: self.ignore_eos.get("")?.unwrap_or(false),
            constraint: self.structured.check()?.map(Arc::new),
            tools: ToolUse::default(),
            thinking: Thinking::AsSaid,
            keep_alive: None,
            num_ctx: None,
            context: None,
        };
        Ok(CompletionRequest {
            prompts: (0..).zip(inputs).map(|(idx, input)| nth_prompt(&first, idx, input)).collect(),
            echo,
            prompt_logprobs: of_prompt,
            include_usage: StreamOptions::includes_usage(self.stream_options.get("")?)?,
        })
    }
}

/// Creates the request of prompt `idx`. Each choice has a seed of its own, so a prompt's seeds follow the previous
/// prompt's.
pub(crate) fn nth_prompt(first: &GenerateRequest, idx: u64, input: Input) -> GenerateRequest {
    let mut request = GenerateRequest { input, ..first.clone() };
    request.sampling.seed = request.sampling.seed.wrapping_add(idx * u64::from(first.n));
    request
}

/// Converts prompts to inputs. With a `suffix`, each prompt is the text before the gap to fill.
fn with_suffix(inputs: Vec<TextOrTokens>, suffix: Option<Arc<str>>) -> Result<Vec<Input>, InvalidRequest> {
    let input = |input| match (input, &suffix) {
        (TextOrTokens::Text(text), None) => Ok(Input::Text(text.into())),
        (TextOrTokens::Tokens(tokens), None) => Ok(Input::Tokens(tokens)),
        (TextOrTokens::Text(prefix), Some(suffix)) => {
            Ok(Input::Infill { prefix: prefix.into(), suffix: Arc::clone(suffix), names: InfillNames::COMMON })
        }
        (TextOrTokens::Tokens(_), Some(_)) => Err(InvalidRequest::at("suffix", "needs the prompt as text")),
    };
    inputs.into_iter().map(input).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

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
        let names = InfillNames::COMMON;
        check(json!({"suffix": "x"}), &[Input::Infill { prefix: "hi".into(), suffix: "x".into(), names }]);
        check(json!({"suffix": ""}), &[text("hi")]);
    }

    #[test]
    fn the_defaults_are_openais() {
        let request = parsed(json!({})).unwrap();
        assert!(!request.echo && !request.include_usage);
        let prompt = &request.prompts[0];
        assert_eq!((prompt.n, prompt.max_tokens, prompt.top_logprobs), (1, Some(16), None));
        assert!(!prompt.is_streamed);
        let max_tokens = |value: Value| parsed(json!({ "max_tokens": value })).unwrap().prompts[0].max_tokens;
        assert_eq!((max_tokens(json!(null)), max_tokens(json!(0)), max_tokens(json!(-1))), (Some(16), Some(0), None));
        let asked = parsed(json!({"logprobs": 0, "stream": true, "stream_options": {"include_usage": true}})).unwrap();
        let prompt = &asked.prompts[0];
        assert_eq!((prompt.top_logprobs, prompt.is_streamed, asked.include_usage), (Some(0), true, true));
    }

    #[test]
    fn log_probabilities_of_a_prompt_are_bounded_over_all_choices() {
        let asked = |extra: Value| parsed(extra).unwrap().prompts[0].prompt_logprobs;
        assert_eq!(asked(json!({"logprobs": 1})), None);
        assert_eq!(asked(json!({"echo": true})), None);
        let of = |n_top, n: u32, field| Some(PromptLogprobs { n_top, most: MAX_PROMPT_LOGPROBS / n, field });
        assert_eq!(asked(json!({"logprobs": 1, "echo": true})), of(1, 1, "logprobs"));
        let both = json!({"logprobs": 1, "echo": true, "prompt_logprobs": 5, "n": 2, "prompt": ["a", "b"]});
        assert_eq!(asked(both), of(5, 4, "prompt_logprobs"));
    }

    #[test]
    fn no_two_choices_share_a_seed() {
        let request = parsed(json!({"prompt": ["a", "b", "c"], "n": 2, "seed": 10})).unwrap();
        let seeds: Vec<_> = request.prompts.iter().map(|prompt| prompt.sampling.seed).collect();
        assert_eq!(seeds, [10, 12, 14]);
    }

    #[test]
    fn sixty_four_prompts_share_what_they_have_in_common() {
        let long = "x".repeat(1 << 20);
        let schema = json!({ "enum": vec![json!([0]); 5000] });
        let biases: serde_json::Map<_, _> = (0..1000).map(|token| (token.to_string(), json!(1))).collect();
        let body = json!({
            "prompt": vec!["a"; 64], "suffix": long, "json_schema": schema, "stop": "x".repeat(1000), "logit_bias": biases,
        });
        let prompts = parsed(body).unwrap().prompts;
        let suffix = |prompt: &GenerateRequest| match &prompt.input {
            Input::Infill { suffix, .. } => Arc::clone(suffix),
            input => panic!("{input:?}"),
        };
        let [first, .., last] = &prompts[..] else { panic!() };
        assert_eq!(prompts.len(), 64);
        assert!(Arc::ptr_eq(&suffix(first), &suffix(last)));
        let constraint = |prompt: &GenerateRequest| Arc::clone(prompt.constraint.as_ref().unwrap());
        assert!(Arc::ptr_eq(&constraint(first), &constraint(last)));
        assert!(Arc::ptr_eq(&first.stop, &last.stop));
        assert!(Arc::ptr_eq(&first.sampling.logit_bias, &last.sampling.logit_bias));
        // What stays after the start is the schema, and no text of the prompt.
        let n_schema = constraint(first).memory_bytes();
        assert!((n_schema..n_schema + (32 << 10)).contains(&first.kept_bytes()), "{}", first.kept_bytes());
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
        refused(json!({"logprobs": 1, "echo": true, "suffix": "x"}), "logprobs");
        refused(json!({"prompt_logprobs": 1, "suffix": "x"}), "prompt_logprobs");
        refused(json!({"prompt_logprobs": 21}), "prompt_logprobs");
        refused(json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs");
        refused(json!({"best_of": 3}), "best_of");
        refused(json!({"max_tokens": -2}), "max_tokens");
        refused(json!({"n": 17}), "n");
    }
}
