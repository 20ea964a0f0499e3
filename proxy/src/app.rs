//! What the HTTP surface calls: the pieces of a running endpoint, joined.

use std::time::UNIX_EPOCH;

use async_trait::async_trait;
use baton_schemas::GenerateRequest;
use baton_schemas::openai::models::ModelCard;

use crate::admission::Admission;
use crate::error::RequestError;
use crate::generate::{self, Caller, Generation};
use crate::http::{Backend, Health};
use crate::plan::explanation::Explanation;
use crate::pool::{EngineState, Pool};

/// A running endpoint.
pub struct App {
    /// The door.
    pub admission: Admission,
    /// The models and their engines.
    pub pool: Pool,
}

#[async_trait]
impl Backend for App {
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError> {
        generate::generate(&self.admission, &self.pool, request, &caller).await
    }

    async fn explain(&self, request: GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError> {
        generate::explain(&self.admission, &self.pool, &request, caller).await
    }

    fn models(&self) -> Vec<ModelCard> {
        let card = |name: &str, since: std::time::SystemTime| {
            let created = since.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
            ModelCard::new(name, created)
        };
        self.pool.models.iter().flat_map(|model| model.names().map(|name| card(name, model.since))).collect()
    }

    /// The endpoint is well if every model could answer.
    fn health(&self) -> Health {
        for model in &self.pool.models {
            if model.decode.iter().any(|node| node.info().is_some()) {
                continue;
            }
            for node in &model.decode {
                match &*node.state.borrow() {
                    EngineState::Ready(_) => {}
                    EngineState::Starting => return Health::Loading { reason: "the model is loading".into() },
                    EngineState::Failed { reason, .. } => return Health::Unavailable { reason: reason.clone() },
                }
            }
        }
        Health::Ok
    }
}
