//! Tables: aligned for people, and in Markdown.

use std::fmt::{Display, Write as _};

/// Formats a table. Columns are as wide as needed; the first one is left-aligned.
pub(super) fn table(head: &[impl Display], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut lines = vec![head.iter().map(ToString::to_string).collect::<Vec<_>>()];
    lines.extend(rows);
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for line in &lines {
        for (i, (cell, width)) in line.iter().zip(&widths).enumerate() {
            // Writing to a String cannot fail.
            let _ = if i == 0 { write!(out, "{cell:<width$}") } else { write!(out, "  {cell:>width$}") };
        }
        out.push('\n');
    }
    out
}

/// Formats a table in Markdown.
#[cfg(feature = "llama")]
pub(super) fn markdown(head: &[impl Display], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let head: Vec<String> = head.iter().map(ToString::to_string).collect();
    let rule = format!("|{}\n", "---|".repeat(head.len()));
    rows.into_iter().fold(line(&head) + &rule, |out, row| out + &line(&row))
}

/// The cell of a figure that was not measured.
pub(super) fn dash() -> String {
    "–".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "llama")]
    #[test]
    fn markdown_has_a_rule_below_its_head() {
        let text = markdown(&["what", "MB/s"], [vec!["a".into(), "1.0".into()]]);
        assert_eq!(text, "| what | MB/s |\n|---|---|\n| a | 1.0 |\n");
    }

    #[test]
    fn columns_line_up() {
        let text = table(&["what", "MB/s"], [vec!["a long name".into(), "1.0".into()], vec!["b".into(), dash()]]);
        assert_eq!(text, "what         MB/s\na long name   1.0\nb               –\n");
    }
}
