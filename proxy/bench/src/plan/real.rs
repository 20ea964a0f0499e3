//! Measures the planner with real nodes: processes with a real model on this machine, and links that a relay paces.
//!
//! Two processes share the machine's cores. The prefill node gets two threads and the decode node one, so that handoffs
//! can pay.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_link::Engine;
use baton_planner::reason::RouteKind;
use baton_proxy::serve::CommandFailure;
use baton_proxy::targets::models::{self, ServedModel};
use baton_proxy::targets::nodes::{Health, Node};
use baton_tryout::node_process::NodeProcess;
use baton_tryout::stats::percentile;
use serde::Serialize;
use tokio::time::Instant;

use super::cells::row;
use super::cluster::Cluster;
use super::grid::{self, ClusterLabel, GridCell, GridRequest, MeasuredCell, Summary};
use super::report::{SUMMARY, summary_cells};
use crate::relay::Relay;
use crate::report::{Report, Row};

/// Prompt lengths, tokens.
const PROMPTS: [u32; 3] = [64, 300, 900];
/// Output lengths, tokens.
const OUTPUTS: [u32; 2] = [8, 32];
/// Link rates, gigabits per second. One carries KV more slowly than it is computed, one about as fast, one faster.
const LINKS: [f64; 3] = [0.02, 0.1, 1.0];

/// The number of requests on each link before measurements count.
const WARM_UP: usize = 6;
/// Runs of each request, planned and on each fixed route. Their medians are compared, because two runs of one route
/// differ by a fifth on a busy machine.
const RUNS: usize = 3;

/// The longest calibration; it usually takes some seconds.
pub(super) const CALIBRATION_DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize)]
pub(super) struct RealFigures {
    note: &'static str,
    /// One for each link's gigabits per second, and one for all links.
    summary: Vec<(Option<f64>, Summary)>,
    /// Requests whose planned route is the fixed one that completed first.
    n_fastest: usize,
    /// Medians of several runs each.
    cells: Vec<GridCell>,
}

/// Runs the sub-grid on each link.
pub(super) async fn run(model: PathBuf) -> Result<RealFigures, CommandFailure> {
    let key = uuid::Uuid::new_v4().to_string();
    let prefill = start(&key, &model, "prefill", "2").await?;
    let decode = start(&key, &model, "decode", "1").await?;
    let mut cells = Vec::new();
    for gbps in LINKS {
        let relay = Relay::start(prefill.url.trim_start_matches("http://").parse()?, gbps * 1e9 / 8.0).await?;
        // Rates that were learned on another link no longer hold.
        let prefill = node("prefill", &prefill, Some(relay.url.clone())).await?;
        let decode = node("decode", &decode, None).await?;
        let name = OnceLock::from("model".to_owned());
        let served = Arc::new(ServedModel::new(name, Vec::new(), vec![decode], vec![prefill]));
        calibrate(&served).await?;
        eprintln!("real nodes: a link of {}", link_name(gbps));
        let of_length = |n_prompt: u32| OUTPUTS.map(|n_output| GridRequest { n_prompt, cached: 0.0, n_output });
        let requests = PROMPTS.map(of_length).concat().repeat(RUNS);
        let label = ClusterLabel { pair: "real", gbps };
        let measured = medians(&grid::measure(&Cluster::of(served), label, requests, WARM_UP).await?);
        measured.iter().for_each(|cell| eprintln!("{}", request_cells(cell).join("  ")));
        cells.extend(measured);
    }
    let of = |wanted: Option<f64>| {
        let cells: Vec<&GridCell> = cells.iter().filter(|cell| wanted.is_none_or(|gbps| gbps == cell.gbps)).collect();
        (wanted, grid::summary("real", &cells))
    };
    let summary = LINKS.map(Some).into_iter().chain([None]).map(of).collect();
    let n_fastest = cells.iter().filter(|cell| is_fastest(cell)).count();
    Ok(RealFigures { note: "real nodes on one machine, paced links", summary, n_fastest, cells })
}

