//! What the HTTP surface needs from the rest of the proxy, small enough to be faked in a test.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use baton_schemas::embed::EmbedRequest;
use baton_schemas::generate::ChatPrompt;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::{NodeInfo, NodeLoad, TokenizeRequest};
use baton_schemas::ollama::told::ToldModel;
use baton_schemas::sampling_fields::SamplingFields;
use baton_schemas::{GenerateRequest, Token};

use crate::error::RequestError;
use crate::observe::readiness::Readiness;
use crate::observe::state::{EndpointState, Life};
use crate::request::embed::Embedded;
use crate::request::generate::{Caller, Generation};
use crate::request::plan::explanation::Explanation;
use crate::targets::model_loading::Presence;
use crate::targets::nodes::names;

/// What generates. Where a model's name is optional, `None` is the first model that the caller may use.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Admits a request and starts it. Dropping the future, or the [`Generation`], cancels it: that is how a client
    /// that leaves frees its slot.
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError>;

    /// The vectors of some texts. Dropping the future cancels them.
    async fn embed(&self, request: EmbedRequest, caller: &Caller) -> Result<Embedded, RequestError>;

    /// What would be done with a request now, and why. Generates nothing.
    async fn explain(&self, request: GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError>;

    /// The models that requests may name, and what is known of them now.
    fn models(&self) -> Vec<Model>;

    /// The endpoint at this moment; with the nodes' addresses only for who may know them.
    fn state(&self, with_addresses: bool) -> EndpointState;

    /// What `/metrics` shows, in the format of [`crate::observe::metrics::CONTENT_TYPE`].
    fn metrics(&self) -> String;

    /// A reply's head was made for this route (its pattern, not the path), with this status.
    fn replied(&self, route: &str, status: u16);

    /// Returns whether a request sent now would be answered.
    fn readiness(&self) -> Readiness;

    /// What is not as configured and costs no request its reply, in words that are safe to show to anybody.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// How many nodes are in each state.
    fn node_states(&self) -> BTreeMap<Life, usize> {
        BTreeMap::new()
    }

    /// What a model's engine is. Waits for one that is starting, and loads a model that is not there. Counts as a request.
    async fn ready(&self, model: Option<&str>, caller: &Caller) -> Result<ReadyModel, RequestError>;

    /// The same without loading anything: what is known of a model that is not there.
    async fn describe(&self, model: Option<&str>, caller: &Caller) -> Result<ReadyModel, RequestError> {
        self.ready(model, caller).await
    }

    /// What is told of a model that upstreams alone serve.
    async fn told(&self, _model: &str, _caller: &Caller) -> Result<ToldModel, RequestError> {
        Ok(ToldModel::default())
    }

    /// Answers once the model is there; it stays for `keep_alive` at least, if that says so.
    async fn load(&self, model: &str, _keep_alive: Option<KeepAlive>, caller: &Caller) -> Result<(), RequestError> {
        self.ready(Some(model), caller).await.map(drop)
    }

    /// Lets a model go as soon as nothing uses it. One that is always there stays.
    async fn unload(&self, model: &str, caller: &Caller) -> Result<(), RequestError> {
        self.ready(Some(model), caller).await.map(drop)
    }

    /// A text's tokens.
    async fn tokenize(
        &self,
        model: Option<&str>,
        text: TokenizeRequest,
        caller: &Caller,
    ) -> Result<Vec<Token>, RequestError>;

    /// The text of tokens, control tokens included.
    async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<Token>,
        caller: &Caller,
    ) -> Result<String, RequestError>;

    /// Tokens of a chat's prompt, as it would be generated from.
    async fn count(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<u32, RequestError>;

    /// A chat's prompt, as it would be generated from.
    async fn render(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<String, RequestError>;
}

/// A model that requests may name.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// All names, the public one first. Empty while a remote node has not said what it runs.
    pub names: Vec<String>,
    /// When it was put into service.
    pub since: SystemTime,
    /// Missing while no engine is ready, but for a model that is not loaded: then what is known of it.
    pub info: Option<Arc<NodeInfo>>,
    /// How it comes and goes, if it does.
    pub presence: Option<Presence>,
    /// Upstreams alone serve it, of which nothing more is known.
    pub is_upstream: bool,
}

impl Model {
    /// Whether it could answer at once.
    pub fn is_loaded(&self) -> bool {
        self.info.is_some() && self.presence.as_ref().is_none_or(|presence| presence.life == "loaded")
    }

    /// Bytes that it takes in memory: of one that comes and goes what is reckoned with, as `/baton/state` tells it, else its
    /// weights and its KV cache.
    pub fn memory_bytes(&self) -> u64 {
        match (&self.presence, &self.info) {
            (Some(presence), _) => presence.bytes,
            (None, Some(info)) => info.memory.bytes(),
            (None, None) => 0,
        }
    }

    /// Whether this is one of its names.
    pub fn is_called(&self, name: &str) -> bool {
        self.names.iter().any(|known| names::are_same(known, name))
    }
}

/// A model that can be asked now.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadyModel {
    /// Its public name.
    pub name: String,
    /// When it was put into service.
    pub since: SystemTime,
    /// What runs it.
    pub info: Arc<NodeInfo>,
    /// What that is doing.
    pub load: NodeLoad,
    /// How tokens are drawn where a client does not say.
    pub sampling: SamplingFields,
    /// It is not in memory: the next request loads it.
    pub is_sleeping: bool,
}

/// The model of that name.
pub fn find(models: Vec<Model>, name: &str) -> Result<Model, RequestError> {
    let found = models.into_iter().find(|model| model.is_called(name));
    found.ok_or_else(|| RequestError::ModelNotFound { model: name.to_owned() })
}
