//! The results of an examination: the figures of each device, and of each handoff.

use baton_link::handoff::canary::{KvDistances, TensorDistance};
use baton_schemas::draft::DrafterKind;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::kv::CodecLoss;
use baton_schemas::sequence::DraftCounts;
use serde::Serialize;

use super::compare::{ComparedReply, Difference};
use super::restored::RestoreCheck;
use super::verdict::{Ends, Verdict};
use crate::stats::median;

/// The results with one model.
#[derive(Debug, Default, Serialize)]
pub struct Examined {
    pub speeds: Vec<DeviceSpeed>,
    pub handoffs: Vec<HandoffCheck>,
}

impl Examined {
    /// Number of failed checks.
    pub fn n_failed(&self) -> usize {
        let devices = self.speeds.iter().filter(|speed| speed.failure.is_some()).count();
        let checkpoints = self.speeds.iter().filter_map(|speed| Some(&speed.checkpoint.as_ref()?.verdict));
        let restores = self.speeds.iter().flat_map(|speed| &speed.restores).map(|check| &check.verdict);
        let of_nodes = checkpoints.chain(restores).filter(|verdict| matches!(verdict, Verdict::Failed(_))).count();
        let handoffs = self.handoffs.iter().filter(|h| matches!(h.verdict, Verdict::Failed(_))).count();
        let drafters =
            self.speeds.iter().flat_map(|speed| &speed.drafters).filter(|speed| speed.failure.is_some()).count();
        devices + of_nodes + drafters + handoffs
    }

    /// The speed of a device, if a node started on it.
    pub fn speed(&self, device: &str) -> Option<&DeviceSpeed> {
        self.speeds.iter().find(|speed| speed.device == device && speed.failure.is_none())
    }
}

/// Speed of one device without a handoff. Medians of the rounds.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DeviceSpeed {
    pub device: String,
    /// Prompt tokens per second, to the first token.
    pub prefill_tps: f64,
    /// Tokens per second of one stream.
    pub decode_tps: f64,
    /// From the request to the first token.
    pub ttft_ms: f64,
    /// Of a model whose layers keep states.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointCheck>,
    /// What guesses bring there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drafters: Vec<DrafterSpeed>,
    /// From each tier of the store. Empty: nothing came back.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub restores: Vec<RestoreCheck>,
    /// The reason why no node started on it.
    pub failure: Option<String>,
}

/// What guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExaminedDrafter {
    PromptLookup,
    /// Every guess is right, which shows the most that this device can gain.
    Prediction,
    DraftModel,
    /// The model's own, if its file has one. It guesses beside prompt lookup.
    Head,
    /// A node of the role `draft`. It guesses beside prompt lookup.
    DraftNode,
}

impl ExaminedDrafter {
    /// The counter of its guesses.
    pub(super) fn kind(self) -> DrafterKind {
        match self {
            ExaminedDrafter::PromptLookup => DrafterKind::PromptLookup,
            ExaminedDrafter::Prediction => DrafterKind::Prediction,
            ExaminedDrafter::DraftModel => DrafterKind::DraftModel,
            ExaminedDrafter::Head => DrafterKind::Mtp,
            ExaminedDrafter::DraftNode => DrafterKind::Remote,
        }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            ExaminedDrafter::PromptLookup => "prompt lookup",
            ExaminedDrafter::Prediction => "a prediction that is right",
            ExaminedDrafter::DraftModel => "the draft model",
            ExaminedDrafter::Head => "the model's own head, beside prompt lookup",
            ExaminedDrafter::DraftNode => "a draft node, beside prompt lookup",
        }
    }
}

/// The speed of one stream with a drafter.
#[derive(Debug, Clone, Serialize)]
pub struct DrafterSpeed {
    pub drafter: ExaminedDrafter,
    /// The device of this machine, or the address, where it runs, if that is another process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// Tokens per second without guesses, and with them; `None`: not tried, no guess of it was verified.
    pub without_tps: f64,
    pub with_tps: Option<f64>,
    /// Its guesses that were verified, and those of them that were right.
    pub drafts: DraftCounts,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

impl DrafterSpeed {
    /// Nothing could be measured.
    pub(super) fn failed(drafter: ExaminedDrafter, why: String) -> DrafterSpeed {
        let (without_tps, with_tps, drafts) = (0.0, None, DraftCounts::default());
        DrafterSpeed { drafter, at: None, without_tps, with_tps, drafts, failure: Some(why) }
    }
}

/// A prompt asked twice of one node, of a model whose layers keep states instead of rows. The second time, the node goes back
/// to a checkpoint.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CheckpointCheck {
    /// Tokens of the prompt that the checkpoint has saved.
    pub n_kept: u32,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    #[serde(flatten)]
    pub verdict: Verdict,
}

