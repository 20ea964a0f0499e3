//! The store's files beside their users: slow and hung disks, and other processes.

use std::fs::File;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::clear;

/// Keeps the store of a folder from writing until it is dropped.
fn busy_disk(folder: &Path) -> File {
    let lock = File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    lock
}

fn written(store: &KvStore) -> u64 {
    store.report().written_bytes
}

#[test]
fn what_is_added_faster_than_the_disk_writes_is_all_written() {
    const ROW: usize = 4 << 20;
    let rows = Rows { dtype: Dtype::F16, n_values: ROW as u32 / 2 };
    let layers = vec![LayerShape { k: rows, v: None }];
    let section = Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers };
    let layout = Arc::new(KvLayout { rope: RopePairing::None, sections: vec![section], states: Vec::new() });
    let k = Bytes::from(vec![7; ROW]);
    let block = |p0: u32| {
        let layers = vec![LayerRows { k: k.clone(), v: Bytes::new() }];
        let sections = vec![SectionRows { start: p0, layers }];
        KvBlock { chunk: Chunk { p0, p1: p0 + 1, sections }, state: None, is_lossy: false }
    };
    let folder = tempfile::tempdir().unwrap();
    let tokens = prompt(66);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    let busy = busy_disk(folder.path());
    assert!((0..66).all(|p0| store.add(SCOPE, &tokens, block(p0))));
    drop(busy);
    until(|| files(folder.path()).len() == 66);
    drop(store);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert_eq!(store.find(SCOPE, &tokens).n_tokens(), 66);
}

#[test]
fn a_block_that_made_room_for_others_is_written_again_once_it_is_used() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let chat = |chat: u32| -> Vec<Token> { prompt(20).iter().map(|token| token + 10_000 * chat).collect() };
    // There is room for some of them.
    let store = open(usize::MAX, disk(folder.path(), 5_000), &layout);
    for i in 0..20 {
        assert!(add(&store, &layout, &chat(i), 20));
    }
    until(|| store.shared().tree().next_to_write().is_none());
    let evictions = || store.report().disk_evictions;
    until(|| evictions() == 20 - files(folder.path()).len() as u64);
    assert!(evictions() > 10);
    let n_written = written(&store);
    for i in 0..20 {
        assert_eq!(store.find(SCOPE, &chat(i)).n_tokens(), 20, "it is in memory");
    }
    assert!(store.shared().tree().next_to_write().is_none());
    assert_eq!(written(&store), n_written);

    assert_eq!(restored(&store, &chat(0)).1, 20);
    until(|| written(&store) > n_written);
    drop(store);
    let store = open(usize::MAX, disk(folder.path(), 5_000), &layout);
    assert_eq!([0, 1].map(|i| store.find(SCOPE, &chat(i)).n_tokens()), [20, 0]);
}

#[test]
fn a_slow_disk_does_not_hold_up_the_start_and_what_it_has_is_found_later() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    // Reading it waits until somebody writes.
    let model = files(folder.path())[0].parent().unwrap().to_owned();
    let slow = model.join("slow.kv");
    assert!(Command::new("mkfifo").arg(&slow).status().unwrap().success());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert_eq!(store.find(SCOPE, &prompt(30)).n_tokens(), 0, "its folder is still being read");
    // Meanwhile it is a store in memory, which computes the beginning once more.
    let longer = prompt(40);
    assert!(add(&store, &layout, &longer[..15], 10));
    assert_eq!(store.find(SCOPE, &longer).n_tokens(), 15);
    assert_eq!(written(&store), 0);

    drop(File::options().write(true).open(&slow).unwrap());
    until(|| store.find(SCOPE, &prompt(30)).n_tokens() == 30);
    assert!(!slow.exists(), "it is no block");
    let found = store.find(SCOPE, &longer);
    assert_eq!(
        (found.n_tokens(), found.n_on_disk()),
        (30, 20),
        "a block that was there twice has its file and its memory"
    );
    until(|| store.shared().tree().next_to_write().is_none());
    assert_eq!(restored(&store, &longer).1, 30);
    drop(store);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert_eq!((store.find(SCOPE, &longer[..15]).n_tokens(), refused(&store)), (15, 0));
}

#[test]
fn what_went_through_a_lossy_codec_keeps_its_mark_and_has_no_file_that_passes_for_exact() {
    let rows = Rows { dtype: Dtype::F16, n_values: 32 };
    let layers = vec![LayerShape { k: rows, v: None }];
    let section = Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers };
    let layout = Arc::new(KvLayout { rope: RopePairing::None, sections: vec![section], states: Vec::new() });
    let tokens = prompt(30);
    let block = |p0: u32, is_lossy: bool| {
        let layers = vec![LayerRows { k: Bytes::from(vec![0x3c; 10 * 64]), v: Bytes::new() }];
        let chunk = Chunk { p0, p1: p0 + 10, sections: vec![SectionRows { start: p0, layers }] };
        KvBlock { chunk, state: None, is_lossy }
    };
    let marks =
        |store: &KvStore| -> Vec<bool> { restored(store, &tokens).0.iter().map(|block| block.is_lossy).collect() };
    for (codec, n_files, expected) in [(Codec::None, 1, &[false][..]), (Codec::Q8_0, 3, &[true, true, true])] {
        let folder = tempfile::tempdir().unwrap();
        let disk = || disk(folder.path(), u64::MAX).map(|disk| DiskOptions { codec, ..disk });
        let store = open(usize::MAX, disk(), &layout);
        // What continues a lossy block is of no use without it.
        assert!([(0, false), (10, true), (20, false)].iter().all(|(p0, is)| store.add(
            SCOPE,
            &tokens,
            block(*p0, *is)
        )));
        assert_eq!(marks(&store), [false, true, false], "memory");
        until(|| files(folder.path()).len() == n_files && store.shared().tree().next_to_write().is_none());
        // Its use does not bring it a file.
        assert_eq!(marks(&store).len(), 3);
        assert!(store.shared().tree().next_to_write().is_none());
        drop(store);
        let found = open(usize::MAX, disk(), &layout);
        assert!(found.held().iter().map(|piece| !piece.is_exact).eq(expected.iter().copied()), "{codec:?}");
        assert_eq!(marks(&found), expected, "{codec:?}");
    }
}

