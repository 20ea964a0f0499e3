//! Vectors of texts, and scores of documents, from an upstream: what all kinds share.

use baton_schemas::embed::EmbedInput;
use serde_json::Value;

use crate::UpstreamError;
use crate::reply::foreign::Count;

/// Vectors, and the number of their texts' tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReceivedVectors {
    /// One for each input, as the upstream gives them.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all inputs, if the upstream counts them.
    pub n_tokens: Option<u32>,
}

impl ReceivedVectors {
    /// Errors: the vectors differ in their lengths.
    pub(crate) fn check_lengths(&self) -> Result<(), UpstreamError> {
        match self.vectors.windows(2).all(|pair| pair[0].len() == pair[1].len()) {
            true => Ok(()),
            false => Err(UpstreamError::malformed("vectors of different lengths")),
        }
    }
}

/// Texts of one request: servers limit their batches, some to this number.
pub(crate) const BATCH: usize = 32;

/// Values of a vector. No embedding has more.
const MAX_DIMENSIONS: usize = 65_536;

/// The inputs as JSON: texts, or lists of tokens.
pub(crate) fn inputs(batch: &[EmbedInput]) -> Value {
    let input = batch.iter().map(|input| match input {
        EmbedInput::Text(text) => Value::from(text.as_str()),
        EmbedInput::Tokens(tokens) => Value::from(tokens.clone()),
    });
    input.collect()
}

/// The inputs for a server that refuses an empty text: a space is the nearest to it.
pub(crate) fn filled_inputs(batch: &[EmbedInput]) -> Value {
    let mut inputs = inputs(batch);
    let texts = inputs.as_array_mut().into_iter().flatten();
    texts.filter(|input| input.as_str() == Some("")).for_each(|empty| *empty = " ".into());
    inputs
}

/// Reads a reply's list of vectors for `n` inputs, and its count of tokens. Errors: the vectors differ in their lengths.
pub(crate) fn read_vectors(
    list: Option<&Value>,
    n_tokens: Option<&Value>,
    n: usize,
) -> Result<ReceivedVectors, UpstreamError> {
    let read = in_places(list, n_tokens, n, |item| values(item.get("embedding").unwrap_or(item)))?;
    read.check_lengths().map(|()| read)
}

/// Reads a reply's list of scores for `n` documents, as vectors of one value, and its count of tokens.
pub(crate) fn read_scores(
    list: Option<&Value>,
    n_tokens: Option<&Value>,
    n: usize,
) -> Result<ReceivedVectors, UpstreamError> {
    let score = |item: &Value| {
        // They are sorted by their scores.
        Count::of(item.get("index"))?;
        let score = item.get("relevance_score").and_then(Value::as_f64).map(|wide| wide as f32);
        score.filter(|score| score.is_finite()).map(|score| vec![score])
    };
    in_places(list, n_tokens, n, |item| {
        score(item).ok_or_else(|| UpstreamError::malformed("a document without a score"))
    })
}

