//! The tokens of a sequence that a decode node has told a draft node, and the candidates that have come.
//!
//! A sequence only grows, so its position alone says what a chain of candidates follows. Candidates for positions that the sequence
//! has by now are compared with its tokens. The first wrong one ends the chain: the draft node learns it from what it is told, and
//! begins another one. What still comes of the old one is dropped.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_schemas::Token;
use baton_schemas::draft::{DraftedTokens, DrafterLoss, MAX_AHEAD};
use tokio::sync::Notify;

/// The newest tokens of the sequence, with which late candidates are compared. A chain that is further behind is of no use.
const RECENT: usize = 256;

/// Tokens that wait for the connection. A draft node that is so far behind is late.
const MAX_UNTOLD: usize = 4_096;

/// So many chains in a row whose first candidate is wrong end the drafts.
const MAX_WRONG: u32 = 96;

/// The weight of the newest measurement.
const WEIGHT: f64 = 0.2;

/// A candidate that takes this many times longer than usual is no longer awaited: its machine may be frozen.
const OVERDUE: f64 = 3.0;

/// The drafts of one sequence.
pub struct DraftBoard {
    state: Mutex<BoardState>,
    /// Notified when candidates come, and at the end.
    has_come: Condvar,
    /// Notified when there is something to tell, and at the end.
    is_to_tell: Notify,
}

/// When further candidates are to be expected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftPace {
    /// Candidates after the sequence's last token.
    pub n_ready: usize,
    /// Until the next one comes.
    pub next_in: Duration,
    /// Between two of them.
    pub interval: Duration,
}

#[derive(Debug)]
struct BoardState {
    n_vocab: u32,
    /// The tokens that the sequence has.
    n_tokens: usize,
    /// The newest of them.
    recent: VecDeque<Token>,
    /// Tokens that the connection has not taken.
    untold: Vec<Token>,
    chain: DraftChain,
    /// Chains in a row whose first candidate was wrong.
    n_wrong: u32,
    clock: PaceClock,
    loss: Option<DrafterLoss>,
}

/// Candidates that follow the same tokens.
#[derive(Debug)]
struct DraftChain {
    /// Its first position.
    from: usize,
    /// The position after its last candidate.
    end: usize,
    /// All candidates for tokens that the sequence has are these.
    is_right: bool,
    /// Candidates that were right.
    n_right: usize,
    /// Candidates for the next tokens.
    ahead: VecDeque<Token>,
}

/// Measures how fast candidates come.
#[derive(Debug, Default)]
struct PaceClock {
    /// The draft node was told to begin a chain here, and when.
    awaited: Option<(usize, Instant)>,
    /// When the last candidate came.
    last: Option<Instant>,
    /// Seconds until the first candidate of a new chain; 0 if not measured.
    first: f64,
    /// Seconds between two candidates; 0 if not measured.
    interval: f64,
}

/// No draft node sends this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidDraft;

