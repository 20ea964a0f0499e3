//! Tables of text, and what stands in their cells.

/// Columns as wide as their widest cell, two spaces between.
pub(super) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head = head.iter().map(|&cell| cell.to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let n_columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max().unwrap_or(0);
    let widths: Vec<usize> = (0..n_columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
        "  ".to_owned() + cells.collect::<Vec<_>>().join("  ").trim_end() + "\n"
    };
    rows.iter().map(line).collect()
}

/// A time that has passed.
pub(super) fn seconds_ago(seconds: u64) -> String {
    match seconds {
        s @ 0..60 => format!("{s} s ago"),
        s @ 60..3_600 => format!("{} min ago", s / 60),
        s @ 3_600..172_800 => format!("{} h ago", s / 3_600),
        s => format!("{} days ago", s / 86_400),
    }
}

/// A number of bytes.
pub(super) fn size(n_bytes: u64) -> String {
    match n_bytes {
        0..0x400 => format!("{n_bytes} B"),
        0x400..0x10_0000 => format!("{:.1} KiB", n_bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", n_bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", n_bytes as f64 / f64::from(1 << 30)),
    }
}
