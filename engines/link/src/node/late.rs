//! A node's engine while its model is loading: the node already listens, and says that the model is loading.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use baton_schemas::embed::EmbedSequences;
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::{KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::held::{HeldDigest, HeldKey};
use baton_schemas::node::{NodeInfo, NodeLoad, PairRequest, Phase, TokenizeRequest};
use baton_schemas::{CacheScope, EngineError, KeyTag, SequenceRequest, Token};

use crate::engine::{EmbedStream, Engine, KvStream, LoadStream, SequenceStream};
use crate::no_sleep::awake_during;

/// Stands in for an engine that is still loading: reports its load and refuses all other calls. Once the engine is set,
/// all calls go to it.
#[derive(Clone, Default)]
pub struct LateEngine(Arc<OnceLock<Arc<dyn Engine>>>);

impl LateEngine {
    /// Sets the engine. Only the first call has an effect.
    pub fn set(&self, engine: Arc<dyn Engine>) {
        if self.0.set(engine).is_err() {
            tracing::error!("a node was given a second engine; the first one keeps serving");
        }
    }

    fn get(&self) -> Result<&dyn Engine, EngineError> {
        let loading = || EngineError::Unavailable { reason: "the model is loading".into() };
        self.0.get().map(|engine| &**engine).ok_or_else(loading)
    }
}

#[async_trait]
impl Engine for LateEngine {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        self.get()?.info().await
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        match self.get() {
            Ok(engine) => engine.load().await,
            Err(_) => Ok(NodeLoad { phase: Phase::Starting, ..NodeLoad::default() }),
        }
    }

    async fn loads(&self) -> Result<LoadStream, EngineError> {
        self.get()?.loads().await
    }

    async fn held(&self, key: &HeldKey) -> Result<HeldDigest, EngineError> {
        self.get()?.held(key).await
    }

    async fn render(&self, conversation: &Conversation, key: KeyTag) -> Result<Vec<Token>, EngineError> {
        self.get()?.render(conversation, key).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.get()?.tokenize(request).await
    }

    async fn pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        self.get()?.pair(request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        self.get()?.detokenize(tokens).await
    }

    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        self.get()?.pieces(tokens).await
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        Ok(awake_during(self.get()?.generate(request).await?))
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        Ok(awake_during(self.get()?.embed(request).await?))
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        Ok(awake_during(self.get()?.prefill(request).await?))
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        self.get()?.measure_link(source).await
    }

    async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
        self.get()?.forget(scopes).await
    }
}
