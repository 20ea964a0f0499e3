//! What the HTTP surface calls: the pieces of a running endpoint, joined.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use baton_schemas::embed::EmbedRequest;
use baton_schemas::generate::ChatPrompt;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::{NodeInfo, NodeLoad, TokenizeRequest};
use baton_schemas::ollama::told::ToldModel;
use baton_schemas::sampling_fields::SamplingFields;
use baton_schemas::{EngineError, GenerateRequest, Token};

use crate::error::RequestError;
use crate::http::Backend;
use crate::http::backend::{Model, ReadyModel};
use crate::observe::Observer;
use crate::observe::metrics;
use crate::observe::readiness::{self, Readiness};
use crate::observe::state::{self, EndpointState, Observed, RequestsState};
use crate::request::admission::{Account, Admission};
use crate::request::embed::{self, Embedded};
use crate::request::failover::{ask, ask_about};
use crate::request::generate::{self, Caller, Generation};
use crate::request::plan::explanation::Explanation;
use crate::request::prompt;
use crate::targets::model_loading::{Residency, Stay};
use crate::targets::nodes::{Life, Node, Pool, ServedModel, Sight, names};
use crate::targets::upstreams::{self, ServedByUpstreams, UpstreamPool};

/// When to ask again for a model of an upstream that has not been heard of yet.
const RETRY_UNLISTED: Duration = Duration::from_secs(1);

/// A running endpoint.
pub struct App {
    /// The door.
    pub admission: Admission,
    /// The models and their engines.
    pub pool: Arc<Pool>,
    /// Which own models are in memory.
    pub residency: Arc<Residency>,
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

    /// What serves a model: nodes, upstreams, or both. Errors: nothing, or nothing that this account may use.
    pub fn who_serves(
        &self,
        name: &str,
        account: &Account,
    ) -> Result<(Option<Arc<ServedModel>>, Option<ServedByUpstreams>), RequestError> {
        let upstreams = self.upstreams.load_full();
        match self.pool.find_for(Some(name), account) {
            Ok(model) => {
                // What an upstream only happens to list under this name may be another model.
                let deputies = upstreams.serving(name, model.name.get().is_none());
                Ok((Some(model), deputies))
            }
            Err(error) => match upstreams.serving(name, true) {
                Some(serving) if account.may_use(std::iter::once(&serving.name)) => Ok((None, Some(serving))),
                Some(_) => Err(RequestError::ModelNotAllowed { model: name.to_owned() }),
                None if upstreams.may_yet_list() && matches!(error, RequestError::ModelNotFound { .. }) => {
                    let reason = "an upstream has not told its models yet".to_owned();
                    Err(RequestError::Unavailable { reason, retry_after: RETRY_UNLISTED })
                }
                None => Err(error),
            },
        }
    }

    /// The upstreams of a model that no node serves. Without a name, of the first one that this account may use, where
    /// upstreams serve all that there is.
    fn on_upstreams(&self, model: Option<&str>, caller: &Caller) -> Result<Option<ServedByUpstreams>, RequestError> {
        let Some(name) = model else {
            return Ok(if self.pool.is_empty() { self.first_on_upstreams(&caller.account) } else { None });
        };
        match self.who_serves(name, &caller.account)? {
            (None, serving) => Ok(serving),
            (Some(_), _) => Ok(None),
        }
    }

    fn first_on_upstreams(&self, account: &Account) -> Option<ServedByUpstreams> {
        let upstreams = self.upstreams.load_full();
        let (name, _) = upstreams.models().into_iter().find(|(name, _)| account.may_use(std::iter::once(name)))?;
        upstreams.serving(&name, true)
    }

    /// A model of nodes, in memory for as long as the second value lives. Waits for it, so it comes before the permit:
    /// that bounds what is at work, and this has a bound of its own.
    async fn in_memory(
        &self,
        model: Option<&str>,
        caller: &Caller,
    ) -> Result<(Arc<ServedModel>, Option<Stay>), RequestError> {
        let model = self.pool.find_for(model, &caller.account)?;
        let stay = self.stay(&model, None).await?;
        Ok((model, stay))
    }

