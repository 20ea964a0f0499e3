//! Idle conversations that leave the cache while others run.

use std::sync::Arc;

use baton_model::gguf::Gguf;
use baton_schemas::kv::Fingerprint;
use baton_schemas::sequence::{GeneratedToken, SequenceEvent};
use baton_schemas::{CacheScope, SequenceRequest, Token};
use baton_store::{KvStore, StoreKey, StoreOptions, WantedKv};
use llama_cpp_2::model::LlamaModel;

use super::super::super::slots;
use super::super::Storing;
use super::{Events, N_CELLS, Scheduler, loaded, real_model, received, request, scheduler, scheduler_of, submit, turn};
use crate::engine_options::EngineOptions;
use crate::llama::context::seq_id;
use crate::llama::probe;
use crate::serving::described::IdleKv;

/// A scheduler that moves idle conversations into a store.
pub(super) fn storing<'m>(
    model: &'m Arc<LlamaModel>,
    options: EngineOptions,
    n_cells: u32,
    memory_bytes: usize,
) -> Scheduler<'m> {
    let gguf = Gguf::open(options.path().unwrap()).unwrap();
    let n_slots = options.slots();
    let mut scheduler = scheduler_of(model, options, n_cells);
    let transfer = probe::probe(&mut scheduler.context.context, model, &gguf, n_slots, None).unwrap();
    let layout = Arc::clone(transfer.layout());
    scheduler.context = scheduler.context.with_transfer(Some(transfer), n_slots);
    let model = Fingerprint { vocabulary: [0; 32], weights: [0; 32] };
    let options = StoreOptions { memory_bytes, disk: None };
    let store = KvStore::open(options, StoreKey::derive(b"test"), &model, Arc::clone(&layout)).unwrap();
    scheduler.with_store(Some(Storing::new(store, layout, IdleKv::Moves, Arc::new(|| {})).fast()))
}

/// The reply to a prompt, which runs alone: the number of cached tokens, and the tokens with their log-probabilities.
fn reply(scheduler: &mut Scheduler<'_>, prompt: &[Token]) -> (u32, Vec<GeneratedToken>) {
    // Copies may take a part of the prefill's time. So slow a prefill leaves time for all of them, however busy the machine is.
    scheduler.prefill_tps = 1e-3;
    let mut events = submit(scheduler, request(prompt.to_vec()));
    rest_of(scheduler, &mut events)
}

/// The same for a prompt that was submitted.
fn rest_of(scheduler: &mut Scheduler<'_>, events: &mut Events) -> (u32, Vec<GeneratedToken>) {
    let mut n_cached = None;
    let mut tokens = Vec::new();
    for _ in 0..100 {
        turn(scheduler);
        while let Ok(event) = events.try_recv() {
            match event.unwrap() {
                SequenceEvent::Started(cached) => n_cached = Some(cached.n_cached),
                SequenceEvent::Token(token) => tokens.push(token),
                SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
                SequenceEvent::Finished { .. } => return (n_cached.unwrap(), tokens),
            }
        }
    }
    panic!("the reply did not end");
}

/// The prompt of a conversation's next turn.
fn next_turn(prompt: &[Token], reply: &[GeneratedToken]) -> Vec<Token> {
    prompt.iter().copied().chain(reply.iter().map(|token| token.id)).chain(prompt[20..40].iter().copied()).collect()
}

/// Tokens of a slot in llama.cpp's cache.
fn n_cells(scheduler: &Scheduler<'_>, slot: usize) -> usize {
    usize::try_from(scheduler.context.context.kv_cache_seq_pos_max(seq_id(slot)) + 1).unwrap()
}

/// One conversation goes on after another had the cache, as if it had been alone.
fn a_conversation_comes_back(model: &Arc<LlamaModel>, options: &EngineOptions, first: &[Token], other: &[Token]) {
    const CELLS: u32 = 2048;
    // With a store, too: what is copied while a prompt is computed ends a chunk.
    let mut alone = storing(model, options.clone(), CELLS, usize::MAX);
    let (_, expected) = reply(&mut alone, first);
    let second = next_turn(first, &expected);
    let (n_cached, expected_second) = reply(&mut alone, &second);

    let mut scheduler = storing(model, options.clone(), CELLS, usize::MAX);
    assert_eq!(reply(&mut scheduler, first), (0, expected));
    let slot = (0..2).find(|&slot| !scheduler.slots[slot].kv.is_empty()).unwrap();
    reply(&mut scheduler, other);
    assert!(scheduler.slots[slot].kv.is_empty() && !scheduler.slots[1 - slot].kv.is_empty());
    assert_eq!((n_cells(&scheduler, slot), slots::cells_in_use(&scheduler.slots)), (0, n_cells(&scheduler, 1 - slot)));
    // To the bit: its log-probabilities are equal.
    assert_eq!(reply(&mut scheduler, &second), (n_cached, expected_second));
    let slot = (0..2).find(|&slot| !scheduler.slots[slot].kv.is_empty()).unwrap();
    assert!(scheduler.slots[1 - slot].kv.is_empty());
    assert_eq!(n_cells(&scheduler, slot), scheduler.slots[slot].kv.len());
}

