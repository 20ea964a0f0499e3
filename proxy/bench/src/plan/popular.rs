//! The models that people run now, on a DGX Spark and an M3 Ultra: when a handoff pays.
//!
//! Computed by the planner from rates that others published (each line names them); nothing was run on these machines.

use baton_planner::cost::candidates;
use baton_planner::rates::{Curve, NodeRates, TransferRates};
use baton_planner::snapshot::{HeldTokens, KvSize, NodeView, RequestSize, Snapshot};
use serde::Serialize;

use super::cells::{row, seconds};
use crate::report::Report;

/// Prompt lengths, tokens.
const PROMPTS: [u32; 7] = [4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 262_144];

/// The links, gigabits per second.
const LINKS: [f64; 2] = [10.0, 2.5];

/// What the second turn of a conversation adds, tokens. Both machines hold the rest.
const NEXT_TURN: u32 = 1_024;

/// The part of a link's rate that is left for data.
const NET_OF_HEADERS: f64 = 0.94;

/// The part of the states' time on the wire that shows when each layer's state leaves as soon as it is computed.
const AFTER_PREFILL_STATES: f64 = 0.05;

/// A model with the published rates of both machines.
struct PopularModel {
    name: &'static str,
    /// Bytes of KV a token.
    kv_bytes: u32,
    /// Bytes of a sequence's states.
    state_bytes: u64,
    /// Prompt tokens per second by prompt length.
    spark: &'static [(f64, f64)],
    mac: &'static [(f64, f64)],
    /// Tokens per second of one stream on the Mac.
    mac_decode: f64,
    /// Where the rates come from.
    source: &'static str,
}

const MODELS: [PopularModel; 3] = [
    PopularModel {
        name: "Qwen3.6-27B",
        kv_bytes: 65_536,
        state_bytes: 156_893_184,
        spark: &[(8_192.0, 2_575.0)],
        mac: &[(8_192.0, 437.0)],
        mac_decode: 36.5,
        source: "Spark: vLLM, NVFP4, one length. M3 Ultra: MLX, 4 bits, for decoding; its prefill is that of Llama-3.1-8B, 1,470 tok/s, by the number of parameters",
    },
    PopularModel {
        name: "Qwen3.6-35B-A3B",
        kv_bytes: 20_480,
        state_bytes: 65_863_680,
        spark: &[(8_192.0, 6_265.0), (131_072.0, 2_515.0)],
        mac: &[(2_048.0, 2_273.0), (16_384.0, 1_023.0)],
        mac_decode: 92.0,
        source: "Spark: vLLM, NVFP4 at 8K and FP8 at 128K. M3 Ultra: MLX for decoding; prefill of Qwen3-30B-A3B on an M2 Ultra, llama.cpp",
    },
    PopularModel {
        name: "DeepSeek V4 Flash",
        kv_bytes: 6_880,
        state_bytes: 17_800_000,
        spark: &[(8_192.0, 1_768.0), (16_384.0, 1_743.0), (32_768.0, 1_610.0)],
        mac: &[(2_048.0, 596.0), (16_384.0, 399.0), (65_536.0, 384.0), (262_144.0, 322.0)],
        mac_decode: 38.0,
        source: "two Sparks: vLLM, FP8, up to 32K; longer prompts as fast as 32K, which no one measured. M3 Ultra: ds4, 2 bits, and the published run below",
    },
];

/// One prompt of one model over one link. Seconds to the first token.
#[derive(Debug, Clone, Serialize)]
struct PopularLine {
    model: &'static str,
    gbps: f64,
    n_prompt: u32,
    direct: f64,
    handoff: f64,
    /// The part of the transfer that the prefill does not hide.
    after_prefill: f64,
    /// With [`NEXT_TURN`] more tokens after this prompt.
    next_direct: f64,
    next_handoff: f64,
}

/// One prompt of the only published run of such a pair: the whole KV went over a disk after the prefill.
#[derive(Debug, Clone, Serialize)]
struct PublishedHandoff {
    n_prompt: u32,
    published_direct: f64,
    published_handoff: f64,
    /// As planned, overlapped, over 10 Gb/s.
    planned: f64,
}

/// Prompt lengths and seconds of the published run: on the Mac alone, and handed over.
const PUBLISHED: [(u32, f64, f64); 3] = [(17_000, 42.6, 17.2), (79_000, 205.8, 56.4), (236_000, 732.0, 187.6)];

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct PopularFigures {
    popular: Vec<PopularLine>,
    published_handoffs: Vec<PublishedHandoff>,
}

impl PopularFigures {
    /// The figures alone.
    pub(super) fn report(&self) -> Report {
        let mut report = Report::new("Published rates");
        self.add_to(&mut report);
        report
    }

    /// Adds all tables.
    pub(super) fn add_to(&self, report: &mut Report) {
        report.text(
            "Models that people run now, a DGX Spark (two for DeepSeek) and an M3 Ultra, planned with published rates; TTFT, and \
             that of a next turn with 1,024 more tokens:",
        );
        let rows = self.popular.iter().map(|line| {
            let times =
                [line.direct, line.handoff, line.after_prefill, line.next_direct, line.next_handoff].map(seconds);
            row(line.model, [line.gbps.to_string(), line.n_prompt.to_string()].into_iter().chain(times))
        });
        let head = [
            "model",
            "Gb/s",
            "tokens",
            "direct",
            "handoff",
            "after the prefill",
            "next turn, direct",
            "next turn, handoff",
        ];
        report.table(&head, rows);
        for (model, source) in sources() {
            report.text(format!("Rates of {model}: {source}."));
        }
        for (model, gbps, first) in break_even() {
            let from = first.map_or_else(|| "at no length".to_owned(), |n| format!("from {n} tokens on"));
            report.text(format!("{model}, {gbps} Gb/s: a handoff is faster {from}."));
        }
        report.text("The published run of DeepSeek V4 Flash, whose KV went over a disk after the prefill:");
        let rows = self.published_handoffs.iter().map(|line| {
            let times = [line.published_direct, line.published_handoff, line.planned].map(seconds);
            row(line.n_prompt, times)
        });
        report.table(&["tokens", "M3 Ultra alone", "published handoff", "planned, overlapped"], rows);
    }
}

