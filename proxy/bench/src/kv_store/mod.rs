//! `baton-bench kv-store`: the first token of the same prompts, computed and with their KV from each place where it can be.
//!
//! One node with one slot has a store in memory and on disk. It computes each prompt, has it in its slot, and gets it back from
//! memory after another prompt had the slot; a second node pulls it. Then the node is killed and started again, twice: its files
//! are read from the system's page cache, and from the disk. Every reply is compared with the computed one. With `--peer` a llama-server
//! gets the same prompts afterwards. With `--simulate` traces of requests are counted instead, on simulated machines, and with `--traces` on
//! a node and a llama-server.

mod disk;
mod followed;
mod peer;
mod plain;
mod report;
mod simulated;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use baton_fetch as models;
use baton_link::Engine;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::handoff::KvSource;
use baton_schemas::{SequenceRequest, Token};
use baton_tryout::node_process::NodeProcess;
use baton_tryout::prompts::Prompts;
use clap::Args;

use self::disk::ColdReads;
use self::report::{KvFrom, KvSample, StoreFigures, StoredFigures};
use crate::llama_server::PeerServerOptions;
use crate::report::{ChartFolder, Destination, ReportFiles};
use crate::timeline::{Timeline, greedy, stream};

/// Tokens of each reply, which are compared.
const N_REPLY: u32 = 8;

/// Tokens of a prompt that takes the slot. It shares nothing with others.
const N_OTHER: usize = 80;

/// Tokens of a prompt that lets a fresh engine measure its rates and touch its memory.
const N_WARM_UP: usize = 256;

/// More than any prompts need.
const STORE_MEMORY: &str = "64GiB";

/// Options of `baton-bench kv-store`.
#[derive(Args)]
pub(crate) struct StoreBenchArgs {
    /// .gguf files or catalogue names, by commas
    #[arg(long, value_delimiter = ',', default_value = "smollm2")]
    models: Vec<String>,
    /// Prompt lengths in tokens, by commas [default: 500,1000,2000,4000]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    lengths: Vec<u32>,
    /// Prompts of each length; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Compute threads of each node
    #[arg(long)]
    threads: Option<u32>,
    /// The disk: the store's folder is made in this one and removed at the end [default: the system's temporary folder]
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Also measure this llama-server, with its prompt cache and its files of slots: the program, as `make llama` builds it
    #[arg(long, value_name = "PROGRAM")]
    peer: Option<PathBuf>,
    /// Run small sizes and one round, as a check that the benchmark works
    #[arg(long)]
    quick: bool,
    /// Measure nothing: count where the prompts of three traces come from on simulated machines, with and without a store, and time
    /// the first token of long prompts there
    #[arg(long, conflicts_with_all = ["models", "lengths", "rounds", "threads", "disk", "peer", "quick"])]
    simulate: bool,
    /// Measure no times: count what a node, and with --peer llama-server, compute of the prompts of these traces, ten times shorter
    #[arg(long, conflicts_with_all = ["simulate", "lengths", "rounds", "disk", "quick"])]
    traces: bool,
    #[command(flatten)]
    files: ReportFiles,
}

impl StoreBenchArgs {
    fn lengths(&self) -> Vec<usize> {
        match (self.lengths.is_empty(), self.quick) {
            (false, _) => self.lengths.iter().map(|n| *n as usize).collect(),
            (true, true) => vec![100, 300],
            (true, false) => vec![500, 1_000, 2_000, 4_000],
        }
    }
}

/// Runs the benchmark.
pub(super) async fn run(args: StoreBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("kv-store", &args.files, &ChartFolder::default())?;
    if args.simulate {
        let figures = simulated::run().await?;
        return destination.publish(&figures, &simulated::report(&figures));
    }
    if args.traces {
        let figures = followed::run(&args).await?;
        return destination.publish(&figures, &followed::report(&figures));
    }
    let mut figures = StoreFigures::default();
    for model in &args.models {
        let path = models::pull(model, &model_files::pull_options()?).await?;
        let name = path.file_stem().map_or_else(|| model.clone(), |name| name.to_string_lossy().into_owned());
        figures.models.push(measure(&args, &path, name).await?);
        destination.save(&figures)?;
    }
    destination.publish(&figures, &figures.report())
}

/// A model's nodes, and where their files are.
struct StoreBench {
    key: String,
    /// The arguments of a node without a store.
    node_args: Vec<OsString>,
    folder: tempfile::TempDir,
    prompts: Prompts,
}

/// A prompt, and the reply to it that was computed.
struct AskedPrompt {
    tokens: Vec<Token>,
    computed: Vec<Token>,
}

