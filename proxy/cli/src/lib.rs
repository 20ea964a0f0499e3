//! The command line: parses, sets up logging, and runs one command.
//!
//! ```text
//! baton serve --model smollm2
//! ```

mod banner;
mod bench;
mod bundle;
mod cache;
mod chat;
mod check_config;
mod columns;
mod completions;
mod config_file;
mod discover;
#[cfg(feature = "llama")]
mod doctor;
mod endpoint;
mod engine_line;
mod key;
mod lan_address;
#[cfg(feature = "llama")]
mod lend;
mod log;
mod man;
#[cfg(feature = "mlx")]
mod mlx;
mod models;
mod node;
mod ollama_words;
mod overview;
mod pair;
mod plan;
mod pull;
mod question;
mod render;
mod serve;
mod setup;
mod status;
mod terminal;
mod usage;

use std::path::PathBuf;
use std::process::ExitCode;

use baton_node::with_bounded_spinning;
use baton_process::{LOG_FORMAT_VARIABLE, remember_this_program};
use baton_proxy::log_file::LogFile;
use baton_proxy::log_queue::LOG;
use baton_proxy::observe::telemetry::{self, TelemetryError, Traces};
use baton_proxy::serve::CommandFailure;
use clap::{CommandFactory, Parser, Subcommand};

use self::log::LogFormat;
use self::ollama_words::{OllamaArgs, OllamaWord};

/// It takes half the instructions of glibc's for a request, and returns what a load has left behind.
/// `.cargo/config.toml` has its settings.
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// One OpenAI-compatible endpoint for language models on your own machines.
///
/// Baton serves a GGUF model over HTTP as OpenAI's API does, with the model in a process of its own, here or on another
/// machine.
const ABOUT: &str =
    "An OpenAI- and Ollama-compatible inference endpoint: prompts are computed on one machine, replies on another.";

#[derive(Parser)]
#[command(name = "baton", version, about = ABOUT, after_help = EXAMPLE)]
#[command(propagate_version = true)]
struct Cli {
    /// Format of the log on standard error; RUST_LOG sets its level
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, env = LOG_FORMAT_VARIABLE, hide_env = true)]
    log_format: LogFormat,
    /// Write the log to this file instead of standard error. Above 8 MiB it is emptied, and FILE.1 keeps what it had
    #[arg(long, global = true, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// Without one, this says what this machine is, and the next step.
    #[command(subcommand)]
    command: Option<Command>,
}

const EXAMPLE: &str = "\
Example:
  baton serve --model smollm2
  curl -N http://127.0.0.1:8080/v1/chat/completions -d '{\"model\":\"smollm2\",\"stream\":true,
    \"messages\":[{\"role\":\"user\",\"content\":\"Why is the sky blue?\"}]}'";

