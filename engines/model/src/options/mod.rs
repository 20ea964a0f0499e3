//! Values of engine options that have a form of their own, as llama-server's users write them.

mod cache_type;
mod flash_attention;
mod lent_layers;
mod lora;
mod rope;
mod size;
mod speculation;
mod tensor_placement;
mod workers;

pub use cache_type::{CacheType, CacheTypes};
pub use flash_attention::FlashAttention;
pub use lent_layers::{LentLayers, PlannedLayers, lent_shares};
pub use lora::LoraFile;
pub use rope::{RopeOptions, RopeScaling};
pub use size::WrittenSize;
pub use speculation::Speculation;
pub use tensor_placement::{CpuTensors, MAX_PATTERNS, SplitMode, parse_override};
pub use workers::WorkerEndpoint;
