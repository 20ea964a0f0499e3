//! Conversations that leave the cache: never without the states of their end.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use baton_schemas::held::HeldPiece;
use baton_schemas::kv::{Codec, Fingerprint};
use baton_schemas::sequence::CachedTokens;
use baton_schemas::{CacheScope, Token};
use baton_store::{DiskOptions, KvStore, StoreKey, StoreOptions};
use tokio::sync::oneshot;

use super::super::super::described::IdleKv;
use super::super::super::jobs::SchedulerMessage;
use super::super::Storing;
use super::handoffs::pulled;
use super::pulls::Script;
use super::strict::{layout, reply};
use super::{AgentTrace, CONTROL, Events, Received, Rig, STATE, request, said, text};

impl Rig {
    /// The same, which moves idle conversations out of the cache.
    pub(super) fn storing(self) -> Rig {
        self.storing_in(None)
    }

    /// The same with a store that is also in a folder.
    fn storing_in(mut self, disk: Option<DiskOptions>) -> Rig {
        let layout = Arc::new(layout());
        let model = Fingerprint { vocabulary: [0; 32], weights: [0; 32] };
        let options = StoreOptions { memory_bytes: self.host_bytes, disk };
        let store = KvStore::open(options, StoreKey::derive(b"test"), &model, Arc::clone(&layout)).unwrap();
        let storing = Storing::new(store, layout, IdleKv::Moves, Arc::new(|| {})).fast();
        self.scheduler = self.scheduler.with_store(Some(storing));
        self
    }
}

#[test]
fn an_idle_conversation_leaves_the_cache_with_its_states_and_comes_back() {
    let mut rig = Rig::new(2, 4_096).storing();
    let first = [text(1, 600), said(2, 60)].concat();
    let a = AgentTrace::n_before_reply(&first);
    rig.ask(&first, 20);
    let slot = (0..2).find(|&slot| !rig.scheduler.slots[slot].kv.is_empty()).unwrap();
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots[slot].kv.is_empty());
    let answer = reply(&first, 20);
    assert_eq!(rig.ask(&[&first[..], &answer, &said(3, 30)].concat(), 8), first.len() + 19);
    // Back to a checkpoint of one that is in the store.
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots[slot].kv.is_empty());
    assert_eq!(rig.ask(&[&first[..a], &[CONTROL, 4], &answer[10..], &said(3, 30)].concat(), 8), a);
}

#[test]
fn what_is_not_exact_is_stored_with_its_mark_and_is_not_handed_on() {
    let mut rig = Rig::new(2, 4_096).storing();
    let first = [text(1, 600), said(2, 60)].concat();
    let a = AgentTrace::n_before_reply(&first);
    rig.ask(&first, 20);
    let slot = (0..2).find(|&slot| !rig.scheduler.slots[slot].kv.is_empty()).unwrap();
    rig.scheduler.slots[slot].mark_lossy(300);
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots[slot].kv.is_empty(), "it is in the store");
    assert_eq!(rig.scheduler.slots[slot].lossy_from, None);
    let next = [&first[..], &reply(&first, 20), &said(3, 30)].concat();
    assert_eq!(rig.ask(&next, 8), first.len() + 19, "and comes back");
    let slot = rig.scheduler.slots.iter().find(|slot| slot.kv.starts_with(&next)).unwrap();
    assert_eq!(slot.lossy_from, Some(300));
    let pieces = rig.scheduler.held().pieces;
    let end = |piece: &HeldPiece| piece.from as usize + piece.tokens.len();
    let longest = pieces.iter().max_by_key(|piece| end(piece)).unwrap();
    assert!(end(longest) >= next.len() && !longest.is_exact, "others plan without it");
    assert!(pieces.iter().filter(|piece| !piece.is_exact).all(|piece| end(piece) > 300), "and with what is before it");
    let before = rig.scheduler.context.n_computed;
    rig.export(&first[..a], 0);
    assert!(rig.scheduler.context.n_computed - before >= a - 300, "another node gets what is computed");
}

