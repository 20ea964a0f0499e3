//! A process that is killed while it writes leaves a store that another one can use, and a full disk keeps nobody from what is there.
#![cfg(test)]

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_schemas::kv::{
    Chunk, Codec, Dtype, Fingerprint, KvLayout, LayerRows, LayerShape, RopePairing, Rows, Section, SectionRows,
};
use baton_schemas::{CacheScope, Token};
use baton_store::{DiskOptions, KvBlock, KvStore, Restored, StoreKey, StoreOptions, keep_scopes, list};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Set in the process that is killed: the byte of a file at which the system kills it, and the folder.
const CHILD: &str = "BATON_TEST_KILLED_AT";

const SCOPE: CacheScope = CacheScope(3);
const BLOCK: usize = 32;
const N_BLOCKS: usize = 3;

/// Bytes of a position in the one tensor.
const ROW: usize = 64;

fn key() -> StoreKey {
    StoreKey::derive(b"key")
}

fn open(folder: &Path) -> KvStore {
    open_model(folder, 2)
}

/// The store of a model with these weights.
fn open_model(folder: &Path, weights: u8) -> KvStore {
    let rows = Rows { dtype: Dtype::F16, n_values: ROW as u32 / 2 };
    let layers = vec![LayerShape { k: rows, v: None }];
    let section = Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers };
    let layout = Arc::new(KvLayout { rope: RopePairing::None, sections: vec![section], states: Vec::new() });
    let disk = DiskOptions {
        folder: folder.to_owned(),
        max_bytes: u64::MAX,
        max_written_a_day: u64::MAX,
        codec: Codec::None,
        model: "tiny".to_owned(),
    };
    let model = Fingerprint { vocabulary: [1; 32], weights: [weights; 32] };
    let options = StoreOptions { memory_bytes: usize::MAX, disk: Some(disk) };
    KvStore::open(options, key(), &model, layout).unwrap()
}

fn tokens() -> Vec<Token> {
    (0..(BLOCK * N_BLOCKS) as Token).collect()
}

fn block(idx: usize) -> KvBlock {
    let (p0, p1) = (idx * BLOCK, (idx + 1) * BLOCK);
    let k: Vec<u8> = (p0 * ROW..p1 * ROW).map(|i| ((i * 31) >> 3) as u8).collect();
    let layers = vec![LayerRows { k: k.into(), v: Default::default() }];
    let (p0, p1) = (p0 as u32, p1 as u32);
    KvBlock { chunk: Chunk { p0, p1, sections: vec![SectionRows { start: p0, layers }] }, state: None, is_lossy: false }
}

/// Adds what the store lacks.
fn add_all(store: &KvStore) {
    for idx in 0..N_BLOCKS {
        if store.find(SCOPE, &tokens()).n_tokens() <= idx * BLOCK {
            assert!(store.add(SCOPE, &tokens(), block(idx)));
        }
    }
}

/// The number of blocks that come back, each of which must be right.
fn n_right(store: &KvStore) -> usize {
    let found = store.find(SCOPE, &tokens());
    let mut restore = store.restore(&found, Arc::new(|| {}));
    let mut n = 0;
    loop {
        match restore.poll() {
            Restored::Block(restored) => {
                assert_eq!(restored, block(n));
                n += 1;
            }
            Restored::Pending => std::thread::yield_now(),
            Restored::End => return n,
            Restored::Failed => panic!("a block that was found cannot be read"),
        }
    }
}

fn unfinished(folder: &Path) -> Vec<PathBuf> {
    let entries =
        |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let all = entries(folder).into_iter().filter(|path| path.is_dir()).flat_map(|model| entries(&model));
    all.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(".new-")).collect()
}

