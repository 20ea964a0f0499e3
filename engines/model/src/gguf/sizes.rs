//! Chooses the sizes of an engine's context and cache and estimates its memory, from the header alone.

use super::Gguf;
use super::kv_shape::{CELL_ALIGNMENT, Sequences};
use crate::limits;
use crate::options::CacheTypes;

/// The sizes that an operator configured. `None`: not configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeOptions {
    /// Tokens one sequence may hold.
    pub n_ctx: Option<u32>,
    /// Cells of the cache, for all sequences together.
    pub n_cells: Option<u32>,
    /// Sequences decoded together.
    pub n_slots: u32,
    /// All sequences of the engine's memory.
    pub sequences: Sequences,
    /// The types of K and V in the cache.
    pub cache_types: CacheTypes,
    /// Memory of the files beside the model.
    pub companions: CompanionMemory,
}

/// Memory of what stands beside a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CompanionMemory {
    /// Bytes, however large the model's cache is.
    pub fixed: u64,
    /// Bytes for each cell of the model's cache: the draft model has as many.
    pub per_cell: u64,
}

impl CompanionMemory {
    pub const NONE: CompanionMemory = CompanionMemory::fixed(0);

    /// The same bytes for each size of the cache.
    pub const fn fixed(bytes: u64) -> CompanionMemory {
        CompanionMemory { fixed: bytes, per_cell: 0 }
    }

    /// The memory of both.
    pub fn and(self, other: CompanionMemory) -> CompanionMemory {
        CompanionMemory {
            fixed: self.fixed.saturating_add(other.fixed),
            per_cell: self.per_cell.saturating_add(other.per_cell),
        }
    }
}

/// Sizes of an engine's context and cache, and the memory they need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelSizes {
    /// Tokens one sequence may hold.
    pub n_ctx: u32,
    /// Cells of the unified cache.
    pub n_cells: u32,
    /// Bytes of KV for each token, in the types of the cache.
    pub kv_bytes_per_token: u64,
    /// Bytes of the cache, of the states of all sequences, and of the caches of the draft model and of the model's own head.
    pub cache_bytes: u64,
    /// Estimated bytes of weights, KV cache, states and compute buffers.
    pub memory_bytes: u64,
    /// Tokens that can be taken back of each sequence's states.
    pub n_rollback: u32,
}

/// Why no sizes can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// An option is out of range.
    #[error("{0}")]
    OutOfRange(String),
    /// The model does not fit into memory.
    #[error(
        "with {n_cells} tokens of KV cache it needs about {} MiB, and {} MiB are available",
        needed_bytes >> 20,
        available_bytes >> 20
    )]
    TooLarge {
        /// Cells of the KV cache.
        n_cells: u32,
        /// Estimated bytes of weights, KV cache, states and compute buffers.
        needed_bytes: u64,
        available_bytes: u64,
    },
}

/// Default contexts of a sequence, the longest first, each with the share of memory that its cache may take: that part of
/// what the weights leave. The first prompt of an agent has over 20,000 tokens, so 32,768 may take half; longer contexts
/// leave room for other programs. If none fits, the context is [`SHORT_CTX`] or less.
const DEFAULT_CONTEXTS: [(u32, u64); 3] = [(131_072, 4), (65_536, 4), (32_768, 2)];

/// The default context where memory is short, tokens: 2 GiB of KV on an 8B model. It shrinks to fit.
const SHORT_CTX: u32 = 16_384;

/// Cells for each slot in the default cache. Slots share them, so one long sequence may use the cells of others.
const DEFAULT_CELLS_PER_SLOT: u32 = 4_096;

/// Memory for llama.cpp's compute buffers, bytes: their order of magnitude for a small model.
pub const COMPUTE_RESERVE: u64 = 256 << 20;

const MIN_CTX: u32 = *limits::CONTEXT.start();
const MAX_CTX: u32 = *limits::CONTEXT.end();

