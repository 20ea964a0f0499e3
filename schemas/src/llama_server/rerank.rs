//! `POST /v1/rerank`: documents scored for a query, in Jina's and Cohere's form.

use schemars::{JsonSchema, json_schema};
use serde::Serialize;
use serde::de::MapAccess;
use serde_json::json;

use super::requests::model;
use crate::embed::{EmbedInput, EmbedRequest, EmbedTask, MAX_INPUTS};
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, object};
use crate::request::foreign::{Foreign, VectorFields};
use crate::request::read::{Read, Reading, ValueProblem, read};
use crate::request::schema::described;
use crate::request::values::{Integer, MAX_U32, NonEmpty};

object! {
    /// Documents to score for a query.
    #[schemars(rename = "RerankRequest", example = json!({ "query": "a question", "documents": ["an answer", "a text"] }))]
    pub struct RerankBody {
        /// A reranker's name; by default the first model.
        model: Field<String>,
        /// The question or search that documents are compared with.
        query: Required<NonEmpty>,
        /// The documents; at most 300,000 tokens in all, where the query counts with each of them.
        #[schemars(length(min = 1, max = MAX_INPUTS))]
        documents: Required<Items<Document>>,
        /// The most results. By default, and at most, one for each document.
        top_n: Field<Integer<1, MAX_U32>>,
        /// Repeat each result's document.
        return_documents: Field<bool>,
        #[schemars(skip)]
        foreign: Foreign<VectorFields>,
    }
}

/// A document: a string, or an object with a `text`.
#[derive(Debug)]
pub(crate) struct Document(String);

object! {
    /// A document.
    pub(crate) struct DocumentObject {
        /// Its text.
        text: Required<String>,
    }
}

impl Read for Document {
    const EXPECTED: &'static str = "a string or an object with a 'text'";

    fn string(text: &str) -> Reading<Self> {
        Ok(Document(text.to_owned()))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        let document = DocumentObject::object(fields)?;
        Ok(document.and_then(|document| {
            let text = document.text.sound();
            text.map(Document).ok_or_else(|| ValueProblem::value("must have a 'text' that is a string"))
        }))
    }
}

described!([] Document: |generator| json_schema!({
    "anyOf": [generator.subschema_for::<String>(), generator.subschema_for::<DocumentObject>()],
}));

/// A checked body. The model's name is empty if the client named none: the first model answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rerank {
    /// The documents to score.
    pub embed: EmbedRequest,
    /// The form of the reply.
    pub form: RerankForm,
}

/// The form of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RerankForm {
    /// The most results.
    pub top_n: usize,
    /// Repeat each result's document.
    pub has_documents: bool,
}

impl Rerank {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let body: RerankBody = read(body)?;
        body.foreign.check()?;
        let query = body.query.get("")?.0.into();
        let documents = body.documents.get("")?.each("documents");
        let inputs = documents.map(|document| Ok(EmbedInput::Text(document?.1.0)));
        let inputs = inputs.collect::<Result<Vec<_>, InvalidRequest>>()?;
        if inputs.is_empty() || inputs.len() > MAX_INPUTS {
            let problem = format!("must have 1 to {MAX_INPUTS} documents, but has {}", inputs.len());
            return Err(InvalidRequest::at("documents", problem));
        }
        let top_n = body.top_n.get("")?.and_then(Integer::count).map_or(inputs.len(), |n| n as usize);
        let has_documents = body.return_documents.get("")?.unwrap_or(false);
        let embed = EmbedRequest {
            model: model(body.model)?.unwrap_or_default(),
            task: EmbedTask::Rerank { query },
            inputs,
            field: "documents",
            truncate: false,
            dimensions: None,
            keep_alive: None,
        };
        Ok(Rerank { embed, form: RerankForm { top_n, has_documents } })
    }
}

/// The reply to `/v1/rerank`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct RerankReply {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    model: String,
    /// The documents, the best first.
    results: Vec<RerankResult>,
    usage: RerankUsage,
}

#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
struct RerankResult {
    /// The document's index in the request.
    index: usize,
    /// The model's score.
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<RerankedDocument>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
struct RerankedDocument {
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
struct RerankUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

impl RerankReply {
    /// The reply with `scores` in the order of the documents. Of equal ones, the first document comes first. `documents`
    /// are those that the reply repeats, or none.
    pub fn new(model: String, scores: &[f32], mut documents: Vec<String>, form: RerankForm, n_tokens: u32) -> Self {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let results = order.into_iter().take(form.top_n).map(|index| RerankResult {
            index,
            relevance_score: scores[index],
            document: documents.get_mut(index).map(|text| RerankedDocument { text: std::mem::take(text) }),
        });
        let results = results.collect();
        RerankReply {
            object: "list",
            model,
            results,
            usage: RerankUsage { prompt_tokens: n_tokens, total_tokens: n_tokens },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn parsed(body: Value) -> Result<Rerank, InvalidRequest> {
        Rerank::parse(body.to_string().as_bytes())
    }

    #[test]
    fn documents_are_read_in_both_forms() {
        let rerank =
            parsed(json!({"query": "q", "documents": ["a", {"text": "b", "id": 7}, ""], "top_n": null})).unwrap();
        let texts = ["a", "b", ""].map(|text| EmbedInput::Text(text.into()));
        assert_eq!((rerank.embed.inputs, rerank.embed.model.as_str()), (texts.into(), ""));
        assert_eq!(rerank.embed.task, EmbedTask::Rerank { query: "q".into() });
        assert_eq!(rerank.form, RerankForm { top_n: 3, has_documents: false });
        let asked =
            parsed(json!({"model": "m", "query": "q", "documents": ["a"], "top_n": 9, "return_documents": true}));
        assert_eq!(asked.unwrap().form, RerankForm { top_n: 9, has_documents: true });
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let refused = |body: Value| parsed(body).unwrap_err().param.unwrap();
        assert_eq!(refused(json!({"documents": ["a"]})), "query");
        assert_eq!(refused(json!({"query": "", "documents": ["a"]})), "query");
        assert_eq!(refused(json!({"query": "q"})), "documents");
        assert_eq!(refused(json!({"query": "q", "documents": []})), "documents");
        assert_eq!(refused(json!({"query": "q", "documents": "a"})), "documents");
        assert_eq!(refused(json!({"query": "q", "documents": ["a", 1]})), "documents[1]");
        assert_eq!(refused(json!({"query": "q", "documents": ["a", {"text": 1}]})), "documents[1]");
        assert_eq!(refused(json!({"query": "q", "documents": vec!["a"; MAX_INPUTS + 1]})), "documents");
        assert_eq!(refused(json!({"query": "q", "documents": ["a"], "top_n": 0})), "top_n");
    }

    #[test]
    fn the_best_documents_come_first() {
        let form = RerankForm { top_n: 2, has_documents: true };
        let documents = ["a", "b", "c"].map(str::to_owned).to_vec();
        let reply = RerankReply::new("m".into(), &[-1.5, 0.25, 0.25], documents, form, 12);
        let expected = json!({"object": "list", "model": "m", "usage": {"prompt_tokens": 12, "total_tokens": 12},
            "results": [{"index": 1, "relevance_score": 0.25, "document": {"text": "b"}},
                {"index": 2, "relevance_score": 0.25, "document": {"text": "c"}}]});
        assert_eq!(serde_json::to_value(reply).unwrap(), expected);
    }
}