#[derive(Subcommand)]
enum Command {
    /// Say in eight lines what this machine is, and the next step, as `baton` alone does.
    Overview,
    /// Make this machine an endpoint or a node, at every boot if wanted: asks, shows, does it, and can undo it.
    Setup(setup::SetupArgs),
    /// Serve a model at an OpenAI-compatible endpoint.
    Serve(Box<serve::ServeArgs>),
    /// Run one engine behind the node protocol, for a Baton on this or another machine.
    Node(Box<node::NodeArgs>),
    /// Chat in the terminal with a running endpoint, or with one of its own.
    Chat(chat::ChatArgs),
    /// Ask a running endpoint how it would serve a request, and why.
    Plan(plan::PlanArgs),
    /// Fetch a model into the cache: a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub.
    Pull(pull::PullArgs),
    /// List the models on all machines of a running endpoint; copy, pull, delete, load or unload one.
    Models(models::ModelsArgs),
    /// List, verify or clear the KV that engines keep on disk.
    Cache(cache::CacheArgs),
    /// Write one file that installs this program and a model on a machine without the internet.
    Bundle(bundle::BundleArgs),
    /// Install what the mlx engine needs, or convert a model for it.
    #[cfg(feature = "mlx")]
    Mlx(mlx::MlxArgs),
    /// Show the state of a running endpoint: nodes, links, slots, the last routes and fallbacks.
    Status(status::StatusArgs),
    /// Show who used what: requests, tokens and engine seconds by key and model.
    Usage(usage::UsageArgs),
    /// List the nodes in the local network, and why each is or is not used.
    Discover(discover::DiscoverArgs),
    /// Make machines share a cluster key and certificates, by a short code.
    Pair(pair::PairArgs),
    /// Make, replace or list API keys.
    Key(key::KeyArgs),
    /// Check a configuration file, and print every mistake with its line.
    CheckConfig(check_config::CheckConfigArgs),
    /// Print a shell completion script.
    Completions(completions::CompletionsArgs),
    /// Write a manual page for each command into a folder.
    Man(man::ManArgs),
    /// Measure an engine, the KV handoff between two, the planner, or running servers side by side, with `baton-bench`.
    Bench(bench::BenchArgs),
    /// Measure how exactly a model's KV has to be kept, so that the lossy codecs kvq and kvq_fast lose less, with
    /// `baton-bench`.
    CalibrateCodec(bench::BenchArgs),
    /// Prove on this machine's devices, and with another machine's node, that KV can be handed over.
    #[cfg(feature = "llama")]
    Doctor(doctor::DoctorArgs),
    /// Lend this machine's devices to one user, for `baton node --role worker`.
    #[cfg(feature = "llama")]
    #[command(hide = true)]
    Lend(lend::LendArgs),
    /// Ollama's `list`: `baton models`.
    #[command(hide = true)]
    List(OllamaArgs),
    /// Ollama's `ps`: `baton status`.
    #[command(hide = true)]
    Ps(OllamaArgs),
    /// Ollama's `rm`: `baton models delete`.
    #[command(hide = true)]
    Rm(OllamaArgs),
    /// Ollama's `run`: `baton chat`.
    #[command(hide = true)]
    Run(OllamaArgs),
    /// Ollama's `stop`: `baton models unload`.
    #[command(hide = true)]
    Stop(OllamaArgs),
    /// Render a chat template for an engine.
    #[command(hide = true)]
    Render,
    /// Hand a long prompt from one node to another on this machine, and show where the time went.
    #[cfg(feature = "llama")]
    Demo(baton_tryout::demo::DemoArgs),
}

/// Runs the command line. Errors end as one line on standard error and exit code 1; wrong usage is clap's, code 2.
pub fn main() -> ExitCode {
    remember_this_program();
    let cli = Cli::parse();
    let command = cli.command.unwrap_or(Command::Overview);
    let traces = command.traces();
    // The log writes to what standard error is when it starts.
    let log_file = cli.log_file.as_deref().map(LogFile::take_stderr).transpose();
    let log_problem = log::start(cli.log_format, traces.as_ref().ok().and_then(Option::as_ref));
    // A child has its parent's environment.
    if let Some(problem) = log_problem.filter(|_| !command.is_child()) {
        terminal::note(format_args!("baton: {problem}"));
    }
    let bounded = log_file.and_then(|file| file.map_or(Ok(()), LogFile::keep_bounded)).map_err(CommandFailure::from);
    let result = bounded.and_then(|()| traces.map_err(CommandFailure::from)).and_then(|traces| {
        let result = run_command(command);
        traces.into_iter().for_each(Traces::finish);
        result
    });
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(CommandFailure(message)) => {
            // A library's error may span several lines.
            let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
            terminal::note_failure(format_args!("baton: {line}"));
            ExitCode::FAILURE
        }
    };
    LOG.flush();
    code
}

impl Command {
    fn is_child(&self) -> bool {
        match self {
            Command::Node(args) => args.has_parent(),
            Command::Render => true,
            #[cfg(feature = "llama")]
            Command::Lend(_) => true,
            _ => false,
        }
    }

