//! Implements [`HttpBackend`] with the parts of a running endpoint.
//!
//! Each method passes only the parts that its stage needs.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use baton_schemas::embed::EmbedRequest;
use baton_schemas::generate::ChatPrompt;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::machine_models::{ClusterModels, ClusterOrder, ModelTransfer, OrderTaken};
use baton_schemas::node::TokenizeRequest;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use baton_schemas::{EngineError, GenerateRequest, Token};
use baton_upstream::{TokenAnswer, TokenQuestion};
use tokio::time::MissedTickBehavior;

use super::cluster_models::Machines;
use super::config_in_force::ConfigInForce;
use super::own_models::OwnModels;
use crate::account::request_memory::RequestMemory;
use crate::admission::Admission;
use crate::error::RequestError;
use crate::http::HttpBackend;
use crate::observe::history::{self, HistorySample, TickReport};
use crate::observe::readiness::{self, Readiness};
use crate::observe::snapshot::{EndpointState, Observed, RequestsState, snapshot};
use crate::observe::{ConfigReport, CurrentCounts, Observer, PreviewBusy, ReloadPreview, metrics};
use crate::request::caller::Caller;
use crate::request::embed::embed;
use crate::request::explain::explain;
use crate::request::generate::{Generation, generate};
use crate::request::models::{self, ModelDescription, OfferedModel};
use crate::request::plan::explanation::Explanation;
use crate::request::tokens;
use crate::targets::found::FoundNodes;
use crate::targets::nodes::NodeState;
use crate::targets::{Embedded, Target, Targets};
use crate::usage::{SecretId, UsageFilter, UsageReport, UsageUnreadable};

/// The parts that answer requests.
pub struct RequestService {
    /// Bounds what runs at once.
    pub admission: Admission,
    /// Models, nodes and upstreams.
    pub targets: Targets,
    /// What was found in the network; `None` if nothing is searched for.
    pub found: Option<Arc<FoundNodes>>,
    pub observer: Arc<Observer>,
    /// The memory that requests may hold.
    pub memory: Arc<RequestMemory>,
    /// The settings of the configuration.
    pub config: ArcSwap<ConfigReport>,
    /// What is in force of it; empty until the file is watched.
    pub(super) in_force: OnceLock<ConfigInForce>,
    /// The models that are loaded on demand, and the models folder of this machine; `None` in tests.
    pub(super) own_models: Option<Arc<OwnModels>>,
}

impl RequestService {
    async fn ask(
        &self,
        model: Option<&str>,
        question: TokenQuestion<'_>,
        caller: &Caller,
    ) -> Result<TokenAnswer, RequestError> {
        tokens::ask(&self.admission, &self.targets, model, question, caller).await
    }

    fn machines(&self) -> Machines<'_> {
        Machines { own: self.own_models.as_ref(), pool: &self.targets.pool }
    }

    /// Keeps the history of the last hour until the service is dropped.
    pub fn keep_history(self: &Arc<Self>) {
        let service = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(history::TICK);
            // After a pause of the process, one sample of it is enough.
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let Some(service) = service.upgrade() else { break };
                service.observer.history.tick(SystemTime::now(), service.tick_report());
            }
        });
    }

    fn tick_report(&self) -> TickReport {
        let mut fallbacks: BTreeMap<String, u64> = BTreeMap::new();
        let mut count = |reason: &str, n: u64| *fallbacks.entry(reason.to_owned()).or_default() += n;
        for model in self.targets.pool.models() {
            model.fallbacks.view().into_iter().for_each(|(reason, fallback)| count(reason.as_str(), fallback.count));
        }
        for server in &self.targets.upstreams.load().servers {
            let of_prefill = server.prefill.fallbacks.view();
            of_prefill.into_iter().for_each(|(reason, fallback)| count(reason.as_str(), fallback.count));
        }
        let CurrentCounts { n_running, n_waiting } = self.observer.current.counts();
        TickReport { running: n_running, waiting: n_waiting, fallbacks }
    }

    /// An endpoint that serves the models of this pool.
    #[cfg(test)]
    pub(crate) fn over(pool: Arc<crate::targets::models::ModelPool>) -> RequestService {
        RequestService {
            admission: Admission::new(Default::default()),
            targets: Targets::of_nodes(pool),
            found: None,
            observer: Arc::default(),
            memory: RequestMemory::of_endpoint(),
            config: ArcSwap::default(),
            in_force: OnceLock::new(),
            own_models: None,
        }
    }
}

#[async_trait]
impl HttpBackend for RequestService {
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError> {
        generate(&self.admission, &self.targets, &self.observer, request, &caller).await
    }

    async fn embed(&self, request: EmbedRequest, caller: &Caller) -> Result<Embedded, RequestError> {
        embed(&self.admission, &self.targets, &self.observer, request, caller).await
    }

    async fn explain(&self, request: GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError> {
        explain(&self.admission, &self.targets, &request, caller).await
    }

    async fn tokenize(
        &self,
        model: Option<&str>,
        text: TokenizeRequest,
        caller: &Caller,
    ) -> Result<Vec<Token>, RequestError> {
        tokens_in(self.ask(model, TokenQuestion::Tokenize(&text), caller).await?)
    }

    async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<Token>,
        caller: &Caller,
    ) -> Result<String, RequestError> {
        text_in(self.ask(model, TokenQuestion::Detokenize(&tokens), caller).await?)
    }

