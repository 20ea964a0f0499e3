//! Options of `baton doctor`.

use std::path::PathBuf;

use baton_proxy::config::transport_args::TransportArgs;
use clap::Args;

/// Options of `baton doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    pub(super) model: String,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=8_192))]
    pub(super) tokens: u32,
    /// Tokens that are generated and compared
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=512))]
    pub(super) new_tokens: u32,
    /// Compute threads of each node [default: one per core]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(super) threads: Option<u32>,
    /// Try these devices only, by name and by commas [default: cpu and every GPU]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) devices: Vec<String>,
    /// Also measure this draft model, a .gguf file with the model's vocabulary: beside the model, and as a draft node on each device
    #[arg(long, value_name = "FILE")]
    pub(super) draft: Option<PathBuf>,
    /// Also take KV from this node on another machine, or drafts if it has the role draft; needs a pairing or BATON_CLUSTER_KEY; repeat for several
    #[arg(long, value_name = "HOST:PORT|URL")]
    pub(super) prefill: Vec<String>,
    /// Also take KV of other weights, if its distance on a test prompt is not above this
    #[arg(long, value_name = "DISTANCE")]
    pub(super) max_canary_distance: Option<f64>,
    #[command(flatten)]
    pub(super) transport: TransportArgs,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}
