//! A node's engine while its model is loading: the node already listens, and says that the model is loading.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use baton_schemas::embed::EmbedSequences;
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::{KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::held::{HeldDigest, HeldKey};
use baton_schemas::node::{NodeInfo, NodeLoad, PairRequest, Phase, TokenizeRequest};
use baton_schemas::{CacheScope, EngineError, KeyTag, SequenceRequest, Token};
use futures::stream::BoxStream;

use super::requests::{NodeRequest, NodeRequests};
use crate::engine::{EmbedStream, Engine, KvStream, LoadStream, SequenceStream};
use crate::no_sleep::awake_during;

/// Stands in for an engine that is still loading: reports its load and refuses all other calls. Once the engine is set,
/// all calls go to it.
#[derive(Clone, Default)]
pub struct LateEngine {
    engine: Arc<OnceLock<Arc<dyn Engine>>>,
    requests: NodeRequests,
}

impl LateEngine {
    /// Sets the engine. Only the first call has an effect.
    pub fn set(&self, engine: Arc<dyn Engine>) {
        if self.engine.set(engine).is_err() {
            tracing::error!("a node was given a second engine; the first one keeps serving");
        }
    }

    /// The requests that come to it.
    pub fn requests(&self) -> &NodeRequests {
        &self.requests
    }

    fn get(&self) -> Result<&dyn Engine, EngineError> {
        let loading = || EngineError::Unavailable { reason: "the model is loading".into() };
        self.engine.get().map(|engine| &**engine).ok_or_else(loading)
    }
}

/// The stream of a call, which keeps the machine awake and its request open.
fn during<T: 'static>(open: NodeRequest, stream: BoxStream<'static, T>) -> BoxStream<'static, T> {
    open.during(awake_during(stream))
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
        let _open = self.requests.begin();
        self.get()?.render(conversation, key).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        let _open = self.requests.begin();
        self.get()?.tokenize(request).await
    }

    async fn pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        let _open = self.requests.begin();
        self.get()?.pair(request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        let _open = self.requests.begin();
        self.get()?.detokenize(tokens).await
    }

    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        let _open = self.requests.begin();
        self.get()?.pieces(tokens).await
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let open = self.requests.begin_with(request.gives_way);
        Ok(during(open, self.get()?.generate(request).await?))
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        let open = self.requests.begin();
        Ok(during(open, self.get()?.embed(request).await?))
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        let open = self.requests.begin_with(request.gives_way);
        Ok(during(open, self.get()?.prefill(request).await?))
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        self.get()?.measure_link(source).await
    }

    async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
        self.get()?.forget(scopes).await
    }

    async fn store_kv(&self) {
        // While the model is loading, there is none.
        if let Ok(engine) = self.get() {
            engine.store_kv().await;
        }
    }
}
