//! Architectures of which only the metadata stands here: llama.cpp says which tensors they need. Most of their caches have
//! more than attention in them: states of recurrent layers, windows, indexers, positions with several axes.

use super::architectures::N_EMBD;
use super::{Architecture, Draft, WINDOW, tokenizer};
use crate::file::{Precision, Tensor, Value};
use crate::llama_cpp;

/// Positions that the windowed layers of [`Architecture::Lfm2Windowed`] and [`Architecture::Gemma4`] look back.
pub const LONG_WINDOW: u32 = 96;

/// The embedding of models whose caches have the sizes of real ones: each value costs a row of the large weights.
const NARROW: usize = 8;

/// Weights of a model with more values than this are written in F16.
const LARGE: usize = 1 << 22;

impl Draft {
    pub(super) fn add_described(&mut self, architecture: Architecture) {
        self.describe(architecture);
        match architecture {
            Architecture::Gemma4 | Architecture::Gemma4Moe => tokenizer::add_ranked_pieces(self),
            _ => tokenizer::add(self),
        }
        let mut header = Vec::new();
        self.file.write_to(&mut header);
        let tensors = llama_cpp::tensors(&header);
        let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u32>().ok();
        let projections = tensors.iter().filter(|(name, _)| name.contains("nextn.eh_proj"));
        let first_head = projections.filter_map(|(name, _)| layer(name)).min().unwrap_or(u32::MAX);
        let n_values: usize = tensors.iter().map(|(_, dims)| dims.iter().product::<usize>()).sum();
        for (name, dims) in tensors {
            let of_head = layer(&name).is_some_and(|layer| layer >= first_head);
            // llama.cpp can leave out the weights of the head, but not their scales.
            if of_head && name.ends_with("scale") {
                continue;
            }
            // MiMo's head has Q, K and V in one.
            if of_head
                && architecture == Architecture::Mimo2
                && ["attn_k.", "attn_v.", ".bias"].iter().any(|part| name.contains(part))
            {
                continue;
            }
            let (name, dims) = match of_head && architecture == Architecture::Mimo2 && name.contains("attn_q.") {
                true => (name.replace("attn_q.", "attn_qkv."), vec![dims[0], 2 * dims[1]]),
                false => (name, dims),
            };
            self.sane(&name, &dims);
            if name == "rope_freqs.weight" && self.architecture == "gemma4" {
                // A quarter of the pairs is rotated, as in Gemma 4's files.
                let (_, factors) = self.file.tensors.last_mut().expect("it was added");
                factors.values[dims[0] / 4..].fill(1e30);
            }
            let is_left_out = match architecture {
                // llama.cpp takes biases and a projection that no file has, and mlx-lm takes none.
                Architecture::Qwen3Moe | Architecture::Qwen35 | Architecture::Qwen35Moe => {
                    name.ends_with(".bias") && !name.contains("ssm_dt") || name.starts_with("cls")
                }
                // llama.cpp reads these and does not use them.
                Architecture::GptOss => name.contains("_exps.") && name.ends_with("scale"),
                Architecture::Gemma4 => name.starts_with("output.") || name.contains("ffn_gate_inp"),
                // Layers 3 and 5 have no window.
                Architecture::Gemma4Moe => {
                    name.starts_with("output.")
                        || ["blk.3.attn_v.", "blk.5.attn_v."].iter().any(|v| name.starts_with(v))
                }
                _ => false,
            };
            if is_left_out {
                self.file.tensors.pop();
                continue;
            }
            let (_, tensor) = self.file.tensors.last_mut().expect("it was added");
            if n_values > LARGE && is_multiplied(&name, tensor) {
                tensor.precision = Precision::F16;
            }
        }
    }

