//! Compares planned routes with every fixed route, over a grid of requests and machines. Shows that the planner is never
//! slower.

use baton_planner::cost::Route;
use baton_planner::reason::RouteKind;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_tryout::machines::{DGX_SPARK, M3_ULTRA, M4_MAX, MachineSpec, link};
use baton_tryout::stats::percentile;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use super::cluster::{Cluster, ClusterSpec, PAUSE, StreamTimes};

/// Prompt lengths, tokens.
pub(super) const PROMPTS: [u32; 6] = [16, 64, 256, 1_024, 4_096, 8_000];
/// Shares of the prompt that an earlier turn left on both nodes.
const CACHED: [f64; 3] = [0.0, 0.5, 0.95];
/// Output lengths, tokens.
const OUTPUTS: [u32; 3] = [16, 256, 1_000];
/// Link rates, gigabits per second.
pub(super) const LINKS: [f64; 6] = [0.1, 1.0, 2.5, 10.0, 25.0, 100.0];

/// The number of requests before measurements count.
const WARM_UP: usize = 24;

#[derive(Debug, Clone, Copy)]
pub(super) struct MachinePair {
    pub name: &'static str,
    prefill: MachineSpec,
    decode: MachineSpec,
    /// True if the first machine may also generate.
    prefill_decodes: bool,
}

/// The M3 Ultra, and a machine whose prefill is `times` as fast.
const fn ratio(name: &'static str, times: f64) -> MachinePair {
    let prefill =
        MachineSpec { name: "prefill", prefill_tps: times * M3_ULTRA.prefill_tps, bandwidth: M3_ULTRA.bandwidth };
    MachinePair { name, prefill, decode: M3_ULTRA, prefill_decodes: false }
}

pub(super) const PAIRS: [MachinePair; 5] = [
    ratio("1×", 1.0),
    ratio("2×", 2.0),
    ratio("4×", 4.0),
    MachinePair { name: "Spark, M3 Ultra", prefill: DGX_SPARK, decode: M3_ULTRA, prefill_decodes: true },
    MachinePair { name: "Spark, M4 Max", prefill: DGX_SPARK, decode: M4_MAX, prefill_decodes: true },
];

/// The machines and the link of a cluster, as reports name them.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClusterLabel {
    pub pair: &'static str,
    pub gbps: f64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct GridRequest {
    pub n_prompt: u32,
    /// The share of the prompt that all nodes have cached.
    pub cached: f64,
    pub n_output: u32,
}

/// A request of the grid on one pair of machines, and the result of each route.
#[derive(Debug, Clone, Serialize)]
pub(super) struct GridCell {
    pub pair: &'static str,
    pub gbps: f64,
    pub n_prompt: u32,
    pub cached: f64,
    pub n_output: u32,
    pub planned: MeasuredCell,
    /// Seconds to the first token.
    pub predicted_ttft: Option<f64>,
    pub fixed: Vec<MeasuredCell>,
}

/// One run. Seconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct MeasuredCell {
    pub decode: usize,
    pub prefill: Option<usize>,
    pub ttft: f64,
    pub completion: f64,
}

impl MeasuredCell {
    pub(super) fn new(route: Route, times: StreamTimes) -> MeasuredCell {
        let StreamTimes { ttft, completion } = times;
        MeasuredCell { decode: route.decode, prefill: route.prefill, ttft, completion }
    }

    pub(super) fn kind(&self) -> RouteKind {
        Route { decode: self.decode, prefill: self.prefill }.kind()
    }
}

impl GridCell {
    /// The fixed route that completed first among those for which `wanted` returns true.
    pub(super) fn best(&self, wanted: impl Fn(&MeasuredCell) -> bool) -> Option<&MeasuredCell> {
        self.fixed.iter().filter(|run| wanted(run)).min_by(|a, b| a.completion.total_cmp(&b.completion))
    }
}

/// The extra time of planned routes over others, as shares: 0.05 is 5 %.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Regret {
    pub p50: f64,
    pub p95: f64,
    pub max: f64,
}

/// Regrets of some cells.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Summary {
    pub pair: &'static str,
    pub n: usize,
    /// Cells whose planned route was a handoff.
    pub n_handoffs: usize,
    /// Against the fixed route that completed first.
    pub ttft: Regret,
    pub completion: Regret,
    /// Against the direct route that completed first; negative where the plan was faster.
    pub ttft_over_direct: Regret,
    pub completion_over_direct: Regret,
}

/// Runs the whole grid.
pub(super) async fn run() -> Result<Vec<GridCell>, CommandFailure> {
    let mut cells = Vec::new();
    for pair in &PAIRS {
        for gbps in LINKS {
            cells.extend(run_on(pair, gbps).await?);
        }
    }
    Ok(cells)
}

