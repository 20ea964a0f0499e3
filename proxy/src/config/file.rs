//! A configuration file with everything that is wrong with it: what is no configuration at all, values that are out of
//! range, and what cannot be used on this machine. All of it is told at once, each with its line.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::diagnose::{self, Mistake};
use super::problems::Problem;
use super::raw::RawConfig;
use super::{ConfigError, Mistakes, ServeConfig};

/// A file that was read, or none, in which case every key has its default. Flags are laid over `raw` before it is checked.
#[derive(Default)]
pub struct ConfigFile {
    path: Option<PathBuf>,
    text: String,
    /// The values, without those that could not be understood.
    pub raw: RawConfig,
    mistakes: Vec<Mistake>,
}

impl ConfigFile {
    /// Reads a file. What is wrong with it is told by [`check`](Self::check). Errors: it cannot be read.
    pub fn read(path: &Path) -> Result<ConfigFile, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::Unreadable { path: path.to_owned(), error })?;
        let (raw, mistakes) = diagnose::parse(&text);
        Ok(ConfigFile { path: Some(path.to_owned()), text, raw, mistakes })
    }

    /// The checked configuration. `by_flags` are the keys whose values came from the command line; `more` is what else is
    /// wrong with the values. Errors: every mistake.
    pub fn check(mut self, by_flags: &BTreeSet<String>, more: Vec<Problem>) -> Result<ServeConfig, ConfigError> {
        let mut problems = self.raw.problems();
        problems.extend(more);
        let is_file = self.path.is_some();
        let (in_file, flags): (Vec<_>, Vec<_>) =
            problems.into_iter().partition(|problem| is_file && !by_flags.contains(&problem.key));
        for Problem { key, message, .. } in in_file {
            let at = diagnose::position(&self.text, &key);
            // Of a value that could not be understood, that it is missing says nothing new.
            if !self.mistakes.iter().any(|mistake| mistake.is_of_type && mistake.at == at) {
                self.mistakes.push(Mistake { at, message: format!("{key} {message}"), is_of_type: false });
            }
        }
        let flags: Vec<String> =
            flags.into_iter().map(|Problem { flag, message, .. }| format!("{flag} {message}")).collect();
        if self.mistakes.is_empty() && flags.is_empty() {
            return self.raw.typed();
        }
        self.mistakes.sort_by_key(|mistake| mistake.at);
        let in_file = self.mistakes.iter().map(|mistake| with_its_line(&self.text, mistake)).collect();
        Err(ConfigError::Mistakes(Mistakes { path: self.path, in_file, flags }))
    }
}

fn with_its_line(text: &str, Mistake { at, message, .. }: &Mistake) -> String {
    let line = at.map(|at| 1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count());
    line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}"))
}
