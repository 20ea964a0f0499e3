//! Self-correction: machines become slower after calibration. Measures how soon predictions follow.

use baton_proxy::serve::CommandFailure;
use serde::Serialize;

use super::cluster::{Cluster, ClusterSpec, PAUSE, PlannedRequest};

/// The factor on every rate after the drift.
pub(super) const SPEED: f64 = 0.4;

const REQUESTS: u32 = 40;
const OUTPUT: u32 = 64;

/// The prompt lengths, in turn.
const PROMPTS: [u32; 4] = [8_000, 500, 2_000, 4_000];

/// The errors of a request's prediction: actual ÷ predicted − 1.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct DriftLine {
    pub request: u32,
    pub ttft_error: f64,
    pub completion_error: f64,
}

/// Slows every machine down after calibration, and sends requests one after another.
pub(super) async fn run() -> Result<Vec<DriftLine>, CommandFailure> {
    let cluster = Cluster::calibrated(&ClusterSpec::spark_and_mac(4_096)).await?;
    cluster.engines.iter().for_each(|engine| engine.set_speed(SPEED));
    let mut lines = Vec::new();
    for (request, n_prompt) in (1..=REQUESTS).zip(PROMPTS.into_iter().cycle()) {
        tokio::time::sleep(PAUSE).await;
        let PlannedRequest { prediction, times, .. } =
            cluster.run_planned(None, cluster.fresh_prompt(n_prompt), OUTPUT).await?;
        let Some(prediction) = prediction else { continue };
        lines.push(DriftLine {
            request,
            ttft_error: times.ttft * 1e3 / prediction.ttft_ms - 1.0,
            completion_error: times.completion * 1e3 / prediction.completion_ms - 1.0,
        });
    }
    Ok(lines)
}

/// The first request from which on no prediction's error exceeded `limit`.
pub(super) fn corrected_from(lines: &[DriftLine], limit: f64) -> Option<u32> {
    let is_off = |line: &&DriftLine| line.ttft_error.abs() > limit || line.completion_error.abs() > limit;
    let last_off = lines.iter().rfind(is_off).map_or(0, |line| line.request);
    lines.iter().map(|line| line.request).find(|&request| request > last_off)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn wrong_rates_are_corrected_within_twenty_requests() {
        let lines = run().await.unwrap();
        assert!(lines[0].ttft_error > 0.5, "{:?}", lines[0]);
        let from = corrected_from(&lines, 0.1);
        assert!(from.is_some_and(|request| request <= 20), "{from:?} {lines:?}");
    }
}
