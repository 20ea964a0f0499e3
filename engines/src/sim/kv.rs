//! Simulated KV: the values depend on the tokens, so that the receiver can check them.

use std::ops::Range;
use std::sync::Arc;

use baton_link::engine::KvEvent;
use baton_link::handoff::canary::ComputedKv;
use baton_link::handoff::{ChunkBuffers, LocalKv, PullEnd, PullOrder};
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::kv::{
    Chunk, Contiguous, Dtype, Fingerprint, KvLayout, LayerNumbers, LayerRows, LayerShape, Placement, RopePairing, Rows,
    Section, SectionRows, StateKind, StatePart, StateShape,
};
use baton_schemas::node::KvIdentity;
use baton_schemas::{SequenceRequest, Token};
use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{SimConfig, SimState, millis};

/// One layer of K and V, half of a token's bytes each, and a recurrent layer if the model has states.
fn layout(bytes_per_token: u32, state_bytes: u32) -> KvLayout {
    let rows = Rows { dtype: Dtype::F16, n_values: (bytes_per_token / 4).max(1) };
    let layers = vec![LayerShape { k: rows, v: Some(rows) }];
    let state = |kind, n_values| StateShape { kind, values: Rows { dtype: Dtype::F32, n_values } };
    let n_values = state_bytes / 4;
    let convolution = n_values / 8 + 1;
    let states = match n_values {
        0 | 1 => Vec::new(),
        n => vec![state(StateKind::Convolution, convolution), state(StateKind::Recurrence, n - convolution)],
    };
    KvLayout {
        rope: RopePairing::None,
        sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
        states,
    }
}

/// The layout of the chunks, which may carry less than the model's KV.
fn carried(config: &SimConfig) -> KvLayout {
    layout(config.kv_bytes_carried.unwrap_or(config.kv_bytes_per_token), config.state_bytes)
}

/// The identity that a simulator with this configuration reports. The hash of the model's name stands for its weights.
pub(super) fn identity(config: &SimConfig) -> KvIdentity {
    let vocabulary = *blake3::hash(b"baton simulator").as_bytes();
    let weights = *blake3::hash(config.model.as_bytes()).as_bytes();
    let fingerprint = Fingerprint { vocabulary, weights };
    let simulated_bytes = config.kv_bytes_carried.map(|_| config.kv_bytes_per_token);
    let identity = KvIdentity::new(fingerprint, carried(config), (0..16).collect(), None, None);
    KvIdentity { simulated_bytes, ..identity }
}

/// The identity and canary for its puller.
pub(super) fn local(config: &SimConfig) -> LocalKv {
    let identity = identity(config);
    let chunks = vec![chunk(config, &identity.canary, 0..identity.canary.len() as u32)];
    let (early, late) = states(config, &identity.canary);
    let states = early.map(|part| {
        let rest = late.into_iter().flat_map(|part| part.tensors);
        StatePart { tensors: part.tensors.into_iter().chain(rest).collect(), ..part }
    });
    LocalKv { canary: ComputedKv { chunks, states }, identity, layers: LayerNumbers::default() }
}

/// The KV of `positions`, in the layout that chunks carry.
pub(super) fn chunk(config: &SimConfig, tokens: &[Token], positions: Range<u32>) -> Chunk {
    let layout = carried(config);
    let rows = &layout.sections[0].layers[0].k;
    let mut bytes = Vec::with_capacity(positions.len() * rows.bytes());
    for position in positions.clone() {
        let value = value(tokens, position);
        bytes.extend(std::iter::repeat_n(value, rows.n_values as usize).flatten());
    }
    let bytes = Bytes::from(bytes);
    let layers = vec![LayerRows { k: bytes.clone(), v: bytes }];
    let sections = vec![SectionRows { start: positions.start, layers }];
    Chunk { p0: positions.start, p1: positions.end, sections }
}

/// The states after `tokens`, of the convolution and of the recurrence; `None` if the model has none.
pub(super) fn states(config: &SimConfig, tokens: &[Token]) -> (Option<StatePart>, Option<StatePart>) {
    let mut hash = blake3::Hasher::new();
    tokens.iter().for_each(|token| _ = hash.update(&token.to_le_bytes()));
    let mut values = hash.finalize_xof();
    let position = tokens.len() as u32;
    let mut parts = (0..).zip(carried(config).states).map(|(first, state)| {
        let mut bytes = vec![0; state.values.bytes()];
        values.fill(&mut bytes);
        // Small positive numbers.
        bytes.iter_mut().skip(3).step_by(4).for_each(|byte| *byte = 0x3D);
        StatePart { position, first, tensors: vec![bytes.into()] }
    });
    (parts.next(), parts.next())
}

/// The bytes of a small finite f16 that depends on a position and its token.
fn value(tokens: &[Token], position: u32) -> [u8; 2] {
    let token = tokens.get(position as usize).copied().unwrap_or(0);
    let mixed = token.wrapping_mul(31).wrapping_add(position);
    [mixed as u8, 0x20 | (mixed >> 8) as u8 & 0x1F]
}

impl SimState {
    /// Pulls the missing KV of a prompt, if the request names a source. Notifies `begun` once the source has given it a slot. `None`
    /// if there was no pull.
    pub(super) async fn pull(
        &self,
        request: &SequenceRequest,
        wanted: &[Token],
        n_cached: usize,
        begun: &Notify,
    ) -> Option<HandoffReport> {
        let source = request.kv_source.clone().filter(|_| n_cached < wanted.len())?;
        let began = Instant::now();
        let order = PullOrder {
            images: None,
            source,
            tokens: wanted.to_vec(),
            start: n_cached as u32,
            checkpoints: Vec::new(),
            cache_scope: request.cache_scope,
            ephemeral: request.ephemeral,
            gives_way: request.gives_way,
            held_only: request.held_only,
            lossless: request.lossless_kv,
            placement: Arc::new(|span, layout| Contiguous.place(span, layout)),
            buffers: ChunkBuffers::default(),
        };
        let mut pulled = self.puller.as_ref()?.pull(order, Arc::new(|| ()));
        let (early, late) = states(&self.config, wanted);
        let expected: Vec<Bytes> = early.into_iter().chain(late).flat_map(|part| part.tensors).collect();
        let mut n_tokens = 0;
        let mut has_states = expected.is_empty();
        let end = loop {
            match pulled.recv().await {
                Some(KvEvent::Begun) => begun.notify_one(),
                Some(KvEvent::Chunk(kv)) => {
                    let positions = kv.span().p0..kv.span().p1;
                    let n_new = positions.len() as u32;
                    if kv.into_chunk() != chunk(&self.config, wanted, positions) {
                        break HandoffFailure::ImportFailed.into();
                    }
                    n_tokens += n_new;
                }
                Some(KvEvent::End(end)) => break end,
                Some(KvEvent::State(state)) => {
                    if state.tensors() != expected || state.position() as usize != wanted.len() {
                        break HandoffFailure::ImportFailed.into();
                    }
                    has_states = true;
                }
                None => break PullEnd::from(HandoffFailure::PrefillLost),
            }
        };
        let mut report = end.report(Instant::now().into_std());
        if !has_states {
            // Rows without the states after them cannot be continued.
            n_tokens = 0;
            report.failure.get_or_insert(HandoffFailure::ImportFailed);
        }
        Some(HandoffReport { n_tokens, total_ms: millis(began.elapsed()), ..report })
    }
}
