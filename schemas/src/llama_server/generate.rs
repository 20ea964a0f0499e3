//! `POST /completion`, `/infill` and `/embedding`: llama-server's own routes for text and vectors.
//!
//! Accepted and ignored: `cache_prompt`, `id_slot`, `samplers`, `t_max_predict_ms`, and any unknown field.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::requests::model;
use crate::embed::{EmbedInput, EmbedRequest, MAX_INPUTS};
use crate::generate::{GenerateRequest, Input, Sampling};
use crate::openai::usage::TimingsReport;
use crate::openai::{MaxTokens, NotYetBody, StructuredBody};
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, object};
use crate::request::inputs::{Inputs, TextOrTokens};
use crate::request::read::read;
use crate::request::sampling::SamplingBody;
use crate::request::stop::StopStrings;
use crate::request::values::Integer;
use crate::sequence::FinishReason;
use crate::tools::ToolUse;

/// The separator between two pieces of extra context, as in llama-server, for a model without tokens for it.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

object! {
    /// A text to continue.
    #[schemars(rename = "LlamaCompletionRequest", example = json!({ "prompt": "Once upon a time", "n_predict": 8 }))]
    pub struct LlamaCompletionBody {
        /// The text, or its tokens.
        prompt: Required<Inputs<1>>,
        /// How to generate.
        #[schemars(flatten)]
        how: LlamaGenerateBody,
    }
}

object! {
    /// A gap to fill. The model needs infilling tokens.
    #[schemars(rename = "InfillRequest", example = json!({ "input_prefix": "def f(", "input_suffix": "):", "n_predict": 8 }))]
    pub struct InfillBody {
        /// The text before the gap.
        input_prefix: Field<String>,
        /// The text after the gap.
        input_suffix: Field<String>,
        /// Texts of other files, which stand before `input_prefix`.
        input_extra: Field<Items<InfillExtra>>,
        /// The end of the text before the gap.
        prompt: Field<String>,
        /// How to generate.
        #[schemars(flatten)]
        how: LlamaGenerateBody,
    }
}

object! {
    /// A text of another file.
    pub(crate) struct InfillExtra {
        /// The text.
        text: Required<String>,
    }
}

object! {
    /// How to generate, in llama-server's words.
    pub(crate) struct LlamaGenerateBody {
        /// A model's name; by default the first model.
        model: Field<String>,
        /// The most tokens in the reply. -1: until the context ends.
        n_predict: Field<MaxTokens>,
        /// Texts before which the reply ends.
        stop: Field<StopStrings>,
        /// How tokens are sampled.
        #[schemars(flatten)]
        sampling: SamplingBody,
        /// The form that the reply must have.
        #[schemars(flatten)]
        structured: StructuredBody,
        /// Stream the reply as server-sent events.
        stream: Field<bool>,
        /// Continue after the model has ended its text.
        ignore_eos: Field<bool>,
        /// Only 0: log-probabilities have another form in `/v1/completions`.
        #[schemars(extend("maximum" = 0))]
        n_probs: Field<Integer<0, 0>>,
        #[schemars(skip)]
        return_tokens: Field<bool>,
        #[schemars(skip)]
        not_yet: NotYetBody,
    }
}

object! {
    /// A text to embed.
    #[schemars(rename = "LlamaEmbeddingRequest", example = json!({ "content": "a text" }))]
    pub struct LlamaEmbeddingBody {
        /// A model's name; by default the first model.
        model: Field<String>,
        /// One text, or several.
        content: Required<Inputs<MAX_INPUTS>>,
    }
}

/// A checked body. The model's name is empty if the client named none: the first model answers.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaGenerate(pub GenerateRequest);

impl LlamaGenerate {
    /// Parses and checks a body of `/completion`. `drawn_seed` is used if the client sent no seed.
    pub fn parse_completion(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let body: LlamaCompletionBody = read(body)?;
        let input = body.prompt.get("")?.check("prompt", "prompts")?.into_iter().next();
        let input = match input.ok_or_else(|| InvalidRequest::at("prompt", "must not be empty"))? {
            TextOrTokens::Text(text) => Input::Text(text),
            TextOrTokens::Tokens(tokens) => Input::Tokens(tokens),
        };
        body.how.check(input, drawn_seed)
    }

