//! What the HTTP surface calls: the pieces of a running endpoint, joined.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use baton_schemas::embed::EmbedRequest;
use baton_schemas::generate::ChatPrompt;
use baton_schemas::node::{NodeInfo, TokenizeRequest};
use baton_schemas::{EngineError, GenerateRequest, Token};

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
use crate::pool::{Life, Node, Pool, ServedModel, Unused, names};
use crate::prompt;
use crate::state::{self, EndpointState};
use crate::upstream::UpstreamPool;

/// A running endpoint.
pub struct App {
    /// The door.
    pub admission: Admission,
    /// The models and their engines.
    pub pool: Arc<Pool>,
    /// Servers that speak text.
    pub upstreams: ArcSwap<UpstreamPool>,
    /// What is noted of requests.
    pub observer: Arc<Observer>,
}

impl App {
    /// Choices that are generated at once, by nodes and upstreams together.
    pub fn n_slots(&self) -> usize {
        self.pool.n_slots() + self.upstreams.load().n_places()
    }

    /// The model of that name that nodes serve. Errors: there is none; of one that upstreams serve, that there are no
    /// tokens to be had of it.
    fn on_nodes(&self, model: Option<&str>, caller: &Caller) -> Result<Arc<ServedModel>, RequestError> {
        let found = self.pool.find_for(model, &caller.account);
        found.map_err(|error| self.unless_upstream(model, error, "the tokens of a model"))
    }

    /// What is said of a model that was not found: if upstreams serve it, that they do not do this.
    fn unless_upstream(&self, model: Option<&str>, error: RequestError, what: &str) -> RequestError {
        match model {
            Some(name) if self.upstreams.load().serving(name, true).is_some() => {
                EngineError::Unsupported { feature: format!("{what} that an upstream serves") }.into()
            }
            _ => error,
        }
    }
}

#[async_trait]
impl Backend for App {
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError> {
        generate::generate(self, request, &caller).await
    }

    async fn embed(&self, request: EmbedRequest, caller: &Caller) -> Result<Embedded, RequestError> {
        let embedded = embed::embed(self, &request, caller).await;
        embedded.map_err(|error| match &error {
            RequestError::ModelNotFound { .. } => {
                self.unless_upstream(Some(&request.model), error, "embeddings of a model")
            }
            _ => error,
        })
    }

    async fn explain(&self, request: GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError> {
        generate::explain(self, &request, caller).await
    }

    fn models(&self) -> Vec<Model> {
        let model = |model: &Arc<ServedModel>| Model {
            names: model.names().cloned().collect(),
            since: model.since,
            info: model.decode.iter().find_map(|node| model.ready_decode(node)),
            is_upstream: false,
        };
        let mut models: Vec<Model> = self.pool.models().iter().map(model).collect();
        let is_known = |models: &[Model], name: &str| {
            models.iter().flat_map(|model| &model.names).any(|known| names::are_same(known, name))
        };
        for (name, member) in self.upstreams.load().models() {
            if !is_known(&models, &name) {
                models.push(Model { names: vec![name], since: member.since, info: None, is_upstream: true });
            }
        }
        models
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

    fn lives(&self) -> BTreeMap<Life, usize> {
        let models = self.pool.models();
        // A node lies in the lists of all models that it may serve, and may have both tasks.
        let mut nodes: Vec<&Arc<Node>> = Vec::new();
        for node in models.iter().flat_map(|model| model.decode.iter().chain(&model.prefill)) {
            if !nodes.iter().any(|known| Arc::ptr_eq(known, node)) {
                nodes.push(node);
            }
        }
        let mut lives = BTreeMap::new();
        for node in nodes {
            *lives.entry(node.health.life()).or_default() += 1;
        }
        lives
    }

    /// The endpoint is well if every model could answer.
    fn health(&self) -> Health {
        for model in &self.pool.models() {
            if model.decode.iter().any(|node| model.ready_decode(node).is_some()) {
                continue;
            }
            let upstreams = self.upstreams.load();
            let deputies = model.name.get().and_then(|name| upstreams.serving(name, false));
            if deputies.is_some_and(|serving| serving.can_answer()) {
                continue;
            }
            for node in &model.decode {
                let status = node.health.status();
                match status.life() {
                    Life::Ready | Life::Suspect => {}
                    Life::Starting => return Health::Loading { reason: status.words },
                    Life::Draining | Life::Down => return Health::Unavailable { reason: status.words },
                }
            }
            return Health::Unavailable { reason: "no node runs what a model's name stands for".into() };
        }
        let upstreams = self.upstreams.load();
        let is_local =
            |name: &str| self.pool.models().iter().any(|model| model.names().any(|known| names::are_same(known, name)));
        if upstreams.unanswered(is_local).is_some() {
            return Health::Unavailable { reason: "no upstream of a model answers".to_owned() };
        }
        if self.pool.models().is_empty() && upstreams.models().is_empty() && upstreams.may_yet_list() {
            return Health::Unavailable { reason: "no upstream has told its models yet".to_owned() };
        }
        Health::Ok
    }

    async fn ready(&self, model: Option<&str>, caller: &Caller) -> Result<ReadyModel, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (called, model) = (model, self.on_nodes(model, caller)?);
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
        let (text, found) = (&text, self.on_nodes(model, caller)?);
        ask(&found, model, |node, _| async move { Ok(node.engine.tokenize(text).await?) }).await
    }

    async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<Token>,
        caller: &Caller,
    ) -> Result<String, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (tokens, found) = (&tokens, self.on_nodes(model, caller)?);
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
        let (chat, found) = (&chat, self.on_nodes(model, caller)?);
        let count =
            |node: Arc<Node>, info: Arc<NodeInfo>| async move { Ok(prompt::of_chat(&node, &info, chat).await?.len()) };
        Ok(u32::try_from(ask(&found, model, count).await?).unwrap_or(u32::MAX))
    }

    async fn render(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<String, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        let (chat, found) = (&chat, self.on_nodes(model, caller)?);
        // Through tokens, so that it is the prompt that a chat gets, to the letter.
        let text = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
            let tokens = prompt::of_chat(&node, &info, chat).await?;
            Ok(node.engine.detokenize(&tokens).await?)
        };
        ask(&found, model, text).await
    }
}