impl CheckpointCheck {
    pub(super) fn of(n_prompt: usize, first: &ComparedReply, again: &ComparedReply) -> CheckpointCheck {
        let n_kept = again.cached.n_cached;
        // Fewer tokens are computed together the second time, for which a device can have other kernels.
        let verdict = match n_kept {
            0 => Verdict::Failed("the repeated prompt was computed anew: no checkpoint was used".into()),
            _ => Verdict::on(Difference::between(first, again), Ends::OtherKernels),
        };
        CheckpointCheck { n_kept, n_prompt, verdict }
    }
}

impl DeviceSpeed {
    pub(super) fn of(device: &str, n_tokens: usize, alone: &[ComparedReply]) -> DeviceSpeed {
        let ttft = median(&alone.iter().map(|reply| reply.ttft).collect::<Vec<_>>());
        DeviceSpeed {
            device: device.to_owned(),
            prefill_tps: n_tokens as f64 / ttft,
            decode_tps: median(&alone.iter().map(|reply| reply.decode_tps).collect::<Vec<_>>()),
            ttft_ms: ttft * 1e3,
            checkpoint: None,
            drafters: Vec::new(),
            restores: Vec::new(),
            failure: None,
        }
    }

    pub(super) fn failed(device: &str, why: String) -> DeviceSpeed {
        DeviceSpeed { device: device.to_owned(), failure: Some(why), ..DeviceSpeed::default() }
    }
}

/// A prompt computed in one place and continued in another. Times are medians of the rounds, differences the largest.
#[derive(Debug, Clone, Default, Serialize)]
pub struct HandoffCheck {
    pub from: String,
    pub to: String,
    /// Bytes of KV, encoded.
    pub n_bytes: u64,
    /// Relative L2 between the KV of both, worst layer; `None` if parts of a sliding window did not travel.
    pub kv_distance: Option<f64>,
    /// Bytes of the states of recurrent layers; 0 if the model has none.
    pub state_bytes: u64,
    /// Relative L2 between the states of both, worst one; `None` if the model has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_distance: Option<f64>,
    /// The ends have other weights, or refused each other's.
    pub other_weights: bool,
    /// The rows that differ, by layer, and the states that do. An infinite distance is null in JSON.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kv_layers: Vec<TensorDistance>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub state_layers: Vec<TensorDistance>,
    /// KL(alone ‖ handed over), nats a token.
    pub mean_kl: f64,
    /// Positions where both replies have the same likeliest token.
    pub n_agreed: usize,
    /// Positions that were compared: up to the first different token.
    pub n_compared: usize,
    pub prefill_ms: f64,
    /// From the end of the prefill until the decode node is ready.
    pub after_prefill_ms: f64,
    /// Prompt tokens per second on the prefill node, which exports their KV meanwhile.
    pub prefill_tps: f64,
    /// Received bytes ÷ the time to copy KV out of the prefill node's engine; `None` if that node does not report it.
    pub export_gb_s: Option<f64>,
    /// Received bytes ÷ the time to copy KV into the decode node's engine.
    pub import_gb_s: Option<f64>,
    /// The part of the transfer during the prefill, 0 to 1; `None` if everything came at once.
    pub hidden_share: Option<f64>,
    /// From the request to the first token.
    pub ttft_ms: f64,
    /// The measured losses of lossy codecs that the prefill node reports; without a profile there are none.
    pub kv_losses: Vec<CodecLoss>,
    #[serde(flatten)]
    pub verdict: Verdict,
}

impl HandoffCheck {
    pub(super) fn failed(why: String) -> HandoffCheck {
        HandoffCheck { verdict: Verdict::Failed(why), ..HandoffCheck::default() }
    }

