//! An engine that counts what it computes for others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use baton_engines::engine::{KvEvent, KvStream};
use baton_engines::{DeltaStream, Engine};
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::PrefillRequest;
use baton_schemas::node::{NodeInfo, NodeLoad, TokenizeRequest};
use baton_schemas::{EngineError, SequenceRequest, Token};
use futures::StreamExt;

/// Passes everything on.
pub struct Counting {
    inner: Arc<dyn Engine>,
    n_positions: Arc<AtomicU64>,
}

impl Counting {
    pub fn new(inner: Arc<dyn Engine>) -> Counting {
        Counting { inner, n_positions: Arc::default() }
    }

    /// Positions handed over, or on their way, since the start.
    pub fn n_positions(&self) -> u64 {
        self.n_positions.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl Engine for Counting {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        self.inner.info().await
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        self.inner.load().await
    }

    async fn render(&self, conversation: &Conversation) -> Result<Vec<Token>, EngineError> {
        self.inner.render(conversation).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.inner.tokenize(request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        self.inner.detokenize(tokens).await
    }

    async fn generate(&self, request: SequenceRequest) -> Result<DeltaStream, EngineError> {
        self.inner.generate(request).await
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        let n_positions = Arc::clone(&self.n_positions);
        let events = self.inner.prefill(request).await?;
        let counted = events.inspect(move |event| {
            if let Ok(KvEvent::Chunk(chunk)) = event {
                n_positions.fetch_add(u64::from(chunk.p1 - chunk.p0), Ordering::Relaxed);
            }
        });
        Ok(counted.boxed())
    }
}
