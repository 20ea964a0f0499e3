//! Candidates of a draft node, as one of a sequence's drafters.
//!
//! The draft node is told the sequence's tokens step by step. What has come of its candidates when a step is made is a draft that
//! costs nothing. Where it promises more, the step waits for further ones, as it would for the passes of a draft model. The reply needs
//! none of them: a draft node that is lost, late or wrong is dropped.

use std::sync::Arc;
use std::time::Instant;

use baton_link::drafts::{DraftOrder, DraftPace, RemoteDrafts};
use baton_link::handoff::KvPuller;
use baton_schemas::draft::{DraftRequest, DrafterKind, DrafterLoss};
use baton_schemas::handoff::KvSource;
use baton_schemas::{SequenceRequest, Token};

use super::drafter::{Confidence, Drafter};
use super::rests::Rests;

/// Steps in a row for which no candidate was there, after which the draft node is dropped.
pub(crate) const MOST_LATE: u32 = 256;

/// Before its first candidate a draft node computes the prompt, too: it gets a step more for each so many tokens.
const PROMPT_PER_STEP: usize = 16;

/// Tokens that a draft node misses at most: fewer than may wait for its connection.
const MOST_MISSED: usize = 1_024;

/// Calls draft nodes for an engine.
#[derive(Clone)]
pub(crate) struct DraftNodes {
    pub(crate) caller: Arc<dyn KvPuller>,
    /// The hash of the engine's vocabulary.
    pub(crate) vocabulary: [u8; 32],
    /// Its number of tokens.
    pub(crate) n_vocab: u32,
}

/// A sequence's draft node.
pub(crate) struct RemoteDrafter {
    state: RemoteState,
    n_followed: usize,
    /// Steps in a row without a candidate.
    n_late: u32,
    /// After so many of them it is dropped.
    most_late: u32,
    /// The tokens that the sequence had when that was last counted.
    n_counted: usize,
    rests: Rests,
}

enum RemoteState {
    /// It is asked once the sequence has a slot.
    ToOpen(Box<ToOpen>),
    Open(RemoteDrafts),
    Lost(DrafterLoss),
}

struct ToOpen {
    nodes: DraftNodes,
    source: KvSource,
    request: DraftRequest,
}

impl RemoteDrafter {
    /// The draft node that a request names, if it names one.
    pub(crate) fn of(request: &SequenceRequest, nodes: &DraftNodes) -> Option<RemoteDrafter> {
        let source = request.draft_source.clone()?;
        let SequenceRequest { ref sampling, cache_scope, .. } = *request;
        let request =
            DraftRequest { vocabulary: nodes.vocabulary, tokens: Vec::new(), sampling: sampling.clone(), cache_scope };
        let state = RemoteState::ToOpen(Box::new(ToOpen { nodes: nodes.clone(), source, request }));
        Some(RemoteDrafter {
            state,
            n_followed: 0,
            n_late: 0,
            most_late: MOST_LATE,
            n_counted: 0,
            rests: Rests::default(),
        })
    }

    #[cfg(test)]
    pub(crate) fn opened(drafts: RemoteDrafts, n_followed: usize) -> RemoteDrafter {
        RemoteDrafter {
            state: RemoteState::Open(drafts),
            n_followed,
            n_late: 0,
            most_late: most_late(n_followed),
            n_counted: 0,
            rests: Rests::default(),
        }
    }

    /// Why it was dropped, if it was.
    pub(crate) fn loss(&self) -> Option<DrafterLoss> {
        match &self.state {
            RemoteState::ToOpen(_) => None,
            RemoteState::Open(drafts) => drafts.board.loss(),
            RemoteState::Lost(loss) => Some(*loss),
        }
    }

    /// When candidates are to be expected, and the confidence in them.
    pub(crate) fn pace(&self) -> Option<(DraftPace, Confidence)> {
        let drafts = self.asked()?;
        let pace = drafts.board.pace()?;
        Some((pace, Confidence::of_chain(drafts.board.candidates(0, &mut Vec::new()))))
    }

    /// Waits until `n` candidates are there, but not beyond `until`.
    pub(crate) fn wait(&self, n: usize, until: Instant) {
        if let Some(drafts) = self.asked() {
            drafts.board.wait(n, until);
        }
    }

    /// A step is about to verify candidates, or none. Where it had some and verifies none for long, the draft node is not asked for a
    /// while.
    pub(crate) fn decided(&mut self, is_used: bool) {
        if self.asked().is_some_and(|drafts| drafts.board.n_ready() > 0) {
            self.rests.offered(is_used);
        }
    }

    /// Its drafts, if it is told the sequence's tokens.
    fn asked(&self) -> Option<&RemoteDrafts> {
        match &self.state {
            RemoteState::Open(drafts) if !self.rests.is_resting() => Some(drafts),
            _ => None,
        }
    }

    fn drop_node(&mut self, loss: DrafterLoss) {
        tracing::info!(reason = loss.as_str(), "a sequence goes on without its draft node");
        self.state = RemoteState::Lost(loss);
    }
}

