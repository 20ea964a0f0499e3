//! The store's files beside their users: slow and hung disks, and other processes.

use std::fs::File;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use super::*;
use crate::file::{BlockLabel, FilePart, decode, encode};

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
fn only_the_states_at_the_end_of_a_prompt_are_read() {
    /// Bytes of a block's sealed states: nonce, 12 bytes, tag.
    const STATES: u64 = 32 + 12 + 32;
    let layout = layout(None, true);
    let folder = tempfile::tempdir().unwrap();
    let turns = [prompt(10), prompt(25), prompt(40)];
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    let mut written: Vec<PathBuf> = Vec::new();
    for turn in &turns {
        assert!(add(&store, &layout, turn, 20));
        until(|| files(folder.path()).len() > written.len());
        let new = files(folder.path()).into_iter().find(|path| !written.contains(path));
        written.extend(new);
    }
    drop(store);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    for turn in turns.iter().rev() {
        let (blocks, n) = restored(&store, turn);
        check(&layout, turn, &blocks, n);
        let with_states: Vec<bool> = blocks.iter().map(|block| block.state.is_some()).collect();
        assert_eq!((n, with_states.iter().filter(|it| **it).count()), (turn.len(), 1), "{with_states:?}");
        assert_eq!(with_states.last(), Some(&true));
    }
    drop(store);

    for path in &written[..2] {
        let file = File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - STATES).unwrap();
    }
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    let (blocks, n) = restored(&store, &turns[2]);
    assert_eq!((n, blocks.len()), (40, 3), "nobody needs the states within");
    check(&layout, &turns[2], &blocks, n);
    let first = store.find(SCOPE, &turns[0]);
    let mut restore = store.restore(&first, Arc::new(|| {}));
    until_failed(&mut restore);
    assert_eq!(refused(&store), 1, "what ends there cannot go on");
}

#[test]
fn states_of_another_file_and_rows_in_their_place_do_not_open() {
    // A row has as many bytes as the states.
    let rows = Rows { dtype: Dtype::F16, n_values: 6 };
    let section =
        Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers: vec![LayerShape { k: rows, v: None }] };
    let state = StateShape { kind: StateKind::Recurrence, values: Rows { dtype: Dtype::F32, n_values: 3 } };
    let layout = KvLayout { rope: RopePairing::None, sections: vec![section], states: vec![state] };
    let key = StoreKey::derive(b"key");
    let file_of = |value: u8| {
        let values = Bytes::from(vec![value; 12]);
        let layers = vec![LayerRows { k: values.clone(), v: Bytes::new() }];
        let chunk = Chunk { p0: 0, p1: 1, sections: vec![SectionRows { start: 0, layers }] };
        let state = StatePart { position: 1, first: 0, tensors: vec![values] };
        let block = KvBlock { chunk, state: Some(state), is_lossy: false };
        let label = BlockLabel::of([1; 32], SCOPE, [0; 32], &[7], &block);
        (encode(&key, &layout, Codec::None, &label, &block).unwrap(), label)
    };
    let ((first, label), (second, _)) = (file_of(1), file_of(2));
    let opens = |file: Vec<u8>| decode(&key, &layout, &label, (file, FilePart::All)).is_ok();
    let n_sealed = 32 + 12 + 32;
    let (before, sealed) = first.split_at(first.len() - 2 * n_sealed);
    let (rows, states) = sealed.split_at(n_sealed);
    let others = &second[second.len() - n_sealed..];
    assert!(opens([before, rows, states].concat()));
    for parts in [[rows, others], [rows, rows], [states, rows], [states, states]] {
        assert!(!opens([before, parts[0], parts[1]].concat()));
    }
}

fn until_failed(restore: &mut crate::Restore) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match restore.poll() {
            Restored::Pending if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Restored::Failed => return,
            other => panic!("{other:?}"),
        }
    }
}

/// Makes a block that can be opened once somebody writes: a link to a pipe.
fn pipe_at(block: &Path) -> PathBuf {
    let pipe = block.with_extension("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::os::unix::fs::symlink(&pipe, block).unwrap();
    pipe
}

#[test]
fn a_slow_disk_does_not_hold_up_the_start_and_what_it_has_is_found_later() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    // Reading it waits until somebody writes.
    let model = files(folder.path())[0].parent().unwrap().to_owned();
    let slow = model.join("00000000000000000000000000000000.kv");
    let slow_pipe = pipe_at(&slow);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert_eq!(store.find(SCOPE, &prompt(30)).n_tokens(), 0, "its folder is still being read");
    // Meanwhile it is a store in memory, which computes the beginning once more.
    let longer = prompt(40);
    assert!(add(&store, &layout, &longer[..15], 10));
    assert_eq!(store.find(SCOPE, &longer).n_tokens(), 15);
    assert_eq!(written(&store), 0);

    drop(File::options().write(true).open(slow_pipe).unwrap());
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

/// Rows that are wide enough for a lossy codec.
fn wide_layout() -> Arc<KvLayout> {
    let rows = Rows { dtype: Dtype::F16, n_values: 32 };
    let layers = vec![LayerShape { k: rows, v: None }];
    let section = Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers };
    Arc::new(KvLayout { rope: RopePairing::None, sections: vec![section], states: Vec::new() })
}

