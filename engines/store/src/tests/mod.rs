//! The store as an engine uses it: with prompts that begin alike, restarts, and files that were damaged.

mod files;
mod inventory;
mod other_processes;
mod room;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_schemas::kv::{
    Chunk, Codec, Dtype, Fingerprint, KvLayout, LayerRows, LayerShape, RopePairing, Rows, Section, SectionRows,
    StateKind, StatePart, StateShape,
};
use baton_schemas::{CacheScope, Token};
use bytes::Bytes;
use proptest::prelude::*;

use super::{DiskOptions, KvBlock, KvStore, Restored, StoreKey, StoreOptions, WantedKv, clear, verify};

const SCOPE: CacheScope = CacheScope(3);

/// Two sections of one layer, of which the second may have a window, and a state if wanted.
fn layout(window: Option<u32>, has_state: bool) -> Arc<KvLayout> {
    let rows = Rows { dtype: Dtype::F16, n_values: 4 };
    let section = |window| Section {
        window,
        n_rot: [0; 2],
        tokens_per_row: 1,
        layers: vec![LayerShape { k: rows, v: Some(rows) }],
    };
    let state = StateShape { kind: StateKind::Recurrence, values: Rows { dtype: Dtype::F32, n_values: 3 } };
    Arc::new(KvLayout {
        rope: RopePairing::None,
        sections: vec![section(None), section(window)],
        states: if has_state { vec![state] } else { Vec::new() },
    })
}

/// The bytes of a row or state: a function of all tokens up to it, as KV is.
fn bytes_at(tokens: &[Token], position: usize, what: u8, n: usize) -> Vec<u8> {
    let seen: Vec<u8> = tokens[..=position].iter().flat_map(|token| token.to_le_bytes()).chain([what]).collect();
    blake3::hash(&seen).as_bytes()[..n].to_vec()
}

/// The block `[p0, p1)` of a prompt, as a cache has it whose windowed layers keep what the prompt's end needs.
fn block(layout: &KvLayout, tokens: &[Token], p0: usize, p1: usize, has_state: bool) -> KvBlock {
    let sections = layout.sections.iter().enumerate().map(|(idx, section)| {
        let oldest = section.window.map_or(0, |window| (tokens.len() + 1).saturating_sub(window as usize));
        let start = oldest.clamp(p0, p1);
        let rows = |what: u8| -> Bytes { (start..p1).flat_map(|i| bytes_at(tokens, i, what, 8)).collect() };
        let (k, v) = (rows(2 * idx as u8), rows(2 * idx as u8 + 1));
        SectionRows { start: start as u32, layers: vec![LayerRows { k, v }] }
    });
    let chunk = Chunk { p0: p0 as u32, p1: p1 as u32, sections: sections.collect() };
    let tensors = vec![bytes_at(tokens, p1 - 1, 99, 12).into()];
    let state = has_state.then_some(StatePart { position: p1 as u32, first: 0, tensors });
    KvBlock { chunk, state, is_lossy: false }
}

/// Adds what the store lacks of a prompt, in blocks of at most `size` positions. As an engine does, it asks before each.
fn add(store: &KvStore, layout: &KvLayout, tokens: &[Token], size: usize) -> bool {
    for _ in 0..=tokens.len() {
        let p0 = store.vacant_from(SCOPE, tokens);
        if p0 >= tokens.len() {
            return true;
        }
        let p1 = tokens.len().min(p0 + size);
        let has_state = !layout.states.is_empty() && p1 == tokens.len();
        if !store.add(SCOPE, tokens, block(layout, tokens, p0, p1, has_state)) {
            return false;
        }
    }
    panic!("the same block is added again and again");
}

/// The blocks that a prompt can begin with, and the number of its tokens in them. Panics if one cannot be read.
fn restored(store: &KvStore, tokens: &[Token]) -> (Vec<KvBlock>, usize) {
    let found = store.find(SCOPE, tokens);
    let mut restore = store.restore(&found, Arc::new(|| {}));
    let mut blocks = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match restore.poll() {
            Restored::Block(block) => blocks.push(block),
            Restored::Pending if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Restored::End => return (blocks, found.n_tokens()),
            other => panic!("{other:?} after {} blocks", blocks.len()),
        }
    }
}

