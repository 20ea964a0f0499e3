//! A configuration file and its mistakes: syntax errors, values out of range, and values that this machine cannot use.
//! All are reported at once, each with its line.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::diagnose::{self, Mistake};
use super::error::{ConfigError, ConfigProblem, Mistakes};
use super::flags::ConfigFlags;
use super::raw::RawConfig;
use super::serve_config::ServeConfig;
use super::text_file::read_text;
use super::written;
use crate::observe::WrittenSetting;

/// The largest configuration: some hundred thousand lines.
const MAX_BYTES: u64 = 16 << 20;

/// A file that was read, with flags over it. The default has neither, so every key has its default.
#[derive(Default)]
pub struct ConfigFile {
    path: Option<PathBuf>,
    text: String,
    /// The values, without those that could not be understood.
    pub raw: RawConfig,
    mistakes: Vec<Mistake>,
    given_flags: BTreeSet<String>,
    flag_settings: Vec<WrittenSetting>,
    overridden: Vec<String>,
}

impl ConfigFile {
    /// Reads a file. [`check`](Self::check) reports its mistakes. Errors: it cannot be read.
    pub fn read(path: &Path) -> Result<ConfigFile, ConfigError> {
        let unreadable = |error| ConfigError::Unreadable { path: path.to_owned(), error };
        // The file is read again at a reload. A pipe would be empty then, and an empty file means an endpoint without keys.
        let text = read_text(path, MAX_BYTES).map_err(unreadable)?;
        ConfigFile::parse(path, text).map_err(unreadable)
    }

    /// The file at `path` with this text. Errors: the current folder, in which a relative path starts, is not known.
    pub fn parse(path: &Path, text: String) -> io::Result<ConfigFile> {
        let (mut raw, mistakes) = diagnose::parse(&text);
        raw.resolve(&folder_of(path)?);
        Ok(ConfigFile { path: Some(path.to_owned()), text, raw, mistakes, ..ConfigFile::default() })
    }

    /// Overwrites the keys whose flags are given.
    pub fn with_flags(mut self, flags: &ConfigFlags) -> Result<ConfigFile, ConfigError> {
        flags.lay_over(&mut self.raw).map_err(|error| ConfigError::Later(error.to_string()))?;
        self.given_flags = flags.given();
        self.flag_settings = flags.settings();
        self.overridden = flags.overridden();
        Ok(self)
    }

    /// Uses the pairing in this folder, unless the file or a flag allows plain HTTP.
    pub fn with_pairing(mut self, folder: Option<PathBuf>) -> ConfigFile {
        self.raw.paired = folder;
        self
    }

    /// The keys of the file that have no effect because of other keys, one line for each. They are no mistakes.
    pub fn remarks(&self) -> Vec<String> {
        let path = self.path.as_deref().unwrap_or(Path::new("")).display();
        let remarks = self.raw.remarks().into_iter().map(|(key, message)| {
            let at = diagnose::position(&self.text, &key);
            let remark = Mistake { at, message: format!("{key} {message}"), is_of_type: false };
            format!("{path}: {}", with_its_line(&self.text, &remark))
        });
        remarks.collect()
    }

    /// Checks the configuration. `more` are problems that the caller has found. Errors: every mistake.
    pub fn check(mut self, more: Vec<ConfigProblem>) -> Result<ServeConfig, ConfigError> {
        let mut problems = self.raw.problems();
        problems.extend(more);
        let is_file = self.path.is_some();
        let (in_file, flags): (Vec<_>, Vec<_>) =
            problems.into_iter().partition(|problem| is_file && !self.given_flags.contains(&problem.flag));
        for ConfigProblem { key, message, .. } in in_file {
            let at = diagnose::position(&self.text, &key);
            let message = format!("{key} {message}");
            // A value of a wrong type was left out: do not report it as missing, too.
            let is_known = |known: &Mistake| known.at == at && (known.is_of_type || known.message == message);
            if !self.mistakes.iter().any(is_known) {
                self.mistakes.push(Mistake { at, message, is_of_type: false });
            }
        }
        let flags: Vec<String> =
            flags.into_iter().map(|ConfigProblem { flag, message, .. }| format!("{flag} {message}")).collect();
        if self.mistakes.is_empty() && flags.is_empty() {
            let written = written::in_file(&self.text).into_iter().chain(self.flag_settings).collect();
            return Ok(ServeConfig { written, overridden: self.overridden, ..self.raw.typed()? });
        }
        self.mistakes.sort_by_key(|mistake| mistake.at);
        let in_file = self.mistakes.iter().map(|mistake| with_its_line(&self.text, mistake)).collect();
        Err(ConfigError::Mistakes(Mistakes { path: self.path, in_file, flags }))
    }
}

/// Where relative paths in a file start, wherever the program does: a service starts in `/`.
fn folder_of(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    Ok(path.parent().map_or_else(|| path.clone(), Path::to_owned))
}

fn with_its_line(text: &str, Mistake { at, message, .. }: &Mistake) -> String {
    let line = at.map(|at| 1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count());
    line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}"))
}
