//! Files that other processes write while a store uses their folder.

use super::super::ClearedKv;
use super::super::block::PlaceInPrompt;
use super::super::folder::BlockFolder;
use super::*;

/// Copies files to another folder's place of the same model.
fn copy(files: &[PathBuf], to: &KvStore, folder: &Path) {
    let model = to.shared().key.name(&to.shared().model);
    for file in files {
        fs::copy(file, folder.join(&model).join(file.file_name().unwrap())).unwrap();
    }
}

/// The files of 30 positions of a prompt, in their order.
fn three_blocks(layout: &Arc<KvLayout>, folder: &Path) -> Vec<PathBuf> {
    let mut in_order: Vec<PathBuf> = Vec::new();
    for n in [10, 20, 30] {
        drop_after_adding(layout, &prompt(n), folder);
        in_order.extend(files(folder).into_iter().filter(|file| !in_order.contains(file)).collect::<Vec<_>>());
    }
    assert_eq!(in_order.len(), 3);
    in_order
}

#[test]
fn what_one_store_writes_the_others_of_its_folder_find_without_a_restart() {
    for (window, has_state) in [(None, false), (Some(16), false), (Some(16), true)] {
        let layout = layout(window, has_state);
        let folder = tempfile::tempdir().unwrap();
        let stores = [(); 2].map(|()| open(usize::MAX, disk(folder.path(), u64::MAX), &layout));
        // In turn each writes what continues the other's blocks; at last a chat parts from them.
        let chats = [prompt(100), prompt(200), [prompt(100), vec![7; 50]].concat()];
        for (n, tokens) in chats.iter().enumerate() {
            let (writer, reader) = (&stores[n % 2], &stores[(n + 1) % 2]);
            assert!(add(writer, &layout, tokens, 64));
            until(|| reader.find(SCOPE, tokens).n_tokens() == tokens.len());
            let on_disk = reader.find(SCOPE, tokens).n_on_disk();
            let (blocks, n) = restored(reader, tokens);
            check(&layout, tokens, &blocks, n);
            assert!(on_disk > 0 && reader.find(CacheScope(9), tokens).n_tokens() == 0);
        }
        let written = stores.each_ref().map(|store| store.report().written_bytes);
        assert!(written.iter().all(|n| *n > 0) && stores.iter().all(|store| refused(store) == 0));
        until(|| stores.iter().all(|store| store.shared().tree().next_to_write().is_none()));
        assert_eq!(stores.each_ref().map(|store| store.report().written_bytes), written, "nothing is written twice");
    }
}

#[test]
fn a_store_forgets_what_is_cleared_in_its_folder_in_memory_too() {
    let (layout, other) = (layout(None, false), CacheScope(9));
    let folder = tempfile::tempdir().unwrap();
    let store = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    for scope in [SCOPE, other] {
        assert!(store.add(scope, &prompt(100), block(&layout, &prompt(100), 0, 100, false)));
    }
    until(|| store.shared().tree().next_to_write().is_none() && !files(folder.path()).is_empty());
    let remove = |scopes: Option<&[CacheScope]>| clear(folder.path(), &store.shared().key, None, scopes).unwrap();
    assert!(remove(Some(&[SCOPE])).n_files > 0);
    until(|| store.find(SCOPE, &prompt(100)).n_tokens() == 0);
    assert_eq!(store.find(other, &prompt(100)).n_tokens(), 100);
    assert_eq!(store.take_cleared(), Some(ClearedKv::Of(vec![SCOPE])));
    assert!(remove(None).n_files > 0);
    until(|| store.find(other, &prompt(100)).n_tokens() == 0);
    assert_eq!((store.take_cleared(), store.take_cleared()), (Some(ClearedKv::All), None));
    until(|| files(folder.path()).is_empty());
    // One that is opened later has nothing to forget.
    assert!(add(&store, &layout, &prompt(100), 64));
    let later = open(usize::MAX, disk(folder.path(), u64::MAX), &layout);
    until(|| later.find(SCOPE, &prompt(100)).n_tokens() == 100);
    assert_eq!(later.take_cleared(), None);
}

#[test]
fn a_block_of_another_store_waits_for_the_one_before_it_and_leaves_with_its_scope() {
    let layout = layout(None, false);
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let blocks = three_blocks(&layout, from.path());
    for is_forgotten in [false, true] {
        let store = open(usize::MAX, disk(to.path(), u64::MAX), &layout);
        copy(&blocks[1..], &store, to.path());
        until(|| store.report().disk_bytes > 0);
        assert_eq!((store.find(SCOPE, &prompt(30)).n_tokens(), files(to.path()).len()), (0, 2));
        if is_forgotten {
            store.forget(SCOPE);
        }
        copy(&blocks[..1], &store, to.path());
        match is_forgotten {
            false => until(|| store.find(SCOPE, &prompt(30)).n_tokens() == 30),
            true => until(|| files(to.path()).is_empty()),
        }
        assert_eq!(refused(&store), 0);
        drop(store);
        clear(to.path(), &StoreKey::derive(b"key"), None, None).unwrap();
    }
}

#[test]
fn a_damaged_file_of_another_store_is_refused_and_removed() {
    let layout = layout(None, false);
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let blocks = three_blocks(&layout, from.path());
    fs::write(&blocks[2], b"torn").unwrap();
    let store = open(usize::MAX, disk(to.path(), u64::MAX), &layout);
    copy(&blocks, &store, to.path());
    until(|| store.find(SCOPE, &prompt(30)).n_tokens() == 20 && refused(&store) == 1);
    assert_eq!(files(to.path()).len(), 2);
}

#[test]
fn of_many_new_files_each_is_read_once_and_no_more_than_the_bound_at_a_time() {
    let layout = layout(None, false);
    let folder = tempfile::tempdir().unwrap();
    let key = StoreKey::derive(b"key");
    let model = open(0, None, &layout).shared().model;
    let looking = BlockFolder::open(disk(folder.path(), u64::MAX).unwrap(), &key, &model).unwrap();
    three_blocks(&layout, folder.path());
    let looks: Vec<usize> =
        std::iter::repeat_with(|| looking.look(2).unwrap().unwrap().new.len()).take_while(|n| *n > 0).collect();
    assert_eq!(looks, [2, 1]);
    assert_eq!(looking.look(2).unwrap().map_or(0, |content| content.new.len()), 0);
    // Its own files are not new.
    looking.write(&key.name(b"own"), b"block", &PlaceInPrompt::default()).unwrap();
    let content = looking.look(2).unwrap().unwrap();
    assert_eq!((content.names.len(), content.new.len()), (4, 0));
}
