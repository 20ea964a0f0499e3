//! The files that hold a model's weights: one, the parts of a split model, or those of a folder.
//!
//! [`Gguf`](crate::gguf::Gguf) and [`ModelFolder`](crate::hf::ModelFolder) collect them from the path that the operator
//! names, and refuse files that do not belong together. So whoever asks for a model's size, or reads a tensor, asks for
//! all of them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// One of a model's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    /// As the operator gave it, or beside that.
    pub path: PathBuf,
    pub n_bytes: u64,
}

/// A model's files, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelFiles(Vec<ModelFile>);

impl ModelFiles {
    pub fn push(&mut self, file: ModelFile) {
        self.0.push(file);
    }

    /// All of them.
    pub fn all(&self) -> &[ModelFile] {
        &self.0
    }

    /// The size of all files together, bytes.
    pub fn n_bytes(&self) -> u64 {
        self.0.iter().fold(0, |sum, file| sum.saturating_add(file.n_bytes))
    }

    /// The path of the file with this index; the index comes from the tensors of the same model.
    pub fn path(&self, file_idx: usize) -> &Path {
        &self.0[file_idx].path
    }

    pub fn reader(&self) -> FilesReader<'_> {
        FilesReader { files: self, open: None }
    }
}

/// A file that cannot be read any more.
#[derive(Debug)]
pub struct UnreadableFile {
    pub path: PathBuf,
    pub source: io::Error,
}

/// Bytes of a sample of a tensor.
const SAMPLE_BYTES: u64 = 4096;
/// The most samples of a model, beside the two at each tensor's ends.
const MAX_SAMPLES: u64 = 8192;
const MIN_STRIDE: u64 = 64 << 10;

/// Where a model's tensors are sampled: at their ends, and at equal distances between them. So a part of a file that was never
/// written is seen if it is longer than the distance, which depends on the size of all tensors together.
#[derive(Debug, Clone, Copy)]
pub struct SampleStride(u64);

impl SampleStride {
    /// For a model whose tensors take `n_bytes` bytes.
    pub fn for_model(n_bytes: u64) -> SampleStride {
        SampleStride((n_bytes / MAX_SAMPLES).max(MIN_STRIDE))
    }
}

/// Reads parts of a model's files. Keeps one file open: neighbouring tensors are mostly in the same one, and some models
/// have hundreds of files.
pub struct FilesReader<'f> {
    files: &'f ModelFiles,
    open: Option<(usize, File)>,
}

impl FilesReader<'_> {
    /// Fills `bytes` from the byte `start` on of a file. Blocking.
    pub fn read(&mut self, file_idx: usize, start: u64, bytes: &mut [u8]) -> Result<(), UnreadableFile> {
        let read = self.try_read(file_idx, start, bytes);
        read.map_err(|source| UnreadableFile { path: self.files.path(file_idx).to_owned(), source })
    }

    fn try_read(&mut self, file_idx: usize, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        let file = match self.open.take_if(|(open_idx, _)| *open_idx == file_idx) {
            Some((_, file)) => file,
            None => File::open(self.files.path(file_idx))?,
        };
        let (_, file) = self.open.insert((file_idx, file));
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(bytes)
    }

    /// Hashes samples of a tensor at these bytes of a file: 4 KiB at its beginning, then at each multiple of the stride, and at
    /// its end. Blocking.
    pub fn hash_samples(
        &mut self,
        file_idx: usize,
        at: Range<u64>,
        stride: SampleStride,
        hasher: &mut blake3::Hasher,
    ) -> Result<(), UnreadableFile> {
        let n_sample = at.end.saturating_sub(at.start).min(SAMPLE_BYTES);
        let last = at.end - n_sample;
        let before = (at.start..last).step_by(stride.0 as usize);
        for start in before.chain([last]) {
            let mut sample = [0; SAMPLE_BYTES as usize];
            let sample = &mut sample[..n_sample as usize];
            self.read(file_idx, start, sample)?;
            hasher.update(sample);
        }
        Ok(())
    }
}