/// Computes all figures.
pub(super) fn run() -> PopularFigures {
    PopularFigures { popular: lines(), published_handoffs: published() }
}

fn lines() -> Vec<PopularLine> {
    let cases = MODELS.iter().flat_map(|model| LINKS.map(|gbps| (model, gbps)));
    let line = |(model, gbps): (&PopularModel, f64), n_prompt| {
        let (direct, handoff, after_prefill) = times(model, gbps, n_prompt, 0);
        let (next_direct, next_handoff, _) = times(model, gbps, n_prompt + NEXT_TURN, n_prompt);
        PopularLine { model: model.name, gbps, n_prompt, direct, handoff, after_prefill, next_direct, next_handoff }
    };
    cases.flat_map(|case| PROMPTS.map(|n_prompt| line(case, n_prompt))).collect()
}

/// The models, and where their rates come from.
fn sources() -> impl Iterator<Item = (&'static str, &'static str)> {
    MODELS.iter().map(|model| (model.name, model.source))
}

/// Computes the published run.
fn published() -> Vec<PublishedHandoff> {
    let line = |(n_prompt, published_direct, published_handoff)| {
        let (_, planned, _) = times(&MODELS[2], LINKS[0], n_prompt, 0);
        PublishedHandoff { n_prompt, published_direct, published_handoff, planned }
    };
    PUBLISHED.map(line).into()
}

/// Seconds to the first token of a prompt of which both machines hold `n_cached` tokens: on the Mac alone and handed over, and
/// the part of the latter after the prefill.
fn times(model: &PopularModel, gbps: f64, n_prompt: u32, n_cached: u32) -> (f64, f64, f64) {
    let node = |name: &str, prefill: &[(f64, f64)]| NodeView {
        name: name.into(),
        n_slots: 1,
        held: HeldTokens::in_slot(n_cached),
        rates: NodeRates { prefill: curve(prefill), decode: Curve::constant(model.mac_decode), ..NodeRates::default() },
        kv: Ok(KvSize { bytes_per_token: model.kv_bytes, state_bytes: model.state_bytes }),
        ..NodeView::default()
    };
    let link = TransferRates {
        bytes_per_second: gbps / 8.0 * NET_OF_HEADERS * 1e9,
        rtt_ms: 0.3,
        tail_ms: 5.0,
        after_prefill_state_share: AFTER_PREFILL_STATES,
        ..TransferRates::default()
    };
    let snapshot = Snapshot {
        request: RequestSize { n_prompt, n_replayed: 0, n_output: 1.0 },
        decode: vec![node("mac", model.mac)],
        prefill: vec![node("spark", model.spark)],
        links: vec![vec![link]],
        barred_pairs: Vec::new(),
        corrections: Vec::new(),
        turn: 0,
    };
    let mut predictions = candidates(&snapshot).into_iter().map(|candidate| candidate.prediction.unwrap_or_default());
    let (direct, handoff) = (predictions.next().unwrap_or_default(), predictions.next().unwrap_or_default());
    (direct.ttft_ms / 1e3, handoff.ttft_ms / 1e3, handoff.after_prefill_ms / 1e3)
}

fn curve(points: &[(f64, f64)]) -> Curve {
    let mut curve = Curve::default();
    points.iter().for_each(|(size, rate)| curve.learn(*size, *rate));
    curve
}

/// The shortest prompt from which on a handoff is faster, for each model and link, tokens. `None`: none up to the longest of
/// [`PROMPTS`].
fn break_even() -> impl Iterator<Item = (&'static str, f64, Option<u32>)> {
    let pays = |model: &PopularModel, gbps, n_prompt| {
        let (direct, handoff, _) = times(model, gbps, n_prompt, 0);
        handoff < direct
    };
    let first = move |model: &'static PopularModel, gbps| {
        let longest = PROMPTS.into_iter().max().unwrap_or_default();
        let last_without = (1..=longest).step_by(8).filter(|n| !pays(model, gbps, *n)).last().unwrap_or(0);
        (model.name, gbps, Some(last_without + 1).filter(|n| *n < longest))
    };
    MODELS.iter().flat_map(move |model| LINKS.map(|gbps| first(model, gbps)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_prompt_of_each_model_is_handed_over_and_a_short_turn_is_not() {
        let lines = lines();
        assert_eq!(lines.len(), MODELS.len() * LINKS.len() * PROMPTS.len());
        for line in lines.iter().filter(|line| line.n_prompt >= 16_384) {
            assert!(line.handoff < line.direct, "{line:?}");
        }
        // States weigh as much as 2,400 tokens: the next turn of 1,024 tokens stays where it is.
        let dense: Vec<_> = lines.iter().filter(|line| line.model == "Qwen3.6-27B" && line.gbps == 2.5).collect();
        assert_eq!(dense.len(), PROMPTS.len());
        assert!(
            dense.iter().all(|line| line.next_direct < line.direct && line.next_handoff < line.handoff),
            "{dense:?}"
        );
    }

    #[test]
    fn overlapping_is_planned_to_beat_the_published_run_at_every_length() {
        for line in published() {
            assert!(line.planned < line.published_handoff, "{line:?}");
        }
    }
}
