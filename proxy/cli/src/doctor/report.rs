//! The report, for people and as JSON.

use std::collections::BTreeSet;
use std::fmt;

use baton_engines::llama::devices::Device;
use baton_link::handoff::canary::Farthest;
use baton_schemas::held::KvTier;
use baton_schemas::kv::CodecLoss;
use baton_schemas::sequence::DraftCounts;
use baton_tryout::examination::{
    CheckpointCheck, DrafterSpeed, Examined, HandoffCheck, Machine, RestoreCheck, SystemFinding, SystemState, Verdict,
};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(super) struct DoctorReport {
    #[serde(flatten)]
    machine: Machine,
    /// What the system allows.
    system_findings: Vec<SystemFinding>,
    #[serde(flatten)]
    examined: Examined,
}

impl DoctorReport {
    /// The report on a machine with these devices.
    pub(super) fn new(devices: &[Device], system_findings: Vec<SystemFinding>, examined: Examined) -> DoctorReport {
        DoctorReport { machine: Machine::with(devices), system_findings, examined }
    }

    /// Writes the losses of lossy codecs for each node that sends KV.
    fn write_losses(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = BTreeSet::new();
        let senders = self.examined.handoffs.iter().filter(|handoff| !handoff.kv_losses.is_empty());
        for handoff in senders.filter(|handoff| shown.insert(&handoff.from)) {
            for CodecLoss { codec, mean_kl, ratio } in &handoff.kv_losses {
                let (from, codec) = (&handoff.from, codec.as_str());
                writeln!(
                    f,
                    "KV of {from} in {codec}: {ratio:.2} times smaller, mean KL {mean_kl:.1e} when calibrated"
                )?;
            }
        }
        Ok(())
    }

    /// Writes what each drafter brings on each device.
    fn write_drafters(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for speed in &self.examined.speeds {
            for DrafterSpeed { drafter, at, without_tps, with_tps, drafts, failure } in &speed.drafters {
                let (device, words, DraftCounts { n, n_accepted }) = (&speed.device, drafter.words(), drafts);
                let at = at.as_ref().map(|at| format!(" on {at}")).unwrap_or_default();
                write!(f, "guesses on {device}, {words}{at}: ")?;
                match (failure, with_tps) {
                    (Some(why), _) => writeln!(f, "FAILED: {why}")?,
                    (None, Some(with_tps)) => {
                        writeln!(f, "{with_tps:.1} tok/s, {without_tps:.1} without; {n_accepted} of {n} right")?
                    }
                    (None, None) => writeln!(f, "not tried")?,
                }
            }
        }
        Ok(())
    }

    /// Writes what a model with states adds: the states that were handed over, and the checkpoints to which nodes returned.
    fn write_states(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for handoff in &self.examined.handoffs {
            if let Some(distance) = handoff.state_distance {
                let HandoffCheck { from, to, state_bytes, .. } = handoff;
                write!(f, "states {from} → {to}: ")?;
                match state_bytes {
                    0 => write!(f, "not handed over")?,
                    n => write!(f, "{n} bytes")?,
                }
                writeln!(f, ", distance {distance:.1e}")?;
            }
        }
        self.write_layers(f)?;
        for speed in &self.examined.speeds {
            if let Some(CheckpointCheck { n_kept, n_prompt, verdict }) = &speed.checkpoint {
                let device = &speed.device;
                write!(f, "checkpoint on {device}: {n_kept} of {n_prompt} tokens kept when asked again: ")?;
                write_verdict(f, verdict)?;
            }
        }
        Ok(())
    }