/// Puts the items of a list in the places of their inputs.
fn in_places(
    list: Option<&Value>,
    n_tokens: Option<&Value>,
    n: usize,
    read: impl Fn(&Value) -> Result<Vec<f32>, UpstreamError>,
) -> Result<ReceivedVectors, UpstreamError> {
    let malformed = |detail: String| UpstreamError::malformed(detail);
    let list = list.and_then(Value::as_array).ok_or_else(|| malformed("a reply without results".to_owned()))?;
    if list.len() != n {
        return Err(malformed(format!("{} results for {n} texts", list.len())));
    }
    let mut vectors = vec![Vec::new(); n];
    for (place, item) in list.iter().enumerate() {
        // OpenAI's dialect numbers them.
        let place = match item.get("index").filter(|index| !index.is_null()) {
            None => place,
            Some(index) => {
                let index = Count::of(Some(index)).ok_or_else(|| malformed("a result without a number".to_owned()))?;
                index as usize
            }
        };
        let vector = vectors.get_mut(place).filter(|vector| vector.is_empty());
        let vector = vector.ok_or_else(|| malformed("a result that was not requested".to_owned()))?;
        *vector = read(item)?;
    }
    Ok(ReceivedVectors { vectors, n_tokens: Count::of(n_tokens) })
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
    use baton_schemas::embed::{EmbedRequest, EmbedTask};
    use serde_json::json;

    use super::*;
    use crate::kinds::openai::tests::settings;
    use crate::reply::foreign::tree;
    use crate::{ApiPath, UpstreamKind};

    fn request(inputs: Vec<EmbedInput>) -> EmbedRequest {
        EmbedRequest {
            model: "m".into(),
            field: "input",
            task: EmbedTask::Embed,
            inputs,
            truncate: true,
            dimensions: Some(2),
            keep_alive: None,
        }
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
        let empty = EmbedInput::Text(String::new());
        for kind in [UpstreamKind::OpenAi, UpstreamKind::LlamaServer, UpstreamKind::Vllm] {
            assert_eq!(body(kind, &[text.clone(), empty.clone()]).unwrap().1["input"], json!(["a", " "]));
        }
        assert_eq!(body(UpstreamKind::Ollama, &[empty]).unwrap().1["input"], json!([""]));
        let (path, asked) = body(UpstreamKind::Ollama, std::slice::from_ref(&text)).unwrap();
        let expected = json!({"model": "theirs", "input": ["a"], "dimensions": 2, "truncate": true});
        assert_eq!((path, asked), (ApiPath::Api("api/embed"), expected));
        for (kind, inputs) in [(UpstreamKind::Ollama, vec![tokens.clone()]), (UpstreamKind::OpenAi, vec![text, tokens])]
        {
            assert!(matches!(body(kind, &inputs), Err(UpstreamError::Unsupported { field: "input", .. })));
        }
    }

    #[test]
    fn documents_are_sent_with_their_query_and_scores_are_taken_by_their_number() {
        let inputs = ["a", "b"].map(|text| EmbedInput::Text(text.into()));
        let task = EmbedTask::Rerank { query: "q".into() };
        let request = EmbedRequest { task: task.clone(), dimensions: None, ..request(inputs.to_vec()) };
        for kind in [UpstreamKind::OpenAi, UpstreamKind::LlamaServer, UpstreamKind::Vllm] {
            let call = kind.protocol().embed_call(&settings(kind), "theirs", &request, &inputs).unwrap();
            let asked = json!({"model": "theirs", "query": "q", "documents": ["a", "b"]});
            assert_eq!((call.path, Value::from(call.body)), (ApiPath::Api("rerank"), asked));
        }
        let ollama = UpstreamKind::Ollama;
        assert!(ollama.protocol().embed_call(&settings(ollama), "theirs", &request, &inputs).is_err());
        let read = |reply: Value| UpstreamKind::OpenAi.protocol().read_embed_reply(&task, &reply, 2);
        let ranked = |score: Value| {
            json!({"results": [{"index": 1, "relevance_score": 3.5},
            {"index": 0, "relevance_score": score, "document": {"text": "a"}}], "usage": {"total_tokens": 9}})
        };
        let expected = ReceivedVectors { vectors: vec![vec![-1.0], vec![3.5]], n_tokens: Some(9) };
        assert_eq!(read(ranked(json!(-1))).unwrap(), expected);
        assert!(read(ranked(json!("x"))).is_err() && read(json!({"results": []})).is_err());
        let vectors = json!({"data": [{"embedding": [1]}, {"embedding": [1]}]});
        assert!(read(vectors).is_err());
    }

    #[test]
    fn vectors_are_taken_by_their_number_and_checked() {
        let both = json!({"data": [{"index": 1, "embedding": [3.0, 4]}, {"index": 0, "embedding": [1, 2]}],
            "usage": {"prompt_tokens": 7}});
        let read = |kind: UpstreamKind, reply: &Value, n| kind.protocol().read_embed_reply(&EmbedTask::Embed, reply, n);
        let read_both = read(UpstreamKind::OpenAi, &both, 2).unwrap();
        assert_eq!(read_both, ReceivedVectors { vectors: vec![vec![1.0, 2.0], vec![3.0, 4.0]], n_tokens: Some(7) });
        let different = json!({"data": [{"embedding": [3.0]}, {"embedding": [1, 2]}]});
        assert!(read(UpstreamKind::OpenAi, &different, 2).is_err());
        let ollama = json!({"embeddings": [[0.5]], "prompt_eval_count": 3});
        assert_eq!(read(UpstreamKind::Ollama, &ollama, 1).unwrap().n_tokens, Some(3));
        let wrong = |reply: Value| assert!(read(UpstreamKind::OpenAi, &reply, 1).is_err(), "{reply}");
        wrong(json!({}));
        wrong(json!({"data": []}));
        wrong(json!({"data": [{"embedding": []}]}));
        wrong(json!({"data": [{"embedding": "AACAPw=="}]}));
        wrong(json!({"data": [{"embedding": [1e300]}]}));
        wrong(json!({"data": [{"index": 5, "embedding": [1]}]}));
        wrong(json!({"data": [{"index": "first", "embedding": [1]}]}));
        wrong(json!({"data": [{"embedding": [null]}]}));
        let unread = tree(br#"{"data":[{"embedding":[1]}],"usage":{"prompt_tokens":1e999}}"#).unwrap();
        assert_eq!(read(UpstreamKind::OpenAi, &unread, 1).unwrap().n_tokens, None);
        wrong(tree(br#"{"data":[{"embedding":[1e999]}]}"#).unwrap());
    }
}
