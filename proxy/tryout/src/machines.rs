//! Models of machines and links that run Llama-3.1-8B in FP16, from published figures.
//!
//! Prefill rates are those published for this model. A decode step reads all weights and the sequence's KV once, so its
//! rate is usable bandwidth ÷ bytes read; `USABLE` is the only free constant. The bandwidth of the DGX Spark was
//! measured; for Apple's machines only the nominal one is known.

use std::time::Duration;

use baton_engines::sim::link::LinkSpeed;

/// Weights: 8.03 billion parameters of 2 bytes.
pub const WEIGHT_BYTES: f64 = 8.03e9 * 2.0;

/// KV of one token: 32 layers, K and V, 8 heads of 128 values of 2 bytes.
pub const KV_BYTES_PER_TOKEN: u32 = 32 * 2 * 8 * 128 * 2;

/// The share of the bandwidth that a decode step uses. Published decode times give 0.79 for the M3 Ultra and 0.82 for the
/// DGX Spark.
const USABLE: f64 = 0.8;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MachineSpec {
    /// The name in tables.
    pub name: &'static str,
    /// Prompt tokens per second.
    pub prefill_tps: f64,
    /// Memory bandwidth, bytes per second.
    pub bandwidth: f64,
}

/// 5,570 tokens/s published; 231–234 GB/s measured.
pub const DGX_SPARK: MachineSpec = MachineSpec { name: "DGX Spark", prefill_tps: 5_570.0, bandwidth: 232.5e9 };

/// 1,470 tokens/s and 819 GB/s published.
pub const M3_ULTRA: MachineSpec = MachineSpec { name: "M3 Ultra", prefill_tps: 1_470.0, bandwidth: 819e9 };

/// 546 GB/s published. Its prefill rate is an assumption: half of the M3 Ultra's, as it has half the GPU cores.
pub const M4_MAX: MachineSpec = MachineSpec { name: "M4 Max", prefill_tps: 735.0, bandwidth: 546e9 };

/// 614 GB/s published. Its prefill rate follows from 765 tokens/s published for a 27B model, by the number of parameters.
pub const M5_MAX: MachineSpec = MachineSpec { name: "M5 Max", prefill_tps: 2_572.0, bandwidth: 614e9 };

impl MachineSpec {
    /// Tokens per second of one stream alone, with this much context.
    pub fn decode_tps(&self, n_context: u32) -> f64 {
        USABLE * self.bandwidth / (WEIGHT_BYTES + kv_bytes(n_context))
    }
}

/// The share by which one more stream lengthens a decode step: its KV ÷ the bytes that one stream reads.
pub fn sharing_cost(n_context: u32) -> f64 {
    kv_bytes(n_context) / (WEIGHT_BYTES + kv_bytes(n_context))
}

fn kv_bytes(n_context: u32) -> f64 {
    f64::from(n_context) * f64::from(KV_BYTES_PER_TOKEN)
}

/// A link with this rate in gigabits per second.
pub fn link(gbps: f64) -> LinkSpeed {
    LinkSpeed { bytes_per_second: gbps * 1e9 / 8.0, round_trip: Duration::from_micros(300) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_rates_follow_from_bandwidths() {
        let check = |machine: MachineSpec, expected: f64| {
            let rate = machine.decode_tps(8_192);
            assert!((rate / expected - 1.0).abs() < 0.01, "{}: {rate}", machine.name);
        };
        check(DGX_SPARK, 10.86);
        check(M3_ULTRA, 38.24);
        check(M4_MAX, 25.49);
        assert!((0.06..0.07).contains(&sharing_cost(8_192)));
    }
}
