//! Engines for tests: one that replaces some calls of another engine, and one that fails every call.

use async_trait::async_trait;
use baton_schemas::embed::EmbedSequences;
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::{KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::held::{HeldDigest, HeldKey};
use baton_schemas::node::{NodeInfo, NodeLoad, PairRequest, TokenizeRequest};
use baton_schemas::{CacheScope, EngineError, KeyTag, SequenceRequest, Token};

use crate::engine::{EmbedStream, Engine, KvStream, LoadStream, SequenceStream};

/// An engine around another one. Methods that an implementation leaves out call [`EngineWrapper::inner`].
#[async_trait]
pub trait EngineWrapper: Send + Sync + 'static {
    fn inner(&self) -> &dyn Engine;

    /// See [`Engine::info`].
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        self.inner().info().await
    }

    /// See [`Engine::load`].
    async fn load(&self) -> Result<NodeLoad, EngineError> {
        self.inner().load().await
    }

    /// See [`Engine::loads`].
    async fn loads(&self) -> Result<LoadStream, EngineError> {
        self.inner().loads().await
    }

    /// See [`Engine::held`].
    async fn held(&self, key: &HeldKey) -> Result<HeldDigest, EngineError> {
        self.inner().held(key).await
    }

    /// See [`Engine::render`].
    async fn render(&self, conversation: &Conversation, key: KeyTag) -> Result<Vec<Token>, EngineError> {
        self.inner().render(conversation, key).await
    }

    /// See [`Engine::tokenize`].
    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.inner().tokenize(request).await
    }

    /// See [`Engine::pair`].
    async fn pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        self.inner().pair(request).await
    }

    /// See [`Engine::detokenize`].
    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        self.inner().detokenize(tokens).await
    }

    /// See [`Engine::pieces`].
    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        self.inner().pieces(tokens).await
    }

    /// See [`Engine::generate`].
    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.inner().generate(request).await
    }

    /// See [`Engine::embed`].
    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        self.inner().embed(request).await
    }

    /// See [`Engine::prefill`].
    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        self.inner().prefill(request).await
    }

    /// See [`Engine::measure_link`].
    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        self.inner().measure_link(source).await
    }

    /// See [`Engine::forget`].
    async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
        self.inner().forget(scopes).await
    }

    /// See [`Engine::store_kv`].
    async fn store_kv(&self) {
        self.inner().store_kv().await;
    }
}

#[async_trait]
impl<W: EngineWrapper> Engine for W {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        EngineWrapper::info(self).await
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        EngineWrapper::load(self).await
    }

    async fn loads(&self) -> Result<LoadStream, EngineError> {
        EngineWrapper::loads(self).await
    }

    async fn held(&self, key: &HeldKey) -> Result<HeldDigest, EngineError> {
        EngineWrapper::held(self, key).await
    }

    async fn render(&self, conversation: &Conversation, key: KeyTag) -> Result<Vec<Token>, EngineError> {
        EngineWrapper::render(self, conversation, key).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        EngineWrapper::tokenize(self, request).await
    }

    async fn pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        EngineWrapper::pair(self, request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        EngineWrapper::detokenize(self, tokens).await
    }

    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        EngineWrapper::pieces(self, tokens).await
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        EngineWrapper::generate(self, request).await
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        EngineWrapper::embed(self, request).await
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        EngineWrapper::prefill(self, request).await
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        EngineWrapper::measure_link(self, source).await
    }

    async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
        EngineWrapper::forget(self, scopes).await
    }

    async fn store_kv(&self) {
        EngineWrapper::store_kv(self).await;
    }
}

/// An engine that fails every call. A test wraps it to show that only the methods it replaces are called.
#[derive(Debug, Clone, Copy)]
pub struct UnusedEngine;

impl UnusedEngine {
    fn called<T>() -> Result<T, EngineError> {
        Err(EngineError::internal("this test does not expect the call"))
    }
}

#[async_trait]
impl Engine for UnusedEngine {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        Self::called()
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        Self::called()
    }

    async fn render(&self, _: &Conversation, _: KeyTag) -> Result<Vec<Token>, EngineError> {
        Self::called()
    }

    async fn tokenize(&self, _: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        Self::called()
    }

    async fn detokenize(&self, _: &[Token]) -> Result<String, EngineError> {
        Self::called()
    }

    async fn pieces(&self, _: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        Self::called()
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        Self::called()
    }
}