    /// Random values that keep what is computed with them finite and of about its size.
    fn sane(&mut self, name: &str, dims: &[usize]) {
        let has = |part: &str| name.contains(part);
        let of_input = (dims[0] as f32).sqrt().recip();
        // Their mean, and their standard deviation.
        let (mean, deviation) = if has("attn_q_norm") && self.architecture == "gemma4" {
            // Gemma 4 divides its scores by nothing, so this norm does.
            (0.1, 0.01)
        } else if has("norm") {
            (if has(".bias") { 0.0 } else { 1.0 }, 0.1)
        } else if has("ssm_a") {
            // Negative, so that the state decays.
            (-0.35, 0.2)
        } else if has("ssm_dt") && dims.len() == 1 {
            (-1.0, 1.0)
        } else if has("conv") {
            (0.0, 0.5)
        } else if has("token_embd") && self.architecture == "gemma4" {
            // It is the head, too, and scaled where it is not.
            (0.0, of_input)
        } else if has("token_embd") {
            (0.0, 1.0)
        } else if has("sinks") || has("hc_") || has("exp_probs") {
            (0.0, 0.1)
        } else if has("rope_freqs") {
            (1.0, 0.0)
        } else if has("lerp") {
            (0.5, 0.2)
        } else if has("ape") {
            (0.0, 0.3)
        } else {
            (0.0, of_input)
        };
        // A uniform distribution of this deviation.
        let bound = deviation * 3f32.sqrt();
        self.values(name, dims, |random| mean + bound * random.next());
    }

    /// The architecture's name and sizes.
    fn base(&mut self, name: &'static str, n_embd: usize, n_layer: u32, n_ff: u32) {
        self.architecture = name;
        self.set("general.architecture", Value::String(name.into()));
        self.set("general.name", Value::String(format!("tiny {name}")));
        self.numbers(&[
            ("context_length", 8192),
            ("embedding_length", n_embd as u32),
            ("block_count", n_layer + self.n_heads),
        ]);
        if self.n_heads > 0 {
            self.numbers(&[("nextn_predict_layers", self.n_heads)]);
        }
        if n_ff > 0 {
            self.numbers(&[("feed_forward_length", n_ff)]);
        }
        self.reals(&[("attention.layer_norm_rms_epsilon", 1e-6), ("attention.layer_norm_epsilon", 1e-6)]);
    }

    fn heads(&mut self, n_head: u32, n_head_kv: u32, dim: u32) {
        self.numbers(&[
            ("attention.head_count", n_head),
            ("attention.head_count_kv", n_head_kv),
            ("attention.key_length", dim),
            ("attention.value_length", dim),
        ]);
    }

