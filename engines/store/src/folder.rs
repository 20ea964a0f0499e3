//! The files of one model's blocks.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use baton_schemas::CacheScope;
use baton_schemas::kv::Codec;
use serde::{Deserialize, Serialize};

use super::block::{PlaceInPrompt, UsedFile};
use super::clears::CLOCK_STEPS;
use super::file::{FileFault, FilePart};
use super::labels::{read_labels, read_part};
use super::private::{is_unfinished, private, remove_or_tell, write_whole};
use super::scope_counts::{ScopeCounts, lines, parse, text_of};
use super::seal::{StoreKey, open, seal, to_seal};
use super::store_folder::{FolderLock, MadeRoom, SUFFIX, StoreFolder, StoredFile, WriteFault, blocks_of, today};
use super::worth::{earliest_time, latest_time, per_byte, time_of_worth};

/// The file that names a folder's model.
const ABOUT: &str = "about";

/// How often blocks were read.
const HITS: &str = "hits";

/// What [`ABOUT`] is bound to.
const ABOUT_BOUND: &[u8] = b"BATONKVM";

/// The most bytes of a file that is no block.
const MAX_SMALL_FILE: u64 = 256 << 10;

/// The most scopes whose hits are counted.
const MAX_SCOPES: usize = 4096;

/// Where blocks are kept on disk, and how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOptions {
    /// The folder. It may be shared by models and processes.
    pub folder: PathBuf,
    /// The most bytes of all files in it.
    pub max_bytes: u64,
    /// The most bytes that are written on a day (UTC), since writing wears a disk out.
    pub max_written_a_day: u64,
    /// The encoding of rows in new files. Any file is read, whatever its codec.
    pub codec: Codec,
    /// The model's name in lists.
    pub model: String,
}

/// The content of the file [`ABOUT`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AboutModel {
    pub(crate) model: String,
}

/// The outcome of keeping a folder within its budget.
#[derive(Debug, Default)]
pub(crate) struct BudgetKept {
    /// Damaged files that were removed.
    pub(crate) n_refused: u64,
    /// The model's blocks that were removed.
    pub(crate) removed: HashSet<String>,
    pub(crate) sizes: FolderSizes,
}

/// A file that was written.
#[derive(Debug)]
pub(crate) struct WrittenFile {
    pub(crate) name: String,
    /// The model's files that made room for it.
    pub(crate) removed: HashSet<String>,
    pub(crate) sizes: FolderSizes,
}

/// The bytes of a folder.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FolderSizes {
    /// The sizes of all files of all models together.
    pub(crate) n_bytes: u64,
    /// The day of `written`.
    day: u64,
    /// Bytes that all processes have written on that day.
    written: u64,
}

impl FolderSizes {
    /// Returns true if nobody else has written since: `n_bytes` more make `written` today. What others removed meanwhile leaves more
    /// room than is known.
    fn is_latest(&self, written: u64, n_bytes: u64) -> bool {
        self.day == today() && self.written.checked_add(n_bytes) == Some(written)
    }

    pub(crate) fn written_today(&self) -> u64 {
        if self.day == today() { self.written } else { 0 }
    }
}

/// The content of a folder.
#[derive(Debug, Default)]
pub(crate) struct FolderContent {
    /// The names of the model's files.
    pub(crate) names: HashSet<String>,
    /// The files among them that this process has not seen before, or as many as were asked for.
    pub(crate) new: Vec<StoredFile>,
    pub(crate) sizes: FolderSizes,
}

/// A folder as a process has seen it.
#[derive(Debug, Default)]
struct SeenFolder {
    /// The folder's changes when its content was listed.
    changed: Vec<SystemTime>,
    /// The model's files that it has read, tried to read, or written.
    names: HashSet<String>,
}

/// A model's folder.
#[derive(Debug)]
pub(crate) struct BlockFolder {
    options: DiskOptions,
    all: StoreFolder,
    path: PathBuf,
    /// Hits that the folder does not have yet.
    hits: Mutex<ScopeCounts>,
    seen: Mutex<SeenFolder>,
    /// The folder's bytes after the last block that this process wrote.
    last: Mutex<Option<FolderSizes>>,
}

impl BlockFolder {
    /// Opens or creates the folder of a model.
    pub(crate) fn open(options: DiskOptions, key: &StoreKey, model: &[u8; 32]) -> io::Result<BlockFolder> {
        let all = StoreFolder::open(options.folder.clone())?;
        let path = all.model(&key.name(model))?;
        if let Err(error) = all.remove_unfinished() {
            tracing::warn!(%error, "what killed processes have left in the KV store cannot be removed");
        }
        if about(&path, key).is_none()
            && let Err(error) = write_about(&path, key, &options.model)
        {
            // The files that are there can still be read.
            tracing::warn!(%error, "the name of the model cannot be written to the KV store; lists have its ID alone");
        }
        Ok(BlockFolder { options, all, path, hits: Mutex::default(), seen: Mutex::default(), last: Mutex::default() })
    }

