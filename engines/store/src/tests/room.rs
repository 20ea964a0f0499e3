//! Room in a folder: which blocks go first, and which files do not count.

use std::process::Command;
use std::time::SystemTime;

use super::super::ClearedKv;
use super::super::block::UsedFile;
use super::*;

/// A name as blocks have it.
fn block_name(digit: char) -> String {
    format!("{}.kv", digit.to_string().repeat(32))
}

#[test]
fn files_that_are_no_blocks_push_no_block_out_at_a_start() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let blocks = files(folder.path());
    let n_bytes: u64 = blocks.iter().map(|path| path.metadata().unwrap().len()).sum();
    let model = blocks[0].parent().unwrap().to_owned();
    // A block of another model of this key, which runs elsewhere.
    let other = model.with_file_name("other");
    fs::create_dir(&other).unwrap();
    fs::copy(model.join("about"), other.join("about")).unwrap();
    let large = 4 * n_bytes as usize;
    let torn = [&b"BATONKV2"[..], &vec![1; large]].concat();
    fs::write(model.join(block_name('a')), vec![0; large]).unwrap();
    fs::write(model.join(block_name('b')), &torn).unwrap();
    fs::write(other.join(block_name('c')), &torn).unwrap();
    // Neither named nor written by a store.
    let letters = ["holiday.kv", "0123.kv", "notes.txt"].map(|name| model.join(name));
    letters.iter().for_each(|path| fs::write(path, vec![0; large]).unwrap());

    let store = open(usize::MAX, disk(folder.path(), n_bytes), &layout);
    assert_eq!(store.find(SCOPE, &prompt(30)).n_tokens(), 30);
    assert_eq!((refused(&store), store.report().disk_evictions), (3, 0));
    assert!(blocks.iter().all(|path| path.exists()) && letters.iter().all(|path| path.exists()));
    assert_eq!(['a', 'b'].map(|digit| model.join(block_name(digit)).exists()), [false; 2]);
    assert!(!other.join(block_name('c')).exists());
}

#[test]
fn blocks_that_save_less_with_each_byte_go_first_even_if_they_were_used_last() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let chat = |chat: u32| prompt(40).iter().map(|token| token + 10_000 * chat).collect::<Vec<Token>>();
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert!(add(&store, &layout, &chat(1), 40));
    until(|| files(folder.path()).len() == 1);
    // A label is longer than the rows of a position.
    assert!(add(&store, &layout, &chat(2), 1));
    until(|| files(folder.path()).len() == 41 && store.shared().tree().next_to_write().is_none());
    drop(store);
    let n_bytes: u64 = files(folder.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
    let store = open(usize::MAX, disk(folder.path(), n_bytes / 2), &layout);
    let n_kept = [1, 2].map(|i| store.find(SCOPE, &chat(i)).n_tokens());
    let n_evicted = store.report().disk_evictions as usize;
    assert_eq!(
        (n_kept[0], n_kept[1]),
        (40, 40 - n_evicted),
        "the first ones of the other outlive those that continue them"
    );
    assert!((15..40).contains(&n_evicted), "{n_evicted}");
}

#[test]
fn a_shared_beginning_is_never_older_than_what_continues_it() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert!(add(&store, &layout, &prompt(20), 10));
    until(|| files(folder.path()).len() == 2 && store.shared().tree().next_to_write().is_none());
    let [begin, end] = [0, 10].map(|p0| {
        let used = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
        let mut files = files(folder.path());
        files.sort_by_key(used);
        // The first block of a prompt counts as used last.
        files.remove(usize::from(p0 == 0))
    });
    let used = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let file = |p0, path: &PathBuf, cost| UsedFile { p0, name: name(path), cost };
    let shared = store.shared();
    let own = shared.folder.get().unwrap();
    own.note_use(&[file(10, &end, 1e9), file(0, &begin, 1.0)]);
    let later = used(&begin);
    assert!(later >= used(&end) && later > SystemTime::now(), "a deep block is worth much");
    own.note_use(&[file(0, &begin, 1.0)]);
    assert_eq!(used(&begin), later, "a short prompt has used it, too");
}

#[test]
fn a_block_pushes_out_none_of_those_that_it_continues() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(40), folder.path());
    let n_bytes: u64 = files(folder.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
    let small = tempfile::tempdir().unwrap();
    // Room for two blocks of four, and some more.
    let store = open(usize::MAX, disk(small.path(), n_bytes * 5 / 8), &layout);
    assert!(add(&store, &layout, &prompt(40), 10));
    until(|| store.shared().tree().next_to_write().is_none());
    assert_eq!((files(small.path()).len(), store.report().disk_evictions), (2, 0));
    drop(store);
    let store = open(usize::MAX, disk(small.path(), n_bytes), &layout);
    assert_eq!((store.find(SCOPE, &prompt(40)).n_tokens(), refused(&store)), (20, 0), "the first blocks");
}

#[test]
fn what_was_cleared_before_a_slow_folder_could_be_opened_is_forgotten_in_memory() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let about = files(folder.path())[0].with_file_name("about");
    fs::remove_file(&about).unwrap();
    // Opening the folder waits until somebody writes.
    assert!(Command::new("mkfifo").arg(&about).status().unwrap().success());
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    assert!(add(&store, &layout, &prompt(20), 10));
    assert_eq!(store.take_cleared(), None);
    clear(folder.path(), &StoreKey::derive(b"key"), None, None).unwrap();
    assert_eq!(store.find(SCOPE, &prompt(20)).n_tokens(), 20, "nobody could hear it");
    drop(fs::File::options().write(true).open(&about).unwrap());
    until(|| store.find(SCOPE, &prompt(20)).n_tokens() == 0);
    assert_eq!(store.take_cleared(), Some(ClearedKv::All), "its owner hears it, too");
}
