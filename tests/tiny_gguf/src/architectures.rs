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
const N_EXPERT: usize = 4;
const N_FF_EXPERT: usize = 32;

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
            Architecture::Qwen3Moe => "qwen3moe",
            Architecture::GptOss => "gpt-oss",
            Architecture::DeepSeek2 => "deepseek2",
            Architecture::Mamba => "mamba",
            other => unreachable!("{other:?} has a file of its own"),
        };
        self.set("general.architecture", Value::String(self.architecture.into()));
        self.set("general.name", Value::String(format!("tiny {}", self.architecture)));
        tokenizer::add(self);
        self.numbers(&[
            ("context_length", 8192),
            ("embedding_length", N_EMBD as u32),
            ("block_count", n_layer(architecture) as u32),
            ("feed_forward_length", if architecture == Architecture::Mamba { 0 } else { N_FF as u32 }),
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
            Architecture::Qwen3Moe => {
                self.attention_keys();
                self.expert_keys();
            }
            Architecture::GptOss => {
                self.attention_keys();
                self.expert_keys();
                self.numbers(&[("attention.sliding_window", WINDOW)]);
            }
            Architecture::DeepSeek2 => self.latent_keys(),
            Architecture::Mamba => self.mamba_keys(),
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
            Architecture::Qwen3Moe => {
                self.attention(blk);
                self.head_norms(blk);
                self.ones(&format!("{blk}.ffn_norm.weight"), N_EMBD);
                self.experts(blk);
            }
            Architecture::GptOss => {
                self.attention(blk);
                self.attention_biases(blk);
                self.ones(&format!("{blk}.post_attention_norm.weight"), N_EMBD);
                self.experts(blk);
                self.expert_biases(blk);
            }
            Architecture::DeepSeek2 => {
                self.latent_attention(blk);
                self.feed_forward(blk);
            }
            Architecture::Mamba => self.mamba(blk),
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

    fn attention_biases(&mut self, blk: &str) {
        self.input_biases(blk);
        self.bias(&format!("{blk}.attn_output.bias"), &[N_EMBD]);
        self.bias(&format!("{blk}.attn_sinks.weight"), &[N_HEAD]);
    }

    fn feed_forward(&mut self, blk: &str) {
        self.ones(&format!("{blk}.ffn_norm.weight"), N_EMBD);
        self.weight(&format!("{blk}.ffn_gate.weight"), &[N_EMBD, N_FF]);
        self.weight(&format!("{blk}.ffn_up.weight"), &[N_EMBD, N_FF]);
        self.weight(&format!("{blk}.ffn_down.weight"), &[N_FF, N_EMBD]);
    }

    fn expert_keys(&mut self) {
        self.numbers(&[
            ("expert_count", N_EXPERT as u32),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", N_FF_EXPERT as u32),
        ]);
    }

    fn experts(&mut self, blk: &str) {
        self.weight(&format!("{blk}.ffn_gate_inp.weight"), &[N_EMBD, N_EXPERT]);
        self.weight(&format!("{blk}.ffn_gate_exps.weight"), &[N_EMBD, N_FF_EXPERT, N_EXPERT]);
        self.weight(&format!("{blk}.ffn_up_exps.weight"), &[N_EMBD, N_FF_EXPERT, N_EXPERT]);
        self.weight(&format!("{blk}.ffn_down_exps.weight"), &[N_FF_EXPERT, N_EMBD, N_EXPERT]);
    }

    fn expert_biases(&mut self, blk: &str) {
        self.bias(&format!("{blk}.ffn_gate_inp.bias"), &[N_EXPERT]);
        self.bias(&format!("{blk}.ffn_gate_exps.bias"), &[N_FF_EXPERT, N_EXPERT]);
        self.bias(&format!("{blk}.ffn_up_exps.bias"), &[N_FF_EXPERT, N_EXPERT]);
        self.bias(&format!("{blk}.ffn_down_exps.bias"), &[N_EMBD, N_EXPERT]);
    }

    /// All layers are dense, which DeepSeek's first ones are too.
    fn latent_keys(&mut self) {
        self.numbers(&[
            ("leading_dense_block_count", N_LAYER as u32),
            ("expert_feed_forward_length", N_FF_EXPERT as u32),
            ("expert_shared_count", 1),
            ("attention.head_count", N_HEAD as u32),
            ("attention.head_count_kv", 1),
            ("attention.q_lora_rank", Q_LORA as u32),
            ("attention.kv_lora_rank", KV_LORA as u32),
            ("attention.key_length", (KV_LORA + ROPE_DIM) as u32),
            ("attention.value_length", KV_LORA as u32),
            ("attention.key_length_mla", HEAD_DIM as u32),
            ("attention.value_length_mla", HEAD_DIM as u32),
            ("rope.dimension_count", ROPE_DIM as u32),
        ]);
    }

    fn latent_attention(&mut self, blk: &str) {
        self.ones(&format!("{blk}.attn_q_a_norm.weight"), Q_LORA);
        self.ones(&format!("{blk}.attn_kv_a_norm.weight"), KV_LORA);
        self.weight(&format!("{blk}.attn_q_a.weight"), &[N_EMBD, Q_LORA]);
        self.weight(&format!("{blk}.attn_q_b.weight"), &[Q_LORA, N_HEAD * HEAD_DIM]);
        self.weight(&format!("{blk}.attn_kv_a_mqa.weight"), &[N_EMBD, KV_LORA + ROPE_DIM]);
        self.weight(&format!("{blk}.attn_k_b.weight"), &[HEAD_DIM - ROPE_DIM, KV_LORA, N_HEAD]);
        self.weight(&format!("{blk}.attn_v_b.weight"), &[KV_LORA, HEAD_DIM, N_HEAD]);
        self.weight(&format!("{blk}.attn_output.weight"), &[N_HEAD * HEAD_DIM, N_EMBD]);
    }

    fn mamba_keys(&mut self) {
        self.numbers(&[
            ("attention.head_count", 0),
            ("ssm.conv_kernel", CONV as u32),
            ("ssm.inner_size", INNER as u32),
            ("ssm.state_size", STATE as u32),
            ("ssm.time_step_rank", TIME_STEP as u32),
        ]);
    }

    fn mamba(&mut self, blk: &str) {
        self.weight(&format!("{blk}.ssm_in.weight"), &[N_EMBD, 2 * INNER]);
        self.weight(&format!("{blk}.ssm_conv1d.weight"), &[CONV, INNER]);
        self.bias(&format!("{blk}.ssm_conv1d.bias"), &[INNER]);
        self.weight(&format!("{blk}.ssm_x.weight"), &[INNER, TIME_STEP + 2 * STATE]);
        self.weight(&format!("{blk}.ssm_dt.weight"), &[TIME_STEP, INNER]);
        self.bias(&format!("{blk}.ssm_dt.bias"), &[INNER]);
        // Negative, so that the state decays.
        self.values(&format!("{blk}.ssm_a"), &[STATE, INNER], |random| -1.5 - random.next());
        self.ones(&format!("{blk}.ssm_d"), INNER);
        self.weight(&format!("{blk}.ssm_out.weight"), &[INNER, N_EMBD]);
    }
}

const Q_LORA: usize = 32;
const KV_LORA: usize = 32;
const ROPE_DIM: usize = 16;

const CONV: usize = 4;
const INNER: usize = 2 * N_EMBD;
const STATE: usize = 16;
const TIME_STEP: usize = 4;
