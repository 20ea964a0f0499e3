//! All figures of many nodes and streams, and their report.

use baton_tryout::stats::median;
use serde::Serialize;

use super::cell::{CellRound, ManyCell};
use super::planning::PlanningFigures;
use super::size::{CellSize, MAX_STREAMS_OF_NODE};
use crate::report::{Better, ChartLine, LineChart, Report, Row, Unit, dash, one_decimal};
use crate::serve::steady::SteadyFigures;

/// A plan may take so long at 64 nodes, microseconds.
const PLAN_TARGET_US: f64 = 200.0;

/// All measurements.
#[derive(Debug, Default, Serialize)]
pub(super) struct ManyFigures {
    pub(super) token_every_ms: u32,
    pub(super) planning: Vec<PlanningFigures>,
    pub(super) cells: Vec<ManyCell>,
    /// Sizes that no node can serve.
    pub(super) impossible: Vec<CellSize>,
}

impl CellRound {
    fn sum(&self, of: fn(&SteadyFigures) -> f64) -> f64 {
        self.endpoints.iter().map(of).sum()
    }

    /// The largest of the endpoints.
    fn worst(&self, of: fn(&SteadyFigures) -> f64) -> f64 {
        self.endpoints.iter().map(of).fold(f64::NAN, f64::max)
    }

    /// Streams of the node that has the fewest, and the most.
    fn spread(&self) -> (u32, u32) {
        (self.n_active.iter().min().copied().unwrap_or(0), self.n_active.iter().max().copied().unwrap_or(0))
    }

    /// Tokens of the slower endpoint ÷ those of the faster one.
    fn fairness(&self) -> f64 {
        let rates = || self.endpoints.iter().map(|endpoint| endpoint.tokens_per_second);
        rates().fold(f64::INFINITY, f64::min) / rates().fold(0.0, f64::max)
    }
}

impl ManyCell {
    fn rounds(&self, of: impl Fn(&CellRound) -> f64) -> Vec<f64> {
        self.rounds.iter().map(of).collect()
    }

    /// Cores of all endpoints together.
    fn cores(&self) -> Vec<f64> {
        self.rounds(|round| round.sum(|endpoint| endpoint.cpu_seconds / endpoint.seconds))
    }

    fn cpu_us_a_token(&self) -> Vec<f64> {
        self.rounds(|round| 1e6 * round.sum(|e| e.cpu_seconds) / round.sum(|e| e.n_tokens))
    }

    /// Memory of a stream beyond the idle endpoint.
    fn kib_a_stream(&self) -> Vec<f64> {
        let idle = self.idle.resident_mib * f64::from(self.size.n_endpoints);
        self.rounds(|round| 1_024.0 * (round.sum(|e| e.resident_mib) - idle) / f64::from(self.size.n_streams))
    }

    /// How much later than its time the slowest hundredth of tokens comes, milliseconds.
    fn late_p99(&self, token_every_ms: u32) -> Vec<f64> {
        self.rounds(|round| round.worst(|e| e.itl_p99_ms) - f64::from(token_every_ms))
    }

    fn row(&self, token_every_ms: u32) -> Row {
        let of = |rounds: Vec<f64>| median(&rounds);
        let (least, most) = self.rounds.last().map_or((0, 0), CellRound::spread);
        vec![
            self.size.n_endpoints.to_string(),
            self.size.n_nodes.to_string(),
            self.size.n_streams.to_string(),
            one_decimal(of(self.rounds(|round| round.sum(|e| e.tokens_per_second)))),
            one_decimal(of(self.late_p99(token_every_ms))),
            one_decimal(of(self.rounds(|round| round.worst(|e| e.ttft_p99_ms)))),
            format!("{:.3}", of(self.cores())),
            one_decimal(of(self.cpu_us_a_token())),
            one_decimal(of(self.kib_a_stream())),
            format!("{least} to {most}"),
            if self.size.n_endpoints > 1 { format!("{:.3}", of(self.rounds(CellRound::fairness))) } else { dash() },
            format!("{:.1}", self.idle.cpu_ms),
            one_decimal(self.idle.resident_mib),
        ]
    }
}

const CELLS: [&str; 13] = [
    "endpoints",
    "nodes",
    "streams",
    "tok/s",
    "late p99, ms",
    "TTFT p99, ms",
    "cores",
    "CPU µs a token",
    "KiB a stream",
    "streams of a node",
    "slower ÷ faster endpoint",
    "idle CPU, ms a second",
    "idle, MiB",
];

