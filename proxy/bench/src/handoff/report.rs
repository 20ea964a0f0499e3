//! All figures, and their report.

use serde::Serialize;

use super::charts;
use super::codecs::CodecRow;
use super::fairness::Fairness;
use super::footprint::{Footprint, Growth};
use super::overlap::Overlap;
use super::streams::Streams;
use super::wire::WireSpeed;
use crate::report::{Report, dash, one_decimal};

/// All measurements; `None` if a section was not selected.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct HandoffFigures {
    pub(super) model: String,
    /// Compute threads of each node.
    pub(super) threads: u32,
    pub(super) overlap: Option<Overlap>,
    /// The same over networks of given rates, with and without lossy codecs.
    pub(super) networks: Option<Overlap>,
    pub(super) fairness: Option<Fairness>,
    pub(super) wire: Option<WireSpeed>,
    pub(super) memory: Option<Vec<Footprint>>,
    pub(super) streams: Option<Streams>,
    pub(super) codecs: Option<Vec<CodecRow>>,
}

impl HandoffFigures {
    pub(super) fn report(&self) -> Report {
        let mut report = Report::new(&self.model);
        report.text(format!("{}, {} compute thread(s) a node; medians; times in ms", self.model, self.threads));
        if let Some(overlap) = &self.overlap {
            add_overlap(&mut report, overlap);
            charts::add(&mut report, overlap);
        }
        self.networks.iter().for_each(|overlap| add_overlap(&mut report, overlap));
        self.wire.iter().for_each(|wire| add_wire(&mut report, wire));
        self.codecs.iter().for_each(|rows| add_codecs(&mut report, rows));
        self.memory.iter().for_each(|rows| add_memory(&mut report, rows));
        self.streams.iter().for_each(|streams| add_streams(&mut report, streams));
        self.fairness.iter().for_each(|fairness| add_fairness(&mut report, fairness));
        report
    }
}

fn add_overlap(report: &mut Report, overlap: &Overlap) {
    let head = [
        "overlap",
        "codec",
        "link",
        "rounds",
        "MB/s",
        "MB",
        "states, MB",
        "prefill",
        "transfer",
        "import",
        "after it",
        "of prefill",
        "total",
        "after it",
    ];
    let rows = overlap.rows.iter().map(|row| {
        vec![
            format!("{} tokens", row.n_tokens),
            row.codec.as_str().to_owned(),
            row.link.name(),
            row.n_rounds.to_string(),
            row.rate.map_or_else(dash, |rate| one_decimal(rate / 1e6)),
            one_decimal(row.n_bytes / 1e6),
            one_decimal(row.state_bytes / 1e6),
            one_decimal(row.prefill_ms),
            one_decimal(row.transfer_ms),
            one_decimal(row.import_ms),
            one_decimal(row.after_prefill_ms),
            format!("{:.1} %", 100.0 * row.after_prefill_share),
            one_decimal(row.total_ms),
            row.after_ms.map_or_else(dash, one_decimal),
        ]
    });
    report.table(&head, rows);
    report.text("after it: time after the prefill if nothing were sent during it (the same pull of a cached prompt)");
    let rows = overlap
        .direct
        .iter()
        .map(|row| vec![format!("{} tokens", row.n_tokens), row.n_rounds.to_string(), one_decimal(row.ttft_ms)]);
    report.table(&["without a handoff", "rounds", "TTFT"], rows);
}

fn add_wire(report: &mut Report, wire: &WireSpeed) {
    let WireSpeed { n_tokens, n_bytes, pull, copy, ratio, stages, .. } = wire;
    let whole = [("cache to cache, digests on", pull), ("plain copy, same bytes and kind of socket", copy)];
    let rows = whole.into_iter().chain(stages.iter().map(|stage| (stage.name, &stage.gb_s)));
    let rows = rows.map(|(name, gb_s)| vec![name.to_owned(), format!("{gb_s:.2}")]);
    let head = format!("wire speed: {n_tokens} tokens, {} MB", one_decimal(*n_bytes as f64 / 1e6));
    report.table(&[&head, "GB/s"], rows);
    report.text(format!("cache to cache is {ratio:.2} of the plain copy"));
}

fn add_codecs(report: &mut Report, rows: &[CodecRow]) {
    let rows = rows.iter().map(|row| {
        let name = row.codec.as_str().to_owned();
        vec![name, format!("{:.2}", row.ratio), format!("{:.0}", row.write_mb_s), format!("{:.0}", row.read_mb_s)]
    });
    report.table(&["codec, with digests", "ratio", "write MB/s", "read MB/s"], rows);
}

fn add_memory(report: &mut Report, rows: &[Footprint]) {
    let added = |growth: &Growth| growth.added().map_or_else(|| "not measured".to_owned(), one_decimal);
    let before = |growth: &Growth| growth.before_mib.map_or_else(|| "not measured".to_owned(), one_decimal);
    let rows = rows.iter().map(|row| {
        let sizes = [before(&row.prefill), added(&row.prefill), before(&row.decode), added(&row.decode)];
        [row.what.to_owned(), one_decimal(row.kv_mib)].into_iter().chain(sizes).collect()
    });
    report.table(&["memory, MiB", "KV moved", "prefill node", "peak +", "decode node", "peak +"], rows);
}

fn add_streams(report: &mut Report, streams: &Streams) {
    let Streams { n_streams, n_imported, n_imports, import_total_ms, without, with } = streams;
    let rows = [("alone", without), ("during imports", with)].map(|(what, gaps)| {
        vec![what.to_owned(), one_decimal(gaps.p50_ms), one_decimal(gaps.p99_ms), one_decimal(gaps.max_ms)]
    });
    let ratio = with.p99_ms / without.p99_ms;
    report.table(&[&format!("ITL of {n_streams} streams"), "p50", "p99", "max"], rows);
    report.text(format!(
        "{n_imports} imports of {n_imported} tokens, {import_total_ms:.1} ms each; the p99 is {ratio:.2} times as long"
    ));
}

fn add_fairness(report: &mut Report, fairness: &Fairness) {
    let Fairness { n_short, n_long, .. } = *fairness;
    let row =
        |n: usize, alone: f64, together: f64| vec![format!("{n} tokens"), one_decimal(alone), one_decimal(together)];
    let rows = [
        row(n_short, fairness.short_alone_ms, fairness.short_behind_ms),
        row(n_long, fairness.long_alone_ms, fairness.long_shared_ms),
    ];
    report.table(&["TTFT on one prefill node", "alone", "the short one 200 ms after the long one"], rows);
}
