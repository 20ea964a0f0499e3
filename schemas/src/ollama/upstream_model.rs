//! `/api/show` for a model that an upstream serves, made from the upstream's own description.

use serde_json::{Map, Value};

use super::OllamaCapability;
use super::model::{Details, Show};

/// An upstream's description of a model. Values that it does not report, or that are implausible, are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UpstreamModelInfo {
    /// The capabilities besides the sight of images; empty if not reported.
    pub capabilities: Vec<OllamaCapability>,
    /// Format, family and size.
    pub details: Details,
    /// llama.cpp's architecture name.
    pub architecture: Option<String>,
    /// The number of parameters.
    pub n_params: Option<u64>,
    /// The context size that the model was trained with, in tokens.
    pub n_ctx_train: Option<u32>,
    /// The length of its embedding vectors.
    pub n_embd: Option<u32>,
    /// Tokens that one sequence can hold on the upstream.
    pub n_ctx: Option<u32>,
    /// True if the model sees images, false if it does not. `None`: not reported.
    pub sees_images: Option<bool>,
}

impl Show {
    /// Describes a model that an upstream serves. Without reported capabilities, completion and tools are assumed: the
    /// upstream refuses tools itself if the model has none.
    pub fn of_upstream(modified_at: String, described: UpstreamModelInfo) -> Self {
        // Clients look for keys with these endings. The prefix is the architecture, if known.
        let prefix = described.architecture.clone().unwrap_or_else(|| "general".to_owned());
        let facts = [
            ("general.architecture".to_owned(), described.architecture.map(Value::from)),
            ("general.parameter_count".to_owned(), described.n_params.map(Value::from)),
            (format!("{prefix}.context_length"), described.n_ctx_train.or(described.n_ctx).map(Value::from)),
            (format!("{prefix}.embedding_length"), described.n_embd.map(Value::from)),
        ];
        let model_info: Map<String, Value> = facts.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        let mut capabilities = described.capabilities;
        if capabilities.is_empty() {
            capabilities.extend([OllamaCapability::Completion, OllamaCapability::Tools]);
        }
        if described.sees_images == Some(true) {
            capabilities.push(OllamaCapability::Vision);
        }
        Show {
            modelfile: "# This model is served by another server.".to_owned(),
            template: String::new(),
            details: described.details,
            model_info,
            capabilities,
            modified_at,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_the_upstream_reports_is_shown() {
        use OllamaCapability::{Completion, Embedding, Tools, Vision};
        let show = |described| Show::of_upstream(String::new(), described);
        let nothing = show(UpstreamModelInfo::default());
        assert_eq!((nothing.model_info, nothing.details), (Map::new(), Details::default()));
        assert_eq!(nothing.capabilities, [Completion, Tools]);
        let seeing = show(UpstreamModelInfo { sees_images: Some(true), ..UpstreamModelInfo::default() });
        assert_eq!(seeing.capabilities, [Completion, Tools, Vision]);
        let context = show(UpstreamModelInfo { n_ctx: Some(4096), ..UpstreamModelInfo::default() });
        assert_eq!(Value::Object(context.model_info), json!({ "general.context_length": 4096 }));
        let all = show(UpstreamModelInfo {
            capabilities: vec![Embedding],
            architecture: Some("bert".to_owned()),
            n_params: Some(33_000_000),
            n_ctx_train: Some(512),
            n_embd: Some(384),
            n_ctx: Some(4096),
            ..UpstreamModelInfo::default()
        });
        assert_eq!(all.capabilities, [Embedding]);
        let expected = json!({
            "general.architecture": "bert", "general.parameter_count": 33_000_000,
            "bert.context_length": 512, "bert.embedding_length": 384,
        });
        assert_eq!(Value::Object(all.model_info), expected);
    }
}
