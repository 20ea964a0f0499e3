//! A draft node beside the model: the same replies, whatever it sends.

use baton_schemas::draft::{DraftedTokens, DrafterLoss};

use super::played_nodes::{PlayedNodes, PlayedSequence, drafted_for};
use super::*;

fn with_nodes(n_draft: usize, nodes: &Arc<PlayedNodes>) -> Subject {
    let speculating = Speculating::fixed(n_draft).with_draft_nodes(Some(nodes.draft_nodes(N_VOCAB)));
    scheduler(None, N_CELLS).with_speculation(Some(speculating))
}

/// The replies while `act` plays the draft node before each turn.
fn replies_beside(
    subject: &mut Subject,
    requests: &[SequenceRequest],
    nodes: &PlayedNodes,
    mut act: impl FnMut(usize, &mut PlayedSequence),
) -> Vec<Reply> {
    let mut readers: Vec<Reader> = requests.iter().map(|request| submit(subject, drafted_for(request), None)).collect();
    for _ in 0..2_000 {
        nodes.followed.lock().unwrap().iter_mut().enumerate().for_each(|(n, followed)| act(n, followed));
        subject.turn();
        check_slots(subject);
        readers.iter_mut().for_each(Reader::read);
        if readers.iter().all(|reader| reader.reply.end.is_some()) {
            return readers.into_iter().map(|reader| reader.reply).collect();
        }
    }
    panic!("the replies do not end");
}

#[test]
fn candidates_that_are_right_take_fewer_steps_at_any_temperature() {
    for temperature in [0.0, 1.0] {
        let mut request = repeating(41);
        request.sampling.temperature = temperature;
        let expected = replies(&mut scheduler(None, N_CELLS), std::slice::from_ref(&request));
        let whole: Vec<Token> =
            request.prompt.iter().copied().chain(expected[0].tokens.iter().map(|(token, _)| *token)).collect();
        let nodes = Arc::new(PlayedNodes::default());
        let mut subject = with_nodes(4, &nodes);
        let mut n_turns = 0;
        let found = replies_beside(&mut subject, &[request], &nodes, |_, followed| {
            n_turns += 1;
            followed.hear();
            let end = (followed.from + followed.chain.len()).min(whole.len());
            let more = whole[end..(end + 6).min(whole.len())].to_vec();
            followed.send(&more);
        });
        assert_eq!(texts(&found), texts(&expected));
        let Timings { drafts, drafter_lost, .. } = found[0].timings;
        assert!(drafts.remote.n > 8 && drafts.remote.n_accepted == drafts.remote.n, "{drafts:?}");
        assert_eq!(drafter_lost, None);
        assert!(n_turns < 30, "{n_turns} turns");
    }
}

#[test]
fn a_reply_is_the_same_whatever_an_honest_draft_node_guesses_and_however_late() {
    let acts = proptest::collection::vec((any::<bool>(), proptest::collection::vec(0..N_VOCAB, 0..7)), 1..40);
    let cases = (proptest::collection::vec(request(), 1..6), 1usize..40, acts);
    let n_accepted = accepted_in_cases(&cases, |(requests, n_draft, acts)| {
        let expected = replies(&mut scheduler(None, N_CELLS), &requests);
        let nodes = Arc::new(PlayedNodes::default());
        let mut n = 0;
        let found = replies_beside(&mut with_nodes(n_draft, &nodes), &requests, &nodes, |_, followed| {
            n += 1;
            let (hears, tokens) = &acts[n % acts.len()];
            if *hears {
                followed.hear();
            }
            followed.send(tokens);
        });
        prop_assert_eq!(texts(&found), texts(&expected));
        for reply in &found {
            let counts = reply.timings.drafts.remote;
            prop_assert!(counts.n_accepted <= counts.n, "{:?}", reply.timings);
        }
        Ok(found.iter().map(|reply| reply.timings.drafts.remote.n_accepted).sum())
    });
    assert!(n_accepted > 0, "no candidate was accepted");
}

#[test]
fn a_reply_is_the_same_whatever_a_hostile_draft_node_sends() {
    let tokens = proptest::collection::vec(prop_oneof![9 => 0..N_VOCAB, 1 => any::<Token>()], 0..40);
    let frame = (0u32..90, 0u32..90, tokens).prop_map(|(from, at, tokens)| DraftedTokens { from, at, tokens });
    let cases = (proptest::collection::vec(request(), 1..4), 1usize..40, proptest::collection::vec(frame, 1..60));
    accepted_in_cases(&cases, |(requests, n_draft, frames)| {
        let expected = replies(&mut scheduler(None, N_CELLS), &requests);
        let nodes = Arc::new(PlayedNodes::default());
        let mut n = 0;
        let found = replies_beside(&mut with_nodes(n_draft, &nodes), &requests, &nodes, |_, followed| {
            n += 1;
            followed.hear();
            let _ = followed.board.receive(&frames[n % frames.len()]);
        });
        prop_assert_eq!(texts(&found), texts(&expected));
        let known = [None, Some(DrafterLoss::Invalid), Some(DrafterLoss::Wrong)];
        prop_assert!(found.iter().all(|reply| known.contains(&reply.timings.drafter_lost)));
        Ok(0)
    });
}

#[test]
fn a_draft_node_that_is_lost_or_never_there_costs_no_token() {
    let expected = replies(&mut scheduler(None, N_CELLS), &[repeating(30)]);
    for (refuses, loss) in [(false, DrafterLoss::Lost), (true, DrafterLoss::Refused)] {
        let nodes = Arc::new(PlayedNodes { refuses, ..PlayedNodes::default() });
        let mut n = 0;
        let request = SequenceRequest { reports_drafts: true, ..repeating(30) };
        let found = replies_beside(&mut with_nodes(4, &nodes), &[request], &nodes, |_, followed| {
            n += 1;
            if n == 5 {
                followed.board.end(DrafterLoss::Lost);
            }
        });
        assert_eq!(texts(&found), texts(&expected));
        assert_eq!(found[0].timings.drafter_lost, Some(loss));
        let reported: Vec<DrafterLoss> = found[0].reports.iter().filter_map(|(_, report)| report.loss).collect();
        assert_eq!(reported, [loss], "it is said once, with a token");
    }
}

#[test]
fn no_draft_node_hears_of_a_request_that_wants_the_same_reply_again() {
    let nodes = Arc::new(PlayedNodes::default());
    let mut request = repeating(20);
    request.sampling.repeatable = true;
    replies_beside(&mut with_nodes(4, &nodes), &[request], &nodes, |_, _| {});
    assert!(nodes.followed.lock().unwrap().is_empty());
}