async fn measure(args: &StoreBenchArgs, model: &Path, name: String) -> Result<StoredFigures, CommandFailure> {
    let lengths = args.lengths();
    let n_longest = lengths.iter().max().copied().unwrap_or(0).max(N_WARM_UP) + N_REPLY as usize + 1;
    let mut node_args: Vec<OsString> = vec!["--model".into(), model.into(), "--slots".into(), "1".into()];
    let n_ctx = n_longest.next_multiple_of(256);
    node_args.extend(["--ctx-size".into(), n_ctx.to_string().into()]);
    node_args.extend(args.threads.into_iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
    let folder = match &args.disk {
        Some(disk) => tempfile::tempdir_in(disk)?,
        None => tempfile::tempdir()?,
    };
    let key = uuid::Uuid::new_v4().to_string();
    let node = start(&key, &node_args, Some(folder.path()), STORE_MEMORY).await?;
    let prompts = Prompts::of(&node.engine).await?;
    let mut bench = StoreBench { key, node_args, folder, prompts };
    let kv =
        node.engine.info().await?.kv.ok_or_else(|| CommandFailure(format!("the KV of {name} cannot be stored")))?;
    let cold_reads = ColdReads::of(bench.folder.path())?;
    let mut figures = StoredFigures::new(name, kv.layout, cold_reads);
    let rounds = if args.quick { 1 } else { args.rounds };
    let asked = bench.first_life(node, &lengths, rounds, &mut figures).await?;
    bench.next_life(KvFrom::WarmDisk, &asked, &mut figures).await?;
    if cold_reads == ColdReads::Possible {
        bench.next_life(KvFrom::ColdDisk, &asked, &mut figures).await?;
    }
    for n_tokens in lengths {
        let rates = plain::measure(bench.folder.path(), n_tokens, figures.kv_bytes(n_tokens))?;
        figures.plain.push(rates);
    }
    if let Some(program) = &args.peer {
        let n_ctx = n_ctx as u32;
        let options = PeerServerOptions { program, model, n_slots: 1, n_ctx, threads: args.threads };
        let slots = bench.folder.path().join("slots");
        std::fs::create_dir(&slots)?;
        let asked: Vec<&[Token]> = asked.iter().map(|prompt| &prompt.tokens[..]).collect();
        peer::measure(options, &slots, &mut bench.prompts, &asked, &mut figures).await?;
    }
    Ok(figures)
}

/// Starts a node, whose store has this memory, and this folder if there is one.
async fn start(
    key: &str,
    args: &[OsString],
    folder: Option<&Path>,
    memory: &str,
) -> Result<NodeProcess, CommandFailure> {
    let disk = |folder: &Path| format!(",disk={},disk_budget=1TiB,disk_writes=1TB", folder.join("kv").display());
    let store = format!("memory={memory}{}", folder.map(disk).unwrap_or_default());
    NodeProcess::start(key, args.iter().cloned().chain(["--kv-store".into(), store.into()])).await
}

impl StoreBench {
    /// Measures what needs no restart, and leaves all prompts on disk.
    async fn first_life(
        &mut self,
        node: NodeProcess,
        lengths: &[usize],
        rounds: u32,
        figures: &mut StoredFigures,
    ) -> Result<Vec<AskedPrompt>, CommandFailure> {
        let puller = start(&self.key, &self.node_args, None, "0").await?;
        puller.engine.measure_link(&KvSource::at(&node.url)).await?;
        for warmed in [&node, &puller] {
            stream(&warmed.engine, greedy(self.prompts.next(N_WARM_UP), N_REPLY)).await?;
        }
        let mut asked = Vec::new();
        for n in (0..rounds).flat_map(|_| lengths.iter().copied()) {
            let tokens = self.prompts.next(n);
            let computed = stream(&node.engine, greedy(tokens.clone(), N_REPLY)).await?;
            let prompt = AskedPrompt { tokens, computed: computed.ids.clone() };
            figures.add(n, KvSample::new(KvFrom::Computed, &computed, &prompt.computed));
            figures.add(n, prompt.again(&node, KvFrom::Slot, None).await?);
            self.settle(&node).await?;
            stream(&node.engine, greedy(self.prompts.next(N_OTHER), 1)).await?;
            figures.add(n, prompt.again(&node, KvFrom::Memory, None).await?);
            self.settle(&node).await?;
            figures.add(n, prompt.again(&puller, KvFrom::OtherNode, Some(&node)).await?);
            asked.push(prompt);
        }
        self.settle(&node).await?;
        node.unplug().await;
        Ok(asked)
    }

    /// Waits until a node has stored what it can and the disk has what was written, so that neither slows what is measured next.
    async fn settle(&self, node: &NodeProcess) -> Result<(), CommandFailure> {
        node.settle().await?;
        let folder = self.folder.path().to_owned();
        tokio::task::spawn_blocking(move || disk::settle(&folder)).await?
    }

    /// Starts the node again, and asks for each prompt once.
    async fn next_life(
        &mut self,
        from: KvFrom,
        asked: &[AskedPrompt],
        figures: &mut StoredFigures,
    ) -> Result<(), CommandFailure> {
        let node = start(&self.key, &self.node_args, Some(self.folder.path()), STORE_MEMORY).await?;
        stream(&node.engine, greedy(self.prompts.next(N_WARM_UP), N_REPLY)).await?;
        self.settle(&node).await?;
        if from == KvFrom::ColdDisk {
            // Not earlier: the node has read the beginning of each file.
            disk::leave_page_cache(self.folder.path())?;
        }
        for prompt in asked {
            figures.add(prompt.tokens.len(), prompt.again(&node, from, None).await?);
        }
        node.settle().await?;
        node.unplug().await;
        Ok(())
    }
}

impl AskedPrompt {
    /// Asks a node for the prompt again. It may pull the KV from `source`.
    async fn again(
        &self,
        node: &NodeProcess,
        from: KvFrom,
        source: Option<&NodeProcess>,
    ) -> Result<KvSample, CommandFailure> {
        let kv_source = source.map(|source| KvSource::at(&source.url));
        let request = SequenceRequest { kv_source, ..greedy(self.tokens.clone(), N_REPLY) };
        let timeline: Timeline = stream(&node.engine, request).await?;
        Ok(KvSample::new(from, &timeline, &self.computed))
    }
}