    /// Removes files until the folder keeps its budget, which may be smaller than that of before, and returns the model's own: first
    /// damaged files of all models that have this key, then the least useful blocks of anybody.
    pub(crate) fn keep_budget(&self, key: &StoreKey) -> Result<BudgetKept, WriteFault> {
        let mut kept = BudgetKept { sizes: self.sizes_of(&self.all.blocks()?), ..BudgetKept::default() };
        if kept.sizes.n_bytes <= self.options.max_bytes {
            return Ok(kept);
        }
        for model in self.all.models()?.into_iter().filter(|model| about(model, key).is_some()) {
            kept.n_refused += read_labels(key, &blocks_of(&model)?).n_refused;
        }
        let lock = self.all.lock()?;
        let MadeRoom { removed, left_bytes } = self.all.make_room(&lock, 0, self.options.max_bytes, |_| false)?;
        (kept.removed, kept.sizes.n_bytes) = (self.own(&removed), left_bytes);
        Ok(kept)
    }

    fn sizes_of(&self, files: &[StoredFile]) -> FolderSizes {
        let n_bytes = files.iter().map(|file| file.n_bytes).sum();
        FolderSizes { n_bytes, day: today(), written: self.all.written_today() }
    }

    /// The names of the model's files among these.
    fn own(&self, paths: &[PathBuf]) -> HashSet<String> {
        let own = paths.iter().filter(|path| path.parent() == Some(&*self.path)).filter_map(|path| path.file_name());
        own.map(|name| name.to_string_lossy().into_owned()).collect()
    }

    /// Writes a file, whole or not at all, and makes room for it. The files that it continues stay.
    pub(crate) fn write(&self, stem: &str, bytes: &[u8], place: &PlaceInPrompt) -> Result<WrittenFile, WriteFault> {
        let n_bytes = bytes.len() as u64;
        if n_bytes > self.options.max_bytes {
            return Err(WriteFault::TooLarge);
        }
        let name = format!("{stem}{SUFFIX}");
        let lock = self.all.lock()?;
        let written = self.all.count_written(&lock, n_bytes, self.options.max_written_a_day)?;
        self.write_counted(&lock, name, (bytes, place), written).inspect_err(|_| {
            if let Err(error) = self.all.uncount_written(&lock, n_bytes) {
                tracing::debug!(%error, "a block that was not written counts as written today");
            }
        })
    }

    /// Writes a file after which today's bytes are `written`.
    fn write_counted(
        &self,
        lock: &FolderLock,
        name: String,
        (bytes, place): (&[u8], &PlaceInPrompt),
        written: u64,
    ) -> Result<WrittenFile, WriteFault> {
        let n_bytes = bytes.len() as u64;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let MadeRoom { removed, left_bytes } = match last.take().filter(|last| last.is_latest(written, n_bytes)) {
            // Listing thousands of files for each block would take longer than writing it.
            Some(last) if last.n_bytes + n_bytes <= self.options.max_bytes => {
                MadeRoom { removed: Vec::new(), left_bytes: last.n_bytes }
            }
            _ => {
                let before: HashSet<PathBuf> = place.before.iter().map(|file| self.path.join(&file.name)).collect();
                let is_before = |path: &Path| before.contains(path);
                self.all.make_room(lock, n_bytes, self.options.max_bytes, is_before)?
            }
        };
        write_whole(&self.path, Path::new(&name), bytes)?;
        // Where no time can be set, the time of writing counts. Nobody makes room before the worth is noted: that needs the lock.
        let written_file = File::options().write(true).open(self.path.join(&name));
        _ = written_file.and_then(|file| file.set_modified(earliest_time(SystemTime::now())));
        self.note_use(&[UsedFile { p0: place.p0, name: name.clone(), cost: place.cost }]);
        self.seen().names.insert(name.clone());
        let mut removed = self.own(&removed);
        // It may have been there before.
        removed.remove(&name);
        let sizes = FolderSizes { n_bytes: left_bytes + n_bytes, day: today(), written };
        *last = Some(sizes);
        Ok(WrittenFile { name, removed, sizes })
    }

