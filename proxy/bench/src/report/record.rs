//! What a run measured, in the form that `baton-bench compare` reads: where and with which versions, and each figure with its unit,
//! its direction, and one value a round.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use baton_proxy::serve::CommandFailure;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::run_machine::RunMachine;

/// The number of this form, which a file names in `baton_bench`.
const FORM: u32 = 1;

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The most figures of a report, and values of a figure.
const MAX_FIGURES: usize = 100_000;
const MAX_ROUNDS: usize = 10_000;

/// The record of a run. It is written before `details`, all figures in the benchmark's own shape, which nothing reads back.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// The version of this form.
    baton_bench: u32,
    /// The benchmark's name on the command line, or that of a script.
    pub(crate) bench: String,
    /// The measured subject, such as the model.
    pub(crate) title: String,
    /// The day, UTC.
    pub(crate) date: String,
    pub(crate) machine: RunMachine,
    /// By program.
    pub(crate) versions: BTreeMap<String, String>,
    state: RunState,
    pub(crate) figures: Vec<RecordedFigure>,
}

/// How far a run came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RunState {
    /// The file was written on the way.
    Unfinished,
    Failed,
    Complete,
}

/// A figure of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecordedFigure {
    /// Unique in a report.
    pub(crate) name: String,
    pub(crate) unit: Unit,
    pub(crate) better: Better,
    /// A value for each round, in the rounds' order.
    pub(crate) rounds: Vec<f64>,
}

/// The direction in which a figure improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Better {
    More,
    Less,
}

/// The unit of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    TokensPerSecond,
    RequestsPerSecond,
    Seconds,
    Milliseconds,
    Microseconds,
    GigabytesPerSecond,
    MegabytesPerSecond,
    Mebibytes,
    Kibibytes,
    /// A multiple of a baseline in the same run.
    Times,
    /// Processor time.
    SecondsPer1000Requests,
    SecondsPerMillionTokens,
    /// Processor seconds each second.
    Cores,
    Connections,
    Tokens,
}

impl Unit {
    pub(crate) fn words(self) -> &'static str {
        match self {
            Unit::TokensPerSecond => "tok/s",
            Unit::RequestsPerSecond => "requests/s",
            Unit::Seconds => "s",
            Unit::Milliseconds => "ms",
            Unit::Microseconds => "µs",
            Unit::GigabytesPerSecond => "GB/s",
            Unit::MegabytesPerSecond => "MB/s",
            Unit::Mebibytes => "MiB",
            Unit::Kibibytes => "KiB",
            Unit::Times => "×",
            Unit::SecondsPer1000Requests => "CPU s a 1,000 requests",
            Unit::SecondsPerMillionTokens => "CPU s a million tokens",
            Unit::Cores => "cores",
            Unit::Connections => "connections",
            Unit::Tokens => "tokens",
        }
    }
}

/// The mark of the form, which is read before the rest.
#[derive(Deserialize)]
struct FormMark {
    baton_bench: u32,
}

impl RunRecord {
    /// The record of a run on this machine and day.
    pub(super) fn new(bench: &str, title: &str, state: RunState, figures: &[RecordedFigure]) -> RunRecord {
        RunRecord {
            baton_bench: FORM,
            bench: bench.to_owned(),
            title: title.to_owned(),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
            machine: RunMachine::this(),
            versions: super::run_machine::versions(),
            state,
            figures: figures.to_vec(),
        }
    }

