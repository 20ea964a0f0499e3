//! The shapes of models whose weights are made up: real dimensions, because they determine what prompts, tokens and KV cost.
//! The figures are those of the models' own `config.json`.

/// How llama.cpp computes a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MadeUpFamily {
    /// `llama`: interleaved RoPE, a feed-forward network.
    Llama,
    /// `qwen3moe`: half-split RoPE, norms on Q and K, experts.
    Qwen3Moe,
    /// `hy_v3`: as `qwen3moe` without experts, and a head that predicts further tokens.
    HyV3,
    /// `gpt-oss`: experts with biases, attention sinks, a sliding window in every other layer.
    GptOss,
}

impl MadeUpFamily {
    /// Blocks behind the others that predict further tokens.
    pub(super) fn n_heads(self) -> u64 {
        u64::from(self == MadeUpFamily::HyV3)
    }

    /// llama.cpp's name for the architecture.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            MadeUpFamily::Llama => "llama",
            MadeUpFamily::Qwen3Moe => "qwen3moe",
            MadeUpFamily::HyV3 => "hy_v3",
            MadeUpFamily::GptOss => "gpt-oss",
        }
    }
}

/// The dimensions of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Shape {
    /// In `--models` and in the file's name.
    pub(super) name: &'static str,
    /// For the report.
    pub(super) about: &'static str,
    pub(super) family: MadeUpFamily,
    pub(super) n_layer: u64,
    pub(super) n_embd: u64,
    pub(super) n_head: u64,
    pub(super) n_head_kv: u64,
    pub(super) head_dim: u64,
    /// Rows of a feed-forward network, or of one expert.
    pub(super) n_ff: u64,
    /// 0 without experts.
    pub(super) n_expert: u64,
    /// Experts that compute a token.
    pub(super) n_expert_used: u64,
    pub(super) n_vocab: u64,
    /// Positions that every other layer looks back; 0 without a window.
    pub(super) window: u64,
    pub(super) n_ctx: u64,
    pub(super) rope_base: f32,
    pub(super) epsilon: f32,
}

const DENSE_8B: Shape = Shape {
    name: "dense-8b",
    about: "made up, Llama 3.1 8B's shape, Q4_0",
    family: MadeUpFamily::Llama,
    n_layer: 32,
    n_embd: 4096,
    n_head: 32,
    n_head_kv: 8,
    head_dim: 128,
    n_ff: 14_336,
    n_expert: 0,
    n_expert_used: 0,
    n_vocab: 128_256,
    window: 0,
    n_ctx: 131_072,
    rope_base: 500_000.0,
    epsilon: 1e-5,
};

const DENSE_1B: Shape = Shape {
    name: "dense-1b",
    about: "made up, Llama 3.2 1B's shape, Q4_0",
    n_layer: 16,
    n_embd: 2048,
    head_dim: 64,
    n_ff: 8192,
    ..DENSE_8B
};

const MTP_1B: Shape = Shape {
    name: "mtp-1b",
    about: "made up, Llama 3.2 1B's shape with norms on Q and K and a head (MTP), Q4_0",
    family: MadeUpFamily::HyV3,
    ..DENSE_1B
};

const MOE_30B_A3B: Shape = Shape {
    name: "moe-30b-a3b",
    about: "made up, Qwen3 30B-A3B's shape, Q4_0",
    family: MadeUpFamily::Qwen3Moe,
    n_layer: 48,
    n_embd: 2048,
    n_head: 32,
    n_head_kv: 4,
    head_dim: 128,
    n_ff: 768,
    n_expert: 128,
    n_expert_used: 8,
    n_vocab: 151_936,
    window: 0,
    n_ctx: 40_960,
    rope_base: 1_000_000.0,
    epsilon: 1e-6,
};

const GPT_OSS_20B: Shape = Shape {
    name: "gpt-oss-20b",
    about: "made up, gpt-oss-20b's shape, MXFP4",
    family: MadeUpFamily::GptOss,
    n_layer: 24,
    n_embd: 2880,
    n_head: 64,
    n_head_kv: 8,
    head_dim: 64,
    n_ff: 2880,
    n_expert: 32,
    n_expert_used: 4,
    n_vocab: 201_088,
    window: 128,
    n_ctx: 131_072,
    rope_base: 150_000.0,
    epsilon: 1e-5,
};

/// Small enough to check in a second that the files are right. All rows are whole blocks of 32.
const fn tiny(name: &'static str, of: Shape) -> Shape {
    let about = "made up, tiny";
    let (n_expert, n_expert_used) = if of.n_expert > 0 { (8, 2) } else { (0, 0) };
    let window = if of.window > 0 { 16 } else { 0 };
    let (n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff) = (4, 64, 4, 2, 32, 96);
    let (n_vocab, n_ctx) = (512, 8192);
    let shape = Shape { name, about, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, ..of };
    Shape { n_expert, n_expert_used, n_vocab, window, n_ctx, ..shape }
}

/// All shapes: the large ones, then those for tests.
pub(super) const SHAPES: [Shape; 9] = [
    DENSE_8B,
    DENSE_1B,
    MTP_1B,
    MOE_30B_A3B,
    GPT_OSS_20B,
    tiny("dense-tiny", DENSE_8B),
    tiny("mtp-tiny", MTP_1B),
    tiny("moe-tiny", MOE_30B_A3B),
    tiny("gpt-oss-tiny", GPT_OSS_20B),
];

/// The shape with this name.
pub(super) fn find(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name.eq_ignore_ascii_case(name))
}
