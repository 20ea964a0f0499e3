//! Calls to the endpoint about models.

use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use baton_schemas::machine_models::{ClusterModels, ClusterOrder, OrderTaken};
use reqwest::RequestBuilder;
use serde::de::DeserializeOwned;
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
    call(endpoint, DEADLINE, |client, base| client.get(format!("{base}/baton/models"))).await
}

/// Gives an order.
pub(super) async fn order(endpoint: &EndpointArgs, order: &ClusterOrder) -> Result<OrderTaken, CommandFailure> {
    call(endpoint, DEADLINE, |client, base| client.post(format!("{base}/baton/models")).json(order)).await
}

/// Loads or unloads as Ollama's clients do: a request without a prompt.
pub(super) async fn set_loaded(
    endpoint: &EndpointArgs,
    model: &str,
    keep_alive: &Value,
) -> Result<Value, CommandFailure> {
    let body = json!({ "model": model, "keep_alive": keep_alive, "stream": false });
    call(endpoint, LOAD_DEADLINE, |client, base| client.post(format!("{base}/api/generate")).json(&body)).await
}

/// The endpoint's reply, or its error in its own words.
async fn call<T: DeserializeOwned>(
    endpoint: &EndpointArgs,
    deadline: Duration,
    prepare: impl FnOnce(&reqwest::Client, &str) -> RequestBuilder,
) -> Result<T, CommandFailure> {
    let base = endpoint.base()?;
    let reply = endpoint.ask(deadline, prepare).await?;
    let status = reply.status();
    let answer = endpoint.answer(reply, MAX_LIST_BYTES).await?;
    if !status.is_success() {
        let error = &answer["error"];
        let message = error["message"].as_str().or(error.as_str()).map(str::to_owned);
        let other = || format!("{base} is not a Baton endpoint of this version: it answered {status}");
        return Err(CommandFailure(message.unwrap_or_else(other)));
    }
    serde_json::from_value(answer)
        .map_err(|_| CommandFailure(format!("{base} is not a Baton endpoint of this version")))
}
