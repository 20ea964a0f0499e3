//! Conversations that return: one of two machines has their KV in a slot, in its memory or on its disk. Compares the planner with
//! every fixed route.

use std::time::Duration;

use baton_engines::sim::SimTier;
use baton_planner::cost::Route;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::held::KvTier;
use baton_tryout::machines::link;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::cluster::{Cluster, ClusterSpec};
use super::grid::{GridCell, MeasuredCell, Summary, summary};

/// Tokens of the conversation so far.
const HISTORIES: [u32; 3] = [500, 2_000, 7_000];

/// Tokens of the next message.
const MESSAGE: u32 = 100;

const OUTPUT: u32 = 64;

const N_SLOTS: u32 = 4;

/// Link rates, gigabits per second.
const LINKS: [f64; 2] = [1.0, 10.0];

/// Tokens per second from a store's memory and disk; the last disk is slower than either machine computes.
const STORES: [(KvTier, f64); 4] =
    [(KvTier::Slot, 0.0), (KvTier::Memory, 100_000.0), (KvTier::Disk, 15_000.0), (KvTier::Disk, 500.0)];

/// Until the endpoint knows what a node holds.
const TOLD: Duration = Duration::from_secs(4);

/// Runs every return on its planned route and on every fixed one.
pub(super) async fn run() -> Result<Vec<GridCell>, CommandFailure> {
    let mut cells = Vec::new();
    for gbps in LINKS {
        for (tier, restore_tps) in STORES {
            let unlimited = SimTier { max_tokens: usize::MAX, restore_tps };
            let store = match tier {
                KvTier::Slot => [SimTier::default(); 2],
                KvTier::Memory => [unlimited, SimTier::default()],
                KvTier::Disk => [SimTier::default(), unlimited],
            };
            let spec = ClusterSpec { link: link(gbps), store, n_slots: N_SLOTS, ..ClusterSpec::spark_and_mac(4_096) };
            cells.extend(of_store(&Cluster::calibrated(&spec).await?, tier, gbps).await?);
        }
    }
    Ok(cells)
}

/// Summarizes the cells of [`run`].
pub(super) fn summarize(cells: &[GridCell]) -> Summary {
    summary("conversations that return", &cells.iter().collect::<Vec<_>>())
}

async fn of_store(cluster: &Cluster, tier: KvTier, gbps: f64) -> Result<Vec<GridCell>, CommandFailure> {
    let mut returns: Vec<(u32, usize)> = HISTORIES.into_iter().flat_map(|n| [(n, 0), (n, 1)]).collect();
    returns.shuffle(&mut StdRng::seed_from_u64(3));
    let mut cells = Vec::new();
    for (n_history, holder) in returns {
        let prompt = left(cluster, tier, n_history, holder).await?;
        let n_prompt = prompt.len() as u32;
        let planned = cluster.run_planned(None, prompt, OUTPUT).await?;
        let mut fixed = Vec::new();
        for route in cluster.routes() {
            let prompt = left(cluster, tier, n_history, holder).await?;
            fixed.push(MeasuredCell::new(route, cluster.run_fixed(route, prompt, OUTPUT).await?));
        }
        let predicted_ttft = planned.prediction.map(|prediction| prediction.ttft_ms / 1e3);
        let planned = MeasuredCell::new(planned.route, planned.times);
        let cached = f64::from(n_history) / f64::from(n_prompt);
        let pair = if holder == 0 { "it is on the M3 Ultra" } else { "it is on the Spark" };
        cells.push(GridCell { pair, gbps, n_prompt, cached, n_output: OUTPUT, planned, predicted_ttft, fixed });
    }
    Ok(cells)
}

/// A conversation that was left on one machine, in one tier, and continues.
async fn left(cluster: &Cluster, tier: KvTier, n_history: u32, holder: usize) -> Result<Vec<Token>, CommandFailure> {
    let prompt = cluster.fresh_prompt(n_history + MESSAGE);
    let on_holder = Route { decode: holder, prefill: None };
    cluster.run_fixed(on_holder, prompt[..n_history as usize].to_vec(), 1).await?;
    if tier != KvTier::Slot {
        // Others take its slot.
        for _ in 0..N_SLOTS {
            cluster.run_fixed(on_holder, cluster.fresh_prompt(16), 1).await?;
        }
    }
    tokio::time::sleep(TOLD).await;
    Ok(prompt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_conversation_that_returns_is_planned_as_well_as_on_its_best_route() {
        let cells = run().await.unwrap();
        let Summary { n, ttft, completion, .. } = summarize(&cells);
        let worst = || cells.iter().max_by(|a, b| a.planned.completion.total_cmp(&b.planned.completion));
        println!("time to first token {ttft:?}, completion {completion:?}");
        assert_eq!(n, LINKS.len() * STORES.len() * HISTORIES.len() * 2);
        assert!(ttft.p95 <= 0.05 && completion.p95 <= 0.05, "{ttft:?} {completion:?} {:?}", worst());
        let goes_to = |cell: &GridCell| (cell.planned.decode, cell.planned.prefill);
        assert!(cells.iter().any(|cell| goes_to(cell) == (0, Some(0))), "KV goes to the machine that generates faster");
        assert!(cells.iter().any(|cell| goes_to(cell) == (0, None)), "and a conversation to the machine that has it");
    }
}
