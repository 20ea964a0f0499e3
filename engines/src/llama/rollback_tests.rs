//! Tokens are taken back from the states of tiny models: what follows is what follows without them.

use baton_schemas::kv::StatePart;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tiny_gguf::Architecture;

use super::*;
use crate::llama::context::LlamaSlots;
use crate::llama::context_tests::{Tiny, batch, logits};
use crate::serving::context::{CannotCut, ModelContext};

/// The kept states of the contexts here.
const N_ROLLBACK: u32 = 4;

/// A class of memory and of recurrent layers each.
const TAKEN_BACK: [Architecture; 5] = [
    Architecture::Qwen35,
    Architecture::Qwen35Moe,
    Architecture::NemotronH,
    Architecture::Lfm2,
    Architecture::Lfm2Windowed,
];

fn tries(architecture: Architecture) -> bool {
    let tiny = Tiny::new(architecture);
    let outcome = works(&mut tiny.context(N_ROLLBACK), tiny.n_vocab(), N_ROLLBACK);
    outcome.unwrap()
}

#[test]
fn what_a_model_takes_back_is_found_out() {
    for architecture in TAKEN_BACK {
        assert!(tries(architecture), "{architecture:?}");
    }
    for architecture in
        [Architecture::Qwen3Next, Architecture::GraniteHybrid, Architecture::KimiLinear, Architecture::Mamba2]
    {
        assert!(!tries(architecture), "{architecture:?}");
    }
}

/// Why [`Rollbacks`] exists: llama.cpp accepts this, too.
#[test]
fn tokens_of_two_batches_leave_wrong_states_which_the_trial_would_see() {
    for architecture in [Architecture::Qwen35, Architecture::NemotronH, Architecture::Lfm2] {
        let tiny = Tiny::new(architecture);
        let mut context = tiny.context(N_ROLLBACK);
        let mut probe = RollbackTrial { ctx: &mut context, n_vocab: tiny.n_vocab() };
        probe.compute(0..N_BEFORE + 1).unwrap();
        let expected = probe.next_prediction().unwrap();
        transfer::clear(probe.ctx, SEQUENCE);
        for positions in [0..N_BEFORE + 1, N_BEFORE + 1..N_BEFORE + 3, N_BEFORE + 3..N_BEFORE + 4] {
            probe.compute(positions).unwrap();
        }
        assert!(probe.ctx.clear_kv_cache_seq(Some(SEQUENCE), Some(N_BEFORE + 1), None).unwrap());
        let found = probe.next_prediction().unwrap();
        let divergence = divergence(&expected, &found);
        assert!(divergence > MOST_BOUND, "{architecture:?}: {divergence}");
    }
}

#[test]
fn only_tokens_of_the_last_batch_are_taken_back() {
    let tiny = Tiny::new(Architecture::Qwen35);
    let mut slots = tiny.slots_with_rollback(false, N_ROLLBACK);
    assert_eq!(slots.max_rollback(), 4);
    slots.compute(&batch(0, 0..100)).unwrap();
    assert_eq!(slots.take_back(0, 99), Err(CannotCut), "a prompt's");
    slots.compute(&batch(0, 100..103)).unwrap();
    slots.compute(&batch(1, 0..3)).unwrap();
    assert_eq!(slots.take_back(0, 102), Err(CannotCut), "those of the batch before");
    slots.compute(&batch(0, 103..106)).unwrap();
    assert_eq!(slots.take_back(0, 103), Err(CannotCut), "all of a batch");
    assert_eq!(slots.take_back(0, 106), Err(CannotCut), "none");
    slots.compute(&[batch(0, 106..108), batch(1, 3..6)].concat()).unwrap();
    assert_eq!([slots.take_back(0, 107), slots.take_back(1, 4)], [Err(CannotCut); 2], "unequal numbers of rows");
    slots.compute(&[batch(0, 108..110), batch(1, 6..8)].concat()).unwrap();
    slots.take_back(1, 7).unwrap();
    slots.take_back(0, 109).unwrap();
    assert_eq!(slots.take_back(0, 108), Err(CannotCut), "twice");
    slots.compute(&batch(0, 109..111)).unwrap();
    let checkpoint = slots.checkpoint(0).unwrap();
    slots.return_to(0, 111, &checkpoint).unwrap();
    assert_eq!(slots.take_back(0, 110), Err(CannotCut), "of states that were replaced");
    assert_eq!(slots.cut(0, 110), Err(CannotCut));
    // Nothing of a model that keeps no states beside.
    let mut slots = tiny.slots(false);
    assert_eq!(slots.max_rollback(), 0);
    slots.compute(&batch(0, 0..3)).unwrap();
    assert_eq!(slots.take_back(0, 2), Err(CannotCut));
}