/// Checks that every byte is that of `tokens`, and that a sequence can go on from their end.
fn check(layout: &KvLayout, tokens: &[Token], blocks: &[KvBlock], n: usize) {
    let mut next = 0;
    let mut windowed = usize::MAX;
    for KvBlock { chunk, state, .. } in blocks {
        assert_eq!(chunk.p0, next);
        next = chunk.p1;
        for (idx, rows) in chunk.sections.iter().enumerate() {
            for i in rows.start as usize..n.min(chunk.p1 as usize) {
                let at = 8 * (i - rows.start as usize);
                assert_eq!(rows.layers[0].k[at..at + 8], bytes_at(tokens, i, 2 * idx as u8, 8), "row {i}");
            }
        }
        let start = chunk.sections[1].start as usize;
        windowed = if start == chunk.p0 as usize { windowed.min(start) } else { start };
        if let (Some(state), true) = (state, chunk.p1 as usize <= n) {
            assert_eq!(state.tensors[0], bytes_at(tokens, chunk.p1 as usize - 1, 99, 12));
        }
    }
    if n == 0 {
        return assert!(blocks.is_empty());
    }
    assert_eq!(next as usize, n);
    blocks.iter().for_each(|block| block.check(layout).unwrap());
    if !layout.states.is_empty() {
        assert!(blocks.last().is_some_and(|block| block.state.is_some()), "no state at {n}");
    }
    if let Some(window) = layout.sections[1].window {
        assert!(windowed <= (n + 1).saturating_sub(window as usize), "rows from {windowed} on for the end {n}");
    }
}

fn open(memory_bytes: usize, disk: Option<DiskOptions>, layout: &Arc<KvLayout>) -> KvStore {
    let model = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
    KvStore::open(StoreOptions { memory_bytes, disk }, StoreKey::derive(b"key"), &model, Arc::clone(layout)).unwrap()
}

fn disk(folder: &Path, max_bytes: u64) -> Option<DiskOptions> {
    Some(DiskOptions {
        folder: folder.to_owned(),
        max_bytes,
        max_written_a_day: u64::MAX,
        codec: Codec::None,
        model: "tiny".to_owned(),
    })
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let files = folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    files.filter(|path| path.extension().is_some_and(|extension| extension == "kv")).collect()
}

