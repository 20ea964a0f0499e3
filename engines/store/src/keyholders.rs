//! Which scopes have an API key. A store outlives its process, so the folder remembers whose KV may be in it: what belongs to a
//! key that was removed meanwhile is removed, too.
//!
//! Each endpoint has a file of its own, `keys-<endpoint>`, so that endpoints with other keys do not disturb each other. A line is a scope
//! with a key, or, after a hyphen, one whose key was removed: a reply that ran then may be written later.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use baton_schemas::CacheScope;

use super::inventory::{Cleared, clear};
use super::private::write_whole;
use super::seal::StoreKey;
use super::store_folder::StoreFolder;

/// The most scopes of a file: more keys than an endpoint has.
const MAX_SCOPES: usize = 16_384;

/// The most bytes of a file.
const MAX_BYTES: u64 = 1 << 20;

/// Removes the blocks of scopes that had a key of this endpoint once and have none among `scopes`, in a folder that is made if need
/// be. Errors: the folder cannot be used, or these scopes cannot be remembered there.
pub fn keep_scopes(folder: &Path, key: &StoreKey, endpoint: &str, scopes: &[CacheScope]) -> io::Result<Cleared> {
    let all = StoreFolder::open(folder.to_owned())?;
    let name = format!("keys-{}", key.name(endpoint.as_bytes()));
    let known = read(&all.path().join(&name))?;
    let held: BTreeSet<u64> = scopes.iter().map(|scope| scope.0).collect();
    let gone: Vec<CacheScope> = known.difference(&held).take(MAX_SCOPES).map(|scope| CacheScope(*scope)).collect();
    let lines = held.iter().take(MAX_SCOPES).map(|scope| format!("{scope:016x}\n"));
    let lines: String = lines.chain(gone.iter().map(|scope| format!("-{:016x}\n", scope.0))).collect();
    let write = || write_whole(all.path(), Path::new(&name), lines.as_bytes());
    // First what is known: a file that cannot be removed is tried again at the next start.
    let written = write();
    let cleared = if gone.is_empty() { Cleared::default() } else { clear(folder, key, None, Some(&gone))? };
    // On a full disk, what was removed makes room for the list.
    written.or_else(|_| write())?;
    Ok(cleared)
}

/// The scopes that have or had a key. A damaged line has none.
fn read(path: &Path) -> io::Result<BTreeSet<u64>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().filter_map(|line| u64::from_str_radix(line.trim_start_matches('-'), 16).ok()).collect())
}
