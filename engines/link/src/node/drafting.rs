//! Drafts the next tokens of another node's sequence, with any engine that generates.
//!
//! The engine goes on with a chain of candidates after the tokens that were told. As long as these are the chain's own, it is not
//! interrupted: the next candidates are on their way while the decode node verifies the last ones. The first other token ends the
//! chain, and a new one begins after it. The engine's prefix cache has all but that token.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::draft::{DraftRequest, DraftedTokens, MAX_AHEAD};
use baton_schemas::streams::ToldTokens;
use baton_schemas::{EngineError, SequenceEvent, SequenceRequest, Token};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::engine::{Engine, SequenceStream};

/// Candidates for a sequence. Ends when nobody tells further tokens. Dropping it frees the engine's slot within one step.
pub(super) type DraftStream = BoxStream<'static, Result<DraftedTokens, EngineError>>;

/// Told tokens that wait, in frames. Each of a decode node's steps sends one, and they are read while the engine computes.
pub(super) const TOLD_WINDOW: usize = 256;

/// How long a slot is kept for a sequence that gets no tokens.
const SLOT_KEPT: Duration = Duration::from_secs(30);

/// Begins to draft. Errors: the request does not fit this engine, or its queue is full.
pub(super) async fn follow(
    engine: Arc<dyn Engine>,
    request: DraftRequest,
    told: mpsc::Receiver<ToldTokens>,
) -> Result<DraftStream, EngineError> {
    let info = engine.info().await?;
    if info.fingerprint.is_none_or(|ours| ours.vocabulary != request.vocabulary) {
        return Err(EngineError::invalid("the two nodes run models with different vocabularies"));
    }
    let from = request.tokens.len();
    let mut session = DraftSession { engine, request, told, from, chain: Vec::new(), work: DraftWork::ToBegin };
    session.begin().await?;
    let candidates = async_stream::try_stream! {
        while let Some(drafted) = session.next().await? {
            yield drafted;
        }
    };
    Ok(candidates.boxed())
}

struct DraftSession {
    engine: Arc<dyn Engine>,
    /// Its tokens are all that were told.
    request: DraftRequest,
    told: mpsc::Receiver<ToldTokens>,
    /// The told tokens that the chain follows.
    from: usize,
    /// The candidates after these, sent and told ones, too.
    chain: Vec<Token>,
    work: DraftWork,
}

/// The engine's work for a sequence.
enum DraftWork {
    /// It is to go on after the chain.
    ToBegin,
    /// It goes on.
    Running(SequenceStream),
    /// It gave its slot back, until tokens are told.
    Resting,
    /// The model has ended the text, or its context is full. Only another chain goes on.
    Ended,
}

enum DraftStep {
    Told(ToldTokens),
    /// Nobody tells further tokens.
    Left,
    Silent,
    Event(Option<Result<SequenceEvent, EngineError>>),
}

impl DraftSession {
    /// The next candidates. `None`: nobody tells further tokens.
    async fn next(&mut self) -> Result<Option<DraftedTokens>, EngineError> {
        loop {
            if let DraftWork::ToBegin = self.work {
                self.begin().await?;
            }
            match self.step().await {
                DraftStep::Told(told) => self.take(&told)?,
                DraftStep::Left => return Ok(None),
                DraftStep::Silent => {
                    if let DraftWork::Running(_) = self.work {
                        self.work = DraftWork::Resting;
                    }
                }
                DraftStep::Event(Some(Ok(SequenceEvent::Token(token)))) => return Ok(Some(self.add(token.id))),
                DraftStep::Event(Some(Ok(SequenceEvent::Finished { .. }))) => self.work = DraftWork::Ended,
                DraftStep::Event(Some(Ok(_))) => {}
                DraftStep::Event(Some(Err(error))) => return Err(error),
                DraftStep::Event(None) => return Err(EngineError::lost("the engine's stream ended early")),
            }
        }
    }

    /// Waits for told tokens, and for the engine's unless it is far enough ahead. Told ones come first.
    async fn step(&mut self) -> DraftStep {
        let is_behind = self.n_ahead() < MAX_AHEAD;
        let told = timeout(SLOT_KEPT, self.told.recv()).map(|told| match told {
            Ok(Some(told)) => DraftStep::Told(told),
            Ok(None) => DraftStep::Left,
            Err(_) => DraftStep::Silent,
        });
        let event = async {
            match &mut self.work {
                DraftWork::Running(stream) if is_behind => DraftStep::Event(stream.next().await),
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            told = told => told,
            event = event => event,
        }
    }

    /// Starts the engine after the chain.
    async fn begin(&mut self) -> Result<(), EngineError> {
        let DraftRequest { tokens, sampling, cache_scope, .. } = &self.request;
        let sequence = SequenceRequest {
            prompt: [&tokens[..self.from], &self.chain].concat(),
            sampling: sampling.clone(),
            cache_scope: *cache_scope,
            ..SequenceRequest::default()
        };
        self.work = DraftWork::Running(self.engine.generate(sequence).await?);
        Ok(())
    }

    /// Compares told tokens with the chain. Errors: they do not follow those that were told before.
    fn take(&mut self, told: &ToldTokens) -> Result<(), EngineError> {
        if told.at as usize != self.request.tokens.len() {
            return Err(EngineError::invalid("tokens do not follow those that were told before"));
        }
        let mut is_broken = false;
        for token in &told.tokens {
            is_broken |= self.chain.get(self.request.tokens.len() - self.from) != Some(token);
            self.request.tokens.push(*token);
        }
        if is_broken {
            (self.from, self.chain) = (self.request.tokens.len(), Vec::new());
        }
        if is_broken || matches!(self.work, DraftWork::Resting) {
            // Dropped first, so that the engine gets the slot back before the next sequence asks for it.
            self.work = DraftWork::ToBegin;
        }
        Ok(())
    }

    fn add(&mut self, token: Token) -> DraftedTokens {
        let at = self.from + self.chain.len();
        self.chain.push(token);
        DraftedTokens { from: self.from as u32, at: at as u32, tokens: vec![token] }
    }

    /// The candidates after the told tokens.
    fn n_ahead(&self) -> usize {
        (self.from + self.chain.len()).saturating_sub(self.request.tokens.len())
    }
}
