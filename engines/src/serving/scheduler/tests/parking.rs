//! Idle conversations that leave the cache while others run.

use std::sync::Arc;

use baton_model::gguf::Gguf;
use baton_schemas::sequence::{GeneratedToken, SequenceEvent};
use baton_schemas::{SequenceRequest, Token};
use llama_cpp_2::model::LlamaModel;

use super::super::super::slots;
use super::super::Parking;
use super::{Events, N_CELLS, Scheduler, loaded, real_model, received, request, scheduler, scheduler_of, submit, turn};
use crate::engine_options::EngineOptions;
use crate::llama::context::seq_id;
use crate::llama::probe;

/// A scheduler that moves idle conversations out of its cache.
pub(super) fn parking<'m>(
    model: &'m Arc<LlamaModel>,
    options: EngineOptions,
    n_cells: u32,
    max_bytes: u64,
) -> Scheduler<'m> {
    let gguf = Gguf::open(options.path().unwrap()).unwrap();
    let n_slots = options.slots();
    let mut scheduler = scheduler_of(model, options, n_cells);
    let transfer = probe::probe(&mut scheduler.context.context, model, &gguf, n_slots, None).unwrap();
    let parking = Parking::new(transfer.layout(), n_slots, max_bytes);
    scheduler.context = scheduler.context.with_transfer(Some(transfer), n_slots);
    scheduler.with_parking(Some(parking))
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
                SequenceEvent::Started { n_cached: n } => n_cached = Some(n),
                SequenceEvent::Token(token) => tokens.push(token),
                SequenceEvent::Handoff(_) => {}
                SequenceEvent::Finished { .. } => return (n_cached.unwrap(), tokens),
            }
        }
    }
    panic!("the reply did not end");
}

/// The prompt of a conversation's next turn.
fn next_turn(prompt: &[Token], reply: &[GeneratedToken]) -> Vec<Token> {
    prompt.iter().copied().chain(reply.iter().map(|token| token.id)).chain(700..720).collect()
}

/// Tokens of a slot in llama.cpp's cache.
fn n_cells(scheduler: &Scheduler<'_>, slot: usize) -> usize {
    usize::try_from(scheduler.context.context.kv_cache_seq_pos_max(seq_id(slot)) + 1).unwrap()
}

/// One conversation goes on after another had the cache, as if it had been alone.
fn a_conversation_comes_back(model: &Arc<LlamaModel>, options: &EngineOptions, n_prompt: Token) {
    const CELLS: u32 = 2048;
    let first: Vec<Token> = (100..100 + n_prompt).collect();
    let other: Vec<Token> = (3000..3000 + n_prompt).collect();
    let mut alone = scheduler_of(model, options.clone(), CELLS);
    let (_, expected) = reply(&mut alone, &first);
    let second = next_turn(&first, &expected);
    let (n_cached, expected_second) = reply(&mut alone, &second);

    let mut scheduler = parking(model, options.clone(), CELLS, u64::MAX);
    assert_eq!(reply(&mut scheduler, &first), (0, expected));
    let slot = (0..2).find(|&slot| !scheduler.slots[slot].kv.is_empty()).unwrap();
    assert!(!scheduler.slots[slot].parked, "nobody needs its cells yet");
    reply(&mut scheduler, &other);
    assert!(scheduler.slots[slot].parked && !scheduler.slots[1 - slot].parked);
    assert_eq!((n_cells(&scheduler, slot), slots::cells_in_use(&scheduler.slots)), (0, n_cells(&scheduler, 1 - slot)));
    // To the bit: its log-probabilities are equal.
    assert_eq!(reply(&mut scheduler, &second), (n_cached, expected_second));
    assert!(scheduler.slots[1 - slot].parked && !scheduler.slots[slot].parked);
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

    let mut scheduler = parking(&model, options, N_CELLS, u64::MAX);
    let idle = scheduler.parking.take();
    reply(&mut scheduler, &other);
    let mut events = submit(&mut scheduler, request(prompt));
    turn(&mut scheduler);
    // As if the copy had taken too long before the first step.
    scheduler.parking = idle;
    let tokens = rest_of(&mut scheduler, &mut events).1;
    assert_eq!(tokens, expected);
    assert!(scheduler.slots.iter().all(|slot| !slot.parked));
    reply(&mut scheduler, &[7; 100]);
    assert!(scheduler.slots.iter().any(|slot| slot.parked), "the next sequence makes them leave");
}