#[test]
fn a_store_whose_process_was_killed_at_any_byte_gives_back_only_what_is_right() {
    if let Ok(child) = std::env::var(CHILD) {
        let (at, folder) = child.split_once(' ').unwrap();
        let store = open(Path::new(folder));
        // The system ends a process that writes beyond this byte of a file.
        let limit = Some(at.parse().unwrap());
        setrlimit(Resource::Fsize, Rlimit { current: limit, maximum: limit }).unwrap();
        return add_all(&store);
    }
    let folder = tempfile::tempdir().unwrap();
    add_all(&open(folder.path()));
    let file_bytes = list(folder.path(), &key()).unwrap().n_bytes / N_BLOCKS as u64;
    let mut n_killed = 0;
    for _ in 0..100 {
        let folder = tempfile::tempdir().unwrap();
        let at = u64::from(rand::random::<u32>()) % (file_bytes + 100);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_store_whose_process_was_killed_at_any_byte_gives_back_only_what_is_right"])
            .env(CHILD, format!("{at} {}", folder.path().display()))
            .output()
            .unwrap();
        let store = open(folder.path());
        let n = n_right(&store);
        if child.status.signal().is_some() {
            n_killed += 1;
            assert!(n < N_BLOCKS, "killed at {at}");
        } else {
            assert!(child.status.success() && n == N_BLOCKS, "not killed at {at}: {child:?}");
        }
        add_all(&store);
        drop(store);
        assert_eq!(n_right(&open(folder.path())), N_BLOCKS, "killed at {at}");
        assert!(unfinished(folder.path()).is_empty(), "killed at {at}");
    }
    assert!(n_killed > 50, "{n_killed} of 100");
}

/// Set in a process whose files cannot grow: the folder.
const FULL: &str = "BATON_TEST_FULL_DISK";

/// Runs a test of this file once more in a process in which a file can have no more than so many blocks of 512 bytes or 1 KiB.
fn on_a_full_disk(test: &str, folder: &Path, most_blocks: u32) {
    let limited = format!("trap '' XFSZ; ulimit -f {most_blocks}; exec \"$0\" \"$@\"");
    let child = Command::new("sh")
        .args(["-c", &limited])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(FULL, folder)
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
}

fn until_a_write_failed(store: &KvStore) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.report().failed_writes == 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_removed_key_takes_its_kv_with_it_from_a_full_disk() {
    if let Some(folder) = std::env::var_os(FULL) {
        let kept = keep_scopes(folder.as_ref(), &key(), "endpoint", &[]);
        return assert!(kept.is_err(), "the list of keys has no room");
    }
    let folder = tempfile::tempdir().unwrap();
    add_all(&open(folder.path()));
    keep_scopes(folder.path(), &key(), "endpoint", &[SCOPE]).unwrap();
    assert_eq!(list(folder.path(), &key()).unwrap().models[0].scopes[0].n_blocks, N_BLOCKS as u64);
    on_a_full_disk("a_removed_key_takes_its_kv_with_it_from_a_full_disk", folder.path(), 0);
    assert!(list(folder.path(), &key()).unwrap().models.is_empty());
}

#[test]
fn a_start_with_a_full_disk_finds_what_is_there_and_serves_a_new_model_from_memory() {
    if let Some(folder) = std::env::var_os(FULL) {
        let folder = Path::new(&folder);
        assert_eq!(n_right(&open(folder)), N_BLOCKS);
        let new = open_model(folder, 3);
        add_all(&new);
        until_a_write_failed(&new);
        return assert_eq!(n_right(&new), N_BLOCKS);
    }
    let folder = tempfile::tempdir().unwrap();
    add_all(&open(folder.path()));
    on_a_full_disk("a_start_with_a_full_disk_finds_what_is_there_and_serves_a_new_model_from_memory", folder.path(), 0);
    add_all(&open_model(folder.path(), 3));
    assert_eq!(list(folder.path(), &key()).unwrap().models.len(), 2, "once there is room, it is written");
}

#[test]
fn what_could_not_be_written_does_not_count_as_written_today() {
    if let Some(folder) = std::env::var_os(FULL) {
        let store = open_model(Path::new(&folder), 3);
        add_all(&store);
        return until_a_write_failed(&store);
    }
    let folder = tempfile::tempdir().unwrap();
    add_all(&open(folder.path()));
    let written = || list(folder.path(), &key()).unwrap().written.iter().map(|day| day.n_bytes).sum::<u64>();
    let before = written();
    // The list of days has room there, and a block has none.
    on_a_full_disk("what_could_not_be_written_does_not_count_as_written_today", folder.path(), 1);
    assert_eq!(written(), before);
    assert!(before > (N_BLOCKS * BLOCK * ROW) as u64);
}