/// A sequence that has begun keeps its cells in their order, so an idle conversation stays until the next one.
#[test]
fn a_sequence_alone_keeps_its_cells_in_order() {
    let (model, mut options) = real_model();
    options.n_slots = Some(3);
    let other: Vec<Token> = (100..400).collect();
    let prompt: Vec<Token> = (3000..3100).collect();
    let mut in_cache = scheduler(&model, options.clone());
    reply(&mut in_cache, &other);
    let (_, expected) = reply(&mut in_cache, &prompt);

    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    let idle = scheduler.storing.take();
    reply(&mut scheduler, &other);
    let mut events = submit(&mut scheduler, request(prompt));
    turn(&mut scheduler);
    // As if the copy had taken too long before the first step.
    scheduler.storing = idle;
    let tokens = rest_of(&mut scheduler, &mut events).1;
    assert_eq!(tokens, expected);
    let n_filled = |scheduler: &Scheduler<'_>| scheduler.slots.iter().filter(|slot| !slot.kv.is_empty()).count();
    assert_eq!(n_filled(&scheduler), 2);
    reply(&mut scheduler, &[7; 100]);
    assert_eq!(n_filled(&scheduler), 1, "the next sequence makes them leave");
}

#[test]
fn an_idle_conversation_leaves_the_cache_and_comes_back_unchanged() {
    let (model, options) = real_model();
    a_conversation_comes_back(&model, &options, &words(100, 200), &words(3000, 200));
}

#[test]
fn a_turn_that_drops_the_end_of_a_reply_waits_for_no_copy_that_takes_longer_than_computing_it() {
    let (model, mut options) = real_model();
    options.n_slots = Some(1);
    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    // The next prompt takes the slot, so copying is measured.
    reply(&mut scheduler, &words(3000, 200));
    let prompt = words(100, 200);
    let n_stored =
        |scheduler: &Scheduler<'_>| scheduler.storing.as_ref().unwrap().n_common(CacheScope::SHARED, &words(100, 200));
    let (_, expected) = reply(&mut scheduler, &prompt);
    scheduler.prefill_tps = 1e9;
    let mut events = submit(&mut scheduler, request(prompt.clone()));
    assert_eq!(rest_of(&mut scheduler, &mut events), (199, expected));
    assert_eq!(n_stored(&scheduler), 0, "what the reply adds is soon computed again");
    assert_eq!(reply(&mut scheduler, &prompt).0, 199);
    assert_eq!(n_stored(&scheduler), 200, "now it is not");
}

#[test]
fn a_conversation_that_loses_its_slot_counts_as_certain_to_go_on() {
    let (model, mut options) = real_model();
    options.n_slots = Some(1);
    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    // The next prompt takes the slot, so copying is measured.
    reply(&mut scheduler, &words(3000, 200));
    reply(&mut scheduler, &words(100, 200));
    let storing = scheduler.storing.as_ref().unwrap();
    assert_eq!(storing.n_common(CacheScope::SHARED, &words(100, 200)), 0);
    // Copying it takes half as long as computing it, and four times as long as an eighth of that.
    let slot = &scheduler.slots[0];
    scheduler.prefill_tps = slot.kv.len() as f64 / 2.0 / storing.copy_s(slot);
    let mut events = submit(&mut scheduler, request(words(5000, 100)));
    rest_of(&mut scheduler, &mut events);
    let storing = scheduler.storing.as_ref().unwrap();
    assert!(storing.n_common(CacheScope::SHARED, &words(100, 200)) > 0, "the other prompt waited for its copy");
}

fn words(from: Token, n: Token) -> Vec<Token> {
    (from..from + n).collect()
}

/// Tokens of a small vocabulary.
fn noise(factor: Token, n: Token) -> Vec<Token> {
    (1..=n).map(|i| i * factor % 251).collect()
}

#[test]
fn so_do_conversations_of_small_random_models() {
    for architecture in [tiny_gguf::Architecture::Llama, tiny_gguf::Architecture::Gemma3] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tiny.gguf");
        tiny_gguf::write(&file, architecture, 1);
        let (model, options) = loaded(&file);
        a_conversation_comes_back(&model, &options, &noise(7, 300), &noise(11, 100));
    }
}

