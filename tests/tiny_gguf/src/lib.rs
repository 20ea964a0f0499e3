//! Tiny models with random weights, for architectures whose real models are too large for a test.
//!
//! What they say is noise, but llama.cpp runs them as it runs the real ones, so whatever must hold for any weights can
//! be tried on them. Tensor names and shapes are those of llama.cpp's `src/models/*.cpp`: written down here for the
//! architectures that tests without llama.cpp use, too; asked of it for the others (feature `llama`). What must hold for
//! replies of a certain form is tried on [`scripted`] models.

pub mod adapter;
mod architectures;
pub mod bert;
#[cfg(feature = "llama")]
mod described;
pub mod file;
#[cfg(feature = "llama")]
mod llama_cpp;
pub mod projector;
mod reranker;
pub mod scripted;
pub mod split;
mod tokenizer;

use std::path::Path;

#[cfg(feature = "llama")]
pub use described::LONG_WINDOW;
use file::{Gguf, Precision, Tensor, Value};

/// Architectures that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Interleaved RoPE, grouped-query attention.
    Llama,
    /// Half-split RoPE, biases on Q, K and V.
    Qwen2,
    /// Half-split RoPE, norms on Q and K.
    Qwen3,
    /// Norms on Q, K and the outputs, scaled embeddings, and a sliding window of [`WINDOW`] in all layers but every sixth.
    Gemma3,
    /// The same with a mixture of experts.
    Qwen3Moe,
    /// The same without norms on Q and K. The first layer is dense.
    Glm4Moe,
    /// A mixture of experts; norms over all heads of Q and of K.
    MiniMaxM2,
    /// A mixture of experts; three of four layers see only the positions since the last multiple of 8,192.
    Llama4,
    /// Experts with biases, attention sinks, every other layer with a sliding window of [`WINDOW`].
    GptOss,
    /// Latent attention: K alone is kept.
    DeepSeek2,
    /// Recurrent.
    Mamba,
    /// An encoder.
    Bert,
    /// Positions with several axes, without norms on Q and K.
    Qwen2Vl,
    /// Positions with several axes.
    Qwen3Vl,
    /// The same with a mixture of experts.
    Qwen3VlMoe,
    /// Three layers with a gated delta net, then one with attention; positions with several axes.
    Qwen35,
    /// The same with a mixture of experts.
    Qwen35Moe,
    /// The same with plain positions.
    Qwen3Next,
    /// The cache of Qwen3.6-27B behind a tiny embedding: 65,536 bytes of KV a token, 156.9 MB of states.
    Qwen36Of27B,
    /// The cache of Qwen3.6-35B-A3B: 20,480 bytes of KV a token, 65.9 MB of states.
    Qwen36Of35B,
    /// Layers of Mamba 2, of attention, and of feed forward alone.
    NemotronH,
    /// The same with a mixture of experts.
    NemotronHMoe,
    /// Attention and Mamba 2 side by side in every layer.
    FalconH1,
    /// Mamba, and attention without RoPE.
    Jamba,
    /// Lightning attention, whose state has no convolution, and attention.
    MiniMax01,
    /// Mamba 2, and one layer of attention.
    GraniteHybrid,
    /// Short convolutions and attention.
    Lfm2,
    /// The same with a mixture of experts.
    Lfm2Moe,
    /// The same; attention has a window.
    Lfm2Windowed,
    /// Kimi's delta attention, and one layer of latent attention.
    KimiLinear,
    /// Latent attention to positions that an indexer chooses.
    DeepSeek32,
    /// The same.
    GlmDsa,
    /// A window, and compressed rows.
    DeepSeek4,
    /// Windows; heads of two sizes, of which the larger ones are rotated in part; a limit of logits; inputs of each layer; the last
    /// layers have no KV of their own, and wider feed forward.
    Gemma4,
    /// The same with a mixture of experts, and without inputs of layers and shared KV. Layers without a window have one KV head
    /// instead of two, and no projection for V.
    Gemma4Moe,
    /// Attention to blocks that an indexer chooses.
    MiniMaxM3,
    /// Delta attention, and latent attention with an indexer.
    Glm5Next,
    /// A mixture of experts, as Step 3.5; half of the layers have a window of [`WINDOW`].
    Step35,
    /// The same with sinks, as MiMo V2.
    Mimo2,
    /// A mixture of experts; norms on Q and K, as Hunyuan 3.
    HyV3,
    /// A mixture of experts beside attention, which has a window of [`WINDOW`] in three of four layers, as Command A.
    Cohere2Moe,
    /// Kimi's delta attention, and one layer of latent attention, as Ling 3.
    BailingMoe3,
    /// Recurrent.
    Mamba2,
    /// Recurrent.
    Rwkv7,
}

