//! Files of models with made-up weights, in the shapes of large ones. What such a model says is noise, but it costs what the
//! real one costs. Promises for all weights, such as equal KV, can be tried on it.
//!
//! Names of keys and tensors are those of llama.cpp's `src/llama-arch.cpp` and `src/models/*.cpp`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_fetch::made::MadeFile;
use baton_fetch::progress::DownloadProgress;
use baton_model::gguf::byte_level::spelled;
use baton_model::gguf::writer::{GgufPlan, PlannedTensor, WrittenType, WrittenValue};
use baton_proxy::serve::CommandFailure;

use super::shapes::{MadeUpFamily, Shape};
use super::weights::{self, Content, SplitMix64};

/// Changes with the content of the files, so that none of an earlier version is taken for one of this.
const VERSION: u32 = 1;

/// How much wider than 1 the logits are spread. With 2, a difference of the KV by a few per cent gives a mean KL of some
/// 1e-3, as it does with real models.
const LOGITS: f32 = 2.0;

/// ggml's version of its quantized types (`GGML_QNT_VERSION`).
const QUANTIZATION_VERSION: u32 = 2;

/// llama.cpp's numbers of the types of tokens (`llama_token_type`).
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// The file of a shape in the cache folder. Errors: none but for a shape whose rows are not whole blocks.
pub(super) fn file(shape: &Shape, folder: &Path) -> io::Result<MadeFile> {
    let name = format!("made-up-{}-v{VERSION}.gguf", shape.name);
    Ok(MadeFile { folder: folder.to_owned(), name, n_bytes: Draft::of(shape).plan.file_bytes()? })
}

/// Returns the path of a shape's file, which is written if it is not in the folder.
pub(super) async fn make(
    shape: &'static Shape,
    folder: &Path,
    progress: Arc<dyn DownloadProgress>,
) -> Result<PathBuf, CommandFailure> {
    Ok(file(shape, folder)?.make(progress, move |out| Draft::of(shape).write(out)).await?)
}

/// A file, as it will be written.
struct Draft {
    family: MadeUpFamily,
    plan: GgufPlan,
    /// Of each tensor.
    contents: Vec<Content>,
    /// The type of most weights.
    kind: WrittenType,
    /// The type of the experts.
    experts: WrittenType,
}

impl Draft {
    fn of(shape: &Shape) -> Draft {
        // As llama.cpp's users have these models: gpt-oss as published, the others in 4 bits.
        let (kind, experts) = match shape.family {
            MadeUpFamily::Llama | MadeUpFamily::HyV3 | MadeUpFamily::Qwen3Moe => (WrittenType::Q4_0, WrittenType::Q4_0),
            MadeUpFamily::GptOss => (WrittenType::Q8_0, WrittenType::Mxfp4),
        };
        let plan = GgufPlan::default();
        let mut draft = Draft { family: shape.family, plan, contents: Vec::new(), kind, experts };
        draft.add_keys(shape);
        draft.add_vocabulary(shape.n_vocab as usize);
        // Not multiplied: rows of this table are where a token begins.
        draft.add("token_embd.weight", &[shape.n_embd, shape.n_vocab], kind, Content::Random(1.0));
        draft.ones("output_norm.weight", shape.n_embd);
        let output = Content::Random(LOGITS / (shape.n_embd as f32).sqrt());
        draft.add("output.weight", &[shape.n_embd, shape.n_vocab], WrittenType::Q8_0, output);
        for layer in 0..shape.n_layer {
            draft.add_layer(shape, &format!("blk.{layer}"));
        }
        for layer in shape.n_layer..shape.n_layer + shape.family.n_heads() {
            draft.add_head(shape, &format!("blk.{layer}"));
        }
        draft
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut random = SplitMix64::new(u64::from(VERSION));
        self.plan.write(out, |i, data| {
            let PlannedTensor { dims, kind, .. } = &self.plan.tensors[i];
            weights::write(*kind, dims.iter().product(), self.contents[i], &mut random, data)
        })
    }

    fn add_keys(&mut self, shape: &Shape) {
        self.set("general.architecture", WrittenValue::String(self.family.as_str().into()));
        self.set("general.name", WrittenValue::String(format!("{} (made-up weights)", shape.name)));
        self.set("general.quantization_version", WrittenValue::U32(QUANTIZATION_VERSION));
        self.numbers(&[
            ("context_length", shape.n_ctx),
            ("embedding_length", shape.n_embd),
            ("block_count", shape.n_layer + shape.family.n_heads()),
            ("feed_forward_length", shape.n_ff),
            ("attention.head_count", shape.n_head),
            ("attention.head_count_kv", shape.n_head_kv),
            ("attention.key_length", shape.head_dim),
            ("attention.value_length", shape.head_dim),
            ("rope.dimension_count", shape.head_dim),
        ]);
        if shape.n_expert > 0 {
            self.numbers(&[
                ("expert_count", shape.n_expert),
                ("expert_used_count", shape.n_expert_used),
                ("expert_feed_forward_length", shape.n_ff),
            ]);
        }
        if shape.family.n_heads() > 0 {
            // llama.cpp wants the size of experts, of which there are none.
            self.numbers(&[
                ("nextn_predict_layers", shape.family.n_heads()),
                ("expert_feed_forward_length", shape.n_ff),
            ]);
        }
        if shape.window > 0 {
            self.numbers(&[("attention.sliding_window", shape.window)]);
        }
        let family = self.family.as_str();
        self.set(&format!("{family}.rope.freq_base"), WrittenValue::F32(shape.rope_base));
        self.set(&format!("{family}.attention.layer_norm_rms_epsilon"), WrittenValue::F32(shape.epsilon));
    }

