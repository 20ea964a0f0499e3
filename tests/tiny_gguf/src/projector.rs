//! Projectors: what turns an image into rows that a language model takes for tokens. Named and shaped as llama.cpp's
//! `clip.cpp` has them.

use std::path::Path;

use super::Draft;
use crate::file::Value;

const N_LAYER: usize = 2;
const N_EMBD: usize = 32;
const N_HEAD: usize = 2;
const N_FF: usize = 64;
const PATCH: usize = 14;

/// What can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TinyProjector {
    /// LLaVA's: a row for each patch, seen like text, with nothing around.
    Mlp,
    /// Gemma 3's: rows that see each other, between two control words.
    Gemma3,
    /// Qwen 2-VL's: a row for each square of four patches, as many as the picture has; one position for all of them.
    Qwen2Vl,
    /// The same with windows in the first layer.
    Qwen25Vl,
    /// The same; beside each row, one for the model's first layer.
    Qwen3Vl,
    /// The same without these.
    Qwen35,
}

impl TinyProjector {
    /// Those whose rows lie on one position (M-RoPE).
    pub const SHARING: [TinyProjector; 4] =
        [TinyProjector::Qwen2Vl, TinyProjector::Qwen25Vl, TinyProjector::Qwen3Vl, TinyProjector::Qwen35];
}

/// Rows that an image becomes, whatever its size, with the first two projectors.
pub const N_ROWS: usize = 16;

/// Writes a projector for models with rows of `n_embd` values. The same arguments give the same bytes.
pub fn write(path: &Path, projector: TinyProjector, n_embd: usize, seed: u64) {
    let mut draft = Draft::new(seed);
    draft.architecture = "clip.vision";
    draft.set("general.architecture", Value::String("clip".into()));
    draft.set("clip.has_vision_encoder", Value::Bool(true));
    draft.set("clip.use_gelu", Value::Bool(true));
    // Gemma's pools four by four patches to a row.
    let (name, patches_per_side) = match projector {
        TinyProjector::Mlp => ("mlp", 4),
        TinyProjector::Gemma3 => ("gemma3", 16),
        TinyProjector::Qwen2Vl => ("qwen2vl_merger", 4),
        TinyProjector::Qwen25Vl => ("qwen2.5vl_merger", 4),
        TinyProjector::Qwen3Vl | TinyProjector::Qwen35 => ("qwen3vl_merger", 4),
    };
    draft.set("clip.projector_type", Value::String(name.into()));
    draft.numbers(&[
        ("embedding_length", N_EMBD as u32),
        ("feed_forward_length", N_FF as u32),
        ("block_count", N_LAYER as u32),
        ("projection_dim", n_embd as u32),
        ("attention.head_count", N_HEAD as u32),
        ("image_size", (PATCH * patches_per_side) as u32),
        ("patch_size", PATCH as u32),
    ]);
    draft.set("clip.vision.attention.layer_norm_epsilon", Value::F32(1e-6));
    for key in ["image_mean", "image_std"] {
        draft.set(&format!("clip.vision.{key}"), Value::Array(vec![Value::F32(0.5); 3]));
    }
    draft.weight("v.patch_embd.weight", &[PATCH, PATCH, 3, N_EMBD]);
    let shares = TinyProjector::SHARING.contains(&projector);
    if shares {
        // A still picture goes through both, as two frames.
        draft.weight("v.patch_embd.weight.1", &[PATCH, PATCH, 3, N_EMBD]);
        draft.numbers(&[("spatial_merge_size", 2)]);
    }
    if projector == TinyProjector::Qwen25Vl {
        draft.numbers(&[("n_wa_pattern", 2)]);
    }
    if !matches!(projector, TinyProjector::Qwen2Vl | TinyProjector::Qwen25Vl) {
        draft.bias("v.patch_embd.bias", &[N_EMBD]);
        draft.weight("v.position_embd.weight", &[N_EMBD, patches_per_side * patches_per_side]);
    }
    for layer in 0..N_LAYER {
        let blk = format!("v.blk.{layer}");
        let parts: &[&str] = match projector {
            TinyProjector::Qwen3Vl | TinyProjector::Qwen35 => &["attn_out"],
            _ => &["attn_q", "attn_k", "attn_v", "attn_out"],
        };
        for name in parts {
            draft.linear(&format!("{blk}.{name}"), N_EMBD, N_EMBD);
        }
        if matches!(projector, TinyProjector::Qwen3Vl | TinyProjector::Qwen35) {
            draft.linear(&format!("{blk}.attn_qkv"), N_EMBD, 3 * N_EMBD);
        }
        if projector == TinyProjector::Qwen25Vl {
            draft.linear(&format!("{blk}.ffn_gate"), N_EMBD, N_FF);
        }
        draft.linear(&format!("{blk}.ffn_up"), N_EMBD, N_FF);
        draft.linear(&format!("{blk}.ffn_down"), N_FF, N_EMBD);
        for name in ["ln1", "ln2"] {
            draft.ones(&format!("{blk}.{name}.weight"), N_EMBD);
            draft.bias(&format!("{blk}.{name}.bias"), &[N_EMBD]);
        }
    }
    draft.ones("v.post_ln.weight", N_EMBD);
    draft.bias("v.post_ln.bias", &[N_EMBD]);
    match projector {
        TinyProjector::Mlp => {
            draft.linear("mm.0", N_EMBD, n_embd);
            draft.linear("mm.2", n_embd, n_embd);
        }
        TinyProjector::Gemma3 => {
            // Multiplied the other way round.
            draft.weight("mm.input_projection.weight", &[n_embd, N_EMBD]);
            draft.ones("mm.soft_emb_norm.weight", N_EMBD);
        }
        TinyProjector::Qwen2Vl | TinyProjector::Qwen25Vl | TinyProjector::Qwen35 => {
            draft.merger("mm.0", "mm.2", n_embd)
        }
        TinyProjector::Qwen3Vl => {
            draft.merger("mm.0", "mm.2", n_embd);
            draft.ones("v.deepstack.0.norm.weight", 4 * N_EMBD);
            draft.bias("v.deepstack.0.norm.bias", &[4 * N_EMBD]);
            draft.merger("v.deepstack.0.fc1", "v.deepstack.0.fc2", n_embd);
        }
    }
    draft.file.write(path);
}

impl Draft {
    /// Two layers that make a row of a square of four patches.
    fn merger(&mut self, first: &str, second: &str, n_embd: usize) {
        self.linear(first, 4 * N_EMBD, 4 * N_EMBD);
        self.linear(second, 4 * N_EMBD, n_embd);
    }

    fn linear(&mut self, name: &str, n_in: usize, n_out: usize) {
        self.weight(&format!("{name}.weight"), &[n_in, n_out]);
        self.bias(&format!("{name}.bias"), &[n_out]);
    }
}
