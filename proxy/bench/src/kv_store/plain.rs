//! What the same bytes cost without a store: a copy in memory, and a file that is read and decrypted, in one thread.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use aegis::aegis256x2::Aegis256X2;
use baton_proxy::serve::CommandFailure;
use baton_tryout::stats::median;
use serde::Serialize;

const N_RUNS: usize = 5;

/// The bytes of a piece that is sealed as a whole, about those of a block of the store.
const PIECE: usize = 4 << 20;

const TAG: usize = 32;

/// GB/s of so many bytes.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PlainRates {
    pub(super) n_tokens: usize,
    pub(super) n_bytes: usize,
    pub(super) copy: f64,
    pub(super) warm_read: f64,
    /// `None`: the system keeps no file out of its page cache.
    pub(super) cold_read: Option<f64>,
}

/// Measures the rates of `n_bytes`, with a file in `folder`.
pub(super) fn measure(folder: &Path, n_tokens: usize, n_bytes: usize) -> Result<PlainRates, CommandFailure> {
    let source: Vec<u8> = (0..n_bytes).map(|i| (i * 31) as u8).collect();
    let mut target = vec![0; n_bytes];
    let copy = rate(n_bytes, || {
        target.copy_from_slice(&source);
        std::hint::black_box(&mut target);
        Ok(())
    })?;
    let path = folder.join("plain");
    seal(&path, &source)?;
    // The first run fills the page cache.
    let warm_read = rate(n_bytes, || read(&path, n_bytes))?;
    let mut cold = Vec::new();
    for _ in 0..N_RUNS {
        leave(&path)?;
        cold.push(once(n_bytes, || read(&path, n_bytes))?);
    }
    std::fs::remove_file(&path)?;
    let cold_read = cfg!(target_os = "linux").then(|| median(&cold));
    Ok(PlainRates { n_tokens, n_bytes, copy, warm_read, cold_read })
}

/// The median rate of some runs after a first one, GB/s.
fn rate(n_bytes: usize, mut run: impl FnMut() -> Result<(), CommandFailure>) -> Result<f64, CommandFailure> {
    run()?;
    let rates: Result<Vec<f64>, CommandFailure> = (0..N_RUNS).map(|_| once(n_bytes, &mut run)).collect();
    Ok(median(&rates?))
}

fn once(n_bytes: usize, run: impl FnOnce() -> Result<(), CommandFailure>) -> Result<f64, CommandFailure> {
    let began = Instant::now();
    run()?;
    Ok(n_bytes as f64 / began.elapsed().as_secs_f64().max(1e-9) / 1e9)
}

const KEY: [u8; 32] = [7; 32];
const NONCE: [u8; 32] = [9; 32];

fn seal(path: &Path, content: &[u8]) -> Result<(), CommandFailure> {
    let mut file = File::create(path)?;
    for piece in content.chunks(PIECE) {
        let mut piece = piece.to_vec();
        let tag = Aegis256X2::<TAG>::new(&KEY, &NONCE).encrypt_in_place(&mut piece, &[]);
        file.write_all(&piece)?;
        file.write_all(&tag)?;
    }
    Ok(file.sync_all()?)
}

fn read(path: &Path, n_bytes: usize) -> Result<(), CommandFailure> {
    let mut file = File::open(path)?;
    let mut pieces = Vec::new();
    let mut left = n_bytes;
    while left > 0 {
        let mut piece = vec![0; left.min(PIECE)];
        let mut tag = [0; TAG];
        file.read_exact(&mut piece)?;
        file.read_exact(&mut tag)?;
        let opened = Aegis256X2::<TAG>::new(&KEY, &NONCE).decrypt_in_place(&mut piece, &tag, &[]);
        opened.map_err(|_| CommandFailure("the file of the plain read was changed".into()))?;
        left -= piece.len();
        pieces.push(piece);
    }
    std::hint::black_box(pieces);
    Ok(())
}

/// Takes all files below a folder out of the page cache, so that they are read from the disk. On other systems than Linux they
/// stay.
pub(super) fn leave_page_cache(folder: &Path) -> Result<(), CommandFailure> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => leave_page_cache(&path)?,
            false => leave(&path)?,
        }
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn leave(path: &Path) -> Result<(), CommandFailure> {
    let file = File::open(path)?;
    // What is not written yet would stay.
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).map_err(std::io::Error::from)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn leave(_: &Path) -> Result<(), CommandFailure> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_read_gives_what_was_sealed_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let n_bytes = PIECE + 1_000;
        let rates = measure(folder.path(), 1, n_bytes).unwrap();
        assert!(rates.copy > 0.0 && rates.warm_read > 0.0, "{rates:?}");
        let path = folder.path().join("file");
        seal(&path, &vec![1; n_bytes]).unwrap();
        read(&path, n_bytes).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[PIECE - 1] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(read(&path, n_bytes).is_err());
        leave_page_cache(folder.path()).unwrap();
    }
}
