//! Changes the logits of single tokens before a draw: bias, bans and penalties.

use std::collections::{HashMap, VecDeque};

use baton_schemas::Token;
use baton_schemas::generate::Sampling;

/// The longest window of a penalty, tokens.
const MAX_WINDOW: usize = 65_536;

/// What a request changes in the logits. The arithmetic is that of llama.cpp's samplers, in their order.
pub(super) struct Shaping {
    /// Logit bias and banned tokens.
    biases: Vec<(Token, f32)>,
    /// The repetition penalty, over prompt and output.
    repeat: Option<Penalty>,
    /// OpenAI's frequency and presence penalties, over the output alone.
    output: Option<Penalty>,
    /// The changed logits. It is reused for each token, since it takes up to 1 MB.
    shaped: Vec<f32>,
}

impl Shaping {
    /// `None` if the request changes no logit.
    pub(super) fn new(sampling: &Sampling, banned: &[Token], prompt: &[Token], generated: &[Token]) -> Option<Self> {
        let repeats = sampling.repeat_last_n != 0 && sampling.repeat_penalty != 1.0;
        let repeat = repeats.then(|| {
            let window = usize::try_from(sampling.repeat_last_n).map_or(MAX_WINDOW, |n| n.min(MAX_WINDOW));
            let factors = Factors { repeat: sampling.repeat_penalty, frequency: 0.0, presence: 0.0 };
            Penalty::new(factors, window, prompt.iter().chain(generated))
        });
        let counts = sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0;
        let output = counts.then(|| {
            let Sampling { frequency_penalty: frequency, presence_penalty: presence, .. } = *sampling;
            Penalty::new(Factors { repeat: 1.0, frequency, presence }, MAX_WINDOW, generated.iter())
        });
        let bans = banned.iter().map(|&t| (t, f32::NEG_INFINITY));
        let biases: Vec<(Token, f32)> = sampling.logit_bias.iter().copied().chain(bans).collect();
        let shapes = !biases.is_empty() || repeat.is_some() || output.is_some();
        shapes.then(|| Shaping { biases, repeat, output, shaped: Vec::new() })
    }

    /// A copy of `logits` with the changes.
    pub(super) fn shape(&mut self, logits: &[f32]) -> &[f32] {
        self.shaped.clear();
        self.shaped.extend_from_slice(logits);
        for &(token, bias) in &self.biases {
            if let Some(logit) = self.shaped.get_mut(token as usize) {
                *logit += bias;
            }
        }
        for penalty in [&self.repeat, &self.output].into_iter().flatten() {
            penalty.apply(&mut self.shaped);
        }
        &self.shaped
    }

    /// Counts a token that was drawn.
    pub(super) fn accept(&mut self, token: Token) {
        for penalty in [&mut self.repeat, &mut self.output].into_iter().flatten() {
            penalty.accept(token);
        }
    }
}

struct Factors {
    repeat: f32,
    frequency: f32,
    presence: f32,
}

/// A penalty on the tokens in a window.
struct Penalty {
    factors: Factors,
    /// The length of the window, at least 1.
    window: usize,
    recent: VecDeque<Token>,
    counts: HashMap<Token, u32>,
}

impl Penalty {
    fn new<'a>(factors: Factors, window: usize, tokens: impl DoubleEndedIterator<Item = &'a Token>) -> Self {
        let mut recent: VecDeque<Token> = tokens.rev().take(window).copied().collect();
        recent.make_contiguous().reverse();
        let mut counts = HashMap::new();
        for &token in &recent {
            *counts.entry(token).or_insert(0) += 1;
        }
        Penalty { factors, window, recent, counts }
    }

    fn accept(&mut self, token: Token) {
        if self.recent.len() >= self.window
            && let Some(oldest) = self.recent.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.recent.push_back(token);
        *self.counts.entry(token).or_insert(0) += 1;
    }

    fn apply(&self, logits: &mut [f32]) {
        let Factors { repeat, frequency, presence } = self.factors;
        for (&token, &count) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            // Dividing a negative logit would make its token more likely.
            *logit = if *logit <= 0.0 { *logit * repeat } else { *logit / repeat };
            *logit -= count as f32 * frequency + presence;
        }
    }
}