fn until(is_it: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_it() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn refused(store: &KvStore) -> u64 {
    store.report().refused_files
}

fn prompt(n: u32) -> Vec<Token> {
    (0..n).map(|i| i * 7 % 1000).collect()
}

proptest! {
    /// Whatever is added and found, restored rows are those of the prompt, and its end can be continued.
    #[test]
    fn restored_kv_is_that_of_the_prompt(
        window in prop::option::of(2u32..12),
        has_state: bool,
        memory in prop::option::of(200usize..4_000),
        sizes in prop::collection::vec((prop::collection::vec(0u32..2, 1..40), 1usize..9), 1..25),
    ) {
        let layout = layout(window, has_state);
        let store = open(memory.unwrap_or(usize::MAX), None, &layout);
        for (tokens, size) in sizes {
            let (blocks, n) = restored(&store, &tokens);
            check(&layout, &tokens, &blocks, n);
            let was_kept = add(&store, &layout, &tokens, size);
            let (blocks, n) = restored(&store, &tokens);
            check(&layout, &tokens, &blocks, n);
            prop_assert!(store.report().memory_bytes <= memory.unwrap_or(usize::MAX) as u64);
            if memory.is_none() {
                prop_assert!(was_kept);
                prop_assert_eq!(n, tokens.len(), "all of it was just added");
            }
        }
    }
}

proptest! {
    // Each case writes some dozens of files.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A later process gives back as much of each prompt as the one that wrote it.
    #[test]
    fn a_restart_loses_nothing_that_was_written(
        window in prop::option::of(2u32..12),
        has_state: bool,
        sizes in prop::collection::vec((prop::collection::vec(0u32..2, 1..40), 1usize..9), 1..10),
    ) {
        let layout = layout(window, has_state);
        let folder = tempfile::tempdir().unwrap();
        let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
        for (tokens, size) in &sizes {
            prop_assert!(add(&store, &layout, tokens, *size));
        }
        // A store that is dropped waits for a slow disk for some seconds only.
        until(|| store.shared().tree().next_to_write().is_none());
        let before: Vec<usize> = sizes.iter().map(|(tokens, _)| store.find(SCOPE, tokens).n_tokens()).collect();
        drop(store);
        let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
        for ((tokens, _), n_before) in sizes.iter().zip(before) {
            let (blocks, n) = restored(&store, tokens);
            check(&layout, tokens, &blocks, n);
            prop_assert!(n >= n_before, "{} of {}", n, n_before);
        }
        prop_assert_eq!(refused(&store), 0);
    }
}

#[test]
fn what_conversations_share_is_kept_once() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    let system = prompt(1_010);
    let chat = |chat: u32| [&system[..], &[5_000 + chat; 10]].concat();
    for i in 0..30 {
        assert!(add(&store, &layout, &chat(i), 250));
    }
    // No block ends where the system prompt does.
    let n_bytes = (1_010 + 30 * 10) * layout.bytes_per_position();
    assert_eq!(store.report().memory_bytes, n_bytes as u64);
    drop(store);
    let on_disk: u64 = files(folder.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!((n_bytes..n_bytes + 40_000).contains(&(on_disk as usize)), "{on_disk} of {n_bytes}");
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    for i in 0..30 {
        let (blocks, n) = restored(&store, &chat(i));
        assert_eq!((n, refused(&store)), (1_020, 0));
        check(&layout, &chat(i), &blocks, n);
    }
}

#[test]
fn a_slot_that_has_the_first_tokens_gets_the_rest() {
    let layout = layout(None, false);
    let store = open(usize::MAX, None, &layout);
    let tokens = prompt(100);
    assert!(add(&store, &layout, &tokens, 30));
    let found = store.find(SCOPE, &tokens[..95]);
    for n_present in [1, 29, 30, 31, 90, 94] {
        let mut restore = store.restore_after(n_present, &found, Arc::new(|| {}));
        let mut next = n_present;
        while let Restored::Block(rest) = restore.poll() {
            let (p0, p1) = (rest.chunk.p0, rest.chunk.p1);
            assert_eq!((p0, &rest), (next, &block(&layout, &tokens, p0 as usize, p1 as usize, false)));
            next = p1;
        }
        assert_eq!((next, restore.given().memory), (95, 95 - n_present));
    }
}

#[test]
fn a_later_process_finds_what_an_earlier_one_wrote() {
    for (window, has_state) in [(None, false), (Some(16), false), (Some(16), true)] {
        let layout = layout(window, has_state);
        let folder = tempfile::tempdir().unwrap();
        let tokens = prompt(200);
        let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
        assert!(add(&store, &layout, &tokens, 64));
        drop(store);
        let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
        assert_eq!(store.report().memory_bytes, 0);
        let (blocks, n) = restored(&store, &tokens);
        assert_eq!((n, refused(&store)), (200, 0));
        check(&layout, &tokens, &blocks, n);
        assert_eq!(store.report().disk_tokens, 200);
        // From memory from now on.
        restored(&store, &tokens);
        assert_eq!(store.report().memory_tokens, 200);
    }
}

#[test]
fn what_came_back_from_disk_leaves_memory_as_other_blocks_do() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(10), folder.path());
    let max_bytes = 3 * 10 * layout.bytes_per_position();
    let store = open(max_bytes, disk(folder.path(), u64::MAX), &layout);
    let n_on_disk = |tokens: &[Token]| store.find(SCOPE, tokens).n_on_disk();
    assert_eq!((restored(&store, &prompt(10)).1, n_on_disk(&prompt(10))), (10, 0));
    let chat = |chat: u32| -> Vec<Token> { prompt(10).iter().map(|token| token + 10_000 * chat).collect() };
    for i in 1..=6 {
        assert!(add(&store, &layout, &chat(i), 10));
        until(|| store.shared().tree().next_to_write().is_none());
        until(|| store.report().memory_bytes <= max_bytes as u64);
    }
    assert_eq!((n_on_disk(&prompt(10)), n_on_disk(&chat(6))), (10, 0), "six others were used since");
}

#[test]
fn a_file_that_was_changed_or_cut_is_refused_and_removed_with_all_that_continues_it() {
    changed_or_cut_files_are_refused(false);
}

