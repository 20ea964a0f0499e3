//! All figures, and their report.

use serde::Serialize;

use super::cells::{percent, row, seconds};
use super::grid::{GridCell, Regret, Summary};
use super::{bursts, chart, drift, grading, popular, published, slowest_link};
use crate::report::Report;

/// The largest error of a prediction that counts as corrected.
pub(super) const CORRECTED: f64 = 0.1;

/// All measurements.
#[derive(Debug, Serialize)]
pub(super) struct PlanFigures {
    pub note: &'static str,
    pub summary: Vec<Summary>,
    pub return_summary: Summary,
    pub returns: Vec<GridCell>,
    pub bursts: Vec<bursts::BurstLine>,
    pub published: Vec<published::PublishedLine>,
    #[serde(flatten)]
    pub popular: popular::PopularFigures,
    pub slowest_links: Vec<slowest_link::SlowestLinkLine>,
    pub grading: Vec<grading::GradingLine>,
    /// The first request of `drift` after which all predictions were right.
    pub corrected_from: Option<u32>,
    pub drift: Vec<drift::DriftLine>,
    pub never_slower: Vec<GridCell>,
}

/// Above the cells of [`summary_cells`].
pub(super) const SUMMARY: [&str; 6] =
    ["requests", "handed over", "TTFT regret", "completion regret", "TTFT over direct", "completion over direct"];

impl PlanFigures {
    pub(super) fn report(&self) -> Report {
        let mut report = Report::new("Simulation");
        report.text("All figures come from a simulation: real planning and learning, simulated machines and links.");
        report.text("Planned routes compared with the best fixed route in hindsight (p50 / p95 / max):");
        let head = [&["machines"][..], &SUMMARY].concat();
        report.table(
            &head,
            self.summary.iter().chain([&self.return_summary]).map(|line| row(line.pair, summary_cells(line))),
        );
        self.add_bursts(&mut report);
        self.add_published(&mut report);
        self.popular.add_to(&mut report);
        self.add_slowest_links(&mut report);
        report.text("Grading, two DGX Sparks and two M3 Ultras, two models:");
        let rows = self.grading.iter().map(|line| {
            let (n, rate) = (line.in_flight.to_string(), format!("{:.0}", line.per_hour));
            row(line.policy, [n, rate, format!("{:.1}", line.mean_seconds)])
        });
        report.table(&["policy", "submissions in flight", "per hour", "seconds each"], rows);
        self.add_drift(&mut report);
        report.drawing("break-even", chart::break_even(&self.never_slower));
        report
    }

    fn add_bursts(&self, report: &mut Report) {
        report.text(
            "Requests at once, one DGX Spark and one M3 Ultra (mean time to the last token, median of the bursts):",
        );
        let head = [
            "requests",
            "planned",
            "direct",
            "handoff",
            "regret",
            "|error| of TTFT, p50",
            "p90",
            "error of a prediction afterwards",
        ];
        for traffic in &bursts::TRAFFIC {
            report.text(format!("Prompts: {}.", traffic.name));
            let rows = self.bursts.iter().filter(|line| line.traffic == traffic.name).map(|line| {
                let times = [line.planned, line.direct, line.handoff].map(seconds);
                let [p50, p90] = line.ttft_errors;
                let errors = [line.regret(), p50, p90, line.error_afterwards].map(percent);
                row(line.n_requests, times.into_iter().chain(errors))
            });
            report.table(&head, rows);
        }
    }

    fn add_published(&self, report: &mut Report) {
        report.text("8,192-token prompt, 32 tokens of reply, 10 Gb/s:");
        let rows = self.published.iter().map(|line| {
            let difference = percent(line.completion / line.published - 1.0);
            let planned = if line.is_planned { "yes" } else { "" };
            let [published, completion, ttft] = [line.published, line.completion, line.ttft].map(seconds);
            row(line.machines, [published, completion, difference, ttft, planned.to_owned()])
        });
        report.table(&["machines", "published", "simulated", "difference", "TTFT", "planned"], rows);
    }

    fn add_slowest_links(&self, report: &mut Report) {
        report.text("The slowest link on which a DGX Spark helps an M3 Ultra to an earlier first token, Gb/s:");
        let prompts = slowest_link::PROMPTS.map(|n| format!("{n} tokens"));
        let head = [&["codec", "times smaller"].map(str::to_owned)[..], &prompts].concat();
        let rows = self.slowest_links.iter().map(|slowest_link::SlowestLinkLine { codec, ratio, gbps }| {
            let gbps = gbps.map(|gbps| gbps.map_or_else(|| "none".to_owned(), |gbps| format!("{gbps:.2}")));
            row(codec.as_str(), [format!("{ratio:.2}")].into_iter().chain(gbps))
        });
        report.table(&head, rows);
    }

    fn add_drift(&self, report: &mut Report) {
        report
            .text(format!("Machines at {} of the speed that calibration saw (actual ÷ predicted − 1):", drift::SPEED));
        let shown = self.drift.iter().filter(|line| [1, 2, 3, 5, 8, 12, 16, 20, 40].contains(&line.request));
        let rows = shown.map(|line| row(line.request, [line.ttft_error, line.completion_error].map(percent)));
        report.table(&["request", "TTFT", "completion"], rows);
        report.text(match self.corrected_from {
            Some(request) => {
                format!("Every prediction from request {request} on was within {}.", percent(CORRECTED))
            }
            None => "Predictions were not corrected.".to_owned(),
        });
    }
}

/// All but the first cell of a summary's line.
pub(super) fn summary_cells(line: &Summary) -> [String; 6] {
    let Summary { n, n_handoffs, ttft, completion, ttft_over_direct, completion_over_direct, .. } = line;
    let [a, b, c, d] = [ttft, completion, ttft_over_direct, completion_over_direct].map(regret);
    [n.to_string(), n_handoffs.to_string(), a, b, c, d]
}

fn regret(regret: &Regret) -> String {
    let Regret { p50, p95, max } = *regret;
    format!("{} / {} / {}", percent(p50), percent(p95), percent(max))
}