impl Architecture {
    /// The architectures whose tensors llama.cpp names.
    #[cfg(feature = "llama")]
    pub const DESCRIBED: [Architecture; 39] = [
        Architecture::Qwen3Moe,
        Architecture::Glm4Moe,
        Architecture::MiniMaxM2,
        Architecture::Llama4,
        Architecture::GptOss,
        Architecture::DeepSeek2,
        Architecture::Mamba,
        Architecture::Qwen2Vl,
        Architecture::Qwen3Vl,
        Architecture::Qwen3VlMoe,
        Architecture::Qwen35,
        Architecture::Qwen35Moe,
        Architecture::Qwen3Next,
        Architecture::Qwen36Of27B,
        Architecture::Qwen36Of35B,
        Architecture::NemotronH,
        Architecture::NemotronHMoe,
        Architecture::FalconH1,
        Architecture::Jamba,
        Architecture::MiniMax01,
        Architecture::GraniteHybrid,
        Architecture::Lfm2,
        Architecture::Lfm2Moe,
        Architecture::Lfm2Windowed,
        Architecture::KimiLinear,
        Architecture::DeepSeek32,
        Architecture::GlmDsa,
        Architecture::DeepSeek4,
        Architecture::Gemma4,
        Architecture::Gemma4Moe,
        Architecture::MiniMaxM3,
        Architecture::Glm5Next,
        Architecture::Step35,
        Architecture::Mimo2,
        Architecture::HyV3,
        Architecture::Cohere2Moe,
        Architecture::BailingMoe3,
        Architecture::Mamba2,
        Architecture::Rwkv7,
    ];
}

/// Positions that the windowed layers of [`Architecture::GptOss`] and [`Architecture::Gemma3`] look back.
pub const WINDOW: u32 = 16;

/// Writes a model. The same architecture and seed give the same bytes.
pub fn write(path: &Path, architecture: Architecture, seed: u64) {
    write_with(path, architecture, seed, &[]);
}

/// The same with further keys of the architecture's own.
pub fn write_with(path: &Path, architecture: Architecture, seed: u64, numbers: &[(&str, u32)]) {
    let mut draft = Draft::of(architecture, seed);
    draft.numbers(numbers);
    draft.file.write(path);
}

/// The same with `n_heads` blocks more, which predict further tokens.
#[cfg(feature = "llama")]
pub fn write_with_heads(path: &Path, architecture: Architecture, seed: u64, n_heads: u32) {
    let mut draft = Draft::new(seed);
    draft.n_heads = n_heads;
    draft.add_described(architecture);
    draft.file.write(path);
}

/// [`write()`] with a chat template: the role and the text of each message.
pub fn write_with_template(path: &Path, architecture: Architecture, seed: u64) {
    const CHAT_TEMPLATE: &str =
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:";
    let mut draft = Draft::of(architecture, seed);
    draft.set("tokenizer.chat_template", Value::String(CHAT_TEMPLATE.into()));
    draft.file.write(path);
}

/// Writes a reranker: [`Architecture::Bert`], whose head has two layers and gives a score, or [`Architecture::Qwen3`],
/// whose head has one layer and gives the probabilities of yes and no. Only the second has a form for its pairs in its file.
pub fn write_reranker(path: &Path, architecture: Architecture, seed: u64) {
    let mut draft = Draft::of(architecture, seed);
    draft.add_reranker(architecture);
    draft.file.write(path);
}

/// A model under construction.
struct Draft {
    /// The prefix of the model's own keys.
    architecture: &'static str,
    /// The last blocks, which predict further tokens.
    #[cfg(feature = "llama")]
    n_heads: u32,
    file: Gguf,
    random: SplitMix64,
}

impl Draft {
    fn new(seed: u64) -> Self {
        Draft {
            architecture: "",
            #[cfg(feature = "llama")]
            n_heads: 0,
            file: Gguf::default(),
            random: SplitMix64(seed),
        }
    }

    fn of(architecture: Architecture, seed: u64) -> Self {
        let mut draft = Draft::new(seed);
        match architecture {
            Architecture::Bert => draft.add_bert(),
            Architecture::Llama | Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Gemma3 => {
                draft.add_architecture(architecture)
            }
            #[cfg(feature = "llama")]
            described => draft.add_described(described),
            #[cfg(not(feature = "llama"))]
            described => panic!("{described:?} is written with the feature llama only"),
        }
        draft
    }

    fn set(&mut self, key: &str, value: Value) {
        self.file.metadata.push((key.to_owned(), value));
    }

    /// Keys of the architecture's own.
    fn numbers(&mut self, numbers: &[(&str, u32)]) {
        for (key, number) in numbers {
            self.set(&format!("{}.{key}", self.architecture), Value::U32(*number));
        }
    }

    /// A weight of random values that keep the size of what they are multiplied with. `dims` as ggml counts them: the
    /// contiguous dimension, which is the one multiplied over, first.
    fn weight(&mut self, name: &str, dims: &[usize]) {
        let bound = (3.0 / dims[0] as f32).sqrt();
        self.values(name, dims, |random| bound * random.next());
    }

    /// A weight of ones, as norms have.
    fn ones(&mut self, name: &str, n: usize) {
        self.values(name, &[n], |_| 1.0);
    }

    /// Small random values, as biases have.
    fn bias(&mut self, name: &str, dims: &[usize]) {
        self.values(name, dims, |random| 0.1 * random.next());
    }

    fn values(&mut self, name: &str, dims: &[usize], mut value: impl FnMut(&mut SplitMix64) -> f32) {
        let n = dims.iter().product();
        let values = (0..n).map(|_| value(&mut self.random)).collect();
        let tensor = Tensor { dims: dims.to_vec(), values, precision: Precision::F32 };
        self.file.tensors.push((name.to_owned(), tensor));
    }
}

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    /// Uniform in -1..1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
