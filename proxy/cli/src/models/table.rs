//! The model files of all machines as a table.

use std::fmt::Write;

use baton_schemas::counted::counted;
use baton_schemas::machine_models::{ClusterModels, MachineModels, ModelOnDisk, ModelTransfer, TransferState};

use crate::columns::{size, table};

/// Digits of a checksum that are shown: enough to see whether two files are the same.
const SHOWN_DIGITS: usize = 8;

/// A table of models for each machine, with its transfer.
pub(super) fn render(models: &ClusterModels) -> String {
    let mut text = String::new();
    for report in &models.machines {
        match (&report.folder, &report.problem) {
            (Some(folder), _) => machine(&mut text, &report.machine, folder),
            (None, problem) => {
                let problem = problem.as_deref().unwrap_or("it does not say");
                _ = writeln!(text, "{}: {problem}", report.machine);
            }
        }
    }
    text
}

fn machine(text: &mut String, name: &str, folder: &MachineModels) {
    let MachineModels { models, free_bytes, transfer, .. } = folder;
    _ = write!(text, "{name}: {}", counted(models.len() as u64, "model"));
    if let Some(free) = free_bytes {
        _ = write!(text, ", {} free", size(*free));
    }
    text.push('\n');
    if let Some(transfer) = transfer {
        _ = writeln!(text, "  {}", progress(transfer));
    }
    if !models.is_empty() {
        let head = ["MODEL", "QUANTIZATION", "FILES", "SIZE", "SHA256", "FITS", "USED"];
        text.push_str(&table(&head, models.iter().map(row)));
    }
}

fn row(model: &ModelOnDisk) -> Vec<String> {
    let yes_no = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let first = model.files.first().and_then(|file| file.sha256.as_deref());
    vec![
        model.name.clone(),
        model.quantization.clone().unwrap_or_default(),
        model.files.len().to_string(),
        size(model.n_bytes),
        first.map(|sha256| sha256.chars().take(SHOWN_DIGITS).collect()).unwrap_or_default(),
        yes_no(model.fits),
        yes_no(model.in_use),
    ]
}

fn progress(transfer: &ModelTransfer) -> String {
    let ModelTransfer { model, state, done_bytes, total_bytes, problem, .. } = transfer;
    let from = if transfer.is_copy { "another machine" } else { "the hub" };
    match (state, total_bytes) {
        (TransferState::Preparing, _) => format!("{model} comes from {from}: its files are looked up"),
        (TransferState::Receiving, Some(total)) => {
            format!("{model} comes from {from}: {} of {}", size(*done_bytes), size(*total))
        }
        (TransferState::Receiving, None) => format!("{model} comes from {from}: {}", size(*done_bytes)),
        (TransferState::Done, _) => {
            let but = problem.as_deref().map_or_else(String::new, |problem| format!("; {problem}"));
            format!("{model} came from {from}{but}")
        }
        (TransferState::Failed, _) => format!("{model} did not come: {}", problem.as_deref().unwrap_or_default()),
        (TransferState::Cancelled, _) => format!("{model} was cancelled at {}", size(*done_bytes)),
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::machine_models::{FileOnDisk, MachineReport};

    use super::*;

    #[test]
    fn each_machine_has_its_models_and_a_silent_one_its_problem() {
        let file = FileOnDisk { path: "a-Q8_0.gguf".into(), n_bytes: 1 << 30, sha256: Some("ab".repeat(32)) };
        let model = ModelOnDisk {
            name: "me/one:a-Q8_0.gguf".into(),
            quantization: Some("Q8_0".into()),
            n_bytes: 1 << 30,
            fits: true,
            in_use: false,
            files: vec![file],
        };
        let transfer = ModelTransfer {
            number: 1,
            model: "smollm2".into(),
            is_copy: true,
            state: TransferState::Receiving,
            done_bytes: 1 << 20,
            total_bytes: Some(2 << 20),
            problem: None,
        };
        let folder = MachineModels {
            models: vec![model],
            free_bytes: Some(3 << 30),
            memory_bytes: None,
            transfer: Some(transfer),
        };
        let machines = vec![
            MachineReport { machine: "local".into(), folder: Some(folder), problem: None },
            MachineReport { machine: "spark".into(), folder: None, problem: Some("it does not answer".into()) },
        ];
        let text = render(&ClusterModels { machines, may_change: false });
        let expected = "local: 1 model, 3.0 GiB free\n  smollm2 comes from another machine: 1.0 MiB of 2.0 MiB\n  \
                        MODEL               QUANTIZATION  FILES  SIZE     SHA256    FITS  USED\n  \
                        me/one:a-Q8_0.gguf  Q8_0          1      1.0 GiB  abababab  yes   no\nspark: it does not answer\n";
        assert_eq!(text, expected);
    }
}
