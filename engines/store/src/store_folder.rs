//! The folder of all stores of a machine, with a folder in it for each model. Its rules hold over all processes that use it.
//!
//! | file | content |
//! |---|---|
//! | `baton-kv-store` | marks the folder as ours |
//! | `lock` | locked while a process makes room and writes a block |
//! | `keys-<endpoint>` | the scopes that have or had an API key of this endpoint |
//! | `written` | a line for each of the last days: `<days since 1970> <bytes>` |
//! | `<model>/about` | the model's name, sealed |
//! | `<model>/cleared` | what was [cleared](super::clears) |
//! | `<model>/hits` | a line for each scope: `<scope> <blocks that were read>` |
//! | `<model>/<block>.kv` | a [block](super::file) |
//!
//! Every use of a block sets its file's time, moved by what its bytes [save](super::worth::time_of_worth), so any process sees what is
//! worth least. Over the budget those blocks go first, whichever process wrote them.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::file::EncodeFault;
use super::private::{UNFINISHED, create_private, is_unfinished, private, remove, write_whole};
use super::seal::NAME_CHARS;
use super::worth::latest_time;

/// A block's file ends so.
pub(crate) const SUFFIX: &str = ".kv";

/// No living process writes one file for so long.
const UNFINISHED_FOR: Duration = Duration::from_secs(3_600);

const MARKER: &str = "baton-kv-store";
const LOCK: &str = "lock";
const WRITTEN: &str = "written";

/// Days whose bytes are remembered.
const DAYS: usize = 7;

const SECONDS_A_DAY: u64 = 86_400;

/// How long a process waits for the lock. Another one holds it while it writes one block, unless it was stopped.
const LOCK_DEADLINE: Duration = Duration::from_secs(5);

/// This part of the budget becomes free when a block has no room, so that not each of the next ones lists all files.
const SPARE_PART: u64 = 64;

/// A file lock cannot be awaited.
const LOCK_POLL: Duration = Duration::from_millis(1);

/// Why a folder is not used.
#[derive(Debug, thiserror::Error)]
pub enum FolderFault {
    /// It was not made by Baton.
    #[error("{} has other files: name a folder that is empty or not there yet", .0.display())]
    Foreign(PathBuf),
    #[error("{} belongs to another user", .0.display())]
    Owner(PathBuf),
    #[error("{} is no folder", .0.display())]
    NoFolder(PathBuf),
    /// No store was opened there.
    #[error("{} has no KV: an engine with this folder in its kv_store makes it when it starts", .0.display())]
    NoStore(PathBuf),
    #[error("{}: {error}", folder.display())]
    Io { folder: PathBuf, error: io::Error },
}

impl From<FolderFault> for io::Error {
    fn from(fault: FolderFault) -> io::Error {
        io::Error::other(fault)
    }
}

