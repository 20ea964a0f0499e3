//! `POST /api/embed` and the older `/api/embeddings`: a body → one [`EmbedRequest`], and the replies.

use schemars::{JsonSchema, json_schema};
use serde::Serialize;
use serde::de::SeqAccess;
use serde_json::json;

use super::common::KeepAliveBody;
use crate::embed::{EmbedInput, EmbedRequest, EmbedTask, MAX_INPUTS};
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, object};
use crate::request::foreign::{Foreign, ForeignFields, OF_VECTORS, RefusedField};
use crate::request::read::{Read, Reading, read};
use crate::request::schema::described;
use crate::request::values::{Integer, MAX_U32, ModelName};

object! {
    /// Texts to embed. Without a text, the model is only loaded.
    #[schemars(rename = "OllamaEmbedRequest", example = json!({ "model": "smollm2", "input": "a text" }))]
    pub struct OllamaEmbedBody {
        /// A model's name, as `/api/tags` lists it.
        model: Required<ModelName>,
        /// One text, or several.
        input: Field<EmbedTexts>,
        /// False: refuse texts that are too long. Otherwise: cut them.
        truncate: Field<bool>,
        /// The length of the vectors: 0, or the model's own.
        dimensions: Field<Integer<0, MAX_U32>>,
        /// How long the model stays in memory, as in `/api/chat`.
        keep_alive: Field<KeepAliveBody>,
        #[schemars(skip)]
        foreign: Foreign<EmbedFields>,
    }
}

object! {
    /// A text to embed. Without one, the model is only loaded.
    #[schemars(rename = "OllamaEmbeddingsRequest", example = json!({ "model": "smollm2", "prompt": "a text" }))]
    pub struct OlderEmbedBody {
        /// A model's name, as `/api/tags` lists it.
        model: Required<ModelName>,
        /// The text to embed.
        prompt: Field<String>,
        /// How long the model stays in memory, as in `/api/chat`.
        keep_alive: Field<KeepAliveBody>,
        #[schemars(skip)]
        foreign: Foreign<EmbedFields>,
    }
}

/// Fields that have no effect on vectors.
#[derive(Debug)]
pub(crate) struct EmbedFields;

impl ForeignFields for EmbedFields {
    // They change how Ollama loads a model.
    const WITHOUT_EFFECT: &'static [&'static str] = &["options"];
    const GENERATES: bool = false;
    const REFUSED: &'static [RefusedField] = OF_VECTORS;
}

/// One text, or several.
#[derive(Debug)]
pub(crate) enum EmbedTexts {
    One(String),
    /// Each gets a vector, also an empty one.
    Many(Items<String>),
}

impl Read for EmbedTexts {
    const EXPECTED: &'static str = "a string or an array of strings";

    fn string(text: &str) -> Reading<Self> {
        Ok(EmbedTexts::One(text.to_owned()))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Items::array(items)?.map(EmbedTexts::Many))
    }
}

described!([] EmbedTexts: named "OllamaEmbedInput", |_generator| {
    let text = json!({ "type": "string" });
    json_schema!({
        "description": "One text to embed, or several.",
        "anyOf": [text, { "type": "array", "items": text, "maxItems": MAX_INPUTS }],
    })
});

impl EmbedTexts {
    fn check(self) -> Result<Vec<EmbedInput>, InvalidRequest> {
        match self {
            EmbedTexts::One(text) if text.is_empty() => Ok(Vec::new()),
            EmbedTexts::One(text) => Ok(vec![EmbedInput::Text(text)]),
            EmbedTexts::Many(texts) if texts.len() > MAX_INPUTS => {
                let problem = format!("must have at most {MAX_INPUTS} texts, but has {}", texts.len());
                Err(InvalidRequest::at("input", problem))
            }
            EmbedTexts::Many(texts) => texts.each("input").map(|text| Ok(EmbedInput::Text(text?.1))).collect(),
        }
    }
}

