//! All figures, and their report.

use baton_schemas::sequence::DraftCounts;
use baton_tryout::stats::{median, percentile};
use serde::Serialize;

use super::spoken::Spoken;
use crate::report::{Report, one_decimal};

#[derive(Debug, Serialize)]
pub(super) struct SpeculationFigures {
    pub(super) rows: Vec<SpeculationRow>,
}

/// The figures of one question, with so many streams.
#[derive(Debug, Serialize)]
pub(super) struct SpeculationRow {
    what: String,
    n_streams: usize,
    /// Tokens per second of a stream: medians of the rounds.
    without_tps: f64,
    with_tps: f64,
    /// The median of the rounds' ratios.
    ratio: f64,
    /// The share of verified guesses that were right.
    acceptance: Option<f64>,
    /// Guessed tokens for each step.
    mean_draft: f64,
    /// Milliseconds between tokens, of which several may come at once.
    without_itl_p99_ms: f64,
    with_itl_p99_ms: f64,
    /// Replies with the same tokens, of so many.
    n_equal: usize,
    n_replies: usize,
}

impl SpeculationRow {
    /// Sums up the rounds: each has `n_streams` replies without speculation, and as many with it.
    pub(super) fn new(what: &str, n_streams: usize, pairs: &[[Vec<Spoken>; 2]]) -> SpeculationRow {
        let tps = |replies: &[Spoken]| median(&replies.iter().map(Spoken::tps).collect::<Vec<_>>());
        let rates = |side: usize| pairs.iter().map(|pair| tps(&pair[side])).collect::<Vec<f64>>();
        let (without, with) = (rates(0), rates(1));
        let ratios: Vec<f64> = without.iter().zip(&with).map(|(without, with)| with / without).collect();
        let p99 = |side: usize| {
            let gaps: Vec<f64> = pairs.iter().flat_map(|pair| &pair[side]).flat_map(|reply| reply.gaps_ms()).collect();
            percentile(&gaps, 99.0)
        };
        let all = pairs.iter().flat_map(|pair| &pair[1]);
        let drafts = all.clone().fold(DraftCounts::default(), |sum, reply| sum.plus(reply.timings.drafts.all()));
        let n_tokens: u32 = all.map(|reply| reply.timings.predicted_n).sum();
        let both = || pairs.iter().flat_map(|[without, with]| without.iter().zip(with));
        SpeculationRow {
            what: what.to_owned(),
            n_streams,
            without_tps: median(&without),
            with_tps: median(&with),
            ratio: median(&ratios),
            acceptance: (drafts.n > 0).then(|| f64::from(drafts.n_accepted) / f64::from(drafts.n)),
            mean_draft: f64::from(drafts.n) / f64::from(n_tokens.saturating_sub(drafts.n_accepted).max(1)),
            without_itl_p99_ms: p99(0),
            with_itl_p99_ms: p99(1),
            n_equal: both().filter(|(without, with)| without.tokens == with.tokens).count(),
            n_replies: both().count(),
        }
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.what.clone(),
            self.n_streams.to_string(),
            one_decimal(self.without_tps),
            one_decimal(self.with_tps),
            format!("{:.3}", self.ratio),
            self.acceptance.map_or_else(crate::report::dash, |share| format!("{share:.2}")),
            one_decimal(self.mean_draft),
            one_decimal(self.without_itl_p99_ms),
            one_decimal(self.with_itl_p99_ms),
            format!("{}/{}", self.n_equal, self.n_replies),
        ]
    }
}

impl SpeculationFigures {
    pub(super) fn report(&self, model: &str) -> Report {
        let mut report = Report::new(model);
        let head =
            ["", "streams", "without", "with", "ratio", "accepted", "draft/step", "ITL p99 without", "with", "equal"];
        report.table(&head, self.rows.iter().map(SpeculationRow::cells));
        report.text("tokens/s of a stream after its first token; medians of rounds, ratios pair by pair; ITL in ms");
        report
    }
}
