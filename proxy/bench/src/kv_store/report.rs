//! All figures, and their report.

use std::collections::BTreeMap;

use baton_schemas::Token;
use baton_schemas::kv::KvLayout;
use baton_schemas::sequence::CachedTokens;
use baton_tryout::stats::median;
use serde::Serialize;

use super::disk::ColdReads;
use super::plain::PlainRates;
use crate::report::{Better, Report, Unit, dash, one_decimal};
use crate::timeline::Timeline;

/// Where the KV of a prompt was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum KvFrom {
    Computed,
    Slot,
    Memory,
    /// After a restart, with the files in the page cache.
    WarmDisk,
    /// After a restart, without.
    ColdDisk,
    OtherNode,
}

impl KvFrom {
    const ALL: [KvFrom; 6] =
        [KvFrom::Computed, KvFrom::Slot, KvFrom::Memory, KvFrom::WarmDisk, KvFrom::ColdDisk, KvFrom::OtherNode];

    fn words(self) -> &'static str {
        match self {
            KvFrom::Computed => "computed",
            KvFrom::Slot => "slot",
            KvFrom::Memory => "memory",
            KvFrom::WarmDisk => "disk, page cache warm",
            KvFrom::ColdDisk => "disk, page cache cold",
            KvFrom::OtherNode => "another node",
        }
    }

    /// The rate of the same bytes without a store.
    fn plain(self, rates: &PlainRates) -> Option<f64> {
        match self {
            KvFrom::Computed | KvFrom::Slot | KvFrom::OtherNode => None,
            KvFrom::Memory => Some(rates.copy),
            KvFrom::WarmDisk => Some(rates.warm_read),
            KvFrom::ColdDisk => rates.cold_read,
        }
    }
}

/// One reply.
#[derive(Debug, Clone, Serialize)]
pub(super) struct KvSample {
    from: KvFrom,
    ttft_ms: f64,
    /// Until the KV was back, or pulled.
    moved_ms: Option<f64>,
    /// All but the last token came from there.
    is_whole: bool,
    /// It has the tokens of the computed one.
    is_equal: bool,
}

impl KvSample {
    pub(super) fn new(from: KvFrom, reply: &Timeline, computed: &[Token]) -> KvSample {
        let CachedTokens { n_cached, memory, disk } = reply.cached;
        let (all_but_last, restore_ms) = (reply.n_prompt - 1, reply.timings.restore_ms);
        let pulled = reply.handoff.filter(|report| report.failure.is_none());
        let (n_there, moved_ms) = match from {
            KvFrom::Computed => (all_but_last - n_cached, None),
            KvFrom::Slot => (n_cached - memory - disk, None),
            KvFrom::Memory => (memory, Some(restore_ms)),
            KvFrom::WarmDisk | KvFrom::ColdDisk => (disk, Some(restore_ms)),
            KvFrom::OtherNode => (pulled.map_or(0, |report| report.n_tokens), pulled.map(|report| report.total_ms)),
        };
        let is_whole = n_there == all_but_last && pulled.is_none_or(|report| report.n_computed == 0);
        KvSample { from, ttft_ms: reply.ttft() * 1e3, moved_ms, is_whole, is_equal: reply.ids == computed }
    }

    /// One of llama-server's. `moved_ms`: until its file was read.
    pub(super) fn of_peer(
        from: KvFrom,
        ttft_ms: f64,
        moved_ms: Option<f64>,
        is_whole: bool,
        is_equal: bool,
    ) -> KvSample {
        KvSample { from, ttft_ms, moved_ms, is_whole, is_equal }
    }
}

/// A model's figures.
#[derive(Debug, Serialize)]
pub(super) struct StoredFigures {
    name: String,
    #[serde(skip)]
    layout: KvLayout,
    /// By the number of the prompt's tokens.
    samples: BTreeMap<usize, Vec<KvSample>>,
    /// The same of llama-server, in the same order; empty without it.
    peer: BTreeMap<usize, Vec<KvSample>>,
    cold_reads: ColdReads,
    pub(super) plain: Vec<PlainRates>,
}

impl StoredFigures {
    pub(super) fn new(name: String, layout: KvLayout, cold_reads: ColdReads) -> StoredFigures {
        let (samples, peer) = (BTreeMap::new(), BTreeMap::new());
        StoredFigures { name, layout, samples, peer, cold_reads, plain: Vec::new() }
    }