    async fn pieces(
        &self,
        model: Option<&str>,
        tokens: &[Token],
        caller: &Caller,
    ) -> Result<Vec<Vec<u8>>, RequestError> {
        match self.ask(model, TokenQuestion::Pieces(tokens), caller).await? {
            TokenAnswer::Pieces(pieces) => Ok(pieces),
            TokenAnswer::Tokens(_) | TokenAnswer::Text(_) => Err(wrong_answer()),
        }
    }

    fn n_ctx(&self, model: Option<&str>, caller: &Caller) -> Option<u32> {
        match self.targets.resolve(model, &caller.account).ok()? {
            Target::Nodes { model, .. } => Some(model.described()?.n_ctx),
            Target::Upstreams(_) => None,
        }
    }

    async fn count(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<u32, RequestError> {
        let tokens = tokens_in(self.ask(model, TokenQuestion::TokenizeChat(&chat), caller).await?)?;
        Ok(u32::try_from(tokens.len()).unwrap_or(u32::MAX))
    }

    async fn render(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<String, RequestError> {
        text_in(self.ask(model, TokenQuestion::Render(&chat), caller).await?)
    }

    fn models(&self) -> Vec<OfferedModel> {
        models::list(&self.targets)
    }

    async fn describe(&self, model: Option<&str>, caller: &Caller) -> Result<ModelDescription, RequestError> {
        models::describe(&self.admission, &self.targets, model, caller).await
    }

    async fn describe_upstream(&self, model: &str, caller: &Caller) -> Result<UpstreamModelInfo, RequestError> {
        models::describe_upstream(&self.admission, &self.targets, model, caller).await
    }

    async fn load(&self, model: &str, keep_alive: Option<KeepAlive>, caller: &Caller) -> Result<(), RequestError> {
        models::load(&self.admission, &self.targets, model, keep_alive, caller).await
    }

    async fn unload(&self, model: &str, caller: &Caller) -> Result<(), RequestError> {
        models::unload(&self.admission, &self.targets, model, caller).await
    }

    async fn cluster_models(&self) -> ClusterModels {
        self.machines().report().await
    }

    fn model_transfer(&self) -> Option<ModelTransfer> {
        self.own_models.as_ref()?.folder.as_ref()?.transfer()
    }

    fn cancel_transfer(&self, number: u64) {
        if let Some(folder) = self.own_models.as_ref().and_then(|own| own.folder.as_ref()) {
            folder.cancel(number);
        }
    }

    async fn order_models(&self, order: ClusterOrder) -> Result<OrderTaken, RequestError> {
        self.machines().order(order).await
    }

    async fn has_model_file(&self, model: &str) -> bool {
        match self.own_models.as_ref().and_then(|own| own.folder.as_ref()) {
            Some(folder) => folder.has(model).await,
            None => false,
        }
    }

    fn state(&self, with_addresses: bool) -> EndpointState {
        // Before the first request, nothing else has set them.
        self.admission.set_targets(self.targets.places());
        let memory = self.memory.in_use();
        let (counts, open) = self.observer.current.now();
        let observed = Observed {
            pool: &self.targets.pool,
            upstreams: &self.targets.upstreams.load(),
            requests: RequestsState {
                running: counts.n_running,
                slots: self.admission.n_places() as u64,
                limit: self.admission.limit() as u64,
                waiting: counts.n_waiting,
                memory_bytes: memory.held as u64,
                memory_limit_bytes: memory.limit as u64,
                memory_refusals: memory.n_refused,
            },
            open,
            observer: &self.observer,
            discovery: self.found.as_ref().map(|found| found.state()),
            memory_budget: Some(self.targets.model_loader.limits().memory_budget).filter(|bytes| *bytes < u64::MAX),
        };
        snapshot(&observed, with_addresses)
    }

    fn config(&self) -> ConfigReport {
        ConfigReport::clone(&self.config.load())
    }

    async fn config_changes(&self) -> Result<ReloadPreview, PreviewBusy> {
        match self.in_force.get() {
            Some(in_force) => in_force.preview().await,
            None => Ok(ReloadPreview::default()),
        }
    }

    async fn usage(&self, filter: UsageFilter) -> Result<UsageReport, UsageUnreadable> {
        self.observer.usage.report(filter).await
    }

    async fn last_uses(&self) -> Result<HashMap<SecretId, u64>, UsageUnreadable> {
        self.observer.usage.last_uses().await
    }

    fn history(&self, after_ms: u64) -> Vec<HistorySample> {
        self.observer.history.since(after_ms)
    }

    fn metrics(&self) -> String {
        metrics::text(&self.observer, &self.state(false))
    }

    fn replied(&self, route: &str, status: u16) {
        self.observer.metrics.replied(route, status);
    }

    fn readiness(&self) -> Readiness {
        readiness::readiness(&self.targets.pool, &self.targets.upstreams.load())
    }

    fn warnings(&self) -> Vec<String> {
        readiness::warnings(&self.targets.pool, &self.targets.upstreams.load())
    }

    fn node_states(&self) -> BTreeMap<NodeState, usize> {
        readiness::node_states(&self.targets.pool)
    }
}

fn tokens_in(answer: TokenAnswer) -> Result<Vec<Token>, RequestError> {
    match answer {
        TokenAnswer::Tokens(tokens) => Ok(tokens),
        TokenAnswer::Text(_) | TokenAnswer::Pieces(_) => Err(wrong_answer()),
    }
}

fn text_in(answer: TokenAnswer) -> Result<String, RequestError> {
    match answer {
        TokenAnswer::Text(text) => Ok(text),
        TokenAnswer::Tokens(_) | TokenAnswer::Pieces(_) => Err(wrong_answer()),
    }
}

fn wrong_answer() -> RequestError {
    EngineError::internal("a question about tokens was answered with the wrong kind of answer").into()
}
