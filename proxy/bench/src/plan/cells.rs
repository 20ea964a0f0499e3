//! Cells of the planner's tables.

use crate::report::Row;

/// A line of a table: its name, and the other cells.
pub(super) fn row(name: impl ToString, cells: impl IntoIterator<Item = String>) -> Row {
    std::iter::once(name.to_string()).chain(cells).collect()
}

pub(super) fn percent(share: f64) -> String {
    // No "-0.0 %".
    format!("{:.1} %", (share * 1_000.0).round() / 10.0 + 0.0)
}

pub(super) fn seconds(value: f64) -> String {
    format!("{value:.2} s")
}
