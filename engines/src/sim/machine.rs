//! The engine and the link of a machine that a node's process simulates.

use std::time::Duration;

use super::SimConfig;
use super::link::LinkSpeed;
use crate::engine_options::SimMachine;

/// Bytes of KV that a frame really carries for each token: enough to check that the KV is the right one.
const CARRIED_BYTES: u32 = 64;

/// Prompt tokens of a chunk, as in the benchmarks.
const CHUNK_TOKENS: u32 = 512;

impl SimMachine {
    /// The speed of its link.
    pub(super) fn link(&self) -> LinkSpeed {
        let round_trip = Duration::from_secs_f64(self.link_round_trip_ms / 1e3);
        LinkSpeed { bytes_per_second: self.link_bytes_per_second, round_trip }
    }

    /// The engine's configuration with this machine's speeds.
    pub(crate) fn configure(&self, config: SimConfig) -> SimConfig {
        SimConfig {
            prefill_tps: self.prefill_tps,
            decode_tps: self.decode_tps,
            decode_sharing_cost: self.decode_sharing_cost,
            chunk_tokens: CHUNK_TOKENS,
            kv_bytes_per_token: self.kv_bytes_per_token,
            kv_bytes_carried: Some(CARRIED_BYTES.min(self.kv_bytes_per_token)),
            device: format!("{}, simulated", self.name),
            ..config
        }
    }
}
