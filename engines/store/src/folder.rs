//! The files of a store: one folder for all models and processes of a machine, with a folder in it for each model.
//!
//! Every use of a file sets its time, so any process sees what was used last, and all keep the one budget: over it, the files
//! that were used longest ago go first, whosever they are.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::file::{BlockLabel, FileFault, HEAD_BYTES, label, label_bytes};
use super::seal::StoreKey;

/// A file of a block ends so.
const SUFFIX: &str = ".kv";

/// A file that is being written begins so.
const UNFINISHED: &str = ".new-";

/// An unfinished file that is older was left by a process that ended.
const UNFINISHED_FOR: Duration = Duration::from_secs(600);

/// Bytes that were written on a day: `<days since 1970> <bytes>`.
const WRITTEN: &str = "written";

const SECONDS_A_DAY: u64 = 86_400;

/// Where blocks are kept on disk, and how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOptions {
    /// The folder. It may be shared by models and processes.
    pub folder: PathBuf,
    /// The most bytes of all files in it.
    pub max_bytes: u64,
    /// The most bytes that are written on a day (UTC), since writing wears a disk out.
    pub max_written_a_day: u64,
}

/// Why a block was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteFault {
    #[error("as many bytes as one day may write were written today")]
    Worn,
    #[error("the block is larger than the store")]
    TooLarge,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What was found when a folder was opened.
#[derive(Debug, Default)]
pub(crate) struct FoundFiles {
    /// Names and labels.
    pub(crate) blocks: Vec<(String, BlockLabel)>,
    /// Files that were removed, because they were torn, changed, or written with another key.
    pub(crate) n_refused: u64,
}

/// A model's folder.
#[derive(Debug)]
pub(crate) struct BlockFolder {
    options: DiskOptions,
    path: PathBuf,
}

impl BlockFolder {
    /// Opens or creates the folder of a model, which only this user may enter.
    pub(crate) fn open(options: DiskOptions, name: &str) -> io::Result<BlockFolder> {
        let path = options.folder.join(name);
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        Ok(BlockFolder { options, path })
    }

    /// Reads the labels of all files, and removes what no process can use.
    pub(crate) fn scan(&self, key: &StoreKey) -> io::Result<FoundFiles> {
        let mut found = FoundFiles::default();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(UNFINISHED) {
                let modified = entry.metadata().and_then(|facts| facts.modified());
                if modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > UNFINISHED_FOR)) {
                    self.remove(&name);
                }
                continue;
            }
            if !name.ends_with(SUFFIX) {
                continue;
            }
            match read_label(&entry.path(), key) {
                Ok(label) => found.blocks.push((name, label)),
                Err(fault) => {
                    tracing::warn!(file = %entry.path().display(), %fault, "a file of the KV store is removed");
                    found.n_refused += 1;
                    self.remove(&name);
                }
            }
        }
        Ok(found)
    }

    /// Writes a file, whole or not at all, and makes room for it. Returns its name.
    pub(crate) fn write(&self, stem: &str, bytes: &[u8]) -> Result<String, WriteFault> {
        let n_bytes = bytes.len() as u64;
        if n_bytes > self.options.max_bytes {
            return Err(WriteFault::TooLarge);
        }
        let written = self.written_today() + n_bytes;
        if written > self.options.max_written_a_day {
            return Err(WriteFault::Worn);
        }
        self.trim(n_bytes)?;
        let name = format!("{stem}{SUFFIX}");
        let unfinished = self.path.join(format!("{UNFINISHED}{:016x}", rand::random::<u64>()));
        let done = write_whole(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, self.path.join(&name)));
        if let Err(error) = done {
            _ = fs::remove_file(&unfinished);
            return Err(error.into());
        }
        if let Err(error) = fs::write(self.options.folder.join(WRITTEN), format!("{} {written}", today())) {
            tracing::debug!(%error, "the number of written bytes cannot be kept");
        }
        Ok(name)
    }

    /// Reads a file of at most `max_bytes`, and notes that it was used.
    pub(crate) fn read(&self, name: &str, max_bytes: u64) -> Result<Vec<u8>, FileFault> {
        let read = || -> io::Result<Vec<u8>> {
            let file = File::open(self.path.join(name))?;
            let mut bytes = Vec::with_capacity(file.metadata()?.len().min(max_bytes) as usize);
            (&file).take(max_bytes + 1).read_to_end(&mut bytes)?;
            _ = file.set_modified(SystemTime::now());
            Ok(bytes)
        };
        let bytes = read().map_err(|error| FileFault::Read(error.to_string()))?;
        if bytes.len() as u64 > max_bytes { Err(FileFault::Size { found: bytes.len() }) } else { Ok(bytes) }
    }

    /// Removes a file; another process may have done so.
    pub(crate) fn remove(&self, name: &str) {
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(name, %error, "a file of the KV store cannot be removed");
            }
            _ => {}
        }
    }

    /// The bytes that this machine's processes have written today.
    pub(crate) fn written_today(&self) -> u64 {
        let text = fs::read_to_string(self.options.folder.join(WRITTEN)).unwrap_or_default();
        let mut numbers = text.split(' ').map(str::parse::<u64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(day)), Some(Ok(n_bytes))) if day == today() => n_bytes,
            _ => 0,
        }
    }

    /// The bytes of all files of all models.
    pub(crate) fn total_bytes(&self) -> io::Result<u64> {
        Ok(self.files()?.iter().map(|(_, n_bytes, _)| n_bytes).sum())
    }

    /// Removes the files that were used longest ago, until `n_new` bytes more fit.
    fn trim(&self, n_new: u64) -> io::Result<()> {
        let mut files = self.files()?;
        let mut total: u64 = files.iter().map(|(_, n_bytes, _)| n_bytes).sum();
        files.sort_by_key(|(used, ..)| *used);
        for (_, n_bytes, path) in files {
            if total + n_new <= self.options.max_bytes {
                break;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => total -= n_bytes,
            }
        }
        Ok(())
    }

    /// The files of all models: when each was used, its bytes, and its path.
    fn files(&self) -> io::Result<Vec<(SystemTime, u64, PathBuf)>> {
        let mut files = Vec::new();
        for folder in fs::read_dir(&self.options.folder)? {
            let folder = folder?;
            if !folder.file_type()?.is_dir() {
                continue;
            }
            for entry in fs::read_dir(folder.path())? {
                let entry = entry?;
                let path = entry.path();
                let is_ours = entry.file_name().to_str().is_some_and(|name| name.ends_with(SUFFIX));
                // It may have been removed meanwhile.
                if let (true, Ok(facts)) = (is_ours, entry.metadata()) {
                    files.push((facts.modified()?, facts.len(), path));
                }
            }
        }
        Ok(files)
    }
}

fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / SECONDS_A_DAY)
}

fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_data()
}

fn read_label(path: &Path, key: &StoreKey) -> Result<BlockLabel, FileFault> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => FileFault::Torn,
        _ => FileFault::Read(error.to_string()),
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut head = [0; HEAD_BYTES];
    file.read_exact(&mut head).map_err(failed)?;
    let mut sealed = vec![0; label_bytes(&head)?];
    file.read_exact(&mut sealed).map_err(failed)?;
    label(key, sealed)
}
