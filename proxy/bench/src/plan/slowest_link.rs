//! The slowest link on which a handoff pays, with each codec.
//!
//! KV moves at the slower of two rates: encoding, and the link's rate times the codec's ratio. Both are those that a node
//! assumes before it has measured them ([`Codec::typical_effect`]).

use baton_planner::cost::Route;
use baton_proxy::serve::CommandFailure;
use baton_schemas::kv::Codec;
use baton_tryout::machines::link;
use serde::Serialize;

use super::cluster::{Cluster, ClusterSpec};

/// Prompt lengths, tokens.
pub(super) const PROMPTS: [u32; 3] = [1_024, 4_096, 8_192];

/// The context at which decode rates are taken. A single token is generated.
const N_CONTEXT: u32 = 4_096;

/// The slowest and the fastest link that are tried, gigabits per second.
const LINKS: [f64; 2] = [0.01, 100.0];

/// Each halves the range of rates, on a scale of logarithms. The last range is 1 % wide.
const STEPS: u32 = 10;

/// One codec.
#[derive(Debug, Clone, Serialize)]
pub(super) struct SlowestLinkLine {
    pub codec: Codec,
    pub ratio: f64,
    /// For each of [`PROMPTS`]: the slowest link, gigabits per second, on which the first token comes earlier with a
    /// handoff than on the decode machine alone. `None`: on none.
    pub gbps: [Option<f64>; PROMPTS.len()],
}

/// Finds the slowest links between a DGX Spark and an M3 Ultra.
pub(super) async fn run() -> Result<Vec<SlowestLinkLine>, CommandFailure> {
    let mut lines = Vec::new();
    for codec in Codec::OF_ROWS {
        let mut gbps = [None; PROMPTS.len()];
        for (n_prompt, gbps) in PROMPTS.into_iter().zip(&mut gbps) {
            *gbps = slowest(codec, n_prompt).await?;
        }
        lines.push(SlowestLinkLine { codec, ratio: codec.typical_effect().ratio, gbps });
    }
    Ok(lines)
}

async fn slowest(codec: Codec, n_prompt: u32) -> Result<Option<f64>, CommandFailure> {
    let [mut slow, mut fast] = LINKS;
    if !pays(codec, n_prompt, fast).await? {
        return Ok(None);
    }
    for _ in 0..STEPS {
        let middle = (slow * fast).sqrt();
        match pays(codec, n_prompt, middle).await? {
            true => fast = middle,
            false => slow = middle,
        }
    }
    Ok(Some(fast))
}

/// Returns true if the first token comes earlier with a handoff.
async fn pays(codec: Codec, n_prompt: u32, gbps: f64) -> Result<bool, CommandFailure> {
    let effect = codec.typical_effect();
    let mut spec = ClusterSpec::spark_and_mac(N_CONTEXT);
    spec.link = link(gbps);
    // The simulated link carries plain KV, so it gets the rate at which plain KV arrives.
    spec.link.bytes_per_second = (spec.link.bytes_per_second * effect.ratio).min(effect.encode_bps);
    let cluster = Cluster::calibrated(&spec).await?;
    let ttft = async |prefill| {
        let prompt = cluster.fresh_prompt(n_prompt);
        Ok::<_, CommandFailure>(cluster.run_fixed(Route { decode: 0, prefill }, prompt, 1).await?.ttft)
    };
    Ok(ttft(Some(0)).await? < ttft(None).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_smaller_kv_opens_a_slower_link() {
        let [plain, quantized] = [Codec::None, Codec::Kvq].map(|codec| slowest(codec, 8_192));
        let (plain, quantized) = (plain.await.unwrap().unwrap(), quantized.await.unwrap().unwrap());
        // 131,072 bytes a token at 1,470 tokens/s are 1.54 Gb/s, which the wire must exceed.
        assert!((1.5..1.7).contains(&plain), "{plain} Gb/s");
        let times = plain / quantized;
        assert!((times / Codec::Kvq.typical_effect().ratio - 1.0).abs() < 0.05, "{times} times slower");
    }
}
