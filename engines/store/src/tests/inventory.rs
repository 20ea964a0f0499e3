//! The report on a folder for people, in any state of it.

use std::process::Command;

use super::super::{Verified, WrittenDay, keep_scopes, list};
use super::*;

fn key() -> StoreKey {
    StoreKey::derive(b"key")
}

#[test]
fn days_of_a_wrong_clock_neither_lift_the_limit_nor_stand_for_today() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let disk = DiskOptions { max_written_a_day: 3_000, ..disk(folder.path(), u64::MAX).unwrap() };
    drop(open(usize::MAX, Some(disk.clone()), &layout));
    // Days of the year 2052, as many as are remembered.
    let days: String = (30_000..30_007).map(|day| format!("{day} 5\n")).collect();
    fs::write(folder.path().join("written"), days).unwrap();
    for chat in 0..10 {
        let store = open(usize::MAX, Some(disk.clone()), &layout);
        let tokens: Vec<Token> = prompt(20).iter().map(|token| token + 10_000 * chat).collect();
        assert!(add(&store, &layout, &tokens, 20));
    }
    let inventory = list(folder.path(), &key()).unwrap();
    // Midnight may have passed.
    let n_days = inventory.written.len() as u64;
    let n_written: u64 = inventory.written.iter().map(|day| day.n_bytes).sum();
    assert!(inventory.n_bytes <= n_days * 3_000 && inventory.n_bytes > 0, "{} bytes", inventory.n_bytes);
    assert_eq!(inventory.n_bytes, n_written);
    assert!(inventory.written.iter().all(|WrittenDay { days_ago, .. }| *days_ago <= 1));
}

#[test]
fn a_model_whose_name_is_damaged_is_listed_and_verified_all_the_same() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let block = files(folder.path()).remove(0);
    fs::write(block.parent().unwrap().join("about"), b"torn").unwrap();
    let models = || list(folder.path(), &key()).unwrap().models;
    assert_eq!((&models()[0].model, models()[0].scopes[0].n_blocks), (&None, 3));
    let mut bytes = fs::read(&block).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&block, bytes).unwrap();
    let Verified { n_right, removed, n_of_other_keys, .. } = verify(folder.path(), &key()).unwrap();
    assert_eq!((n_right, &removed, n_of_other_keys), (2, &vec![block], 0));
    drop_after_adding(&layout, &prompt(30), folder.path());
    assert_eq!(models()[0].model.as_deref(), Some("tiny"), "the next engine names it again");
}

#[test]
fn a_file_that_the_disk_does_not_give_keeps_no_other_from_being_verified() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    // A link to itself cannot be opened.
    let unread = files(folder.path())[0].with_file_name("00000000000000000000000000000000.kv");
    std::os::unix::fs::symlink(&unread, &unread).unwrap();
    let verified = verify(folder.path(), &key()).unwrap();
    assert_eq!((verified.n_right, &verified.unread, verified.removed.len()), (3, &vec![unread], 0));
}

#[test]
fn a_pipe_among_the_blocks_holds_up_nobody() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    drop_after_adding(&layout, &prompt(30), folder.path());
    let pipe = files(folder.path())[0].with_file_name("ffffffffffffffffffffffffffffffff.kv");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let waiting = std::thread::spawn({
        let folder = folder.path().to_owned();
        move || (list(&folder, &key()).unwrap().models[0].scopes[0].n_blocks, verify(&folder, &key()).unwrap().n_right)
    });
    until(|| waiting.is_finished());
    assert_eq!(waiting.join().unwrap(), (3, 3));
    assert!(pipe.exists(), "it is not touched");
}

#[test]
fn a_list_of_keys_that_is_no_text_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let keep = || keep_scopes(folder.path(), &key(), "endpoint", &[SCOPE]).unwrap();
    keep();
    let of_keys = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("keys-");
    let path = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).find(of_keys).unwrap();
    let right = fs::read(&path).unwrap();
    fs::write(&path, b"\xff\xfe\n\xff").unwrap();
    assert_eq!(keep().n_files, 0);
    assert_eq!(fs::read(&path).unwrap(), right);
}
