//! The model's own head: the same replies, more tokens in a step, and nothing but guesses lost if it fails.

use super::super::super::drafting::batch_drafter::BatchDrafter;
use super::super::super::drafting::draft_model::DraftLimits;
use super::super::super::drafting::prediction_head::HeadDrafts;
use super::super::super::stub_engine::StubHead;
use super::*;

/// The cells of the head's cache: too few for all sequences.
const HEAD_CELLS: usize = 100;

fn with_head(n_draft: usize, change: impl FnOnce(&mut StubHead)) -> Subject {
    let mut head = StubHead::new(3, N_VOCAB as usize);
    change(&mut head);
    let limits = DraftLimits { n_slots: 3, n_ctx: 96, n_cells: HEAD_CELLS, n_batch: 24, share_of_target: 0.1 };
    let guesser = BatchDrafter::Head(HeadDrafts::new(head, limits));
    scheduler(None, N_CELLS).with_speculation(Some(Speculating::fixed_by(n_draft, guesser)))
}

fn n_tokens(subject: &mut Subject) -> usize {
    let BatchDrafter::Head(head) = subject.speculating.as_mut().unwrap().guesser() else { panic!() };
    head.head().n_tokens()
}

#[test]
fn a_reply_is_the_same_with_a_head_whatever_it_guesses() {
    let refuses_beyond = prop_oneof![9 => Just(usize::MAX), 1 => 0usize..6];
    let cases = (proptest::collection::vec(request(), 1..6), 1usize..40, 0u64..3, refuses_beyond);
    let n_accepted = accepted_in_cases(&cases, |(requests, n_draft, error, refuses_beyond)| {
        let expected = replies(&mut scheduler(None, N_CELLS), &requests);
        let mut subject = with_head(n_draft, |head| (head.error, head.refuses_beyond) = (error, refuses_beyond));
        let replies = replies(&mut subject, &requests);
        prop_assert_eq!(texts(&replies), texts(&expected));
        for reply in &replies {
            let counts = reply.timings.drafts.mtp;
            prop_assert!(counts.n_accepted <= counts.n, "{:?}", reply.timings);
        }
        prop_assert!(n_tokens(&mut subject) <= HEAD_CELLS);
        Ok(replies.iter().map(|reply| reply.timings.drafts.mtp.n_accepted).sum())
    });
    assert!(n_accepted > 0, "no guess of the head was accepted");
}

#[test]
fn a_head_that_agrees_guesses_every_token_right_at_any_temperature() {
    for temperature in [0.0, 1.0] {
        let request = || {
            let mut request = repeating(41);
            request.sampling.temperature = temperature;
            request
        };
        let alone = replies(&mut scheduler(None, N_CELLS), &[request()]);
        let replies = replies(&mut with_head(4, |_| {}), &[request()]);
        assert_eq!(texts(&replies), texts(&alone));
        let counts = replies[0].timings.drafts.mtp;
        assert!(counts.n >= 30 && counts.n == counts.n_accepted, "{temperature}: {counts:?}");
    }
}

#[test]
fn what_a_slot_forgets_its_head_forgets() {
    let mut subject = with_head(4, |_| {});
    let request = SequenceRequest { ephemeral: true, ..repeating(20) };
    replies(&mut subject, &[request]);
    assert_eq!(n_tokens(&mut subject), 0);
}