/// Ten positions of it from `p0` on.
fn ten(p0: u32, is_lossy: bool) -> KvBlock {
    let layers = vec![LayerRows { k: Bytes::from(vec![0x3c; 10 * 64]), v: Bytes::new() }];
    let chunk = Chunk { p0, p1: p0 + 10, sections: vec![SectionRows { start: p0, layers }] };
    KvBlock { chunk, state: None, is_lossy }
}

#[test]
fn what_went_through_a_lossy_codec_keeps_its_mark_and_has_no_file_that_passes_for_exact() {
    let layout = wide_layout();
    let tokens = prompt(30);
    let marks =
        |store: &KvStore| -> Vec<bool> { restored(store, &tokens).0.iter().map(|block| block.is_lossy).collect() };
    for (codec, n_files, expected) in [(Codec::None, 1, &[false][..]), (Codec::Q8_0, 3, &[true, true, true])] {
        let folder = tempfile::tempdir().unwrap();
        let disk = || disk(folder.path(), u64::MAX).map(|disk| DiskOptions { codec, ..disk });
        let store = open(usize::MAX, disk(), &layout);
        // What continues a lossy block is of no use without it.
        let blocks = [(0, false), (10, true), (20, false)];
        assert!(blocks.iter().all(|(p0, is_lossy)| store.add(SCOPE, &tokens, ten(*p0, *is_lossy))));
        assert_eq!(marks(&store), [false, true, false], "memory");
        let n_found = |store: &KvStore, wanted| store.find_kv(SCOPE, &tokens, wanted).n_tokens();
        assert_eq!([WantedKv::Any, WantedKv::Lossless].map(|wanted| n_found(&store, wanted)), [30, 10]);
        until(|| files(folder.path()).len() == n_files && store.shared().tree().next_to_write().is_none());
        // Its use does not bring it a file.
        assert_eq!(marks(&store).len(), 3);
        assert!(store.shared().tree().next_to_write().is_none());
        drop(store);
        let found = open(usize::MAX, disk(), &layout);
        assert!(found.held().iter().map(|piece| !piece.is_exact).eq(expected.iter().copied()), "{codec:?}");
        assert_eq!(marks(&found), expected, "{codec:?}");
        let n_lossless = if codec.is_lossy() { 0 } else { 10 };
        assert_eq!(n_found(&found, WantedKv::Lossless), n_lossless, "{codec:?}");
    }
}

#[test]
fn exact_kv_that_was_looked_for_takes_the_place_of_other_kv() {
    let layout = wide_layout();
    let tokens = prompt(30);
    let folder = tempfile::tempdir().unwrap();
    let disk_of = |codec| disk(folder.path(), u64::MAX).map(|disk| DiskOptions { codec, ..disk });
    // An engine has exact KV of the first 20 tokens.
    let n_copied = |store: &KvStore, n_lossless: usize| {
        let ranges = std::iter::repeat_with(|| store.next_to_copy(SCOPE, &tokens, n_lossless, 10));
        let ranges = ranges.take_while(|range| !range.is_empty());
        ranges.inspect(|range| assert!(store.add(SCOPE, &tokens, ten(range.start as u32, false)))).count()
    };
    let n_exact = |store: &KvStore| store.find_kv(SCOPE, &tokens, WantedKv::Lossless).n_tokens();
    let store = open(usize::MAX, disk_of(Codec::Q8_0), &layout);
    assert_eq!(n_copied(&store, 30), 3, "nothing of it was there");
    drop(store);
    let store = open(usize::MAX, disk_of(Codec::Q8_0), &layout);
    assert_eq!(n_copied(&store, 20), 0, "nobody wants it exactly");
    assert_eq!((n_exact(&store), n_copied(&store, 20), n_exact(&store)), (0, 2, 20));
    assert_eq!(store.find(SCOPE, &tokens).n_tokens(), 30);
    assert_eq!(
        restored(&store, &tokens).0.iter().map(|block| block.is_lossy).collect::<Vec<_>>(),
        [false, false, true]
    );
    drop(store);
    // Memory has no room for what is copied: that ends all the same.
    let store = open(640, disk_of(Codec::Q8_0), &layout);
    assert_eq!((n_exact(&store), n_copied(&store, 20)), (0, 2));
    assert!(store.report().memory_bytes <= 640);
    drop(store);

    // In files without loss, it can be written now.
    let folder = tempfile::tempdir().unwrap();
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert!([0, 10, 20].iter().all(|p0| store.add(SCOPE, &tokens, ten(*p0, true))));
    assert_eq!((n_exact(&store), n_copied(&store, 30)), (0, 3));
    until(|| files(folder.path()).len() == 3);
    drop(store);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert_eq!(n_exact(&store), 30);
}

