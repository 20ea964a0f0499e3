//! Files with a line for each scope: `<scope> <count>`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

/// Counts by scope.
pub(crate) type ScopeCounts = BTreeMap<u64, u64>;

/// The first bytes of a file as text. Errors: it cannot be read, or is no text.
pub(crate) fn text_of(file: &File, max_bytes: u64) -> io::Result<String> {
    let mut text = String::new();
    file.take(max_bytes).read_to_string(&mut text)?;
    Ok(text)
}

/// The counts of a text. A damaged line has none.
pub(crate) fn parse(text: &str) -> ScopeCounts {
    let count = |line: &str| {
        let (scope, n) = line.split_once(' ')?;
        Some((u64::from_str_radix(scope, 16).ok()?, n.parse().ok()?))
    };
    text.lines().filter_map(count).collect()
}

/// The lines of these counts.
pub(crate) fn lines(counts: &ScopeCounts) -> String {
    counts.iter().map(|(scope, n)| format!("{scope:016x} {n}\n")).collect()
}
