//! The figures as tables.

use serde::Serialize;

use super::grid::{GridCell, Regret, Summary};
use super::{bursts, drift, grading, published, slowest_link};

/// The largest error of a prediction that counts as corrected.
pub(super) const CORRECTED: f64 = 0.1;

/// All measurements.
#[derive(Debug, Serialize)]
pub(super) struct PlanBenchReport {
    pub note: &'static str,
    pub summary: Vec<Summary>,
    pub bursts: Vec<bursts::BurstLine>,
    pub published: Vec<published::PublishedLine>,
    pub slowest_links: Vec<slowest_link::SlowestLinkLine>,
    pub grading: Vec<grading::GradingLine>,
    /// The first request of `drift` after which all predictions were right.
    pub corrected_from: Option<u32>,
    pub drift: Vec<drift::DriftLine>,
    pub never_slower: Vec<GridCell>,
}

impl PlanBenchReport {
    #[allow(clippy::print_stdout, reason = "the result of a command")]
    pub(super) fn print(&self) {
        println!("All figures come from a simulation: real planning and learning, simulated machines and links.\n");
        println!("Planned routes compared with the best fixed route in hindsight (p50 / p95 / max):\n");
        println!(
            "| machines | requests | handed over | TTFT regret | completion regret | TTFT over direct | completion over direct |"
        );
        println!("|---|---|---|---|---|---|---|");
        for line in &self.summary {
            println!("| {} {}", line.pair, summary_cells(line));
        }
        println!(
            "\nRequests at once, one DGX Spark and one M3 Ultra (mean time to the last token, median of the bursts):\n"
        );
        println!("| requests | planned | direct | handoff | regret | error of a prediction afterwards |");
        println!("|---|---|---|---|---|---|");
        for line in &self.bursts {
            let bursts::BurstLine { n_requests, planned, direct, handoff, error_afterwards } = line;
            let regret = percent(line.regret());
            let error = percent(*error_afterwards);
            println!("| {n_requests} | {planned:.2} s | {direct:.2} s | {handoff:.2} s | {regret} | {error} |");
        }
        println!("\n8,192-token prompt, 32 tokens of reply, 10 Gb/s:\n");
        println!("| machines | published | simulated | difference | TTFT | planned |\n|---|---|---|---|---|---|");
        for published::PublishedLine { machines, published, ttft, completion, is_planned } in &self.published {
            let difference = percent(completion / published - 1.0);
            let planned = if *is_planned { "yes" } else { "" };
            println!("| {machines} | {published:.2} s | {completion:.2} s | {difference} | {ttft:.2} s | {planned} |");
        }
        println!("\nThe slowest link on which a DGX Spark helps an M3 Ultra to an earlier first token, Gb/s:\n");
        let prompts = slowest_link::PROMPTS.map(|n| format!(" {n} tokens |")).concat();
        println!("| codec | times smaller |{prompts}\n|{}", "---|".repeat(2 + slowest_link::PROMPTS.len()));
        for slowest_link::SlowestLinkLine { codec, ratio, gbps } in &self.slowest_links {
            let gbps = gbps.map(|gbps| gbps.map_or_else(|| "none".to_owned(), |gbps| format!("{gbps:.2}")));
            println!("| {} | {ratio:.2} | {} |", codec.as_str(), gbps.join(" | "));
        }
        println!("\nGrading, two DGX Sparks and two M3 Ultras, two models:\n");
        println!("| policy | submissions in flight | per hour | seconds each |\n|---|---|---|---|");
        for grading::GradingLine { policy, in_flight, per_hour, mean_seconds } in &self.grading {
            println!("| {policy} | {in_flight} | {per_hour:.0} | {mean_seconds:.1} |");
        }
        println!("\nMachines at {} of the speed that calibration saw (actual ÷ predicted − 1):\n", drift::SPEED);
        println!("| request | TTFT | completion |\n|---|---|---|");
        for drift::DriftLine { request, ttft_error, completion_error } in &self.drift {
            if [1, 2, 3, 5, 8, 12, 16, 20, 40].contains(request) {
                println!("| {request} | {} | {} |", percent(*ttft_error), percent(*completion_error));
            }
        }
        match self.corrected_from {
            Some(request) => {
                println!("\nEvery prediction from request {request} on was within {}.", percent(CORRECTED))
            }
            None => println!("\nPredictions were not corrected."),
        }
    }
}

/// All but the first cell of a summary's line.
pub(super) fn summary_cells(line: &Summary) -> String {
    let Summary { n, n_handoffs, ttft, completion, ttft_over_direct, completion_over_direct, .. } = line;
    let [a, b, c, d] = [ttft, completion, ttft_over_direct, completion_over_direct].map(regret);
    format!("| {n} | {n_handoffs} | {a} | {b} | {c} | {d} |")
}

fn regret(regret: &Regret) -> String {
    let Regret { p50, p95, max } = *regret;
    format!("{} / {} / {}", percent(p50), percent(p95), percent(max))
}

fn percent(share: f64) -> String {
    // No "-0.0 %".
    format!("{:.1} %", (share * 1_000.0).round() / 10.0 + 0.0)
}
