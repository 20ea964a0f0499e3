//! Descriptions of models: the replies to `/api/tags`, `/api/ps` and `/api/show`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::OllamaCapability;
use crate::node::NodeInfo;
use crate::thinking::thinks;

/// The expiry date of a model that never expires. Ollama also reports a date in that century.
pub const NEVER: &str = "2318-01-01T00:00:00Z";

/// The reply to `GET /api/tags` and `GET /api/ps`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct OllamaModelList {
    /// The models.
    pub models: Vec<Model>,
}

/// A model in a list.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaModel")]
pub struct Model {
    /// The name with its tag.
    pub name: String,
    /// The same as `name`.
    pub model: String,
    /// When the model changed, in RFC 3339. Only in `/api/tags`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modified_at: Option<String>,
    /// Bytes: the file's size in `/api/tags`, memory in use in `/api/ps`.
    pub size: u64,
    /// A hash of the weights in hexadecimal; empty if unknown.
    pub digest: String,
    /// Format, family and size.
    pub details: Details,
    /// Only in `/api/ps`.
    #[serde(flatten)]
    pub running: Option<Running>,
}

/// The fields that only `/api/ps` has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Running {
    /// When the model is unloaded, in RFC 3339.
    pub expires_at: String,
    /// Tokens that one sequence can hold.
    pub context_length: u32,
}

/// A model's format, family and size.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaModelDetails")]
pub struct Details {
    /// Always empty.
    pub parent_model: &'static str,
    /// `gguf`, or empty if unknown.
    pub format: &'static str,
    /// llama.cpp's architecture name.
    pub family: String,
    /// The family again, as a list.
    pub families: Vec<String>,
    /// The number of parameters for people, e.g. `8.0B`.
    pub parameter_size: String,
    /// E.g. `Q4_K_M`; empty if unknown.
    pub quantization_level: String,
}

/// The reply to `POST /api/show`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaShow")]
pub struct Show {
    /// A comment only: models here are not built from a Modelfile.
    pub modelfile: String,
    /// The chat template, in Jinja. Ollama's own templates are in Go's language.
    pub template: String,
    /// Format, family and size.
    pub details: Details,
    /// Metadata, with the keys of a GGUF file.
    pub model_info: Map<String, Value>,
    /// What the model can do.
    pub capabilities: Vec<OllamaCapability>,
    /// When the model changed, in RFC 3339.
    pub modified_at: String,
}

/// Returns a name with its tag. Some clients ask for the name with the tag, and compare it with the listed one.
pub fn tagged(name: &str) -> String {
    let has_tag = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if has_tag { name.to_owned() } else { format!("{name}:latest") }
}

impl Model {
    /// Describes a model in `/api/tags`. `info` is `None` until a node has reported it.
    pub fn listed(name: &str, modified_at: String, info: Option<&NodeInfo>) -> Self {
        Model {
            modified_at: Some(modified_at),
            size: info.map_or(0, |info| info.facts.file_bytes),
            ..model(name, info)
        }
    }

    /// Describes a model in `/api/ps`: `size` is its memory in bytes, `expires_at` is in RFC 3339. Ollama's `size_vram`
    /// is left out: the share of GPU memory is unknown.
    pub fn running(name: &str, info: &NodeInfo, size: u64, expires_at: String) -> Self {
        let running = Running { expires_at, context_length: info.n_ctx };
        Model { size, running: Some(running), ..model(name, Some(info)) }
    }
}

fn model(name: &str, info: Option<&NodeInfo>) -> Model {
    let weights = info.and_then(|info| info.kv.as_ref()).map(|kv| hex::encode(kv.fingerprint.weights));
    let name = tagged(name);
    Model {
        model: name.clone(),
        name,
        modified_at: None,
        size: 0,
        digest: weights.unwrap_or_default(),
        details: info.map_or_else(Details::default, Details::of),
        running: None,
    }
}

impl Details {
    fn of(info: &NodeInfo) -> Self {
        Details {
            parent_model: "",
            format: "gguf",
            family: info.architecture.clone(),
            families: vec![info.architecture.clone()],
            parameter_size: human_number(info.facts.n_params),
            quantization_level: info.facts.quantization.clone(),
        }
    }
}

impl Show {
    /// Describes a model that a node runs.
    pub fn new(modified_at: String, info: &NodeInfo) -> Self {
        let architecture = &info.architecture;
        let mut model_info = json!({
            "general.architecture": architecture,
            "general.basename": info.model,
            "general.parameter_count": info.facts.n_params,
            (format!("{architecture}.context_length")): info.n_ctx_train,
            (format!("{architecture}.vocab_size")): info.n_vocab,
        });
        if let Some(embedding) = &info.embedding {
            model_info[format!("{architecture}.embedding_length")] = embedding.n_embd.into();
        }
        let is_embedding_model = info.embedding.is_some_and(|embedding| embedding.is_trained);
        // Never both, as in Ollama, though most models that complete also give vectors.
        let completes = info.generates && !is_embedding_model && info.reranking.is_none();
        let embedding = is_embedding_model.then_some(OllamaCapability::Embedding);
        let completion = completes.then_some(OllamaCapability::Completion);
        let insert = info.facts.infill.is_some().then_some(OllamaCapability::Insert);
        // A template without a form for tools does not matter: the system message then describes them.
        let chats = completes && info.has_chat_template;
        let vision = info.projector.is_some().then_some(OllamaCapability::Vision);
        let tools = chats.then_some(OllamaCapability::Tools);
        let thinking = (chats && thinks(&info.facts.chat_template)).then_some(OllamaCapability::Thinking);
        Show {
            modelfile: "# This model is served from a GGUF file, without a Modelfile.".to_owned(),
            template: info.facts.chat_template.clone(),
            details: Details::of(info),
            model_info: model_info.as_object().cloned().unwrap_or_default(),
            capabilities: [embedding, completion, vision, insert, tools, thinking].into_iter().flatten().collect(),
            modified_at,
        }
    }
}