#[test]
fn an_idle_conversation_that_fits_no_memory_stays_in_the_cache() {
    let mut rig = Rig::with_memory(2, 4_096, 400).storing();
    let first = [text(1, 100), said(2, 20)].concat();
    rig.ask(&first, 20);
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots.iter().all(|state| !state.kv.is_empty()));
    assert_eq!(rig.ask(&[&first[..], &reply(&first, 20), &said(3, 30)].concat(), 8), first.len() + 19);
}

#[test]
fn without_memory_for_checkpoints_only_the_end_can_be_continued() {
    let mut rig = Rig::with_memory(2, 4_096, STATE - 1).storing();
    let prompt = text(1, 300);
    assert_eq!(rig.ask(&prompt, 8), 0);
    assert_eq!(rig.ask(&[&prompt[..], &reply(&prompt, 8), &text(3, 9)].concat(), 8), 307);
    assert_eq!(rig.ask(&prompt, 8), 0);
    // The size is known after the first.
    assert_eq!(rig.scheduler.context.n_taken, 1);
}

#[test]
fn between_two_tokens_of_a_stream_one_block_comes_back() {
    const N_STREAMED: usize = 100;
    let mut rig = Rig::new(3, 4_096).storing();
    let long = text(1, 700);
    rig.ask(&long, 8);
    // Copies may take a part of the prefill's time.
    rig.scheduler.prefill_tps = 1e-3;
    let stream = text(9, 100);
    let mut streaming = rig.submit(request(&stream, N_STREAMED));
    let mut received = [Received::default(), Received::default()];
    while received[0].tokens.is_empty() {
        rig.turn();
        received[0].take(&mut streaming);
    }
    assert_eq!(rig.scheduler.slots.iter().filter(|slot| !slot.kv.is_empty()).count(), 1, "the long one has left");

    // Longer than a step beside streams has for it.
    rig.scheduler.context.restore_takes = Duration::from_millis(3);
    let back = rig.submit(request(&[&long[..], &reply(&long, 8), &said(3, 20)].concat(), 4));
    let mut events = [streaming, back];
    let mut n_steps = 0;
    while received[1].cached == CachedTokens::default() {
        let before = (rig.scheduler.context.n_restored, received[0].tokens.len());
        rig.turn();
        received.iter_mut().zip(&mut events).for_each(|(received, events)| received.take(events));
        let n_rows = rig.scheduler.context.n_restored - before.0;
        assert!(n_rows <= 64, "{n_rows} rows in a step");
        assert_eq!(received[0].tokens.len(), before.1 + 1, "the stream goes on");
        n_steps += 1;
    }
    assert!(n_steps > 707 / 64, "{n_steps}");
    assert_eq!(received[1].cached, CachedTokens { n_cached: 707, memory: 707, disk: 0 });
    let report = rig.scheduler.storing.as_ref().unwrap().store().report();
    assert!(report.most_step_tokens <= 64 && report.shared_steps >= 707 / 64, "{report:?}");
    let outcomes = rig.outcomes(&mut events);
    assert_eq!([&received[0].tokens[..], &outcomes[0].tokens].concat(), reply(&stream, N_STREAMED));
}

#[test]
fn another_scope_computes_every_token_of_a_stored_prompt() {
    let mut rig = Rig::new(2, 4_096).storing();
    let prompt = text(1, 300);
    rig.ask_as(CacheScope(1), &prompt, 8);
    rig.ask(&text(9, 300), 8);
    let theirs = rig.ask_as(CacheScope(2), &prompt, 8);
    assert_eq!((theirs.cached, theirs.n_computed), (CachedTokens::default(), 300));
    rig.ask(&text(9, 400), 8);
    let again = rig.ask_as(CacheScope(1), &prompt, 8);
    assert_eq!((again.cached, again.n_computed), (CachedTokens { n_cached: 299, memory: 299, disk: 0 }, 1));
}

