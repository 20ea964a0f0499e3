//! The endpoint of a chat: the one that was named, the one at the default address, or one of its own.

use std::time::Duration;

use baton_proxy::config::{DEFAULT_LISTEN, OWN_KEY_VARIABLE};
use baton_proxy::serve::CommandFailure;
use baton_tryout::endpoint_process::{EndpointProcess, EndpointStart};
use serde::Deserialize;

use super::super::endpoint::EndpointArgs;
use super::super::terminal;
use super::ChatArgs;

/// Longer than a busy endpoint takes to list its models.
const DEADLINE: Duration = Duration::from_secs(10);

/// The longest start of an own endpoint, which may have to download its model.
const START_DEADLINE: Duration = Duration::from_secs(3_600);

/// A list of models has some hundred bytes for each.
const MAX_LIST_BYTES: usize = 1 << 20;

/// An endpoint to chat with.
pub(super) struct Connection {
    /// `http://HOST:PORT`
    pub(super) base: String,
    pub(super) api_key: Option<String>,
    /// The model that answers.
    pub(super) model: String,
    own: Option<OwnEndpoint>,
}

/// An endpoint that ends with the chat.
struct OwnEndpoint {
    process: EndpointProcess,
    /// What `baton serve --model` was given.
    source: Option<String>,
}

#[derive(Deserialize)]
struct ModelEntries {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
}

impl Connection {
    /// Finds an endpoint, or starts one.
    pub(super) async fn open(args: &ChatArgs) -> Result<Connection, CommandFailure> {
        if args.own {
            return Connection::start(args.model.clone()).await;
        }
        let api_key = args.api_key.clone();
        let address = args.url.clone().unwrap_or_else(|| DEFAULT_LISTEN.to_owned());
        let endpoint = EndpointArgs::at(address, api_key.clone());
        match list(&endpoint).await {
            Ok(served) => {
                let model = args.model.clone().map_or_else(|| first(&served), Ok)?;
                Ok(Connection { base: endpoint.base()?, api_key, model, own: None })
            }
            // An endpoint that was named must answer. One that answers with an error is there.
            Err(ListFailure::Unreachable(_)) if args.url.is_none() => Connection::start(args.model.clone()).await,
            Err(ListFailure::Refused(CommandFailure(reason))) if args.url.is_none() => {
                Err(CommandFailure(format!("{reason}. `baton chat --own` starts an endpoint of its own")))
            }
            Err(ListFailure::Unreachable(failure) | ListFailure::Refused(failure)) => Err(failure),
        }
    }

    async fn start(source: Option<String>) -> Result<Connection, CommandFailure> {
        terminal::note("This chat starts an endpoint of its own, which ends with it.");
        // Only this chat may use it.
        let key = uuid::Uuid::new_v4().to_string();
        let model = source.as_ref().map(|source| ["--model".to_owned(), source.clone()]);
        let args = ["--listen".to_owned(), "127.0.0.1:0".to_owned()].into_iter().chain(model.into_iter().flatten());
        let log = std::env::var("RUST_LOG").unwrap_or_else(|_| "error".into());
        let variables = [(OWN_KEY_VARIABLE, key.as_str()), ("RUST_LOG", log.as_str())];
        let process = EndpointProcess::start(EndpointStart {
            args: args.map(Into::into).collect(),
            variables: &variables,
            deadline: START_DEADLINE,
        });
        let process = process.await?;
        let base = process.base.clone();
        let endpoint = EndpointArgs::at(base.clone(), Some(key.clone()));
        let served = list(&endpoint).await.map_err(|failure| match failure {
            ListFailure::Unreachable(failure) | ListFailure::Refused(failure) => failure,
        })?;
        let own = Some(OwnEndpoint { process, source });
        Ok(Connection { base, api_key: Some(key), model: first(&served)?, own })
    }

    /// Starts the own endpoint again if it has ended.
    pub(super) async fn revive(&mut self) -> Result<(), CommandFailure> {
        if let Some(own) = &mut self.own
            && own.process.has_ended()
        {
            let source = own.source.clone();
            *self = Connection::start(source).await?;
        }
        Ok(())
    }

    /// The models that the endpoint serves.
    pub(super) async fn models(&self) -> Result<Vec<String>, CommandFailure> {
        let endpoint = EndpointArgs::at(self.base.clone(), self.api_key.clone());
        list(&endpoint).await.map_err(|failure| match failure {
            ListFailure::Unreachable(failure) | ListFailure::Refused(failure) => failure,
        })
    }

    /// Ends an endpoint of its own.
    pub(super) async fn close(self) {
        if let Some(own) = self.own {
            own.process.stop().await;
        }
    }
}

/// Why an endpoint's models are not known.
enum ListFailure {
    /// Nothing answers at its address.
    Unreachable(CommandFailure),
    /// It answers with an error, or is no endpoint.
    Refused(CommandFailure),
}

async fn list(endpoint: &EndpointArgs) -> Result<Vec<String>, ListFailure> {
    let base = endpoint.base().map_err(ListFailure::Refused)?;
    let asked = endpoint.ask(DEADLINE, |client, base| client.get(format!("{base}/v1/models"))).await;
    let reply = asked.map_err(|failure| match failure.is_unreachable {
        true => ListFailure::Unreachable(failure.into()),
        false => ListFailure::Refused(failure.into()),
    })?;
    let status = reply.status();
    if !status.is_success() {
        return Err(ListFailure::Refused(CommandFailure(format!(
            "{base} does not list its models: it answered {status}"
        ))));
    }
    let answer = endpoint.answer(reply, MAX_LIST_BYTES).await.map_err(ListFailure::Refused)?;
    let list: ModelEntries = serde_json::from_value(answer)
        .map_err(|_| ListFailure::Refused(CommandFailure(format!("{base} is not an OpenAI-compatible endpoint"))))?;
    Ok(list.data.into_iter().map(|model| model.id).collect())
}

fn first(served: &[String]) -> Result<String, CommandFailure> {
    served.first().cloned().ok_or_else(|| CommandFailure("the endpoint serves no model yet".into()))
}
