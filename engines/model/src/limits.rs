//! The valid ranges of engine options. All engines share them, so that a trial run with the simulator finds the same
//! mistakes as one with a real model.

use std::ops::RangeInclusive;

/// Sequences decoded together. llama.cpp aborts the process on a sequence id of 256 and above; some ids are reserved
/// for scratch sequences.
pub const SLOTS: RangeInclusive<u32> = 1..=128;

/// Tokens that one sequence, or the whole KV cache, may hold. A smaller context fits no chat template; llama.cpp counts
/// positions in an i32, and the upper limit leaves room for its padding.
pub const CONTEXT: RangeInclusive<u32> = 64..=2_000_000_000;

/// Tokens of one physical compute batch.
pub const UBATCH: RangeInclusive<u32> = 1..=16_384;

pub const THREADS: RangeInclusive<u32> = 1..=512;

/// Sequences that may wait for a slot.
pub const QUEUED: RangeInclusive<u32> = 1..=65_536;

/// Layers of a model; llama.cpp's own limit.
pub const LAYERS: RangeInclusive<u32> = 0..=512;

/// Tokens of one physical compute batch: llama.cpp's own default.
pub const DEFAULT_UBATCH: u32 = 512;

/// The same with workers: smaller batches keep more of a pipeline busy (docs/results/engines.md).
pub const WORKERS_UBATCH: u32 = 256;

/// The same if a worker computes on its processor, which with one thread is as fast with so few.
pub const PROCESSORS_UBATCH: u32 = 64;

/// In a longer queue, most clients would give up before their turn.
pub const DEFAULT_MAX_QUEUED: u32 = 256;

/// Errors, in words: the value of an option is out of its range.
pub fn within(option: &str, value: u32, range: RangeInclusive<u32>) -> Result<(), String> {
    let (min, max) = (range.start(), range.end());
    let wrong = || format!("{option} must be between {min} and {max}, not {value}");
    range.contains(&value).then_some(()).ok_or_else(wrong)
}

/// Four streams share a step's weights without slowing each other much on the machines Baton is for.
pub const DEFAULT_SLOTS: u32 = 4;