/// A random operation on a slot.
#[derive(Debug, Clone)]
enum Act {
    /// A batch: of each slot that is in it, a token and a draft of this length, of which at most so many tokens are right.
    Step(u32, [Option<u32>; 3]),
    /// The second slot becomes a copy of the first.
    Fork(usize, usize),
    /// A slot goes on beyond its end, and returns.
    Return(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let part = || prop::option::weighted(0.7, 0..=N_ROLLBACK);
    prop_oneof![
        6 => (0..=N_ROLLBACK, [part(), part(), part()]).prop_map(|(n_draft, parts)| Act::Step(n_draft, parts)),
        1 => (0..3usize, 1..3usize).prop_map(|(from, by)| Act::Fork(from, (from + by) % 3)),
        1 => (0..3usize).prop_map(Act::Return),
    ]
}

/// Runs the acts. Returns how many tokens each slot has.
fn run(slots: &mut LlamaSlots<'_>, acts: &[Act]) -> [u32; 3] {
    let mut ends = [0; 3];
    for act in acts {
        match *act {
            Act::Step(n_draft, parts) => {
                let parts = parts.map(|part| part.map(|n_right| n_right.min(n_draft)));
                let mut rows = Vec::new();
                for (slot, part) in (0..).zip(parts) {
                    let Some(n_right) = part else { continue };
                    let end = ends[slot as usize];
                    let mut of_slot = batch(slot, end..end + 1 + n_draft);
                    of_slot[1 + n_right as usize..].iter_mut().for_each(|row| row.token = (row.token + 11) % 250);
                    rows.extend(of_slot);
                }
                if rows.is_empty() {
                    continue;
                }
                slots.compute(&rows).unwrap();
                for (slot, n_right) in (0..).zip(parts).filter_map(|(slot, part)| Some((slot, part?))) {
                    ends[slot] += 1 + n_right;
                    if n_right < n_draft {
                        slots.take_back(slot, ends[slot] as usize).unwrap();
                    }
                }
            }
            Act::Fork(from, to) => {
                slots.cut(to, 0).unwrap();
                assert!(ends[from] == 0 || slots.fork(from, to, ends[from] as usize));
                ends[to] = ends[from];
            }
            Act::Return(slot) if ends[slot] > 0 => {
                let checkpoint = slots.checkpoint(slot).unwrap();
                slots.compute(&batch(slot as u32, ends[slot]..ends[slot] + 6)).unwrap();
                slots.return_to(slot, ends[slot] as usize, &checkpoint).unwrap();
            }
            Act::Return(_) => {}
        }
    }
    ends
}

fn values(state: &StatePart) -> Vec<f32> {
    let bytes = state.tensors.iter().flat_map(|tensor| tensor.chunks_exact(4));
    bytes.map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
}

/// The relative L2 distance.
fn distance(expected: &[f32], found: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let differences = squares(&mut expected.iter().zip(found).map(|(a, b)| f64::from(a - b)));
    (differences / squares(&mut expected.iter().map(|a| f64::from(*a)))).sqrt()
}

#[test]
fn whatever_was_right_the_states_are_those_of_the_tokens_that_are_left() {
    for architecture in TAKEN_BACK {
        let tiny = Tiny::new(architecture);
        let mut runner = TestRunner::new(ProptestConfig { cases: 16, ..ProptestConfig::with_source_file(file!()) });
        let outcome = runner.run(&proptest::collection::vec(act(), 1..24), |acts| {
            let mut slots = tiny.slots_with_rollback(false, N_ROLLBACK);
            let ends = run(&mut slots, &acts);
            for (slot, end) in (0u32..).zip(ends).filter(|(_, end)| *end > 0) {
                let mut alone = tiny.slots(false);
                alone.compute(&batch(0, 0..end)).unwrap();
                let expected = alone.export_state(0, end).unwrap();
                let found = slots.export_state(slot as usize, end).unwrap();
                let distance = distance(&values(&expected), &values(&found));
                prop_assert!(distance < 1e-3, "slot {slot} at {end}: {distance}");
                let expected = log_probabilities(&logits(&mut alone, 0, end));
                let found = log_probabilities(&logits(&mut slots, slot, end));
                let divergence = divergence(&expected, &found).abs();
                prop_assert!(divergence < 1e-4, "slot {slot} at {end}: {divergence} nats");
            }
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{architecture:?}: {error}\n{runner}"));
    }
}

#[test]
fn states_still_leave_while_the_last_tokens_are_computed() {
    for architecture in [Architecture::Qwen35, Architecture::NemotronH, Architecture::Lfm2] {
        let tiny = Tiny::new(architecture);
        for n_last in [1, 3, 36] {
            let mut slots = tiny.slots_with_rollback(true, N_ROLLBACK);
            slots.compute(&batch(1, 0..40)).unwrap();
            slots.compute(&batch(0, 0..64)).unwrap();
            let mut parts: Vec<StatePart> = Vec::new();
            slots.compute_streaming_state(&batch(0, 64..64 + n_last), &mut |part| parts.push(part)).unwrap();
            let whole = slots.export_state(0, 64 + n_last).unwrap();
            let tensors: Vec<_> = parts.iter().flat_map(|part| part.tensors.clone()).collect();
            assert!(tensors == whole.tensors, "{architecture:?}: {n_last}");
            assert!(parts.len() > 1, "{architecture:?}: {n_last}: {} parts", parts.len());
        }
    }
}