    fn mixture(&mut self) {
        self.numbers(&[
            ("expert_count", 4),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 1),
            ("expert_shared_feed_forward_length", 32),
        ]);
        self.reals(&[("expert_weights_scale", 1.0)]);
        self.flag("expert_weights_norm");
    }

    /// Experts are weighed by a sigmoid.
    fn sigmoid_mixture(&mut self) {
        self.mixture();
        self.numbers(&[("expert_gating_func", 2)]);
    }

    fn state_space(&mut self, n_inner: u32, n_state: u32, n_head: u32, n_group: u32) {
        self.numbers(&[
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", n_inner),
            ("ssm.state_size", n_state),
            ("ssm.time_step_rank", n_head),
            ("ssm.group_count", n_group),
        ]);
    }

    fn indexer(&mut self, n_head: u32, key_length: u32, top_k: u32) {
        self.numbers(&[
            ("attention.indexer.head_count", n_head),
            ("attention.indexer.key_length", key_length),
            ("attention.indexer.top_k", top_k),
        ]);
    }

    fn hyper_connections(&mut self) {
        self.numbers(&[("hyper_connection.count", 4), ("hyper_connection.sinkhorn_iterations", 3)]);
        self.reals(&[("hyper_connection.epsilon", 1e-6), ("swiglu_clamp_exp", 10.0), ("swiglu_clamp_shexp", 10.0)]);
    }

    fn reals(&mut self, reals: &[(&str, f32)]) {
        for (key, real) in reals {
            self.set(&format!("{}.{key}", self.architecture), Value::F32(*real));
        }
    }

    fn flag(&mut self, key: &str) {
        self.set(&format!("{}.{key}", self.architecture), Value::Bool(true));
    }

    fn list(&mut self, key: &str, values: &[u32]) {
        let values = values.iter().map(|&value| Value::U32(value)).collect();
        self.set(&format!("{}.{key}", self.architecture), Value::Array(values));
    }

    /// A list with a value for each layer, and `of_head` for each block of the head.
    fn per_layer(&mut self, key: &str, values: &[u32], of_head: u32) {
        let of_heads = vec![of_head; self.n_heads as usize];
        self.list(key, &[values, &of_heads].concat());
    }

    fn describe(&mut self, architecture: Architecture) {
        match architecture {
            Architecture::Qwen3Moe => {
                self.base("qwen3moe", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.mixture();
            }
            Architecture::Glm4Moe => {
                self.base("glm4moe", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.sigmoid_mixture();
                self.numbers(&[("leading_dense_block_count", 1)]);
            }
            Architecture::MiniMaxM2 => {
                self.base("minimax-m2", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.sigmoid_mixture();
                self.numbers(&[("rope.dimension_count", 16)]);
            }
            Architecture::Llama4 => {
                self.base("llama4", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.mixture();
                self.numbers(&[("interleave_moe_layer_step", 1)]);
            }
            Architecture::GptOss => {
                self.base("gpt-oss", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.mixture();
                self.numbers(&[("attention.sliding_window", WINDOW)]);
            }
            Architecture::DeepSeek2 => self.deepseek2(),
            Architecture::Mamba => {
                self.base("mamba", N_EMBD, 4, 0);
                self.numbers(&[
                    ("ssm.conv_kernel", 4),
                    ("ssm.inner_size", 2 * N_EMBD as u32),
                    ("ssm.state_size", 16),
                    ("ssm.time_step_rank", 4),
                ]);
            }
            Architecture::Qwen2Vl => {
                self.base("qwen2vl", N_EMBD, 4, 96);
                self.heads(4, 2, 16);
                self.list("rope.dimension_sections", &[4, 2, 2, 0]);
            }
            Architecture::Qwen3Vl => self.qwen3vl("qwen3vl"),
            Architecture::Qwen3VlMoe => self.qwen3vl("qwen3vlmoe"),
            Architecture::Qwen35 => self.gated_delta_net("qwen35", 8),
            Architecture::Qwen35Moe => self.gated_delta_net("qwen35moe", 8),
            Architecture::Qwen3Next => self.gated_delta_net("qwen3next", 8),
            Architecture::Qwen36Of27B => self.qwen36("qwen35", 64, [24, 4, 48]),
            Architecture::Qwen36Of35B => self.qwen36("qwen35moe", 40, [16, 2, 32]),
            Architecture::NemotronH => self.nemotron_h("nemotron_h"),
            Architecture::NemotronHMoe => {
                self.nemotron_h("nemotron_h_moe");
                self.mixture();
            }
            Architecture::FalconH1 => {
                self.base("falcon-h1", N_EMBD, 4, 96);
                self.heads(4, 2, 64);
                self.state_space(2 * N_EMBD as u32, 64, 8, 2);
            }
            Architecture::Jamba => self.jamba(),
            Architecture::MiniMax01 => self.minimax_01(),
            Architecture::GraniteHybrid => self.granite_hybrid(),
            Architecture::Lfm2 => self.lfm2("lfm2"),
            Architecture::Lfm2Moe => {
                self.lfm2("lfm2moe");
                self.sigmoid_mixture();
                self.numbers(&[("leading_dense_block_count", 2)]);
            }
            Architecture::Lfm2Windowed => {
                self.lfm2("lfm2");
                self.numbers(&[("attention.sliding_window", LONG_WINDOW)]);
            }
            Architecture::KimiLinear => self.kimi_linear(),
            Architecture::DeepSeek32 => self.deepseek32("deepseek32"),
            Architecture::GlmDsa => self.deepseek32("glm-dsa"),
            Architecture::DeepSeek4 => self.deepseek4(),
            Architecture::Gemma4 => self.gemma4_of_two_sizes(),
            Architecture::Gemma4Moe => self.gemma4_moe(),
            Architecture::MiniMaxM3 => self.minimax_m3(),
            Architecture::Glm5Next => self.glm5_next(),
            Architecture::Step35 => self.step35(),
            Architecture::Mimo2 => {
                self.base("mimo2", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.sigmoid_mixture();
                self.half_windowed();
            }
            Architecture::HyV3 => {
                self.base("hy_v3", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.sigmoid_mixture();
            }
            Architecture::Cohere2Moe => {
                self.base("cohere2moe", N_EMBD, 4, 96);
                self.heads(4, 2, 32);
                self.sigmoid_mixture();
                self.numbers(&[("leading_dense_block_count", 1), ("rope.dimension_count", 32)]);
                self.reals(&[("logit_scale", 1.0)]);
                self.half_windowed();
            }
            Architecture::BailingMoe3 => self.bailing_moe3(),
            Architecture::Mamba2 => {
                self.base("mamba2", N_EMBD, 4, 0);
                self.state_space(2 * N_EMBD as u32, 64, 8, 2);
            }
            Architecture::Rwkv7 => self.rwkv7(),
            other => unreachable!("{other:?} is written without llama.cpp"),
        }
    }

    /// All layers are dense, as DeepSeek's first ones are. The head is a mixture of experts.
    fn deepseek2(&mut self) {
        self.base("deepseek2", N_EMBD, 4, 96);
        if self.n_heads > 0 {
            self.numbers(&[("expert_count", 4), ("expert_used_count", 2)]);
        }
        self.numbers(&[
            ("leading_dense_block_count", 4),
            ("expert_feed_forward_length", 32),
            ("expert_shared_count", 1),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 1),
            ("attention.q_lora_rank", 32),
            ("attention.kv_lora_rank", 32),
            ("attention.key_length", 32 + 16),
            ("attention.value_length", 32),
            ("attention.key_length_mla", 32),
            ("attention.value_length_mla", 32),
            ("rope.dimension_count", 16),
        ]);
    }

    fn qwen3vl(&mut self, name: &'static str) {
        self.base(name, N_EMBD, 4, 96);
        self.heads(4, 2, 64);
        self.numbers(&[("rope.dimension_count", 64)]);
        self.list("rope.dimension_sections", &[12, 10, 10, 0]);
        if name == "qwen3vlmoe" {
            self.sigmoid_mixture();
        }
    }

    /// Every fourth layer has attention.
    fn gated_delta_net(&mut self, name: &'static str, n_layer: u32) {
        self.base(name, N_EMBD, n_layer, 96);
        self.heads(4, 2, 64);
        self.numbers(&[("rope.dimension_count", 32), ("full_attention_interval", 4)]);
        if name != "qwen3next" {
            self.list("rope.dimension_sections", &[6, 5, 5, 0]);
        }
        self.state_space(256, 64, 4, 2);
        if name != "qwen35" {
            self.sigmoid_mixture();
        }
    }

    /// The cache of a published model, with its numbers of Q heads, KV heads, and heads of linear layers. The first two have
    /// 256 values each, the last 128.
    fn qwen36(&mut self, name: &'static str, n_layer: u32, [n_head, n_head_kv, n_linear_head]: [u32; 3]) {
        self.base(name, NARROW, n_layer, 16);
        self.heads(n_head, n_head_kv, 256);
        self.numbers(&[("rope.dimension_count", 64), ("full_attention_interval", 4)]);
        self.list("rope.dimension_sections", &[11, 11, 10, 0]);
        self.state_space(128 * n_linear_head, 128, n_linear_head, 16);
        if name == "qwen35moe" {
            self.sigmoid_mixture();
        }
    }

    /// Mamba 2, attention and feed forward take turns.
    fn nemotron_h(&mut self, name: &'static str) {
        self.base(name, N_EMBD, 6, 0);
        self.per_layer("feed_forward_length", &[0, 0, 96, 0, 0, 96], 96);
        self.per_layer("attention.head_count_kv", &[0, 2, 0, 0, 2, 0], 2);
        self.numbers(&[
            ("rope.dimension_count", 64),
            ("attention.head_count", 4),
            ("attention.key_length", 64),
            ("attention.value_length", 64),
        ]);
        self.state_space(2 * N_EMBD as u32, 64, 8, 2);
    }

    /// Mamba and attention take turns.
    fn jamba(&mut self) {
        self.base("jamba", N_EMBD, 4, 96);
        self.mixture();
        self.list("attention.head_count_kv", &[0, 2, 0, 2]);
        self.numbers(&[
            ("attention.head_count", 4),
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", 2 * N_EMBD as u32),
            ("ssm.state_size", 16),
            ("ssm.time_step_rank", 4),
        ]);
    }

    /// Every second layer has attention with softmax.
    fn minimax_01(&mut self) {
        self.base("minimax-01", N_EMBD, 4, 96);
        self.heads(4, 2, 64);
        self.mixture();
        self.numbers(&[("rope.dimension_count", 32), ("full_attention_interval", 2)]);
        self.reals(&[("residual_scale", 1.0)]);
    }

    fn granite_hybrid(&mut self) {
        self.base("granitehybrid", N_EMBD, 4, 96);
        self.list("attention.head_count_kv", &[0, 0, 2, 0]);
        self.numbers(&[
            ("rope.dimension_count", 64),
            ("attention.head_count", 4),
            ("attention.key_length", 64),
            ("attention.value_length", 64),
        ]);
        self.state_space(2 * N_EMBD as u32, 64, 8, 1);
        self.reals(&[
            ("logit_scale", 1.0),
            ("residual_scale", 1.0),
            ("embedding_scale", 1.0),
            ("attention.scale", 0.125),
        ]);
    }

    /// Short convolutions: they have no state beside the last inputs.
    fn lfm2(&mut self, name: &'static str) {
        self.base(name, N_EMBD, 6, 96);
        self.list("attention.head_count_kv", &[0, 0, 2, 0, 2, 0]);
        self.numbers(&[("rope.dimension_count", 16), ("attention.head_count", 4), ("shortconv.l_cache", 3)]);
    }

    /// Delta attention with a decay of its own for each value, and one layer of latent attention.
    fn kimi_linear(&mut self) {
        self.base("kimi-linear", N_EMBD, 4, 96);
        self.sigmoid_mixture();
        self.list("attention.head_count_kv", &[0, 0, 1, 0]);
        self.numbers(&[
            ("leading_dense_block_count", 1),
            ("attention.head_count", 4),
            ("attention.key_length", 128 + 32),
            ("attention.value_length", 128),
            ("attention.key_length_mla", 64 + 32),
            ("attention.value_length_mla", 64),
            ("attention.kv_lora_rank", 128),
            ("rope.dimension_count", 32),
            ("ssm.conv_kernel", 4),
            ("kda.head_dim", 64),
        ]);
    }

    /// Latent attention to the positions that an indexer chooses.
    fn deepseek32(&mut self, name: &'static str) {
        self.base(name, N_EMBD, 4, 96);
        self.sigmoid_mixture();
        self.indexer(4, 128, 64);
        self.numbers(&[
            ("leading_dense_block_count", 1),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 1),
            ("attention.key_length", 128 + 64),
            ("attention.value_length", 128),
            ("attention.key_length_mla", 64 + 64),
            ("attention.value_length_mla", 64),
            ("attention.q_lora_rank", 64),
            ("attention.kv_lora_rank", 128),
            ("rope.dimension_count", 64),
        ]);
    }

    /// A window, and rows that each stand for 4 or 128 tokens.
    fn deepseek4(&mut self) {
        self.base("deepseek4", N_EMBD, 4, 0);
        self.mixture();
        self.heads(4, 1, 256);
        self.indexer(4, 128, 64);
        self.numbers(&[
            ("expert_gating_func", 4),
            ("rope.dimension_count", 64),
            ("attention.q_lora_rank", 64),
            ("attention.sliding_window", 128),
            ("attention.output_group_count", 2),
            ("attention.output_lora_rank", 64),
            ("hash_layer_count", 0),
        ]);
        self.reals(&[("attention.compress_rope_freq_base", 40000.0)]);
        self.hyper_connections();
        self.list("attention.compress_ratios", &[0, 4, 128, 4]);
    }

    /// The last two layers use the KV of layers before them.
    fn gemma4_of_two_sizes(&mut self) {
        self.gemma4(0);
        self.list("feed_forward_length", &[96, 96, 96, 96, 192, 192]);
        self.heads(4, 2, 128);
        self.numbers(&[("attention.shared_kv_layers", 2), ("embedding_length_per_layer_input", 16)]);
    }

    fn gemma4_moe(&mut self) {
        self.gemma4(96);
        self.list("attention.head_count_kv", &[2, 2, 2, 1, 2, 1]);
        self.numbers(&[
            ("attention.head_count", 4),
            ("attention.key_length", 128),
            ("attention.value_length", 128),
            ("attention.shared_kv_layers", 0),
            ("embedding_length_per_layer_input", 0),
            ("expert_count", 4),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 32),
        ]);
    }

    fn gemma4(&mut self, n_ff: u32) {
        self.base("gemma4", N_EMBD, 6, n_ff);
        self.numbers(&[
            ("attention.key_length_swa", 64),
            ("attention.value_length_swa", 64),
            ("rope.dimension_count", 128),
            ("rope.dimension_count_swa", 64),
            ("attention.sliding_window", LONG_WINDOW),
        ]);
        self.reals(&[
            ("rope.freq_base", 1_000_000.0),
            ("rope.freq_base_swa", 10_000.0),
            // As large as the logits, so that it changes them.
            ("final_logit_softcapping", 2.0),
        ]);
        let pattern = [true, true, true, false, true, false].map(Value::Bool);
        self.set("gemma4.attention.sliding_window_pattern", Value::Array(pattern.into()));
    }

    /// Attention to the blocks that an indexer chooses; the indexer has K and V.
    fn minimax_m3(&mut self) {
        self.base("minimax-m3", N_EMBD, 4, 96);
        self.heads(4, 2, 64);
        self.sigmoid_mixture();
        self.indexer(2, 64, 2);
        self.numbers(&[
            ("leading_dense_block_count", 1),
            ("rope.dimension_count", 32),
            ("attention.indexer.block_size", 32),
            ("attention.indexer.local_blocks", 1),
        ]);
    }

    /// Delta attention as Kimi Linear has, and latent attention with an indexer.
    fn glm5_next(&mut self) {
        self.base("glm5-next", N_EMBD, 4, 96);
        self.sigmoid_mixture();
        self.indexer(4, 64, 64);
        self.per_layer("attention.head_count_kv", &[0, 1, 0, 1], 1);
        self.numbers(&[
            ("leading_dense_block_count", 1),
            ("attention.head_count", 4),
            ("attention.key_length", 128),
            ("attention.value_length", 128),
            ("attention.key_length_mla", 64),
            ("attention.value_length_mla", 64),
            ("attention.q_lora_rank", 64),
            ("attention.kv_lora_rank", 128),
            ("attention.indexer.kpool", 4),
            ("rope.dimension_count", 0),
            ("ssm.conv_kernel", 4),
            ("kda.head_dim", 64),
        ]);
        self.hyper_connections();
    }

    fn step35(&mut self) {
        self.base("step35", N_EMBD, 4, 96);
        self.heads(4, 2, 32);
        self.sigmoid_mixture();
        self.numbers(&[("rope.dimension_count", 32)]);
        self.half_windowed();
    }

    /// Every second layer has a window; those of the head have none.
    fn half_windowed(&mut self) {
        self.numbers(&[("attention.sliding_window", WINDOW)]);
        let pattern = [true, false, true, false].into_iter().chain((0..self.n_heads).map(|_| false));
        let pattern = pattern.map(Value::Bool).collect();
        self.set(&format!("{}.attention.sliding_window_pattern", self.architecture), Value::Array(pattern));
    }

    /// Delta attention as Kimi Linear has, and one layer of latent attention.
    fn bailing_moe3(&mut self) {
        self.base("bailingmoe3", N_EMBD, 4, 96);
        self.sigmoid_mixture();
        self.per_layer("attention.head_count_kv", &[0, 0, 1, 0], 1);
        self.numbers(&[
            ("leading_dense_block_count", 1),
            ("attention.head_count", 4),
            ("attention.key_length", 128 + 32),
            ("attention.value_length", 128),
            ("attention.key_length_mla", 64 + 32),
            ("attention.value_length_mla", 64),
            ("attention.q_lora_rank", 64),
            ("attention.kv_lora_rank", 128),
            ("rope.dimension_count", 32),
            ("ssm.conv_kernel", 4),
            ("kda.head_dim", 64),
        ]);
        self.reals(&[("kda.gate_lower_bound", -5.0)]);
    }

    /// Two heads of the size that real models have: with AVX-512, ggml reads past the end of smaller ones.
    fn rwkv7(&mut self) {
        self.base("rwkv7", 2 * N_EMBD, 4, 96);
        self.numbers(&[
            ("attention.head_count", 0),
            ("wkv.head_size", 64),
            ("attention.decay_lora_rank", 16),
            ("attention.iclr_lora_rank", 16),
            ("attention.value_residual_mix_lora_rank", 16),
            ("attention.gate_lora_rank", 16),
            ("token_shift_count", 2),
        ]);
    }
}

/// A matrix that activations are multiplied with; llama.cpp wants the others in F32.
fn is_multiplied(name: &str, tensor: &Tensor) -> bool {
    tensor.dims.len() == 2 && !["norm", "conv", "ssm_a", "ssm_dt"].iter().any(|part| name.contains(part))
}
