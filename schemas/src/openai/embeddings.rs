//! `POST /v1/embeddings`: a body → one [`EmbedRequest`], and its reply.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::embed::{EmbedInput, EmbedRequest, EmbedTask, MAX_INPUTS, le_bytes};
use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, object};
use crate::request::foreign::{Foreign, VectorFields};
use crate::request::inputs::{Inputs, TextOrTokens};
use crate::request::read::read;
use crate::request::values::{Integer, MAX_U32, ModelName, Word, Words};

object! {
    /// Texts to embed.
    #[schemars(rename = "EmbeddingsRequest", example = json!({ "model": "smollm2", "input": "a text" }))]
    pub struct EmbeddingsBody {
        /// A model's name, as `/v1/models` lists it.
        model: Required<ModelName>,
        /// One text, or several; at most 300,000 tokens in all.
        input: Required<Inputs<MAX_INPUTS>>,
        /// The form of the vectors. OpenAI's SDKs ask for base64.
        encoding_format: Field<Word<Encoding>>,
        /// The length of the vectors: only the model's own is allowed.
        dimensions: Field<Integer<1, MAX_U32>>,
        #[schemars(skip)]
        foreign: Foreign<VectorFields>,
    }
}

/// A checked body of `/v1/embeddings`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddingsRequest {
    /// What to embed.
    pub embed: EmbedRequest,
    /// The form of the vectors.
    pub encoding: Encoding,
}

/// The form of vectors in a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// Arrays of numbers.
    Float,
    /// Base64 of little-endian 32-bit floats. OpenAI's SDKs ask for it by default.
    Base64,
}

impl Words for Encoding {
    const WRONG: &'static str = "must be float or base64";
}

impl EmbeddingsRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let body: EmbeddingsBody = read(body)?;
        body.foreign.check()?;
        let encoding = body.encoding_format.get("")?.map_or(Encoding::Float, |encoding| encoding.0);
        let dimensions = body.dimensions.get("")?.and_then(Integer::count);
        let model = body.model.get("")?.0;
        let inputs = body.input.get("")?.check("input", "texts")?.into_iter().map(|input| match input {
            TextOrTokens::Text(text) => EmbedInput::Text(text),
            TextOrTokens::Tokens(tokens) => EmbedInput::Tokens(tokens),
        });
        let embed = EmbedRequest {
            model,
            task: EmbedTask::Embed,
            inputs: inputs.collect(),
            field: "input",
            truncate: false,
            dimensions,
            keep_alive: None,
        };
        Ok(EmbeddingsRequest { embed, encoding })
    }
}

/// The reply to `/v1/embeddings`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct EmbeddingList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
struct Embedding {
    #[schemars(extend("const" = "embedding"))]
    object: &'static str,
    index: usize,
    embedding: Values,
}

#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
enum Values {
    Floats(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
struct EmbeddingUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

impl EmbeddingList {
    /// A reply with the vectors in the order of the inputs. `n_tokens` counts the tokens of all inputs.
    pub fn new(model: String, vectors: Vec<Vec<f32>>, encoding: Encoding, n_tokens: u32) -> Self {
        let values = |vector: Vec<f32>| match encoding {
            Encoding::Float => Values::Floats(vector),
            Encoding::Base64 => Values::Base64(STANDARD.encode(le_bytes(&vector))),
        };
        let embeddings = vectors.into_iter().enumerate();
        EmbeddingList {
            object: "list",
            data: embeddings
                .map(|(index, vector)| Embedding { object: "embedding", index, embedding: values(vector) })
                .collect(),
            model,
            usage: EmbeddingUsage { prompt_tokens: n_tokens, total_tokens: n_tokens },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn parsed(extra: Value) -> Result<EmbeddingsRequest, InvalidRequest> {
        let mut body = json!({"model": "m", "input": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        EmbeddingsRequest::parse(body.to_string().as_bytes())
    }

    fn check(input: Value, expected: &[EmbedInput]) {
        assert_eq!(parsed(json!({ "input": input })).unwrap().embed.inputs, expected, "{input}");
    }

    fn refused(extra: Value, param: &str) {
        assert_eq!(parsed(extra.clone()).unwrap_err().param.as_deref(), Some(param), "{extra}");
    }

    #[test]
    fn every_form_of_an_input_is_read() {
        let text = |text: &str| EmbedInput::Text(text.into());
        check(json!("hi"), &[text("hi")]);
        check(json!(["a", "b"]), &[text("a"), text("b")]);
        check(json!([1, 2]), &[EmbedInput::Tokens(vec![1, 2])]);
        check(json!([[1], [2, 3]]), &[EmbedInput::Tokens(vec![1]), EmbedInput::Tokens(vec![2, 3])]);
        let request = parsed(json!({"encoding_format": "base64", "dimensions": 8, "user": "x"})).unwrap();
        assert_eq!((request.encoding, request.embed.dimensions), (Encoding::Base64, Some(8)));
        assert_eq!((parsed(json!({})).unwrap().encoding, request.embed.truncate), (Encoding::Float, false));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!({"input": null}), "input");
        refused(json!({"input": ""}), "input");
        refused(json!({"input": []}), "input");
        refused(json!({"input": {}}), "input");
        refused(json!({"input": [-1]}), "input");
        refused(json!({"input": ["a", ""]}), "input[1]");
        refused(json!({"input": ["a", 1]}), "input[1]");
        refused(json!({"input": [[1], []]}), "input[1]");
        refused(json!({"input": vec!["a"; MAX_INPUTS + 1]}), "input");
        refused(json!({"model": ""}), "model");
        refused(json!({"encoding_format": "int8"}), "encoding_format");
        refused(json!({"dimensions": 0}), "dimensions");
    }

    #[test]
    fn both_encodings_say_the_same() {
        let list = |encoding| {
            let list = EmbeddingList::new("m".into(), vec![vec![0.5, -1.0], vec![0.1, 0.0]], encoding, 7);
            serde_json::to_string(&list).unwrap()
        };
        assert_eq!(
            list(Encoding::Float),
            r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5,-1.0]},{"object":"embedding","index":1,"embedding":[0.1,0.0]}],"model":"m","usage":{"prompt_tokens":7,"total_tokens":7}}"#
        );
        assert!(list(Encoding::Base64).contains(r#""embedding":"AAAAPwAAgL8="},"#), "{}", list(Encoding::Base64));
    }
}
