//! Conversations that leave the cache: never without the states of their end.

use super::strict::reply;
use super::{AgentTrace, CONTROL, Rig, STATE, said, text};

#[test]
fn an_idle_conversation_leaves_the_cache_with_its_states_and_comes_back() {
    let mut rig = Rig::new(2, 4_096).parking();
    let first = [text(1, 600), said(2, 60)].concat();
    let a = AgentTrace::n_before_reply(&first);
    rig.ask(&first, 20);
    let slot = (0..2).find(|&slot| !rig.scheduler.slots[slot].kv.is_empty()).unwrap();
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots[slot].parked);
    let answer = reply(&first, 20);
    assert_eq!(rig.ask(&[&first[..], &answer, &said(3, 30)].concat(), 8), first.len() + 19);
    // Back to a checkpoint of one that is parked.
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots[slot].parked);
    assert_eq!(rig.ask(&[&first[..a], &[CONTROL, 4], &answer[10..], &said(3, 30)].concat(), 8), a);
}

#[test]
fn an_idle_conversation_whose_states_fit_no_memory_stays_in_the_cache() {
    let mut rig = Rig::with_memory(2, 4_096, STATE - 1).parking();
    let first = [text(1, 100), said(2, 20)].concat();
    rig.ask(&first, 20);
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots.iter().all(|state| !state.parked && !state.kv.is_empty()));
    assert_eq!(rig.ask(&[&first[..], &reply(&first, 20), &said(3, 30)].concat(), 8), first.len() + 19);
}

#[test]
fn a_parked_conversation_that_loses_a_checkpoint_loses_the_rows_after_it() {
    let mut rig = Rig::with_memory(3, 4_096, 12 * STATE).parking();
    let first = [text(1, 200), said(2, 60)].concat();
    rig.ask(&first, 20);
    let slot = (0..3).find(|&slot| !rig.scheduler.slots[slot].kv.is_empty()).unwrap();
    rig.ask(&text(9, 300), 8);
    assert!(rig.scheduler.slots[slot].parked);
    let n_parked = |rig: &Rig| rig.scheduler.parking.as_ref().unwrap().n_bytes();
    let before = (rig.scheduler.slots[slot].kv.len(), n_parked(&rig));
    // The ends of longer prompts save more.
    (0..12).for_each(|seed| _ = rig.ask(&text(20 + seed, 900), 8));
    let after = (rig.scheduler.slots[slot].kv.len(), n_parked(&rig));
    assert!(after.0 < before.0 || !rig.scheduler.slots[slot].parked, "{before:?} {after:?}");
}

#[test]
fn without_memory_for_checkpoints_only_the_end_can_be_continued() {
    let mut rig = Rig::with_memory(2, 4_096, STATE - 1).parking();
    let prompt = text(1, 300);
    assert_eq!(rig.ask(&prompt, 8), 0);
    assert_eq!(rig.ask(&[&prompt[..], &reply(&prompt, 8), &text(3, 9)].concat(), 8), 307);
    assert_eq!(rig.ask(&prompt, 8), 0);
    // The size is known after the first.
    assert_eq!(rig.scheduler.context.n_taken, 1);
}