#[test]
fn so_does_one_whose_window_has_moved_on() {
    let file = std::env::var("BATON_TEST_SWA_MODEL").expect("BATON_TEST_SWA_MODEL names a GGUF");
    let (model, options) = loaded(file.as_ref());
    a_conversation_comes_back(&model, &options, &words(100, 560), &words(3000, 560));
}

#[test]
fn the_prefix_of_a_conversation_out_of_the_cache_is_shared() {
    let (model, mut options) = real_model();
    options.n_slots = Some(3);
    let long: Vec<Token> = (100..300).collect();
    let other: Vec<Token> = (3000..3100).collect();
    let fork: Vec<Token> = (100..164).chain(900..920).collect();
    let mut in_cache = scheduler(&model, options.clone());
    reply(&mut in_cache, &long);
    let expected = reply(&mut in_cache, &fork);
    assert_eq!(expected.0, 64);

    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    reply(&mut scheduler, &long);
    reply(&mut scheduler, &other);
    assert_eq!(reply(&mut scheduler, &fork), expected);
    let stored = scheduler.storing.as_ref().unwrap().find(CacheScope::SHARED, &long, WantedKv::Any);
    assert_eq!(stored.n_tokens(), long.len() - 1, "the long conversation stays where it is");
}

/// A block of the conversation has more positions than the cache has free cells.
#[test]
fn only_what_a_prompt_shares_comes_back_and_no_running_sequence_makes_room() {
    let (model, mut options) = real_model();
    options.n_slots = Some(4);
    options.n_ubatch = Some(512);
    let conversation: Vec<Token> = (100..400).collect();
    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    reply(&mut scheduler, &conversation);
    let source = (0..4).find(|&slot| !scheduler.slots[slot].kv.is_empty()).unwrap();
    let mut running: Vec<Events> = [1000, 2000]
        .map(|from| {
            submit(&mut scheduler, SequenceRequest { max_tokens: Some(60), ..request((from..from + 150).collect()) })
        })
        .into();
    for _ in 0..20 {
        turn(&mut scheduler);
    }
    assert!(scheduler.slots[source].kv.is_empty() && scheduler.running.iter().flatten().count() == 2);
    let mut new = submit(&mut scheduler, request((100..140).chain(900..920).collect()));
    turn(&mut scheduler);
    assert_eq!(scheduler.running.iter().flatten().count(), 3, "the new one starts, and nobody is preempted");
    for (state, sequence) in scheduler.slots.iter().zip(&scheduler.running) {
        assert!(sequence.as_ref().is_none_or(|sequence| sequence.tokens.starts_with(&state.kv)));
    }
    let (n_cached, tokens) = rest_of(&mut scheduler, &mut new);
    assert_eq!((n_cached, tokens.len()), (40, 24));
    for _ in 0..60 {
        turn(&mut scheduler);
    }
    for events in &mut running {
        let (tokens, error) = received(events);
        assert!(error.is_none() && tokens.len() == 60, "{error:?}");
    }
}

#[test]
fn no_more_is_moved_out_of_the_cache_than_the_limit_allows() {
    let (model, options) = real_model();
    let prompts: [Vec<Token>; 2] = [(100..300).collect(), (3000..3100).collect()];
    let mut scheduler = storing(&model, options, N_CELLS, 100 << 10);
    prompts.iter().for_each(|prompt| drop(reply(&mut scheduler, prompt)));
    assert!(scheduler.slots.iter().all(|slot| !slot.kv.is_empty()));
}

#[test]
fn conversations_with_one_beginning_leave_the_cache_and_share_it_in_the_store() {
    let (model, mut options) = real_model();
    options.n_slots = Some(4);
    let system: Vec<Token> = (100..300).collect();
    let chat = |i: Token| [&system[..], &[2_000 + i; 20]].concat();
    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    let (_, expected) = reply(&mut scheduler, &chat(0));
    (1..8).for_each(|i| assert_eq!(reply(&mut scheduler, &chat(i)).0, 200));
    assert_eq!(scheduler.slots.iter().filter(|slot| !slot.kv.is_empty()).count(), 1, "only the newest is in the cache");
    let storing = scheduler.storing.as_ref().unwrap();
    let per_token = storing.layout().bytes_per_position();
    let n_tokens = storing.store().report().memory_bytes as usize / per_token;
    assert!(n_tokens <= 256 + 7 * (20 + 24 + 64), "{n_tokens} tokens are stored");
    assert_eq!(reply(&mut scheduler, &chat(0)), (219, expected));
    let store = scheduler.storing.as_ref().unwrap().store();
    assert_eq!(store.report().memory_tokens, 19, "the slot has the other 200");
}

