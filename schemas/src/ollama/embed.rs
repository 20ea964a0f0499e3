//! `POST /api/embed` and the older `/api/embeddings`: a body → one [`EmbedRequest`], and the replies.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::common::keep_alive;
use crate::embed::{EmbedInput, EmbedRequest, MAX_INPUTS};
use crate::request::fields::{Fields, wrong_type};
use crate::request::{InvalidRequest, json};

/// Reads the body of `/api/embed`. Without a text there is no input: Ollama then only loads the model.
///
/// `options` has no effect: it is about how Ollama loads a model.
pub fn parse(body: &[u8]) -> Result<EmbedRequest, InvalidRequest> {
    let object = json::read_object(body)?;
    let root = Fields::root(&object);
    let inputs = match root.get("input") {
        None => Vec::new(),
        Some(Value::String(text)) if text.is_empty() => Vec::new(),
        Some(Value::String(text)) => vec![EmbedInput::Text(text.clone())],
        Some(Value::Array(items)) if items.len() > MAX_INPUTS => {
            let problem = format!("must be at most {MAX_INPUTS} texts, but is {}", items.len());
            return Err(InvalidRequest::at("input", problem));
        }
        Some(Value::Array(items)) => items.iter().enumerate().map(text).collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong_type("input", "a string or an array of strings", other)),
    };
    Ok(EmbedRequest {
        model: root.model()?,
        inputs,
        truncate: root.boolean("truncate")?.unwrap_or(true),
        // Ollama's zero is 'as many as there are'.
        dimensions: root.integer("dimensions", 0..=i64::from(u32::MAX))?.map(|n| n as u32).filter(|&n| n > 0),
        keep_alive: keep_alive(root)?,
    })
}

/// Reads the body of `/api/embeddings`, which has one text and calls it `prompt`.
pub fn parse_older(body: &[u8]) -> Result<EmbedRequest, InvalidRequest> {
    let object = json::read_object(body)?;
    let root = Fields::root(&object);
    let prompt = root.string("prompt")?.filter(|prompt| !prompt.is_empty());
    let inputs = prompt.map(|prompt| EmbedInput::Text(prompt.to_owned())).into_iter().collect();
    Ok(EmbedRequest { model: root.model()?, inputs, truncate: true, dimensions: None, keep_alive: keep_alive(root)? })
}

fn text((idx, item): (usize, &Value)) -> Result<EmbedInput, InvalidRequest> {
    match item {
        Value::String(text) if text.is_empty() => Err(InvalidRequest::at(format!("input[{idx}]"), "must not be empty")),
        Value::String(text) => Ok(EmbedInput::Text(text.clone())),
        other => Err(wrong_type(&format!("input[{idx}]"), "a string", other)),
    }
}

/// The reply to `/api/embed`. Durations in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaEmbedReply")]
pub struct EmbedReply {
    /// As the client wrote it.
    pub model: String,
    /// One for each input.
    pub embeddings: Vec<Vec<f32>>,
    /// From the request's arrival to its end.
    pub total_duration: u64,
    /// Before the first text was begun with. The model is loaded already.
    pub load_duration: u64,
    /// Tokens of all inputs.
    pub prompt_eval_count: u32,
}

/// The reply to `/api/embeddings`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaEmbeddingsReply")]
pub struct OlderEmbedReply {
    /// Empty if there was no prompt.
    pub embedding: Vec<f32>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
        refused(json!({"input": ["a", ""]}), "input[1]");
        refused(json!({"input": vec!["a"; MAX_INPUTS + 1]}), "input");
        refused(json!({"truncate": "yes"}), "truncate");
        refused(json!({"dimensions": -1}), "dimensions");
        assert!(
            parse_older(br#"{"prompt": "hi"}"#).is_err() && parse_older(br#"{"model": "m", "prompt": 1}"#).is_err()
        );
    }
}