    /// Holds a model in memory; one that is not there is loaded. `None` if it is one that is always there.
    pub async fn stay(&self, model: &ServedModel, keep_alive: Option<KeepAlive>) -> Result<Option<Stay>, RequestError> {
        match &model.resident {
            Some(resident) => self.residency.stay(resident, keep_alive).await.map(Some),
            None => Ok(None),
        }
    }
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
        if self.on_upstreams(Some(&request.model), caller)?.is_some() {
            let feature =
                "plans of a model that only upstreams serve: the one with the fewest replies gets the request";
            return Err(EngineError::Unsupported { feature: feature.to_owned() }.into());
        }
        generate::explain(self, &request, caller).await
    }

    fn models(&self) -> Vec<Model> {
        let model = |model: &Arc<ServedModel>| Model {
            names: model.names().cloned().collect(),
            since: model.since,
            info: model.described(),
            presence: model.resident.as_ref().map(|resident| resident.presence()),
            is_upstream: false,
        };
        let mut models: Vec<Model> = self.pool.models().iter().map(model).collect();
        let is_known = |models: &[Model], name: &str| {
            models.iter().flat_map(|model| &model.names).any(|known| names::are_same(known, name))
        };
        for (name, member) in self.upstreams.load().models() {
            if !is_known(&models, &name) {
                models.push(Model {
                    names: vec![name],
                    since: member.since,
                    info: None,
                    presence: None,
                    is_upstream: true,
                });
            }
        }
        models
    }

    fn state(&self, with_addresses: bool) -> EndpointState {
        let upstreams = self.upstreams.load();
        // Without this, the limit would be known only from the first request on.
        self.admission.set_slots(self.n_slots());
        let observed = Observed {
            pool: &self.pool,
            upstreams: &upstreams,
            requests: RequestsState {
                admitted: self.admission.n_admitted() as u64,
                limit: self.admission.limit() as u64,
                waiting: self.admission.n_waiting() as u64,
            },
            journal: &self.observer.journal,
            memory_budget: Some(self.residency.limits().memory_budget).filter(|bytes| *bytes < u64::MAX),
        };
        state::snapshot(&observed, with_addresses)
    }

    fn metrics(&self) -> String {
        metrics::text(&self.observer.metrics, &self.state(false))
    }

    fn replied(&self, route: &str, status: u16) {
        self.observer.metrics.replied(route, status);
    }

    fn warnings(&self) -> Vec<String> {
        readiness::warnings(&self.pool, &self.upstreams.load())
    }

    fn node_states(&self) -> BTreeMap<Life, usize> {
        readiness::node_states(&self.pool)
    }

    fn readiness(&self) -> Readiness {
        readiness::readiness(&self.pool, &self.upstreams.load())
    }

    async fn ready(&self, model: Option<&str>, caller: &Caller) -> Result<ReadyModel, RequestError> {
        let (called, (model, _stay)) = (model, self.in_memory(model, caller).await?);
        let _permit = self.admission.admit_brief(&caller.account)?;
        ready(called, &model).await
    }

    async fn describe(&self, model: Option<&str>, caller: &Caller) -> Result<ReadyModel, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        if let Some(serving) = self.on_upstreams(model, caller)? {
            let (info, load) = upstreams::info(&serving, &caller.request_id).await;
            let (since, info, sampling) = (serving.since(), Arc::new(info), SamplingFields::default());
            return Ok(ReadyModel { name: serving.name, since, info, load, sampling, is_sleeping: false });
        }
        let (called, model) = (model, self.pool.find_for(model, &caller.account)?);
        let is_ready = model.decode.iter().any(|node| model.ready_decode(node).is_some());
        match (&model.resident, model.described()) {
            (Some(_), Some(info)) if !is_ready => Ok(ReadyModel {
                name: model.name.get().cloned().unwrap_or_else(|| info.model.clone()),
                since: model.since,
                info,
                load: NodeLoad::default(),
                sampling: model.sampling,
                is_sleeping: true,
            }),
            _ => ready(called, &model).await,
        }
    }

    async fn told(&self, model: &str, caller: &Caller) -> Result<ToldModel, RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        match self.on_upstreams(Some(model), caller)? {
            Some(serving) => Ok(upstreams::told(&serving, &caller.request_id).await),
            None => Ok(ToldModel::default()),
        }
    }

    async fn load(&self, model: &str, keep_alive: Option<KeepAlive>, caller: &Caller) -> Result<(), RequestError> {
        if let Some(serving) = self.on_upstreams(Some(model), caller)? {
            let _permit = self.admission.admit_brief(&caller.account)?;
            return upstreams::load(&serving, keep_alive, &caller.request_id).await;
        }
        let found = self.pool.find_for(Some(model), &caller.account)?;
        let _stay = self.stay(&found, keep_alive).await?;
        let _permit = self.admission.admit_brief(&caller.account)?;
        found.ready_as(model, &[], Sight::Unneeded).await.map(drop)
    }

    async fn unload(&self, model: &str, caller: &Caller) -> Result<(), RequestError> {
        let _permit = self.admission.admit_brief(&caller.account)?;
        if let Some(serving) = self.on_upstreams(Some(model), caller)? {
            return upstreams::unload(&serving, &caller.request_id).await;
        }
        let found = self.pool.find_for(Some(model), &caller.account)?;
        match &found.resident {
            Some(resident) => self.residency.unload(resident),
            // It stays; but that there is such a model is to be true.
            None => drop(found.ready_as(model, &[], Sight::Unneeded).await?),
        }
        Ok(())
    }

    async fn tokenize(
        &self,
        model: Option<&str>,
        text: TokenizeRequest,
        caller: &Caller,
    ) -> Result<Vec<Token>, RequestError> {
        if let Some(serving) = self.on_upstreams(model, caller)? {
            let _permit = self.admission.admit_brief(&caller.account)?;
            return upstreams::tokenize(&serving, &text, &caller.request_id).await;
        }
        let (text, (found, _stay)) = (&text, self.in_memory(model, caller).await?);
        let _permit = self.admission.admit_brief(&caller.account)?;
        ask(&found, model, |node, _| async move { Ok(node.engine.tokenize(text).await?) }).await
    }

    async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<Token>,
        caller: &Caller,
    ) -> Result<String, RequestError> {
        if let Some(serving) = self.on_upstreams(model, caller)? {
            let _permit = self.admission.admit_brief(&caller.account)?;
            return upstreams::detokenize(&serving, &tokens, &caller.request_id).await;
        }
        let (tokens, (found, _stay)) = (&tokens, self.in_memory(model, caller).await?);
        let _permit = self.admission.admit_brief(&caller.account)?;
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
        if let Some(serving) = self.on_upstreams(model, caller)? {
            let _permit = self.admission.admit_brief(&caller.account)?;
            return upstreams::count(&serving, &chat, &caller.request_id).await;
        }
        let (chat, (found, _stay)) = (&chat, self.in_memory(model, caller).await?);
        let _permit = self.admission.admit_brief(&caller.account)?;
        let count =
            |node: Arc<Node>, info: Arc<NodeInfo>| async move { Ok(prompt::of_chat(&node, &info, chat).await?.len()) };
        let n_tokens = ask_about(&found, model, &chat.conversation.images, count).await?;
        Ok(u32::try_from(n_tokens).unwrap_or(u32::MAX))
    }

    async fn render(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<String, RequestError> {
        if let Some(serving) = self.on_upstreams(model, caller)? {
            let _permit = self.admission.admit_brief(&caller.account)?;
            return upstreams::render(&serving, &chat, &caller.request_id).await;
        }
        let (chat, (found, _stay)) = (&chat, self.in_memory(model, caller).await?);
        let _permit = self.admission.admit_brief(&caller.account)?;
        // Through tokens, so that it is the prompt that a chat gets, to the letter.
        let text = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
            let tokens = prompt::of_chat(&node, &info, chat).await?;
            Ok(node.engine.detokenize(&tokens).await?)
        };
        ask_about(&found, model, &chat.conversation.images, text).await
    }
}

/// What runs a model. Waits for one that is starting.
async fn ready(called: Option<&str>, model: &ServedModel) -> Result<ReadyModel, RequestError> {
    let (node, info) = model.ready_for(called, &[], Sight::Unneeded).await?;
    let name = model.name.get().cloned().unwrap_or_else(|| info.model.clone());
    let (since, load, sampling) = (model.since, node.load(), model.sampling);
    Ok(ReadyModel { name, since, info, load, sampling, is_sleeping: false })
}
