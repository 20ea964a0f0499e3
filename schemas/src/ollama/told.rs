//! `/api/show` for a model that another server runs: what that server reports about it.

use serde_json::{Map, Value};

use super::model::{Details, Show};

/// What another server reports about a model. A fact that it does not report, or that cannot be true, is missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToldModel {
    /// What it can do, in Ollama's words. Empty: not reported.
    pub capabilities: Vec<&'static str>,
    /// What kind of model it is.
    pub details: Details,
    /// llama.cpp's architecture name.
    pub architecture: Option<String>,
    /// Parameters.
    pub n_params: Option<u64>,
    /// Tokens the model was trained on.
    pub n_ctx_train: Option<u32>,
    /// Values of its vectors.
    pub n_embd: Option<u32>,
    /// Tokens that one sequence may hold there.
    pub n_ctx: Option<u32>,
}

impl Show {
    /// Describes a model that another server runs. A model without reported capabilities is shown as one that chats and
    /// calls tools: a request will find out.
    pub fn of_upstream(modified_at: String, told: ToldModel) -> Self {
        // Clients look for a key with this end. Before it stands the architecture, where that is known.
        let prefix = told.architecture.clone().unwrap_or_else(|| "general".to_owned());
        let facts = [
            ("general.architecture".to_owned(), told.architecture.map(Value::from)),
            ("general.parameter_count".to_owned(), told.n_params.map(Value::from)),
            (format!("{prefix}.context_length"), told.n_ctx_train.or(told.n_ctx).map(Value::from)),
            (format!("{prefix}.embedding_length"), told.n_embd.map(Value::from)),
        ];
        let model_info: Map<String, Value> = facts.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        let capabilities = if told.capabilities.is_empty() { vec!["completion", "tools"] } else { told.capabilities };
        Show {
            modelfile: "# This model is served by another server.".to_owned(),
            template: String::new(),
            details: told.details,
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
    fn nothing_is_shown_that_was_not_told() {
        let show = |told| Show::of_upstream(String::new(), told);
        let nothing = show(ToldModel::default());
        assert_eq!((nothing.model_info, nothing.details), (Map::new(), Details::default()));
        assert_eq!(nothing.capabilities, ["completion", "tools"]);
        let context = show(ToldModel { n_ctx: Some(4096), ..ToldModel::default() });
        assert_eq!(Value::Object(context.model_info), json!({ "general.context_length": 4096 }));
        let all = show(ToldModel {
            capabilities: vec!["embedding"],
            architecture: Some("bert".to_owned()),
            n_params: Some(33_000_000),
            n_ctx_train: Some(512),
            n_embd: Some(384),
            n_ctx: Some(4096),
            ..ToldModel::default()
        });
        assert_eq!(all.capabilities, ["embedding"]);
        let expected = json!({
            "general.architecture": "bert", "general.parameter_count": 33_000_000,
            "bert.context_length": 512, "bert.embedding_length": 384,
        });
        assert_eq!(Value::Object(all.model_info), expected);
    }
}
