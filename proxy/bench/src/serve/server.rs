//! A server to measure: its model, its connections and its prompts.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use baton_proxy::serve::CommandFailure;
use bytes::Bytes;
use hyper::{Method, StatusCode};
use serde::Deserialize;

use super::bodies::Bodies;
use super::check::RequestedReply;
use super::connection::{ServerConnections, whole};
use super::fault::{RequestFailure, quoted};
use super::settings::{CalledApi, LoadSettings, ServerSettings};

/// The longest list of models.
const MAX_LIST_BYTES: usize = 16 << 20;

/// A server, for all its rounds.
pub(super) struct MeasuredServer {
    pub(super) settings: ServerSettings,
    pub(super) model: String,
    pub(super) connections: ServerConnections,
    pub(super) bodies: Bodies,
    pub(super) asked: RequestedReply,
    /// By prompt, if replies to a prompt must be the same.
    pub(super) first_replies: RefCell<HashMap<u64, blake3::Hash>>,
    /// Requests that were started so far.
    pub(super) n_started: Cell<u64>,
}

/// The reply of `/v1/models`.
#[derive(Deserialize)]
struct ServerModels {
    data: Vec<ServerModel>,
}

#[derive(Deserialize)]
struct ServerModel {
    id: String,
}

impl MeasuredServer {
    /// Finds out the model's name. Errors: the server does not answer.
    pub(super) async fn reach(server: ServerSettings, load: &LoadSettings) -> Result<MeasuredServer, CommandFailure> {
        let connections = ServerConnections::new(&server)?;
        let model = match &server.model {
            Some(model) => model.clone(),
            None => {
                let asking = tokio::time::timeout(load.timeout, first_model(&connections, &server)).await;
                asking.map_err(|_| CommandFailure(format!("{} does not answer at /v1/models", server.base)))??
            }
        };
        Ok(MeasuredServer {
            bodies: Bodies::new(load, &model)?,
            asked: RequestedReply {
                api: load.api,
                form: load.reply,
                max_tokens: load.output_tokens,
                ignore_eos: load.ignore_eos,
                checks: load.checks,
            },
            settings: server,
            model,
            connections,
            first_replies: RefCell::default(),
            n_started: Cell::new(0),
        })
    }

    /// The path of requests.
    pub(super) fn path(&self) -> &'static str {
        match self.asked.api {
            CalledApi::Chat => "/v1/chat/completions",
            CalledApi::Completions => "/v1/completions",
        }
    }
}

async fn first_model(connections: &ServerConnections, server: &ServerSettings) -> Result<String, CommandFailure> {
    let failed = |why: &str| CommandFailure(format!("{}/v1/models: {why}; --model names a model", server.base));
    let sending = connections.send(Method::GET, "/v1/models", Bytes::new()).await;
    let (connection, response) = sending.map_err(|failure| match failure {
        RequestFailure::NoConnection => {
            CommandFailure(format!("no server answers at {}: {}", server.base, connections.last_error()))
        }
        failure => failed(&failure.name()),
    })?;
    let status = response.status();
    let body = whole(response.into_body(), MAX_LIST_BYTES).await.map_err(|failure| failed(&failure.name()))?;
    if status == StatusCode::UNAUTHORIZED {
        let missing = format!("{status}: {}", quoted(&body));
        return Err(CommandFailure(format!("{}/v1/models: {missing}; --api-key KEY gives a key", server.base)));
    }
    if !status.is_success() {
        return Err(failed(&format!("{status}: {}", quoted(&body))));
    }
    connections.keep(connection);
    let list: ServerModels = serde_json::from_slice(&body).map_err(|error| failed(&error.to_string()))?;
    list.data.into_iter().next().map(|model| model.id).ok_or_else(|| failed("it lists no model"))
}