async fn run_on(pair: &MachinePair, gbps: f64) -> Result<Vec<GridCell>, CommandFailure> {
    let MachinePair { prefill, decode, prefill_decodes, .. } = *pair;
    let speeds = ClusterSpec::spark_and_mac(4_096);
    let spec = ClusterSpec { prefill, prefill_decodes, decode, link: link(gbps), ..speeds };
    let cluster = Cluster::calibrated(&spec).await?;
    let mut requests = Vec::new();
    for n_prompt in PROMPTS {
        for cached in CACHED {
            requests.extend(OUTPUTS.map(|n_output| GridRequest { n_prompt, cached, n_output }));
        }
    }
    measure(&cluster, ClusterLabel { pair: pair.name, gbps }, requests, WARM_UP).await
}

/// Runs `n_warm_up` random requests to learn from, then every request on its planned route and on every fixed route.
pub(super) async fn measure(
    cluster: &Cluster,
    ClusterLabel { pair, gbps }: ClusterLabel,
    mut requests: Vec<GridRequest>,
    n_warm_up: usize,
) -> Result<Vec<GridCell>, CommandFailure> {
    let mut rng = StdRng::seed_from_u64(2);
    for _ in 0..n_warm_up {
        let request = requests[rng.random_range(0..requests.len())];
        cluster.run_planned(None, prompt(cluster, request).await?, request.n_output).await?;
    }
    // In random order: rates that were learned at one size must serve another size.
    requests.shuffle(&mut rng);
    let mut cells = Vec::new();
    for request in requests {
        let GridRequest { n_prompt, cached, n_output } = request;
        let planned = cluster.run_planned(None, prompt(cluster, request).await?, n_output).await?;
        let mut fixed = Vec::new();
        for route in cluster.routes() {
            let prompt = prompt(cluster, request).await?;
            fixed.push(MeasuredCell::new(route, cluster.run_fixed(route, prompt, n_output).await?));
        }
        let predicted_ttft = planned.prediction.map(|prediction| prediction.ttft_ms / 1e3);
        let planned = MeasuredCell::new(planned.route, planned.times);
        cells.push(GridCell { pair, gbps, n_prompt, cached, n_output, planned, predicted_ttft, fixed });
    }
    Ok(cells)
}

/// Makes a prompt whose start all nodes have cached, and waits until they are idle.
async fn prompt(cluster: &Cluster, request: GridRequest) -> Result<Vec<Token>, CommandFailure> {
    let prompt = cluster.fresh_prompt(request.n_prompt);
    let n_cached = (f64::from(request.n_prompt) * request.cached) as usize;
    cluster.prime(&prompt[..n_cached]).await?;
    tokio::time::sleep(PAUSE).await;
    Ok(prompt)
}

fn fastest(cell: &GridCell) -> Option<&MeasuredCell> {
    cell.best(|_| true)
}

fn direct(cell: &GridCell) -> Option<&MeasuredCell> {
    cell.best(|run| run.prefill.is_none())
}

/// Summarizes the cells of each pair, and all cells.
pub(super) fn summarize(cells: &[GridCell]) -> Vec<Summary> {
    let of_pair = |pair: &MachinePair| {
        let cells: Vec<&GridCell> = cells.iter().filter(|cell| cell.pair == pair.name).collect();
        summary(pair.name, &cells)
    };
    PAIRS.iter().map(of_pair).chain([summary("all", &cells.iter().collect::<Vec<_>>())]).collect()
}

/// Summarizes cells under a name.
pub(super) fn summary(pair: &'static str, cells: &[&GridCell]) -> Summary {
    let over = |than: fn(&GridCell) -> Option<&MeasuredCell>, time: fn(&MeasuredCell) -> f64, least: f64| {
        let shares = cells.iter().filter_map(|cell| Some((time(&cell.planned) / time(than(cell)?) - 1.0).max(least)));
        let shares: Vec<f64> = shares.collect();
        let at = |p| percentile(&shares, p);
        Regret { p50: at(50.0), p95: at(95.0), max: at(100.0) }
    };
    Summary {
        pair,
        n: cells.len(),
        n_handoffs: cells.iter().filter(|cell| cell.planned.prefill.is_some()).count(),
        ttft: over(fastest, |run| run.ttft, 0.0),
        completion: over(fastest, |run| run.completion, 0.0),
        ttft_over_direct: over(direct, |run| run.ttft, -1.0),
        completion_over_direct: over(direct, |run| run.completion, -1.0),
    }
}