    /// Reads a file. Errors: it cannot be read, is cut off, is no report or one of another form, is of a run that did not end well,
    /// or has figures out of range.
    pub(crate) fn read(path: &Path) -> Result<RunRecord, CommandFailure> {
        let failed = |why: String| CommandFailure(format!("{}: {why}", path.display()));
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| failed(error.to_string()))?;
        RunRecord::parse(&bytes).map_err(failed)
    }

    fn parse(bytes: &[u8]) -> Result<RunRecord, String> {
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(format!("it has more than {} MiB, so it is no report of baton-bench", MAX_FILE_BYTES >> 20));
        }
        let broken = |error: serde_json::Error| match error.is_eof() {
            true => "it is empty or cut off: its writing was interrupted".to_owned(),
            false => format!("it is no JSON: {error}"),
        };
        let IgnoredAny = serde_json::from_slice(bytes).map_err(broken)?;
        let foreign = |_| "it is no report of baton-bench: --json FILE and --page FILE write one".to_owned();
        let FormMark { baton_bench } = serde_json::from_slice(bytes).map_err(foreign)?;
        if baton_bench != FORM {
            return Err(format!("it has form {baton_bench} of the report, and this baton-bench reads {FORM}"));
        }
        let invalid = |error: serde_json::Error| format!("it is no valid report of baton-bench: {error}");
        let record: RunRecord = serde_json::from_slice(bytes).map_err(invalid)?;
        record.check().map(|()| record)
    }

    fn check(&self) -> Result<(), String> {
        match self.state {
            RunState::Complete => {}
            RunState::Unfinished => return Err("the run did not finish".into()),
            RunState::Failed => return Err("the run failed, so its figures do not count".into()),
        }
        if self.figures.is_empty() {
            return Err(format!("a report of {} has no figures to compare", self.bench));
        }
        if self.figures.len() > MAX_FIGURES {
            return Err(format!("it has {} figures; {MAX_FIGURES} at most", self.figures.len()));
        }
        let mut names = std::collections::HashSet::new();
        for RecordedFigure { name, rounds, .. } in &self.figures {
            if !names.insert(name) {
                return Err(format!("it has the figure {name:?} twice"));
            }
            let n = rounds.len();
            if n == 0 || n > MAX_ROUNDS {
                return Err(format!("the figure {name:?} has {n} rounds; 1 to {MAX_ROUNDS} are possible"));
            }
            if !rounds.iter().all(|value| value.is_finite()) {
                return Err(format!("the figure {name:?} has a value that is not finite"));
            }
        }
        Ok(())
    }

    /// When, where and with what it was measured, in a line.
    pub(crate) fn about(&self) -> String {
        let versions = self.versions.iter().map(|(program, version)| format!("; {program} {version}"));
        format!("{}; {}{}", self.date, self.machine.words(), versions.collect::<String>())
    }
}

/// A figure, without the rounds in which it could not be measured.
pub(super) fn figure(name: String, unit: Unit, better: Better, rounds: &[f64]) -> Option<RecordedFigure> {
    let rounds: Vec<f64> = rounds.iter().copied().filter(|value| value.is_finite()).collect();
    (!rounds.is_empty()).then_some(RecordedFigure { name, unit, better, rounds })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn written(figures: &[RecordedFigure]) -> Value {
        serde_json::to_value(RunRecord::new("engine", "smollm2", RunState::Complete, figures)).unwrap()
    }

    fn rate(name: &str) -> RecordedFigure {
        figure(name.into(), Unit::TokensPerSecond, Better::More, &[1.0, f64::NAN, 3.0]).unwrap()
    }

    #[test]
    fn a_written_record_is_read_again() {
        let mut value = written(&[rate("decode")]);
        value["details"] = json!({ "rows": [1, 2] });
        let record = RunRecord::parse(value.to_string().as_bytes()).unwrap();
        assert_eq!(record.figures, [RecordedFigure { rounds: vec![1.0, 3.0], ..rate("decode") }]);
        assert!(record.about().contains("baton 0."), "{}", record.about());
        assert_eq!(figure("x".into(), Unit::Times, Better::More, &[f64::INFINITY]), None);
    }

    #[test]
    fn foreign_torn_and_invalid_files_are_named() {
        let whole = written(&[rate("decode")]);
        let with = |change: fn(&mut Value)| {
            let mut value = whole.clone();
            change(&mut value);
            value.to_string()
        };
        let text = whole.to_string();
        for (text, expected) in [
            (String::new(), "cut off"),
            (text[..text.len() / 2].to_owned(), "cut off"),
            ("# Page".into(), "no JSON"),
            ("[1, 2]".into(), "no report of baton-bench"),
            (json!({ "servers": [] }).to_string(), "no report of baton-bench"),
            (with(|value| value["baton_bench"] = 2.into()), "form 2"),
            (with(|value| value["state"] = "unfinished".into()), "did not finish"),
            (with(|value| value["state"] = "failed".into()), "the run failed"),
            (with(|value| value["figures"] = json!([])), "no figures"),
            (with(|value| value["figures"][0]["rounds"] = json!([])), "0 rounds"),
            (with(|value| value["figures"][0]["rounds"] = json!([null])), "no valid report"),
            (with(|value| value["figures"][0]["unit"] = "furlongs".into()), "furlongs"),
            (with(|value| value["figures"] = json!([value["figures"][0], value["figures"][0]])), "twice"),
        ] {
            let why = RunRecord::parse(text.as_bytes()).unwrap_err();
            assert!(why.contains(expected), "{expected}: {why}");
        }
    }
}