    /// Starts sending traces, if this command serves and a collector is configured.
    fn traces(&self) -> Result<Option<Traces>, TelemetryError> {
        let (endpoint, service) = match self {
            Command::Serve(args) => (telemetry::endpoint(args.collector().as_deref()), "baton"),
            Command::Node(_) => (telemetry::endpoint(None), "baton-node"),
            _ => return Ok(None),
        };
        endpoint.map(|endpoint| Traces::start(&endpoint, service)).transpose()
    }
}

fn run_command(command: Command) -> Result<(), CommandFailure> {
    match command {
        Command::Overview => run(overview::run(setup::command_without_service())),
        Command::Setup(args) => run(setup::run(args)),
        Command::Serve(args) => run(serve::run(*args)),
        Command::Node(args) => with_bounded_spinning().and_then(|()| run(node::run(*args))),
        Command::Chat(args) => run(chat::run(args)),
        Command::Plan(args) => run(plan::run(args)),
        Command::Pull(args) => run(pull::run(args)),
        Command::Models(args) => run(models::run(args)),
        Command::Cache(args) => cache::run(&args),
        Command::Bundle(args) => run(bundle::run(args)),
        #[cfg(feature = "mlx")]
        Command::Mlx(args) => run(mlx::run(args)),
        Command::Pair(args) => run(pair::run(args)),
        Command::Key(args) => run(key::run(args)),
        Command::CheckConfig(args) => check_config::run(&args),
        Command::Completions(args) => completions::run(&args, Cli::command()),
        Command::Man(args) => man::run(&args, Cli::command()),
        Command::Status(args) => run(status::run(args)),
        Command::Usage(args) => run(usage::run(args)),
        Command::Discover(args) => run(discover::run(args)),
        Command::List(args) => Err(args.instead(OllamaWord::List)),
        Command::Ps(args) => Err(args.instead(OllamaWord::Ps)),
        Command::Rm(args) => Err(args.instead(OllamaWord::Rm)),
        Command::Run(args) => Err(args.instead(OllamaWord::Run)),
        Command::Stop(args) => Err(args.instead(OllamaWord::Stop)),
        Command::Render => render::run(),
        Command::Bench(args) => bench::run(None, &args),
        Command::CalibrateCodec(args) => bench::run(Some("calibrate-codec"), &args),
        #[cfg(feature = "llama")]
        Command::Doctor(args) => with_bounded_spinning().and_then(|()| run(doctor::run(args))),
        #[cfg(feature = "llama")]
        Command::Lend(args) => lend::run(&args),
        #[cfg(feature = "llama")]
        Command::Demo(args) => run(async { Ok(terminal::print_line(baton_tryout::demo::run(args).await?)?) }),
    }
}

fn run(command: impl Future<Output = Result<(), CommandFailure>>) -> Result<(), CommandFailure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(command);
    // A blocking task that is stuck (a model that is still loading) must not keep the process.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_of_serve_and_node_begins_with_ten_common_flags_and_has_the_others_in_groups() {
        let command = Cli::command();
        for name in ["serve", "node"] {
            let flags = command.find_subcommand(name).unwrap().get_arguments();
            let shown: Vec<_> = flags.filter(|flag| !flag.is_hide_set()).collect();
            let common: Vec<_> = shown.iter().filter(|flag| flag.get_help_heading().is_none()).collect();
            assert_eq!(common.len(), 10, "{name}: {:?}", common.iter().map(|flag| flag.get_id()).collect::<Vec<_>>());
            let mut groups: Vec<_> = shown.iter().filter_map(|flag| flag.get_help_heading()).collect();
            // In the help a group stands once, wherever its flags are declared.
            groups.sort_unstable();
            groups.dedup();
            assert!((4..=6).contains(&groups.len()), "{name}: {groups:?}");
        }
    }

    #[test]
    fn help_says_what_this_is_and_shows_an_example() {
        let mut command = Cli::command();
        command.clone().debug_assert();
        for help in [command.render_help(), command.render_long_help()] {
            let help = help.to_string();
            assert!(
                help.contains("OpenAI-compatible endpoint") && help.contains("baton serve --model smollm2"),
                "{help}"
            );
        }
    }
}
