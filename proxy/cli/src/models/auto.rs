//! `baton models pull NAME --on auto`: which quantization, and which machine, by memory and measured speed.
//!
//! Generating a token reads the weights once. So the bytes a second that a machine reads with its present model predict its speed
//! with another one.

use std::fmt;

use baton_fetch::ModelChoice;
use baton_proxy::observe::snapshot::EndpointState;
use baton_schemas::counted::counted;
use baton_schemas::machine_models::ClusterModels;

use crate::columns::size;

/// Tokens per second that a person can read along with. A smaller quantization is proposed only where a larger one is slower.
const READABLE: f64 = 10.0;

/// A machine that can get a model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TargetMachine {
    pub(super) name: String,
    /// Bytes that models may take in its memory; `None`: it does not say.
    pub(super) memory_bytes: Option<u64>,
    /// Bytes that may be written to its disk; `None`: it does not say.
    pub(super) free_bytes: Option<u64>,
    /// Bytes of weights that it reads in a second when it generates one stream; `None`: not measured.
    pub(super) bytes_per_second: Option<f64>,
}

/// A model, and the machine that is to get it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Proposal {
    pub(super) choice: ModelChoice,
    pub(super) machine: TargetMachine,
    /// Tokens per second of one stream; `None`: the machine's speed is not measured.
    pub(super) tokens_per_second: Option<f64>,
    n_choices: usize,
    n_machines: usize,
}

/// The machines that report their folder, with the speeds that the endpoint has measured.
pub(super) fn machines(models: &ClusterModels, state: &EndpointState) -> Vec<TargetMachine> {
    let of_node = |machine: &str| {
        let nodes = state.models.iter().flat_map(|model| &model.nodes).filter(|node| node.name == machine);
        let speeds = nodes.filter(|node| node.weights_bytes > 0).filter_map(|node| {
            let alone = node.decode_rates.first().filter(|point| point.size == 1)?;
            Some(alone.tokens_per_second * node.weights_bytes as f64)
        });
        speeds.reduce(f64::max)
    };
    let reports = models.machines.iter().filter_map(|report| Some((&report.machine, report.folder.as_ref()?)));
    let machine = reports.map(|(name, folder)| TargetMachine {
        name: name.clone(),
        memory_bytes: folder.memory_bytes,
        free_bytes: folder.free_bytes,
        bytes_per_second: of_node(name),
    });
    machine.collect()
}

/// The largest quantization that some machine is expected to generate fast enough with, on the fastest machine; where no machine is
/// expected to, the fastest pair. Errors: nothing fits anywhere.
pub(super) fn propose(choices: &[ModelChoice], machines: &[TargetMachine]) -> Result<Proposal, String> {
    if machines.is_empty() {
        return Err("no machine reports its models folder".to_owned());
    }
    let is_quantized = choices.iter().any(|choice| !choice.is_unquantized);
    let usable: Vec<&ModelChoice> = choices.iter().filter(|choice| !is_quantized || !choice.is_unquantized).collect();
    let pairs = machines.iter().flat_map(|machine| usable.iter().map(move |choice| (machine, *choice)));
    let fitting = pairs.filter_map(|(machine, choice)| {
        let n_bytes = choice.n_bytes?;
        let fits = |room: Option<u64>, needed: u64| room.is_none_or(|room| needed <= room);
        let in_memory = fits(machine.memory_bytes, n_bytes.saturating_add(n_bytes / 10));
        (in_memory && fits(machine.free_bytes, n_bytes)).then(|| Proposal {
            choice: choice.clone(),
            machine: machine.clone(),
            tokens_per_second: machine.bytes_per_second.map(|speed| speed / n_bytes.max(1) as f64),
            n_choices: choices.len(),
            n_machines: machines.len(),
        })
    });
    fitting.max_by(|one, other| one.rank().total_cmp(&other.rank())).ok_or_else(|| nothing_fits(&usable, machines))
}

/// Sorts proposals: those that are fast enough, by size and speed; those of unknown speed; the slow ones, by speed.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct ProposalRank {
    class: u8,
    first: f64,
    second: f64,
}

impl ProposalRank {
    fn total_cmp(&self, other: &ProposalRank) -> std::cmp::Ordering {
        let by_class = self.class.cmp(&other.class);
        by_class.then(self.first.total_cmp(&other.first)).then(self.second.total_cmp(&other.second))
    }
}

impl Proposal {
    fn rank(&self) -> ProposalRank {
        let n_bytes = self.choice.n_bytes.unwrap_or_default() as f64;
        match self.tokens_per_second {
            Some(speed) if speed >= READABLE => ProposalRank { class: 2, first: n_bytes, second: speed },
            Some(speed) => ProposalRank { class: 0, first: speed, second: n_bytes },
            None => {
                let preferred = if self.choice.is_preferred { 1.0 } else { 0.0 };
                // For equal models, the machine with the most memory.
                let memory = self.machine.memory_bytes.unwrap_or_default() as f64;
                ProposalRank { class: 1, first: preferred, second: memory + n_bytes / f64::from(1 << 20) }
            }
        }
    }
}

