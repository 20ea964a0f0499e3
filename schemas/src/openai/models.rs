//! The replies to `GET /v1/models` and `GET /v1/models/{id}`.

use schemars::JsonSchema;
use serde::Serialize;

/// A model that this server offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ModelCard {
    /// The model's public name; may contain `/` and `:`.
    pub id: String,
    /// Always `model`.
    #[schemars(extend("const" = "model"))]
    pub object: &'static str,
    /// When the server started to offer it, in Unix seconds.
    pub created: u64,
    /// The owner of the model.
    pub owned_by: String,
    /// Other names that requests may use for it. Absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The state of the model in memory. Only for models that are loaded on demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<ModelStatus>,
}

/// The state of a model in memory, in llama-server's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ModelStatus {
    /// `unloaded`, `loading`, `loaded` or `failed`.
    pub value: &'static str,
}

impl ModelCard {
    /// A model served by Baton.
    pub fn new(id: impl Into<String>, created: u64) -> Self {
        let owned_by = "baton".to_owned();
        ModelCard { id: id.into(), object: "model", created, owned_by, aliases: Vec::new(), status: None }
    }
}

/// The reply to `GET /v1/models`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ModelList {
    /// Always `list`.
    #[schemars(extend("const" = "list"))]
    pub object: &'static str,
    /// The models.
    pub data: Vec<ModelCard>,
}

impl ModelList {
    /// A list of these models.
    pub fn new(data: Vec<ModelCard>) -> Self {
        ModelList { object: "list", data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_openais_shape() {
        assert_eq!(
            serde_json::to_string(&ModelList::new(vec![ModelCard::new("org/m:q4", 7)])).unwrap(),
            r#"{"object":"list","data":[{"id":"org/m:q4","object":"model","created":7,"owned_by":"baton"}]}"#
        );
        let card = ModelCard { status: Some(ModelStatus { value: "unloaded" }), ..ModelCard::new("m", 7) };
        assert_eq!(serde_json::to_value(card).unwrap()["status"]["value"], "unloaded");
    }
}
