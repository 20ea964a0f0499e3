//! `baton-bench compare OLD NEW`: what became worse, better, or went missing between two reports of one benchmark.
//!
//! It reads what `--json` and `--page` of the benchmarks write, and measures nothing.

mod noise;
mod outcome;

use std::path::PathBuf;

use baton_proxy::serve::CommandFailure;
use clap::Args;

use self::outcome::{ComparedFigure, FigureOutcome, compare};
use crate::report::{Report, RunRecord};

/// Options of `baton-bench compare`.
#[derive(Args)]
pub(super) struct CompareArgs {
    /// The earlier report, a JSON file of a benchmark
    old: PathBuf,
    /// The later one
    new: PathBuf,
    /// The least change that counts, as a share of the old figure
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, value_parser = share)]
    least: f64,
}

fn share(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|share| (0.0..=10.0).contains(share)).ok_or("must be a share, 0 to 10")
}

/// Prints the comparison. Errors: a file is no report, the reports are of two benchmarks, or a figure became worse.
#[allow(clippy::print_stdout, reason = "the comparison is the command's result")]
pub(super) fn run(args: &CompareArgs) -> Result<(), CommandFailure> {
    let (old, new) = (RunRecord::read(&args.old)?, RunRecord::read(&args.new)?);
    if old.bench != new.bench {
        let (old, new) = (&old.bench, &new.bench);
        return Err(CommandFailure(format!("the old report is of `{old}` and the new one of `{new}`")));
    }
    let compared = compare(&old.figures, &new.figures, args.least);
    println!("{}", report(&old, &new, &compared).to_text().trim_end());
    let worse = |figure: &&ComparedFigure| figure.outcome == FigureOutcome::Worse;
    match compared.iter().filter(worse).count() {
        0 => Ok(()),
        1 => Err(CommandFailure("1 figure became worse".into())),
        n => Err(CommandFailure(format!("{n} figures became worse"))),
    }
}

/// Reasons why two reports are hard to compare.
fn warnings(old: &RunRecord, new: &RunRecord) -> Vec<&'static str> {
    let differs = [
        (
            old.machine != new.machine,
            "WARNING: the machines differ. Only figures with a baseline in the same run (×) compare.",
        ),
        (old.title != new.title, "WARNING: the runs have different headings, such as another model."),
    ];
    differs.into_iter().filter_map(|(differs, warning)| differs.then_some(warning)).collect()
}

fn report(old: &RunRecord, new: &RunRecord, compared: &[ComparedFigure]) -> Report {
    let mut report = Report::new(&new.title);
    report.text(format!(
        "old: {} {}; {}\nnew: {} {}; {}",
        old.bench,
        old.title,
        old.about(),
        new.bench,
        new.title,
        new.about()
    ));
    warnings(old, new).into_iter().for_each(|warning| report.text(warning));
    let mut n_alike = 0;
    for outcome in FigureOutcome::IN_ORDER {
        let rows: Vec<_> = compared.iter().filter(|figure| figure.outcome == outcome).collect();
        match outcome.is_listed() {
            true if !rows.is_empty() => {
                let head = [outcome.words(), "old", "new", "unit", "change", "noise"];
                report.table(&head, rows.iter().map(|figure| figure.cells()));
            }
            true => {}
            false => n_alike += rows.len(),
        }
    }
    report.text(format!("{n_alike} of {} figures are within their noise.", compared.len()));
    report
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::report::{Better, Unit};

    /// Writes a report of `bench` with one figure, and changes its text.
    fn written(name: &str, rounds: &[f64], change: impl Fn(String) -> String) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("page.md");
        std::fs::write(&page, "<!-- written by `baton-bench engine`: begin -->\n<!-- end -->\n").unwrap();
        let mut report = Report::new("smollm2");
        report.figure(name, Unit::TokensPerSecond, Better::More, rounds);
        crate::report::Destination::open_page("engine", &page).unwrap().publish(&(), &report).unwrap();
        let file = folder.path().join("engine-smollm2.json");
        let text = change(std::fs::read_to_string(&file).unwrap());
        std::fs::write(&file, text).unwrap();
        (folder, file)
    }

    fn compared(old: &Path, new: &Path) -> Result<(), String> {
        run(&CompareArgs { old: old.to_owned(), new: new.to_owned(), least: 0.03 }).map_err(|failure| failure.0)
    }

    const STEADY: [f64; 5] = [100.0, 101.0, 99.0, 100.5, 99.5];
    const SLOW: [f64; 5] = [80.0, 81.0, 79.0, 80.5, 79.5];

    #[test]
    fn a_slower_run_fails_and_a_faster_one_does_not() {
        let (_a, old) = written("decode", &STEADY, |text| text);
        let (_b, new) = written("decode", &SLOW, |text| text);
        assert_eq!(compared(&old, &new), Err("1 figure became worse".into()));
        assert_eq!(compared(&new, &old), Ok(()));
        assert_eq!(compared(&old, &old), Ok(()));
    }

    #[test]
    fn reports_of_two_benchmarks_and_torn_files_are_refused() {
        let (_a, old) = written("decode", &STEADY, |text| text);
        let (_b, other) = written("decode", &STEADY, |text| text.replace("\"engine\"", "\"workers\""));
        assert!(compared(&old, &other).unwrap_err().contains("of `engine` and the new one of `workers`"));
        let (_c, torn) = written("decode", &STEADY, |text| text[..text.len() - 9].to_owned());
        assert!(compared(&old, &torn).unwrap_err().contains("cut off"));
        assert!(compared(&old, &old.with_file_name("nowhere.json")).unwrap_err().contains("nowhere.json"));
    }

    #[test]
    fn another_machine_and_another_model_are_warned_of() {
        let (_a, old) = written("decode", &STEADY, |text| text);
        let (_b, new) = written("decode", &STEADY, |text| {
            text.replace("\"cores\": ", "\"cores\": 9").replace("\"title\": \"smollm2\"", "\"title\": \"gemma3\"")
        });
        let [old, new] = [&old, &new].map(|file| RunRecord::read(file).unwrap());
        let text = report(&old, &new, &[]).to_text();
        assert!(text.contains("the machines differ") && text.contains("different headings"), "{text}");
        let text = report(&old, &old, &[]).to_text();
        assert!(!text.contains("WARNING"), "{text}");
    }
}