/// Parses and checks a body of `/api/embed`. Without a text there are no inputs, and the model is only loaded.
pub fn parse(body: &[u8]) -> Result<EmbedRequest, InvalidRequest> {
    let body: OllamaEmbedBody = read(body)?;
    body.foreign.check()?;
    Ok(EmbedRequest {
        task: EmbedTask::Embed,
        inputs: body.input.get("")?.map(EmbedTexts::check).transpose()?.unwrap_or_default(),
        field: "input",
        model: body.model.get("")?.0,
        truncate: body.truncate.get("")?.unwrap_or(true),
        // In Ollama, 0 means the model's own number.
        dimensions: body.dimensions.get("")?.and_then(Integer::count).filter(|&n| n > 0),
        keep_alive: body.keep_alive.get("")?.and_then(|keep_alive| keep_alive.0),
    })
}

/// Parses and checks a body of `/api/embeddings`, the older route: one text, as `prompt`.
pub fn parse_older(body: &[u8]) -> Result<EmbedRequest, InvalidRequest> {
    let body: OlderEmbedBody = read(body)?;
    body.foreign.check()?;
    let prompt = body.prompt.get("")?.filter(|prompt| !prompt.is_empty());
    Ok(EmbedRequest {
        task: EmbedTask::Embed,
        inputs: prompt.map(EmbedInput::Text).into_iter().collect(),
        field: "prompt",
        model: body.model.get("")?.0,
        truncate: true,
        dimensions: None,
        keep_alive: body.keep_alive.get("")?.and_then(|keep_alive| keep_alive.0),
    })
}

/// The reply to `/api/embed`. Durations are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaEmbedReply")]
pub struct EmbedReply {
    /// The model's name, as the client wrote it.
    pub model: String,
    /// One vector for each input, in their order.
    pub embeddings: Vec<Vec<f32>>,
    /// Time from the request's arrival to the reply.
    pub total_duration: u64,
    /// Time before the first text was computed. The model is loaded already, so this is the wait for the engine.
    pub load_duration: u64,
    /// Tokens in all inputs.
    pub prompt_eval_count: u32,
}

/// The reply to `/api/embeddings`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaEmbeddingsReply")]
pub struct OlderEmbedReply {
    /// The vector; empty if there was no prompt.
    pub embedding: Vec<f32>,
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn parsed(extra: Value) -> Result<EmbedRequest, InvalidRequest> {
        let mut body = json!({"model": "m"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        parse(body.to_string().as_bytes())
    }

    fn refused(extra: Value, param: &str) {
        assert_eq!(parsed(extra.clone()).unwrap_err().param.as_deref(), Some(param), "{extra}");
    }

    #[test]
    fn texts_are_read_and_cut_unless_the_client_says_not_to() {
        let text = |text: &str| EmbedInput::Text(text.into());
        let inputs = |extra: Value| parsed(extra).unwrap().inputs;
        assert_eq!(inputs(json!({"input": "hi"})), [text("hi")]);
        assert_eq!(inputs(json!({"input": ["a", "b"], "options": {"num_ctx": 9}})), [text("a"), text("b")]);
        assert_eq!(inputs(json!({"input": ["a", ""]})), [text("a"), text("")], "each gets a vector");
        for none in [json!({}), json!({"input": ""}), json!({"input": []}), json!({"input": null})] {
            assert!(inputs(none).is_empty());
        }
        let request = parsed(json!({"input": "hi", "dimensions": 0})).unwrap();
        assert_eq!((request.truncate, request.dimensions), (true, None));
        let request = parsed(json!({"input": "hi", "truncate": false, "dimensions": 3, "keep_alive": "5m"})).unwrap();
        assert_eq!((request.truncate, request.dimensions), (false, Some(3)));
        let older = parse_older(br#"{"model": "m", "prompt": "hi"}"#).unwrap();
        assert_eq!((older.inputs, older.truncate), (vec![text("hi")], true));
        assert!(parse_older(br#"{"model": "m"}"#).unwrap().inputs.is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!({"input": 3}), "input");
        refused(json!({"input": ["a", 3]}), "input[1]");
        refused(json!({"input": vec!["a"; MAX_INPUTS + 1]}), "input");
        refused(json!({"truncate": "yes"}), "truncate");
        refused(json!({"dimensions": -1}), "dimensions");
        assert!(
            parse_older(br#"{"prompt": "hi"}"#).is_err() && parse_older(br#"{"model": "m", "prompt": 1}"#).is_err()
        );
    }
}
