//! Searches the folder of a repository, within bounds.

use std::fs;
use std::path::Path;

use super::spec::is_relative_path;

/// Folders in the folder of a repository are searched to this depth.
pub(super) const MAX_DEPTH: usize = 3;

/// Entries of one repository's folder that are looked at.
pub(super) const MAX_ENTRIES: usize = 10_000;

/// The paths of the files in a repository's folder that are wanted, sorted.
pub(super) fn files_in(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = MAX_ENTRIES;
    let mut open = vec![(String::new(), 0)];
    while let Some((below, depth)) = open.pop() {
        for entry in fs::read_dir(folder.join(&below)).into_iter().flatten().flatten() {
            let Some(more) = left.checked_sub(1) else { break };
            left = more;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if below.is_empty() { name } else { format!("{below}/{name}") };
            match entry.path().is_dir() {
                true if depth < MAX_DEPTH && is_relative_path(&path) => open.push((path, depth + 1)),
                false if is_wanted(&path) && is_relative_path(&path) => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    found
}
