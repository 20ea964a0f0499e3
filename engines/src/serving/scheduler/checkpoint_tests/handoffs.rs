//! States between nodes.

use std::sync::atomic::Ordering;

use baton_schemas::handoff::{HandoffFailure, KvSource};
use baton_schemas::{EngineError, SequenceRequest, Token};

use super::super::super::kv_flow::{Export, Exported, ExportedKv};
use super::pulls::Script;
use super::strict::{part, reply};
use super::{AgentTrace, CONTROL, Received, Rig, request, said, text};

pub(super) fn pulled(prompt: &[Token], n_reply: usize) -> SequenceRequest {
    SequenceRequest { kv_source: Some(KvSource::at("http://prefill")), ..request(prompt, n_reply) }
}

/// An export: the positions of its chunks, and for each of the states their position and the end of the rows before them.
type Sent = (Vec<(u32, u32)>, Vec<(u32, u32)>);

impl Rig {
    fn pull(&mut self, prompt: &[Token], script: Script) -> Received {
        *self.peer.script.lock().unwrap() = script;
        let mut events = [self.submit(pulled(prompt, 8))];
        let outcome = self.outcomes(&mut events).remove(0);
        assert_eq!((&outcome.error, &outcome.tokens), (&None, &reply(prompt, 8)));
        outcome
    }

    /// Exports a prompt from `start` on.
    pub(super) fn export(&mut self, prompt: &[Token], start: u32) -> Sent {
        self.export_with(prompt, start, &[])
    }

    /// The same with the states at `checkpoints`.
    fn export_with(&mut self, prompt: &[Token], start: u32, checkpoints: &[u32]) -> Sent {
        let (export, mut exported) = Export::new(start, prompt.len() as u32, 1, checkpoints);
        let mut events = self.submit_with(request(&[prompt, &[0]].concat(), 0), Some(export));
        let mut outcome = Received::default();
        let (mut rows, mut states) = (Vec::new(), Vec::new());
        for _ in 0..1_000 {
            self.turn();
            outcome.take(&mut events);
            while let Ok(Exported { kv, .. }) = exported.try_recv() {
                match kv {
                    ExportedKv::Chunk(chunk) => rows.push((chunk.p0, chunk.p1)),
                    ExportedKv::State(state) => {
                        assert_eq!(state, part(&prompt[..state.position as usize]));
                        states.push((state.position, rows.last().map_or(start, |(_, end)| *end)));
                    }
                }
            }
            if outcome.is_finished {
                assert!(rows.windows(2).all(|pair| pair[0].1 == pair[1].0), "{rows:?}");
                return (rows, states);
            }
        }
        panic!("the prefill does not end: {outcome:?}");
    }
}

#[test]
fn a_prefill_sends_the_states_of_its_end_once_and_before_the_rows_of_the_chunk_that_ends_there() {
    let mut rig = Rig::new(2, 4_096);
    let prompt = text(1, 300);
    let (rows, states) = rig.export(&prompt, 0);
    let last = *rows.last().unwrap();
    assert_eq!((rows[0].0, last.1, states), (0, 300, vec![(300, last.0)]));
    assert_eq!(rig.scheduler.context.n_computed, 300);
    // What is cached has its states, too: at the end of a slot, and at a checkpoint.
    assert_eq!(
        rig.export(&prompt, 100),
        (vec![(100, 164), (164, 228), (228, 292), (292, 300)], vec![(300, 300)]),
        "nothing is computed"
    );
    let longer = [&prompt[..], &text(2, 50)].concat();
    assert_eq!(rig.export(&longer, 300), (vec![(300, 350)], vec![(350, 300)]));
    assert_eq!(rig.scheduler.context.n_computed, 350);
    // The next turn went on from the end, of which a checkpoint is left.
    assert_eq!(rig.export(&prompt, 200), (vec![(200, 264), (264, 300)], vec![(300, 300)]));
    assert_eq!(rig.scheduler.context.n_computed, 350);
}

