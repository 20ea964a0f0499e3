//! All figures, and their report.

use baton_schemas::sequence::DraftCounts;
use baton_tryout::stats::{median, percentile};
use serde::Serialize;

use super::guesser::Guesser;
use super::spoken::Spoken;
use super::subject::DraftingServer;
use crate::backends::model::BackendModel;
use crate::report::{Better, Report, Unit, dash, one_decimal};

/// By subject, the replies of all streams.
pub(super) type RoundReplies = Vec<Vec<Spoken>>;

#[derive(Debug, Serialize)]
pub(super) struct SpeculationFigures {
    pub(super) rows: Vec<SpeculationRow>,
    /// The cost of the model's own head, if it guesses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) head: Option<HeadFigures>,
}

/// Milliseconds of a pass of the model's own head, and of a step of the model, with one row.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct HeadFigures {
    pub(super) pass_ms: f64,
    pub(super) step_ms: f64,
}

/// The figures of one question, with so many streams, of one subject.
#[derive(Debug, Serialize)]
pub(super) struct SpeculationRow {
    what: String,
    n_streams: usize,
    server: &'static str,
    guesser: Guesser,
    /// Tokens per second of a stream: the median of the rounds.
    tps: f64,
    /// The median of the rounds' ratios to Baton without speculation; NaN without any.
    ratio: f64,
    /// The share of verified guesses that were right.
    acceptance: Option<f64>,
    /// Guessed tokens for each step.
    mean_draft: f64,
    /// Milliseconds between tokens, of which several may come at once.
    itl_p99_ms: Option<f64>,
    /// Replies with the tokens of Baton without speculation, of so many.
    n_equal: usize,
    n_replies: usize,
    /// `tps` by round, and `ratio` by round that has one.
    tps_rounds: Vec<f64>,
    ratio_rounds: Vec<f64>,
}

impl SpeculationRow {
    /// Sums up the rounds for the subject with this index. The first subject is what all are compared with.
    pub(super) fn new(what: &str, subject: &DraftingServer, idx: usize, rounds: &[RoundReplies]) -> SpeculationRow {
        let tps = |replies: &[Spoken]| median(&replies.iter().map(Spoken::tps).collect::<Vec<_>>());
        let rates = |idx: usize| rounds.iter().map(|round| tps(&round[idx])).collect::<Vec<f64>>();
        let (without, with) = (rates(0), rates(idx));
        let ratios = ratios(&with, &without);
        let all = || rounds.iter().flat_map(|round| &round[idx]);
        let gaps: Vec<f64> = all().flat_map(Spoken::gaps_ms).collect();
        let drafts = all().fold(DraftCounts::default(), |sum, reply| sum.plus(reply.timings.drafts.all()));
        let n_tokens: u32 = all().map(|reply| reply.timings.predicted_n).sum();
        let both = || rounds.iter().flat_map(|round| round[0].iter().zip(&round[idx]));
        SpeculationRow {
            what: what.to_owned(),
            n_streams: rounds.first().map_or(0, |round| round[idx].len()),
            server: subject.server(),
            guesser: subject.guesser,
            tps: median(&with),
            ratio: median(&ratios),
            acceptance: (drafts.n > 0).then(|| f64::from(drafts.n_accepted) / f64::from(drafts.n)),
            mean_draft: f64::from(drafts.n) / f64::from(n_tokens.saturating_sub(drafts.n_accepted).max(1)),
            itl_p99_ms: subject.is_baton().then(|| percentile(&gaps, 99.0)),
            n_equal: both().filter(|(without, with)| without.tokens == with.tokens).count(),
            n_replies: both().count(),
            tps_rounds: with,
            ratio_rounds: ratios,
        }
    }

    fn add_figures(&self, rows: &[SpeculationRow], report: &mut Report) {
        let SpeculationRow { what, n_streams, server, guesser, .. } = self;
        let name = format!("{what}, {n_streams} streams, {server}, guesses by {}", guesser.words());
        report.figure(name.clone(), Unit::TokensPerSecond, Better::More, &self.tps_rounds);
        report.figure(format!("{name}: ÷ Baton without"), Unit::Times, Better::More, &self.ratio_rounds);
        if let Some(ratios) = self.ratios_to_peer(rows) {
            report.figure(format!("{name}: ÷ llama-server with the same"), Unit::Times, Better::More, &ratios);
        }
    }

    /// By round, Baton's tokens per second with a drafter ÷ llama-server's with the same one. `None`: not both were measured.
    fn ratios_to_peer(&self, rows: &[SpeculationRow]) -> Option<Vec<f64>> {
        let is_same = |row: &&SpeculationRow| {
            (&row.what, row.n_streams, row.guesser) == (&self.what, self.n_streams, self.guesser) && !row.is_baton()
        };
        let peer = rows.iter().find(is_same).filter(|_| self.is_baton())?;
        Some(ratios(&self.tps_rounds, &peer.tps_rounds))
    }

    /// Only of Baton's replies it is known when their tokens came.
    fn is_baton(&self) -> bool {
        self.itl_p99_ms.is_some()
    }

    fn cells(&self, rows: &[SpeculationRow]) -> Vec<String> {
        vec![
            self.what.clone(),
            self.n_streams.to_string(),
            format!("{}, {}", self.server, self.guesser.words()),
            one_decimal(self.tps),
            three_decimals(self.ratio),
            self.ratios_to_peer(rows).map_or_else(dash, |ratios| three_decimals(median(&ratios))),
            self.acceptance.map_or_else(dash, |share| format!("{share:.2}")),
            one_decimal(self.mean_draft),
            self.itl_p99_ms.map_or_else(dash, one_decimal),
            format!("{}/{}", self.n_equal, self.n_replies),
        ]
    }
}

