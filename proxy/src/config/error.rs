//! Mistakes in a configuration: one value that cannot be used, and all of them as an error.

use std::path::{Path, PathBuf};

/// A value that cannot be used.
pub struct ConfigProblem {
    /// Its path in the file, with dots.
    pub key: String,
    /// The flag that sets it, or the key if there is none.
    pub flag: String,
    /// Completes `KEY …` to a sentence.
    pub message: String,
}

/// A configuration that cannot be used. The message names the file, the line and the key.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {error}", path.display())]
    Unreadable { path: PathBuf, error: std::io::Error },
    /// There are mistakes in the file or the flags.
    #[error("{}", .0.lines().join("; "))]
    Mistakes(Mistakes),
    /// A file or variable changed between its check and its use.
    #[error("{0}")]
    Later(String),
}

/// All mistakes in the file and the flags.
#[derive(Debug)]
pub struct Mistakes {
    pub path: Option<PathBuf>,
    /// Mistakes in the file, each with its line: syntax errors, unknown keys, values of a wrong type, out of range or not
    /// usable on this machine.
    pub in_file: Vec<String>,
    /// Mistakes in flags, each with its flag: values out of range or not usable on this machine.
    pub flags: Vec<String>,
}

impl Mistakes {
    /// One line for each, `FILE: line N: …`.
    pub fn lines(&self) -> Vec<String> {
        let file = self.path.as_deref().unwrap_or(Path::new("")).display();
        let in_file = self.in_file.iter().map(|mistake| format!("{file}: {mistake}"));
        in_file.chain(self.flags.iter().cloned()).collect()
    }
}
