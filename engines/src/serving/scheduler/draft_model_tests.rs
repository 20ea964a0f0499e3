//! A draft model beside the one that is served: the same replies, more tokens in a step, and nothing but guesses lost if it fails.

use baton_schemas::CacheScope;
use baton_schemas::generate::Sampling;

use super::super::super::drafting::batch_drafter::BatchDrafter;
use super::super::super::drafting::draft_model::{DraftLimits, DraftModel, FollowedSequence, WantedDraft};
use super::super::super::sampler::Sampler;
use super::*;

/// The cells of the draft model's cache: too few for all sequences.
const DRAFT_CELLS: usize = 100;

fn draft_model(change: impl FnOnce(&mut StubContext)) -> DraftModel<StubContext> {
    let mut context = StubContext::new(3, N_VOCAB as usize);
    change(&mut context);
    let limits = DraftLimits { n_slots: 3, n_ctx: 96, n_cells: DRAFT_CELLS, n_batch: 64, share_of_target: 0.1 };
    DraftModel::new(context, limits)
}

fn with_model(n_draft: usize, model: DraftModel<StubContext>) -> Subject {
    scheduler(None, N_CELLS).with_speculation(Some(Speculating::fixed_by(n_draft, BatchDrafter::Model(model))))
}

/// The replies, after which the draft model has only what its sequences had.
fn replies_with(subject: &mut Subject, requests: &[SequenceRequest]) -> Vec<Reply> {
    let replies = replies(subject, requests);
    let BatchDrafter::Model(model) = subject.speculating.as_mut().unwrap().guesser() else { panic!() };
    for slot in 0..3 {
        let known = model.tokens(slot).to_vec();
        assert_eq!(model.context().tokens(slot), known, "slot {slot}");
    }
    assert!(model.context().most_tokens <= DRAFT_CELLS, "{} tokens", model.context().most_tokens);
    replies
}

#[test]
fn a_reply_is_the_same_with_a_draft_model_whatever_it_guesses() {
    let is_broken = proptest::bool::weighted(0.1);
    let refuses_beyond = proptest::option::weighted(0.1, 0usize..2);
    let cases = (proptest::collection::vec(request(), 1..6), 1usize..40, 1u64..4, is_broken, refuses_beyond);
    let n_accepted = accepted_in_cases(&cases, |(requests, n_draft, weights, is_broken, refuses_beyond)| {
        let expected = replies(&mut scheduler(None, N_CELLS), &requests);
        let model = draft_model(|context| {
            (context.weights, context.is_broken, context.refuses_beyond) = (weights, is_broken, refuses_beyond);
        });
        let replies = replies_with(&mut with_model(n_draft, model), &requests);
        prop_assert_eq!(texts(&replies), texts(&expected));
        for reply in &replies {
            let counts = reply.timings.drafts.model;
            prop_assert!(counts.n_accepted <= counts.n && (counts.n == 0 || !is_broken), "{:?}", reply.timings);
        }
        Ok(replies.iter().map(|reply| reply.timings.drafts.model.n_accepted).sum())
    });
    assert!(n_accepted > 0, "no guess of the model was accepted");
}

#[test]
fn a_model_that_agrees_guesses_every_token_right_at_any_temperature() {
    for temperature in [0.0, 1.0] {
        let request = || {
            let mut request = repeating(41);
            request.sampling.temperature = temperature;
            request
        };
        let expected = replies(&mut scheduler(None, N_CELLS), &[request()]);
        let replies = replies_with(&mut with_model(4, draft_model(|_| {})), &[request()]);
        assert_eq!(texts(&replies), texts(&expected));
        let counts = replies[0].timings.drafts.model;
        assert!(counts.n > 20 && counts.n_accepted == counts.n, "temperature {temperature}: {counts:?}");
    }
}

#[test]
fn a_draft_model_keeps_nothing_of_ephemeral_requests_nor_of_another_scope() {
    let mut subject = with_model(4, draft_model(|_| {}));
    replies_with(&mut subject, &[SequenceRequest { ephemeral: true, ..repeating(20) }]);
    let BatchDrafter::Model(model) = subject.speculating.as_mut().unwrap().guesser() else { panic!() };
    assert!((0..3).all(|slot| model.tokens(slot).is_empty()));
    replies_with(&mut subject, &[SequenceRequest { cache_scope: CacheScope(7), ..repeating(20) }]);
    let BatchDrafter::Model(model) = subject.speculating.as_mut().unwrap().guesser() else { panic!() };
    let slot = (0..3).find(|slot| !model.tokens(*slot).is_empty()).unwrap();
    let tokens = model.tokens(slot).to_vec();
    let most = |scope| model.most(FollowedSequence { slot, tokens: &[&tokens[..], &[0; 70]].concat(), scope });
    assert_eq!(most(CacheScope::SHARED), 0, "all of it would have to be computed");
    let of_scope = |n: usize| model.most(FollowedSequence { slot, tokens: &tokens[..n], scope: CacheScope(7) });
    assert!(of_scope(tokens.len()) > 0);
}

#[test]
fn sequences_that_lack_more_than_a_batch_together_are_caught_up_with_in_several_passes() {
    let limits = DraftLimits { n_slots: 3, n_ctx: 96, n_cells: DRAFT_CELLS, n_batch: 32, share_of_target: 0.1 };
    let mut model = DraftModel::new(StubContext::new(3, N_VOCAB as usize), limits);
    let tokens = [0, 1, 2].repeat(10);
    let sampler = || Sampler::new(&Sampling::default(), &[], &tokens, &[]);
    let mut samplers = [sampler(), sampler(), sampler()];
    let mut draft = || {
        let wanted = |(slot, sampler)| {
            let of = FollowedSequence { slot, tokens: &tokens, scope: CacheScope::SHARED };
            WantedDraft { of, n: 2, sampler }
        };
        let mut wanted: Vec<WantedDraft<'_>> = samplers.iter_mut().enumerate().map(wanted).collect();
        model.draft(&mut wanted).iter().map(Vec::len).collect::<Vec<_>>()
    };
    // A pass has room for ten tokens of each.
    assert_eq!([draft(), draft(), draft()], [[0; 3], [0; 3], [2; 3]]);
}
