//! The figures that are compared between two runs: those with several rounds, and single ones that are shown only.

use super::report::HandoffFigures;
use crate::report::{Better, Report, Unit};

pub(super) fn add(report: &mut Report, figures: &HandoffFigures) {
    for overlap in figures.overlap.iter().chain(&figures.networks) {
        for row in &overlap.rows {
            let name = format!("{} tokens, {}, {}", row.n_tokens, row.codec.as_str(), row.link.name());
            report.figure(format!("{name}: handoff"), Unit::Milliseconds, Better::Less, &row.total_rounds);
            report.figure(format!("{name}: after the prefill ÷ prefill"), Unit::Times, Better::Less, &row.share_rounds);
        }
    }
    for row in figures.overlap.iter().flat_map(|overlap| &overlap.direct) {
        let name = format!("{} tokens without a handoff: TTFT", row.n_tokens);
        report.figure(name, Unit::Milliseconds, Better::Less, &row.ttft_rounds);
    }
    if let Some(wire) = &figures.wire {
        report.figure("wire: cache to cache", Unit::GigabytesPerSecond, Better::More, &wire.pull_rounds);
        report.figure("wire: cache to cache ÷ plain copy", Unit::Times, Better::More, &wire.ratio_rounds);
    }
    for row in figures.codecs.iter().flatten() {
        let codec = row.codec.as_str();
        report.figure(format!("{codec}: write"), Unit::MegabytesPerSecond, Better::More, &row.write_rounds);
        report.figure(format!("{codec}: read"), Unit::MegabytesPerSecond, Better::More, &row.read_rounds);
    }
    for row in figures.memory.iter().flatten() {
        for (node, growth) in [("prefill", &row.prefill), ("decode", &row.decode)] {
            let added = [growth.added().unwrap_or(f64::NAN)];
            report.figure(format!("{}: {node} node's peak", row.what), Unit::Mebibytes, Better::Less, &added);
        }
    }
    if let Some(streams) = &figures.streams {
        let p99 = [streams.with.p99_ms / streams.without.p99_ms];
        report.figure("ITL p99 during imports ÷ alone", Unit::Times, Better::Less, &p99);
    }
    if let Some(fairness) = &figures.fairness {
        let behind = [fairness.short_behind_ms];
        report.figure("TTFT of a short prompt behind a long one", Unit::Milliseconds, Better::Less, &behind);
    }
}