#[test]
fn what_is_forgotten_while_a_slow_disk_is_read_is_gone_when_it_was_read() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let kept = files(folder.path());
    let slow = kept[0].parent().unwrap().join("slow.kv");
    assert!(Command::new("mkfifo").arg(&slow).status().unwrap().success());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    store.forget(SCOPE);
    drop(File::options().write(true).open(&slow).unwrap());
    until(|| kept.iter().all(|file| !file.exists()));
    until(|| refused(&store) == 1);
    assert_eq!(store.find(SCOPE, &prompt(30)).n_tokens(), 0, "only what is no block is refused");
    // The key is back, and keeps what it computes.
    assert!(add(&store, &layout, &prompt(30), 10));
    until(|| written(&store) > 0);
    assert_eq!(store.find(SCOPE, &prompt(30)).n_tokens(), 30);
}

#[test]
fn a_disk_that_hangs_keeps_two_threads_and_what_is_in_memory_comes_back() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    let in_memory: Vec<Token> = prompt(10).iter().map(|token| token + 5_000).collect();
    assert!(add(&store, &layout, &in_memory, 10));
    until(|| files(folder.path()).len() == 4);
    // Reading waits until somebody writes, and the pipe is open for that, and nothing comes.
    let files = files(folder.path());
    let hung: Vec<(File, Vec<u8>)> = files
        .iter()
        .map(|path| {
            let bytes = fs::read(path).unwrap();
            fs::remove_file(path).unwrap();
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
            (File::options().read(true).write(true).open(path).unwrap(), bytes)
        })
        .collect();
    let version = store.version();
    let found = store.find(SCOPE, &prompt(30));
    assert_eq!((found.n_tokens(), found.n_on_disk()), (30, 30));
    let mut restores: Vec<_> = (0..20).map(|_| store.restore(&found, Arc::new(|| {}))).collect();
    until(|| store.find(SCOPE, &prompt(30)).n_tokens() == 0);
    assert!(restores.iter_mut().all(|restore| matches!(restore.poll(), Restored::Pending)));
    // The store, its three threads, and the restores: none has a thread of its own.
    assert_eq!(Arc::strong_count(store.shared()), 4 + 20);
    let held: usize = store.held().iter().map(|piece| piece.tokens.len()).sum();
    assert_eq!((held, restored(&store, &in_memory).1), (10, 10));
    assert_ne!(store.version(), version);

    // The disk answers again.
    for ((mut pipe, bytes), path) in hung.into_iter().zip(&files) {
        pipe.write_all(&bytes).unwrap();
        fs::remove_file(path).unwrap();
        fs::write(path, bytes).unwrap();
    }
    until(|| store.find(SCOPE, &prompt(30)).n_tokens() == 30);
    for restore in &mut restores {
        drop(std::iter::repeat_with(|| restore.poll()).find(|restored| !matches!(restored, Restored::Pending)));
    }
}

#[test]
fn a_scope_is_forgotten_without_waiting_for_the_disk() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    let busy = busy_disk(folder.path());
    // Until the thread that writes waits for the lock, too.
    assert!(add(&store, &layout, &prompt(40), 10));
    let is_lock = |fd: PathBuf| fs::read_link(fd).is_ok_and(|file| file == folder.path().join("lock"));
    let fds = || fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().path());
    until(|| fds().filter(|fd| is_lock(fd.clone())).count() == 2);
    store.forget(SCOPE);
    assert_eq!((store.find(SCOPE, &prompt(40)).n_tokens(), files(folder.path()).len()), (0, 3));
    drop(busy);
    until(|| files(folder.path()).is_empty());
}

#[test]
fn what_another_process_removes_is_promised_no_more() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    let n_told = Arc::new(AtomicU32::new(0));
    let told = Arc::clone(&n_told);
    store.on_change(Arc::new(move || _ = told.fetch_add(1, Ordering::Relaxed)));
    let kept: Vec<Token> = prompt(10).iter().map(|token| token + 5_000).collect();
    assert!(add(&store, &layout, &kept, 10));
    until(|| files(folder.path()).len() == 4 && store.report().written_bytes > 0);
    let (version, n_before) = (store.version(), n_told.load(Ordering::Relaxed));
    clear(folder.path(), &StoreKey::derive(b"key"), None, None).unwrap();
    until(|| store.find(SCOPE, &prompt(30)).n_tokens() == 0);
    until(|| store.version() != version && n_told.load(Ordering::Relaxed) > n_before);
    assert_eq!((store.held().len(), store.report().disk_bytes, refused(&store)), (1, 0, 0), "what is in memory stays");
    assert_eq!(store.report().disk_evictions, 4);
    drop(store);
    assert_eq!(files(folder.path()).len(), 0, "nor is it written at once");
}