#[test]
fn a_pull_ends_before_the_head_of_the_reply() {
    let mut rig = Rig::new(2, 4_096);
    let prompt = [text(1, 300), said(2, 40)].concat();
    let a = AgentTrace::n_before_reply(&prompt);
    for states_first in [false, true] {
        rig = Rig::new(2, 4_096);
        let outcome = rig.pull(&prompt, Script { states_first, ..Script::default() });
        let report = outcome.report.unwrap();
        assert_eq!((report.failure, report.n_tokens as usize), (None, a));
        assert_eq!(*rig.peer.pulled.lock().unwrap(), [(0, a as u32)]);
        assert_eq!(rig.scheduler.context.n_computed, prompt.len() - a + 7, "the head, and 7 of the reply");
    }
    // So the next turn, without this one's reasoning, starts there.
    assert_eq!(rig.ask(&[&prompt[..a], &text(5, 40)].concat(), 8), a);
}

#[test]
fn a_pull_that_breaks_leaves_the_slots_own_checkpoint() {
    let mut rig = Rig::new(2, 4_096);
    let first = [text(1, 300), said(2, 40)].concat();
    rig.ask(&first, 20);
    let second = [&first[..], &reply(&first, 20), &said(3, 200)].concat();
    let n_kept = first.len() + 19;
    let outcome = rig.pull(&second, Script { breaks_after: Some(3), ..Script::default() });
    let report = outcome.report.unwrap();
    assert_eq!((report.failure, report.n_tokens), (Some(HandoffFailure::PrefillLost), 0), "no row was usable");
    assert_eq!((outcome.cached.n_cached as usize, outcome.n_computed as usize), (n_kept, second.len() - n_kept));
}

#[test]
fn rows_that_come_without_their_states_are_never_continued() {
    let mut rig = Rig::new(2, 4_096);
    let prompt = [text(1, 300), said(2, 40)].concat();
    let script = Script { lacks_states: true, lacks_checkpoints: true, ..Script::default() };
    let outcome = rig.pull(&prompt, script);
    assert_eq!(outcome.report.unwrap().n_tokens, 0);
    assert_eq!(outcome.n_computed as usize, prompt.len());
}

#[test]
fn a_pull_whose_reader_leaves_keeps_what_was_there_before() {
    let mut rig = Rig::new(1, 4_096);
    let first = [text(1, 300), said(2, 40)].concat();
    rig.ask(&first, 20);
    let second = [&first[..], &reply(&first, 20), &said(3, 200)].concat();
    *rig.peer.script.lock().unwrap() = Script { lacks_states: true, ..Script::default() };
    let events = rig.submit(pulled(&second, 8));
    rig.scheduler.fill_slots();
    for _ in 0..3 {
        rig.scheduler.import_chunks();
    }
    drop(events);
    rig.turn();
    assert_eq!(rig.ask(&second, 8), first.len() + 19);
}

#[test]
fn a_prefill_sends_the_states_of_checkpoints_after_the_rows_before_them() {
    let mut rig = Rig::new(2, 4_096);
    let prompt = text(1, 300);
    let states_at = |sent: Sent| {
        let (rows, mut states) = sent;
        let last = states.pop().unwrap();
        assert_eq!((last.0, rows.last().unwrap().1), (300, 300));
        states
    };
    assert_eq!(states_at(rig.export_with(&prompt, 0, &[100, 200])), [(100, 100), (200, 200)]);
    assert_eq!(rig.scheduler.context.n_computed, 300);
    // They are kept, and come from the slot's own checkpoints, also one at which the rows begin to be computed.
    assert_eq!(states_at(rig.export_with(&prompt, 50, &[100, 200])), [(100, 100), (200, 200)]);
    assert_eq!(rig.scheduler.context.n_computed, 300, "nothing is computed");
    // One that was not kept is computed from the last one before it.
    assert_eq!(states_at(rig.export_with(&prompt, 0, &[100, 150])), [(100, 100), (150, 150)]);
    assert_eq!(rig.scheduler.context.n_computed, 300 + 200);
    // Without memory for checkpoints, too.
    let mut rig = Rig::with_memory(2, 4_096, 0);
    assert_eq!(states_at(rig.export_with(&prompt, 0, &[100, 200])), [(100, 100), (200, 200)]);
    assert_eq!(states_at(rig.export_with(&prompt, 0, &[100, 200])), [(100, 100), (200, 200)]);
    assert_eq!(rig.scheduler.context.n_computed, 600);
}

