//! What the HTTP surface calls: the pieces of a running endpoint, joined.

use std::sync::Arc;

use async_trait::async_trait;
use baton_schemas::embed::EmbedRequest;
use baton_schemas::generate::ChatPrompt;
use baton_schemas::node::{NodeInfo, TokenizeRequest};
use baton_schemas::{GenerateRequest, Token};

use crate::admission::Admission;
use crate::embed::{self, Embedded};
use crate::error::RequestError;
use crate::failover::ask;
use crate::generate::{self, Caller, Generation};
use crate::http::backend::{Model, ReadyModel};
use crate::http::{Backend, Health};
use crate::metrics;
use crate::observe::Observer;
use crate::plan::explanation::Explanation;
use crate::pool::{EngineState, Node, Pool, ServedModel, Unused};
use crate::prompt;
use crate::state::{self, EndpointState};

/// A running endpoint.
pub struct App {
    /// The door.
    pub admission: Admission,
    /// The models and their engines.
    pub pool: Arc<Pool>,
    /// What is noted of requests.
    pub observer: Arc<Observer>,
}

#[async_trait]
impl Backend for App {
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError> {
        generate::generate(self, request, &caller).await
    }

    async fn embed(&self, request: EmbedRequest, caller: &Caller) -> Result<Embedded, RequestError> {
        embed::embed(self, &request, caller).await
    }

    async fn explain(&self, request: GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError> {
        generate::explain(self, &request, caller).await
    }

    fn models(&self) -> Vec<Model> {
        let model = |model: &Arc<ServedModel>| Model {
            names: model.names().cloned().collect(),
            since: model.since,
            info: model.decode.iter().find_map(|node| model.ready_decode(node)),
        };
        self.pool.models().iter().map(model).collect()
    }

    fn state(&self, with_addresses: bool) -> EndpointState {
        state::snapshot(self, with_addresses)
    }

    fn metrics(&self) -> String {
        metrics::text(&self.observer.metrics, &state::snapshot(self, false))
    }

    fn replied(&self, route: &str, status: u16) {
        self.observer.metrics.replied(route, status);
    }

    fn warnings(&self) -> Vec<String> {
        let warning = |unused: Unused| format!("{} runs other weights than the model it stands for", unused.node);
        self.pool.unused().into_iter().map(warning).collect()
    }

    /// The endpoint is well if every model could answer.
    fn health(&self) -> Health {
        for model in &self.pool.models() {
            if model.decode.iter().any(|node| model.ready_decode(node).is_some()) {
                continue;
            }
            for node in &model.decode {
                match &*node.state.borrow() {
                    EngineState::Ready(_) => {}
                    EngineState::Starting => return Health::Loading { reason: "the model is loading".into() },
                    EngineState::Failed { reason, .. } => return Health::Unavailable { reason: reason.clone() },
                }
            }
            return Health::Unavailable { reason: "no node runs what a model's name stands for".into() };
        }
        Health::Ok
    }

    async fn ready(&self, model: Option<&str>, caller: &Caller) -> Result<ReadyModel, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (called, model) = (model, self.pool.find_for(model, &caller.account)?);
        let (node, info) = model.ready_for(called, &[]).await?;
        let name = model.name.get().cloned().unwrap_or_else(|| info.model.clone());
        Ok(ReadyModel { name, since: model.since, load: node.load(), info })
    }

    async fn tokenize(
        &self,
        model: Option<&str>,
        text: TokenizeRequest,
        caller: &Caller,
    ) -> Result<Vec<Token>, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (text, found) = (&text, self.pool.find_for(model, &caller.account)?);
        ask(&found, model, |node, _| async move { Ok(node.engine.tokenize(text).await?) }).await
    }

    async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<Token>,
        caller: &Caller,
    ) -> Result<String, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (tokens, found) = (&tokens, self.pool.find_for(model, &caller.account)?);
        let text = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
            if let Some(unknown) = tokens.iter().find(|&&token| token >= info.n_vocab) {
                let problem = format!("{unknown} is not in the model's vocabulary of {} tokens", info.n_vocab);
                return Err(RequestError::InvalidField { field: "tokens", problem });
            }
            Ok(node.engine.detokenize(tokens).await?)
        };
        ask(&found, model, text).await
    }

    async fn count(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<u32, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (chat, found) = (&chat, self.pool.find_for(model, &caller.account)?);
        let count =
            |node: Arc<Node>, info: Arc<NodeInfo>| async move { Ok(prompt::of_chat(&node, &info, chat).await?.len()) };
        Ok(u32::try_from(ask(&found, model, count).await?).unwrap_or(u32::MAX))
    }

    async fn render(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<String, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (chat, found) = (&chat, self.pool.find_for(model, &caller.account)?);
        // Through tokens, so that it is the prompt that a chat gets, to the letter.
        let text = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
            let tokens = prompt::of_chat(&node, &info, chat).await?;
            Ok(node.engine.detokenize(&tokens).await?)
        };
        ask(&found, model, text).await
    }
}