    /// A byte-level tokenizer: all bytes, one merged pair, because llama.cpp wants a list of merges, two control tokens, and
    /// as many unused tokens as the real vocabulary has more. They make the output as wide as the real one.
    fn add_vocabulary(&mut self, n_vocab: usize) {
        let mut tokens: Vec<String> = (0..=255).map(|byte| spelled(byte).to_string()).collect();
        tokens.push("th".to_owned());
        tokens.extend((tokens.len()..n_vocab - 2).map(|i| format!("<unused{i}>")));
        tokens.extend(["<|start|>", "<|end|>"].map(str::to_owned));
        let end = n_vocab as u32 - 1;
        let mut kinds = vec![WrittenValue::I32(NORMAL); n_vocab - 2];
        kinds.extend([WrittenValue::I32(CONTROL), WrittenValue::I32(CONTROL)]);
        let strings = |texts: Vec<String>| WrittenValue::Array(texts.into_iter().map(WrittenValue::String).collect());
        self.set("tokenizer.ggml.model", WrittenValue::String("gpt2".into()));
        self.set("tokenizer.ggml.pre", WrittenValue::String("gpt-2".into()));
        self.set("tokenizer.ggml.tokens", strings(tokens));
        self.set("tokenizer.ggml.token_type", WrittenValue::Array(kinds));
        self.set("tokenizer.ggml.merges", strings(vec!["t h".to_owned()]));
        self.set("tokenizer.ggml.bos_token_id", WrittenValue::U32(end - 1));
        self.set("tokenizer.ggml.eos_token_id", WrittenValue::U32(end));
        self.set("tokenizer.ggml.add_bos_token", WrittenValue::Bool(false));
    }

    fn add_layer(&mut self, shape: &Shape, blk: &str) {
        self.ones(&format!("{blk}.attn_norm.weight"), shape.n_embd);
        self.add_attention(shape, blk);
        match self.family {
            MadeUpFamily::Llama => self.add_feed_forward(shape, blk),
            MadeUpFamily::HyV3 => {
                self.add_norms(shape, blk);
                self.add_feed_forward(shape, blk);
            }
            MadeUpFamily::Qwen3Moe => {
                self.add_norms(shape, blk);
                self.ones(&format!("{blk}.ffn_norm.weight"), shape.n_embd);
                self.add_experts(shape, blk);
            }
            MadeUpFamily::GptOss => {
                self.ones(&format!("{blk}.post_attention_norm.weight"), shape.n_embd);
                self.add_experts(shape, blk);
                self.add_biases(shape, blk);
            }
        }
    }

    /// A layer more, whose input is made of a token and the hidden row that predicted it.
    fn add_head(&mut self, shape: &Shape, blk: &str) {
        self.add_layer(shape, blk);
        for norm in ["enorm", "hnorm", "shared_head_norm"] {
            self.ones(&format!("{blk}.nextn.{norm}.weight"), shape.n_embd);
        }
        self.weight(&format!("{blk}.nextn.eh_proj.weight"), &[2 * shape.n_embd, shape.n_embd], self.kind);
    }

    fn add_norms(&mut self, shape: &Shape, blk: &str) {
        self.ones(&format!("{blk}.attn_q_norm.weight"), shape.head_dim);
        self.ones(&format!("{blk}.attn_k_norm.weight"), shape.head_dim);
    }

    fn add_feed_forward(&mut self, shape: &Shape, blk: &str) {
        self.ones(&format!("{blk}.ffn_norm.weight"), shape.n_embd);
        self.weight(&format!("{blk}.ffn_gate.weight"), &[shape.n_embd, shape.n_ff], self.kind);
        self.weight(&format!("{blk}.ffn_up.weight"), &[shape.n_embd, shape.n_ff], self.kind);
        self.weight(&format!("{blk}.ffn_down.weight"), &[shape.n_ff, shape.n_embd], self.kind);
    }

    fn add_attention(&mut self, shape: &Shape, blk: &str) {
        let (n_q, n_kv) = (shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim);
        self.weight(&format!("{blk}.attn_q.weight"), &[shape.n_embd, n_q], self.kind);
        self.weight(&format!("{blk}.attn_k.weight"), &[shape.n_embd, n_kv], self.kind);
        self.weight(&format!("{blk}.attn_v.weight"), &[shape.n_embd, n_kv], self.kind);
        self.weight(&format!("{blk}.attn_output.weight"), &[n_q, shape.n_embd], self.kind);
    }

