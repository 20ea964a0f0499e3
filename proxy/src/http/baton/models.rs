//! `/baton/models`: the model files of all machines, and orders that change them.
//!
//! Whoever may see the state may list the files. Changing them needs an operator's key where keys are required, and everywhere
//! `allow_model_management`: an endpoint without keys must not let everybody delete its models.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::machine_models::{ClusterModels, ClusterOrder, OrderTaken};
use baton_schemas::openai::{ErrorBody, ErrorKind, InvalidRequest};
use http::StatusCode;

use super::state::may_observe;
use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::openapi::Operation;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::{Caller, CallerRole};

/// The name of the endpoint's own machine. No node elsewhere has it.
pub const LOCAL: &str = "local";

pub(super) fn list_operation() -> Operation {
    Operation::new("The model files of all machines").replies::<ClusterModels>()
}

pub(super) fn order_operation() -> Operation {
    let operation = Operation::new("Copy, pull or delete a model on a machine, or cancel its transfer");
    operation.takes::<ClusterOrder>().replies::<OrderTaken>().fails(&[500, 501, 503])
}

/// Lists the files. Asks all machines, which takes up to 5 s if one does not answer.
pub(super) async fn list(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ClusterModels>, HttpFailure> {
    may_observe(&caller)?;
    let may_change = may_manage(&state, &caller).is_ok();
    Ok(Json(ClusterModels { may_change, ..state.backend.cluster_models().await }))
}

/// Passes an order on. A copy or a pull goes on after the reply: the list tells how far it is.
pub(super) async fn order(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<OrderTaken>, HttpFailure> {
    may_manage(&state, &caller)?;
    let order =
        body.parse(|body| serde_json::from_slice(body).map_err(|error| InvalidRequest::body(error.to_string())));
    let order: ClusterOrder = order.await?;
    let taken = state.backend.order_models(order).await;
    taken.map(Json).map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

/// Checks that a caller may change the models of machines.
pub(in crate::http) fn may_manage(state: &HttpState, caller: &Caller) -> Result<(), HttpFailure> {
    if !state.access.load().manages_models {
        let message = "This server's models are chosen by its operator. They can be changed here only with \
                       'allow_model_management = true' in its configuration, and an operator's key if keys are required.";
        return Err(HttpFailure::new(StatusCode::FORBIDDEN, ErrorBody::new(ErrorKind::Permission, message)));
    }
    match caller.role {
        CallerRole::Anyone | CallerRole::Operator => Ok(()),
        CallerRole::Guest => {
            let refused = RequestError::OperatorOnly { what: "change the models of machines" };
            Err(HttpFailure::of_request(&refused, &caller.request_id))
        }
    }
}
