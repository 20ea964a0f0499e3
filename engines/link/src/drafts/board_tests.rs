use std::sync::Arc;

use proptest::prelude::*;

use super::*;

const N_VOCAB: u32 = 1_000;

fn drafted(from: u32, at: u32, tokens: &[Token]) -> DraftedTokens {
    DraftedTokens { from, at, tokens: tokens.to_vec() }
}

/// A board of a sequence of 10 tokens.
fn board() -> DraftBoard {
    DraftBoard::new(10, N_VOCAB)
}

/// Sends what is to be told, as the connection does.
fn flush(board: &DraftBoard) {
    board.take_told();
}

fn ready(board: &DraftBoard) -> Vec<Token> {
    let mut out = Vec::new();
    board.candidates(MAX_AHEAD, &mut out);
    out
}

#[test]
fn candidates_follow_the_sequence_while_they_are_right_and_a_wrong_one_ends_their_chain() {
    let board = board();
    board.receive(&drafted(10, 10, &[1, 2, 3])).unwrap();
    board.receive(&drafted(10, 13, &[4])).unwrap();
    assert_eq!(ready(&board), [1, 2, 3, 4]);
    board.tell(&[1, 2]);
    flush(&board);
    assert_eq!(ready(&board), [3, 4]);
    board.tell(&[9]);
    assert_eq!(ready(&board), [0; 0]);
    flush(&board);
    // The node has not heard of it yet.
    board.receive(&drafted(10, 14, &[5, 6])).unwrap();
    assert_eq!(ready(&board), [0; 0]);
    board.receive(&drafted(13, 13, &[7, 8])).unwrap();
    assert_eq!(ready(&board), [7, 8]);
}

#[test]
fn candidates_that_come_after_their_tokens_count_if_they_are_right() {
    let board = board();
    board.tell(&[1, 2]);
    flush(&board);
    board.receive(&drafted(10, 10, &[1, 2, 3])).unwrap();
    assert_eq!(ready(&board), [3]);
    board.tell(&[3, 4]);
    flush(&board);
    board.receive(&drafted(10, 13, &[5, 6])).unwrap();
    assert_eq!(ready(&board), [0; 0], "another token came");
}

#[test]
fn what_no_draft_node_sends_ends_the_drafts() {
    for (bad, what) in [
        (drafted(10, 10, &[N_VOCAB]), "a token that does not exist"),
        (drafted(10, 10, &[1; MAX_AHEAD + 1]), "too many"),
        (drafted(10, 10, &[]), "none"),
        (drafted(10, 11, &[1]), "a gap"),
        (drafted(9, 9, &[1]), "a chain before the first"),
        (drafted(11, 11, &[1]), "after a token that it was not told"),
        (drafted(10, u32::MAX, &[1]), "a position at the end of the range"),
        (drafted(u32::MAX, u32::MAX, &[1]), "a chain there"),
    ] {
        let board = board();
        assert_eq!(board.receive(&bad), Err(InvalidDraft), "{what}");
        assert_eq!(board.loss(), Some(DrafterLoss::Invalid), "{what}");
        assert_eq!(board.pace(), None);
    }
    let board = board();
    for _ in 0..MAX_AHEAD {
        let end = board.lock().chain.end as u32;
        board.receive(&drafted(10, end, &[1])).unwrap();
    }
    let end = board.lock().chain.end as u32;
    assert_eq!(board.receive(&drafted(10, end, &[1])), Err(InvalidDraft), "further ahead than allowed");
    assert_eq!(board.n_ready(), 0, "whoever sees the end sees no candidates");
}

#[test]
fn drafts_that_are_always_wrong_end_after_a_number_of_chains() {
    let board = board();
    for n in 0..MAX_WRONG {
        assert_eq!(board.loss(), None, "{n}");
        let at = board.lock().n_tokens as u32;
        board.receive(&drafted(at, at, &[1])).unwrap();
        board.tell(&[2]);
        flush(&board);
    }
    assert_eq!(board.loss(), Some(DrafterLoss::Wrong));
}

