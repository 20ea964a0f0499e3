//! An encoder: every token sees every other, and nothing is generated. Named and shaped as llama.cpp's `bert`.

use super::Draft;
use super::architectures::N_EMBD;
use crate::file::Value;

const N_LAYER: usize = 3;
const N_HEAD: usize = 4;
const N_FF: usize = 96;

/// Tokens of a text at most: positions are learned.
pub const N_CTX: usize = 128;

/// Words of the vocabulary; a word's first piece has llama.cpp's mark for it.
const WORDS: [&str; 8] = ["fox", "quick", "brown", "dog", "lazy", "river", "stone", "light"];
const CONTROL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

impl Draft {
    pub(super) fn add_bert(&mut self) {
        self.architecture = "bert";
        self.set("general.architecture", Value::String("bert".into()));
        self.set("general.name", Value::String("tiny bert".into()));
        self.add_words();
        self.numbers(&[
            ("context_length", N_CTX as u32),
            ("embedding_length", N_EMBD as u32),
            ("block_count", N_LAYER as u32),
            ("feed_forward_length", N_FF as u32),
            ("attention.head_count", N_HEAD as u32),
        ]);
        self.set("bert.attention.layer_norm_epsilon", Value::F32(1e-5));
        self.set("bert.attention.causal", Value::Bool(false));
        self.weight("token_embd.weight", &[N_EMBD, CONTROL.len() + WORDS.len()]);
        self.weight("position_embd.weight", &[N_EMBD, N_CTX]);
        self.weight("token_types.weight", &[N_EMBD, 2]);
        self.norm("token_embd_norm");
        for layer in 0..N_LAYER {
            let blk = format!("blk.{layer}");
            for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
                self.weight(&format!("{blk}.{name}.weight"), &[N_EMBD, N_EMBD]);
                self.bias(&format!("{blk}.{name}.bias"), &[N_EMBD]);
            }
            self.norm(&format!("{blk}.attn_output_norm"));
            self.weight(&format!("{blk}.ffn_up.weight"), &[N_EMBD, N_FF]);
            self.bias(&format!("{blk}.ffn_up.bias"), &[N_FF]);
            self.weight(&format!("{blk}.ffn_down.weight"), &[N_FF, N_EMBD]);
            self.bias(&format!("{blk}.ffn_down.bias"), &[N_EMBD]);
            self.norm(&format!("{blk}.layer_output_norm"));
        }
    }

    fn norm(&mut self, name: &str) {
        self.ones(&format!("{name}.weight"), N_EMBD);
        self.bias(&format!("{name}.bias"), &[N_EMBD]);
    }

    fn add_words(&mut self) {
        let tokens = CONTROL.iter().map(|name| (*name).to_owned()).chain(WORDS.iter().map(|w| format!("\u{2581}{w}")));
        let tokens: Vec<Value> = tokens.map(Value::String).collect();
        // llama.cpp's numbers of token types: control, normal.
        let types = CONTROL.iter().map(|_| 3).chain(WORDS.iter().map(|_| 1));
        self.set("tokenizer.ggml.model", Value::String("bert".into()));
        self.set("tokenizer.ggml.tokens", Value::Array(tokens));
        self.set("tokenizer.ggml.token_type", Value::Array(types.map(Value::I32).collect()));
        self.set("tokenizer.ggml.token_type_count", Value::U32(2));
        for (name, id) in [("padding", 0), ("unknown", 1), ("bos", 2), ("cls", 2), ("seperator", 3), ("mask", 4)] {
            self.set(&format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
        }
    }
}
