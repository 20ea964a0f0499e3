//! What `baton setup` has made on this machine, so that it can be undone: `~/.config/baton/setup.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use baton_proxy::serve::CommandFailure;
use serde::{Deserialize, Serialize};

use super::boot::BootCommand;
use super::place::SetupPlace;

/// The file's name.
const FILE: &str = "setup.json";

/// Files that were written, commands that undo others, and whether this machine was paired.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SetupRecord {
    /// By path, the BLAKE3 hash of what was written, hexadecimal.
    pub files: BTreeMap<PathBuf, String>,
    /// Run before the files are removed.
    pub stop: Vec<BootCommand>,
    pub paired: bool,
}

impl SetupRecord {
    /// The record in this folder; an empty one if there is none. Errors: it cannot be read.
    pub(super) fn read(folder: &Path) -> Result<SetupRecord, CommandFailure> {
        let path = folder.join(FILE);
        let failed = |reason: String| CommandFailure(format!("{} cannot be read: {reason}", path.display()));
        match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).map_err(|error| failed(error.to_string())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(SetupRecord::default()),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == SetupRecord::default()
    }

    /// Writes the record. Before what it records is done: a machine that stops meanwhile can still be undone.
    pub(super) fn write(&self, folder: &Path) -> Result<(), CommandFailure> {
        write_file(&folder.join(FILE), &serde_json::to_string_pretty(self)?)
    }

    /// Returns true if this file is as setup wrote it, or if there is none.
    pub(super) fn may_replace(&self, path: &Path) -> bool {
        match fs::read(path) {
            Ok(bytes) => self.files.get(path) == Some(&hash(&bytes)),
            Err(error) => error.kind() == ErrorKind::NotFound,
        }
    }

    /// Undoes everything. Returns the files that were changed since they were written, which stay.
    pub(super) fn undo(self, place: &SetupPlace) -> Result<Vec<PathBuf>, CommandFailure> {
        for command in &self.stop {
            command.run()?;
        }
        let mut kept = Vec::new();
        for path in self.files.keys() {
            if !self.may_replace(path) {
                kept.push(path.clone());
                continue;
            }
            remove_file(path)?;
            // A folder that others use is not empty.
            let _ = path.parent().map(fs::remove_dir);
        }
        if self.paired {
            place.cluster.forget()?;
        }
        remove_file(&place.config.join(FILE))?;
        let _ = fs::remove_dir(&place.config);
        Ok(kept)
    }
}

impl fmt::Display for SetupRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for command in &self.stop {
            writeln!(f, "  run     {}", command.args.join(" "))?;
        }
        for path in self.files.keys() {
            writeln!(f, "  remove  {}", path.display())?;
        }
        if self.paired {
            writeln!(f, "  remove  this machine's pairing")?;
        }
        Ok(())
    }
}

/// A file's hash, as the record has it.
pub(super) fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Writes a file and its folders. A reader finds the old text or the new one.
pub(super) fn write_file(path: &Path, text: &str) -> Result<(), CommandFailure> {
    let failed = |error: std::io::Error| CommandFailure(format!("{} cannot be written: {error}", path.display()));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let part = path.with_extension("part");
    fs::write(&part, text).and_then(|()| fs::rename(&part, path)).map_err(failed)
}

fn remove_file(path: &Path) -> Result<(), CommandFailure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(CommandFailure(format!("{} cannot be removed: {error}", path.display())))
        }
        _ => Ok(()),
    }
}
