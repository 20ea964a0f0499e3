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
use std::time::{Duration, Instant};

use baton_schemas::CacheScope;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::kv::{Chunk, KvLayout, Places, Span, VerifiedKv};
use baton_schemas::node::KvIdentity;
use baton_schemas::{EngineError, Token};
use futures::future::BoxFuture;
use tokio::sync::mpsc;

pub use self::buffers::ChunkBuffers;
pub use self::http::HttpPuller;
pub(crate) use self::link::MAX_BYTES as MAX_NOISE_BYTES;
pub use self::policy::{PullPolicy, PullTimeouts};
use crate::engine::KvEvent;

/// Chunks that are received ahead of the engine.
pub const PULL_WINDOW: usize = 2;

/// Opens pulls for an engine.
pub trait KvPuller: Send + Sync + 'static {
    /// Tells what the engine runs, once, before the first pull.
    fn introduce(&self, local: LocalKv);

    /// Begins to pull, at once and without waiting. The last item is an `End`; dropping the receiver
    /// cancels. `notify` is called after each item.
    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent>;

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
    pub buffers: ChunkBuffers,
}

/// Lays out the buffer that a chunk is received into; see [`Placement`](baton_schemas::kv::Placement).
pub type PlaceRows = dyn Fn(&Span, &KvLayout) -> Places + Send + Sync;

/// A step of a pull. The chunks before a failure are good.
pub type PullEvent = KvEvent<VerifiedKv, PullEnd>;

/// How a pull ended.
#[derive(Debug, Clone, Copy)]
pub struct PullEnd {
    /// What the prefill node and the link did, or the failure alone. The engine adds its own part.
    pub report: HandoffReport,
    /// When the prefill node had computed the last token, on this machine's clock; `None` after a failure.
    pub prefilled_at: Option<Instant>,
}

impl From<HandoffFailure> for PullEnd {
    fn from(failure: HandoffFailure) -> PullEnd {
        PullEnd { report: HandoffReport::failed(failure), prefilled_at: None }
    }
}

impl PullEnd {
    /// The whole handoff's report, for an engine that had taken in everything at `imported_at`. The engine fills in what
    /// it counted itself.
    pub fn report(self, imported_at: Instant) -> HandoffReport {
        let unhidden = self.prefilled_at.map_or(Duration::ZERO, |at| imported_at.saturating_duration_since(at));
        self.report.with_unhidden(unhidden.as_secs_f64() * 1e3)
    }
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
