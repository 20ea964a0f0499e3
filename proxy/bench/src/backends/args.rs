//! Options of `baton-bench backends`.

use clap::Args;

use super::model::BackendModel;
use crate::report::ReportFiles;

/// Options of `baton-bench backends`.
#[derive(Args)]
pub(crate) struct BackendsBenchArgs {
    /// Models, by commas: .gguf files, catalogue names, or shapes that are filled with random weights: dense-8b (4.8 GB),
    /// moe-30b-a3b (17.4 GB), gpt-oss-20b (12.1 GB) [default: smollm2,gemma3-270m]
    #[arg(long, value_delimiter = ',', value_name = "MODELS")]
    models: Vec<String>,
    /// All default models and large shapes
    #[arg(long, conflicts_with = "models")]
    all: bool,
    /// Repetitions; medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=8_000))]
    tokens: u32,
    /// Tokens that are generated and compared
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=512))]
    new_tokens: u32,
    /// Compute threads of each node [default: one per core]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(super) threads: Option<u32>,
    /// These devices only, by name and by commas [default: cpu and every GPU]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) devices: Vec<String>,
    /// One round of 64 tokens, as a check that the benchmark works
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    pub(super) files: ReportFiles,
    /// Delete the files of random weights afterwards; otherwise the next run uses them again
    #[arg(long)]
    pub(super) delete: bool,
}

/// The sizes of the measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) struct TrialSizes {
    /// Of each prompt.
    pub(super) n_tokens: u32,
    /// Generated and compared.
    pub(super) n_new: u32,
    pub(super) n_rounds: u32,
}

impl BackendsBenchArgs {
    pub(super) fn sizes(&self) -> TrialSizes {
        match self.quick {
            true => TrialSizes { n_tokens: 64, n_new: 8, n_rounds: 1 },
            false => TrialSizes { n_tokens: self.tokens, n_new: self.new_tokens, n_rounds: self.rounds },
        }
    }

    /// The chosen models. Errors: there is no such model.
    pub(super) fn models(&self) -> Result<Vec<BackendModel>, baton_proxy::serve::CommandFailure> {
        let names: Vec<&str> = match (self.all, self.models.is_empty()) {
            (true, _) => [&DEFAULT[..], &LARGE].concat(),
            (false, true) => DEFAULT.to_vec(),
            (false, false) => self.models.iter().map(String::as_str).collect(),
        };
        names.into_iter().map(BackendModel::parse).collect()
    }
}

const DEFAULT: [&str; 2] = ["smollm2", "gemma3-270m"];
const LARGE: [&str; 3] = ["dense-8b", "moe-30b-a3b", "gpt-oss-20b"];
