//! The figures of a run, as a table and on a page.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::clients::Outcome;
use super::faults::Tally;

/// The results of a run.
pub(crate) struct Figures {
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    pub(crate) tally: Tally,
    /// Resident memory of the endpoint, before and after.
    pub(crate) memory_kib: (u64, u64),
    /// Open files of the endpoint, before and after.
    pub(crate) files: (usize, usize),
    /// `/baton/state` at the end.
    pub(crate) state: Value,
}

impl Figures {
    /// As a table.
    pub(crate) fn table(&self) -> String {
        let Outcome { n_requests, wrong, differing, noise, .. } = &self.outcome;
        let n_complete = n_requests - wrong.len();
        let seconds = |share| format!("{:.2} s", self.outcome.quantile(share).as_secs_f64());
        let hung = wrong.iter().filter(|wrong| wrong.contains("hung")).count();
        let mut rows = vec![
            ("requests".to_owned(), n_requests.to_string()),
            ("complete".to_owned(), n_complete.to_string()),
            ("equal to the undisturbed reply".to_owned(), (n_complete - differing.len()).to_string()),
            ("differ at a near tie, with its margin in nats".to_owned(), {
                let margins: Vec<_> = differing.iter().map(|d| format!("{:.3}", d.margin)).collect();
                format!("{} ({})", differing.len(), margins.join(", ")).replace(" ()", "")
            }),
            ("largest difference of a log-probability in what is equal, nats".to_owned(), format!("{noise:.1e}")),
            ("hung".to_owned(), hung.to_string()),
            ("run, s".to_owned(), format!("{:.0}", self.took.as_secs_f64())),
            ("time of a request, p50 / p95 / max".to_owned(), [0.5, 0.95, 1.0].map(seconds).join(" / ")),
        ];
        for task in ["decode", "prefill"] {
            let tally = self.tally.0.lock().unwrap();
            let of_task = tally.iter().filter(|((_, t), _)| *t == task);
            let counts: Vec<_> = of_task.map(|((scenario, _), n)| format!("{scenario:?} {n}")).collect();
            rows.push((format!("faults of {task} nodes and their links"), counts.join(", ")));
        }
        let fallbacks = self.state["models"][0]["fallbacks"].as_object().cloned().unwrap_or_default();
        let fallbacks = fallbacks.iter().map(|(reason, fallback)| format!("`{reason}` {}", fallback["count"]));
        rows.push(("fallbacks".to_owned(), fallbacks.collect::<Vec<_>>().join(", ")));
        rows.push(("endpoint's memory before and after, MiB".to_owned(), {
            let mib = |kib: u64| format!("{:.1}", kib as f64 / 1024.0);
            format!("{} / {}", mib(self.memory_kib.0), mib(self.memory_kib.1))
        }));
        rows.push(("its open files before and after".to_owned(), format!("{} / {}", self.files.0, self.files.1)));
        let mut table = "| | |\n|---|---|\n".to_owned();
        for (name, value) in rows {
            let _ = writeln!(table, "| {name} | {value} |");
        }
        table
    }
}

const BEGIN: &str = "<!-- written by `make chaos`: begin -->\n";

/// The end of what a run wrote.
const END: &str = "<!-- end -->";

/// Replaces the runs on a page.
pub(crate) fn write(page: &Path, seed: u64, runs: &[(&str, &Figures)]) {
    let tables: String = runs.iter().map(|(name, figures)| format!("\nWith {name}:\n\n{}", figures.table())).collect();
    replace(page, BEGIN, &format!("\n`CHAOS_SEED={seed} make chaos`\n{tables}\n"));
}

/// Replaces what lies between a line of a page and the next end.
pub(crate) fn replace(page: &Path, begin: &str, new: &str) {
    let text = std::fs::read_to_string(page).unwrap();
    let (before, rest) = text.split_once(begin).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    std::fs::write(page, format!("{before}{begin}{new}{END}{after}")).unwrap();
}