impl ManyFigures {
    pub(super) fn report(&self) -> Report {
        let mut report = Report::new("Many nodes and streams");
        report.text(format!(
            "Simulated nodes behind real node servers in one process; endpoints are processes of `baton`. Each stream gets a token every \
             {} ms. Medians of rounds. Late: a token's gap beyond that. Cores, memory and idle CPU are the endpoints' alone; with two \
             endpoints each has half of the streams.",
            self.token_every_ms
        ));
        let impossible = self.impossible.iter().map(|size| {
            let sizes = [size.n_endpoints, size.n_nodes, size.n_streams].map(|n| n.to_string());
            sizes.into_iter().chain(std::iter::repeat_with(dash)).take(CELLS.len()).collect()
        });
        report.table(&CELLS, self.cells.iter().map(|cell| cell.row(self.token_every_ms)).chain(impossible));
        if !self.impossible.is_empty() {
            report.text(format!(
                "Rows without figures: an endpoint has at most {MAX_STREAMS_OF_NODE} streams on one node here."
            ));
        }
        let head = ["plans: nodes", "that prefill for others", "routes", "p50, µs", "p99, µs"];
        report.table(&head, self.planning.iter().map(planning_row));
        self.growth().into_iter().for_each(|line| report.text(line));
        self.add_chart(&mut report);
        self.add_figures(&mut report);
        report.fail(self.failure());
        report
    }

    /// What grows with what, and why.
    fn growth(&self) -> Vec<String> {
        let alone = || self.cells.iter().filter(|cell| cell.size.n_endpoints == 1);
        let mut lines = Vec::new();
        let few = alone().min_by_key(|cell| cell.size.n_nodes);
        let many = alone().max_by_key(|cell| cell.size.n_nodes);
        if let (Some(few), Some(many)) = (few, many)
            && few.size.n_nodes < many.size.n_nodes
        {
            let n = f64::from(many.size.n_nodes - few.size.n_nodes);
            let (ms, mib) = (many.idle.cpu_ms - few.idle.cpu_ms, many.idle.resident_mib - few.idle.resident_mib);
            lines.push(format!(
                "With the nodes grows what an idle endpoint costs: {:.3} ms of CPU a second and {:.0} KiB for each, because each has a \
                 connection of its own, on which it reports its load twice a second.",
                ms / n,
                1_024.0 * mib / n
            ));
        }
        lines.push(
            "With the streams grow memory (each has a connection, a task and its reply's state) and CPU (each token is read once, \
             parsed, and written to its client by itself; at a slow pace nothing can be written together)."
                .to_owned(),
        );
        lines.push(
            "With the routes grows a plan: it predicts each, and there are as many as nodes that generate, times one more than nodes that \
             compute prompts for them. So it grows with the square of the nodes if half of them do that."
                .to_owned(),
        );
        lines
    }

    fn add_chart(&self, report: &mut Report) {
        let mut n_nodes: Vec<(u32, u32)> =
            self.cells.iter().map(|cell| (cell.size.n_endpoints, cell.size.n_nodes)).collect();
        n_nodes.dedup();
        let line = |(n_endpoints, n_nodes): (u32, u32)| {
            let is_of = |cell: &&ManyCell| (cell.size.n_endpoints, cell.size.n_nodes) == (n_endpoints, n_nodes);
            let point = |cell: &ManyCell| (f64::from(cell.size.n_streams), median(&cell.cores()));
            let name = if n_endpoints == 1 {
                format!("{n_nodes} nodes")
            } else {
                format!("{n_endpoints} endpoints, {n_nodes} nodes")
            };
            ChartLine { name, points: self.cells.iter().filter(is_of).map(point).collect() }
        };
        let lines: Vec<ChartLine> = n_nodes.into_iter().map(line).collect();
        let chart = LineChart {
            title: &format!("CPU of the endpoint, a token each {} ms", self.token_every_ms),
            x_name: "streams",
            y_name: "cores",
            ticks: None,
            lines: &lines,
        };
        report.chart("many", &chart);
    }

    fn add_figures(&self, report: &mut Report) {
        for cell in &self.cells {
            let name = |what: &str| format!("{}: {what}", cell.size.name());
            report.figure(name("cores"), Unit::Cores, Better::Less, &cell.cores());
            report.figure(name("CPU a token"), Unit::Microseconds, Better::Less, &cell.cpu_us_a_token());
            report.figure(name("memory a stream"), Unit::Kibibytes, Better::Less, &cell.kib_a_stream());
            report.figure(name("late p99"), Unit::Milliseconds, Better::Less, &cell.late_p99(self.token_every_ms));
        }
        for plans in &self.planning {
            let name = format!("plans, {} nodes, {} that prefill", plans.n_nodes, plans.n_prefill);
            report.figure(format!("{name}: p50"), Unit::Microseconds, Better::Less, &plans.p50_us);
            report.figure(format!("{name}: p99"), Unit::Microseconds, Better::Less, &plans.p99_us);
        }
    }