#[test]
fn what_comes_back_more_slowly_than_it_is_computed_is_computed() {
    let mut rig = Rig::new(2, 4_096).storing();
    let prompt = text(1, 300);
    rig.ask(&prompt, 8);
    rig.ask(&text(9, 300), 8);
    rig.scheduler.prefill_tps = 1e6;
    rig.scheduler.storing = rig.scheduler.storing.take().map(|storing| storing.measured(1e3));
    let computed = rig.ask_as(CacheScope::SHARED, &prompt, 8);
    assert_eq!((computed.cached, computed.n_computed), (CachedTokens::default(), 300));
}

fn disk(folder: &Path, max_bytes: u64) -> Option<DiskOptions> {
    let (max_written_a_day, codec) = (u64::MAX, Codec::None);
    Some(DiskOptions { folder: folder.to_owned(), max_bytes, max_written_a_day, codec, model: "tiny".into() })
}

/// Lets an engine answer and keep a prompt in a folder, and ends it.
fn keep(folder: &Path, max_bytes: u64) {
    let mut rig = Rig::new(2, 4_096).storing_in(disk(folder, max_bytes));
    rig.ask(&text(1, 300), 8);
    while rig.scheduler.store_while_idle() {}
    // The next one does not wait for the disk.
    rig.ask(&text(2, 300), 8);
}

#[test]
fn an_engine_that_ends_stores_the_conversation_that_has_just_ended() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(2, 4_096).storing_in(disk(folder.path(), u64::MAX));
    rig.ask(&text(1, 300), 8);
    assert_eq!(rig.scheduler.storing.as_ref().unwrap().store().report().blocks, 0);
    rig.scheduler.take(SchedulerMessage::Store(oneshot::channel().0));
    let (again, n_refused) = asked_again(folder.path());
    assert_eq!((again.cached.n_cached, n_refused), (299, 0));
}

#[test]
fn a_conversation_that_ends_beside_one_stream_is_stored_and_stays_in_the_cache() {
    let mut rig = Rig::new(2, 4_096).storing();
    let _stream = rig.submit(request(&text(9, 100), 2_000));
    let prompt = text(1, 300);
    rig.ask(&prompt, 8);
    (0..20).for_each(|_| rig.turn());
    let storing = rig.scheduler.storing.as_ref().unwrap();
    assert_eq!(storing.n_common(CacheScope::SHARED, &prompt), 300);
    assert!(rig.scheduler.slots.iter().any(|slot| !slot.busy && slot.kv.starts_with(&prompt)));
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let (folders, mut files): (Vec<PathBuf>, Vec<PathBuf>) =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).partition(|path| path.is_dir());
    files.extend(folders.iter().flat_map(|folder| self::files(folder)));
    files.sort();
    files
}

fn blocks(folder: &Path) -> Vec<PathBuf> {
    files(folder).into_iter().filter(|path| path.to_string_lossy().ends_with(".kv")).collect()
}

/// A restarted engine's reply to the prompt, which is right.
fn asked_again(folder: &Path) -> (Received, u64) {
    let mut rig = Rig::new(2, 4_096).storing_in(disk(folder, u64::MAX));
    let received = rig.ask_as(CacheScope::SHARED, &text(1, 300), 8);
    let storing = rig.scheduler.storing.as_ref().unwrap();
    (received, storing.store().report().refused_files)
}

#[test]
fn a_restarted_engine_finds_a_prompt_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), u64::MAX);
    let (received, n_refused) = asked_again(folder.path());
    assert_eq!((received.cached, received.n_computed), (CachedTokens { n_cached: 299, memory: 0, disk: 299 }, 1));
    assert_eq!(n_refused, 0);
}

#[test]
fn a_damaged_block_costs_no_request_and_what_it_held_is_computed() {
    let whole = tempfile::tempdir().unwrap();
    keep(whole.path(), u64::MAX);
    let blocks = blocks(whole.path());
    let n_files = blocks.len();
    let mut n_all = 0;
    for (idx, damaged) in blocks.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        for path in &files(whole.path()) {
            let copy = folder.path().join(path.strip_prefix(whole.path()).unwrap());
            fs::create_dir_all(copy.parent().unwrap()).unwrap();
            let mut bytes = fs::read(path).unwrap();
            if path == damaged {
                // The end is that of the rows; the beginning, that of the label.
                let at = if idx % 2 == 0 { bytes.len() - 40 } else { 30 };
                bytes[at] ^= 1;
            }
            fs::write(copy, bytes).unwrap();
        }
        let (received, n_refused) = asked_again(folder.path());
        assert_eq!(received.cached.n_cached + received.n_computed, 300, "file {idx}: {received:?}");
        n_all += n_refused;
    }
    assert!(n_all as usize >= n_files / 2, "{n_all} were refused");
}

