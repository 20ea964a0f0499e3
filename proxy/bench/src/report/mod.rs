//! The report of every benchmark: text and tables for people, the same in Markdown for a page, charts, whether the run failed, and
//! the figures that `baton-bench compare` compares. All details are a type of each benchmark, which makes a report and is written as
//! JSON beside these figures.

mod destination;
mod line_chart;
mod page;
mod record;
mod run_machine;
mod table;

pub(crate) use self::destination::{ChartFolder, Destination, ReportFiles};
pub(crate) use self::line_chart::{ChartLine, LineChart};
pub(crate) use self::record::{Better, RecordedFigure, RunRecord, Unit};
pub(crate) use self::table::{Row, dash, one_decimal};

/// The results of a run, in reading order.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// The heading of this run in a page, such as the machine.
    title: String,
    parts: Vec<ReportPart>,
    charts: Vec<Chart>,
    figures: Vec<RecordedFigure>,
    failure: Option<String>,
}

#[derive(Debug)]
enum ReportPart {
    Text(String),
    /// For who sits at this terminal, and for no page: it may name paths.
    Local(String),
    Table {
        head: Vec<String>,
        rows: Vec<Row>,
    },
}

/// A chart as SVG.
#[derive(Debug)]
struct Chart {
    /// Of the file, without `.svg`.
    name: String,
    svg: String,
}

impl Report {
    /// An empty report under this heading.
    pub(crate) fn new(title: impl Into<String>) -> Report {
        Report { title: title.into(), ..Report::default() }
    }

    /// Adds a paragraph.
    pub(crate) fn text(&mut self, text: impl Into<String>) {
        self.parts.push(ReportPart::Text(text.into()));
    }

    /// Adds a paragraph for who sits at this terminal, unless it is empty. It may name paths: no page gets it.
    pub(crate) fn local(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !text.is_empty() {
            self.parts.push(ReportPart::Local(text));
        }
    }

    /// Adds a table.
    pub(crate) fn table(&mut self, head: &[impl ToString], rows: impl IntoIterator<Item = Row>) {
        let head = head.iter().map(ToString::to_string).collect();
        self.parts.push(ReportPart::Table { head, rows: rows.into_iter().collect() });
    }

    /// Adds a drawing, whose file is `NAME.svg`.
    pub(crate) fn drawing(&mut self, name: impl Into<String>, svg: String) {
        self.charts.push(Chart { name: name.into(), svg });
    }

    /// Adds a chart, whose file is `NAME.svg`. One that cannot be drawn fails the run.
    pub(crate) fn chart(&mut self, name: impl Into<String>, chart: &LineChart<'_>) {
        match chart.svg() {
            Ok(svg) => self.drawing(name, svg),
            Err(error) => self.fail(Some(format!("the chart {:?} cannot be drawn: {error}", chart.title))),
        }
    }

    /// Adds a figure for `baton-bench compare`: a value for each round. Rounds in which it was not measured (NaN) are left out, and so
    /// is a figure without rounds, which a comparison then shows as missing.
    pub(crate) fn figure(&mut self, name: impl Into<String>, unit: Unit, better: Better, rounds: &[f64]) {
        self.figures.extend(record::figure(name.into(), unit, better, rounds));
    }

    /// Notes why the run failed, if it did. The report is published all the same, and ends with the first reason.
    pub(crate) fn fail(&mut self, failure: Option<String>) {
        self.failure = self.failure.take().or(failure);
    }

    /// Names and rounds of the figures.
    #[cfg(test)]
    pub(crate) fn recorded(&self) -> Vec<(String, Vec<f64>)> {
        self.figures.iter().map(|figure| (figure.name.clone(), figure.rounds.clone())).collect()
    }

    /// For a terminal.
    pub(crate) fn to_text(&self) -> String {
        let part = |part: &ReportPart| match part {
            ReportPart::Text(text) | ReportPart::Local(text) => format!("{}\n", text.trim_end()),
            ReportPart::Table { head, rows } => table::aligned(head, rows),
        };
        self.parts.iter().map(part).collect::<Vec<_>>().join("\n")
    }

    /// For a page.
    pub(crate) fn to_markdown(&self) -> String {
        let part = |part: &ReportPart| match part {
            ReportPart::Text(text) => Some(format!("{}\n", text.trim_end())),
            ReportPart::Local(_) => None,
            ReportPart::Table { head, rows } => Some(table::markdown(head, rows)),
        };
        self.parts.iter().filter_map(part).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_sees_all_and_a_page_nothing_local() {
        let mut report = Report::new("EPYC");
        report.text("Medians.");
        report.table(&["what", "MB/s"], [vec!["a".into(), "1.0".into()]]);
        report.local("");
        report.local("failed: /secret");
        assert_eq!(report.to_text(), "Medians.\n\nwhat  MB/s\na      1.0\n\nfailed: /secret\n");
        assert_eq!(report.to_markdown(), "Medians.\n\n| what | MB/s |\n|---|---|\n| a | 1.0 |\n");
    }
}