#[test]
fn an_idle_conversation_leaves_the_cache_and_comes_back_unchanged() {
    let (model, options) = real_model();
    a_conversation_comes_back(&model, &options, 200);
}

#[test]
fn so_does_one_whose_window_has_moved_on() {
    let file = std::env::var("BATON_TEST_SWA_MODEL").expect("BATON_TEST_SWA_MODEL names a GGUF");
    let (model, options) = loaded(file.as_ref());
    a_conversation_comes_back(&model, &options, 560);
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

    let mut scheduler = parking(&model, options, N_CELLS, u64::MAX);
    reply(&mut scheduler, &long);
    reply(&mut scheduler, &other);
    let source = (0..3).find(|&slot| scheduler.slots[slot].parked).unwrap();
    assert_eq!(reply(&mut scheduler, &fork), expected);
    assert!(scheduler.slots[source].parked, "the long conversation stays where it is");
}

/// A chunk of the conversation has more positions than the new prompt shares with it, and than the cache has free cells.
#[test]
fn a_conversation_that_finds_no_room_in_the_cache_costs_no_running_sequence() {
    let (model, mut options) = real_model();
    options.n_slots = Some(4);
    options.n_ubatch = Some(512);
    let conversation: Vec<Token> = (100..400).collect();
    let mut scheduler = parking(&model, options, N_CELLS, u64::MAX);
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
    assert!(scheduler.slots[source].parked && scheduler.running.iter().flatten().count() == 2);
    let mut new = submit(&mut scheduler, request((100..140).chain(900..920).collect()));
    turn(&mut scheduler);
    assert_eq!(scheduler.running.iter().flatten().count(), 3, "the new one starts, and nobody is preempted");
    for (state, sequence) in scheduler.slots.iter().zip(&scheduler.running) {
        assert!(sequence.as_ref().is_none_or(|sequence| sequence.tokens.starts_with(&state.kv)));
    }
    let (n_cached, tokens) = rest_of(&mut scheduler, &mut new);
    assert_eq!((n_cached, tokens.len()), (0, 24), "it computes its prompt");
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
    let mut scheduler = parking(&model, options, N_CELLS, 100 << 10);
    prompts.iter().for_each(|prompt| drop(reply(&mut scheduler, prompt)));
    assert!(scheduler.slots.iter().all(|slot| !slot.parked && !slot.kv.is_empty()));
}

#[test]
fn cells_that_another_slot_shares_stay_in_the_cache() {
    let (model, options) = real_model();
    let long: Vec<Token> = (100..300).collect();
    let fork: Vec<Token> = (100..164).chain(900..920).collect();
    let mut scheduler = parking(&model, options, N_CELLS, u64::MAX);
    reply(&mut scheduler, &long);
    reply(&mut scheduler, &fork);
    assert!(scheduler.slots.iter().all(|slot| !slot.parked));
    assert_eq!(slots::cells_in_use(&scheduler.slots), 223 + 107 - 64);
}

/// A copy has only the windowed rows that the conversation's end attends to.
#[test]
fn a_prefix_whose_window_is_not_in_the_copy_is_computed() {
    const CELLS: u32 = 2048;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    tiny_gguf::write(&file, tiny_gguf::Architecture::Gemma3, 1);
    let (model, options) = loaded(&file);
    let noise = |factor: Token, n: Token| (1..=n).map(|i| i * factor % 251).collect::<Vec<Token>>();
    let (long, other) = (noise(7, 200), noise(11, 100));
    let ids = |tokens: Vec<GeneratedToken>| tokens.into_iter().map(|token| token.id).collect::<Vec<Token>>();
    let (_, expected) = reply(&mut scheduler_of(&model, options.clone(), CELLS), &long[..150]);

    let mut scheduler = parking(&model, options, CELLS, u64::MAX);
    reply(&mut scheduler, &long);
    reply(&mut scheduler, &other);
    assert!(scheduler.slots.iter().any(|slot| slot.parked));
    let (n_cached, tokens) = reply(&mut scheduler, &long[..150]);
    assert_eq!((n_cached, ids(tokens)), (0, ids(expected)));
}
