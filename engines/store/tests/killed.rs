//! A process that is killed while it writes leaves a store that another one can use.
#![cfg(test)]

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use baton_schemas::kv::{
    Chunk, Codec, Dtype, Fingerprint, KvLayout, LayerRows, LayerShape, RopePairing, Rows, Section, SectionRows,
};
use baton_schemas::{CacheScope, Token};
use baton_store::{DiskOptions, KvBlock, KvStore, Restored, StoreKey, StoreOptions};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Set in the process that is killed: the byte of a file at which the system kills it, and the folder.
const CHILD: &str = "BATON_TEST_KILLED_AT";

const SCOPE: CacheScope = CacheScope(3);
const BLOCK: usize = 32;
const N_BLOCKS: usize = 3;

/// Bytes of a position in the one tensor.
const ROW: usize = 64;

fn open(folder: &Path) -> KvStore {
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
    let model = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
    let options = StoreOptions { memory_bytes: usize::MAX, disk: Some(disk) };
    KvStore::open(options, StoreKey::derive(b"key"), &model, layout).unwrap()
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
    let file_bytes = baton_store::list(folder.path(), &StoreKey::derive(b"key")).unwrap().n_bytes / N_BLOCKS as u64;
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
