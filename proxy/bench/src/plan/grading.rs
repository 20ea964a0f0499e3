//! The grading load: two DGX Sparks and two M3 Ultras serve two models, with one machine of each type per model. Both
//! models grade each submission of 5,000 tokens, one with 800 tokens and the other with 1,200.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_planner::policy::PolicyName;
use baton_proxy::serve::CommandFailure;
use futures::future::try_join_all;
use serde::Serialize;
use tokio::time::Instant;

use super::cluster::{Cluster, ClusterSpec};

const PROMPT: u32 = 5_000;
const OUTPUTS: [u32; 2] = [800, 1_200];

/// How long the load lasts.
const DURATION: Duration = Duration::from_secs(1_800);

/// The numbers of concurrent submissions.
pub(super) const IN_FLIGHT: [u32; 2] = [1, 8];

/// A policy's throughput.
#[derive(Debug, Clone, Serialize)]
pub(super) struct GradingLine {
    pub policy: &'static str,
    pub in_flight: u32,
    pub per_hour: f64,
    /// Seconds of one submission, on average.
    pub mean_seconds: f64,
}

/// Runs the load with each policy.
pub(super) async fn run() -> Result<Vec<GradingLine>, CommandFailure> {
    let mut lines = Vec::new();
    for in_flight in IN_FLIGHT {
        for policy in [PolicyName::Direct, PolicyName::Fastest, PolicyName::AlwaysHandoff, PolicyName::LeastLoaded] {
            lines.push(load(policy, in_flight).await?);
        }
    }
    Ok(lines)
}

async fn load(policy: PolicyName, in_flight: u32) -> Result<GradingLine, CommandFailure> {
    let spec = ClusterSpec { n_slots: 8, ..ClusterSpec::spark_and_mac(PROMPT + OUTPUTS[1] / 2) };
    let models = [Cluster::calibrated(&spec).await?, Cluster::calibrated(&spec).await?];
    let ends = Instant::now() + DURATION;
    let n_done = AtomicU32::new(0);
    let submit = |_| async {
        while Instant::now() < ends {
            let graded = models.iter().zip(OUTPUTS).map(|(model, n_output)| {
                model.run_planned(Some(policy.policy()), model.fresh_prompt(PROMPT), n_output)
            });
            try_join_all(graded).await?;
            // A request counts if it ends within the time.
            n_done.fetch_add(u32::from(Instant::now() <= ends), Ordering::Relaxed);
        }
        Ok::<_, CommandFailure>(())
    };
    try_join_all((0..in_flight).map(submit)).await?;
    let per_hour = f64::from(n_done.into_inner()) * 3_600.0 / DURATION.as_secs_f64();
    let mean_seconds = f64::from(in_flight) * 3_600.0 / per_hour;
    Ok(GradingLine { policy: policy.as_str(), in_flight, per_hour, mean_seconds })
}
