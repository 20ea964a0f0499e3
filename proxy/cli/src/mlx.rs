//! `baton mlx`: what the mlx engine needs beside this program.

use std::path::PathBuf;

use baton_engines::mlx::REQUIREMENTS;
use baton_fetch::progress;
use baton_proxy::serve::{CommandFailure, mlx_environment};
use baton_tryout::mlx_folder;
use clap::{Args, Subcommand};

use super::terminal;

/// Options of `baton mlx`.
#[derive(Args)]
pub(super) struct MlxArgs {
    #[command(subcommand)]
    command: MlxCommand,
}

#[derive(Subcommand)]
enum MlxCommand {
    /// Install mlx-lm, in the version that the mlx engine was tested with, into a folder of Baton's cache.
    Install(InstallArgs),
    /// Make a model's folder from a GGUF file, with weights of f32. For tests: it takes up to eight times the space.
    Convert(ConvertArgs),
}

#[derive(Args)]
struct InstallArgs {
    /// The Python to make the environment with, 3.11 or newer
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
}

#[derive(Args)]
struct ConvertArgs {
    /// The GGUF file: a Llama, Qwen 2 or Qwen 3 with a byte-pair tokenizer
    file: PathBuf,
    /// The folder to write
    folder: PathBuf,
}

pub(super) async fn run(args: MlxArgs) -> Result<(), CommandFailure> {
    match args.command {
        MlxCommand::Install(InstallArgs { python }) => {
            let environment = mlx_environment()?;
            environment.install(&python, REQUIREMENTS, &*progress::to_stderr()).await?;
            Ok(terminal::print_line(environment.python().display())?)
        }
        MlxCommand::Convert(ConvertArgs { file, folder }) => {
            mlx_folder::convert(&file, &folder).await?;
            Ok(terminal::print_line(folder.display())?)
        }
    }
}
