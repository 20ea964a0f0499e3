//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::time::UNIX_EPOCH;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::anthropic::models::{AnthropicModel, AnthropicModelList};
use baton_schemas::openai::models::{ModelCard, ModelList, ModelStatus};
use http::HeaderMap;
use schemars::JsonSchema;
use serde::Serialize;

use crate::error::RequestError;
use crate::http::dialect::Dialect;
use crate::http::openapi::Operation;
use crate::http::{HttpFailure, HttpState};
use crate::instance::{INSTANCE_HEADER, instance};
use crate::request::caller::Caller;
use crate::request::models::OfferedModel;
use crate::targets::model_loading::LoadState;

/// The header that Anthropic's clients send. OpenAI's and Anthropic's lists of models have the same path.
const ANTHROPIC_VERSION: &str = "anthropic-version";

/// The owner of a model that only upstreams serve. Another Baton that finds this endpoint does not use it.
const UPSTREAM_OWNER: &str = "upstream";

/// A list of models, in the form that the client reads.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum ListedModels {
    OpenAi(ModelList),
    Anthropic(AnthropicModelList),
}

/// A model, in the form that the client reads.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum ShownModel {
    OpenAi(ModelCard),
    Anthropic(AnthropicModel),
}

/// The entry of [`list`] in `/openapi.json`.
pub(super) fn list_operation() -> Operation {
    Operation::new("List the models; in Anthropic's form if the header `anthropic-version` is there")
        .replies::<ListedModels>()
}

/// `GET /v1/models`: lists the models that the caller's key may use, each once.
pub async fn list(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
) -> impl IntoResponse {
    let cards = state.models_for(&caller).iter().filter_map(card).collect::<Vec<_>>();
    let list = match headers.contains_key(ANTHROPIC_VERSION) {
        true => ListedModels::Anthropic(AnthropicModelList::new(cards.iter().map(in_anthropics_form).collect())),
        false => ListedModels::OpenAi(ModelList::new(cards)),
    };
    ([(INSTANCE_HEADER, instance())], Json(list))
}

/// The entry of [`show`] in `/openapi.json`.
pub(super) fn operation() -> Operation {
    Operation::new("Describe a model, whose name may hold slashes").replies::<ShownModel>().fails(&[404])
}

/// `GET /v1/models/{id}`. The id is the rest of the path: ids contain `/`, percent-encoded or not.
pub async fn show(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    // A path whose percent-encoding is not UTF-8 names no model.
    let id = id.map(|Path(id)| id).unwrap_or_default();
    let is_anthropic = headers.contains_key(ANTHROPIC_VERSION);
    let models = state.models_for(&caller);
    match models.iter().find(|model| model.is_called(&id)).and_then(card) {
        Some(card) if is_anthropic => Json(ShownModel::Anthropic(in_anthropics_form(&card))).into_response(),
        Some(card) => Json(ShownModel::OpenAi(card)).into_response(),
        None => {
            let dialect = if is_anthropic { Dialect::Anthropic } else { Dialect::OpenAi };
            HttpFailure::of_request(&RequestError::ModelNotFound { model: id }, &caller.request_id).respond(dialect)
        }
    }
}

fn in_anthropics_form(card: &ModelCard) -> AnthropicModel {
    let seconds = i64::try_from(card.created).unwrap_or_default();
    let created_at = jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string();
    AnthropicModel::new(&card.id, created_at)
}

/// Writes a model's card. `None` until a node has reported the model's name.
fn card(model: &OfferedModel) -> Option<ModelCard> {
    let (name, aliases) = model.names.split_first()?;
    let created = model.since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    // A model that is being unloaded counts as unloaded.
    let status = model.load_report.as_ref().map(|load_report| match load_report.state {
        LoadState::Unloading => ModelStatus { value: LoadState::Unloaded.as_str() },
        state => ModelStatus { value: state.as_str() },
    });
    let mut card = ModelCard { aliases: aliases.to_vec(), status, ..ModelCard::new(name, created) };
    if model.is_upstream {
        card.owned_by = UPSTREAM_OWNER.to_owned();
    }
    Some(card)
}