/// Formats a number as Ollama's `format.HumanNumber` does: `134.52M`, `8.0B`, and `7B` for exactly 7·10⁹.
fn human_number(n: u64) -> String {
    const MILLION: u64 = 1_000_000;
    const BILLION: u64 = 1_000 * MILLION;
    match n {
        0 => String::new(),
        n if n >= BILLION && n.is_multiple_of(BILLION) => format!("{}B", n / BILLION),
        n if n >= BILLION => format!("{:.1}B", n as f64 / BILLION as f64),
        n if n >= MILLION && n.is_multiple_of(MILLION) => format!("{}M", n / MILLION),
        n if n >= MILLION => format!("{:.2}M", n as f64 / MILLION as f64),
        n => n.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embed::{EmbeddingFacts, Pooling};
    use crate::node::{InfillTokens, Memory, ModelFacts, Role};

    fn info() -> NodeInfo {
        NodeInfo {
            model: "SmolLM2".into(),
            engine: "llama".into(),
            architecture: "llama".into(),
            n_ctx: 4096,
            n_ctx_train: 8192,
            n_vocab: 49152,
            n_slots: 4,
            memory: Memory { model: 90, kv: 10 },
            has_chat_template: true,
            generates: true,
            embedding: None,
            reranking: None,
            projector: None,
            devices: Vec::new(),
            workers: Vec::new(),
            role: Role::Both,
            fingerprint: None,
            kv: None,
            cache_types: None,
            no_handoff: None,
            takes_other_weights: false,
            reports_begin: false,
            hands_over_images: false,
            facts: ModelFacts {
                n_params: 134_515_008,
                file_bytes: 98_362_432,
                quantization: "Q4_1".into(),
                chat_template: "{{ x }}".into(),
                ..ModelFacts::default()
            },
            process: 0,
            version: String::new(),
        }
    }

    fn check(value: impl Serialize, expected: &str) {
        assert_eq!(serde_json::to_string_pretty(&value).unwrap() + "\n", expected);
    }

    #[test]
    fn lists_and_show_have_ollamas_shape() {
        let since = || "2026-01-02T03:04:05Z".to_owned();
        let tags = OllamaModelList { models: vec![Model::listed("smollm2", since(), Some(&info()))] };
        check(tags, include_str!("golden/tags.json"));
        check(
            OllamaModelList {
                models: vec![Model::running("smollm2", &info(), info().memory.bytes(), NEVER.to_owned())],
            },
            include_str!("golden/ps.json"),
        );
        check(Show::new(since(), &info()), include_str!("golden/show.json"));
        let loading = Model::listed("org/m:q4", since(), None);
        assert_eq!((loading.name.as_str(), loading.size), ("org/m:q4", 0));
    }

    #[test]
    fn a_model_that_can_infill_says_so() {
        use OllamaCapability::{Completion, Insert, Thinking, Tools};
        let infill = Some(InfillTokens { prefix: 1, suffix: 2, middle: 3 });
        let info = NodeInfo { facts: ModelFacts { infill, ..info().facts }, ..info() };
        assert_eq!(Show::new(String::new(), &info).capabilities, [Completion, Insert, Tools]);
        let chat_template = "<think></think>".to_owned();
        let info = NodeInfo { facts: ModelFacts { chat_template, ..info.facts }, ..info };
        assert!(Show::new(String::new(), &info).capabilities.contains(&Thinking));
    }

    #[test]
    fn a_model_that_was_trained_for_vectors_says_so() {
        let facts = EmbeddingFacts { n_embd: 384, n_ctx: 512, pooling: Pooling::Cls, is_trained: true };
        let show = |generates, embedding| Show::new(String::new(), &NodeInfo { generates, embedding, ..info() });
        assert_eq!(show(false, Some(facts)).capabilities, [OllamaCapability::Embedding]);
        assert_eq!(show(false, Some(facts)).model_info["llama.embedding_length"], 384);
        let untrained = EmbeddingFacts { is_trained: false, ..facts };
        assert_eq!(show(true, Some(untrained)).capabilities, [OllamaCapability::Completion, OllamaCapability::Tools]);
    }

    #[test]
    fn names_get_the_tag_they_lack() {
        let check = |name: &str, expected: &str| assert_eq!(tagged(name), expected);
        check("m", "m:latest");
        check("m:q4", "m:q4");
        check("org/m", "org/m:latest");
        check("host:80/m", "host:80/m:latest");
    }

    #[test]
    fn numbers_are_short_as_ollamas() {
        let check = |n: u64, expected: &str| assert_eq!(human_number(n), expected);
        check(0, "");
        check(999_999, "999999");
        check(134_515_008, "134.52M");
        check(270_000_000, "270M");
        check(8_030_261_248, "8.0B");
        check(7_000_000_000, "7B");
    }
}