impl ModelSizes {
    /// Chooses sizes for `available` bytes of memory. A default shrinks to fit; a configured size does not.
    pub fn choose(gguf: &Gguf, options: SizeOptions, available: u64) -> Result<ModelSizes, SizeError> {
        gguf.check_cache_types(options.cache_types).map_err(SizeError::OutOfRange)?;
        let n_ctx_train = gguf.context_length().and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
        let n_ctx_train = n_ctx_train.unwrap_or(SHORT_CTX);
        // Encoders have no KV cache.
        let described = gguf.kv_shape().filter(|_| gguf.generates());
        let CompanionMemory { fixed, per_cell } = options.companions;
        let kv_bytes = |cells: u32| {
            let of_model =
                described.as_ref().map_or(0, |shape| shape.n_bytes(options.cache_types, cells, options.sequences));
            of_model.saturating_add(per_cell.saturating_mul(cells.into()))
        };
        let without_kv = gguf.files.n_bytes().saturating_add(fixed).saturating_add(COMPUTE_RESERVE);
        let needed = |cells: u32| without_kv.saturating_add(kv_bytes(cells));
        // All slots share the cells, so the cache holds one whole context, and not one for each slot.
        let cells_for = |n_ctx: u32| {
            let of_slots = options.n_slots.saturating_mul(DEFAULT_CELLS_PER_SLOT);
            let wanted = options.n_cells.unwrap_or_else(|| n_ctx.max(of_slots));
            wanted.max(n_ctx).next_multiple_of(CELL_ALIGNMENT)
        };
        let default_ctx = || {
            // States take the same memory, however long the context is.
            let left = available.saturating_sub(needed(0));
            let is_known = described.is_some() || !gguf.generates();
            let fits = |&&(n_ctx, share): &&(u32, u64)| {
                // Configured cells are paid for, whatever the context.
                let of_cells = || kv_bytes(cells_for(n_ctx.min(n_ctx_train))) - kv_bytes(0);
                options.n_cells.is_some() || is_known && of_cells() <= left / share
            };
            let longest = DEFAULT_CONTEXTS.iter().find(fits).map_or(SHORT_CTX, |&(n_ctx, _)| n_ctx);
            longest.min(n_ctx_train).min(options.n_cells.unwrap_or(MAX_CTX)).max(MIN_CTX)
        };
        let mut n_ctx = options.n_ctx.unwrap_or_else(default_ctx);
        if !(MIN_CTX..=MAX_CTX).contains(&n_ctx) {
            let message = format!("--ctx-size must be between {MIN_CTX} and {MAX_CTX}, not {n_ctx}");
            return Err(SizeError::OutOfRange(message));
        }
        if let Some(n_cells) = options.n_cells.filter(|n| !(n_ctx..=MAX_CTX).contains(n)) {
            let message = format!("--kv-cells must be between the context's {n_ctx} and {MAX_CTX}, not {n_cells}");
            return Err(SizeError::OutOfRange(message));
        }
        let mut n_cells = cells_for(n_ctx);
        if options.n_ctx.is_none() && options.n_cells.is_none() {
            while needed(n_cells) > available && n_cells > 2 * MIN_CTX.max(CELL_ALIGNMENT) {
                n_cells = (n_cells / 2).next_multiple_of(CELL_ALIGNMENT);
            }
            n_ctx = n_ctx.min(n_cells);
        }
        match needed(n_cells) {
            memory_bytes if memory_bytes <= available => {
                let kv_bytes_per_token =
                    described.as_ref().map_or(0, |shape| shape.bytes_per_token(options.cache_types));
                let cache_bytes = kv_bytes(n_cells);
                let n_rollback = options.sequences.n_rollback;
                Ok(ModelSizes { n_ctx, n_cells, kv_bytes_per_token, cache_bytes, memory_bytes, n_rollback })
            }
            needed_bytes => Err(SizeError::TooLarge { n_cells, needed_bytes, available_bytes: available }),
        }
    }
}
