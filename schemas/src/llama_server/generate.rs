//! `POST /completion`, `/infill` and `/embedding`: llama-server's own routes for text and vectors.
//!
//! What becomes of fields that they do not declare: see `request/foreign.rs`.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::requests::model;
use crate::embed::{EmbedInput, EmbedRequest, EmbedTask, MAX_INPUTS};
use crate::generate::{GenerateRequest, InfillNames, Input, Sampling, Thinking};
use crate::openai::usage::TimingsReport;
use crate::openai::{
    MAX_CHOICES, MaxTokens, PlainPromptFields, ReplyLengthBody, StructuredBody, TopLogprobs, nth_prompt,
};
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, object};
use crate::request::foreign::{Foreign, ForeignFields, NoOwnFields, OwnName, RefusedField};
use crate::request::inputs::{Inputs, TextOrTokens};
use crate::request::read::read;
use crate::request::sampling::SamplingBody;
use crate::request::stop::StopBody;
use crate::request::values::Integer;
use crate::sequence::{FinishReason, Logprobs};
use crate::token::Token;
use crate::tools::ToolUse;

/// The separator between two pieces of extra context, as in llama-server, for a model without tokens for it.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

object! {
    /// A text to continue.
    #[schemars(rename = "LlamaCompletionRequest", example = json!({ "prompt": "Once upon a time", "n_predict": 8 }))]
    pub struct LlamaCompletionBody {
        /// A text, its tokens, or several of either, each of which gets a reply.
        prompt: Required<Inputs<MAX_CHOICES>>,
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
        #[schemars(skip)]
        length: ReplyLengthBody,
        /// Texts before which the reply ends.
        #[schemars(flatten)]
        stop: StopBody,
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
        /// Report the log-probability of each token, and of so many of the most likely tokens in its place. 0: none.
        n_probs: Field<TopLogprobs>,
        #[schemars(skip)]
        foreign: Foreign<LlamaPromptFields>,
    }
}

/// The fields of chats, in llama-server's words.
#[derive(Debug)]
pub(crate) struct LlamaPromptFields;

impl ForeignFields for LlamaPromptFields {
    const REFUSED: &'static [RefusedField] = PlainPromptFields::REFUSED;
    const NAMES: &'static [OwnName] = &[
        OwnName::new("max_tokens", "'n_predict'"),
        OwnName::new("reasoning_effort", "a prompt without the opening of reasoning"),
        OwnName::new("response_format", "'json_schema'"),
        OwnName::new("logprobs", "'n_probs'"),
        OwnName::new("top_logprobs", "'n_probs'"),
        OwnName::new("tools", ""),
        OwnName::new("tool_choice", ""),
        OwnName::new("n", ""),
    ];
}

object! {
    /// A text to embed.
    #[schemars(rename = "LlamaEmbeddingRequest", example = json!({ "content": "a text" }))]
    pub struct LlamaEmbeddingBody {
        /// A model's name; by default the first model.
        model: Field<String>,
        /// One text, or several.
        content: Required<Inputs<MAX_INPUTS>>,
        #[schemars(skip)]
        foreign: Foreign<NoOwnFields>,
    }
}

/// A checked body: a request for each prompt, at least one. The model's name is empty if the client named none: the first
/// model answers.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaGenerate(pub Vec<GenerateRequest>);

impl LlamaGenerate {
    /// Parses and checks a body of `/completion`. `drawn_seed` is used if the client sent no seed.
    pub fn parse_completion(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let body: LlamaCompletionBody = read(body)?;
        let inputs = body.prompt.get("")?.check("prompt", "prompts")?.into_iter().map(|input| match input {
            TextOrTokens::Text(text) => Input::Text(text.into()),
            TextOrTokens::Tokens(tokens) => Input::Tokens(tokens),
        });
        body.how.check(inputs.collect(), drawn_seed)
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
        let names = InfillNames { prefix: "input_prefix", suffix: "input_suffix" };
        body.how.check(vec![Input::Infill { prefix: prefix.into(), suffix: suffix.into(), names }], drawn_seed)
    }
}

