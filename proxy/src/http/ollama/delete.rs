//! `DELETE /api/delete` and `POST /api/copy`.

use axum::Extension;
use axum::extract::State;
use baton_schemas::machine_models::ClusterOrder;
use baton_schemas::ollama::ModelRequest;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;

use super::failure::OllamaFailure;
use super::model_name::to_fetch;
use crate::http::baton::models::{LOCAL, may_manage};
use crate::http::body::ReadBody;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

/// Deletes the files of a model on this machine that no process uses. A model that is served is in use.
pub(super) async fn delete(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: ReadBody,
) -> Result<(), OllamaFailure> {
    may_manage(&state, &caller)?;
    let request = body?.parse(ModelRequest::parse).await?;
    let order = ClusterOrder::Delete { model: to_fetch(&request.model).to_owned(), on: LOCAL.to_owned() };
    let deleted = state.backend.order_models(order).await;
    deleted.map(drop).map_err(|error| OllamaFailure::of_request(&error, &caller.request_id))
}

/// Refuses to copy: in Ollama this gives a model a second name, which is a line of the configuration here.
pub(super) async fn copy(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Result<(), OllamaFailure> {
    may_manage(&state, &caller)?;
    let message = "A second name of a model is a line of this server's configuration: 'aliases' of the model.";
    Err(HttpFailure::new(StatusCode::FORBIDDEN, ErrorBody::new(ErrorKind::Permission, message)).into())
}