    pub(super) fn add(&mut self, n_tokens: usize, sample: KvSample) {
        self.samples.entry(n_tokens).or_default().push(sample);
    }

    pub(super) fn add_of_peer(&mut self, n_tokens: usize, sample: KvSample) {
        self.peer.entry(n_tokens).or_default().push(sample);
    }

    /// The bytes of a prompt's KV: of windowed layers, what its end needs.
    pub(super) fn kv_bytes(&self, n_tokens: usize) -> usize {
        let rows = self.layout.sections.iter().map(|section| {
            let n = section.window.map_or(n_tokens, |window| n_tokens.min(window as usize));
            n.div_ceil(section.tokens_per_row.max(1) as usize) * section.bytes()
        });
        rows.sum::<usize>() + self.layout.state_bytes()
    }

    /// The time to the first token by length and place, and in relation to the computed prompt of the same round.
    fn add_figures(&self, report: &mut Report) {
        for (n_tokens, samples) in &self.samples {
            let ttft = |from: KvFrom| -> Vec<f64> {
                samples.iter().filter(|sample| sample.from == from).map(|sample| sample.ttft_ms).collect()
            };
            let computed = ttft(KvFrom::Computed);
            for from in KvFrom::ALL {
                let name = format!("{}, {n_tokens} tokens from {}", self.name, from.words());
                let ratios: Vec<f64> = ttft(from).iter().zip(&computed).map(|(ms, computed)| ms / computed).collect();
                report.figure(format!("{name}: TTFT"), Unit::Milliseconds, Better::Less, &ttft(from));
                if from != KvFrom::Computed {
                    report.figure(format!("{name}: TTFT ÷ computed"), Unit::Times, Better::Less, &ratios);
                }
                report.figure(
                    format!("{name}: TTFT ÷ llama-server's"),
                    Unit::Times,
                    Better::Less,
                    &self.beside_peer(*n_tokens, from),
                );
            }
        }
    }

    /// The time to the first token ÷ llama-server's to the same prompt, of each round.
    fn beside_peer(&self, n_tokens: usize, from: KvFrom) -> Vec<f64> {
        let ttft = |samples: &BTreeMap<usize, Vec<KvSample>>| -> Vec<f64> {
            let of_length = samples.get(&n_tokens).into_iter().flatten();
            of_length.filter(|sample| sample.from == from).map(|sample| sample.ttft_ms).collect()
        };
        ttft(&self.samples).iter().zip(ttft(&self.peer)).map(|(ours, theirs)| ours / theirs).collect()
    }

    fn peer_rows(&self) -> Vec<Vec<String>> {
        let of_length = |(n_tokens, samples): (&usize, &Vec<KvSample>)| {
            let row = |from: KvFrom| {
                let of: Vec<&KvSample> = samples.iter().filter(|sample| sample.from == from).collect();
                let ttft: Vec<f64> = of.iter().map(|sample| sample.ttft_ms).collect();
                let moved: Vec<f64> = of.iter().filter_map(|sample| sample.moved_ms).collect();
                (!of.is_empty()).then(|| {
                    vec![
                        format!("{n_tokens} tokens"),
                        from.words().to_owned(),
                        one_decimal(median(&ttft)),
                        if moved.is_empty() { dash() } else { one_decimal(median(&moved)) },
                        format!("{:.3}", median(&self.beside_peer(*n_tokens, from))),
                        format!("{}/{}", of.iter().filter(|sample| sample.is_whole).count(), of.len()),
                        format!("{}/{}", of.iter().filter(|sample| sample.is_equal).count(), of.len()),
                    ]
                })
            };
            KvFrom::ALL.into_iter().filter_map(row).collect::<Vec<_>>()
        };
        self.peer.iter().flat_map(of_length).collect()
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let by_length = self.samples.iter();
        by_length.flat_map(|(n_tokens, samples)| self.rows_of(*n_tokens, samples)).collect()
    }

