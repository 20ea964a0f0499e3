//! Vectors of texts from an upstream: what all kinds share.

use baton_schemas::embed::EmbedInput;
use serde_json::Value;

use super::UpstreamError;

/// Vectors, and the number of their texts' tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TextVectors {
    /// One for each input, as the upstream gives them.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all inputs, if the upstream counts them.
    pub n_tokens: Option<u32>,
}

/// Texts of one request: servers limit their batches, some to this number.
pub(super) const BATCH: usize = 32;

/// Values of a vector. No embedding has more.
const MAX_DIMENSIONS: usize = 65_536;

/// The inputs as JSON: texts, or lists of tokens.
pub(super) fn inputs(batch: &[EmbedInput]) -> Value {
    let input = batch.iter().map(|input| match input {
        EmbedInput::Text(text) => Value::from(text.as_str()),
        EmbedInput::Tokens(tokens) => Value::from(tokens.clone()),
    });
    input.collect()
}

/// Reads a reply's list of vectors for `n` inputs, and its count of tokens.
pub(super) fn read_vectors(
    list: Option<&Value>,
    n_tokens: Option<&Value>,
    n: usize,
) -> Result<TextVectors, UpstreamError> {
    let malformed = |detail: String| UpstreamError::malformed(detail);
    let list = list.and_then(Value::as_array).ok_or_else(|| malformed("a reply without vectors".to_owned()))?;
    if list.len() != n {
        return Err(malformed(format!("{} vectors for {n} texts", list.len())));
    }
    let mut vectors = vec![Vec::new(); n];
    for (place, item) in list.iter().enumerate() {
        // OpenAI's dialect numbers them.
        let place = item.get("index").and_then(Value::as_u64).map_or(place, |index| index as usize);
        let vector = vectors.get_mut(place).filter(|vector| vector.is_empty());
        let vector = vector.ok_or_else(|| malformed("a vector that was not requested".to_owned()))?;
        *vector = values(item.get("embedding").unwrap_or(item))?;
    }
    let n_tokens = n_tokens.and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    Ok(TextVectors { vectors, n_tokens })
}

fn values(list: &Value) -> Result<Vec<f32>, UpstreamError> {
    let list = list.as_array().filter(|list| (1..=MAX_DIMENSIONS).contains(&list.len()));
    let list = list.ok_or_else(|| UpstreamError::malformed("a vector that is no list of numbers"))?;
    let value = |value: &Value| value.as_f64().map(|wide| wide as f32).filter(|value| value.is_finite());
    let values = list.iter().map(value).collect::<Option<_>>();
    values.ok_or_else(|| UpstreamError::malformed("a vector with a value that is no number"))
}

#[cfg(test)]
mod tests {
    use baton_schemas::embed::EmbedRequest;
    use serde_json::json;

    use super::*;
    use crate::upstream::openai::tests::settings;
    use crate::upstream::{ApiPath, UpstreamKind};

    fn request(inputs: Vec<EmbedInput>) -> EmbedRequest {
        EmbedRequest { model: "m".into(), inputs, truncate: true, dimensions: Some(2), keep_alive: None }
    }

    #[test]
    fn each_kind_gets_a_request_of_its_own_form() {
        let text = EmbedInput::Text("a".into());
        let tokens = EmbedInput::Tokens(vec![1, 2]);
        let body = |kind: UpstreamKind, inputs: &[EmbedInput]| {
            let call = kind.protocol().embed_call(&settings(kind), "theirs", &request(inputs.to_vec()), inputs)?;
            Ok::<_, UpstreamError>((call.path, Value::from(call.body)))
        };
        let (path, asked) = body(UpstreamKind::OpenAi, &[text.clone(), text.clone()]).unwrap();
        let expected = json!({"model": "theirs", "input": ["a", "a"], "dimensions": 2, "encoding_format": "float"});
        assert_eq!((path, asked), (ApiPath::Api("embeddings"), expected));
        assert_eq!(body(UpstreamKind::Vllm, std::slice::from_ref(&tokens)).unwrap().1["input"], json!([[1, 2]]));
        let (path, asked) = body(UpstreamKind::Ollama, std::slice::from_ref(&text)).unwrap();
        let expected = json!({"model": "theirs", "input": ["a"], "dimensions": 2, "truncate": true});
        assert_eq!((path, asked), (ApiPath::Api("api/embed"), expected));
        for (kind, inputs) in [(UpstreamKind::Ollama, vec![tokens.clone()]), (UpstreamKind::OpenAi, vec![text, tokens])]
        {
            assert!(matches!(body(kind, &inputs), Err(UpstreamError::Unsupported { field: "input", .. })));
        }
    }

    #[test]
    fn vectors_are_taken_by_their_number_and_checked() {
        let both = json!({"data": [{"index": 1, "embedding": [3.0]}, {"index": 0, "embedding": [1, 2]}],
            "usage": {"prompt_tokens": 7}});
        let read_both = UpstreamKind::OpenAi.protocol().read_embed_reply(&both, 2).unwrap();
        assert_eq!(read_both, TextVectors { vectors: vec![vec![1.0, 2.0], vec![3.0]], n_tokens: Some(7) });
        let ollama = json!({"embeddings": [[0.5]], "prompt_eval_count": 3});
        assert_eq!(UpstreamKind::Ollama.protocol().read_embed_reply(&ollama, 1).unwrap().n_tokens, Some(3));
        let wrong =
            |reply: Value| assert!(UpstreamKind::OpenAi.protocol().read_embed_reply(&reply, 1).is_err(), "{reply}");
        wrong(json!({}));
        wrong(json!({"data": []}));
        wrong(json!({"data": [{"embedding": []}]}));
        wrong(json!({"data": [{"embedding": "AACAPw=="}]}));
        wrong(json!({"data": [{"embedding": [1e300]}]}));
        wrong(json!({"data": [{"index": 5, "embedding": [1]}]}));
        wrong(json!({"data": [{"embedding": [null]}]}));
    }
}