fn nothing_fits(choices: &[&ModelChoice], machines: &[TargetMachine]) -> String {
    match choices.iter().filter_map(|choice| choice.n_bytes).min() {
        None => "the hub does not tell the files' sizes: choose a file, and a machine with --on".to_owned(),
        Some(smallest) => {
            let rooms = machines.iter().map(|machine| {
                let room = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), size);
                format!(
                    "{}: {} memory for models, {} free on disk",
                    machine.name,
                    room(machine.memory_bytes),
                    room(machine.free_bytes)
                )
            });
            format!("no machine has room for the smallest, {}: {}", size(smallest), Vec::from_iter(rooms).join("; "))
        }
    }
}

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Proposal { choice, machine, tokens_per_second, n_choices, n_machines } = self;
        writeln!(f, "{} to {}", choice.name, machine.name)?;
        let quantization = choice.quantization.as_deref().unwrap_or("unknown");
        let n_bytes = choice.n_bytes.unwrap_or_default();
        let of = format!("of {} and {}", counted(*n_choices as u64, "file"), counted(*n_machines as u64, "machine"));
        writeln!(f, "  quantization: {quantization}, {}, {of}", size(n_bytes))?;
        if let Some(memory) = machine.memory_bytes {
            let needed = size(n_bytes.saturating_add(n_bytes / 10));
            writeln!(f, "  memory: about {needed} and the context's, of {} for models there", size(memory))?;
        }
        match tokens_per_second {
            Some(speed) if *speed < READABLE => {
                writeln!(f, "  expected: about {speed:.1} tokens/s; nothing that fits is expected to be faster")
            }
            Some(speed) => {
                writeln!(f, "  expected: about {speed:.0} tokens/s for one stream, more with few active experts")
            }
            None => writeln!(f, "  expected: unknown, as this machine has generated nothing yet"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn choice(quantization: &str, n_gib: u64) -> ModelChoice {
        ModelChoice {
            name: format!("me/m:m-{quantization}.gguf"),
            quantization: Some(quantization.to_owned()),
            n_bytes: Some(n_gib * GIB),
            is_unquantized: quantization == "F16",
            is_preferred: quantization == "Q4_K_M",
        }
    }

    fn machine(name: &str, memory_gib: u64, gib_per_second: Option<f64>) -> TargetMachine {
        TargetMachine {
            name: name.to_owned(),
            memory_bytes: Some(memory_gib * GIB),
            free_bytes: Some(500 * GIB),
            bytes_per_second: gib_per_second.map(|speed| speed * GIB as f64),
        }
    }

    fn check(choices: &[ModelChoice], machines: &[TargetMachine], expected: Option<(&str, &str, Option<f64>)>) {
        let got = propose(choices, machines).ok();
        let got = got
            .as_ref()
            .map(|it| (it.choice.quantization.as_deref().unwrap_or_default(), &*it.machine.name, it.tokens_per_second));
        assert_eq!(got, expected);
    }

    #[test]
    fn the_largest_that_is_fast_enough_goes_to_the_fastest_machine() {
        let all = [choice("Q4_K_M", 4), choice("Q8_0", 8), choice("F16", 16)];
        let (mac, spark) = (machine("mac", 64, Some(400.0)), machine("spark", 100, Some(200.0)));
        check(&all, &[mac.clone(), spark.clone()], Some(("Q8_0", "mac", Some(50.0))));
        check(&all, &[machine("old", 64, Some(60.0))], Some(("Q4_K_M", "old", Some(15.0))));
        check(&all, &[machine("slow", 64, Some(8.0))], Some(("Q4_K_M", "slow", Some(2.0))));
        check(&all, &[machine("slow", 64, Some(8.0)), spark], Some(("Q8_0", "spark", Some(25.0))));
        check(&all[2..], &[mac], Some(("F16", "mac", Some(25.0))));
    }

    #[test]
    fn a_machine_of_unknown_speed_gets_the_usual_quantization_and_goes_before_a_slow_one() {
        let all = [choice("Q2_K", 2), choice("Q4_K_M", 4), choice("Q8_0", 8)];
        let (small, large) = (machine("small", 16, None), machine("large", 64, None));
        check(&all, &[small.clone(), large], Some(("Q4_K_M", "large", None)));
        check(&all, &[machine("slow", 64, Some(1.0)), small.clone()], Some(("Q4_K_M", "small", None)));
        check(&[all[0].clone(), all[2].clone()], &[small], Some(("Q8_0", "small", None)));
    }

    #[test]
    fn what_does_not_fit_into_memory_or_on_the_disk_is_not_proposed() {
        let all = [choice("Q4_K_M", 4), choice("Q8_0", 8)];
        check(&all, &[machine("small", 8, Some(400.0))], Some(("Q4_K_M", "small", Some(100.0))));
        let full = TargetMachine { free_bytes: Some(GIB), ..machine("full", 64, None) };
        check(&all, std::slice::from_ref(&full), None);
        let error = propose(&all, &[machine("tiny", 1, None), full]).unwrap_err();
        assert!(error.contains("4.0 GiB: tiny: 1.0 GiB memory") && error.contains("full: 64.0 GiB"), "{error}");
        let unknown = ModelChoice { n_bytes: None, ..choice("Q8_0", 8) };
        assert!(propose(&[unknown], &[machine("mac", 64, None)]).unwrap_err().contains("sizes"));
        assert!(propose(&all, &[]).is_err());
    }
}
