//! What speculation would gain on machines that people have, by their published rates and the engine's cost model. Nothing was run
//! on them.

use baton_engines::serving::simulated::{Acceptance, ChosenCost, LONGEST_DRAFT, SimulatedDrafts};
use baton_engines::serving::simulated_node::SimulatedNode;
use baton_tryout::machines::{DGX_SPARK, M3_ULTRA, M4_MAX, M5_MAX, MachineSpec};
use baton_tryout::stats::percentile;
use serde::Serialize;

use crate::report::{Report, Row, one_decimal};

const MACHINES: [MachineSpec; 4] = [M3_ULTRA, M4_MAX, M5_MAX, DGX_SPARK];

/// The share of the bandwidth that a decode step uses, as in [`baton_tryout::machines`].
const USABLE: f64 = 0.8;

/// Bytes of a weight: 4.5 bits, as in Q4_K.
const WEIGHT_BYTES: f64 = 0.5625;

/// Parameters of Llama-3.1-8B, of which the machines' prefill rates are.
const RATED_PARAMETERS: f64 = 8.03e9;

/// Tokens of each stream's context.
const N_CONTEXT: f64 = 4_096.0;

/// Shares of guesses that are right.
const CHANCES: [f64; 5] = [0.0, 0.3, 0.6, 0.8, 0.95];

const STREAMS: [usize; 2] = [1, 8];

/// Seconds of a round trip between a decode node and its draft node.
const ROUND_TRIP: f64 = 0.000_3;

/// The machine that drafts for the others.
const DRAFTS: MachineSpec = DGX_SPARK;

/// A model's parameters.
struct SimulatedModel {
    name: &'static str,
    /// Read for every step.
    n_always: f64,
    /// Experts, those of a token, and the parameters of all. No experts: 0.
    n_experts: f64,
    n_chosen: f64,
    n_in_experts: f64,
    /// Bytes of KV a token.
    kv_bytes: f64,
    /// The longest draft: a hybrid keeps so many states.
    longest: usize,
}

const DENSE: SimulatedModel = SimulatedModel {
    name: "",
    n_always: 0.0,
    n_experts: 0.0,
    n_chosen: 0.0,
    n_in_experts: 0.0,
    kv_bytes: 0.0,
    longest: LONGEST_DRAFT,
};

/// The small models of draft nodes: Llama-3.2-1B for 8B and 70B, Qwen3.5-0.8B for the hybrids.
const SMALL_DENSE: SimulatedModel = SimulatedModel { name: "1B", n_always: 1.24e9, kv_bytes: 32_768.0, ..DENSE };
const SMALL_HYBRID: SimulatedModel = SimulatedModel { name: "0.8B", n_always: 0.8e9, kv_bytes: 12_288.0, ..DENSE };

const MODELS: [SimulatedModel; 4] = [
    SimulatedModel { name: "8B", n_always: RATED_PARAMETERS, kv_bytes: 131_072.0, ..DENSE },
    SimulatedModel { name: "27B hybrid", n_always: 27e9, kv_bytes: 65_536.0, longest: 8, ..DENSE },
    SimulatedModel {
        name: "35B-A3B hybrid",
        n_always: 2e9,
        n_experts: 256.0,
        n_chosen: 8.0,
        n_in_experts: 33e9,
        kv_bytes: 20_480.0,
        longest: 8,
    },
    SimulatedModel { name: "70B", n_always: 70.6e9, kv_bytes: 327_680.0, ..DENSE },
];