#[test]
fn a_branch_near_the_end_leaves_the_last_chunk_before_states_its_length() {
    let half_a_step = 32;
    for n_common in (100..300).step_by(7) {
        let mut rig = Rig::new(4, 4_096);
        let prompt = |seed| [text(1, n_common), text(seed, 300 - n_common)].concat();
        let mut n_last = |seed| rig.export(&prompt(seed), 0).0.last().map(|(p0, p1)| p1 - p0).unwrap();
        assert!([2, 3].map(&mut n_last).into_iter().all(|n| n >= half_a_step), "{n_common} tokens in common");
        // The checkpoint lies before the last chunk, and the next branch is computed from there.
        let before = rig.scheduler.context.n_computed;
        rig.export(&prompt(4), 0);
        let n_computed = rig.scheduler.context.n_computed - before;
        assert_eq!(n_computed, 300 - n_common.min(300 - half_a_step as usize), "{n_common} tokens in common");
    }
}

#[test]
fn conversations_with_one_system_prompt_pull_it_once() {
    let conversation = |seed| [text(1, 500), said(seed, 60)].concat();
    let a = AgentTrace::n_before_reply(&conversation(2)) as u32;
    let mut rig = Rig::new(4, 8_192);
    let reports = [2, 3, 4].map(|seed| rig.pull(&conversation(seed), Script::default()).report.unwrap());
    assert_eq!(reports.map(|report| report.n_tokens), [a, a - 500, a - 500]);
    assert_eq!(*rig.peer.pulled.lock().unwrap(), [(0, a), (500, a), (500, a)]);
    assert_eq!(*rig.peer.asked.lock().unwrap(), [vec![500], vec![], vec![]]);
    // A checkpoint that does not come costs nothing else.
    for script in [
        Script { lacks_checkpoints: true, ..Script::default() },
        Script { crosses_checkpoints: true, ..Script::default() },
    ] {
        let mut rig = Rig::new(4, 8_192);
        assert_eq!([2, 3].map(|seed| rig.pull(&conversation(seed), script).report.unwrap().n_tokens), [a, a]);
    }
    // A broken pull leaves the rows up to its last checkpoint.
    let mut rig = Rig::new(4, 8_192);
    let outcome = rig.pull(&conversation(2), Script { breaks_after: Some(34), ..Script::default() });
    assert_eq!((outcome.report.unwrap().n_tokens, outcome.n_computed as usize), (500, conversation(2).len() - 500));
}

#[test]
fn a_pull_asks_for_the_states_where_the_conversation_was_cut_before() {
    // No control token shows where the common beginning ends.
    let conversation = |seed| [text(1, 300), text(seed, 150)].concat();
    let mut rig = Rig::new(4, 8_192);
    (2..5).for_each(|seed| _ = rig.pull(&conversation(seed), Script::default()));
    assert_eq!(*rig.peer.asked.lock().unwrap(), [vec![], vec![300], vec![]]);
    assert_eq!(*rig.peer.pulled.lock().unwrap(), [(0, 445), (0, 445), (300, 445)]);
}

fn returned(turn: &[Token]) -> SequenceRequest {
    SequenceRequest { held_only: true, gives_way: true, ..pulled(turn, 0) }
}

/// A node that has computed a prompt for another one, which has generated a reply: the prompt as far as it was handed over, and the
/// tokens of the whole turn.
fn after_a_reply() -> (Rig, usize, Vec<Token>) {
    let prompt = [text(1, 300), said(2, 40)].concat();
    let a = AgentTrace::n_before_reply(&prompt);
    let mut rig = Rig::new(2, 4_096);
    rig.export(&prompt[..a], 0);
    (rig, a, [&prompt[..], &reply(&prompt, 20)].concat())
}