impl LlamaGenerateBody {
    fn check(self, inputs: Vec<Input>, drawn_seed: u64) -> Result<LlamaGenerate, InvalidRequest> {
        self.foreign.check()?;
        let (sampling, chosen) = self.sampling.check("", Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let first = GenerateRequest {
            is_streamed: self.stream.get("")?.unwrap_or(false),
            model: model(self.model)?.unwrap_or_default(),
            input: Input::Tokens(Vec::new()),
            n: 1,
            max_tokens: self.length.check(&[("n_predict", self.n_predict.get("")?)])?.and_then(Integer::count),
            stop: self.stop.check()?,
            sampling,
            chosen,
            top_logprobs: self.n_probs.get("")?.and_then(Integer::count).filter(|&n| n > 0),
            prompt_logprobs: None,
            predicted: None,
            ignore_eos: self.ignore_eos.get("")?.unwrap_or(false),
            constraint: self.structured.check()?.map(Arc::new),
            tools: ToolUse::default(),
            thinking: Thinking::AsSaid,
            keep_alive: None,
            num_ctx: None,
            context: None,
        };
        Ok(LlamaGenerate((0..).zip(inputs).map(|(idx, input)| nth_prompt(&first, idx, input)).collect()))
    }
}

/// Parses and checks a body of `/embedding`. The model's name is empty if the client named none.
pub fn parse_embedding(body: &[u8]) -> Result<EmbedRequest, InvalidRequest> {
    let body: LlamaEmbeddingBody = read(body)?;
    body.foreign.check()?;
    let inputs = body.content.get("")?.check("content", "texts")?.into_iter().map(|input| match input {
        TextOrTokens::Text(text) => EmbedInput::Text(text),
        TextOrTokens::Tokens(tokens) => EmbedInput::Tokens(tokens),
    });
    let model = model(body.model)?.unwrap_or_default();
    Ok(EmbedRequest {
        model,
        task: EmbedTask::Embed,
        inputs: inputs.collect(),
        field: "content",
        truncate: false,
        dimensions: None,
        keep_alive: None,
    })
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
    /// The tokens of the reply, if `n_probs` asks for them. In a stream they come with their texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Vec<LlamaTokenProb>>,
    /// Always false: prompts are not cut.
    truncated: bool,
    #[schemars(extend("enum" = ["eos", "limit", "word"]))]
    stop_type: &'static str,
    /// The stop string that ended the reply, or nothing.
    stopping_word: String,
    timings: TimingsReport,
}

/// The reply to `/completion`: an object, or an array of them if there are several prompts.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum LlamaReply {
    /// The reply to the only prompt.
    One(Box<LlamaCompletion>),
    /// The replies, in the order of their prompts.
    Many(Vec<LlamaCompletion>),
}

/// A token of a reply.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LlamaTokenProb {
    #[serde(flatten)]
    token: LlamaProb,
    /// The most likely tokens in its place, the best first.
    top_logprobs: Vec<LlamaProb>,
}

/// A token and its log-probability.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
struct LlamaProb {
    /// The token; null if the model's upstream does not say it.
    id: Option<Token>,
    /// Its text, without the part of a character at its end.
    token: String,
    /// Its exact bytes.
    bytes: Vec<u8>,
    /// The natural logarithm.
    logprob: f32,
}

impl LlamaTokenProb {
    /// A token with these bytes.
    pub fn new(id: Option<Token>, bytes: &[u8], logprobs: &Logprobs) -> Self {
        // A server that does not say its tokens does not say the alternatives', either.
        let top = logprobs.top.iter().map(|other| LlamaProb::new(id.map(|_| other.id), &other.bytes, other.logprob));
        LlamaTokenProb { token: LlamaProb::new(id, bytes, logprobs.chosen), top_logprobs: top.collect() }
    }
}

impl LlamaProb {
    fn new(id: Option<Token>, bytes: &[u8], logprob: f32) -> Self {
        let text = bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        // JSON has no minus infinity; llama-server writes this.
        let logprob = if logprob.is_finite() { logprob } else { f32::MIN };
        LlamaProb { id, token: text.to_owned(), bytes: bytes.to_vec(), logprob }
    }
}

/// How a reply ended.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaEnd {
    /// The prompt's index.
    pub index: u32,
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

/// The text that a reply's last event has.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LlamaContent {
    /// What the client has not got.
    pub text: String,
    /// Its tokens, if they were asked for.
    pub probabilities: Option<Vec<LlamaTokenProb>>,
}

impl LlamaCompletion {
    /// The reply of a model. `has_new_line` concerns all of its text.
    pub fn new(model: String, content: LlamaContent, has_new_line: bool, end: LlamaEnd) -> Self {
        let stop_type = match (end.reason, &end.stop) {
            (FinishReason::Length | FinishReason::ContentFilter, _) => "limit",
            (_, Some(_)) => "word",
            (FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Refusal, None) => "eos",
        };
        LlamaCompletion {
            index: end.index,
            content: content.text,
            tokens: [],
            stop: true,
            model,
            tokens_predicted: end.n_completion,
            tokens_evaluated: end.n_prompt,
            tokens_cached: end.n_prompt.saturating_add(end.n_completion),
            has_new_line,
            completion_probabilities: content.probabilities,
            truncated: false,
            stop_type,
            stopping_word: end.stop.unwrap_or_default(),
            timings: end.timings,
        }
    }
}