    /// Why the run failed: a stream did, or its reply was wrong.
    fn failure(&self) -> Option<String> {
        let wrong = |cell: &&ManyCell| cell.rounds.iter().any(|round| round.endpoints.iter().any(|e| e.n_wrong > 0));
        let cell = self.cells.iter().find(wrong)?;
        let endpoints = || cell.rounds.iter().flat_map(|round| &round.endpoints);
        let n: u64 = endpoints().map(|endpoint| endpoint.n_wrong).sum();
        let example = endpoints().flat_map(|endpoint| &endpoint.examples).next().cloned().unwrap_or_default();
        Some(format!("{}: {n} streams failed or had faults: {example}", cell.size.name()))
    }
}

fn planning_row(plans: &PlanningFigures) -> Row {
    let p99 = median(&plans.p99_us);
    let target = if p99 > PLAN_TARGET_US { format!(" (target {PLAN_TARGET_US:.0})") } else { String::new() };
    vec![
        plans.n_nodes.to_string(),
        plans.n_prefill.to_string(),
        plans.n_routes.to_string(),
        one_decimal(median(&plans.p50_us)),
        format!("{p99:.1}{target}"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::steady::IdleUse;

    fn endpoint(tokens_per_second: f64, n_wrong: u64) -> SteadyFigures {
        SteadyFigures {
            tokens_per_second,
            ttft_p99_ms: 2_100.0,
            itl_p50_ms: 2_000.0,
            itl_p99_ms: 2_005.0,
            cpu_seconds: 1.0,
            seconds: 20.0,
            n_tokens: 20.0 * tokens_per_second,
            resident_mib: 30.0,
            client_cores: 0.1,
            n_wrong,
            examples: vec!["connection lost".to_owned(); n_wrong as usize],
        }
    }

    fn cell(n_endpoints: u32, n_nodes: u32, n_wrong: u64) -> ManyCell {
        let endpoints = (0..n_endpoints).map(|i| endpoint(50.0 - 10.0 * f64::from(i), n_wrong)).collect();
        let idle = IdleUse { cpu_ms: f64::from(n_nodes), resident_mib: 20.0 + f64::from(n_nodes) / 8.0 };
        let size = CellSize { n_endpoints, n_nodes, n_streams: 100 * n_endpoints };
        ManyCell { size, idle, rounds: vec![CellRound { endpoints, n_active: vec![40, 60, 50] }] }
    }

    #[test]
    fn each_figure_is_of_the_endpoints_and_growth_is_by_node() {
        let impossible = vec![CellSize { n_endpoints: 1, n_nodes: 1, n_streams: 10_000 }];
        let cells = vec![cell(1, 8, 0), cell(1, 64, 0), cell(2, 16, 0)];
        let figures = ManyFigures { token_every_ms: 2_000, cells, impossible, ..ManyFigures::default() };
        let report = figures.report();
        let text = report.to_text();
        let row = |start: &str| {
            let line =
                text.lines().find(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").starts_with(start));
            line.unwrap_or_else(|| panic!("{start}: {text}")).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        // 30 MiB beside 21 idle ones, for 100 streams; 1 s of CPU for 1,000 tokens.
        assert_eq!(
            row("1 8 100")[3..],
            ["50.0", "5.0", "2100.0", "0.050", "1000.0", "92.2", "40", "to", "60", "–", "8.0", "21.0"]
        );
        assert_eq!(row("2 16 200")[3..7], ["90.0", "5.0", "2100.0", "0.100"]);
        assert_eq!(row("2 16 200")[12], "0.800");
        assert_eq!(row("1 1 10000")[3..6], ["–", "–", "–"]);
        assert!(text.contains("1.000 ms of CPU a second and 128 KiB for each"), "{text}");
        let recorded = report.recorded();
        assert!(
            recorded.contains(&("1 endpoints, 8 nodes, 100 streams: cores".to_owned(), vec![0.05])),
            "{recorded:?}"
        );
    }

    #[test]
    fn a_stream_that_failed_fails_the_run() {
        let figures = |n_wrong| ManyFigures { cells: vec![cell(1, 8, n_wrong)], ..ManyFigures::default() };
        assert_eq!(figures(0).failure(), None);
        let failure = figures(2).failure().unwrap();
        assert!(failure.contains("2 streams failed or had faults: connection lost"), "{failure}");
    }
}