impl Drafter for RemoteDrafter {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Remote
    }

    fn follow(&mut self, tokens: &[Token]) {
        self.rests.step();
        match &mut self.state {
            RemoteState::ToOpen(to_open) => {
                let ToOpen { nodes, source, request } = &mut **to_open;
                request.tokens = tokens.to_vec();
                self.most_late = most_late(tokens.len());
                let order = DraftOrder { source: source.clone(), request: request.clone(), n_vocab: nodes.n_vocab };
                self.state = match nodes.caller.drafts(order) {
                    Some(drafts) => RemoteState::Open(drafts),
                    None => RemoteState::Lost(DrafterLoss::Refused),
                };
            }
            RemoteState::Open(drafts) => match drafts.board.loss() {
                Some(loss) => self.drop_node(loss),
                // When it is asked again, it is told all that it misses now.
                None if self.rests.is_resting() && tokens.len() < self.n_followed + MOST_MISSED => return,
                None => drafts.board.tell(&tokens[self.n_followed.min(tokens.len())..]),
            },
            RemoteState::Lost(_) => {}
        }
        self.n_followed = tokens.len();
    }

    fn draft(&mut self, tokens: &[Token], n_max: usize, draft: &mut Vec<Token>) -> Confidence {
        let Some(drafts) = self.asked() else { return Confidence::Low };
        let n_right = drafts.board.candidates(n_max, draft);
        let is_new = std::mem::replace(&mut self.n_counted, tokens.len()) != tokens.len();
        if draft.is_empty() {
            self.n_late += u32::from(is_new);
        } else {
            (self.n_late, self.most_late) = (0, MOST_LATE);
        }
        if self.n_late >= self.most_late {
            self.drop_node(DrafterLoss::Late);
        }
        Confidence::of_chain(n_right)
    }
}

/// The steps in a row without the first candidate for a sequence of so many tokens, after which its draft node is dropped.
fn most_late(n_tokens: usize) -> u32 {
    MOST_LATE.saturating_add(u32::try_from(n_tokens / PROMPT_PER_STEP).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use baton_link::drafts::DraftBoard;
    use baton_schemas::draft::DraftedTokens;

    use super::*;

    fn drafter(n_tokens: usize) -> (RemoteDrafter, Arc<DraftBoard>) {
        let board = Arc::new(DraftBoard::new(n_tokens, 100));
        (RemoteDrafter::opened(RemoteDrafts::unconnected(Arc::clone(&board)), n_tokens), board)
    }

    /// A step of a sequence that has these tokens.
    fn step(drafter: &mut RemoteDrafter, tokens: &[Token]) -> (Vec<Token>, Confidence) {
        drafter.follow(tokens);
        let mut draft = Vec::new();
        let confidence = drafter.draft(tokens, 8, &mut draft);
        (draft, confidence)
    }

    #[test]
    fn what_has_come_is_a_draft_and_its_confidence_grows_with_what_was_right() {
        let (mut drafter, board) = drafter(2);
        let mut tokens = vec![1, 2];
        assert_eq!(step(&mut drafter, &tokens), (vec![], Confidence::Medium));
        board.receive(&DraftedTokens { from: 2, at: 2, tokens: vec![3, 4] }).unwrap();
        assert_eq!(step(&mut drafter, &tokens), (vec![3, 4], Confidence::Medium));
        tokens.push(3);
        assert_eq!(step(&mut drafter, &tokens), (vec![4], Confidence::High));
        assert_eq!(board.take_told(), Some((2, vec![3])));
        tokens.push(9);
        assert_eq!(step(&mut drafter, &tokens).0, [0; 0]);
    }

    #[test]
    fn a_silent_draft_node_is_dropped_after_a_number_of_steps() {
        // A long prompt takes it a while.
        for (n_tokens, n_steps) in [(1, MOST_LATE), (1_600, MOST_LATE + 100)] {
            let (mut drafter, board) = drafter(n_tokens);
            let mut tokens = vec![1; n_tokens];
            for n in 0..n_steps {
                assert_eq!(drafter.loss(), None, "{n} steps");
                step(&mut drafter, &tokens);
                // A step may ask again.
                drafter.draft(&tokens, 8, &mut Vec::new());
                tokens.push(1);
            }
            assert_eq!(drafter.loss(), Some(DrafterLoss::Late));
            drop(drafter);
            assert_eq!(Arc::strong_count(&board), 1, "nothing of it is kept");
        }
        let (mut drafter, board) = drafter(1_600);
        board.receive(&DraftedTokens { from: 1_600, at: 1_600, tokens: vec![2] }).unwrap();
        let mut tokens = vec![1; 1_600];
        let n_steps = (0..).take_while(|_| {
            step(&mut drafter, &tokens);
            tokens.push(1);
            drafter.loss().is_none()
        });
        assert_eq!(n_steps.count() as u32, MOST_LATE, "its first candidate has come");
    }

    #[test]
    fn a_draft_node_whose_candidates_no_step_verifies_rests_and_then_hears_what_it_missed() {
        let (mut drafter, board) = drafter(1);
        let mut tokens = vec![1];
        // The tokens that it was told, and the end of its candidates. All are right, which does not pay here.
        let (mut told, mut end) = (vec![1], 1);
        for _ in 0..400 {
            drafter.follow(&tokens);
            if let Some((at, more)) = board.take_told() {
                assert_eq!(at as usize, told.iter().sum::<usize>());
                told.push(more.len());
            }
            while end < told.iter().sum::<usize>() as u32 + 4 {
                board.receive(&DraftedTokens { from: 1, at: end, tokens: vec![1] }).unwrap();
                end += 1;
            }
            drafter.draft(&tokens, 8, &mut Vec::new());
            drafter.decided(false);
            tokens.push(1);
        }
        assert_eq!(told.iter().copied().filter(|n| *n > 1).collect::<Vec<_>>(), [64, 128], "{told:?}");
        assert_eq!(drafter.loss(), None, "a rest is not late");
    }

    #[test]
    fn drafts_that_have_ended_are_given_up_with_their_reason() {
        let (mut drafter, board) = drafter(1);
        board.end(DrafterLoss::Lost);
        assert_eq!(step(&mut drafter, &[1, 2]).0, [0; 0]);
        assert_eq!((drafter.loss(), drafter.pace()), (Some(DrafterLoss::Lost), None));
    }
}
