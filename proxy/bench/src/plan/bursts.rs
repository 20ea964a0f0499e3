//! Bursts of requests: compares the planner with each fixed route while prompts wait for each other.

use baton_planner::cost::Route;
use baton_proxy::serve::CommandFailure;
use baton_tryout::stats::{median, percentile};
use futures::future::try_join_all;
use serde::Serialize;

use super::cluster::{Cluster, ClusterSpec, PAUSE, PlannedRequest};

/// The numbers of requests in a burst.
const SIZES: [u32; 5] = [1, 2, 4, 8, 16];

/// Bursts of each size.
const ROUNDS: u32 = 12;

/// The requests of a burst, and the machines that they come to.
#[derive(Debug)]
pub(super) struct Traffic {
    pub name: &'static str,
    /// The prompt lengths, in turn.
    prompts: [u32; 4],
    n_output: u32,
    /// Milliseconds of a prefill step beside its tokens.
    prefill_step_ms: f64,
}

pub(super) const TRAFFIC: [Traffic; 2] = [
    Traffic { name: "long and short", prompts: [2_000, 8_000, 500, 4_000], n_output: 64, prefill_step_ms: 0.0 },
    // A step reads 16 GB of weights, which takes a DGX Spark 69 ms; how much of that its compute hides is not published.
    Traffic { name: "short, in shared steps", prompts: [100, 130, 80, 160], n_output: 16, prefill_step_ms: 40.0 },
];

/// Bursts of one size. Seconds from the request to the last token: the mean over a burst, the median over the bursts.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct BurstLine {
    pub traffic: &'static str,
    pub n_requests: u32,
    pub planned: f64,
    pub direct: f64,
    pub handoff: f64,
    /// |Actual ÷ predicted − 1| of the time to first token in the bursts: median and 90th percentile.
    pub ttft_errors: [f64; 2],
    /// The prediction's error for a single request after all bursts: actual ÷ predicted completion time − 1.
    pub error_afterwards: f64,
}

impl BurstLine {
    /// Extra time of the planner over the better fixed route.
    pub(super) fn regret(&self) -> f64 {
        self.planned / self.direct.min(self.handoff) - 1.0
    }
}

/// Sends bursts of each size to one DGX Spark and one M3 Ultra.
pub(super) async fn run() -> Result<Vec<BurstLine>, CommandFailure> {
    let mut lines = Vec::new();
    for traffic in &TRAFFIC {
        for n_requests in SIZES {
            lines.push(of_size(traffic, n_requests).await?);
        }
    }
    Ok(lines)
}

async fn of_size(traffic: &Traffic, n_requests: u32) -> Result<BurstLine, CommandFailure> {
    let Traffic { name, prompts, n_output, prefill_step_ms } = *traffic;
    // Larger bursts than the cluster's slots also wait for slots.
    let spec = ClusterSpec { prefill_decodes: false, prefill_step_ms, ..ClusterSpec::spark_and_mac(4_096) };
    let cluster = Cluster::calibrated(&spec).await?;
    let [direct, handoff] = [None, Some(0)].map(|prefill| Route { decode: 0, prefill });
    let mut seconds = [const { Vec::new() }; 3];
    let mut errors = Vec::new();
    for round in 0..ROUNDS {
        let lengths = || (0..n_requests).map(|i| prompts[(round + i) as usize % prompts.len()]);
        tokio::time::sleep(PAUSE).await;
        let planned = lengths().map(|n| cluster.run_planned(None, cluster.fresh_prompt(n), n_output));
        let planned = try_join_all(planned).await?;
        errors.extend(planned.iter().filter_map(ttft_error));
        seconds[0].push(mean(planned.iter().map(|planned| planned.times.completion)));
        for (route, seconds) in [direct, handoff].into_iter().zip(&mut seconds[1..]) {
            tokio::time::sleep(PAUSE).await;
            let fixed = lengths().map(|n| cluster.run_fixed(route, cluster.fresh_prompt(n), n_output));
            seconds.push(mean(try_join_all(fixed).await?.iter().map(|times| times.completion)));
        }
    }
    tokio::time::sleep(PAUSE).await;
    let alone = cluster.run_planned(None, cluster.fresh_prompt(prompts[0]), n_output).await?;
    let predicted = alone.prediction.map_or(f64::NAN, |prediction| prediction.completion_ms / 1e3);
    let [planned, direct, handoff] = seconds.map(|seconds| median(&seconds));
    Ok(BurstLine {
        traffic: name,
        n_requests,
        planned,
        direct,
        handoff,
        ttft_errors: [50.0, 90.0].map(|p| percentile(&errors, p)),
        error_afterwards: alone.times.completion / predicted - 1.0,
    })
}

fn ttft_error(planned: &PlannedRequest) -> Option<f64> {
    Some((planned.times.ttft * 1e3 / planned.prediction?.ttft_ms - 1.0).abs())
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    values.sum::<f64>() / n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_planned_as_well_as_the_better_route_and_spoils_no_prediction() {
        for line in run().await.unwrap() {
            println!("{line:?}, regret {:.3}", line.regret());
            assert!(line.regret() <= 0.05, "{line:?}");
            assert!(line.error_afterwards.abs() < 0.15, "{line:?}");
        }
    }
}