/// Two conversations ran together, so their cells are mixed.
#[test]
fn a_conversation_that_goes_on_alone_has_the_low_cells_again() {
    let (model, options) = real_model();
    let prompts = [words(100, 150), words(3000, 150)];
    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    scheduler.prefill_tps = 1e-3;
    let mut events = prompts.each_ref().map(|prompt| submit(&mut scheduler, request(prompt.clone())));
    let first = rest_of(&mut scheduler, &mut events[0]).1;
    rest_of(&mut scheduler, &mut events[1]);
    assert!(scheduler.slots.iter().all(|slot| slot.kv.len() > 150));
    let (n_cached, _) = reply(&mut scheduler, &next_turn(&prompts[0], &first));
    assert_eq!(n_cached, 150 + 23);
    assert_eq!(scheduler.slots.iter().filter(|slot| !slot.kv.is_empty()).count(), 1, "the other one has left");
    let store = scheduler.storing.as_ref().unwrap().store();
    assert_eq!(store.report().memory_tokens, 173);
}

#[test]
fn lossless_kv_that_was_computed_once_is_there_for_the_next_request_that_wants_it() {
    let (model, options) = real_model();
    let (prompt, other) = (words(100, 200), words(3000, 100));
    let mut scheduler = storing(&model, options, N_CELLS, usize::MAX);
    let losslessly = |scheduler: &mut Scheduler<'_>| {
        let mut events = submit(scheduler, SequenceRequest { lossless_kv: true, ..request(prompt.clone()) });
        rest_of(scheduler, &mut events).0
    };
    reply(&mut scheduler, &prompt);
    let slot = scheduler.slots.iter().position(|slot| !slot.kv.is_empty()).unwrap();
    scheduler.slots[slot].mark_lossy(0);
    reply(&mut scheduler, &other);
    assert!(scheduler.slots[slot].kv.is_empty(), "it is in the store alone");
    assert_eq!(losslessly(&mut scheduler), 0);
    reply(&mut scheduler, &other);
    assert_eq!(scheduler.slots.iter().filter(|slot| !slot.kv.is_empty()).count(), 1, "it has left again");
    assert_eq!(losslessly(&mut scheduler), 199);
    reply(&mut scheduler, &other);
    assert_eq!(reply(&mut scheduler, &prompt).0, 199, "others have it, too");
}

/// A copy has only the windowed rows that the conversation's end attends to.
#[test]
fn a_prefix_whose_window_is_not_in_the_copy_is_computed() {
    const CELLS: u32 = 2048;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    tiny_gguf::write(&file, tiny_gguf::Architecture::Gemma3, 1);
    let (model, options) = loaded(&file);
    let (long, other) = (noise(7, 200), noise(11, 100));
    let ids = |tokens: Vec<GeneratedToken>| tokens.into_iter().map(|token| token.id).collect::<Vec<Token>>();
    let (_, expected) = reply(&mut scheduler_of(&model, options.clone(), CELLS), &long[..150]);

    let mut scheduler = storing(&model, options, CELLS, usize::MAX);
    reply(&mut scheduler, &long);
    reply(&mut scheduler, &other);
    assert!(scheduler.slots.iter().any(|slot| slot.kv.is_empty()));
    let (n_cached, tokens) = reply(&mut scheduler, &long[..150]);
    assert_eq!((n_cached, ids(tokens)), (0, ids(expected)));
}

/// Its rows are gone from the copy of the conversation's end.
#[test]
fn a_system_prompt_comes_back_whose_window_had_moved_on() {
    const CELLS: u32 = 2048;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    tiny_gguf::write(&file, tiny_gguf::Architecture::Gemma3, 1);
    let (model, options) = loaded(&file);
    let mut scheduler = storing(&model, options.clone(), CELLS, usize::MAX);
    let control = (0..1_000).find(|token| scheduler.vocabulary.is_control(*token)).unwrap();
    // Longer than the window, and followed by messages that are longer than it, too.
    let chat = |i: Token| [&noise(7, 200)[..], &[control], &noise(i, 200)].concat();
    let ids = |tokens: Vec<GeneratedToken>| tokens.into_iter().map(|token| token.id).collect::<Vec<Token>>();
    let (_, expected) = reply(&mut scheduler_of(&model, options, CELLS), &chat(13));

    reply(&mut scheduler, &chat(11));
    // The cache has another conversation alone.
    reply(&mut scheduler, &noise(17, 100));
    let (n_cached, tokens) = reply(&mut scheduler, &chat(13));
    assert_eq!((n_cached, ids(tokens)), (200, ids(expected)));
    let storing = scheduler.storing.as_ref().unwrap();
    assert!(storing.n_common(CacheScope::SHARED, &chat(11)) == 401, "what follows it is stored at its end");
}
