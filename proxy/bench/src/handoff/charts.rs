//! Charts of the overlap.

use baton_schemas::kv::Codec;

use super::overlap::{Link, Overlap, OverlapRow};
use crate::report::{ChartLine, LineChart, Report};

pub(super) fn add(report: &mut Report, overlap: &Overlap) {
    let rows = &overlap.rows;
    let n_tokens = rows.iter().map(|row| row.n_tokens).max().unwrap_or(0);
    let ticks: Vec<String> = links().map(|link| link.name()).collect();
    let after_prefill = LineChart {
        title: &format!("What the transfer of {n_tokens} tokens adds to the prefill"),
        x_name: "link",
        y_name: "after the prefill, % of it",
        ticks: Some(&ticks),
        lines: &after_prefill(rows, n_tokens),
    };
    report.chart("after-prefill", &after_prefill);
    let ttft = LineChart {
        title: "Time to first token",
        x_name: "tokens of the prompt",
        y_name: "ms",
        ticks: None,
        lines: &ttft(overlap),
    };
    report.chart("ttft", &ttft);
}

/// The links, from the slowest to the fastest.
fn links() -> impl Iterator<Item = Link> {
    Link::RELATIVE.into_iter().rev()
}

/// Makes a line over the links for each codec.
fn after_prefill(rows: &[OverlapRow], n_tokens: usize) -> Vec<ChartLine> {
    let line = |codec| {
        let at = |link| rows.iter().find(|r| (r.n_tokens, r.codec, r.link) == (n_tokens, codec, link));
        let points =
            links().enumerate().filter_map(|(x, link)| Some((x as f64, 100.0 * at(link)?.after_prefill_share)));
        ChartLine { name: codec.as_str().to_owned(), points: points.collect() }
    };
    Codec::OF_ROWS.into_iter().map(line).collect()
}

/// Makes lines over the prompt length.
fn ttft(overlap: &Overlap) -> Vec<ChartLine> {
    let of = |link: Link, value: fn(&OverlapRow) -> Option<f64>| {
        let rows = overlap.rows.iter().filter(move |row| row.codec == Codec::None && row.link == link);
        rows.filter_map(|row| Some((row.n_tokens as f64, value(row)?))).collect()
    };
    let direct = overlap.direct.iter().map(|row| (row.n_tokens as f64, row.ttft_ms)).collect();
    vec![
        ChartLine { name: "without a handoff".into(), points: direct },
        ChartLine { name: "handoff, loopback".into(), points: of(Link::Loopback, |row| Some(row.ttft_ms)) },
        ChartLine { name: "handoff, wire 60 %".into(), points: of(Link::Share60, |row| Some(row.ttft_ms)) },
        ChartLine {
            name: "wire 60 %, sent after the prefill".into(),
            points: of(Link::Share60, |row| Some(row.prefill_ms + row.after_ms?)),
        },
    ]
}
