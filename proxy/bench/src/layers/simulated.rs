//! The gain of lent layers on a DGX Spark and an M3 Ultra, by their published rates with Llama-3.1-8B in FP16. Nothing was run on them.
//!
//! A prompt is computed in steps of several batches, as the engine does with workers: while one machine computes the last layers of a
//! batch, the other computes the first layers of the next. Hidden states cross the link once for each batch, and the rows of the
//! lent layers after each step. Left out: that a rate depends on the prompt's length and on the batch, and what copying costs.

use baton_planner::layer_split::LayerSplit;
use baton_tryout::machines::{DGX_SPARK, KV_BYTES_PER_TOKEN, M3_ULTRA, MachineSpec, WEIGHT_BYTES};
use serde::Serialize;

use crate::report::{Report, Row};

/// Layers of Llama-3.1-8B.
const N_LAYERS: u32 = 32;

/// Bytes of a token's hidden state: 4,096 values of 4 bytes.
const HIDDEN_BYTES: f64 = 4_096.0 * 4.0;

/// Tokens of a batch, and of a step and a last step on a pipeline, as in `engines/src/serving/step_budget/mod.rs`.
const BATCH: u32 = 256;
const STEP: u32 = 2_048;
const LAST_STEP: u32 = 1_024;

/// A round trip for each batch's hidden state and each step's rows, seconds.
const LATENCY: f64 = 300e-6;

/// Prompts, tokens.
const LENGTHS: [u32; 2] = [2_000, 8_000];

/// The prompt that `--lend-layers auto` measures, tokens.
const MEASURED: u32 = 2_048;

/// Links, Gb/s.
const LINKS: [f64; 3] = [10.0, 2.5, 1.0];

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct SimulatedLayers {
    note: &'static str,
    links: Vec<SimulatedLink>,
}

/// The figures of one link.
#[derive(Debug, Serialize)]
struct SimulatedLink {
    gbps: f64,
    rows: Vec<SimulatedLent>,
    /// The numbers that `--lend-layers auto` tries one after another; the last one stays.
    planned: Vec<u32>,
}

/// The figures with one number of lent layers.
#[derive(Debug, Clone, Serialize)]
struct SimulatedLent {
    /// Layers that the Spark computes; 0: the M3 Ultra computes alone.
    n_lent: u32,
    /// Weights and KV of the longest prompt on the Spark, GB.
    worker_gb: f64,
    /// The same on the M3 Ultra. The weights are there once, the KV of the layers that are not lent twice.
    own_gb: f64,
    /// Seconds to the first token of each length.
    ttft: [f64; LENGTHS.len()],
}

pub(super) fn run() -> SimulatedLayers {
    SimulatedLayers { note: "simulation", links: LINKS.into_iter().map(link).collect() }
}

fn link(gbps: f64) -> SimulatedLink {
    let pair = LendingPair { worker: DGX_SPARK, own: M3_ULTRA, bytes_per_second: gbps * 1e9 / 8.0 };
    let rows = (0..=N_LAYERS).map(|n_lent| row(&pair, n_lent)).collect();
    SimulatedLink { gbps, rows, planned: pair.planned(N_LAYERS) }
}

fn row(pair: &LendingPair, n_lent: u32) -> SimulatedLent {
    let share = f64::from(n_lent) / f64::from(N_LAYERS);
    let kv = f64::from(LENGTHS[LENGTHS.len() - 1]) * f64::from(KV_BYTES_PER_TOKEN);
    let of_other_engine = if n_lent == 0 { 0.0 } else { kv * (1.0 - share) };
    SimulatedLent {
        n_lent,
        worker_gb: (WEIGHT_BYTES + kv) * share / 1e9,
        own_gb: (WEIGHT_BYTES + kv + of_other_engine) / 1e9,
        ttft: LENGTHS.map(|n| pair.prefill(n, n_lent) + 1.0 / pair.own.decode_tps(n)),
    }
}

/// A machine that has the whole model, and a worker behind a link.
struct LendingPair {
    worker: MachineSpec,
    own: MachineSpec,
    bytes_per_second: f64,
}

impl LendingPair {
    /// Seconds to compute a prompt with the first `n_lent` layers lent, until all KV is at the machine that has the model.
    fn prefill(&self, n_tokens: u32, n_lent: u32) -> f64 {
        let tokens = f64::from(n_tokens);
        if n_lent == 0 {
            return tokens / self.own.prefill_tps;
        }
        let share = f64::from(n_lent) / f64::from(N_LAYERS);
        let mut now = 0.0;
        let mut left = n_tokens;
        while left > 0 {
            let step = step(left);
            left -= step;
            // When each machine, and the link, is free.
            let [mut worker, mut link, mut own] = [now; 3];
            for batch in batches(step) {
                let batch = f64::from(batch);
                worker += batch * share / self.worker.prefill_tps;
                link = worker.max(link) + batch * HIDDEN_BYTES / self.bytes_per_second + LATENCY;
                own = link.max(own) + batch * (1.0 - share) / self.own.prefill_tps;
            }
            // The rows of the step are exported before the next one begins.
            let rows = f64::from(step) * f64::from(KV_BYTES_PER_TOKEN) * share;
            now = own + rows / self.bytes_per_second + LATENCY;
        }
        now
    }
}

impl LendingPair {
    /// The numbers that `--lend-layers auto` lends one after another, with a worker whose memory holds `most` layers.
    fn planned(&self, most: u32) -> Vec<u32> {
        let tps = |n_lent| f64::from(MEASURED) / self.prefill(MEASURED, n_lent);
        LayerSplit { n_layers: N_LAYERS, most, own_tps: tps(0), n_batches: MEASURED / BATCH }.all(tps)
    }
}