/// Makes one cell for each request, with the medians of its runs.
fn medians(runs: &[GridCell]) -> Vec<GridCell> {
    let of = |n_prompt, n_output| {
        let runs: Vec<&GridCell> =
            runs.iter().filter(|run| (run.n_prompt, run.n_output) == (n_prompt, n_output)).collect();
        // The route of most runs.
        let handoffs = runs.iter().filter(|run| run.planned.prefill.is_some()).count();
        let mut cell = (*runs.iter().find(|run| run.planned.prefill.is_some() == (2 * handoffs > runs.len()))?).clone();
        cell.planned = median(&cell.planned, runs.iter().map(|run| &run.planned));
        for (at, fixed) in cell.fixed.iter_mut().enumerate() {
            *fixed = median(fixed, runs.iter().filter_map(|run| run.fixed.get(at)));
        }
        Some(cell)
    };
    PROMPTS.iter().flat_map(|&n| OUTPUTS.map(|n_output| (n, n_output))).filter_map(|(n, out)| of(n, out)).collect()
}

/// Makes a run on this route with the median times of `runs`.
fn median<'a>(route: &MeasuredCell, runs: impl Iterator<Item = &'a MeasuredCell>) -> MeasuredCell {
    let (ttft, completion): (Vec<f64>, Vec<f64>) = runs.map(|run| (run.ttft, run.completion)).unzip();
    MeasuredCell { ttft: percentile(&ttft, 50.0), completion: percentile(&completion, 50.0), ..*route }
}

fn is_fastest(cell: &GridCell) -> bool {
    let best = cell.best(|_| true);
    best.is_some_and(|run| (run.decode, run.prefill) == (cell.planned.decode, cell.planned.prefill))
}

pub(super) async fn start(key: &str, model: &Path, role: &str, threads: &str) -> Result<NodeProcess, CommandFailure> {
    let args = ["--role", role, "--threads", threads, "--ctx-size", "2048", "--model"].map(OsString::from);
    NodeProcess::start(key, args.into_iter().chain([model.into()])).await
}

async fn node(name: &str, process: &NodeProcess, url: Option<String>) -> Result<Arc<Node>, CommandFailure> {
    let health = Health::new(name);
    health.note_answer(Arc::new(process.engine.info().await?));
    Ok(Node::new(name.to_owned(), url, Arc::clone(&process.engine) as Arc<dyn Engine>, health))
}

/// Waits until every rate was measured on idle nodes.
async fn calibrate(model: &Arc<ServedModel>) -> Result<(), CommandFailure> {
    models::keep_calibrated(model);
    let began = Instant::now();
    loop {
        let decode = model.decode[0].rates();
        let prefill = model.prefill[0].rates();
        let has_rates = decode.prefill.is_known() && decode.decode.is_known() && prefill.prefill.is_known();
        if has_rates && model.routes.view().links[0][0].bytes_per_second > 0.0 {
            return Ok(());
        }
        if began.elapsed() > CALIBRATION_DEADLINE {
            return Err(CommandFailure("the nodes could not be calibrated".into()));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl RealFigures {
    pub(super) fn report(&self) -> Report {
        let mut report = Report::new("Real nodes");
        report.text(format!("Real nodes on this machine, links paced by a relay; medians of {RUNS} runs."));
        report.text("Planned routes compared with the best fixed route (p50 / p95 / max):");
        let name = |gbps: Option<f64>| gbps.map_or_else(|| "all".to_owned(), link_name);
        let rows = self.summary.iter().map(|(gbps, line)| row(name(*gbps), summary_cells(line)));
        report.table(&[&["link"][..], &SUMMARY].concat(), rows);
        let (n_fastest, n) = (self.n_fastest, self.cells.len());
        report.text(format!("The planned route is the best fixed route for {n_fastest} of {n} requests."));
        report.table(&REQUESTS, self.cells.iter().map(request_cells));
        report
    }
}

const REQUESTS: [&str; 8] =
    ["link", "prompt", "reply", "planned", "TTFT, s", "direct, s", "handoff, s", "predicted, s"];

fn request_cells(cell: &GridCell) -> Row {
    let ttft = |kind: RouteKind| cell.best(|run| run.kind() == kind).map_or(0.0, |run| run.ttft);
    let predicted = cell.predicted_ttft.unwrap_or_default();
    let seconds = [cell.planned.ttft, ttft(RouteKind::Direct), ttft(RouteKind::Handoff), predicted];
    let request = [cell.n_prompt.to_string(), cell.n_output.to_string(), cell.planned.kind().as_str().to_owned()];
    row(link_name(cell.gbps), request.into_iter().chain(seconds.map(|seconds| format!("{seconds:.2}"))))
}

fn link_name(gbps: f64) -> String {
    format!("{:.0} Mb/s", gbps * 1e3)
}
