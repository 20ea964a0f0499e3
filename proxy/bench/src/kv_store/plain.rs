//! What the same bytes cost without a store: a copy in memory, as the engine's thread copies, and a file that is read and decrypted by
//! as many threads as a store reads with.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use aegis::aegis256x2::Aegis256X2;
use baton_proxy::serve::CommandFailure;
use baton_store::READERS;
use baton_tryout::stats::median;
use serde::Serialize;

use super::disk::{self, ColdReads};

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
    /// `None`: nothing is read from the disk itself here ([`ColdReads`]).
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
    if ColdReads::of(folder)? == ColdReads::Possible {
        for _ in 0..N_RUNS {
            disk::leave(&File::open(&path)?)?;
            cold.push(once(n_bytes, || read(&path, n_bytes))?);
        }
    }
    std::fs::remove_file(&path)?;
    let cold_read = (!cold.is_empty()).then(|| median(&cold));
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
    let file = File::open(path)?;
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(|| read_pieces(&file, n_bytes, &next))).collect();
        readers.into_iter().try_for_each(|reader| match reader.join() {
            Ok(pieces) => {
                std::hint::black_box(pieces?);
                Ok(())
            }
            Err(_) => Err(CommandFailure("the plain read panicked".into())),
        })
    })
}

/// Reads pieces until no thread has one left to take.
fn read_pieces(file: &File, n_bytes: usize, next: &AtomicUsize) -> Result<Vec<Vec<u8>>, CommandFailure> {
    let mut pieces = Vec::new();
    loop {
        let idx = next.fetch_add(1, Ordering::Relaxed);
        let left = n_bytes.saturating_sub(idx * PIECE);
        if left == 0 {
            return Ok(pieces);
        }
        let mut piece = vec![0; left.min(PIECE)];
        let mut tag = [0; TAG];
        let at = idx * (PIECE + TAG);
        file.read_exact_at(&mut piece, at as u64)?;
        file.read_exact_at(&mut tag, (at + piece.len()) as u64)?;
        let opened = Aegis256X2::<TAG>::new(&KEY, &NONCE).decrypt_in_place(&mut piece, &tag, &[]);
        opened.map_err(|_| CommandFailure("the file of the plain read was changed".into()))?;
        pieces.push(piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_read_gives_what_was_sealed_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let n_bytes = 2 * PIECE + 1_000;
        let rates = measure(folder.path(), 1, n_bytes).unwrap();
        assert!(rates.copy > 0.0 && rates.warm_read > 0.0, "{rates:?}");
        let path = folder.path().join("file");
        seal(&path, &vec![1; n_bytes]).unwrap();
        read(&path, n_bytes).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        for at in [PIECE - 1, 2 * (PIECE + TAG)] {
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert!(read(&path, n_bytes).is_err(), "{at}");
            bytes[at] ^= 1;
        }
    }
}
