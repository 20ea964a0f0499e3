//! `/api/tags`, `/api/ps`, `/api/show` and `/api/version`.

use std::time::SystemTime;

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::ollama::model::{Model, NEVER, OllamaModelList, Show};
use baton_schemas::ollama::{ModelRequest, Version};

use super::failure::OllamaFailure;
use crate::error::RequestError;
use crate::http::HttpState;
use crate::http::body::ReadBody;
use crate::request::caller::Caller;

/// `GET /api/tags`: lists all models that the caller's key may use, under their public names.
pub(super) async fn tags(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Json<OllamaModelList> {
    let models = state.models_for(&caller);
    let listed = models.iter().flat_map(|model| {
        model.listed_names().map(|name| Model::listed(name, rfc3339(model.since), model.info.as_deref()))
    });
    Json(OllamaModelList { models: listed.collect() })
}

/// `GET /api/ps`: lists the models that are ready, under their public names.
pub(super) async fn running(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Json<OllamaModelList> {
    let models = state.models_for(&caller);
    let running = models.iter().filter(|model| model.is_loaded()).filter_map(|model| {
        let expires_at = model.load_report.as_ref().and_then(|load_report| load_report.expires_at);
        let expires_at = expires_at.map_or_else(|| NEVER.to_owned(), rfc3339);
        Some(Model::running(model.names.first()?, model.info.as_deref()?, model.memory_bytes(), expires_at))
    });
    Json(OllamaModelList { models: running.collect() })
}

/// `POST /api/show`: describes a model.
pub(super) async fn show(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: ReadBody,
) -> Result<Json<Show>, OllamaFailure> {
    let request = body?.parse(ModelRequest::parse).await?;
    let failed = |error: RequestError| OllamaFailure::of_request(&error, &caller.request_id);
    let models = state.models_for(&caller);
    if let Some(model) = models.iter().find(|model| model.is_upstream && model.is_called(&request.model)) {
        let upstream = state.backend.describe_upstream(&request.model, &caller).await.map_err(failed)?;
        return Ok(Json(Show::of_upstream(rfc3339(model.since), upstream)));
    }
    let model = state.backend.describe(Some(&request.model), &caller).await.map_err(failed)?;
    Ok(Json(Show::new(rfc3339(model.since), &model.info)))
}

/// `GET /api/version`: the version of the API, not of this program.
pub(super) async fn version() -> Json<Version> {
    Json(Version::default())
}

/// Formats a time in UTC. A time that cannot be represented becomes 1970.
fn rfc3339(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).unwrap_or_default().to_string()
}
