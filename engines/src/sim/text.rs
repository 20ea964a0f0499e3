//! The simulator's vocabulary, one token for each byte, and its text, which depends on prompt, seed and position.

use baton_schemas::generate::Conversation;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::sequence::{Alternative, Logprobs};
use baton_schemas::{KeyTag, SequenceRequest, Token};

/// 256 bytes, a token that begins a text and one that ends it.
pub(super) const N_VOCAB: u32 = 258;
const BOS: Token = 256;

/// The lengths of replies, tokens.
const REPLY_TOKENS: std::ops::Range<u64> = 64..512;

const WORDS: [&str; 16] = [
    "the ", "river ", "of ", "light ", "and ", "stone ", "runs ", "to ", "a ", "quiet ", "sea. ", "Then ", "all ",
    "words ", "return ", "home, ",
];

pub(super) fn tokenize(request: &TokenizeRequest) -> Vec<Token> {
    let bos = request.add_special.then_some(BOS);
    bos.into_iter().chain(request.text.bytes().map(Token::from)).collect()
}

pub(super) fn bytes(tokens: &[Token]) -> Vec<u8> {
    tokens.iter().filter_map(|&t| u8::try_from(t).ok()).collect()
}

pub(super) fn render(conversation: &Conversation) -> Vec<Token> {
    let turns = conversation.messages.iter().map(|m| format!("<|{}|>{}\n", m.role.as_str(), m.content));
    let text: String = turns.chain(["<|assistant|>".to_owned()]).collect();
    tokenize(&TokenizeRequest { text: text.into(), add_special: true, parse_special: false, key: KeyTag::NONE })
}

/// Generates the reply to one prompt. Each token depends only on prompt, seed and position.
pub(super) struct SimReply {
    /// Eight words, chosen by prompt and seed, that the reply repeats.
    cycle: String,
    n_prompt: usize,
    n_reply: usize,
}

impl SimReply {
    pub(super) fn new(request: &SequenceRequest) -> Self {
        let mut hasher = blake3::Hasher::new();
        request.prompt.iter().for_each(|t| {
            hasher.update(&t.to_le_bytes());
        });
        let hash = hasher.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        // Greedy decoding has no seed.
        let seed = if request.sampling.temperature > 0.0 { request.sampling.seed } else { 0 };
        let key = u64::from_le_bytes(first) ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let n_reply = match request.ignore_eos {
            true => usize::MAX,
            false => (REPLY_TOKENS.start + key % (REPLY_TOKENS.end - REPLY_TOKENS.start)) as usize,
        };
        let cycle = (0..8).map(|i| WORDS[(key >> (4 * i)) as usize % WORDS.len()]).collect();
        SimReply { cycle, n_prompt: request.prompt.len(), n_reply }
    }

    /// The token at `position` (prompt included). `None` at the end of the reply.
    pub(super) fn next(&self, position: usize) -> Option<Token> {
        let at = position - self.n_prompt;
        if at >= self.n_reply {
            return None;
        }
        Some(Token::from(self.cycle.as_bytes()[at % self.cycle.len()]))
    }

    /// Invented values: the chosen token is the most likely; the others follow at a constant ratio.
    pub(super) fn logprobs(&self, chosen: Token, k: usize) -> Logprobs {
        let logprob = |rank: usize| -0.2 - rank as f32;
        let others = (0..256).filter(|&t| t != chosen);
        let ranked = std::iter::once(chosen).chain(others).take(k).enumerate();
        let top = ranked.map(|(rank, id)| Alternative { id, bytes: bytes(&[id]), logprob: logprob(rank) }).collect();
        Logprobs { chosen: logprob(0), rank: None, top }
    }
}