    fn rows_of(&self, n_tokens: usize, samples: &[KvSample]) -> Vec<Vec<String>> {
        let of = |from: KvFrom| samples.iter().filter(move |sample| sample.from == from);
        let ttft = |from: KvFrom| median(&of(from).map(|sample| sample.ttft_ms).collect::<Vec<_>>());
        let computed = ttft(KvFrom::Computed);
        let gigabytes = self.kv_bytes(n_tokens - 1) as f64 / 1e9;
        let plain = self.plain.iter().find(|rates| rates.n_tokens == n_tokens);
        let mut froms: Vec<KvFrom> = samples.iter().map(|sample| sample.from).collect();
        froms.sort_unstable();
        froms.dedup();
        let row = |from: KvFrom| {
            let moved: Vec<f64> = of(from).filter_map(|sample| sample.moved_ms).collect();
            let moved_ms = Some(median(&moved)).filter(|ms| *ms > 0.0);
            let rate = moved_ms.map(|ms| gigabytes / ms * 1e3);
            let plain = plain.and_then(|rates| from.plain(rates));
            let figure = |value: Option<f64>| value.map_or_else(dash, |value| format!("{value:.2}"));
            let n = of(from).count();
            vec![
                format!("{n_tokens} tokens"),
                from.words().to_owned(),
                one_decimal(ttft(from)),
                format!("{:.3}", ttft(from) / computed),
                moved_ms.map_or_else(dash, one_decimal),
                figure(rate),
                figure(plain),
                figure(rate.zip(plain).map(|(rate, plain)| rate / plain)),
                format!("{}/{n}", of(from).filter(|sample| sample.is_whole).count()),
                format!("{}/{n}", of(from).filter(|sample| sample.is_equal).count()),
            ]
        };
        froms.into_iter().map(row).collect()
    }

    /// What the lossless store promises and this run did not show.
    fn failure(&self) -> Option<String> {
        let restored = [KvFrom::Memory, KvFrom::WarmDisk, KvFrom::ColdDisk];
        let all = self.samples.values().flatten().filter(|sample| restored.contains(&sample.from));
        let n_other = all.clone().filter(|sample| sample.is_whole && !sample.is_equal).count();
        let n_missed = all.filter(|sample| !sample.is_whole).count();
        let name = &self.name;
        match (n_other, n_missed) {
            (0, 0) => None,
            (0, n) => Some(format!("{name}: {n} prompts did not come back as a whole")),
            (n, _) => Some(format!("{name}: {n} replies differ after their KV came back")),
        }
    }
}

#[derive(Debug, Default, Serialize)]
pub(super) struct StoreFigures {
    pub(super) models: Vec<StoredFigures>,
}

impl StoreFigures {
    pub(super) fn report(&self) -> Report {
        let names: Vec<&str> = self.models.iter().map(|model| &*model.name).collect();
        let mut report = Report::new(names.join(", "));
        for model in &self.models {
            report.text(format!("{}:", model.name));
            let head = [
                "prompt",
                "KV from",
                "TTFT, ms",
                "÷ computed",
                "moved in, ms",
                "GB/s",
                "plain",
                "ratio",
                "whole",
                "equal replies",
            ];
            report.table(&head, model.rows());
            model.cold_reads.missing().into_iter().for_each(|why| report.text(why));
            if !model.peer.is_empty() {
                report.text(format!("llama-server with the same file of {}:", model.name));
                let head = [
                    "prompt",
                    "KV from",
                    "TTFT, ms",
                    "file read, ms",
                    "Baton ÷ llama-server",
                    "whole",
                    "equal replies",
                ];
                report.table(&head, model.peer_rows());
            }
            report.fail(model.failure());
            model.add_figures(&mut report);
        }
        report.text(
            "Medians; ratios to llama-server are medians of the rounds' own. From disk is after a restart. GB/s: the KV's bytes as the engine holds them, by the time until they are \
             there; plain: the same bytes copied in memory, or read from a file and decrypted by as many threads as the store's. Whole: all \
             tokens but the last came from there.",
        );
        if self.models.iter().any(|model| !model.peer.is_empty()) {
            report.text(
                "llama-server had the same prompts, with one slot, after Baton's nodes had ended. Memory: its prompt cache (--cache-ram). \
                 It writes to disk only what a client asks for (--slot-save-path), and not encrypted; its first token from there is timed \
                 from the client's request to read the file. Its replies are compared with the one that it computed.",
            );
        }
        report
    }
}
