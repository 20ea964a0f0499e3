//! The published table: a prompt of 8,192 tokens and a reply of 32 on a DGX Spark, on an M3 Ultra, and on both.

use baton_planner::cost::Route;
use baton_proxy::serve::CommandFailure;
use serde::Serialize;

use super::cluster::{Cluster, ClusterSpec};

const PROMPT: u32 = 8_192;
const OUTPUT: u32 = 32;

/// One line of the table. Seconds.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PublishedLine {
    pub machines: &'static str,
    pub published: f64,
    pub ttft: f64,
    pub completion: f64,
    /// True if the planner chooses this route with both machines.
    pub is_planned: bool,
}

/// Runs the three cases over 10 gigabits per second.
pub(super) async fn run() -> Result<Vec<PublishedLine>, CommandFailure> {
    let cluster = Cluster::calibrated(&ClusterSpec::spark_and_mac(PROMPT)).await?;
    let planned = cluster.run_planned(None, cluster.fresh_prompt(PROMPT), OUTPUT).await?;
    let cases = [
        ("DGX Spark alone", 4.34, Route { decode: 1, prefill: None }),
        ("M3 Ultra alone", 6.42, Route { decode: 0, prefill: None }),
        ("both", 2.32, Route { decode: 0, prefill: Some(0) }),
    ];
    let mut lines = Vec::new();
    for (machines, published, route) in cases {
        let run = cluster.run_fixed(route, cluster.fresh_prompt(PROMPT), OUTPUT).await?;
        let is_planned = planned.route == route;
        lines.push(PublishedLine { machines, published, ttft: run.ttft, completion: run.completion, is_planned });
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_published_figures_come_out_within_ten_percent() {
        for PublishedLine { machines, published, completion, is_planned, .. } in run().await.unwrap() {
            assert!((completion / published - 1.0).abs() < 0.1, "{machines}: {completion} s, published {published} s");
            assert_eq!(is_planned, machines == "both");
        }
    }
}
