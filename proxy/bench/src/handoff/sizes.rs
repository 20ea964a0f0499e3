//! The sizes of a handoff's measurements.

use std::time::Duration;

/// The sizes of the measurements, in tokens.
#[derive(Debug, Clone)]
pub(super) struct HandoffSizes {
    pub(super) lengths: Vec<usize>,
    pub(super) rounds: u32,
    pub(super) time_per_length: Duration,
    /// The prompt that is handed over while streams run.
    pub(super) joining: usize,
    /// The long prompt: short prompts arrive after it, and its KV is moved to measure the wire.
    pub(super) long: usize,
    /// New tokens of each running stream.
    pub(super) stream: u32,
}
