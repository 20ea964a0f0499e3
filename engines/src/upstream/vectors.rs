//! Vectors of texts from an upstream: OpenAI's `/embeddings`, Ollama's `/api/embed`.

use baton_schemas::embed::{EmbedInput, EmbedRequest};
use serde_json::{Map, Value};

use super::{Call, Kind, UpstreamError, UpstreamSettings, memory};

/// Vectors, and the tokens of their texts where the upstream counts them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TextVectors {
    /// One for each input, as the upstream gives them.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all inputs.
    pub n_tokens: Option<u32>,
}

/// Texts of one call: servers bound their batches, some at this number.
pub(super) const BATCH: usize = 32;

/// Values of a vector. More is no embedding.
const MAX_DIMENSIONS: usize = 65_536;

/// What is asked of this kind of server. Errors: it does not take tokens instead of texts.
pub(super) fn call(
    settings: &UpstreamSettings,
    model: &str,
    request: &EmbedRequest,
    inputs: &[EmbedInput],
) -> Result<Call, UpstreamError> {
    let is_ollama = settings.kind == Kind::Ollama;
    let unsupported = || UpstreamError::Unsupported { field: "input", kind: settings.kind.as_str() };
    let are_texts = inputs.iter().all(|input| matches!(input, EmbedInput::Text(_)));
    let are_tokens = inputs.iter().all(|input| matches!(input, EmbedInput::Tokens(_)));
    if !are_texts && (is_ollama || !are_tokens) {
        return Err(unsupported());
    }
    let input = inputs.iter().map(|input| match input {
        EmbedInput::Text(text) => Value::from(text.as_str()),
        EmbedInput::Tokens(tokens) => Value::from(tokens.clone()),
    });
    let mut body = Map::new();
    body.insert("model".to_owned(), model.into());
    body.insert("input".to_owned(), input.collect());
    if let Some(n) = request.dimensions {
        body.insert("dimensions".to_owned(), n.into());
    }
    if !is_ollama {
        body.insert("encoding_format".to_owned(), "float".into());
        return Ok(Call { path: "embeddings", body });
    }
    body.insert("truncate".to_owned(), request.truncate.into());
    if let Some(num_ctx) = settings.num_ctx {
        body.insert("options".to_owned(), serde_json::json!({ "num_ctx": num_ctx }));
    }
    if let Some(keep_alive) = request.keep_alive {
        body.insert(memory::FIELD.to_owned(), memory::value(keep_alive));
    }
    Ok(Call { path: "api/embed", body })
}

/// Reads the reply to `n` inputs.
pub(super) fn read(kind: Kind, reply: &Value, n: usize) -> Result<TextVectors, UpstreamError> {
    fn malformed(detail: impl ToString) -> UpstreamError {
        UpstreamError::malformed(detail)
    }
    let (list, count) = match kind {
        Kind::Ollama => (reply.get("embeddings"), reply.get("prompt_eval_count")),
        _ => (reply.get("data"), reply.pointer("/usage/prompt_tokens")),
    };
    let list = list.and_then(Value::as_array).ok_or_else(|| malformed("a reply without vectors"))?;
    if list.len() != n {
        return Err(malformed(format_args!("{} vectors for {n} texts", list.len())));
    }
    let mut vectors = vec![Vec::new(); n];
    for (place, item) in list.iter().enumerate() {
        // OpenAI's dialect numbers them.
        let place = item.get("index").and_then(Value::as_u64).map_or(place, |index| index as usize);
        let vector = vectors.get_mut(place).filter(|vector| vector.is_empty());
        let vector = vector.ok_or_else(|| malformed("a vector that was not asked for"))?;
        *vector = values(item.get("embedding").unwrap_or(item))?;
    }
    let n_tokens = count.and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
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
    use serde_json::json;

    use super::super::openai::tests::settings;
    use super::*;

    fn request(inputs: Vec<EmbedInput>) -> EmbedRequest {
        EmbedRequest { model: "m".into(), inputs, truncate: true, dimensions: Some(2), keep_alive: None }
    }

    #[test]
    fn each_kind_is_asked_in_its_own_words() {
        let (text, tokens) = (EmbedInput::Text("a".into()), EmbedInput::Tokens(vec![1, 2]));
        let body = |kind: Kind, inputs: &[EmbedInput]| {
            let call = call(&settings(kind), "theirs", &request(inputs.to_vec()), inputs)?;
            Ok::<_, UpstreamError>((call.path, Value::Object(call.body)))
        };
        let (path, asked) = body(Kind::OpenAi, &[text.clone(), text.clone()]).unwrap();
        let expected = json!({"model": "theirs", "input": ["a", "a"], "dimensions": 2, "encoding_format": "float"});
        assert_eq!((path, asked), ("embeddings", expected));
        assert_eq!(body(Kind::Vllm, std::slice::from_ref(&tokens)).unwrap().1["input"], json!([[1, 2]]));
        let (path, asked) = body(Kind::Ollama, std::slice::from_ref(&text)).unwrap();
        let expected = json!({"model": "theirs", "input": ["a"], "dimensions": 2, "truncate": true});
        assert_eq!((path, asked), ("api/embed", expected));
        for (kind, inputs) in [(Kind::Ollama, vec![tokens.clone()]), (Kind::OpenAi, vec![text, tokens])] {
            assert!(matches!(body(kind, &inputs), Err(UpstreamError::Unsupported { field: "input", .. })));
        }
    }

    #[test]
    fn what_comes_is_taken_by_its_number_and_checked() {
        let both = json!({"data": [{"index": 1, "embedding": [3.0]}, {"index": 0, "embedding": [1, 2]}],
            "usage": {"prompt_tokens": 7}});
        let read_both = read(Kind::OpenAi, &both, 2).unwrap();
        assert_eq!(read_both, TextVectors { vectors: vec![vec![1.0, 2.0], vec![3.0]], n_tokens: Some(7) });
        let ollama = json!({"embeddings": [[0.5]], "prompt_eval_count": 3});
        assert_eq!(read(Kind::Ollama, &ollama, 1).unwrap().n_tokens, Some(3));
        let wrong = |reply: Value| assert!(read(Kind::OpenAi, &reply, 1).is_err(), "{reply}");
        wrong(json!({}));
        wrong(json!({"data": []}));
        wrong(json!({"data": [{"embedding": []}]}));
        wrong(json!({"data": [{"embedding": "AACAPw=="}]}));
        wrong(json!({"data": [{"embedding": [1e300]}]}));
        wrong(json!({"data": [{"index": 5, "embedding": [1]}]}));
        wrong(json!({"data": [{"embedding": [null]}]}));
    }
}
