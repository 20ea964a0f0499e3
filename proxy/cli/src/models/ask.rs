//! Calls to the endpoint about models.

use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use baton_schemas::machine_models::{ClusterModels, ClusterOrder, OrderTaken};
use reqwest::Client;
use serde_json::{Value, json};

use crate::endpoint::EndpointArgs;

/// The endpoint asks its nodes, of which some may not answer.
const DEADLINE: Duration = Duration::from_secs(40);

/// Loading a large model from a slow disk.
const LOAD_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// A list of a thousand models on each of some machines.
const MAX_LIST_BYTES: usize = 64 << 20;

/// Lists the model files of all machines.
pub(super) async fn list(endpoint: &EndpointArgs) -> Result<ClusterModels, CommandFailure> {
    endpoint.json(DEADLINE, MAX_LIST_BYTES, |client, base| client.get(format!("{base}/baton/models"))).await
}

/// Gives an order.
pub(super) async fn order(endpoint: &EndpointArgs, order: &ClusterOrder) -> Result<OrderTaken, CommandFailure> {
    let order = |client: &Client, base: &str| client.post(format!("{base}/baton/models")).json(order);
    endpoint.json(DEADLINE, MAX_LIST_BYTES, order).await
}

/// Loads or unloads as Ollama's clients do: a request without a prompt.
pub(super) async fn set_loaded(
    endpoint: &EndpointArgs,
    model: &str,
    keep_alive: &Value,
) -> Result<Value, CommandFailure> {
    let body = json!({ "model": model, "keep_alive": keep_alive, "stream": false });
    let load = |client: &Client, base: &str| client.post(format!("{base}/api/generate")).json(&body);
    endpoint.json(LOAD_DEADLINE, MAX_LIST_BYTES, load).await
}
