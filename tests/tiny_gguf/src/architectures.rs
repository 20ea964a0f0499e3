//! Keys and tensors of each architecture.

use super::tokenizer::{self, N_VOCAB};
use super::{Architecture, Draft, WINDOW};
use crate::file::Value;

const N_LAYER: usize = 4;
pub(super) const N_EMBD: usize = 64;
const N_HEAD: usize = 4;
const N_HEAD_KV: usize = 2;
const HEAD_DIM: usize = 32;
const N_FF: usize = 96;

/// Gemma's layers with and without a window.
fn n_layer(architecture: Architecture) -> usize {
    if architecture == Architecture::Gemma3 { 7 } else { N_LAYER }
}

impl Draft {
    pub(super) fn add_architecture(&mut self, architecture: Architecture) {
        self.architecture = match architecture {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Gemma3 => "gemma3",
            other => unreachable!("{other:?} has a file of its own"),
        };
        self.set("general.architecture", Value::String(self.architecture.into()));
        self.set("general.name", Value::String(format!("tiny {}", self.architecture)));
        tokenizer::add(self);
        self.numbers(&[
            ("context_length", 8192),
            ("embedding_length", N_EMBD as u32),
            ("block_count", n_layer(architecture) as u32),
            ("feed_forward_length", N_FF as u32),
        ]);
        let epsilon = format!("{}.attention.layer_norm_rms_epsilon", self.architecture);
        self.set(&epsilon, Value::F32(1e-5));
        self.weight("token_embd.weight", &[N_EMBD, N_VOCAB]);
        self.ones("output_norm.weight", N_EMBD);
        self.weight("output.weight", &[N_EMBD, N_VOCAB]);
        match architecture {
            Architecture::Llama => {
                self.attention_keys();
                self.numbers(&[("rope.dimension_count", HEAD_DIM as u32)]);
            }
            Architecture::Qwen2 | Architecture::Qwen3 => self.attention_keys(),
            Architecture::Gemma3 => {
                self.attention_keys();
                self.numbers(&[("attention.sliding_window", WINDOW)]);
            }
            other => unreachable!("{other:?} has a file of its own"),
        }
        for layer in 0..n_layer(architecture) {
            self.layer(architecture, &format!("blk.{layer}"));
        }
    }

    fn layer(&mut self, architecture: Architecture, blk: &str) {
        self.ones(&format!("{blk}.attn_norm.weight"), N_EMBD);
        match architecture {
            Architecture::Llama => {
                self.attention(blk);
                self.feed_forward(blk);
            }
            Architecture::Qwen2 => {
                self.attention(blk);
                self.input_biases(blk);
                self.feed_forward(blk);
            }
            Architecture::Qwen3 => {
                self.attention(blk);
                self.head_norms(blk);
                self.feed_forward(blk);
            }
            Architecture::Gemma3 => {
                self.attention(blk);
                self.head_norms(blk);
                self.ones(&format!("{blk}.post_attention_norm.weight"), N_EMBD);
                self.feed_forward(blk);
                self.ones(&format!("{blk}.post_ffw_norm.weight"), N_EMBD);
            }
            other => unreachable!("{other:?} has a file of its own"),
        }
    }

    /// llama.cpp wants Qwen 2's heads to have as many elements together as an embedding.
    fn head_dim(&self) -> usize {
        if self.architecture == "qwen2" { N_EMBD / N_HEAD } else { HEAD_DIM }
    }

    fn attention_keys(&mut self) {
        let head_dim = self.head_dim();
        self.numbers(&[
            ("attention.head_count", N_HEAD as u32),
            ("attention.head_count_kv", N_HEAD_KV as u32),
            ("attention.key_length", head_dim as u32),
            ("attention.value_length", head_dim as u32),
        ]);
    }

    fn attention(&mut self, blk: &str) {
        let head_dim = self.head_dim();
        self.weight(&format!("{blk}.attn_q.weight"), &[N_EMBD, N_HEAD * head_dim]);
        self.weight(&format!("{blk}.attn_k.weight"), &[N_EMBD, N_HEAD_KV * head_dim]);
        self.weight(&format!("{blk}.attn_v.weight"), &[N_EMBD, N_HEAD_KV * head_dim]);
        self.weight(&format!("{blk}.attn_output.weight"), &[N_HEAD * head_dim, N_EMBD]);
    }

    fn head_norms(&mut self, blk: &str) {
        self.ones(&format!("{blk}.attn_q_norm.weight"), HEAD_DIM);
        self.ones(&format!("{blk}.attn_k_norm.weight"), HEAD_DIM);
    }

    fn input_biases(&mut self, blk: &str) {
        let head_dim = self.head_dim();
        self.bias(&format!("{blk}.attn_q.bias"), &[N_HEAD * head_dim]);
        self.bias(&format!("{blk}.attn_k.bias"), &[N_HEAD_KV * head_dim]);
        self.bias(&format!("{blk}.attn_v.bias"), &[N_HEAD_KV * head_dim]);
    }

    fn feed_forward(&mut self, blk: &str) {
        self.ones(&format!("{blk}.ffn_norm.weight"), N_EMBD);
        self.weight(&format!("{blk}.ffn_gate.weight"), &[N_EMBD, N_FF]);
        self.weight(&format!("{blk}.ffn_up.weight"), &[N_EMBD, N_FF]);
        self.weight(&format!("{blk}.ffn_down.weight"), &[N_FF, N_EMBD]);
    }
}
