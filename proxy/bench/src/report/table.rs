//! Tables: aligned for people, and in Markdown.

use std::fmt::Write as _;

/// The cells of a line.
pub(crate) type Row = Vec<String>;

/// Columns are as wide as needed; the first one is left-aligned.
pub(super) fn aligned(head: &[String], rows: &[Row]) -> String {
    let lines = || std::iter::once(head).chain(rows.iter().map(Vec::as_slice));
    let width =
        |column: usize| lines().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for line in lines() {
        for (i, (cell, width)) in line.iter().zip(&widths).enumerate() {
            // Writing to a String cannot fail.
            let _ = if i == 0 { write!(out, "{cell:<width$}") } else { write!(out, "  {cell:>width$}") };
        }
        out.push('\n');
    }
    out
}

pub(super) fn markdown(head: &[String], rows: &[Row]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule = format!("|{}\n", "---|".repeat(head.len()));
    rows.iter().fold(line(head) + &rule, |out, row| out + &line(row))
}

/// The cell of a figure that was not measured.
pub(crate) fn dash() -> String {
    "–".to_owned()
}

/// The cell of a figure with one digit after the point.
pub(crate) fn one_decimal(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: [&str; 2]) -> Row {
        cells.map(str::to_owned).into()
    }

    #[test]
    fn markdown_has_a_rule_below_its_head() {
        let text = markdown(&row(["what", "MB/s"]), &[row(["a", "1.0"])]);
        assert_eq!(text, "| what | MB/s |\n|---|---|\n| a | 1.0 |\n");
    }

    #[test]
    fn columns_line_up() {
        let text = aligned(&row(["what", "MB/s"]), &[row(["a long name", "1.0"]), row(["b", "–"])]);
        assert_eq!(text, "what         MB/s\na long name   1.0\nb               –\n");
    }
}
