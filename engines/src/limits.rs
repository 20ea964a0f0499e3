//! What an engine's options may be. The same for every engine, so that a trial with the simulator finds the mistakes
//! that the real one would.

use std::ops::RangeInclusive;

/// Sequences decoded together. llama.cpp aborts the process on a sequence id of 256 and above; some are left for
/// scratch sequences.
pub const SLOTS: RangeInclusive<u32> = 1..=128;

/// Tokens one sequence, or the whole KV cache, may hold. Below, no chat template fits; llama.cpp counts positions in
/// an i32, and some room is left for its padding.
pub const CONTEXT: RangeInclusive<u32> = 64..=2_000_000_000;

/// Tokens of one physical compute batch.
pub const UBATCH: RangeInclusive<u32> = 1..=16_384;

/// Compute threads.
pub const THREADS: RangeInclusive<u32> = 1..=512;

/// Sequences that may wait for a slot.
pub const QUEUED: RangeInclusive<u32> = 1..=65_536;

/// Four streams share a step's weights without slowing each other much on the machines Baton is for.
pub const DEFAULT_SLOTS: u32 = 4;
