//! The replies to `GET /v1/models` and `GET /v1/models/{id}` for Anthropic's clients.

use schemars::JsonSchema;
use serde::Serialize;

/// A model that this server offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct AnthropicModel {
    /// Always `model`.
    #[schemars(extend("const" = "model"))]
    r#type: &'static str,
    id: String,
    /// The name for people: the id.
    display_name: String,
    /// When the server started to offer it (RFC 3339).
    created_at: String,
}

impl AnthropicModel {
    /// A model that is offered since `created_at`.
    pub fn new(id: &str, created_at: String) -> Self {
        AnthropicModel { r#type: "model", id: id.to_owned(), display_name: id.to_owned(), created_at }
    }
}

/// All models, in one page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct AnthropicModelList {
    data: Vec<AnthropicModel>,
    first_id: Option<String>,
    last_id: Option<String>,
    /// Always false.
    has_more: bool,
}

impl AnthropicModelList {
    /// A list of these models.
    pub fn new(data: Vec<AnthropicModel>) -> Self {
        let id = |model: Option<&AnthropicModel>| model.map(|model| model.id.clone());
        AnthropicModelList { first_id: id(data.first()), last_id: id(data.last()), data, has_more: false }
    }
}
