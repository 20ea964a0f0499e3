//! A machine that a node's process simulates: its speeds, and the link by which it fetches KV.
//!
//! `baton demo --simulate` gives it to `baton node` as one option, in JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::SimConfig;
use super::link::LinkSpeed;

/// Bytes of KV that a frame really carries for each token: enough to check that the KV is the right one.
const CARRIED_BYTES: u32 = 64;

/// Prompt tokens of a chunk, as in the benchmarks.
const CHUNK_TOKENS: u32 = 512;

/// The longest name of a device.
const MAX_NAME_BYTES: usize = 100;

/// KV of the largest models is some megabytes for each token.
const MAX_KV_BYTES: u32 = 64 << 20;

/// A simulated machine and its link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimMachine {
    /// What it is, for people.
    pub name: String,
    /// Prompt tokens per second.
    pub prefill_tps: f64,
    /// Tokens per second of one stream.
    pub decode_tps: f64,
    /// The share by which each further stream makes a decode step longer.
    pub decode_sharing_cost: f64,
    /// Bytes of KV of the simulated model for each token.
    pub kv_bytes_per_token: u32,
    /// The rate at which it fetches KV.
    pub link_bytes_per_second: f64,
    /// The time of a small message to the other machines and back, milliseconds.
    pub link_round_trip_ms: f64,
}

impl SimMachine {
    /// Parses the JSON that [`SimMachine::to_value`] writes. Errors: what is wrong.
    pub fn parse(value: &str) -> Result<SimMachine, String> {
        let machine: SimMachine = serde_json::from_str(value).map_err(|error| error.to_string())?;
        let is_rate = |rate: f64| rate > 0.0 && rate <= 1e15;
        let rates = [machine.prefill_tps, machine.decode_tps, machine.link_bytes_per_second];
        if !rates.into_iter().all(is_rate) {
            return Err("rates must be above 0".into());
        }
        if !(0.0..=1e3).contains(&machine.decode_sharing_cost) || !(0.0..=1e4).contains(&machine.link_round_trip_ms) {
            return Err("decode_sharing_cost and link_round_trip_ms must be 0 or more".into());
        }
        if machine.name.len() > MAX_NAME_BYTES || !(4..=MAX_KV_BYTES).contains(&machine.kv_bytes_per_token) {
            return Err("the name or kv_bytes_per_token is out of range".into());
        }
        Ok(machine)
    }

    /// The value that [`SimMachine::parse`] reads.
    pub fn to_value(&self) -> String {
        // A struct of numbers and a text always has a JSON form.
        serde_json::to_string(self).unwrap_or_default()
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_read_as_it_was_written_and_checked() {
        let machine = SimMachine {
            name: "M3 Ultra".into(),
            prefill_tps: 1_470.0,
            decode_tps: 38.2,
            decode_sharing_cost: 0.06,
            kv_bytes_per_token: 131_072,
            link_bytes_per_second: 1.25e9,
            link_round_trip_ms: 0.3,
        };
        assert_eq!(SimMachine::parse(&machine.to_value()), Ok(machine.clone()));
        let refused = |machine: SimMachine| SimMachine::parse(&machine.to_value()).is_err();
        assert!(refused(SimMachine { prefill_tps: 0.0, ..machine.clone() }));
        assert!(refused(SimMachine { decode_sharing_cost: -1.0, ..machine.clone() }));
        assert!(refused(SimMachine { link_bytes_per_second: f64::INFINITY, ..machine.clone() }));
        assert!(refused(SimMachine { kv_bytes_per_token: 0, ..machine }));
        assert!(SimMachine::parse("{}").is_err() && SimMachine::parse("").is_err());
    }
}