impl SimulatedModel {
    /// The model with which a draft node guesses for it.
    fn small(&self) -> &'static SimulatedModel {
        if self.longest < LONGEST_DRAFT { &SMALL_HYBRID } else { &SMALL_DENSE }
    }

    /// Parameters that compute a token.
    fn n_active(&self) -> f64 {
        self.n_always + if self.n_experts > 0.0 { self.n_in_experts * self.n_chosen / self.n_experts } else { 0.0 }
    }

    /// Bytes that a step reads. Of the experts those that any of its rows has chosen; each row chooses for itself.
    fn step_bytes(&self, n_rows: usize, n_streams: usize) -> f64 {
        let missed =
            if self.n_experts > 0.0 { (1.0 - self.n_chosen / self.n_experts).powi(n_rows as i32) } else { 1.0 };
        let weights = self.n_always + self.n_in_experts * (1.0 - missed);
        WEIGHT_BYTES * weights + self.kv_bytes * N_CONTEXT * n_streams as f64
    }

    /// Seconds of a prompt's row: by the parameters that compute it.
    fn row_seconds(&self, machine: &MachineSpec) -> f64 {
        self.n_active() / RATED_PARAMETERS / machine.prefill_tps
    }

    /// Seconds of a step, as if reading and computing did not overlap.
    fn step_seconds(&self, machine: &MachineSpec, n_rows: usize, n_streams: usize) -> f64 {
        let reading = self.step_bytes(n_rows, n_streams) / (USABLE * machine.bandwidth);
        reading + self.row_seconds(machine) * n_rows as f64
    }
}

/// The gain of drafts that cost nothing, or of a draft node, on a machine.
#[derive(Debug, Serialize)]
pub(super) struct SimulatedGain {
    model: &'static str,
    machine: &'static str,
    n_streams: usize,
    /// The share of guesses that are right.
    chance: f64,
    /// Tokens per second of a stream without drafts.
    without_tps: f64,
    /// Times as many with chosen lengths, and their mean.
    ratio: f64,
    mean_length: f64,
    /// The best length for all drafts, and times as many with it. Not known of a draft node: its candidates come when they come.
    best: Option<(usize, f64)>,
}

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct SimulatedGains {
    rows: Vec<SimulatedGain>,
    draft_node: Vec<SimulatedGain>,
    /// How much slower chosen lengths are than the best fixed ones, the 95th percentile.
    regret_p95: f64,
    /// The lowest ratio to no drafts.
    lowest_ratio: f64,
}

/// Simulates all machines and models.
pub(super) fn run() -> SimulatedGains {
    let (mut rows, mut draft_node) = (Vec::new(), Vec::new());
    for n_streams in STREAMS {
        for model in &MODELS {
            for machine in &MACHINES {
                let streams = CHANCES.map(|chance| SimulatedStreams { model, machine, n_streams, chance });
                rows.extend(streams.map(|streams| streams.gain()));
                if machine.name != DRAFTS.name {
                    draft_node.extend(streams.map(|streams| streams.node_gain()));
                }
            }
        }
    }
    let regrets: Vec<f64> = rows.iter().filter_map(|row| Some(row.best?.1 / row.ratio - 1.0)).collect();
    let ratios = rows.iter().map(|row| row.ratio).chain(draft_node.iter().map(|row| row.ratio));
    let lowest_ratio = ratios.fold(f64::INFINITY, f64::min);
    SimulatedGains { regret_p95: percentile(&regrets, 95.0), lowest_ratio, rows, draft_node }
}

/// Streams of a model on a machine.
#[derive(Clone, Copy)]
struct SimulatedStreams<'s> {
    model: &'s SimulatedModel,
    machine: &'s MachineSpec,
    n_streams: usize,
    chance: f64,
}

impl SimulatedStreams<'_> {
    fn step_seconds(&self, n_rows: usize) -> f64 {
        self.model.step_seconds(self.machine, n_rows, self.n_streams)
    }

    /// With drafts that cost nothing.
    fn gain(&self) -> SimulatedGain {
        let SimulatedStreams { model, machine, n_streams, chance } = *self;
        let drafts = SimulatedDrafts {
            step_seconds: &|n_rows| self.step_seconds(n_rows),
            row_seconds: model.row_seconds(machine),
            n_streams,
            longest: model.longest,
            chance: Acceptance::Constant(chance),
            delay: 0.0,
            pass: 0.0,
        };
        let (best_length, best) = drafts.best_fixed();
        self.row(drafts.chosen(1), Some((best_length, self.step_seconds(n_streams) / best)))
    }

    /// With a draft node.
    fn node_gain(&self) -> SimulatedGain {
        let SimulatedStreams { model, machine, n_streams, chance } = *self;
        let node = SimulatedNode {
            step_seconds: &|n_rows| self.step_seconds(n_rows),
            row_seconds: model.row_seconds(machine),
            n_streams,
            longest: model.longest,
            chance,
            round_trip: ROUND_TRIP,
            interval: model.small().step_seconds(&DRAFTS, n_streams, n_streams),
        };
        self.row(node.chosen(1), None)
    }

    fn row(&self, chosen: ChosenCost, best: Option<(usize, f64)>) -> SimulatedGain {
        let without = self.step_seconds(self.n_streams);
        SimulatedGain {
            model: self.model.name,
            machine: self.machine.name,
            n_streams: self.n_streams,
            chance: self.chance,
            without_tps: 1.0 / without,
            ratio: without / chosen.seconds,
            mean_length: chosen.mean_length,
            best,
        }
    }
}

