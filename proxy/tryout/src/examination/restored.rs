//! Brings KV back from each tier of the store, and times it.

use baton_schemas::held::KvTier;
use baton_schemas::kv::KvLayout;
use baton_schemas::sequence::CachedTokens;
use serde::Serialize;

use super::compare::{ComparedReply, Difference};
use super::verdict::{Ends, Verdict};

/// A prompt asked again after its KV had left the slot: another prompt had it, or the node was started again.
#[derive(Debug, Clone, Serialize)]
pub struct RestoreCheck {
    /// Where its KV came from.
    pub from: KvTier,
    /// Tokens of the prompt that came back.
    pub n_restored: u32,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// The time until they were back.
    pub restore_ms: f64,
    /// Tokens that came back a second.
    pub restore_tps: f64,
    /// The times to the first token without and with them.
    pub computed_ttft_ms: f64,
    pub restored_ttft_ms: f64,
    #[serde(flatten)]
    pub verdict: Verdict,
}

impl RestoreCheck {
    /// `None`: nothing came back from there.
    pub(super) fn of(
        from: KvTier,
        n_prompt: usize,
        computed: &ComparedReply,
        restored: &ComparedReply,
        layout: &KvLayout,
    ) -> Option<RestoreCheck> {
        let CachedTokens { memory, disk, .. } = restored.cached;
        let n_restored = match from {
            KvTier::Slot => 0,
            KvTier::Memory => memory,
            KvTier::Disk => disk,
        };
        // Where the rows of a window lie moves the rounding. Of a part, what is computed after it is computed in other batches.
        let has_window = layout.sections.iter().any(|section| section.window.is_some());
        let is_whole = n_restored as usize + 1 == n_prompt;
        let ends = if is_whole && !has_window { Ends::Same } else { Ends::OtherKernels };
        let verdict = Verdict::on(Difference::between(computed, restored), ends);
        let [computed_ttft_ms, restored_ttft_ms] = [computed, restored].map(|reply| reply.ttft * 1e3);
        let restore_ms = restored.restore_ms;
        let restore_tps = f64::from(n_restored) / restore_ms.max(1e-3) * 1e3;
        let check = RestoreCheck {
            from,
            n_restored,
            n_prompt,
            restore_ms,
            restore_tps,
            computed_ttft_ms,
            restored_ttft_ms,
            verdict,
        };
        (n_restored > 0).then_some(check)
    }

    pub(super) fn failed(from: KvTier, why: String) -> RestoreCheck {
        let verdict = Verdict::Failed(why);
        RestoreCheck {
            from,
            n_restored: 0,
            n_prompt: 0,
            restore_ms: 0.0,
            restore_tps: 0.0,
            computed_ttft_ms: 0.0,
            restored_ttft_ms: 0.0,
            verdict,
        }
    }
}