    /// Parses and checks a body of `/infill`. `drawn_seed` is used if the client sent no seed.
    pub fn parse_infill(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let body: InfillBody = read(body)?;
        let mut prefix = String::new();
        for extra in body.input_extra.get("")?.unwrap_or_default().each("input_extra") {
            let (at, extra) = extra?;
            prefix.push_str(&extra.text.get(&at)?);
            prefix.push_str(SNIPPET);
        }
        prefix.push_str(&body.input_prefix.get("")?.unwrap_or_default());
        prefix.push_str(&body.prompt.get("")?.unwrap_or_default());
        let suffix = body.input_suffix.get("")?.unwrap_or_default();
        body.how.check(Input::Infill { prefix, suffix }, drawn_seed)
    }
}

impl LlamaGenerateBody {
    fn check(self, input: Input, drawn_seed: u64) -> Result<LlamaGenerate, InvalidRequest> {
        self.not_yet.check()?;
        self.n_probs.get("")?;
        if self.return_tokens.get("")? == Some(true) {
            return Err(InvalidRequest::unsupported("return_tokens", "Returning tokens"));
        }
        let (sampling, chosen) = self.sampling.check("", Sampling { seed: drawn_seed, ..Sampling::default() })?;
        Ok(LlamaGenerate(GenerateRequest {
            is_streamed: self.stream.get("")?.unwrap_or(false),
            model: model(self.model)?.unwrap_or_default(),
            input,
            n: 1,
            max_tokens: self.n_predict.get("")?.and_then(Integer::count),
            stop: self.stop.get("")?.unwrap_or_default().0,
            sampling,
            chosen,
            top_logprobs: None,
            prompt_logprobs: None,
            ignore_eos: self.ignore_eos.get("")?.unwrap_or(false),
            constraint: self.structured.check()?,
            tools: ToolUse::default(),
            wants_thinking: false,
            keep_alive: None,
            num_ctx: None,
            context: None,
        }))
    }
}

/// Parses and checks a body of `/embedding`. The model's name is empty if the client named none.
pub fn parse_embedding(body: &[u8]) -> Result<EmbedRequest, InvalidRequest> {
    let body: LlamaEmbeddingBody = read(body)?;
    let inputs = body.content.get("")?.check("content", "texts")?.into_iter().map(|input| match input {
        TextOrTokens::Text(text) => EmbedInput::Text(text),
        TextOrTokens::Tokens(tokens) => EmbedInput::Tokens(tokens),
    });
    let model = model(body.model)?.unwrap_or_default();
    Ok(EmbedRequest { model, inputs: inputs.collect(), truncate: false, dimensions: None, keep_alive: None })
}

/// The reply to `/completion` and `/infill`, and the last event of a stream.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LlamaCompletion {
    index: u32,
    content: String,
    /// Always empty.
    tokens: [u32; 0],
    #[schemars(extend("const" = true))]
    stop: bool,
    model: String,
    tokens_predicted: u32,
    tokens_evaluated: u32,
    tokens_cached: u32,
    has_new_line: bool,
    /// Always false: prompts are not cut.
    truncated: bool,
    #[schemars(extend("enum" = ["eos", "limit", "word"]))]
    stop_type: &'static str,
    /// The stop string that ended the reply, or nothing.
    stopping_word: String,
    timings: TimingsReport,
}

/// How a reply ended.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaEnd {
    /// The engine's reason.
    pub reason: FinishReason,
    /// The stop string that ended the reply, if one did.
    pub stop: Option<String>,
    /// Tokens in the prompt.
    pub n_prompt: u32,
    /// Tokens generated.
    pub n_completion: u32,
    /// Where the time went.
    pub timings: TimingsReport,
}