    /// Lists what is there, if something was added or removed since it was listed, and at most `max_new` files that are new. Other
    /// processes write blocks, make room, or clear the store.
    pub(crate) fn look(&self, max_new: usize) -> io::Result<Option<FolderContent>> {
        let changed = self.all.changed()?;
        let mut seen = self.seen();
        if changed == seen.changed {
            return Ok(None);
        }
        let files = self.all.blocks()?;
        let sizes = self.sizes_of(&files);
        let own =
            files.into_iter().filter(|file| file.path.parent() == Some(&*self.path) && !is_unfinished(&file.path));
        let own: Vec<(String, StoredFile)> = own.map(|file| (file.name(), file)).collect();
        let names: HashSet<String> = own.iter().map(|(name, _)| name.clone()).collect();
        seen.names.retain(|name| names.contains(name));
        let mut unseen: Vec<_> = own.into_iter().filter(|(name, _)| !seen.names.contains(name)).collect();
        // A change after the listing may have the same time, which has the steps of the file system's clock.
        let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > CLOCK_STEPS);
        let has_all = unseen.len() <= max_new && changed.iter().all(is_old);
        seen.changed = if has_all { changed } else { Vec::new() };
        unseen.truncate(max_new);
        seen.names.extend(unseen.iter().map(|(name, _)| name.clone()));
        let new = unseen.into_iter().map(|(_, file)| file).collect();
        Ok(Some(FolderContent { names, new, sizes }))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn seen(&self) -> MutexGuard<'_, SeenFolder> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn codec(&self) -> Codec {
        self.options.codec
    }

    /// Reads a file of at most `max_bytes`.
    pub(crate) fn read(&self, name: &str, part: FilePart, max_bytes: u64) -> Result<Vec<u8>, FileFault> {
        read_part(&File::open(self.path.join(name)).map_err(FileFault::of)?, part, max_bytes)
    }

    /// Notes that the files of a prompt's blocks were used, the last one first. The first ones count as used last, and are worth no
    /// less: without them the others are of no use. No time moves back: a beginning that prompts share is never older than the blocks that
    /// continue it.
    pub(crate) fn note_use(&self, files: &[UsedFile]) {
        let now = SystemTime::now();
        let mut saved = 0.0_f64;
        for UsedFile { p0, name, cost } in files {
            // It may have been removed.
            let Ok(file) = File::options().write(true).open(self.path.join(name)) else { continue };
            let Ok(facts) = file.metadata() else { continue };
            saved = saved.max(per_byte(*cost, facts.len()));
            let time = time_of_worth(now - Duration::from_millis(u64::from(*p0)), saved);
            let is_later = |at: SystemTime| at >= time && at <= latest_time(now);
            if !facts.modified().is_ok_and(is_later) {
                _ = file.set_modified(time);
            }
        }
    }

    /// Counts a block that was read. While another process writes the counts, they wait.
    pub(crate) fn count_hit(&self, scope: CacheScope) {
        let mut hits = self.hits.lock().unwrap_or_else(PoisonError::into_inner);
        *hits.entry(scope.0).or_default() += 1;
        if add_hits(&self.path, &hits).is_ok_and(|is_done| is_done) {
            hits.clear();
        }
    }

    /// Removes a file; another process may have done so.
    pub(crate) fn remove(&self, name: &str) {
        remove_or_tell(&self.path.join(name));
    }
}

fn write_about(folder: &Path, key: &StoreKey, model: &str) -> io::Result<()> {
    let mut sealed = to_seal(0);
    serde_json::to_writer(&mut sealed, &AboutModel { model: model.to_owned() })?;
    seal(&key.of_labels(), &mut sealed, ABOUT_BOUND);
    write_whole(folder, Path::new(ABOUT), &sealed)
}

/// Reads the name of a folder's model. `None`: there is no such file, or it was sealed with another key.
pub(crate) fn about(model: &Path, key: &StoreKey) -> Option<AboutModel> {
    let mut sealed = Vec::new();
    File::open(model.join(ABOUT)).ok()?.take(MAX_SMALL_FILE).read_to_end(&mut sealed).ok()?;
    serde_json::from_slice(open(&key.of_labels(), &mut sealed, ABOUT_BOUND).ok()?).ok()
}

/// How often blocks of each scope were read.
pub(crate) fn hits(model: &Path) -> ScopeCounts {
    File::open(model.join(HITS)).and_then(|file| read_hits(&file)).unwrap_or_default()
}

fn read_hits(file: &File) -> io::Result<ScopeCounts> {
    Ok(parse(&text_of(file, MAX_SMALL_FILE)?))
}

/// Adds hits to those of the folder. Returns false if another process is about to.
fn add_hits(model: &Path, new: &ScopeCounts) -> io::Result<bool> {
    let mut file = private().create(true).truncate(false).open(model.join(HITS))?;
    if file.try_lock().is_err() {
        return Ok(false);
    }
    let mut hits = read_hits(&file)?;
    for (scope, n) in new {
        if hits.len() < MAX_SCOPES || hits.contains_key(scope) {
            *hits.entry(*scope).or_default() += n;
        }
    }
    let lines = lines(&hits);
    file.rewind()?;
    file.write_all(lines.as_bytes())?;
    // Not before: on a full disk, the counts of before stay.
    file.set_len(lines.len() as u64)?;
    Ok(true)
}
