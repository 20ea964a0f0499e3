//! Pulls a prompt's KV from another node.
//!
//! The decode node sends one request to the prefill node and reads a stream of KV chunks, which begins as soon as the
//! first one is computed. KV never passes through the proxy. Dropping the request cancels the prefill.

mod buffers;
pub mod canary;
mod codecs;
mod deadline;
mod draft_nodes;
mod link;
mod peers;
mod policy;
mod puller;
mod read_ahead;
mod receive;
mod sources;

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_schemas::CacheScope;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, KvSource, LinkMeasurement, PrefillRequest, STATE_BPS};
use baton_schemas::image::PromptImages;
use baton_schemas::kv::{KvLayout, LayerNumbers, Places, Span, VerifiedKv, VerifiedState};
use baton_schemas::node::KvIdentity;
use baton_schemas::{EngineError, Token};
use futures::future::BoxFuture;
use tokio::sync::mpsc;

pub use self::buffers::{BufferPool, ChunkBuffers};
use self::canary::ComputedKv;
pub(crate) use self::link::MAX_BYTES as MAX_NOISE_BYTES;
pub use self::policy::{PullPolicy, PullTimeouts};
pub use self::puller::HttpPuller;
pub(crate) use self::read_ahead::READ_DEADLINE;
use crate::drafts::{DraftOrder, RemoteDrafts};
use crate::engine::KvEvent;

/// Chunks that are received ahead of the engine.
pub const PULL_WINDOW: usize = 2;

/// Calls other nodes for an engine: opens pulls, and drafts.
pub trait KvPuller: Send + Sync + 'static {
    /// Sets the engine's own identity and canary. Called once, before the first pull.
    fn introduce(&self, local: LocalKv);

    /// Starts a pull without blocking. The last item is an `End`. Dropping the receiver cancels the pull. `notify` is
    /// called after each item.
    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent>;

    /// Returns true if the operator lets it pull KV of other weights; see [`NodeInfo::takes_other_weights`].
    ///
    /// [`NodeInfo::takes_other_weights`]: baton_schemas::node::NodeInfo::takes_other_weights
    fn takes_other_weights(&self) -> bool {
        false
    }

    /// Lets a draft node follow a sequence, without blocking. `None`: it calls no draft nodes.
    fn drafts(&self, _order: DraftOrder) -> Option<RemoteDrafts> {
        None
    }

    /// Measures the link from a prefill node to this one.
    fn measure_link(&self, source: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>>;
}

/// The engine's own identity and canary, which a peer's are compared with.
#[derive(Debug, Clone)]
pub struct LocalKv {
    /// The vocabulary, weights and KV layout of its model.
    pub identity: KvIdentity,
    /// KV of the identity's canary tokens. Its states are there only if the puller takes KV of other weights.
    pub canary: ComputedKv,
    /// The model's layers behind the layout, for people.
    pub layers: LayerNumbers,
}

/// An order for the KV of positions `[start, tokens.len())`.
pub struct PullOrder {
    /// The prefill node.
    pub source: KvSource,
    /// The prompt's tokens, from position 0 on.
    pub tokens: Vec<Token>,
    /// The images of the placeholders among the tokens, if there are any.
    pub images: Option<PromptImages>,
    /// The first position that the engine lacks.
    pub start: u32,
    /// Positions between `start` and the end at which the engine wants the states, too, ascending.
    pub checkpoints: Vec<u32>,
    /// The scope in which the prefill node may cache the prompt.
    pub cache_scope: CacheScope,
    /// The prompt will not be continued, so that the prefill node does not cache it.
    pub ephemeral: bool,
    /// It gives way to requests on the prefill node, too.
    pub gives_way: bool,
    /// The other node computes nothing: it sends what it holds.
    pub held_only: bool,
    /// No lossy codec is used, whatever the operator allows.
    pub lossless: bool,
    /// Decides where the rows of a chunk lie in its buffer.
    pub placement: Arc<PlaceRows>,
    /// Buffers of earlier chunks, for reuse.
    pub buffers: ChunkBuffers,
}

/// Lays out the buffer of a chunk; see [`Placement`](baton_schemas::kv::Placement).
pub type PlaceRows = dyn Fn(&Span, &KvLayout) -> Places + Send + Sync;

/// A step of a pull. The chunks before a failure are valid; in a model with states, up to the last states.
pub type PullEvent = KvEvent<VerifiedKv, VerifiedState, PullEnd>;

/// How a pull ended.
#[derive(Debug, Clone, Copy)]
pub struct PullEnd {
    /// The report about the prefill node and the link, or only the failure and the received bytes. The engine adds its
    /// own part.
    pub report: HandoffReport,
    /// When the prefill node had computed the last token, on this machine's clock; `None` after a failure.
    pub prefilled_at: Option<Instant>,
}

impl From<HandoffFailure> for PullEnd {
    fn from(failure: HandoffFailure) -> PullEnd {
        PullEnd::failed(failure, 0)
    }
}

impl PullEnd {
    /// The end of a pull that failed after `n_bytes` had come.
    pub fn failed(failure: HandoffFailure, n_bytes: u64) -> PullEnd {
        PullEnd { report: HandoffReport { n_bytes, ..HandoffReport::failed(failure) }, prefilled_at: None }
    }

    /// The report for an engine that had imported all chunks at `imported_at`. The engine adds the numbers that only it
    /// knows.
    pub fn report(self, imported_at: Instant) -> HandoffReport {
        let unhidden = self.prefilled_at.map_or(Duration::ZERO, |at| imported_at.saturating_duration_since(at));
        self.report.with_after_prefill(unhidden.as_secs_f64() * 1e3)
    }
}

/// Checks that an engine with this KV and context can serve a prefill request.
pub fn check(request: &PrefillRequest, local: &KvIdentity, n_ctx: u32) -> Result<(), EngineError> {
    let n_tokens = u32::try_from(request.tokens.len()).unwrap_or(u32::MAX);
    if request.start >= n_tokens {
        let message = format!("KV is wanted from position {} on, and there are {n_tokens} tokens", request.start);
        return Err(EngineError::invalid(message));
    }
    let is_between = |position: &u32| (request.start + 1..n_tokens).contains(position);
    if !request.checkpoints.iter().all(is_between) || !request.checkpoints.is_sorted_by(|a, b| a < b) {
        return Err(EngineError::invalid(
            "checkpoints are not between the first and the last position, in their order",
        ));
    }
    // The whole prompt has one token more, which the decode node computes.
    if n_tokens >= n_ctx {
        return Err(EngineError::ContextOverflow { n_prompt: n_tokens, n_ctx });
    }
    if request.state_bps.is_some_and(|bps| !STATE_BPS.contains(&bps)) {
        return Err(EngineError::invalid("the link's rate is impossible"));
    }
    if request.fingerprint.vocabulary != local.fingerprint.vocabulary {
        return Err(EngineError::invalid("the two nodes run models with different vocabularies"));
    }
    Ok(())
}

/// Implements [`Engine::measure_link`](crate::Engine::measure_link) for an engine with this puller.
pub async fn measure_link(puller: Option<&dyn KvPuller>, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
    let Some(puller) = puller else {
        return Err(EngineError::Unsupported { feature: "pulling from others".into() });
    };
    let measured = puller.measure_link(source).await;
    measured.map_err(|failure| EngineError::Unavailable { reason: failure.as_str().into() })
}
