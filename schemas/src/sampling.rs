//! How tokens are sampled.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::token::Token;

/// How the next token is sampled from the logits. The stages apply in the order of the fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Added to the logits of tokens, −100 to 100.
    #[serde(with = "crate::shared")]
    pub logit_bias: Arc<[(Token, f32)]>,
    /// Divides the logits of tokens among the last `repeat_last_n`; multiplies negative logits. 1.0 is off.
    pub repeat_penalty: f32,
    /// How many of the last tokens of prompt and output `repeat_penalty` considers. −1 is all, 0 is off.
    pub repeat_last_n: i32,
    /// Subtracted from a token's logit for each occurrence in the output so far, −2 to 2.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit once if it occurs in the output so far, −2 to 2.
    pub presence_penalty: f32,
    /// Keeps the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keeps the smallest set of tokens whose total probability reaches p; 1.0 is off.
    pub top_p: f32,
    /// Keeps tokens with at least p times the probability of the most likely one; 0.0 is off.
    pub min_p: f32,
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// The seed. It and a token's position are the only source of randomness, so a resumed sequence continues with the
    /// same tokens.
    pub seed: u64,
    /// The client gave the seed: it wants the same reply again. Engines do nothing for its speed that can round differently the
    /// next time.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub repeatable: bool,
}

impl Default for Sampling {
    /// llama-server's defaults, with which small and quantized models are usually tested. OpenAI's default, temperature
    /// 1 alone, makes small models incoherent.
    fn default() -> Self {
        Sampling {
            logit_bias: Arc::default(),
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            temperature: 0.8,
            seed: 0,
            repeatable: false,
        }
    }
}