    fn add_experts(&mut self, shape: &Shape, blk: &str) {
        let Shape { n_embd, n_ff, n_expert, .. } = *shape;
        self.weight(&format!("{blk}.ffn_gate_inp.weight"), &[n_embd, n_expert], WrittenType::F32);
        self.weight(&format!("{blk}.ffn_gate_exps.weight"), &[n_embd, n_ff, n_expert], self.experts);
        self.weight(&format!("{blk}.ffn_up_exps.weight"), &[n_embd, n_ff, n_expert], self.experts);
        self.weight(&format!("{blk}.ffn_down_exps.weight"), &[n_ff, n_embd, n_expert], self.experts);
    }

    /// What only gpt-oss has: biases, and a sink for each head.
    fn add_biases(&mut self, shape: &Shape, blk: &str) {
        let Shape { n_embd, n_ff, n_expert, n_head, .. } = *shape;
        let (n_q, n_kv) = (n_head * shape.head_dim, shape.n_head_kv * shape.head_dim);
        for (name, dims) in [
            ("attn_q.bias", &[n_q][..]),
            ("attn_k.bias", &[n_kv]),
            ("attn_v.bias", &[n_kv]),
            ("attn_output.bias", &[n_embd]),
            ("attn_sinks.weight", &[n_head]),
            ("ffn_gate_inp.bias", &[n_expert]),
            ("ffn_gate_exps.bias", &[n_ff, n_expert]),
            ("ffn_up_exps.bias", &[n_ff, n_expert]),
            ("ffn_down_exps.bias", &[n_embd, n_expert]),
        ] {
            self.add(&format!("{blk}.{name}"), dims, WrittenType::F32, Content::Bias);
        }
    }

    fn set(&mut self, key: &str, value: WrittenValue) {
        self.plan.metadata.push((key.to_owned(), value));
    }

    /// Keys of the architecture's own.
    fn numbers(&mut self, numbers: &[(&str, u64)]) {
        for (key, number) in numbers {
            self.set(&format!("{}.{key}", self.family.as_str()), WrittenValue::U32(*number as u32));
        }
    }

    fn ones(&mut self, name: &str, n: u64) {
        self.add(name, &[n], WrittenType::F32, Content::Ones);
    }

    /// A weight that keeps the size of what it is multiplied with: a sum over the first dimension keeps its variance.
    fn weight(&mut self, name: &str, dims: &[u64], kind: WrittenType) {
        self.add(name, dims, kind, Content::Random(1.0 / (dims[0] as f32).sqrt()));
    }

    fn add(&mut self, name: &str, dims: &[u64], kind: WrittenType, content: Content) {
        self.plan.tensors.push(PlannedTensor { name: name.to_owned(), dims: dims.to_vec(), kind });
        self.contents.push(content);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use baton_fetch::progress::Silent;
    use baton_model::gguf::Gguf;

    use super::super::shapes::{self, SHAPES};
    use super::*;

    #[test]
    fn the_large_shapes_have_the_real_sizes() {
        let check = |name: &str, n_weights: f64, gigabytes: f64| {
            let draft = Draft::of(shapes::find(name).unwrap());
            let values: u64 = draft.plan.tensors.iter().map(|tensor| tensor.dims.iter().product::<u64>()).sum();
            let n_bytes = draft.plan.file_bytes().unwrap();
            assert!((values as f64 / n_weights - 1.0).abs() < 0.01, "{name} has {values} weights");
            assert!((n_bytes as f64 / 1e9 / gigabytes - 1.0).abs() < 0.02, "{name} has {n_bytes} bytes");
        };
        // As published: 8.03, 30.5 and 20.9 billion parameters. gpt-oss-20b's file has 12.1 GB.
        check("dense-8b", 8.03e9, 4.78);
        check("moe-30b-a3b", 30.5e9, 17.3);
        check("gpt-oss-20b", 20.9e9, 12.1);
    }

    #[tokio::test]
    async fn every_tiny_shape_is_a_whole_gguf_file() {
        let folder = tempfile::tempdir().unwrap();
        for shape in SHAPES.iter().filter(|shape| shape.name.ends_with("-tiny")) {
            let path = make(shape, folder.path(), Arc::new(Silent)).await.unwrap();
            assert!(path.file_name().unwrap().to_str().unwrap().starts_with("made-up-"));
            assert_eq!(std::fs::metadata(&path).unwrap().len(), file(shape, folder.path()).unwrap().n_bytes);
            let gguf = Gguf::open(&path).unwrap();
            let names: BTreeSet<&str> = gguf.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            assert_eq!(names.len(), gguf.tensors.len(), "no name twice");
            assert!(gguf.tensors.iter().all(|tensor| tensor.size_bytes.is_some()));
        }
    }
}
