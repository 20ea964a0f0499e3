//! All figures, for the JSON file and as tables.

use serde::Serialize;

use super::codecs::CodecRow;
use super::fairness::Fairness;
use super::footprint::{Footprint, Growth};
use super::overlap::Overlap;
use super::streams::Streams;
use super::wire::WireSpeed;
use crate::table::{dash, table};

/// All measurements; `None` if a section was not selected.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct HandoffBenchReport {
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

impl HandoffBenchReport {
    /// The tables that the command prints.
    pub(super) fn table(&self) -> String {
        let sections = [
            self.overlap.as_ref().map(overlap),
            self.networks.as_ref().map(overlap),
            self.wire.as_ref().map(wire),
            self.codecs.as_deref().map(codecs),
            self.memory.as_deref().map(memory),
            self.streams.as_ref().map(streams),
            self.fairness.as_ref().map(fairness),
        ];
        let head = format!("{}, {} compute thread(s) a node; medians; times in ms\n", self.model, self.threads);
        sections.into_iter().flatten().fold(head, |out, section| out + "\n" + &section)
    }
}

fn overlap(overlap: &Overlap) -> String {
    let head = [
        "overlap",
        "codec",
        "link",
        "rounds",
        "MB/s",
        "MB",
        "prefill",
        "transfer",
        "un-hidden",
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
            row.rate.map_or_else(dash, |rate| one(rate / 1e6)),
            one(row.n_bytes / 1e6),
            one(row.prefill_ms),
            one(row.transfer_ms),
            one(row.unhidden_ms),
            format!("{:.1} %", 100.0 * row.unhidden_share),
            one(row.total_ms),
            row.after_ms.map_or_else(dash, one),
        ]
    });
    table(&head, rows)
        + "after it: time after the prefill if nothing were sent during it (the same pull of a cached prompt)\n\n"
        + &direct(overlap)
}

fn direct(overlap: &Overlap) -> String {
    let rows = overlap
        .direct
        .iter()
        .map(|row| vec![format!("{} tokens", row.n_tokens), row.n_rounds.to_string(), one(row.ttft_ms)]);
    table(&["without a handoff", "rounds", "TTFT"], rows)
}

fn wire(wire: &WireSpeed) -> String {
    let WireSpeed { n_tokens, n_bytes, pull, copy, ratio, stages } = wire;
    let whole = [("cache to cache, digests on", pull), ("plain copy, same bytes and kind of socket", copy)];
    let rows = whole.into_iter().chain(stages.iter().map(|stage| (stage.name, &stage.gb_s)));
    let rows = rows.map(|(name, gb_s)| vec![name.to_owned(), format!("{gb_s:.2}")]);
    let head = format!("wire speed: {n_tokens} tokens, {} MB", one(*n_bytes as f64 / 1e6));
    table(&[&head, "GB/s"], rows) + &format!("cache to cache is {ratio:.2} of the plain copy\n")
}

fn codecs(rows: &[CodecRow]) -> String {
    let rows = rows.iter().map(|row| {
        let name = row.codec.as_str().to_owned();
        vec![name, format!("{:.2}", row.ratio), format!("{:.0}", row.write_mb_s), format!("{:.0}", row.read_mb_s)]
    });
    table(&["codec, with digests", "ratio", "write MB/s", "read MB/s"], rows)
}

fn memory(rows: &[Footprint]) -> String {
    let added = |growth: &Growth| growth.added().map_or_else(|| "not measured".to_owned(), one);
    let before = |growth: &Growth| growth.before_mib.map_or_else(|| "not measured".to_owned(), one);
    let rows = rows.iter().map(|row| {
        let sizes = [before(&row.prefill), added(&row.prefill), before(&row.decode), added(&row.decode)];
        [row.what.to_owned(), one(row.kv_mib)].into_iter().chain(sizes).collect()
    });
    table(&["memory, MiB", "KV moved", "prefill node", "peak +", "decode node", "peak +"], rows)
}

fn streams(streams: &Streams) -> String {
    let Streams { n_streams, n_imported, n_imports, import_total_ms, without, with } = streams;
    let rows = [("alone", without), ("during imports", with)]
        .map(|(what, gaps)| vec![what.to_owned(), one(gaps.p50_ms), one(gaps.p99_ms), one(gaps.max_ms)]);
    let ratio = with.p99_ms / without.p99_ms;
    table(&[&format!("ITL of {n_streams} streams"), "p50", "p99", "max"], rows)
        + &format!(
            "{n_imports} imports of {n_imported} tokens, {import_total_ms:.1} ms each; the p99 is {ratio:.2} times as long\n"
        )
}

fn fairness(fairness: &Fairness) -> String {
    let Fairness { n_short, n_long, .. } = *fairness;
    let row = |n: usize, alone: f64, together: f64| vec![format!("{n} tokens"), one(alone), one(together)];
    let rows = [
        row(n_short, fairness.short_alone_ms, fairness.short_behind_ms),
        row(n_long, fairness.long_alone_ms, fairness.long_shared_ms),
    ];
    table(&["TTFT on one prefill node", "alone", "the short one 200 ms after the long one"], rows)
}

fn one(value: f64) -> String {
    format!("{value:.1}")
}
