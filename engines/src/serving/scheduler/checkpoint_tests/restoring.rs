//! Restoring from the store: which KV, and when.

use baton_schemas::Token;
use baton_schemas::sequence::{CachedTokens, SequenceRequest};

use super::super::storing::SHARE;
use super::strict::reply;
use super::{Received, Rig, request, said, text};

#[test]
fn a_request_that_wants_lossless_kv_computes_from_the_first_lossy_token_on() {
    let first = [text(1, 600), said(2, 60)].concat();
    let next = [&first[..], &reply(&first, 20), &said(3, 30)].concat();
    let lossless = |prompt: &[Token]| SequenceRequest { lossless_kv: true, ..request(prompt, 8) };
    for (is_stored, wanted) in [(false, lossless(&next)), (true, lossless(&next))] {
        let mut rig = Rig::new(2, 4_096).storing();
        rig.ask(&first, 20);
        let slot = rig.scheduler.slots.iter().position(|slot| slot.kv.starts_with(&first)).unwrap();
        rig.scheduler.slots[slot].mark_lossy(300);
        if is_stored {
            rig.ask(&text(9, 300), 8);
            assert!(rig.scheduler.slots[slot].kv.is_empty(), "it is in the store alone");
        }
        let mut events = [rig.submit(wanted)];
        let outcome = rig.outcomes(&mut events).remove(0);
        assert_eq!(outcome.tokens, reply(&next, 8));
        assert!(outcome.cached.n_cached <= 300, "{:?}", outcome.cached);
        let slot = rig.scheduler.slots.iter().find(|slot| slot.kv.starts_with(&next)).unwrap();
        assert_eq!(slot.lossy_from, None, "what was computed is exact");
    }
}

#[test]
fn a_turn_in_which_not_all_came_back_waits_for_no_message() {
    let mut rig = Rig::new(2, 4_096).storing();
    let long = text(1, 700);
    rig.ask(&long, 8);
    rig.ask(&text(9, 300), 8);
    // A block takes all the time of a turn.
    rig.scheduler.context.restore_takes = SHARE;
    let mut events = rig.submit(request(&[&long[..], &reply(&long, 8), &said(3, 20)].concat(), 4));
    let (mut received, mut n_turns) = (Received::default(), 0);
    while received.cached == CachedTokens::default() {
        rig.turn();
        received.take(&mut events);
        assert!(!rig.scheduler.awaits_messages(), "turn {n_turns}");
        n_turns += 1;
    }
    assert!(n_turns > 707 / 64, "{n_turns}");
}
