//! Reads files: their labels, or every byte. Files that are no blocks of this key are refused.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::SystemTime;

use baton_schemas::kv::Codec;

use super::block::FileName;
use super::file::{BlockLabel, FileFault, FileHead, FilePart, HEAD_BYTES, head, label, open_file};
use super::private::{is_unfinished, remove_or_tell};
use super::seal::StoreKey;
use super::store_folder::StoredFile;

/// The largest block whose model is not known: 256 tokens of a model with 4 MB a token.
const MAX_BLOCK_FILE: u64 = 1 << 30;

/// The blocks of files by their labels.
#[derive(Debug, Default)]
pub(crate) struct FoundFiles {
    pub(crate) blocks: Vec<FoundBlock>,
    /// Files that were removed, because they were torn, changed, or written with another key.
    pub(crate) n_refused: u64,
}

/// A block's file that another process wrote.
#[derive(Debug)]
pub(crate) struct FoundBlock {
    pub(crate) file: FileName,
    pub(crate) label: BlockLabel,
    /// When it was used last.
    pub(crate) used: SystemTime,
}

/// Reads the labels of files, and removes what no process can use.
pub(crate) fn read_labels(key: &StoreKey, files: &[StoredFile]) -> FoundFiles {
    let mut found = FoundFiles::default();
    for file in files.iter().filter(|file| !is_unfinished(&file.path)) {
        match read_label(&file.path, key) {
            Ok((label, codec)) => {
                let block = FileName { name: file.name(), is_lossy: codec.is_lossy() };
                found.blocks.push(FoundBlock { file: block, label, used: file.used });
            }
            // Another process has removed it meanwhile.
            Err(FileFault::Gone) => {}
            Err(FileFault::Read(error)) => {
                tracing::warn!(file = %file.path.display(), error, "a file of the KV store cannot be read; it stays unused");
            }
            Err(fault) => {
                tracing::warn!(file = %file.path.display(), %fault, "a file of the KV store is removed");
                found.n_refused += 1;
                remove_or_tell(&file.path);
            }
        }
    }
    found
}

/// Reads the label of a file, and the codec of its rows.
pub(crate) fn read_label(path: &Path, key: &StoreKey) -> Result<(BlockLabel, Codec), FileFault> {
    let mut file = File::open(path).map_err(FileFault::of)?;
    let mut first = [0; HEAD_BYTES];
    file.read_exact(&mut first).map_err(FileFault::of)?;
    let FileHead { n_label, codec, .. } = head(&first)?;
    let mut sealed = vec![0; n_label];
    file.read_exact(&mut sealed).map_err(FileFault::of)?;
    Ok((label(key, sealed)?, codec))
}

/// Reads a whole file, and checks every byte. Errors: it cannot be used.
pub(crate) fn verify(path: &Path, key: &StoreKey) -> Result<(), FileFault> {
    let mut file = read_part(&File::open(path).map_err(FileFault::of)?, FilePart::All, MAX_BLOCK_FILE)?;
    open_file(key, &mut file, FilePart::All).map(drop)
}

/// Reads a file, or the part of it, of at most `max_bytes`.
pub(crate) fn read_part(mut file: &File, part: FilePart, max_bytes: u64) -> Result<Vec<u8>, FileFault> {
    let n_file = file.metadata().map_err(FileFault::of)?.len();
    let mut first = [0; HEAD_BYTES];
    file.read_exact(&mut first).map_err(FileFault::of)?;
    // One more than there may be shows that there are too many.
    let most = max_bytes.saturating_add(1);
    let wanted = match part {
        FilePart::All => most,
        FilePart::Rows => head(&first)?.end_of_rows().min(most),
    };
    let mut bytes = Vec::with_capacity(n_file.min(wanted) as usize);
    bytes.extend_from_slice(&first);
    file.take(wanted.saturating_sub(HEAD_BYTES as u64)).read_to_end(&mut bytes).map_err(FileFault::of)?;
    if bytes.len() as u64 > max_bytes { Err(FileFault::Size { found: bytes.len() }) } else { Ok(bytes) }
}
