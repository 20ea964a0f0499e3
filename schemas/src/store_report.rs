//! The report of a node's KV store: its content and its counts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The KV that a node keeps outside its slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StoreReport {
    /// Blocks in memory or on disk.
    pub blocks: u64,
    /// Bytes in memory.
    pub memory_bytes: u64,
    /// Bytes on disk, of all models and processes that use the folder; 0 without a disk.
    pub disk_bytes: u64,
    /// Bytes that all processes that use the folder have written today (UTC).
    pub written_today_bytes: u64,
    /// Prompt tokens that came back from memory, since the node's start as all that follows.
    pub memory_tokens: u64,
    /// Prompt tokens that came back from disk.
    pub disk_tokens: u64,
    /// Steps of streams between which tokens of other prompts came back.
    pub shared_steps: u64,
    /// The most tokens that came back between two steps of streams.
    pub most_step_tokens: u64,
    /// Blocks that left memory to make room. Some of them are on disk.
    pub memory_evictions: u64,
    /// Blocks whose files were removed to make room or to clear the store, by any process.
    pub disk_evictions: u64,
    /// Bytes that this node wrote.
    pub written_bytes: u64,
    /// Blocks that could not be written.
    pub failed_writes: u64,
    /// Files that were refused and removed: torn, changed, or of another key.
    pub refused_files: u64,
}