/// An event of a stream, except the last.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LlamaCompletionChunk<'a> {
    index: u32,
    content: &'a str,
    /// Always empty.
    tokens: [u32; 0],
    #[schemars(extend("const" = false))]
    stop: bool,
    /// The tokens of this text, if `n_probs` asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Vec<LlamaTokenProb>>,
}

impl<'a> LlamaCompletionChunk<'a> {
    /// An event with more text of the reply to prompt `index`.
    pub fn new(index: u32, content: &'a str, completion_probabilities: Option<Vec<LlamaTokenProb>>) -> Self {
        LlamaCompletionChunk { index, content, tokens: [], stop: false, completion_probabilities }
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
    use crate::sequence::Alternative;

    fn infill(body: Value) -> Result<Input, InvalidRequest> {
        LlamaGenerate::parse_infill(body.to_string().as_bytes(), 7).map(|request| request.0[0].input.clone())
    }

    fn completions(body: Value) -> Result<Vec<GenerateRequest>, InvalidRequest> {
        LlamaGenerate::parse_completion(body.to_string().as_bytes(), 7).map(|request| request.0)
    }

    fn completion(body: Value) -> Result<GenerateRequest, InvalidRequest> {
        completions(body).map(|mut requests| requests.remove(0))
    }

    #[test]
    fn the_parts_around_a_gap_are_joined() {
        let names = InfillNames { prefix: "input_prefix", suffix: "input_suffix" };
        let gap = |prefix: &str, suffix: &str| Input::Infill { prefix: prefix.into(), suffix: suffix.into(), names };
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
        let n_top = |n_probs: u32| completion(json!({"prompt": "a", "n_probs": n_probs})).unwrap().top_logprobs;
        assert_eq!((n_top(0), n_top(3)), (None, Some(3)));
        let several = completions(json!({"prompt": ["a", [1, 2]], "seed": 9})).unwrap();
        let of = |at: usize| (&several[at].input, several[at].sampling.seed);
        assert_eq!([of(0), of(1)], [(&Input::Text("a".into()), 9), (&Input::Tokens(vec![1, 2]), 10)]);
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
        assert_eq!(param(json!({"prompt": vec!["a"; MAX_CHOICES + 1]})), "prompt");
        assert_eq!(param(json!({"prompt": ["a", ""]})), "prompt[1]");
        assert_eq!(param(json!({"prompt": "a", "n_probs": 21})), "n_probs");
        assert_eq!(param(json!({"prompt": "a", "post_sampling_probs": true})), "post_sampling_probs");
        assert_eq!(param(json!({"prompt": "a", "return_tokens": true})), "return_tokens");
        assert_eq!(param(json!({"prompt": "a", "lora": [{"id": 0, "scale": 0.5}]})), "lora");
        assert_eq!(param(json!({"prompt": "a", "image_data": [{"data": "", "id": 1}]})), "image_data");
        assert_eq!(param(json!({"prompt": "a", "t_max_predict_ms": 500})), "t_max_predict_ms");
        assert_eq!(param(json!({"prompt": "a", "n_indent": 4})), "n_indent");
        assert_eq!(param(json!({"prompt": "a", "mirostat": 2})), "mirostat");
        assert_eq!(param(json!({"prompt": "a", "n_predict": -2})), "n_predict");
    }

    #[test]
    fn a_token_is_reported_as_by_llama_server() {
        let top = vec![Alternative { id: 9, bytes: vec![0xC3, 0xA9], logprob: f32::NEG_INFINITY }];
        let logprobs = Logprobs { chosen: -0.5, rank: None, top };
        let written = |id| serde_json::to_value(LlamaTokenProb::new(id, &[b'a', 0xC3], &logprobs)).unwrap();
        assert_eq!(
            written(Some(7)),
            json!({"id": 7, "token": "a", "bytes": [97, 195], "logprob": -0.5,
                "top_logprobs": [{"id": 9, "token": "é", "bytes": [195, 169], "logprob": f32::MIN}]})
        );
        assert_eq!(
            (written(None)["id"].clone(), written(None)["top_logprobs"][0]["id"].clone()),
            (Value::Null, Value::Null)
        );
    }
}