#[test]
fn what_is_never_told_is_bounded() {
    let board = board();
    for _ in 0..MAX_UNTOLD {
        board.tell(&[1]);
    }
    assert_eq!(board.loss(), None);
    board.tell(&[1]);
    assert_eq!(board.loss(), Some(DrafterLoss::Late));
    assert!(board.lock().recent.len() <= RECENT);
}

#[tokio::test]
async fn tokens_are_told_once_and_in_their_order() {
    let board = board();
    board.tell(&[1]);
    board.tell(&[2, 3]);
    assert_eq!(board.to_tell().await, Some((10, vec![1, 2, 3])));
    board.tell(&[4]);
    assert_eq!(board.to_tell().await, Some((13, vec![4])));
    board.end(DrafterLoss::Lost);
    assert_eq!(board.to_tell().await, None);
}

#[test]
fn a_step_that_waits_goes_on_when_the_candidates_are_there_and_when_none_will_come() {
    let board = Arc::new(board());
    let far = Instant::now() + Duration::from_secs(600);
    for (until, send) in [(2, vec![1, 2]), (3, vec![3])] {
        let theirs = Arc::clone(&board);
        let node = std::thread::spawn(move || {
            let end = theirs.lock().chain.end as u32;
            theirs.receive(&drafted(10, end, &send)).unwrap();
        });
        board.wait(until, far);
        assert_eq!(ready(&board).len(), until);
        node.join().unwrap();
    }
    let theirs = Arc::clone(&board);
    let node = std::thread::spawn(move || theirs.end(DrafterLoss::Lost));
    board.wait(9, far);
    assert_eq!(board.loss(), Some(DrafterLoss::Lost));
    node.join().unwrap();
    board.wait(9, Instant::now());
}

#[test]
fn the_pace_is_measured_from_what_is_told_to_what_comes() {
    let board = board();
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    {
        let mut state = board.lock();
        state.receive(&drafted(10, 10, &[1]), at(0)).unwrap();
        state.receive(&drafted(10, 11, &[2]), at(3)).unwrap();
        assert_eq!(state.clock.pace(2, at(3)), None, "no chain was begun anew");
        state.tell(&[9], at(10));
        state.take_told();
        state.receive(&drafted(10, 12, &[3]), at(11)).unwrap();
        state.receive(&drafted(11, 11, &[4]), at(15)).unwrap();
        let pace = state.clock.pace(1, at(16)).unwrap();
        let ms = |n| Duration::from_millis(n);
        assert_eq!(pace, DraftPace { n_ready: 1, next_in: ms(2), interval: ms(3) });
        state.tell(&[4, 5], at(20));
        assert_eq!(state.clock.pace(0, at(21)).unwrap().next_in, ms(4));
        assert_eq!(state.clock.pace(0, at(30)).unwrap().next_in, ms(0), "late");
        assert_eq!(state.clock.pace(0, at(36)), None, "long overdue");
        assert!(state.clock.pace(2, at(36)).is_some(), "it may be as far ahead as it may be");
    }
}

/// Frames as a real draft node sends them, and frames of any content.
#[derive(Debug, Clone)]
enum Move {
    Tell(Vec<Token>),
    Flush,
    Frame(DraftedTokens),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let tokens = || prop::collection::vec(0u32..4, 0..40);
    let frame = (8u32..40, 8u32..60, tokens()).prop_map(|(from, at, tokens)| drafted(from, at, &tokens));
    let one = prop_oneof![tokens().prop_map(Move::Tell), Just(Move::Flush), frame.prop_map(Move::Frame)];
    prop::collection::vec(one, 0..60)
}

proptest! {
    #[test]
    fn whatever_comes_candidates_are_few_and_of_the_vocabulary(moves in moves()) {
        let board = DraftBoard::new(10, 3);
        for one in moves {
            match one {
                Move::Tell(tokens) => board.tell(&tokens),
                Move::Flush => flush(&board),
                Move::Frame(frame) => {
                    let _ = board.receive(&frame);
                }
            }
            let ahead = ready(&board);
            prop_assert!(ahead.len() <= MAX_AHEAD && ahead.iter().all(|token| *token < 3));
            prop_assert!(board.lock().recent.len() <= RECENT);
        }
    }
}
