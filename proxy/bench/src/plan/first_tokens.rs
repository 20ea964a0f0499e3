//! The first token of long prompts on a simulated machine, with their KV from each place where it can be.

use baton_engines::sim::SimTier;
use baton_planner::cost::Route;
use baton_proxy::serve::CommandFailure;
use baton_tryout::machines::KV_BYTES_PER_TOKEN;
use serde::Serialize;

use super::cluster::{Cluster, ClusterSpec};

/// Prompt tokens.
const LENGTHS: [u32; 5] = [4_000, 8_000, 16_000, 32_000, 64_000];

/// Bytes a second from memory and from a cold disk, as `baton-bench kv-store` measured them with 4,000 tokens of SmolLM2 on two cores
/// (docs/results/kv-store.md, 2026-11-30).
const RESTORED_BPS: [f64; 2] = [2.85e9, 0.93e9];

/// Tokens of a prompt that takes the slot.
const N_OTHER: u32 = 80;

/// Seconds to the first token of a prompt.
#[derive(Debug, Serialize)]
pub(crate) struct FirstTokens {
    pub(crate) n_prompt: u32,
    pub(crate) computed: f64,
    pub(crate) slot: f64,
    pub(crate) memory: f64,
    pub(crate) disk: f64,
    pub(crate) other_node: f64,
}

/// The machine that answers, and the route on which it pulls what the other one has.
const HERE: Route = Route { decode: 0, prefill: None };
const THERE: Route = Route { decode: 1, prefill: None };
const PULLED: Route = Route { decode: 0, prefill: Some(0) };

/// Runs all lengths, on one thread with a paused clock.
pub(crate) async fn run() -> Result<Vec<FirstTokens>, CommandFailure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    tokio::task::spawn_blocking(move || runtime.block_on(run_all())).await?
}

async fn run_all() -> Result<Vec<FirstTokens>, CommandFailure> {
    let tier = |bps: f64| SimTier { max_tokens: usize::MAX, restore_tps: bps / f64::from(KV_BYTES_PER_TOKEN) };
    let [memory, disk] = RESTORED_BPS.map(tier);
    let mut rows = Vec::new();
    for n_prompt in LENGTHS {
        let machine = |store| ClusterSpec { store, n_slots: 1, ..ClusterSpec::spark_and_mac(n_prompt) };
        let with_memory = Cluster::calibrated(&machine([memory, SimTier::default()])).await?;
        let with_disk = Cluster::calibrated(&machine([SimTier::default(), disk])).await?;
        let [computed, slot, from_memory] = returns(&with_memory, n_prompt).await?;
        let [_, _, from_disk] = returns(&with_disk, n_prompt).await?;
        let elsewhere = with_memory.fresh_prompt(n_prompt);
        with_memory.run_fixed(THERE, elsewhere.clone(), 1).await?;
        let other_node = with_memory.run_fixed(PULLED, elsewhere, 1).await?.ttft;
        rows.push(FirstTokens { n_prompt, computed, slot, memory: from_memory, disk: from_disk, other_node });
    }
    Ok(rows)
}

/// The times of a new prompt, of the same one at once, and of the same one after another had the slot.
async fn returns(cluster: &Cluster, n_prompt: u32) -> Result<[f64; 3], CommandFailure> {
    let prompt = cluster.fresh_prompt(n_prompt);
    let mut times = [0.0; 3];
    for (idx, time) in times.iter_mut().enumerate() {
        if idx == 2 {
            cluster.run_fixed(HERE, cluster.fresh_prompt(N_OTHER), 1).await?;
        }
        *time = cluster.run_fixed(HERE, prompt.clone(), 1).await?.ttft;
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn kv_from_anywhere_comes_before_it_is_computed_and_memory_before_the_disk() {
        let rows = run_all().await.unwrap();
        assert_eq!(rows.len(), LENGTHS.len());
        for row in &rows {
            let FirstTokens { computed, slot, memory, disk, other_node, .. } = *row;
            assert!(slot < memory && memory < disk && disk < computed && other_node < computed, "{row:?}");
        }
    }
}