#[test]
fn a_full_disk_costs_no_request() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), 10);
    assert_eq!(blocks(folder.path()), Vec::<PathBuf>::new());
    assert_eq!(asked_again(folder.path()).0.cached, CachedTokens::default());
}

/// The end of a prefill of 300 tokens, whose last one was decoded.
const N_STORED: u32 = 299;

/// A prompt whose beginning is on disk; its end comes from another node.
fn continued() -> Vec<Token> {
    [text(1, 300), said(2, 400)].concat()
}

/// A restarted engine that has begun such a prompt, and where its pull began.
fn begun(folder: &Path) -> (Rig, Events, Vec<(u32, u32)>) {
    begun_with(folder, Script::default())
}

fn begun_with(folder: &Path, script: Script) -> (Rig, Events, Vec<(u32, u32)>) {
    let mut rig = Rig::new(2, 4_096).storing_in(disk(folder, u64::MAX));
    *rig.peer.script.lock().unwrap() = script;
    let events = rig.submit(pulled(&continued(), 8));
    rig.scheduler.fill_slots();
    let pulls = rig.peer.pulled.lock().unwrap().clone();
    (rig, events, pulls)
}

#[test]
fn what_follows_a_stored_prefix_is_pulled_while_it_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), u64::MAX);
    let prompt = continued();
    let a = AgentTrace::n_before_reply(&prompt) as u32;
    let (mut rig, events, pulls) = begun(folder.path());
    assert_eq!(pulls, [(N_STORED, a)], "it has begun");
    let is_restoring = |rig: &Rig| rig.scheduler.running.iter().flatten().any(|s| s.restoring.is_some());
    assert!(is_restoring(&rig) && rig.scheduler.slots.iter().all(|slot| slot.kv.is_empty()));
    // Nothing that has come is taken before its beginning is here.
    rig.scheduler.import_chunks();
    assert!(rig.scheduler.slots.iter().all(|slot| slot.kv.is_empty()));
    let outcome = rig.outcomes(&mut [events]).remove(0);
    assert_eq!((&outcome.error, &outcome.tokens), (&None, &reply(&prompt, 8)));
    assert_eq!(outcome.cached, CachedTokens { n_cached: N_STORED, memory: 0, disk: N_STORED });
    assert_eq!((outcome.report.unwrap().n_tokens, outcome.n_computed), (a - N_STORED, prompt.len() as u32 - a));
    assert_eq!(rig.peer.pulled.lock().unwrap().len(), 1);
}

#[test]
fn a_restore_that_would_outlast_what_is_read_ahead_is_not_yet_accompanied_by_a_pull() {
    let folder = tempfile::tempdir().unwrap();
    keep(folder.path(), u64::MAX);
    let mut rig = Rig::new(2, 4_096).storing_in(disk(folder.path(), u64::MAX));
    // 299 tokens in 6 s, of which the last 3 s have 150.
    rig.scheduler.storing = rig.scheduler.storing.take().map(|storing| storing.measured(50.0));
    let mut events = [rig.submit(pulled(&continued(), 8))];
    rig.scheduler.fill_slots();
    assert_eq!(*rig.peer.pulled.lock().unwrap(), []);
    while rig.peer.pulled.lock().unwrap().is_empty() {
        rig.scheduler.restore_blocks();
        let n_restored = rig.scheduler.slots.iter().map(|slot| slot.kv.len()).max().unwrap();
        assert_eq!(rig.peer.pulled.lock().unwrap().is_empty(), n_restored < 149, "{n_restored} are back");
    }
    assert_eq!(rig.outcomes(&mut events)[0].tokens, reply(&continued(), 8));
}

