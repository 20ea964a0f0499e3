//! `--simulate`: traces of requests on simulated machines, with and without a store, and the first token of long prompts. Nothing is
//! measured.

use baton_proxy::serve::CommandFailure;
use serde::Serialize;

use crate::plan::first_tokens::{self, FirstTokens};
use crate::plan::traces::{self, TRACES, TraceFigures, TraceStore, TracedTokens};
use crate::report::Report;

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct SimulatedTraces {
    rows: Vec<TraceFigures>,
    first_tokens: Vec<FirstTokens>,
}

/// Runs all traces.
pub(super) async fn run() -> Result<SimulatedTraces, CommandFailure> {
    Ok(SimulatedTraces { rows: traces::run(&TRACES).await?, first_tokens: first_tokens::run().await? })
}

/// The table.
pub(super) fn report(figures: &SimulatedTraces) -> Report {
    let mut report = Report::new("Simulated, by published rates");
    report.text(
        "Nothing was run on these machines: a DGX Spark and an M3 Ultra at 10 Gb/s with Llama-3.1-8B and four slots each are \
         simulated, and planning and learning are those of a running endpoint. Each request is sent when the one before it has ended.",
    );
    report.text(TRACES.map(|trace| trace.described()).join("\n"));
    let head = [
        "trace",
        "beside slots",
        "prompts, tokens",
        "slot",
        "memory",
        "disk",
        "other node",
        "computed",
        "GB written",
        "regret p95",
    ];
    report.table(&head, figures.rows.iter().map(cells));
    report.text(
        "Percentages of the prompts' tokens. Computed: by both machines together; where the Spark computes a prompt for the M3 Ultra, \
         it computes the reply before it, too, which it lacks. Memory holds 32,768 tokens on each machine and counts what conversations \
         share in each of them; the disk holds any number, and what they share is written once. \
         Regret: the planned route's time to the last token ÷ that of the fixed route that completed first from the same state − 1.",
    );
    report.text(
        "Seconds to the first token on the simulated M3 Ultra, with one slot. Computing a prompt takes as long for each token, however long \
         it is, so it is fast at the end; KV comes back at the GB/s that this benchmark measured with 4,000 tokens of SmolLM2 on two cores \
         (2.85 from memory, 0.93 from a cold disk), and from the Spark at 10 Gb/s.",
    );
    let head = ["prompt", "computed", "slot", "memory", "disk", "other node"];
    report.table(&head, figures.first_tokens.iter().map(first_token_cells));
    report
}

fn first_token_cells(row: &FirstTokens) -> Vec<String> {
    let FirstTokens { n_prompt, computed, slot, memory, disk, other_node } = *row;
    let times = [computed, slot, memory, disk, other_node].map(|seconds| format!("{seconds:.2}"));
    [format!("{n_prompt} tokens")].into_iter().chain(times).collect()
}

fn cells(row: &TraceFigures) -> Vec<String> {
    let TracedTokens { all, slot, memory, disk, other_node, computed } = row.tokens;
    let share = |n: u64| format!("{:.1} %", 100.0 * n as f64 / all.max(1) as f64);
    let store = match row.store {
        TraceStore::SlotsAlone => "nothing",
        TraceStore::Memory => "memory",
        TraceStore::MemoryAndDisk => "memory and disk",
    };
    let mut cells = vec![row.trace.to_owned(), store.to_owned(), all.to_string()];
    cells.extend([slot, memory, disk, other_node].map(share));
    cells.push(format!("{computed} ({})", share(computed)));
    cells.push(format!("{:.2}", row.written_bytes as f64 / 1e9));
    cells.push(format!("{:.1} %", 100.0 * row.regret.completion.p95));
    cells
}
