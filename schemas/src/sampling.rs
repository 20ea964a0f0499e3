//! How tokens are drawn.

use serde::{Deserialize, Serialize};

use crate::token::Token;

/// How the next token is drawn from the logits. The stages apply in the order of the fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Added to the logit of a token, −100 to 100.
    pub logit_bias: Vec<(Token, f32)>,
    /// Divides (multiplies, if negative) the logits of tokens seen in the last `repeat_last_n`; 1.0 is off.
    pub repeat_penalty: f32,
    /// Window of `repeat_penalty` over prompt and output; −1 is the whole context, 0 is off.
    pub repeat_last_n: i32,
    /// Subtracted once per occurrence of a token in the output so far, −2 to 2.
    pub frequency_penalty: f32,
    /// Subtracted once if a token occurs in the output so far, −2 to 2.
    pub presence_penalty: f32,
    /// Keep the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p; 1.0 is off.
    pub top_p: f32,
    /// Keep tokens with at least p times the best one's probability; 0.0 is off.
    pub min_p: f32,
    /// 0 is greedy.
    pub temperature: f32,
    /// With a token's position the only source of randomness, so a resumed sequence draws what it would have drawn.
    pub seed: u64,
}

impl Default for Sampling {
    /// llama-server's defaults, which small and quantized models are usually tried with: OpenAI's bare temperature 1
    /// lets a small model wander.
    fn default() -> Self {
        Sampling {
            logit_bias: Vec::new(),
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            temperature: 0.8,
            seed: 0,
        }
    }
}
