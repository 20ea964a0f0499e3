//! Where a report goes: standard output, and the files that the options name.

use std::fs::File;
use std::path::{Path, PathBuf};

use baton_proxy::serve::CommandFailure;
use clap::Args;
use serde::Serialize;

use super::Report;
use super::page::with_section;
use super::record::{RecordedFigure, RunRecord, RunState};

/// Files of a report.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ReportFiles {
    /// Also write all figures as JSON, for `baton-bench compare` and for programs
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write the tables into the part of this page that is marked for this benchmark, and what `compare` reads into a JSON file
    /// beside it; runs under other headings stay
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
}

/// The charts of a benchmark that draws some.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ChartFolder {
    /// Also draw charts, as SVG files in this folder
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
}

/// Where the report of a run goes.
#[derive(Debug)]
pub(crate) struct Destination {
    /// The benchmark's name on the command line, which marks its part of a page.
    bench: &'static str,
    files: ReportFiles,
    charts: ChartFolder,
}

impl Destination {
    /// Fails on a wrong path before minutes of work.
    pub(crate) fn open(
        bench: &'static str,
        files: &ReportFiles,
        charts: &ChartFolder,
    ) -> Result<Destination, CommandFailure> {
        let destination = Destination { bench, files: files.clone(), charts: charts.clone() };
        if let Some(path) = &files.json {
            File::options().create(true).append(true).open(path).map_err(|error| unwritable(path, &error))?;
        }
        if let Some(path) = &files.page {
            destination.page(path, "", "")?;
        }
        if let Some(folder) = &charts.svg {
            std::fs::create_dir_all(folder).map_err(|error| unwritable(folder, &error))?;
        }
        Ok(destination)
    }

    /// A destination with nothing but a page.
    #[cfg(test)]
    pub(crate) fn open_page(bench: &'static str, page: &Path) -> Result<Destination, CommandFailure> {
        let files = ReportFiles { json: None, page: Some(page.to_owned()) };
        Destination::open(bench, &files, &ChartFolder::default())
    }

    /// Writes the details of a part of the run, so that an interruption loses none.
    pub(crate) fn save(&self, details: &impl Serialize) -> Result<(), CommandFailure> {
        self.write_json(&self.record("", RunState::Unfinished, &[]), details)
    }

    fn record(&self, title: &str, state: RunState, figures: &[RecordedFigure]) -> RunRecord {
        RunRecord::new(self.bench, title, state, figures)
    }

    fn write_json(&self, record: &RunRecord, details: &impl Serialize) -> Result<(), CommandFailure> {
        match &self.files.json {
            Some(path) => write(path, &serde_json::to_vec_pretty(&WithDetails { record, details })?),
            None => Ok(()),
        }
    }

    /// Prints the report of a finished run, and writes its files. Errors: a file cannot be written, or the run failed.
    #[allow(clippy::print_stdout, reason = "the report is the command's result")]
    pub(crate) fn publish(&self, details: &impl Serialize, report: &Report) -> Result<(), CommandFailure> {
        println!("{}", report.to_text().trim_end());
        let state = if report.failure.is_some() { RunState::Failed } else { RunState::Complete };
        let record = self.record(&report.title, state, &report.figures);
        self.write_json(&record, details)?;
        for chart in &report.charts {
            if let Some(folder) = &self.charts.svg {
                write(&folder.join(format!("{}.svg", chart.name)), chart.svg.as_bytes())?;
            }
        }
        if let Some(path) = &self.files.page {
            let section = format!("{}\n{}.\n", report.to_markdown(), record.about());
            write(path, self.page(path, &report.title, &section)?.as_bytes())?;
            if !record.figures.is_empty() {
                let beside = path.with_file_name(format!("{}.json", file_stem(self.bench, &report.title)));
                write(&beside, &serde_json::to_vec_pretty(&record)?)?;
            }
        }
        report.failure.clone().map_or(Ok(()), |failure| Err(CommandFailure(failure)))
    }

    /// A page with this run's section. Errors: it cannot be read, or has no place for it.
    fn page(&self, path: &Path, title: &str, section: &str) -> Result<String, CommandFailure> {
        let unusable = |why: String| CommandFailure(format!("cannot write the figures into {}: {why}", path.display()));
        let page = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
        let marked = with_section(&page, self.bench, title, section);
        marked.ok_or_else(|| unusable(format!("it has no marked part for them (baton-bench {})", self.bench)))
    }
}