#[test]
fn a_reply_returns_to_the_node_that_computed_its_prompt_and_neither_computes() {
    let (mut rig, a, turn) = after_a_reply();
    let outcome = {
        let mut events = [rig.submit(returned(&turn))];
        rig.outcomes(&mut events).remove(0)
    };
    assert_eq!((&outcome.error, outcome.tokens.len(), outcome.n_computed), (&None, 0, 0));
    let n_held = turn.len() - 1;
    assert_eq!(
        *rig.peer.pulled.lock().unwrap(),
        [(a as u32, n_held as u32)],
        "the reply's last token was never computed"
    );
    assert_eq!(
        *rig.peer.asked.lock().unwrap(),
        [Vec::<u32>::new()],
        "a node without the states of a checkpoint would compute them"
    );
    assert_eq!(rig.scheduler.context.n_computed, a);
    assert_eq!(rig.ask(&[&turn[..], &said(3, 30)].concat(), 8), n_held);
}

#[test]
fn a_return_that_breaks_or_gives_way_leaves_what_was_there() {
    let (mut rig, a, turn) = after_a_reply();
    rig.peer.script.lock().unwrap().breaks_after = Some(1);
    let mut events = [rig.submit(returned(&turn))];
    let outcome = rig.outcomes(&mut events).remove(0);
    assert_eq!((&outcome.error, outcome.report.unwrap().failure), (&None, Some(HandoffFailure::PrefillLost)));
    assert_eq!(rig.scheduler.context.n_computed, a, "the rest is not computed");

    let (mut rig, a, turn) = after_a_reply();
    let mut events = rig.submit(returned(&turn));
    rig.scheduler.fill_slots();
    rig.scheduler.import_chunks();
    let next = [&turn[..a], &[CONTROL, 4], &said(3, 30)].concat();
    assert_eq!(rig.ask(&next, 8), a);
    let mut outcome = Received::default();
    outcome.take(&mut events);
    assert_eq!(outcome.error, Some(EngineError::GaveWay));
}

#[test]
fn of_kv_that_is_not_held_a_return_gets_none_that_is_computed_for_it() {
    let mut rig = Rig::new(2, 4_096);
    let prompt = text(1, 300);
    let held = |rig: &mut Rig, prompt: &[Token]| {
        let (export, mut exported) = Export::new(0, prompt.len() as u32, 1, &[]);
        let request = SequenceRequest { held_only: true, gives_way: true, ..request(&[prompt, &[0]].concat(), 0) };
        let mut events = rig.submit_with(request, Some(export));
        let mut outcome = Received::default();
        let mut n_rows = 0;
        while !outcome.is_over() {
            rig.turn();
            outcome.take(&mut events);
            while let Ok(Exported { kv, .. }) = exported.try_recv() {
                n_rows += if let ExportedKv::Chunk(chunk) = kv { chunk.n_positions() } else { 0 };
            }
        }
        (outcome.error.is_none(), n_rows, rig.scheduler.context.n_computed)
    };
    assert_eq!(held(&mut rig, &prompt), (false, 0, 0));
    rig.ask(&prompt, 8);
    let all = [&prompt[..], &reply(&prompt, 7)].concat();
    assert_eq!(held(&mut rig, &all), (true, 307, 307));
    let longer = [&all[..], &text(3, 10)].concat();
    assert_eq!(held(&mut rig, &longer), (false, 307, 307), "what there is of it");
    assert_eq!(rig.ask(&[&all[..], &text(4, 10)].concat(), 8), 307, "and it stays");
}

#[test]
fn what_is_not_held_takes_no_slot_from_another_conversation() {
    let mut rig = Rig::new(1, 4_096);
    let (prompt, other) = (text(1, 300), text(2, 200));
    rig.ask(&prompt, 8);
    let all = [&prompt[..], &reply(&prompt, 7)].concat();
    // One that is not there at all, and one that parts from it early.
    for wanted in [other, [&prompt[..40], &text(3, 100)].concat()] {
        let (export, _exported) = Export::new(0, wanted.len() as u32, 1, &[]);
        let request = SequenceRequest { held_only: true, gives_way: true, ..request(&[&wanted[..], &[0]].concat(), 0) };
        let mut events = [rig.submit_with(request, Some(export))];
        assert!(rig.outcomes(&mut events)[0].error.is_some());
        assert_eq!(rig.scheduler.slots[0].kv, all);
    }
    assert_eq!(rig.scheduler.shared.n_queued.load(Ordering::Acquire), 0);
}