    /// The same with the distances between the KV of both.
    pub(super) fn with_distances(self, distances: &KvDistances) -> HandoffCheck {
        let differ = |tensors: &[TensorDistance]| -> Vec<TensorDistance> {
            tensors.iter().copied().filter(|tensor| tensor.distance > 0.0).collect()
        };
        HandoffCheck {
            // Infinite: the frames have no rows of a window in common.
            kv_distance: distances.of_rows().filter(|distance| distance.is_finite()),
            state_distance: distances.of_states(),
            kv_layers: differ(&distances.rows),
            state_layers: differ(&distances.states),
            ..self
        }
    }

    /// The figures of all rounds of a pair: each reply's handoff, and the seconds to its first token.
    pub(super) fn of_rounds(rounds: &[(HandoffReport, f64)], worst: Difference) -> HandoffCheck {
        let of = |value: fn(&HandoffReport) -> f64| {
            median(&rounds.iter().map(|(report, _)| value(report)).collect::<Vec<_>>())
        };
        let rate = |ms: fn(&HandoffReport) -> f64| {
            let known = rounds.iter().filter(|(report, _)| ms(report) > 0.0);
            let rates: Vec<f64> = known.map(|(report, _)| report.n_bytes as f64 / ms(report) / 1e6).collect();
            (!rates.is_empty()).then(|| median(&rates))
        };
        let transfers = rounds.iter().filter(|(report, _)| report.transfer_ms > 0.0);
        let hidden: Vec<f64> =
            transfers.map(|(report, _)| (report.during_prefill_ms / report.transfer_ms).min(1.0)).collect();
        HandoffCheck {
            n_bytes: of(|report| report.n_bytes as f64) as u64,
            state_bytes: of(|report| report.state_bytes as f64) as u64,
            mean_kl: worst.mean_kl,
            n_agreed: worst.n_agreed,
            n_compared: worst.n_compared,
            prefill_ms: of(|report| report.prefill_ms),
            after_prefill_ms: of(|report| report.after_prefill_ms),
            prefill_tps: of(|report| {
                f64::from(report.n_computed) / (report.prefill_ms - report.stalled_ms).max(1e-3) * 1e3
            }),
            export_gb_s: rate(|report| report.export_ms),
            import_gb_s: rate(|report| report.import_ms),
            hidden_share: (!hidden.is_empty()).then(|| median(&hidden)),
            ttft_ms: median(&rounds.iter().map(|(_, ttft)| ttft * 1e3).collect::<Vec<_>>()),
            ..HandoffCheck::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(factor: f64) -> HandoffReport {
        HandoffReport {
            n_computed: 100,
            n_bytes: 1_000_000,
            prefill_ms: 250.0 * factor,
            stalled_ms: 50.0 * factor,
            export_ms: factor,
            import_ms: 0.5 * factor,
            transfer_ms: 100.0 * factor,
            ..HandoffReport::default()
        }
        .with_after_prefill(10.0 * factor)
    }

    const DIFFERENCE: Difference = Difference { mean_kl: 2e-3, n_compared: 8, n_agreed: 7, is_exact: false };

    #[test]
    fn a_pair_has_the_medians_of_its_rounds() {
        let rounds = [(report(1.0), 0.3), (report(2.0), 0.9), (report(4.0), 0.6)];
        let check = HandoffCheck::of_rounds(&rounds, DIFFERENCE);
        assert_eq!((check.n_bytes, check.prefill_ms, check.after_prefill_ms), (1_000_000, 500.0, 20.0));
        assert_eq!((check.prefill_tps, check.ttft_ms), (250.0, 600.0));
        assert_eq!((check.export_gb_s, check.import_gb_s), (Some(0.5), Some(1.0)));
        assert!((check.hidden_share.unwrap() - 0.9).abs() < 1e-9);
        assert_eq!((check.mean_kl, check.n_agreed, check.n_compared), (2e-3, 7, 8));
        let at_once = HandoffReport { transfer_ms: 0.0, during_prefill_ms: 0.0, ..report(1.0) };
        assert_eq!(HandoffCheck::of_rounds(&[(at_once, 0.3)], DIFFERENCE).hidden_share, None);
        // A prefill node from before the field was there.
        let old = HandoffReport { export_ms: 0.0, ..report(1.0) };
        assert_eq!(HandoffCheck::of_rounds(&[(old, 0.3)], DIFFERENCE).export_gb_s, None);
    }
}