/// A record, then what only programs of this version can read.
#[derive(Serialize)]
struct WithDetails<'a, D> {
    #[serde(flatten)]
    record: &'a RunRecord,
    details: &'a D,
}

/// The name of a run's file beside a page: the benchmark and the heading, in small letters, digits and `-`.
fn file_stem(bench: &str, title: &str) -> String {
    let is_kept = |c: char| c.is_ascii_alphanumeric() || c == '.';
    let words = title.split(|c: char| !is_kept(c)).filter(|word| !word.is_empty());
    let words = std::iter::once(bench).chain(words).map(str::to_lowercase).collect::<Vec<_>>();
    words.join("-").chars().take(MAX_STEM).collect()
}

/// The longest name of such a file.
const MAX_STEM: usize = 100;

fn write(path: &Path, bytes: &[u8]) -> Result<(), CommandFailure> {
    std::fs::write(path, bytes).map_err(|error| unwritable(path, &error))
}

fn unwritable(path: &Path, error: &std::io::Error) -> CommandFailure {
    CommandFailure(format!("{} cannot be written: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Better, Unit};

    #[test]
    fn a_run_fills_every_file_and_a_failed_one_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("page.md"), "<!-- written by `baton-bench plan`: begin -->\n<!-- end -->\n").unwrap();
        let files = ReportFiles { json: Some(path("figures.json")), page: Some(path("page.md")) };
        let charts = ChartFolder { svg: Some(path("charts")) };
        let destination = Destination::open("plan", &files, &charts).unwrap();
        destination.save(&[1]).unwrap();
        assert!(RunRecord::read(&path("figures.json")).unwrap_err().0.contains("did not finish"));
        let mut report = Report::new("EPYC");
        report.table(&["what"], [vec!["row".to_owned()]]);
        report.drawing("lines", "<svg/>".to_owned());
        report.figure("decode", Unit::TokensPerSecond, Better::More, &[1.0, 2.0]);
        report.fail(Some("two requests failed".into()));
        assert_eq!(destination.publish(&[1, 2], &report).unwrap_err().0, "two requests failed");
        let read = |name: &str| std::fs::read_to_string(path(name)).unwrap();
        let json: serde_json::Value = serde_json::from_str(&read("figures.json")).unwrap();
        assert_eq!((&json["details"], &json["bench"]), (&serde_json::json!([1, 2]), &"plan".into()));
        assert!(RunRecord::read(&path("figures.json")).unwrap_err().0.contains("the run failed"));
        assert_eq!(read("charts/lines.svg"), "<svg/>");
        assert!(read("page.md").contains("### EPYC\n\n| what |\n|---|\n| row |\n\n20"), "{}", read("page.md"));
    }

    #[test]
    fn a_page_has_the_record_of_each_of_its_runs_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("page.md");
        std::fs::write(&page, "<!-- written by `baton-bench plan`: begin -->\n<!-- end -->\n").unwrap();
        let destination = Destination::open_page("plan", &page).unwrap();
        for title in ["EPYC, two cores", "GB10/../x"] {
            let mut report = Report::new(title);
            report.figure("decode", Unit::TokensPerSecond, Better::More, &[1.0, 2.0]);
            destination.publish(&[1], &report).unwrap();
        }
        for (name, title) in [("plan-epyc-two-cores.json", "EPYC, two cores"), ("plan-gb10-..-x.json", "GB10/../x")] {
            let record = RunRecord::read(&folder.path().join(name)).unwrap();
            assert_eq!((record.title.as_str(), record.figures.len()), (title, 1));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_wrong_path_is_named_before_anything_is_measured() {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path();
        std::fs::write(here.join("page.md"), "# Page").unwrap();
        let none = ChartFolder::default();
        for (json, page, expected) in [
            (Some(here.join("nowhere/a.json")), None, "cannot be written"),
            (None, Some(here.join("nowhere.md")), "cannot write the figures into"),
            (None, Some(here.join("page.md")), "it has no marked part"),
        ] {
            let failure = Destination::open("plan", &ReportFiles { json, page }, &none).unwrap_err();
            assert!(failure.0.contains(expected), "{}", failure.0);
        }
    }
}
