//! The figures as a table, JSON and a chart.

use std::path::Path;

use baton_proxy::serve::CommandFailure;
use serde::Serialize;

use super::recall::RecallReport;
use super::subject::{Subject, Tally};
use crate::line_chart::{ChartLine, LineChart};
use crate::table::{dash, markdown};

/// Bits of a value of F16.
const BITS: f64 = 16.0;

/// What others say of theirs, on other models and by other measures: name, ratio, loss.
const PUBLISHED: [(&str, &str, &str); 2] = [
    ("CacheGen, as its authors say", "3.5–4.3", "“negligible”"),
    ("KIVI, 2 bits, as its authors say", "2.6 of peak memory with the weights", "“almost the same quality”"),
];

#[derive(Debug, Default, Serialize)]
pub(super) struct CodecBenchReport {
    pub(super) models: Vec<ModelReport>,
}

/// All subjects on one model.
#[derive(Debug, Serialize)]
pub(super) struct ModelReport {
    model: String,
    n_prompts: u32,
    rows: Vec<Row>,
    recall: Option<RecallReport>,
}

/// The figures of a subject.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    is_floor: bool,
    ratio: f64,
    bits: f64,
    mean_kl: f64,
    worst_prompt_kl: f64,
    worst_token_kl: f64,
    /// Mean KL, relative to the floor's.
    noise: f64,
    agreement: f64,
    encode_gb_s: Option<f64>,
    decode_gb_s: Option<f64>,
}

impl ModelReport {
    pub(super) fn new(
        model: String,
        n_prompts: u32,
        tallies: Vec<(Subject, Tally)>,
        recall: Option<RecallReport>,
    ) -> ModelReport {
        let floor = tallies.iter().find(|(subject, _)| *subject == Subject::Floor);
        let floor = floor.map_or(f64::NAN, |(_, tally)| tally.mean_kl());
        let row = |(subject, tally): (Subject, Tally)| Row {
            name: subject.name(),
            is_floor: subject == Subject::Floor,
            ratio: tally.ratio(),
            bits: BITS / tally.ratio(),
            mean_kl: tally.mean_kl(),
            worst_prompt_kl: tally.mean_kl.iter().copied().fold(0.0, f64::max),
            worst_token_kl: tally.worst_kl(),
            noise: tally.mean_kl() / floor,
            agreement: tally.agreement(),
            encode_gb_s: tally.speeds().map(|(encode, _)| encode),
            decode_gb_s: tally.speeds().map(|(_, decode)| decode),
        };
        ModelReport { model, n_prompts, rows: tallies.into_iter().map(row).collect(), recall }
    }

    /// A table in Markdown. KL is in thousandths of a nat.
    pub(super) fn table(&self) -> String {
        let head = [
            "codec",
            "ratio",
            "bits a value",
            "mean KL, e-3",
            "of the floor",
            "worst prompt, e-3",
            "worst token, e-3",
            "same top token, %",
            "encode, GB/s",
            "decode, GB/s",
        ];
        let speed = |speed: Option<f64>| speed.map_or_else(dash, |speed| format!("{speed:.2}"));
        let measured = self.rows.iter().map(|row| {
            vec![
                row.name.clone(),
                format!("{:.2}", row.ratio),
                format!("{:.2}", row.bits),
                format!("{:.1}", 1e3 * row.mean_kl),
                format!("{:.2}", row.noise),
                format!("{:.1}", 1e3 * row.worst_prompt_kl),
                format!("{:.0}", 1e3 * row.worst_token_kl),
                format!("{:.1}", 100.0 * row.agreement),
                speed(row.encode_gb_s),
                speed(row.decode_gb_s),
            ]
        });
        let published = PUBLISHED.iter().map(|(name, ratio, loss)| {
            let mut cells = vec![dash(); head.len()];
            cells[0] = (*name).to_owned();
            cells[1] = (*ratio).to_owned();
            cells[3] = (*loss).to_owned();
            cells
        });
        let title = format!("{}, {} prompts\n\n", self.model, self.n_prompts);
        let table =
            if self.n_prompts > 0 { title + &markdown(&head, measured.chain(published)) } else { String::new() };
        table + &self.recall.as_ref().map(answers).unwrap_or_default()
    }

    /// Draws ratio against mean KL into a folder that exists.
    pub(super) fn draw(&self, folder: &Path) -> Result<(), CommandFailure> {
        let (floor, codecs): (Vec<&Row>, Vec<&Row>) = self.rows.iter().partition(|row| row.is_floor);
        let widest = codecs.iter().map(|row| row.ratio).fold(1.0, f64::max);
        let point = |row: &&Row| ChartLine {
            name: row.name.clone(),
            points: vec![(row.ratio, 1e3 * row.mean_kl), (row.ratio + 0.01, 1e3 * row.mean_kl)],
        };
        let level = |row: &Row| ChartLine {
            name: row.name.clone(),
            points: vec![(0.0, 1e3 * row.mean_kl), (widest, 1e3 * row.mean_kl)],
        };
        let lines: Vec<ChartLine> = floor.into_iter().map(level).chain(codecs.iter().map(point)).collect();
        let chart = LineChart {
            title: &format!("KV codecs on {}", self.model),
            x_name: "times smaller",
            y_name: "mean KL, thousandths of a nat",
            ticks: None,
            lines: &lines,
        };
        chart.draw(&folder.join(format!("codecs-{}.svg", self.model)))
    }
}

/// The questions as a table.
fn answers(report: &RecallReport) -> String {
    let head = ["codec", "answered", "lost"];
    let plain = vec!["as it is".to_owned(), report.n_answered.to_string(), dash()];
    let rows = report
        .subjects
        .iter()
        .map(|recall| vec![recall.name.clone(), recall.n_answered.to_string(), recall.n_lost.to_string()]);
    let title = format!("\n{} questions about facts in 2,000 to 6,000 tokens\n\n", report.n_questions);
    title + &markdown(&head, std::iter::once(plain).chain(rows))
}
