//! The figures of all rounds and servers, and their report.

use std::collections::BTreeMap;

use baton_tryout::stats::median;
use serde::Serialize;
use serde_json::{Value, json};

use super::figures::RoundFigures;
use super::settings::{AskedForm, CalledApi, InputWords, LoadSettings, Pace, RoundLength};
use super::tally::{LatencyKind, P50, P95, P99, PERCENTILES};
use crate::report::{Better, ChartLine, LineChart, Report, Row, Unit, dash};

/// This client measures itself if it uses more of its core.
const MOST_CLIENT_CORES: f64 = 0.9;

/// The rounds of one server.
#[derive(Debug, Serialize)]
pub(super) struct ServerFigures {
    pub(super) name: String,
    pub(super) url: String,
    pub(super) model: String,
    pub(super) rounds: Vec<RoundFigures>,
}

/// The figures of a run.
pub(super) struct ServeFigures {
    pub(super) settings: LoadSettings,
    /// The first one is what the others are compared with.
    pub(super) servers: Vec<ServerFigures>,
    /// A signal ended the run before all rounds.
    pub(super) is_interrupted: bool,
}

/// A figure that tables show.
#[derive(Debug, Clone, Copy)]
enum Figure {
    RequestsPerSecond,
    TokensPerSecond,
    /// The latency at an index of [`PERCENTILES`].
    Latency(LatencyKind, usize),
    CpuPerRequests,
    CpuPerTokens,
    Resident,
    Connections,
    PromptTokens,
    OutputTokens,
    ClientCores,
}

impl Figure {
    fn all() -> Vec<Figure> {
        let shown = |kind| [P50, P95, P99].map(|p| Figure::Latency(kind, p));
        let head = [Figure::RequestsPerSecond, Figure::TokensPerSecond];
        let rest = [
            Figure::CpuPerRequests,
            Figure::CpuPerTokens,
            Figure::Resident,
            Figure::Connections,
            Figure::PromptTokens,
            Figure::OutputTokens,
            Figure::ClientCores,
        ];
        head.into_iter().chain(LatencyKind::ALL.into_iter().flat_map(shown)).chain(rest).collect()
    }

    fn name(self) -> String {
        match self {
            Figure::RequestsPerSecond => "requests/s".into(),
            Figure::TokensPerSecond => "tokens/s".into(),
            Figure::Latency(kind, p) => format!("{} {}, ms", kind.name(), PERCENTILES[p].name),
            Figure::CpuPerRequests => "CPU s a 1,000 requests".into(),
            Figure::CpuPerTokens => "CPU s a million tokens".into(),
            Figure::Resident => "resident, MiB".into(),
            Figure::Connections => "connections opened".into(),
            Figure::PromptTokens => "tokens of a prompt".into(),
            Figure::OutputTokens => "tokens of a reply".into(),
            Figure::ClientCores => "this client's CPU, cores".into(),
        }
    }

    /// Only of a server's work are ratios of interest.
    fn has_ratio(self) -> bool {
        !matches!(self, Figure::Connections | Figure::PromptTokens | Figure::OutputTokens | Figure::ClientCores)
    }

    fn unit(self) -> Unit {
        match self {
            Figure::RequestsPerSecond => Unit::RequestsPerSecond,
            Figure::TokensPerSecond => Unit::TokensPerSecond,
            Figure::Latency(..) => Unit::Milliseconds,
            Figure::CpuPerRequests => Unit::SecondsPer1000Requests,
            Figure::CpuPerTokens => Unit::SecondsPerMillionTokens,
            Figure::Resident => Unit::Mebibytes,
            Figure::Connections => Unit::Connections,
            Figure::PromptTokens | Figure::OutputTokens => Unit::Tokens,
            Figure::ClientCores => Unit::Cores,
        }
    }

    fn better(self) -> Better {
        match self {
            Figure::RequestsPerSecond | Figure::TokensPerSecond => Better::More,
            _ => Better::Less,
        }
    }

    fn of(self, round: &RoundFigures) -> Option<f64> {
        match self {
            Figure::RequestsPerSecond => Some(round.requests_per_second()),
            Figure::TokensPerSecond => Some(round.tokens_per_second()).filter(|rate| *rate > 0.0),
            Figure::Latency(kind, p) => round.latencies.get(&kind)?.percentiles_ms.get(p).copied(),
            Figure::CpuPerRequests => round.cpu_per_1000_requests(),
            Figure::CpuPerTokens => round.cpu_per_million_tokens(),
            Figure::Resident => round.resident_mib,
            Figure::Connections => Some(round.n_connections as f64),
            Figure::PromptTokens => round.mean_prompt_tokens,
            Figure::OutputTokens => round.mean_output_tokens,
            Figure::ClientCores => round.client_cores,
        }
    }
}

