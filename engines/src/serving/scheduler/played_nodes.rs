//! Draft nodes that a test plays: it reads what they are told, and sends candidates between two turns.

use std::sync::{Arc, Mutex};

use baton_link::drafts::{DraftBoard, DraftOrder, RemoteDrafts};
use baton_link::handoff::{KvPuller, LocalKv, PullEvent, PullOrder};
use baton_schemas::draft::{DraftedTokens, MAX_AHEAD};
use baton_schemas::handoff::{HandoffFailure, KvSource, LinkMeasurement};
use baton_schemas::{SequenceRequest, Token};
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use super::super::super::drafting::remote::DraftNodes;

/// The hash of the vocabulary that all say that they have.
const VOCABULARY: [u8; 32] = [7; 32];

/// Gives each sequence a board, which the test writes to.
#[derive(Default)]
pub(crate) struct PlayedNodes {
    pub(crate) followed: Mutex<Vec<PlayedSequence>>,
    pub(crate) refuses: bool,
}

/// A sequence, as the draft node knows it.
pub(crate) struct PlayedSequence {
    pub(crate) board: Arc<DraftBoard>,
    pub(crate) tokens: Vec<Token>,
    /// Its chain follows so many tokens.
    pub(crate) from: usize,
    pub(crate) chain: Vec<Token>,
}

impl KvPuller for PlayedNodes {
    fn introduce(&self, _: LocalKv) {}

    fn pull(&self, _: PullOrder, _: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent> {
        mpsc::channel(1).1
    }

    fn drafts(&self, order: DraftOrder) -> Option<RemoteDrafts> {
        assert_eq!((order.source.base(), order.request.vocabulary), ("http://draft", VOCABULARY));
        let tokens = order.request.tokens;
        let board = Arc::new(DraftBoard::new(tokens.len(), order.n_vocab));
        let from = tokens.len();
        let followed = PlayedSequence { board: Arc::clone(&board), tokens, from, chain: Vec::new() };
        self.followed.lock().unwrap().push(followed);
        (!self.refuses).then(|| RemoteDrafts::unconnected(board))
    }

    fn measure_link(&self, _: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        Box::pin(async { Err(HandoffFailure::PrefillDown) })
    }
}

impl PlayedSequence {
    /// Hears what was told, as a draft node does.
    pub(crate) fn hear(&mut self) {
        let Some((at, tokens)) = self.board.take_told() else { return };
        assert_eq!(at as usize, self.tokens.len(), "each token is told once");
        for token in tokens {
            let is_right = self.chain.get(self.tokens.len() - self.from) == Some(&token);
            self.tokens.push(token);
            if !is_right {
                (self.from, self.chain) = (self.tokens.len(), Vec::new());
            }
        }
    }

    /// Sends these candidates after those that it has sent.
    pub(crate) fn send(&mut self, tokens: &[Token]) {
        let at = self.from + self.chain.len();
        let n_most = (self.tokens.len() + MAX_AHEAD).saturating_sub(at);
        let tokens = &tokens[..tokens.len().min(n_most)];
        if !tokens.is_empty() && self.board.loss().is_none() {
            self.chain.extend(tokens);
            let drafted = DraftedTokens { from: self.from as u32, at: at as u32, tokens: tokens.to_vec() };
            self.board.receive(&drafted).expect("an honest draft node");
        }
    }
}

impl PlayedNodes {
    /// How an engine whose vocabulary has `n_vocab` tokens calls them.
    pub(crate) fn draft_nodes(self: &Arc<Self>, n_vocab: u32) -> DraftNodes {
        DraftNodes { caller: Arc::clone(self) as Arc<dyn KvPuller>, vocabulary: VOCABULARY, n_vocab }
    }
}

/// The request, for which a draft node may guess.
pub(crate) fn drafted_for(request: &SequenceRequest) -> SequenceRequest {
    SequenceRequest { draft_source: Some(KvSource::at("http://draft")), ..request.clone() }
}