/// Tokens of the next step: half of what is left, within the bounds.
fn step(left: u32) -> u32 {
    (left / 2).clamp(LAST_STEP, STEP).min(left)
}

fn batches(step: u32) -> impl Iterator<Item = u32> {
    (0..step.div_ceil(BATCH)).map(move |i| BATCH.min(step - i * BATCH))
}

pub(super) fn report(figures: &SimulatedLayers) -> Report {
    let mut report = Report::new("Simulated, by published rates");
    report.text(
        "Nothing was run on these machines: a DGX Spark computes the first layers of Llama-3.1-8B (FP16, 32 layers), an M3 Ultra the \
         others, in batches of 256 tokens. With 0 the M3 Ultra computes alone. Left out are that a rate depends on the prompt's length \
         and on the batch, and what copying costs.",
    );
    for SimulatedLink { gbps, rows, planned } in &figures.links {
        let fastest = |length: usize| rows.iter().min_by(|a, b| a.ttft[length].total_cmp(&b.ttft[length]));
        let last = planned.last().and_then(|n| rows.iter().find(|row| row.n_lent == *n));
        let is_named = |row: &SimulatedLent| fastest(1).into_iter().chain(last).any(|named| named.n_lent == row.n_lent);
        let head = ["layers lent", "GB on the Spark", "GB on the Mac", "2,000 tokens, s", "8,000 tokens, s"];
        report.text(format!("At {gbps} Gb/s:"));
        report.table(&head, rows.iter().filter(|row| row.n_lent % 4 == 0 || is_named(row)).map(cells));
        if let (Some(last), Some(short), Some(long)) = (last, fastest(0), fastest(1)) {
            let excess = [(short, 0), (long, 1)].map(|(best, i)| 100.0 * (last.ttft[i] / best.ttft[i] - 1.0));
            let tried: Vec<String> = planned.iter().map(u32::to_string).collect();
            report.text(format!(
                "`--lend-layers auto` tries {} and stays with the last one: 2,000 tokens take {:.1} % longer than with the best \
                 number ({}), 8,000 tokens {:.1} % ({}).",
                tried.join(", "),
                excess[0],
                short.n_lent,
                excess[1],
                long.n_lent,
            ));
        }
    }
    report
}

fn cells(row: &SimulatedLent) -> Row {
    let seconds = row.ttft.iter().map(|seconds| format!("{seconds:.2}"));
    let gb = [row.worker_gb, row.own_gb].map(|gb| format!("{gb:.1}"));
    [row.n_lent.to_string()].into_iter().chain(gb).chain(seconds).collect()
}

#[cfg(test)]
mod tests {
    use baton_tryout::machines::{M4_MAX, M5_MAX};

    use super::*;

    fn pair(gbps: f64) -> LendingPair {
        LendingPair { worker: DGX_SPARK, own: M3_ULTRA, bytes_per_second: gbps * 1e9 / 8.0 }
    }

    #[test]
    fn without_lent_layers_the_machine_computes_alone_and_on_a_fast_link_the_slower_part_decides() {
        assert_eq!(pair(10.0).prefill(2_000, 0), 2_000.0 / 1_470.0);
        // Long prompts in full pipelines, without a link.
        let fast = pair(1e9);
        let balanced = 26.0 / 32.0 / 5_570.0;
        let of_step = fast.prefill(2_048, 26) / 2_048.0;
        assert!((1.0..1.3).contains(&(of_step / balanced)), "filling the pipeline costs something: {of_step}");
        assert!(fast.prefill(8_000, 26) < fast.prefill(8_000, 32) && fast.prefill(8_000, 26) < fast.prefill(8_000, 8));
    }

    #[test]
    fn steps_and_batches_hold_all_tokens() {
        for n in [1, 255, 256, 1_500, 2_048, 8_000] {
            let mut left = n;
            while left > 0 {
                let step = step(left);
                assert_eq!(batches(step).sum::<u32>(), step, "{n}");
                assert!((1..=STEP).contains(&step), "{n}");
                left -= step;
            }
        }
    }

    #[test]
    fn the_planned_number_is_nearly_the_best() {
        // With other machines, a gain that only longer prompts have may be missed.
        for (own, bound) in [(M3_ULTRA, 1.05), (M4_MAX, 1.07), (M5_MAX, 1.07)] {
            for gbps in [1.0, 2.5, 5.0, 10.0, 25.0, 100.0] {
                for most in [2, 4, 8, 12, 16, 20, 24, 28, 32] {
                    let pair = LendingPair { own, ..pair(gbps) };
                    let planned = pair.planned(most);
                    let last = planned[planned.len() - 1];
                    for length in LENGTHS {
                        let best = (0..=most).map(|n| pair.prefill(length, n)).fold(f64::INFINITY, f64::min);
                        let excess = pair.prefill(length, last) / best;
                        assert!(excess <= bound, "{} {gbps} {most} {length}: {planned:?}, {excess}", own.name);
                    }
                }
            }
        }
    }

    #[test]
    fn the_report_names_what_is_planned() {
        let text = report(&run()).to_text();
        assert!(text.contains("Nothing was run on these machines"), "{text}");
        assert!(text.contains("tries 32, 23, 26 and stays with the last one"), "{text}");
    }

    #[test]
    fn a_slow_link_makes_lending_useless() {
        let helps = |gbps: f64| (1..=N_LAYERS).any(|n| pair(gbps).prefill(8_000, n) < pair(gbps).prefill(8_000, 0));
        assert!(helps(10.0) && !helps(0.1));
    }
}