impl LlamaCompletion {
    /// The reply of a model. `text` is all of it, `content` what the client has not got.
    pub fn new(model: String, content: String, has_new_line: bool, end: LlamaEnd) -> Self {
        let stop_type = match (end.reason, &end.stop) {
            (FinishReason::Length, _) => "limit",
            (_, Some(_)) => "word",
            (FinishReason::Stop | FinishReason::ToolCalls, None) => "eos",
        };
        LlamaCompletion {
            index: 0,
            content,
            tokens: [],
            stop: true,
            model,
            tokens_predicted: end.n_completion,
            tokens_evaluated: end.n_prompt,
            tokens_cached: end.n_prompt.saturating_add(end.n_completion),
            has_new_line,
            truncated: false,
            stop_type,
            stopping_word: end.stop.unwrap_or_default(),
            timings: end.timings,
        }
    }
}

/// An event of a stream, except the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LlamaCompletionChunk<'a> {
    index: u32,
    content: &'a str,
    /// Always empty.
    tokens: [u32; 0],
    #[schemars(extend("const" = false))]
    stop: bool,
}

impl<'a> LlamaCompletionChunk<'a> {
    /// An event with more text.
    pub fn new(content: &'a str) -> Self {
        LlamaCompletionChunk { index: 0, content, tokens: [], stop: false }
    }
}

/// The vectors of one text.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LlamaEmbedding {
    index: usize,
    /// One vector: the engine pools those of the tokens.
    embedding: [Vec<f32>; 1],
}

impl LlamaEmbedding {
    /// The replies to the texts, in their order.
    pub fn list(vectors: Vec<Vec<f32>>) -> Vec<LlamaEmbedding> {
        let of = |(index, vector)| LlamaEmbedding { index, embedding: [vector] };
        vectors.into_iter().enumerate().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn infill(body: Value) -> Result<Input, InvalidRequest> {
        LlamaGenerate::parse_infill(body.to_string().as_bytes(), 7).map(|request| request.0.input)
    }

    fn completion(body: Value) -> Result<GenerateRequest, InvalidRequest> {
        LlamaGenerate::parse_completion(body.to_string().as_bytes(), 7).map(|request| request.0)
    }

    #[test]
    fn the_parts_around_a_gap_are_joined() {
        let gap = |prefix: &str, suffix: &str| Input::Infill { prefix: prefix.into(), suffix: suffix.into() };
        assert_eq!(infill(json!({"input_prefix": "a", "prompt": "b", "input_suffix": "c"})), Ok(gap("ab", "c")));
        let extra = json!([{"filename": "f", "text": "x"}, {"text": "y"}]);
        let joined = format!("x{SNIPPET}y{SNIPPET}a");
        assert_eq!(infill(json!({"input_prefix": "a", "input_extra": extra})), Ok(gap(&joined, "")));
        let param = |body: Value| infill(body).unwrap_err().param.unwrap();
        assert_eq!(param(json!({"input_extra": [{"filename": "f"}]})), "input_extra[0].text");
        assert_eq!(param(json!({"input_prefix": 1})), "input_prefix");
    }

    #[test]
    fn a_completion_has_llama_servers_fields() {
        let plain = completion(json!({"prompt": "hi"})).unwrap();
        assert_eq!((plain.max_tokens, plain.model.as_str(), plain.is_streamed), (None, "", false));
        let asked = completion(json!({"prompt": [1, 2], "n_predict": 5, "stream": true, "stop": ["x"], "model": "m",
            "temperature": 0, "cache_prompt": true, "id_slot": -1, "grammar": "root ::= \"a\""}))
        .unwrap();
        assert_eq!(
            (asked.max_tokens, &asked.input, &*asked.stop),
            (Some(5), &Input::Tokens(vec![1, 2]), &["x".to_owned()][..])
        );
        assert!(asked.constraint.is_some() && asked.is_streamed && asked.model == "m");
        let param = |body: Value| completion(body).unwrap_err().param.unwrap();
        assert_eq!(param(json!({})), "prompt");
        assert_eq!(param(json!({"prompt": ["a", "b"]})), "prompt");
        assert_eq!(param(json!({"prompt": "a", "n_probs": 3})), "n_probs");
        assert_eq!(param(json!({"prompt": "a", "return_tokens": true})), "return_tokens");
        assert_eq!(param(json!({"prompt": "a", "mirostat": 2})), "mirostat");
        assert_eq!(param(json!({"prompt": "a", "n_predict": -2})), "n_predict");
    }
}
