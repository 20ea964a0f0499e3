//! What the HTTP surface needs from the rest of the proxy, small enough to be faked in a test.

use async_trait::async_trait;
use baton_schemas::GenerateRequest;
use baton_schemas::openai::models::ModelCard;

use crate::error::RequestError;
use crate::generate::{Caller, Generation};
use crate::plan::explanation::Explanation;

/// What generates.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Admits a request and starts it. Dropping the future, or the [`Generation`], cancels it: that is how a client
    /// that leaves frees its slot.
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError>;

    /// What would be done with a request now, and why. Generates nothing.
    async fn explain(&self, request: GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError>;

    /// The models that requests may name.
    fn models(&self) -> Vec<ModelCard>;

    /// Whether a request sent now would be answered.
    fn health(&self) -> Health;
}

/// Whether the endpoint can answer. Reasons are shown to anybody: no paths, no addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// Yes.
    Ok,
    /// Not yet.
    Loading {
        /// What is being waited for.
        reason: String,
    },
    /// No.
    Unavailable {
        /// Why.
        reason: String,
    },
}