impl DraftBoard {
    /// Drafts of a sequence with so many tokens, all of which the draft node is told with the request. Candidates are below `n_vocab`.
    pub fn new(n_tokens: usize, n_vocab: u32) -> DraftBoard {
        let chain = DraftChain { from: n_tokens, end: n_tokens, is_right: true, n_right: 0, ahead: VecDeque::new() };
        let state = BoardState {
            n_vocab,
            n_tokens,
            recent: VecDeque::new(),
            untold: Vec::new(),
            chain,
            n_wrong: 0,
            clock: PaceClock::default(),
            loss: None,
        };
        DraftBoard { state: Mutex::new(state), has_come: Condvar::new(), is_to_tell: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, BoardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sequence has got these tokens.
    pub fn tell(&self, tokens: &[Token]) {
        let mut state = self.lock();
        if tokens.is_empty() || state.loss.is_some() {
            return;
        }
        state.tell(tokens, Instant::now());
        drop(state);
        self.is_to_tell.notify_one();
    }

    /// The tokens that are to be told, with the position of the first. `None`: the drafts have ended.
    pub(crate) async fn to_tell(&self) -> Option<(u32, Vec<Token>)> {
        loop {
            {
                let mut state = self.lock();
                if state.loss.is_some() {
                    return None;
                }
                if let Some(told) = state.take_told() {
                    return Some(told);
                }
            }
            self.is_to_tell.notified().await;
        }
    }

    /// The same, if there are any.
    pub fn take_told(&self) -> Option<(u32, Vec<Token>)> {
        self.lock().take_told()
    }

    /// Candidates have come. Errors: no draft node sends these; the drafts have ended.
    pub fn receive(&self, drafted: &DraftedTokens) -> Result<(), InvalidDraft> {
        let mut state = self.lock();
        let taken = state.receive(drafted, Instant::now());
        if taken.is_err() {
            state.end(DrafterLoss::Invalid);
        }
        drop(state);
        self.notify();
        taken
    }

    /// The drafts end.
    pub fn end(&self, loss: DrafterLoss) {
        let mut state = self.lock();
        state.end(loss);
        drop(state);
        self.notify();
    }

    fn notify(&self) {
        self.has_come.notify_all();
        if self.loss().is_some() {
            self.is_to_tell.notify_one();
        }
    }

    /// Why the drafts have ended, if they have.
    pub fn loss(&self) -> Option<DrafterLoss> {
        self.lock().loss
    }

    /// Appends at most `n` candidates for the tokens after the sequence's last one. Returns how many of their chain were right until
    /// now.
    pub fn candidates(&self, n: usize, out: &mut Vec<Token>) -> usize {
        let state = self.lock();
        out.extend(state.chain.ahead.iter().take(n));
        state.chain.n_right
    }

    /// Candidates that are there for the tokens after the sequence's last one.
    pub fn n_ready(&self) -> usize {
        self.lock().chain.ahead.len()
    }

    /// When candidates are to be expected. `None`: that was not measured yet, or is not known, or none will come.
    pub fn pace(&self) -> Option<DraftPace> {
        let state = self.lock();
        if state.loss.is_some() { None } else { state.clock.pace(state.chain.ahead.len(), Instant::now()) }
    }

    /// Waits until there are `n` candidates, or the drafts have ended, but not beyond `until`.
    pub fn wait(&self, n: usize, until: Instant) {
        let mut state = self.lock();
        while state.chain.ahead.len() < n && state.loss.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.has_come.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl BoardState {
    fn take_told(&mut self) -> Option<(u32, Vec<Token>)> {
        let at = self.n_tokens - self.untold.len();
        (!self.untold.is_empty()).then(|| (at as u32, std::mem::take(&mut self.untold)))
    }

    fn tell(&mut self, tokens: &[Token], now: Instant) {
        let had_all = self.chain.end >= self.n_tokens + tokens.len();
        for &token in tokens {
            if self.chain.is_right
                && let Some(candidate) = self.chain.ahead.pop_front()
            {
                self.compare(candidate == token);
            }
            self.recent.push_back(token);
            if self.recent.len() > RECENT {
                self.recent.pop_front();
            }
        }
        self.n_tokens += tokens.len();
        self.untold.extend_from_slice(tokens);
        if self.untold.len() > MAX_UNTOLD {
            self.end(DrafterLoss::Late);
        }
        // A chain that lacks one of these tokens, or has others, ends where it is told so.
        if !(had_all && self.chain.is_right) && self.clock.awaited.is_none() {
            self.clock.awaited = Some((self.n_tokens, now));
        }
    }

    /// From here on there are no candidates, and the first reason stays.
    fn end(&mut self, loss: DrafterLoss) {
        self.loss.get_or_insert(loss);
        self.chain.ahead.clear();
    }

    fn compare(&mut self, is_right: bool) {
        if is_right {
            self.chain.n_right += 1;
            self.n_wrong = 0;
            return;
        }
        if self.chain.n_right == 0 {
            self.n_wrong += 1;
            if self.n_wrong >= MAX_WRONG {
                self.end(DrafterLoss::Wrong);
            }
        }
        self.chain.is_right = false;
        self.chain.ahead.clear();
    }

    fn receive(&mut self, drafted: &DraftedTokens, now: Instant) -> Result<(), InvalidDraft> {
        let DraftedTokens { from, at, tokens } = drafted;
        let (from, at) = (*from as usize, *at as usize);
        let n_told = self.n_tokens - self.untold.len();
        let is_new = from > self.chain.from;
        let follows =
            if is_new { at == from && from <= n_told } else { from == self.chain.from && at == self.chain.end };
        let in_range = tokens.iter().all(|token| *token < self.n_vocab);
        if !follows || !in_range || tokens.is_empty() || at + tokens.len() > n_told + MAX_AHEAD {
            return Err(InvalidDraft);
        }
        if is_new {
            self.chain = DraftChain { from, end: from, is_right: true, n_right: 0, ahead: VecDeque::new() };
        }
        self.clock.note(is_new.then_some(from), tokens.len(), self.chain.ahead.len(), now);
        for &token in tokens {
            self.add(token);
        }
        if !self.chain.ahead.is_empty() {
            self.clock.awaited = None;
        }
        Ok(())
    }

    fn add(&mut self, candidate: Token) {
        let at = self.chain.end;
        self.chain.end += 1;
        if !self.chain.is_right {
            return;
        }
        if at >= self.n_tokens {
            return self.chain.ahead.push_back(candidate);
        }
        let oldest = self.n_tokens - self.recent.len();
        match at.checked_sub(oldest).and_then(|idx| self.recent.get(idx).copied()) {
            Some(token) => self.compare(token == candidate),
            None => self.chain.is_right = false,
        }
    }
}

impl PaceClock {
    /// Notes that `n` candidates have come, of the chain before, where `n_ahead` were ahead, or of one that begins at `new`.
    fn note(&mut self, new: Option<usize>, n: usize, n_ahead: usize, now: Instant) {
        if let Some(from) = new {
            if let Some((_, at)) = self.awaited.take_if(|(awaited, _)| from >= *awaited) {
                learn(&mut self.first, now.saturating_duration_since(at).as_secs_f64());
            }
        } else if let Some(last) = self.last
            && self.awaited.is_none()
            && n_ahead + n < MAX_AHEAD / 2
        {
            // One that is far ahead may have waited until it was told more.
            learn(&mut self.interval, now.saturating_duration_since(last).as_secs_f64() / n as f64);
        }
        self.last = Some(now);
    }

    fn pace(&self, n_ready: usize, now: Instant) -> Option<DraftPace> {
        if self.first <= 0.0 || self.interval <= 0.0 {
            return None;
        }
        let (since, wait) = match (self.awaited, self.last) {
            (Some((_, at)), _) => (at, self.first),
            (None, Some(last)) => (last, self.interval),
            (None, None) => return None,
        };
        let since = now.saturating_duration_since(since);
        // It is long overdue, so its time is unknown.
        if n_ready == 0 && since.as_secs_f64() > OVERDUE * wait {
            return None;
        }
        let next_in = Duration::from_secs_f64(wait).saturating_sub(since);
        Some(DraftPace { n_ready, next_in, interval: Duration::from_secs_f64(self.interval) })
    }
}

fn learn(known: &mut f64, new: f64) {
    *known = if *known > 0.0 { *known + WEIGHT * (new - *known) } else { new };
}

#[cfg(test)]
#[path = "board_tests.rs"]
mod tests;