#[test]
fn so_is_one_with_states() {
    changed_or_cut_files_are_refused(true);
}

fn changed_or_cut_files_are_refused(has_state: bool) {
    let layout = layout(None, has_state);
    let tokens = prompt(30);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &tokens, folder.path());
    let whole: BTreeMap<PathBuf, Vec<u8>> =
        files(folder.path()).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    assert_eq!(whole.len(), 3);
    let restore_files = || whole.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    for (at, (path, bytes)) in whole.iter().enumerate() {
        for idx in (at..bytes.len()).step_by(5) {
            for is_cut in [true, false] {
                restore_files();
                let mut damaged = bytes.clone();
                if is_cut {
                    damaged.truncate(idx)
                } else {
                    damaged[idx] ^= 0x10
                }
                fs::write(path, damaged).unwrap();
                let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
                let found = store.find(SCOPE, &tokens);
                let mut restore = store.restore(&found, Arc::new(|| {}));
                let mut n_right = 0;
                loop {
                    match restore.poll() {
                        Restored::Block(found) => {
                            let (p0, p1) = (found.chunk.p0 as usize, found.chunk.p1 as usize);
                            assert_eq!(found, block(&layout, &tokens, p0, p1, has_state && p1 == 30));
                            n_right += 1;
                        }
                        Restored::Pending => std::thread::yield_now(),
                        Restored::End | Restored::Failed => break,
                    }
                }
                assert!(n_right < 3 && refused(&store) > 0, "byte {idx} of {}", path.display());
                // Only the last block has states to go on with.
                assert_eq!(store.find(SCOPE, &tokens).n_tokens(), if has_state { 0 } else { 10 * n_right });
                drop(store);
                assert!(!path.exists());
            }
        }
    }
}

fn drop_after_adding(layout: &Arc<KvLayout>, tokens: &[Token], folder: &Path) {
    assert!(add(&open(usize::MAX, disk(folder, u64::MAX), layout), layout, tokens, 10));
}

#[test]
fn files_of_another_key_or_in_anothers_place_are_refused() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(10), folder.path());
    let other: Vec<Token> = prompt(10).iter().map(|token| token + 1).collect();
    drop_after_adding(&layout, &other, folder.path());
    let [a, b] = &files(folder.path())[..] else { panic!("two files") };
    // Each is whole, and has the other's name.
    let (in_a, in_b) = (fs::read(a).unwrap(), fs::read(b).unwrap());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    fs::write(a, &in_b).unwrap();
    fs::write(b, &in_a).unwrap();
    let found = store.find(SCOPE, &prompt(10));
    assert_eq!(found.n_tokens(), 10);
    let mut restore = store.restore(&found, Arc::new(|| {}));
    let end = std::iter::repeat_with(|| restore.poll()).find(|restored| !matches!(restored, Restored::Pending));
    assert!(matches!(end, Some(Restored::Failed)), "{end:?}");

    let model = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
    let options = StoreOptions { memory_bytes: 0, disk: disk(folder.path(), u64::MAX) };
    let theirs = KvStore::open(options, StoreKey::derive(b"stolen"), &model, Arc::clone(&layout)).unwrap();
    assert_eq!(theirs.find(SCOPE, &prompt(10)).n_tokens(), 0);
}

#[test]
fn the_disks_budget_holds_over_processes_and_what_was_used_last_stays() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let max_bytes = 20_000;
    let stores: Vec<KvStore> = (0..2).map(|_| open(0x10_0000, disk(folder.path(), max_bytes), &layout)).collect();
    for chat in 0..60 {
        let tokens: Vec<Token> = prompt(20).iter().map(|token| token + 10_000 * chat).collect();
        assert!(add(&stores[chat as usize % 2], &layout, &tokens, 20));
    }
    drop(stores);
    let n_bytes: u64 = files(folder.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(n_bytes <= max_bytes && n_bytes > max_bytes / 2, "{n_bytes}");
    let chat = |chat: u32| -> Vec<Token> { prompt(20).iter().map(|token| token + 10_000 * chat).collect() };
    let store = open(0x10_0000, disk(folder.path(), max_bytes), &layout);
    assert_eq!(store.report().disk_bytes, n_bytes);
    assert!(add(&store, &layout, &chat(60), 20));
    drop(store);
    let store = open(0x10_0000, disk(folder.path(), max_bytes), &layout);
    assert_eq!(store.find(SCOPE, &chat(60)).n_tokens(), 20);
    assert_eq!(store.find(SCOPE, &chat(0)).n_tokens(), 0);
}

