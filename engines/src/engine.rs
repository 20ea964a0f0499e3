//! The interface between everything that asks for tokens and everything that makes them.

use async_trait::async_trait;
use baton_schemas::generate::Conversation;
use baton_schemas::node::{NodeInfo, NodeLoad, TokenizeRequest};
use baton_schemas::{Delta, EngineError, SequenceRequest, Token};
use futures::stream::BoxStream;

/// `Started`, then tokens, then exactly one `Finished` or an error; see [`Delta`].
///
/// Dropping the stream cancels the sequence: the engine frees its slot within one step.
pub type DeltaStream = BoxStream<'static, Result<Delta, EngineError>>;

/// Anything that runs one model.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// What this engine is.
    async fn info(&self) -> Result<NodeInfo, EngineError>;

    /// What it is doing now.
    async fn load(&self) -> Result<NodeLoad, EngineError>;

    /// Renders a conversation with the model's own chat template and tokenizes the result.
    async fn render(&self, conversation: &Conversation) -> Result<Vec<Token>, EngineError>;

    /// Tokenizes plain text.
    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError>;

    /// The text of tokens, control tokens included.
    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError>;

    /// Continues a sequence. Returns once the engine has accepted the request into its bounded queue; what can be
    /// refused up front (a bad token, an overlong prompt, a full queue) is refused here and not in the stream.
    async fn generate(&self, request: SequenceRequest) -> Result<DeltaStream, EngineError>;
}
