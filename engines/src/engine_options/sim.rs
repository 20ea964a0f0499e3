//! What a simulated engine is told for tests and for `baton demo --simulate`: a fault, and the machine that it stands for.

use serde::{Deserialize, Serialize};

/// The variable that sets the fault of an engine's process; see [`SimAbort::parse`].
pub const ABORT_VARIABLE: &str = "BATON_SIM_ABORT";

/// The longest name of a device.
const MAX_NAME_BYTES: usize = 100;

/// KV of the largest models is some megabytes for each token.
const MAX_KV_BYTES: u32 = 64 << 20;

/// Aborts the process during this work on a text that contains `text`, as a real engine does on a bug in C++.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimAbort {
    pub during: SimWork,
    pub text: String,
}

/// Some work of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum SimWork {
    /// Rendering and tokenizing.
    Tokenize,
    /// Computing a prompt, for itself or for another node.
    Prefill,
    /// Generating, after some tokens.
    Decode,
    /// Computing vectors.
    Embed,
}

impl SimWork {
    const ALL: [SimWork; 4] = [SimWork::Tokenize, SimWork::Prefill, SimWork::Decode, SimWork::Embed];

    fn as_str(self) -> &'static str {
        self.into()
    }
}

impl SimAbort {
    /// Parses `WORK:TEXT`, with a word of [`SimWork`]. Errors: what is wrong.
    pub fn parse(value: &str) -> Result<SimAbort, String> {
        let (word, text) = value.split_once(':').filter(|(_, text)| !text.is_empty()).ok_or("must be WORK:TEXT")?;
        let during = SimWork::ALL.into_iter().find(|work| work.as_str() == word).ok_or_else(|| {
            let known = SimWork::ALL.map(SimWork::as_str).join(", ");
            format!("unknown work {word:?}; must be one of {known}")
        })?;
        Ok(SimAbort { during, text: text.to_owned() })
    }
}

/// A simulated machine: its speeds, and the link by which it fetches KV.
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
        machine.check()?;
        Ok(machine)
    }

    /// Errors, in words: a value is out of range.
    pub fn check(&self) -> Result<(), &'static str> {
        let is_rate = |rate: f64| rate > 0.0 && rate <= 1e15;
        if ![self.prefill_tps, self.decode_tps, self.link_bytes_per_second].into_iter().all(is_rate) {
            return Err("rates must be above 0");
        }
        if !(0.0..=1e3).contains(&self.decode_sharing_cost) || !(0.0..=1e4).contains(&self.link_round_trip_ms) {
            return Err("decode_sharing_cost and link_round_trip_ms must be 0 or more");
        }
        if self.name.len() > MAX_NAME_BYTES || !(4..=MAX_KV_BYTES).contains(&self.kv_bytes_per_token) {
            return Err("the name or kv_bytes_per_token is out of range");
        }
        Ok(())
    }

    /// The value that [`SimMachine::parse`] reads.
    pub fn to_value(&self) -> String {
        // A struct of numbers and a text always has a JSON form.
        serde_json::to_string(self).unwrap_or_default()
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
