//! Pulling a prompt's KV from another node.
//!
//! The decode node pulls: it opens one request to the prefill node and consumes a stream of KV chunks that starts
//! with the first one computed. KV never passes through the proxy, and dropping the request cancels the prefill.

mod buffers;
pub mod canary;
mod codecs;
mod http;
mod link;
mod patience;
mod peers;
mod policy;
mod receive;

use std::sync::Arc;
use std::time::Instant;

use baton_schemas::handoff::{HandoffFailure, KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::kv::{Chunk, KvLayout, Places, Span, VerifiedKv};
use baton_schemas::node::KvIdentity;
use baton_schemas::sequence::CacheScope;
use baton_schemas::{EngineError, Token};
use futures::future::BoxFuture;
use tokio::sync::mpsc;

pub use self::buffers::Buffers;
pub use self::http::HttpPuller;
pub(crate) use self::link::MAX_BYTES as MAX_NOISE_BYTES;
pub use self::policy::{PullPolicy, PullTimeouts};

/// Chunks that are received ahead of the engine.
pub const PULL_WINDOW: usize = 2;

/// Opens pulls for an engine.
pub trait KvPuller: Send + Sync + 'static {
    /// Tells what the engine runs, once, before the first pull.
    fn introduce(&self, local: LocalKv);

    /// Begins to pull, at once and without waiting. The last item is `End` or `Failed`; dropping the receiver
    /// cancels. `notify` is called after each item.
    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<Pulled>;

    /// Measures the way from a prefill node to here.
    fn measure_link(&self, source: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>>;
}

/// The engine's own side of a comparison.
#[derive(Debug, Clone)]
pub struct LocalKv {
    /// What it runs.
    pub identity: KvIdentity,
    /// KV of the identity's canary tokens.
    pub canary: Chunk,
}

/// What is wanted: the KV of positions `[start, tokens.len())`.
pub struct PullOrder {
    /// From whom.
    pub source: KvSource,
    /// From position 0 on.
    pub tokens: Vec<Token>,
    /// First position that is missing here.
    pub start: u32,
    /// Whose prompt this is.
    pub cache_scope: CacheScope,
    /// Nobody will continue it: the prefill node need not keep it.
    pub ephemeral: bool,
    /// Where the rows of a chunk go in its buffer.
    pub placement: Arc<PlaceRows>,
    /// Buffers of earlier chunks, to be used again.
    pub buffers: Buffers,
}

/// Lays out the buffer that a chunk is received into; see [`Placement`](baton_schemas::kv::Placement).
pub type PlaceRows = dyn Fn(&Span, &KvLayout) -> Places + Send + Sync;

/// A step of a pull.
#[derive(Debug)]
pub enum Pulled {
    /// Verified KV of the next positions.
    Chunk(VerifiedKv),
    /// Everything came.
    End(PullReport),
    /// Nothing more comes. The chunks so far are good.
    Failed(HandoffFailure),
}

/// What a complete pull took.
#[derive(Debug, Clone, Copy)]
pub struct PullReport {
    /// Positions the prefill node had cached.
    pub n_cached: u32,
    /// Positions it computed.
    pub n_computed: u32,
    /// Bytes received.
    pub n_bytes: u64,
    /// Waiting for a slot on the prefill node, ms.
    pub queue_ms: f64,
    /// From its slot to the last token computed, ms.
    pub prefill_ms: f64,
    /// Of that, waiting for this side to take chunks, ms.
    pub stalled_ms: f64,
    /// Of that, this prompt's share of the engine's work, ms.
    pub compute_ms: f64,
    /// From the first byte of the first chunk to the last byte of the last, ms.
    pub transfer_ms: f64,
    /// When the prefill node had computed the last token, on this machine's clock.
    pub prefilled_at: Instant,
}

/// Refuses a prefill request that this engine cannot serve, before it is queued.
pub(crate) fn check(request: &PrefillRequest, local: &KvIdentity, n_ctx: u32) -> Result<(), EngineError> {
    let n_tokens = u32::try_from(request.tokens.len()).unwrap_or(u32::MAX);
    if request.start >= n_tokens {
        let message = format!("KV is wanted from position {} on, and there are {n_tokens} tokens", request.start);
        return Err(EngineError::invalid(message));
    }
    // A whole prompt has one token more, which the decode node computes.
    if n_tokens >= n_ctx {
        return Err(EngineError::ContextOverflow { n_prompt: n_tokens, n_ctx });
    }
    if request.fingerprint.vocabulary != local.fingerprint.vocabulary {
        return Err(EngineError::invalid("the two nodes run models with different vocabularies"));
    }
    Ok(())
}

/// [`Engine::measure_link`](crate::Engine::measure_link) of an engine with this puller.
pub(crate) async fn measure_link(
    puller: Option<&dyn KvPuller>,
    source: &KvSource,
) -> Result<LinkMeasurement, EngineError> {
    let Some(puller) = puller else {
        return Err(EngineError::Unsupported { feature: "pulling from others".into() });
    };
    let measured = puller.measure_link(source).await;
    measured.map_err(|failure| EngineError::Unavailable { reason: failure.as_str().into() })
}