    /// Names the layers that differ most between nodes with other weights, or after a failure: of rows and of states.
    fn write_layers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let differing = |check: &&HandoffCheck| check.other_weights || matches!(check.verdict, Verdict::Failed(_));
        for HandoffCheck { from, to, kv_layers, state_layers, .. } in self.examined.handoffs.iter().filter(differing) {
            for (what, tensors) in [("KV", kv_layers), ("states", state_layers)] {
                if !tensors.is_empty() {
                    writeln!(f, "{what} {from} → {to} by layer: {}", Farthest(tensors))?;
                }
            }
        }
        Ok(())
    }

    /// Writes what came back from each tier of each device's store.
    fn write_restores(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for speed in self.examined.speeds.iter().filter(|speed| speed.failure.is_none()) {
            for check in &speed.restores {
                let RestoreCheck { from, n_restored, n_prompt, restore_ms, restore_tps, .. } = check;
                let seconds = |ms: &f64| ms / 1e3;
                write!(
                    f,
                    "restored on {} from {}: {n_restored} of {n_prompt} tokens in {:.3} s, {restore_tps:.0} tok/s, \
                     first token after {:.3} s instead of {:.3} s: ",
                    speed.device,
                    tier_words(*from),
                    seconds(restore_ms),
                    seconds(&check.restored_ttft_ms),
                    seconds(&check.computed_ttft_ms)
                )?;
                write_verdict(f, &check.verdict)?;
            }
            for tier in [KvTier::Memory, KvTier::Disk] {
                if speed.restores.iter().all(|check| check.from != tier) {
                    writeln!(
                        f,
                        "restored on {} from {}: not proven, nothing came back",
                        speed.device,
                        tier_words(tier)
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Number of failed checks.
    pub(super) fn n_failed(&self) -> usize {
        usize::from(self.machine.missing.is_some()) + self.examined.n_failed()
    }
}

fn tier_words(tier: KvTier) -> &'static str {
    match tier {
        KvTier::Slot => "the slot",
        KvTier::Memory => "memory",
        KvTier::Disk => "disk",
    }
}

fn write_verdict(f: &mut fmt::Formatter<'_>, verdict: &Verdict) -> fmt::Result {
    match verdict {
        Verdict::Exact => writeln!(f, "exact"),
        Verdict::Close => writeln!(f, "close"),
        Verdict::Failed(why) => writeln!(f, "FAILED: {why}"),
    }
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DoctorReport { machine, system_findings, examined } = self;
        writeln!(f, "baton {} on {}, built for {}", machine.version, machine.system, machine.built_for())?;
        if let Some(missing) = &machine.missing {
            writeln!(f, "FAILED: {missing}")?;
        }
        for device in &machine.devices {
            let gib = device.memory_bytes as f64 / (1u64 << 30) as f64;
            writeln!(f, "  {:<10} {} ({gib:.1} GiB)", device.name, device.description)?;
        }
        for SystemFinding { topic, state, text } in system_findings {
            let word = match state {
                SystemState::Fine => "fine",
                SystemState::Advice => "TO DO",
                SystemState::Unknown => "unknown",
            };
            writeln!(f, "{}: {word}: {text}", topic.as_str())?;
        }
        writeln!(f, "\nalone       prefill tok/s  decode tok/s")?;
        for speed in &examined.speeds {
            match &speed.failure {
                None => writeln!(f, "{:<12}{:>13.0}{:>14.1}", speed.device, speed.prefill_tps, speed.decode_tps)?,
                Some(why) => writeln!(f, "{:<12}FAILED: {why}", speed.device)?,
            }
        }
        let width = examined.handoffs.iter().map(|h| h.from.chars().count() + h.to.chars().count() + 3).max();
        let width = width.unwrap_or(0).max("handoff".len());
        writeln!(f, "\n{:<width$}  KV distance  mean KL  same token   after it  verdict", "handoff")?;
        for handoff in &examined.handoffs {
            let pair = format!("{} → {}", handoff.from, handoff.to);
            let verdict = match &handoff.verdict {
                Verdict::Exact => "exact",
                Verdict::Close => "close",
                Verdict::Failed(why) => {
                    writeln!(f, "{pair:<width$}  FAILED: {why}")?;
                    continue;
                }
            };
            let distance = handoff.kv_distance.map_or_else(|| "–".to_owned(), |d| format!("{d:.1e}"));
            let agreed = format!("{}/{}", handoff.n_agreed, handoff.n_compared);
            let kl = handoff.mean_kl;
            let after_ms = handoff.after_prefill_ms;
            writeln!(f, "{pair:<width$}  {distance:>11}  {kl:>7.1e}  {agreed:>10}  {after_ms:>6.1} ms  {verdict}")?;
        }
        self.write_drafters(f)?;
        self.write_states(f)?;
        self.write_restores(f)?;
        self.write_losses(f)
    }
}