#[test]
fn what_a_damaged_file_held_is_pulled_with_what_follows() {
    let prompt = continued();
    let a = AgentTrace::n_before_reply(&prompt) as u32;
    let mut found = Vec::new();
    for idx in 0.. {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), u64::MAX);
        let blocks = blocks(folder.path());
        let Some(damaged) = blocks.get(idx) else { break };
        let mut bytes = fs::read(damaged).unwrap();
        let at = bytes.len() - 40;
        bytes[at] ^= 1;
        fs::write(damaged, bytes).unwrap();
        let (mut rig, events, pulls) = begun(folder.path());
        let outcome = rig.outcomes(&mut [events]).remove(0);
        assert_eq!((&outcome.error, &outcome.tokens), (&None, &reply(&prompt, 8)), "file {idx}");
        let n_cached = outcome.cached.n_cached;
        let report = outcome.report.unwrap();
        assert_eq!((report.failure, report.n_tokens), (None, a - n_cached), "file {idx}");
        assert_eq!(outcome.n_computed, prompt.len() as u32 - a);
        if pulls == [(N_STORED, a)] && n_cached < N_STORED {
            assert_eq!(*rig.peer.pulled.lock().unwrap(), [(N_STORED, a), (n_cached, a)], "file {idx}");
            found.push(n_cached);
        }
    }
    assert!(!found.is_empty(), "rows that follow a gap were dropped");
}

#[test]
fn what_other_weights_computed_for_a_damaged_file_is_not_own_stored_or_passed_on() {
    let prompt = continued();
    let a = AgentTrace::n_before_reply(&prompt) as u32;
    let mut n_pulled_twice = 0;
    for (idx, distance) in (0..).flat_map(|idx| [(idx, Some(0.01)), (idx, None)]) {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), u64::MAX);
        let blocks = blocks(folder.path());
        let Some(damaged) = blocks.get(idx) else { break };
        let mut bytes = fs::read(damaged).unwrap();
        let at = bytes.len() - 40;
        bytes[at] ^= 1;
        fs::write(damaged, bytes).unwrap();
        let (mut rig, events, pulls) = begun_with(folder.path(), Script { distance, ..Script::default() });
        let outcome = rig.outcomes(&mut [events]).remove(0);
        assert_eq!((&outcome.error, &outcome.tokens), (&None, &reply(&prompt, 8)), "file {idx}");
        let n_own = outcome.cached.n_cached as usize;
        n_pulled_twice += usize::from(rig.peer.pulled.lock().unwrap().len() > pulls.len());
        let slot = rig.scheduler.slots.iter().find(|slot| slot.kv.starts_with(&prompt)).unwrap();
        let is_foreign = distance.is_some();
        assert_eq!(slot.foreign_from, is_foreign.then_some(n_own), "file {idx}");
        // It stays in its slot, and only what it had from the store is there.
        while rig.scheduler.store_while_idle() {}
        let in_store = rig.scheduler.storing.as_ref().unwrap().store().n_common(CacheScope::SHARED, &prompt);
        assert!(if is_foreign { in_store <= 300 } else { in_store == prompt.len() }, "file {idx}: {in_store}");
        // A node that asks for it gets what is computed here.
        let before = rig.scheduler.context.n_computed;
        rig.export(&prompt[..a as usize], 0);
        let n_computed = rig.scheduler.context.n_computed - before;
        assert_eq!(n_computed, if is_foreign { a as usize - n_own } else { 0 }, "file {idx}");
    }
    assert!(n_pulled_twice > 1, "no restore gave less than it promised");
}

#[test]
fn a_conversation_that_cannot_be_copied_is_forgotten_and_not_forked() {
    let mut rig = Rig::new(2, 4_096).storing();
    rig.ask(&[text(1, 150), said(2, 300)].concat(), 8);
    rig.scheduler.context.refuses_copies = true;
    assert_eq!(rig.ask(&[text(1, 150), said(3, 40)].concat(), 8), 0);
}