#[test]
fn what_is_forgotten_while_a_slow_disk_is_read_is_gone_when_it_was_read() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let kept = files(folder.path());
    let slow = kept[0].parent().unwrap().join("00000000000000000000000000000000.kv");
    let slow_pipe = pipe_at(&slow);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    store.forget(SCOPE);
    drop(File::options().write(true).open(slow_pipe).unwrap());
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
            pipe_at(path);
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

    // The disk answers again. Each file is back, and whole, before a thread can read on: of two that read one pipe, the second
    // would get nothing.
    for ((_, bytes), path) in hung.iter().zip(&files) {
        let whole = path.with_extension("whole");
        fs::write(&whole, bytes).unwrap();
        fs::rename(&whole, path).unwrap();
    }
    for (mut pipe, bytes) in hung {
        pipe.write_all(&bytes).unwrap();
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
    files(folder.path()).iter().for_each(|file| fs::remove_file(file).unwrap());
    until(|| store.find(SCOPE, &prompt(30)).n_tokens() == 0);
    until(|| store.version() != version && n_told.load(Ordering::Relaxed) > n_before);
    assert_eq!((store.held().len(), store.report().disk_bytes, refused(&store)), (1, 0, 0), "what is in memory stays");
    assert_eq!(store.report().disk_evictions, 4);
    drop(store);
    assert_eq!(files(folder.path()).len(), 0, "nor is it written at once");
}

#[test]
fn a_folder_that_somebody_has_emptied_gets_nothing_until_a_restart_and_is_used_then() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert!(add(&store, &layout, &prompt(10), 10));
    until(|| written(&store) > 0);
    for entry in fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() { fs::remove_dir_all(entry).unwrap() } else { fs::remove_file(entry).unwrap() }
    }
    let other: Vec<Token> = prompt(10).iter().map(|token| token + 5_000).collect();
    assert!(add(&store, &layout, &other, 10));
    until(|| store.report().failed_writes > 0);
    drop(store);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "it may be the place of a disk");
    drop_after_adding(&layout, &prompt(10), folder.path());
    assert_eq!(files(folder.path()).len(), 1);
}

#[test]
fn blocks_that_a_wrong_clock_has_marked_push_out_nothing_that_is_written_later() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let chat = |chat: u32| prompt(10).iter().map(|token| token + 10_000 * chat).collect::<Vec<Token>>();
    (3..6).for_each(|i| drop_after_adding(&layout, &chat(i), folder.path()));
    let next_year = SystemTime::now() + Duration::from_secs(365 * 86_400);
    for path in files(folder.path()) {
        File::options().write(true).open(path).unwrap().set_modified(next_year).unwrap();
    }
    let n_bytes = files(folder.path())[0].metadata().unwrap().len();
    let store = open(usize::MAX, disk(folder.path(), 7 * n_bytes / 2), &layout);
    for i in 1..3 {
        assert!(add(&store, &layout, &chat(i), 10));
        until(|| store.shared().tree().next_to_write().is_none());
    }
    drop(store);
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert_eq!([1, 2].map(|i| store.find(SCOPE, &chat(i)).n_tokens()), [10, 10]);
}

#[test]
fn what_killed_processes_have_left_unfinished_is_gone_at_a_start_once_it_is_old() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(10), folder.path());
    let model = files(folder.path())[0].parent().unwrap().to_owned();
    let left = [folder.path(), &model].map(|place| ["old", "new"].map(|name| place.join(format!(".new-{name}"))));
    for [old, new] in &left {
        fs::write(old, b"torn").unwrap();
        fs::write(new, b"torn").unwrap();
        let long_ago = SystemTime::now() - Duration::from_secs(2 * 3_600);
        File::options().write(true).open(old).unwrap().set_modified(long_ago).unwrap();
    }
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert_eq!(store.find(SCOPE, &prompt(10)).n_tokens(), 10);
    for [old, new] in &left {
        assert!(!old.exists() && new.exists(), "a living process may write the new one");
    }
}
