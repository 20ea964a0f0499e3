//! All figures, and their report.

use serde::Serialize;

use super::recall::RecallFigures;
use super::subject::{CodecSums, Subject};
use crate::report::{ChartLine, LineChart, Report, dash};

/// What others say of theirs, on other models and by other measures: name, ratio, loss.
const PUBLISHED: [(&str, &str, &str); 2] = [
    ("CacheGen, as its authors say", "3.5–4.3", "“negligible”"),
    ("KIVI, 2 bits, as its authors say", "2.6 of peak memory with the weights", "“almost the same quality”"),
];

#[derive(Debug, Default, Serialize)]
pub(super) struct CodecFigures {
    pub(super) models: Vec<CodecModel>,
}

impl CodecFigures {
    pub(super) fn report(&self) -> Report {
        let models: Vec<&str> = self.models.iter().map(|model| model.model.as_str()).collect();
        let mut report = Report::new(models.join(", "));
        self.models.iter().for_each(|model| model.add_to(&mut report));
        report
    }
}

/// All subjects on one model.
#[derive(Debug, Serialize)]
pub(super) struct CodecModel {
    model: String,
    n_prompts: u32,
    rows: Vec<SubjectFigures>,
    recall: Option<RecallFigures>,
}

/// The figures of a subject.
#[derive(Debug, Serialize)]
struct SubjectFigures {
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

impl CodecModel {
    pub(super) fn new(
        model: String,
        n_prompts: u32,
        tallies: Vec<(Subject, CodecSums)>,
        recall: Option<RecallFigures>,
    ) -> CodecModel {
        let floor = tallies.iter().find(|(subject, _)| *subject == Subject::Floor);
        let floor = floor.map_or(f64::NAN, |(_, tally)| tally.mean_kl());
        let row = |(subject, tally): (Subject, CodecSums)| SubjectFigures {
            name: subject.name(),
            is_floor: subject == Subject::Floor,
            ratio: tally.ratio(),
            bits: subject.bits() / tally.ratio(),
            mean_kl: tally.mean_kl(),
            worst_prompt_kl: tally.mean_kl.iter().copied().fold(0.0, f64::max),
            worst_token_kl: tally.worst_kl(),
            noise: tally.mean_kl() / floor,
            agreement: tally.agreement(),
            encode_gb_s: tally.speeds().map(|(encode, _)| encode),
            decode_gb_s: tally.speeds().map(|(_, decode)| decode),
        };
        CodecModel { model, n_prompts, rows: tallies.into_iter().map(row).collect(), recall }
    }

    fn add_to(&self, report: &mut Report) {
        if self.n_prompts > 0 {
            self.add_losses(report);
            self.add_chart(report);
        }
        if let Some(recall) = &self.recall {
            add_answers(report, &self.model, recall);
        }
    }

    /// KL is in thousandths of a nat.
    fn add_losses(&self, report: &mut Report) {
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
                thousandths(row.mean_kl),
                format!("{:.2}", row.noise),
                thousandths(row.worst_prompt_kl),
                thousandths(row.worst_token_kl),
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
        report.text(format!("{}, {} prompts", self.model, self.n_prompts));
        report.table(&head, measured.chain(published));
    }

    /// Ratio against mean KL.
    fn add_chart(&self, report: &mut Report) {
        let (floor, codecs): (Vec<&SubjectFigures>, Vec<&SubjectFigures>) =
            self.rows.iter().partition(|row| row.is_floor);
        let widest = codecs.iter().map(|row| row.ratio).fold(1.0, f64::max);
        let point = |row: &&SubjectFigures| ChartLine {
            name: row.name.clone(),
            points: vec![(row.ratio, 1e3 * row.mean_kl), (row.ratio + 0.01, 1e3 * row.mean_kl)],
        };
        let level = |row: &SubjectFigures| ChartLine {
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
        report.chart(format!("codecs-{}", self.model), &chart);
    }
}

/// A KL in thousandths of a nat. That of a model with random weights is far smaller.
fn thousandths(kl: f64) -> String {
    let kl = 1e3 * kl;
    if kl > 0.0 && kl < 0.05 { format!("{kl:.0e}") } else { format!("{kl:.1}") }
}

/// The questions.
fn add_answers(report: &mut Report, model: &str, recall: &RecallFigures) {
    let plain = vec!["as it is".to_owned(), recall.n_answered.to_string(), dash()];
    let rows = recall
        .subjects
        .iter()
        .map(|recall| vec![recall.name.clone(), recall.n_answered.to_string(), recall.n_lost.to_string()]);
    report.text(format!("{model}, {} questions about facts in 2,000 to 6,000 tokens", recall.n_questions));
    report.table(&["codec", "answered", "lost"], std::iter::once(plain).chain(rows));
}
