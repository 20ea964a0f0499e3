//! `baton demo`: computes one long prompt on one node, decodes it on another, and shows the time of each part.
//!
//! It starts real processes on loopback: a prefill node, and an endpoint whose engine decodes. Then it sends the same
//! prompt to an endpoint alone. No process outlives the command.

mod ask;
mod serve;
mod simulate;
mod waterfall;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use baton_engines::registry::EngineKind;
use baton_fetch as models;
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, model_files, signals};
use clap::Args;
use tokio_util::sync::CancellationToken;

use self::ask::ask;
use self::serve::serve;
use self::simulate::SimulatedCluster;
use crate::node_process::NodeProcess;
use crate::prompts::TEXT;

/// Options of `baton demo`.
#[derive(Args)]
pub struct DemoArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// Words in the prompt; a word is about one and a half tokens
    #[arg(long, default_value_t = 650, value_parser = clap::value_parser!(u32).range(100..=4_000))]
    words: u32,
    /// Compute threads of each node
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: u32,
    /// The engine of the node that prefills [default: llama]
    #[arg(long, value_name = "ENGINE", value_parser = engine_name)]
    from: Option<EngineKind>,
    /// The engine of the node that decodes [default: llama]
    #[arg(long, value_name = "ENGINE", value_parser = engine_name)]
    to: Option<EngineKind>,
    /// Play on simulated machines instead, at published rates, in real time
    #[arg(long, value_enum, value_name = "CLUSTER", conflicts_with_all = ["model", "words", "threads", "from", "to"])]
    simulate: Option<SimulatedCluster>,
    /// With --simulate: print the page's address, and do not open a browser
    #[arg(long, requires = "simulate")]
    no_open: bool,
    /// With --simulate: end after the play, also on a terminal
    #[arg(long, requires = "simulate")]
    exit: bool,
}

/// An engine that runs a model, by its name.
fn engine_name(name: &str) -> Result<EngineKind, String> {
    let real = EngineKind::ALL.into_iter().filter(|kind| kind.needs_file());
    let known: Vec<&str> = real.clone().map(EngineKind::as_str).collect();
    real.into_iter()
        .find(|kind| kind.as_str() == name)
        .ok_or_else(|| format!("the engines are {}", known.join(" and ")))
}

/// Tokens of the reply: enough to compare two replies.
const MAX_TOKENS: u32 = 24;

/// KV of weights with 4 bits and of the same weights as f32 differ by 0.03 to 0.05, kernels of 4 bits among them.
const DEQUANTIZED_DISTANCE: &str = "0.1";

/// Runs the demonstration and returns its picture. A signal ends it, and every process it started, at once.
pub async fn run(args: DemoArgs) -> Result<String, CommandFailure> {
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    tokio::select! {
        // The play ends well if the signal comes after it.
        biased;
        shown = show(args, &stop) => shown,
        // Dropping the other branch kills its processes.
        () = stop.cancelled() => Err(CommandFailure("stopped".into())),
    }
}

async fn show(args: DemoArgs, stop: &CancellationToken) -> Result<String, CommandFailure> {
    if let Some(cluster) = args.simulate {
        let options = simulate::PlayOptions { opens_page: !args.no_open, ends: args.exit };
        return simulate::run(cluster, options, stop).await;
    }
    let model = models::pull(&args.model, &model_files::pull_options()?).await?;
    let engine_args = async |engine: Option<EngineKind>| -> Result<Vec<OsString>, CommandFailure> {
        let threads = ["--threads".into(), args.threads.to_string().into()];
        let engine = engine.unwrap_or_default();
        let model = if engine.runs_folders() { folder_of(&model).await? } else { model.clone() };
        let named = ["--model".into(), model.into(), "--engine".into(), engine.as_str().into()];
        Ok(named.into_iter().chain(threads).collect())
    };
    let prefill_args = engine_args(args.from).await?;
    let mut decode_args = engine_args(args.to).await?;
    let [from, to] = [args.from, args.to].map(Option::unwrap_or_default);
    if from.runs_folders() != to.runs_folders() {
        // The same weights in another type: the canary shows whether they are.
        decode_args.extend(["--max-canary-distance", DEQUANTIZED_DISTANCE].map(OsString::from));
    }
    let key = uuid::Uuid::new_v4().to_string();
    let words: Vec<&str> = TEXT.split_whitespace().cycle().take(args.words as usize).collect();
    let prompt = format!("Summarise this text in one sentence.\n\n{}", words.join(" "));

    eprintln!("Node A (prefill) and node B (decode) are starting.");
    let role = ["--role", "prefill"].map(OsString::from);
    let node = NodeProcess::start(&key, role.into_iter().chain(prefill_args)).await?;
    // Between equal nodes a handoff gains nothing, so the default policy would not choose it.
    let prefill = ["--prefill", &node.url, "--policy", "always_handoff"].map(OsString::from);
    let endpoint = serve(&key, decode_args.iter().cloned().chain(prefill), &[]).await?;
    eprintln!("A prompt of {} words goes to {}/v1/chat/completions.", args.words, endpoint.base);
    let handed = ask(&endpoint.base, &prompt, MAX_TOKENS).await?;
    drop((endpoint, node));

    eprintln!("The same prompt goes to one node alone.");
    let alone = serve(&key, decode_args, &[]).await?;
    let direct = ask(&alone.base, &prompt, MAX_TOKENS).await?;
    Ok(waterfall::draw(&handed, &direct))
}

/// The folder of a model, for an engine that runs no files.
#[cfg(feature = "mlx")]
async fn folder_of(model: &Path) -> Result<PathBuf, CommandFailure> {
    match model.is_dir() {
        true => Ok(model.to_owned()),
        false => crate::mlx_folder::made_of(model).await,
    }
}

/// The engine itself says that this build lacks it.
#[cfg(not(feature = "mlx"))]
async fn folder_of(model: &Path) -> Result<PathBuf, CommandFailure> {
    Ok(model.to_owned())
}