/// The tables.
pub(super) fn report(gains: &SimulatedGains) -> Report {
    let mut report = Report::new("Simulated, by published rates");
    report.text(
        "Nothing was run on these machines. The engine's own choice of lengths, with steps that cost what published rates give: 4.5 \
         bits a weight and the KV of 4,096 tokens are read at 0.8 of the bandwidth, and each row is computed as in prefill, without \
         overlap. The hybrids take back at most 8 tokens.",
    );
    for n_streams in STREAMS {
        let streams = if n_streams == 1 { "One stream".to_owned() } else { format!("{n_streams} streams, each") };
        report.text(format!(
            "{streams}: tokens/s without guesses, and times as many by the share of guesses that are right; in parentheses the mean \
             length of drafts."
        ));
        let head: Row = ["model", "machine", "without"]
            .map(str::to_owned)
            .into_iter()
            .chain(CHANCES.map(|c| c.to_string()))
            .collect();
        let table = |report: &mut Report, gains: &[SimulatedGain]| {
            let of_streams: Vec<&SimulatedGain> = gains.iter().filter(|row| row.n_streams == n_streams).collect();
            report.table(&head, of_streams.chunks(CHANCES.len()).map(cells));
        };
        table(&mut report, &gains.rows);
        report.text(format!(
            "{streams}, whose guesses a {} makes, 0.3 ms away, with Llama-3.2-1B for 8B and 70B, and Qwen3.5-0.8B for the hybrids:",
            DRAFTS.name
        ));
        table(&mut report, &gains.draft_node);
    }
    report.text(format!(
        "Slower than the best fixed length by at most {:.1} % (p95). The lowest ratio to no guesses: {:.3}.",
        gains.regret_p95 * 100.0,
        gains.lowest_ratio
    ));
    report
}

/// The cells of a model on a machine: a row for each share.
fn cells(of_machine: &[&SimulatedGain]) -> Row {
    let first =
        of_machine.first().map(|row| [row.model.to_owned(), row.machine.to_owned(), one_decimal(row.without_tps)]);
    let gains = of_machine.iter().map(|row| format!("{:.2} ({:.1})", row.ratio, row.mean_length));
    first.into_iter().flatten().chain(gains).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_published_machine_is_slowed_and_those_bound_by_bandwidth_gain() {
        let gains = run();
        assert!(gains.regret_p95 <= 0.05, "{}", gains.regret_p95);
        assert!(gains.lowest_ratio >= 0.97, "{}", gains.lowest_ratio);
        let gain = |model: &str, chance: f64| {
            let of = |row: &&SimulatedGain| {
                row.model == model && row.machine == "M3 Ultra" && row.n_streams == 1 && row.chance == chance
            };
            gains.rows.iter().find(of).unwrap().ratio
        };
        let of_node = |model: &str| {
            let of = |row: &&SimulatedGain| row.model == model && row.n_streams == 1 && row.chance == 0.8;
            gains.draft_node.iter().filter(of).map(|row| row.ratio).fold(f64::INFINITY, f64::min)
        };
        assert!(of_node("70B") > of_node("8B"), "the slower the steps, the more a pass elsewhere brings");
        assert!(gain("8B", 0.95) > 1.5 && gain("8B", 0.0) < 1.01);
        assert!(gain("35B-A3B hybrid", 0.8) < gain("8B", 0.8), "further rows read further experts");
        assert!(report(&gains).to_text().contains("Nothing was run on these machines"));
    }
}