impl SpeculationFigures {
    pub(super) fn report(&self, model: &BackendModel) -> Report {
        let about = model.about().map(|about| format!(" ({about})")).unwrap_or_default();
        let mut report = Report::new(format!("{}{about}", model.name()));
        let head = [
            "",
            "streams",
            "guesses",
            "tok/s",
            "ratio",
            "÷ llama-server",
            "accepted",
            "draft/step",
            "ITL p99",
            "equal",
        ];
        report.table(&head, self.rows.iter().map(|row| row.cells(&self.rows)));
        report.text(
            "Tokens/s of a stream after its first token: medians of rounds. Ratios to Baton without guesses: medians of the \
             rounds' own, as are those to llama-server with the same drafter; more is better. ITL in ms.",
        );
        self.rows.iter().for_each(|row| row.add_figures(&self.rows, &mut report));
        if let Some(HeadFigures { pass_ms, step_ms }) = self.head {
            let ratio = pass_ms / step_ms;
            report.text(format!(
                "A pass of the model's own head takes {pass_ms:.2} ms, a step of the model {step_ms:.2} ms ({ratio:.2} times), with one row."
            ));
            report.figure("a pass of the model's own head", Unit::Milliseconds, Better::Less, &[pass_ms]);
            report.figure("a pass of the model's own head ÷ a step", Unit::Times, Better::Less, &[ratio]);
        }
        let n_without = self.rows.iter().filter(|row| !row.ratio.is_finite()).count();
        if n_without > 0 {
            report.text(format!("Rows without a ratio: {n_without}. A reply of one token has no speed."));
        }
        let compared =
            |row: &&SpeculationRow| row.is_baton() && row.guesser != Guesser::Nothing && row.ratio.is_finite();
        let slowest = self.rows.iter().filter(compared).min_by(|a, b| a.ratio.total_cmp(&b.ratio));
        if let Some(row) = slowest {
            let SpeculationRow { ratio, what, n_streams, guesser, .. } = row;
            let guesser = guesser.words();
            report.text(format!("The lowest ratio of Baton's: {ratio:.3} ({what}, {n_streams} streams, {guesser})."));
        }
        report
    }
}

/// By round, one speed ÷ another one. A round whose replies have one token has no speed, so no ratio.
fn ratios(of: &[f64], to: &[f64]) -> Vec<f64> {
    of.iter().zip(to).map(|(of, to)| of / to).filter(|ratio| ratio.is_finite()).collect()
}

fn three_decimals(ratio: f64) -> String {
    if ratio.is_finite() { format!("{ratio:.3}") } else { dash() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(server: &'static str, guesser: Guesser, tps_rounds: &[f64]) -> SpeculationRow {
        SpeculationRow {
            what: "prose".into(),
            n_streams: 1,
            server,
            guesser,
            tps: median(tps_rounds),
            ratio: 1.0,
            acceptance: None,
            mean_draft: 0.0,
            itl_p99_ms: (server == "Baton").then_some(1.0),
            n_equal: 1,
            n_replies: 1,
            tps_rounds: tps_rounds.into(),
            ratio_rounds: vec![1.0; tps_rounds.len()],
        }
    }

    #[test]
    fn each_drafter_that_both_servers_have_is_compared_round_by_round() {
        let rows = vec![
            row("Baton", Guesser::PromptLookup, &[30.0, 10.0, 40.0]),
            row("Baton", Guesser::Prediction, &[50.0, 50.0, 50.0]),
            row("llama-server", Guesser::Nothing, &[10.0, 10.0, 10.0]),
            row("llama-server", Guesser::PromptLookup, &[20.0, 20.0, 20.0]),
        ];
        let report = SpeculationFigures { rows, head: None }.report(&BackendModel::Real("tiny.gguf".into()));
        let is_to_peer = |(name, _): &(String, Vec<f64>)| name.ends_with("÷ llama-server with the same");
        let found: Vec<_> = report.recorded().into_iter().filter(is_to_peer).collect();
        let name = "prose, 1 streams, Baton, guesses by prompt lookup: ÷ llama-server with the same";
        assert_eq!(found, [(name.to_owned(), vec![1.5, 0.5, 2.0])]);
        assert!(report.to_markdown().contains("| Baton, prompt lookup | 30.0 | 1.000 | 1.500 |"));
    }

    #[test]
    fn a_round_without_a_speed_has_no_ratio() {
        assert_eq!(ratios(&[0.0, 3.0, 30.0], &[0.0, 0.0, 20.0]), [1.5]);
        let short = SpeculationRow { ratio: median(&[]), ..row("Baton", Guesser::PromptLookup, &[0.0]) };
        let slower = SpeculationRow { ratio: 0.98, ..row("Baton", Guesser::Prediction, &[9.8]) };
        let markdown = |rows| {
            SpeculationFigures { rows, head: None }.report(&BackendModel::Real("tiny.gguf".into())).to_markdown()
        };
        let report = markdown(vec![short, slower]);
        assert!(report.contains("Rows without a ratio: 1.") && report.contains("ratio of Baton's: 0.980"), "{report}");
        assert!(report.contains("| Baton, prompt lookup | 0.0 | – |") && !report.contains("NaN"), "{report}");
        let short = SpeculationRow { ratio: median(&[]), ..row("Baton", Guesser::PromptLookup, &[0.0]) };
        assert!(!markdown(vec![short]).contains("The lowest ratio"));
    }
}