#[test]
fn a_smaller_budget_holds_from_the_start_on_though_nothing_more_may_be_written() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let size = || files(folder.path()).iter().map(|path| path.metadata().unwrap().len()).sum::<u64>();
    drop_after_adding(&layout, &prompt(40), folder.path());
    let block = size() / 4;
    let smaller = DiskOptions { max_written_a_day: 0, ..disk(folder.path(), 5 * block / 2).unwrap() };
    let store = open(usize::MAX, Some(smaller), &layout);
    assert_eq!((files(folder.path()).len(), store.report().disk_bytes), (2, size()));
    assert_eq!((store.find(SCOPE, &prompt(40)).n_tokens(), refused(&store)), (20, 0), "the first blocks of the prompt");
}

#[test]
fn a_folder_in_place_of_a_block_does_not_stop_the_store() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(10), folder.path());
    let block = files(folder.path()).remove(0);
    fs::create_dir(block.parent().unwrap().join("00000000000000000000000000000000.kv")).unwrap();
    let store = open(usize::MAX, disk(folder.path(), block.metadata().unwrap().len()), &layout);
    let other: Vec<Token> = prompt(10).iter().map(|token| token + 1).collect();
    assert!(add(&store, &layout, &other, 10));
    until(|| store.report().written_bytes > 0);
    assert_eq!((store.report().failed_writes, block.exists()), (0, false));
    let key = StoreKey::derive(b"key");
    assert_eq!(verify(folder.path(), &key).unwrap().n_right, 1);
    assert_eq!(clear(folder.path(), &key, None, None).unwrap().n_files, 1);
}

#[test]
fn a_day_writes_no_more_than_it_may() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let disk = DiskOptions { max_written_a_day: 3_000, ..disk(folder.path(), u64::MAX).unwrap() };
    for chat in 0..10 {
        let store = open(usize::MAX, Some(disk.clone()), &layout);
        let tokens: Vec<Token> = prompt(20).iter().map(|token| token + 10_000 * chat).collect();
        assert!(add(&store, &layout, &tokens, 20), "memory still takes it");
    }
    let n_bytes: u64 = files(folder.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(n_bytes <= 3_000 && n_bytes > 0, "{n_bytes}");
}

#[test]
fn a_disk_that_fails_costs_no_memory_and_no_request() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let store = open(usize::MAX, disk(&folder.path().join("inner"), u64::MAX), &layout);
    fs::remove_dir_all(folder.path().join("inner")).unwrap();
    fs::write(folder.path().join("inner"), b"a file in its place").unwrap();
    assert!(add(&store, &layout, &prompt(50), 10));
    until(|| store.report().failed_writes > 0);
    let (blocks, n) = restored(&store, &prompt(50));
    check(&layout, &prompt(50), &blocks, n);
    assert_eq!(n, 50);
}

#[test]
fn a_scope_that_is_forgotten_leaves_no_file() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    store.forget(CacheScope(9));
    assert_eq!(store.find(SCOPE, &prompt(30)).n_tokens(), 30);
    store.forget(SCOPE);
    assert_eq!(store.find(SCOPE, &prompt(30)).n_tokens(), 0);
    drop(store);
    assert_eq!(files(folder.path()).len(), 0);
}

#[test]
fn nobody_else_may_enter_the_folder_or_read_a_file_and_no_token_stands_in_one() {
    use std::os::unix::fs::PermissionsExt;
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let tokens = vec![0x6162_6364; 40];
    drop_after_adding(&layout, &tokens, folder.path());
    for path in files(folder.path()) {
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let bytes = fs::read(&path).unwrap();
        assert!(!bytes.windows(10).any(|window| window == b"1633837924"), "the token in JSON");
        assert!(!bytes.windows(8).any(|window| window == &bytes_at(&tokens, 0, 0, 8)[..]), "a row");
    }
}