/// Why a block was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteFault {
    #[error("as many bytes as one day may write were written today")]
    Worn,
    #[error("the block is larger than the store")]
    TooLarge,
    #[error("the blocks before it fill the store")]
    NoRoom,
    #[error("another process holds the lock of the folder")]
    Locked,
    #[error(transparent)]
    Encode(#[from] EncodeFault),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A block's file.
#[derive(Debug)]
pub(crate) struct StoredFile {
    pub(crate) path: PathBuf,
    pub(crate) n_bytes: u64,
    pub(crate) used: SystemTime,
}

impl StoredFile {
    pub(crate) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// What was done so that a block fits.
pub(crate) struct MadeRoom {
    /// Files that were removed.
    pub(crate) removed: Vec<PathBuf>,
    /// The bytes of all files that are left.
    pub(crate) left_bytes: u64,
}

/// The right to change what is in the folder. Dropping it gives the right to others.
pub(crate) struct FolderLock(#[expect(dead_code, reason = "closing it unlocks")] File);

#[derive(Debug, Clone)]
pub(crate) struct StoreFolder(PathBuf);

/// Finds what would keep [`KvStore::open`](super::KvStore::open) from using a folder. Changes nothing.
pub fn check_folder(folder: &Path) -> Result<(), FolderFault> {
    let failed = |error| FolderFault::Io { folder: folder.to_owned(), error };
    let facts = match fs::metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        facts => facts.map_err(failed)?,
    };
    if !facts.is_dir() {
        return Err(FolderFault::NoFolder(folder.to_owned()));
    }
    // Its owner could read and change everything in it.
    if facts.uid() != rustix::process::geteuid().as_raw() {
        return Err(FolderFault::Owner(folder.to_owned()));
    }
    let is_ours = folder.join(MARKER).try_exists().map_err(failed)?;
    if !is_ours && fs::read_dir(folder).map_err(failed)?.next().is_some() {
        return Err(FolderFault::Foreign(folder.to_owned()));
    }
    Ok(())
}

impl StoreFolder {
    /// Opens or creates a folder that only this user may enter.
    pub(crate) fn open(path: PathBuf) -> Result<StoreFolder, FolderFault> {
        check_folder(&path)?;
        let folder = StoreFolder(path);
        match folder.prepare() {
            Ok(()) => Ok(folder),
            Err(error) => Err(FolderFault::Io { folder: folder.0, error }),
        }
    }

    fn prepare(&self) -> io::Result<()> {
        create_private(&self.0)?;
        let marker = self.0.join(MARKER);
        if !marker.try_exists()? {
            private()
                .create(true)
                .truncate(true)
                .open(marker)?
                .write_all(b"Baton keeps KV here. `baton cache` lists it.\n")?;
        }
        // A disk that is mounted read-only can still be read.
        let lock = self.0.join(LOCK);
        if !lock.try_exists()? {
            private().create(true).truncate(false).open(lock)?;
        }
        Ok(())
    }

    /// A folder that a store has made. Changes nothing. Errors: no store has made it, or it cannot be read.
    pub(crate) fn of_store(path: &Path) -> Result<StoreFolder, FolderFault> {
        check_folder(path)?;
        match path.join(MARKER).exists() {
            true => Ok(StoreFolder(path.to_owned())),
            false => Err(FolderFault::NoStore(path.to_owned())),
        }
    }

    /// Does something with the folder, whose error then names it.
    pub(crate) fn with<T>(self, work: impl FnOnce(&StoreFolder) -> io::Result<T>) -> Result<T, FolderFault> {
        work(&self).map_err(|error| FolderFault::Io { folder: self.0, error })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Opens or creates the folder of a model.
    pub(crate) fn model(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.0.join(name);
        create_private(&path)?;
        Ok(path)
    }

    /// The folders of all models.
    pub(crate) fn models(&self) -> io::Result<Vec<PathBuf>> {
        let mut models = Vec::new();
        for entry in fs::read_dir(&self.0)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                models.push(entry.path());
            }
        }
        models.sort();
        Ok(models)
    }

    /// Waits for the lock, but not for long. Errors: it cannot be had, or somebody has emptied the folder: then nothing is put there,
    /// since it may be the place of a disk that is no longer mounted.
    pub(crate) fn lock(&self) -> Result<FolderLock, WriteFault> {
        let file = private().open(self.0.join(LOCK))?;
        let deadline = Instant::now() + LOCK_DEADLINE;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(FolderLock(file)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_POLL),
                Err(TryLockError::WouldBlock) => return Err(WriteFault::Locked),
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }

    /// Removes what was left unfinished, and then, if `n_new` bytes more do not fit, the blocks that are worth least, until
    /// some others will fit, too, but none of `kept`. Returns what was removed. Errors: [`WriteFault::NoRoom`] beside those that are
    /// kept, so nothing was removed; the system's.
    pub(crate) fn make_room(
        &self,
        _: &FolderLock,
        n_new: u64,
        max_bytes: u64,
        kept: impl Fn(&Path) -> bool,
    ) -> Result<MadeRoom, WriteFault> {
        let mut removed = Vec::new();
        let mut files = self.blocks()?;
        let mut total: u64 = files.iter().map(|file| file.n_bytes).sum();
        let kept_bytes: u64 = files.extract_if(.., |file| kept(&file.path)).map(|file| file.n_bytes).sum();
        if kept_bytes + n_new > max_bytes {
            return Err(WriteFault::NoRoom);
        }
        // A time to come is that of a wrong clock. Until it has come, such a block would outlive all that is written.
        let latest = latest_time(SystemTime::now());
        files.sort_by_key(|file| (!is_unfinished(&file.path), if file.used > latest { UNIX_EPOCH } else { file.used }));
        let mut most = max_bytes;
        for file in files {
            if total + n_new <= most && !is_unfinished(&file.path) {
                break;
            }
            if !is_unfinished(&file.path) {
                most = max_bytes - max_bytes / SPARE_PART;
            }
            remove(&file.path)?;
            total -= file.n_bytes;
            removed.push(file.path);
        }
        Ok(MadeRoom { removed, left_bytes: total })
    }

    /// Removes what killed processes have left unfinished, and no living one writes any more.
    pub(crate) fn remove_unfinished(&self) -> io::Result<()> {
        for folder in [self.0.clone()].into_iter().chain(self.models()?) {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                let written = || fs::symlink_metadata(&path)?.modified();
                let is_old = || written().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > UNFINISHED_FOR));
                if is_unfinished(&path) && is_old() {
                    remove(&path)?;
                }
            }
        }
        Ok(())
    }

    /// When something was last added to the folder and to each model's, or removed. While it is the same, nothing was.
    pub(crate) fn changed(&self) -> io::Result<Vec<SystemTime>> {
        let folders = [self.0.clone()].into_iter().chain(self.models()?);
        folders.map(|folder| fs::metadata(folder)?.modified()).collect()
    }

    /// Counts bytes that are about to be written. Returns all of today. Errors: a day would write more than `max_a_day`.
    pub(crate) fn count_written(&self, lock: &FolderLock, n_bytes: u64, max_a_day: u64) -> Result<u64, WriteFault> {
        let today = self.written_today().saturating_add(n_bytes);
        if today > max_a_day {
            return Err(WriteFault::Worn);
        }
        self.set_written_today(lock, today)?;
        Ok(today)
    }

    /// Takes back what was counted and could not be written.
    pub(crate) fn uncount_written(&self, lock: &FolderLock, n_bytes: u64) -> io::Result<()> {
        self.set_written_today(lock, self.written_today().saturating_sub(n_bytes))
    }

    fn set_written_today(&self, _: &FolderLock, n_bytes: u64) -> io::Result<()> {
        let mut days = self.written();
        days.insert(today(), n_bytes);
        let lines: String = days.iter().rev().take(DAYS).map(|(day, n)| format!("{day} {n}\n")).collect();
        write_whole(&self.0, Path::new(WRITTEN), lines.as_bytes())
    }

    /// The bytes that were written on each of the last days, by days since 1970. Days to come are those of a wrong clock.
    pub(crate) fn written(&self) -> BTreeMap<u64, u64> {
        let text = fs::read_to_string(self.0.join(WRITTEN)).unwrap_or_default();
        let number = |text: &str| text.parse::<u64>().ok();
        let today = today();
        text.lines()
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(day, n)| Some((number(day)?, number(n)?)))
            .filter(|(day, _)| *day <= today)
            .collect()
    }

    pub(crate) fn written_today(&self) -> u64 {
        self.written().get(&today()).copied().unwrap_or(0)
    }

    /// The blocks of all models. What a killed process has left unfinished counts, too, and was never used.
    pub(crate) fn blocks(&self) -> io::Result<Vec<StoredFile>> {
        let mut files = Vec::new();
        for model in self.models()? {
            files.extend(blocks_of(&model)?);
        }
        Ok(files)
    }
}

/// The blocks in a model's folder.
pub(crate) fn blocks_of(model: &Path) -> io::Result<Vec<StoredFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(model)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_unfinished = name.starts_with(UNFINISHED);
        // It may have been removed meanwhile. A folder is no block, and could not be removed to make room. Reading a pipe would wait.
        if let (true, Ok(facts)) = (is_unfinished || is_block_name(&name), entry.metadata())
            && (facts.is_file() || facts.is_symlink())
        {
            let used = if is_unfinished { UNIX_EPOCH } else { facts.modified()? };
            files.push(StoredFile { path: entry.path(), n_bytes: facts.len(), used });
        }
    }
    Ok(files)
}

/// Returns true for a name that [`StoreKey::name`] made, with [`SUFFIX`]. Other files are nobody's business: they are not counted, not
/// read and never removed.
///
/// [`StoreKey::name`]: super::seal::StoreKey::name
fn is_block_name(name: &str) -> bool {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_suffix(SUFFIX).is_some_and(|stem| stem.len() == NAME_CHARS && stem.bytes().all(is_hex))
}

pub(crate) fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / SECONDS_A_DAY)
}