impl ServerFigures {
    /// The median of a figure's rounds.
    fn median(&self, figure: Figure) -> Option<f64> {
        let values: Vec<f64> = self.rounds.iter().filter_map(|round| figure.of(round)).collect();
        (!values.is_empty()).then(|| median(&values))
    }

    /// The median of the rounds' ratios to the same rounds of another server.
    fn ratio(&self, base: &ServerFigures, figure: Figure) -> Option<f64> {
        let pairs = self.rounds.iter().zip(&base.rounds);
        let ratio = |(ours, theirs)| Some(figure.of(ours)? / figure.of(theirs)?);
        let ratios: Vec<f64> = pairs.filter_map(ratio).filter(|ratio| ratio.is_finite()).collect();
        (!ratios.is_empty()).then(|| median(&ratios))
    }

    /// Sums of all rounds, by name.
    fn sums<'a, K: AsRef<str> + 'a>(
        &'a self,
        of: fn(&'a RoundFigures) -> &'a BTreeMap<K, u64>,
    ) -> BTreeMap<&'a str, u64> {
        let mut sums = BTreeMap::new();
        for (name, n) in self.rounds.iter().flat_map(of) {
            *sums.entry(name.as_ref()).or_default() += n;
        }
        sums
    }

    fn failures(&self) -> BTreeMap<&str, u64> {
        self.sums(|round| &round.failures)
    }

    fn faults(&self) -> BTreeMap<&str, u64> {
        self.sums(|round| &round.faults)
    }
}

impl ServeFigures {
    pub(super) fn report(&self) -> Report {
        let names: Vec<&str> = self.servers.iter().map(|server| server.name.as_str()).collect();
        let mut report = Report::new(names.join(", "));
        let interrupted = if self.is_interrupted { "; interrupted" } else { "" };
        report.text(format!("{}{interrupted}", self.settings.describe()));
        report.table(&[&["medians of rounds"][..], &names].concat(), self.rows());
        if self.servers.len() > 1 {
            report.text("in parentheses: times the first server's figure, the median of the rounds' ratios");
        }
        let examples = self.servers.iter().flat_map(|server| {
            let examples = server.rounds.iter().flat_map(|round| &round.examples).take(MAX_SHOWN_EXAMPLES);
            examples.map(|example| format!("{}: {example}\n", server.name))
        });
        report.local(examples.collect::<String>());
        let most = self.servers.iter().filter_map(|server| server.median(Figure::ClientCores)).fold(0.0, f64::max);
        if most > MOST_CLIENT_CORES {
            report.text(format!("note: this client used {most:.2} of its core; it may be what limits the throughput"));
        }
        self.add_chart(&mut report);
        self.add_figures(&mut report);
        report.fail(self.failure());
        report
    }

    /// The figures of each server's work by round, and their ratios to the first server's.
    fn add_figures(&self, report: &mut Report) {
        for figure in Figure::all().into_iter().filter(|figure| figure.has_ratio()) {
            for (i, server) in self.servers.iter().enumerate() {
                let of = |round: &RoundFigures| figure.of(round).unwrap_or(f64::NAN);
                let rounds: Vec<f64> = server.rounds.iter().map(of).collect();
                let name = format!("{}: {}", server.name, figure.name());
                report.figure(name.clone(), figure.unit(), figure.better(), &rounds);
                if let Some(first) = self.servers.first().filter(|_| i > 0) {
                    let base = first.rounds.iter().map(of);
                    let ratios: Vec<f64> = rounds.iter().zip(base).map(|(ours, theirs)| ours / theirs).collect();
                    report.figure(format!("{name} ÷ {}", first.name), Unit::Times, figure.better(), &ratios);
                }
            }
        }
    }

    fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        for figure in Figure::all() {
            if self.servers.iter().any(|server| server.median(figure).is_some()) {
                let cells = self.servers.iter().enumerate().map(|(i, server)| self.cell(i, server, figure));
                rows.push(std::iter::once(figure.name()).chain(cells).collect());
            }
        }
        let sum = |name: &str, of: fn(&RoundFigures) -> u64| {
            let sums = self.servers.iter().map(|server| server.rounds.iter().map(of).sum::<u64>());
            std::iter::once(name.to_owned()).chain(sums.map(|n| n.to_string())).collect()
        };
        rows.push(sum("replies checked", |round| round.n_checked));
        rows.push(sum("chunks of failed replies", |round| round.n_failed_chunks));
        rows.extend(self.counts("failed", ServerFigures::failures));
        rows.extend(self.counts("fault", ServerFigures::faults));
        rows
    }

    fn cell(&self, i: usize, server: &ServerFigures, figure: Figure) -> String {
        let Some(value) = server.median(figure) else { return dash() };
        let ratio = self.servers.first().filter(|_| i > 0 && figure.has_ratio());
        match ratio.and_then(|base| server.ratio(base, figure)) {
            Some(ratio) => format!("{} ({ratio:.2})", rounded(value)),
            None => rounded(value),
        }
    }

    /// A row for each name that a server counts.
    fn counts<'a>(&'a self, what: &str, of: fn(&'a ServerFigures) -> BTreeMap<&'a str, u64>) -> Vec<Row> {
        let all: Vec<BTreeMap<&str, u64>> = self.servers.iter().map(of).collect();
        let mut names: Vec<&str> = all.iter().flat_map(|counts| counts.keys().copied()).collect();
        names.sort_unstable();
        names.dedup();
        let cells = |name: &str| {
            all.iter().map(|counts| counts.get(name).copied().unwrap_or(0).to_string()).collect::<Vec<_>>()
        };
        names.into_iter().map(|name| [vec![format!("{what}: {name}")], cells(name)].concat()).collect()
    }

    /// Settings, medians, ratios and every round.
    pub(super) fn json(&self) -> Value {
        let server = |server: &ServerFigures| {
            let medians: BTreeMap<String, f64> =
                Figure::all().into_iter().filter_map(|figure| Some((figure.name(), server.median(figure)?))).collect();
            let ratio = |figure: Figure| Some((figure.name(), server.ratio(self.servers.first()?, figure)?));
            let ratios: BTreeMap<String, f64> =
                Figure::all().into_iter().filter(|figure| figure.has_ratio()).filter_map(ratio).collect();
            json!({
                "name": server.name, "url": server.url, "model": server.model, "medians": medians,
                "ratios": ratios, "failures": server.failures(), "faults": server.faults(), "rounds": server.rounds,
            })
        };
        json!({
            "baton": env!("CARGO_PKG_VERSION"),
            "settings": self.settings,
            "interrupted": self.is_interrupted,
            "percentiles": PERCENTILES.iter().map(|p| p.name).collect::<Vec<_>>(),
            "servers": self.servers.iter().map(server).collect::<Vec<_>>(),
        })
    }

    /// The latency that matters most: between tokens for streams, of whole replies for JSON.
    fn add_chart(&self, report: &mut Report) {
        let (kind, name) = match self.settings.reply {
            AskedForm::Stream => (LatencyKind::Itl, "itl"),
            AskedForm::Json => (LatencyKind::EndToEnd, "end-to-end"),
        };
        let ticks: Vec<String> = PERCENTILES.iter().map(|p| p.name.to_owned()).collect();
        let line = |server: &ServerFigures| {
            let point = |p: usize| Some((p as f64, server.median(Figure::Latency(kind, p))?));
            ChartLine { name: server.name.clone(), points: (0..PERCENTILES.len()).filter_map(point).collect() }
        };
        let lines: Vec<ChartLine> = self.servers.iter().map(line).collect();
        let chart = LineChart {
            title: &format!("{}: {}", kind.name(), self.settings.describe()),
            x_name: "percentile",
            y_name: "ms",
            ticks: Some(&ticks),
            lines: &lines,
        };
        report.chart(name, &chart);
    }

    /// Returns why the run failed: a reply with a fault, a request that failed without being refused, or no reply.
    fn failure(&self) -> Option<String> {
        let of = |count: fn(&RoundFigures) -> u64| {
            self.servers.iter().flat_map(|server| &server.rounds).map(count).sum::<u64>()
        };
        let n_faults = of(|round| round.faults.values().sum());
        let n_failed = of(|round| round.n_unexpected_failures);
        if n_faults + n_failed > 0 {
            return Some(format!("{n_faults} faults in replies, {n_failed} requests failed"));
        }
        let idle = self.servers.iter().find(|server| server.rounds.iter().all(|round| round.n_replies == 0))?;
        Some(format!("{} completed no reply in the measured time; a longer --duration may show one", idle.name))
    }
}

/// Examples of faults and failures that the table shows for each server.
const MAX_SHOWN_EXAMPLES: usize = 10;

impl LoadSettings {
    /// The settings in a line.
    fn describe(&self) -> String {
        let replies = match self.reply {
            AskedForm::Stream => "streams",
            AskedForm::Json => "JSON replies",
        };
        let api = match self.api {
            CalledApi::Chat => "chats",
            CalledApi::Completions => "completions",
        };
        let pace = match self.pace {
            Pace::Closed { concurrency } => format!("{concurrency} at once"),
            Pace::Open { per_second, concurrency } => format!("{per_second} a second, at most {concurrency} at once"),
        };
        let length = match self.length {
            RoundLength::Time(time) => format!("{} s", time.as_secs_f64()),
            RoundLength::Requests(n) => format!("{n} requests"),
        };
        let words = match self.input_words {
            InputWords { least, most } if least == most => least.to_string(),
            InputWords { least, most } => format!("{least} to {most}"),
        };
        format!(
            "{api}, {replies}, {pace}; {words} words in, {} tokens out; {} rounds of {length}",
            self.output_tokens, self.rounds
        )
    }
}

/// Three digits at least, and none after 1,000.
fn rounded(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 1e3 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}
