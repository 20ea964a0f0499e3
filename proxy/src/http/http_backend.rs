//! The interface between the HTTP surface and the rest of the proxy. It is small, so that tests can fake it.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;
use baton_schemas::embed::EmbedRequest;
use baton_schemas::generate::ChatPrompt;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::machine_models::{ClusterModels, ClusterOrder, ModelTransfer, OrderTaken};
use baton_schemas::node::TokenizeRequest;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use baton_schemas::{GenerateRequest, Token};

use crate::error::RequestError;
use crate::observe::history::HistorySample;
use crate::observe::readiness::Readiness;
use crate::observe::snapshot::EndpointState;
use crate::observe::{ConfigReport, PreviewBusy, ReloadPreview};
use crate::request::caller::Caller;
use crate::request::generate::Generation;
use crate::request::models::{ModelDescription, OfferedModel};
use crate::request::plan::explanation::Explanation;
use crate::targets::Embedded;
use crate::targets::nodes::NodeState;
use crate::usage::{SecretId, UsageFilter, UsageReport, UsageUnreadable};

/// Answers requests for the HTTP surface. Where a model's name is optional, `None` means the first model that the
/// caller may use.
#[async_trait]
pub trait HttpBackend: Send + Sync + 'static {
    /// Admits a request and starts it. Dropping the future or the [`Generation`] cancels the request, so a client that
    /// disconnects frees its slot.
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError>;

    /// Computes embeddings of texts. Dropping the future cancels the rest.
    async fn embed(&self, request: EmbedRequest, caller: &Caller) -> Result<Embedded, RequestError>;

    /// Explains the route that a request would take now, without generating.
    async fn explain(&self, request: GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError>;

    async fn tokenize(
        &self,
        model: Option<&str>,
        text: TokenizeRequest,
        caller: &Caller,
    ) -> Result<Vec<Token>, RequestError>;

    /// Converts tokens to text, control tokens included.
    async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<Token>,
        caller: &Caller,
    ) -> Result<String, RequestError>;

    /// Returns the bytes of each token.
    async fn pieces(
        &self,
        model: Option<&str>,
        tokens: &[Token],
        caller: &Caller,
    ) -> Result<Vec<Vec<u8>>, RequestError>;

    /// Tokens that one sequence can hold, if a node has described the model.
    fn n_ctx(&self, model: Option<&str>, caller: &Caller) -> Option<u32>;

    /// Counts the tokens of a chat's prompt.
    async fn count(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<u32, RequestError>;

    /// Renders a chat's prompt as text, exactly as generation would use it.
    async fn render(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<String, RequestError>;

    /// Lists the models that requests may name, with their current state.
    fn models(&self) -> Vec<OfferedModel>;

    /// Describes a model without loading it. Waits for an engine that is starting. Counts as a request.
    async fn describe(&self, model: Option<&str>, caller: &Caller) -> Result<ModelDescription, RequestError>;

    /// Returns what upstreams report about a model that only they serve.
    async fn describe_upstream(&self, _model: &str, _caller: &Caller) -> Result<UpstreamModelInfo, RequestError> {
        Ok(UpstreamModelInfo::default())
    }

    /// Loads a model and returns when it is loaded. It stays loaded for at least `keep_alive`, if given.
    async fn load(&self, model: &str, _keep_alive: Option<KeepAlive>, caller: &Caller) -> Result<(), RequestError> {
        self.describe(Some(model), caller).await.map(drop)
    }

    /// Unloads a model as soon as nothing uses it. A model that is always loaded stays.
    async fn unload(&self, model: &str, caller: &Caller) -> Result<(), RequestError> {
        self.describe(Some(model), caller).await.map(drop)
    }

    /// Lists the model files of all machines.
    async fn cluster_models(&self) -> ClusterModels {
        ClusterModels::default()
    }

    /// Changes the model files of a machine.
    async fn order_models(&self, _order: ClusterOrder) -> Result<OrderTaken, RequestError> {
        Ok(OrderTaken::default())
    }

    /// Returns true if the endpoint's own machine may have the file of a model of this name.
    async fn has_model_file(&self, _model: &str) -> bool {
        true
    }

    /// Returns the latest transfer of a model to the endpoint's own machine.
    fn model_transfer(&self) -> Option<ModelTransfer> {
        None
    }

    /// Ends the transfer of this number to the endpoint's own machine if it still runs.
    fn cancel_transfer(&self, _number: u64) {}

    /// Returns the endpoint's state. `with_addresses` includes the addresses of its nodes.
    fn state(&self, with_addresses: bool) -> EndpointState;

    /// Returns what the configuration sets.
    fn config(&self) -> ConfigReport {
        ConfigReport::default()
    }

    /// Returns what a reload would change. Errors: the file cannot be read now.
    async fn config_changes(&self) -> Result<ReloadPreview, PreviewBusy> {
        Ok(ReloadPreview::default())
    }

    /// Returns who used what. Errors: the usage cannot be read now.
    async fn usage(&self, _filter: UsageFilter) -> Result<UsageReport, UsageUnreadable> {
        Ok(UsageReport::default())
    }

    /// Returns when each secret was last used, milliseconds since the Unix epoch. Errors: it cannot be read now.
    async fn last_uses(&self) -> Result<HashMap<SecretId, u64>, UsageUnreadable> {
        Ok(HashMap::new())
    }

    /// Returns the samples of the last hour that ended after this time, milliseconds since the Unix epoch.
    fn history(&self, after_ms: u64) -> Vec<HistorySample>;

    /// Writes the text of `/metrics`, in the format of [`crate::observe::metrics::CONTENT_TYPE`].
    fn metrics(&self) -> String;

    /// Counts a reply by its route (the pattern, not the path) and status.
    fn replied(&self, route: &str, status: u16);

    /// Returns whether a request sent now would be answered.
    fn readiness(&self) -> Readiness;

    /// Lists problems that do not stop requests, as sentences that are safe to show to anyone.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Counts the nodes in each state.
    fn node_states(&self) -> BTreeMap<NodeState, usize> {
        BTreeMap::new()
    }
}
