//! `baton-bench workers`: one model on 0, 1 and 2 workers, each pinned to one core, over links of several speeds.
//!
//! All figures are measured from outside, through the node's protocol: a prompt's tokens divided by the time to its
//! first token, and the median gap between tokens. The links are relays on loopback that pace both directions.

use std::ffi::OsString;
use std::path::PathBuf;

use baton_fetch as models;
use baton_link::Engine;
use baton_model::gguf::Gguf;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use baton_tryout::node_process::NodeProcess;
use baton_tryout::prompts::Prompts;
use baton_tryout::stats::median;
use clap::Args;
use futures::StreamExt;
use serde::Serialize;

use super::relay::Relay;
use super::report::{Better, ChartFolder, Destination, Report, ReportFiles, Unit, dash, one_decimal};
use super::timeline::{greedy, stream};

/// Tokens of a prompt that lets a fresh engine touch its memory before it is measured.
const WARM_UP: usize = 256;

/// Tokens whose gaps are measured.
const DECODED: u32 = 32;

/// Options of `baton-bench workers`.
#[derive(Args)]
pub(super) struct WorkersBenchArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// Prompt lengths in tokens, by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [512, 1_024, 2_048, 4_000, 8_000],
        value_parser = clap::value_parser!(u32).range(16..=100_000)
    )]
    lengths: Vec<u32>,
    /// Links between the node and its workers in Gb/s, by commas; 0 is loopback itself
    #[arg(long, value_delimiter = ',', default_values_t = [0.0, 10.0, 1.0, 0.1], value_parser = gbps)]
    links: Vec<f64>,
    /// Repetitions; medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Tokens of one physical batch with workers [default: the node's own]
    #[arg(long, value_parser = clap::value_parser!(u32).range(16..=8_192))]
    ubatch: Option<u32>,
    /// The shares of the layers of two workers, such as 15,16 [default: by their memory]
    #[arg(long, value_name = "SHARES")]
    tensor_split: Option<String>,
    /// Also show that a model runs on two workers that is too large for one: each lends so much memory
    #[arg(long, value_name = "MIB")]
    lend_memory: Option<u32>,
    /// Run one small prompt, as a check that the benchmark works
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    files: ReportFiles,
}

fn gbps(text: &str) -> Result<f64, &'static str> {
    let gbps = text.parse::<f64>().map_err(|_| "must be a number")?;
    if gbps == 0.0 || (0.001..=1_000.0).contains(&gbps) { Ok(gbps) } else { Err("must be 0, or from 0.001 to 1000") }
}

/// The figures of one cluster and one prompt length.
#[derive(Serialize)]
struct WorkersRow {
    n_workers: usize,
    /// `None`: loopback.
    gbps: Option<f64>,
    n_tokens: u32,
    prefill_tps: f64,
    decode_tps: f64,
    /// Prefill in relation to no worker.
    speedup: f64,
    /// The rates by round.
    prefill_rounds: Vec<f64>,
    decode_rounds: Vec<f64>,
}

impl WorkersRow {
    /// The cluster and the prompt.
    fn name(&self) -> String {
        let link = self.gbps.map_or_else(String::new, |gbps| format!(", {gbps} Gb/s"));
        format!("{} workers{link}, {} tokens", self.n_workers, self.n_tokens)
    }
}

/// Runs the benchmark.
pub(super) async fn run(args: WorkersBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("workers", &args.files, &ChartFolder::default())?;
    let model = models::pull(&args.model, &model_files::pull_options()?).await?;
    let lengths = if args.quick { vec![600] } else { args.lengths.clone() };
    let links = if args.quick { vec![0.0] } else { args.links.clone() };
    let mut bench = WorkersBench {
        model,
        rounds: if args.quick { 1 } else { args.rounds },
        ubatch: args.ubatch,
        tensor_split: args.tensor_split,
        lengths,
    };
    let mut rows: Vec<WorkersRow> = bench.measure(0, None, &[]).await?;
    for n_workers in [1, 2] {
        for &link in &links {
            let gbps = (link > 0.0).then_some(link);
            let new = bench.measure(n_workers, gbps, &rows).await?;
            rows.extend(new);
            destination.save(&rows)?;
        }
    }
    let mut report = report(&args.model, &rows);
    if let Some(mib) = args.lend_memory {
        match bench.too_large_for_one(mib).await {
            Ok(shown) => report.local(shown),
            Err(CommandFailure(why)) => report.fail(Some(why)),
        }
    }
    destination.publish(&rows, &report)
}

fn report(model: &str, rows: &[WorkersRow]) -> Report {
    let head = ["workers", "link Gb/s", "prompt", "prefill tok/s", "x", "decode tok/s"];
    let lines = rows.iter().map(|row| {
        vec![
            row.n_workers.to_string(),
            row.gbps.map_or_else(dash, |gbps| gbps.to_string()),
            row.n_tokens.to_string(),
            format!("{:.0}", row.prefill_tps),
            format!("{:.2}", row.speedup),
            one_decimal(row.decode_tps),
        ]
    });
    let mut report = Report::new(model);
    report.table(&head, lines);
    for row in rows {
        for (what, rounds) in [("prefill", &row.prefill_rounds), ("decode", &row.decode_rounds)] {
            report.figure(format!("{}: {what}", row.name()), Unit::TokensPerSecond, Better::More, rounds);
        }
    }
    report
}

struct WorkersBench {
    model: PathBuf,
    rounds: u32,
    ubatch: Option<u32>,
    tensor_split: Option<String>,
    lengths: Vec<u32>,
}

/// A node with its workers and the links between them.
struct NodeWithWorkers {
    node: NodeProcess,
    workers: Vec<NodeProcess>,
    _links: Vec<Relay>,
}

impl WorkersBench {
    async fn measure(
        &mut self,
        n_workers: usize,
        gbps: Option<f64>,
        before: &[WorkersRow],
    ) -> Result<Vec<WorkersRow>, CommandFailure> {
        let shape = ClusterShape { n_workers, gbps, n_ctx: self.longest(), lend_mib: None };
        let cluster = self.start(shape).await?;
        let mut prompts = Prompts::of(&cluster.node.engine).await?;
        stream(&cluster.node.engine, ephemeral(prompts.next(WARM_UP), 2)).await?;
        let mut rows = Vec::new();
        for &n_tokens in &self.lengths {
            let mut prefill = Vec::new();
            let mut gaps = Vec::new();
            let mut decode = Vec::new();
            for _ in 0..self.rounds {
                let request = ephemeral(prompts.next(n_tokens as usize), DECODED);
                let timeline = stream(&cluster.node.engine, request).await?;
                prefill.push(f64::from(n_tokens) / timeline.ttft());
                decode.push(1.0 / median(&timeline.gaps().collect::<Vec<_>>()));
                gaps.extend(timeline.gaps());
            }
            let prefill_tps = median(&prefill);
            let alone = before.iter().find(|row| row.n_workers == 0 && row.n_tokens == n_tokens);
            let speedup = prefill_tps / alone.map_or(prefill_tps, |row| row.prefill_tps);
            let decode_tps = 1.0 / median(&gaps);
            let (prefill_rounds, decode_rounds) = (prefill, decode);
            let rates = WorkersRow {
                n_workers,
                gbps,
                n_tokens,
                prefill_tps,
                decode_tps,
                speedup,
                prefill_rounds,
                decode_rounds,
            };
            rows.push(rates);
        }
        Ok(rows)
    }

    fn longest(&self) -> u32 {
        self.lengths.iter().copied().max().unwrap_or(0).saturating_add(2 * DECODED)
    }

    /// Shows that two workers run what one worker refuses for lack of memory, with the tokens of a node without
    /// workers.
    async fn too_large_for_one(&self, mib: u32) -> Result<String, CommandFailure> {
        let weights = Gguf::open(&self.model)?.files.n_bytes() >> 20;
        let start = |n_workers, lend_mib| self.start(ClusterShape { n_workers, gbps: None, n_ctx: 512, lend_mib });
        let refused = match start(1, Some(mib)).await {
            Ok(_) => return Err(CommandFailure(format!("one worker with {mib} MiB runs this model: lend less"))),
            Err(CommandFailure(message)) if message.contains("are available") => message,
            Err(failure) => return Err(failure),
        };
        let alone = start(0, None).await?;
        let prompt = Prompts::of(&alone.node.engine).await?.next(WARM_UP);
        let expected = tokens(&alone, prompt.clone()).await?;
        drop(alone);
        let cluster = start(2, Some(mib)).await?;
        let found = tokens(&cluster, prompt).await?;
        let n_same = found.iter().zip(&expected).take_while(|(a, b)| a == b).count();
        let taken: Vec<String> =
            cluster.workers.iter().filter_map(lent_mib).map(|mib| format!("{mib:.0} MiB")).collect();
        Ok(format!(
            "{weights} MiB of weights, {mib} MiB lent by each worker\none worker: {refused}\ntwo workers: {} of {} tokens as \
             without workers; the processes that lend take {}",
            n_same,
            expected.len(),
            taken.join(" and ")
        ))
    }
}

/// Memory of the process that lends a worker's devices, MiB.
fn lent_mib(worker: &NodeProcess) -> Option<f64> {
    let child = super::memory::family(worker.pid()?).get(1).copied()?;
    super::memory::resident_mib(child)
}

fn ephemeral(prompt: Vec<Token>, n_new: u32) -> SequenceRequest {
    SequenceRequest { ephemeral: true, ..greedy(prompt, n_new) }
}

async fn tokens(cluster: &NodeWithWorkers, prompt: Vec<Token>) -> Result<Vec<Token>, CommandFailure> {
    let mut events = cluster.node.engine.generate(ephemeral(prompt, DECODED)).await?;
    let mut tokens = Vec::new();
    while let Some(event) = events.next().await {
        if let SequenceEvent::Token(token) = event? {
            tokens.push(token.id);
        }
    }
    Ok(tokens)
}

/// A cluster to start.
#[derive(Clone, Copy)]
struct ClusterShape {
    n_workers: usize,
    /// `None`: loopback.
    gbps: Option<f64>,
    n_ctx: u32,
    /// Memory that each worker lends, MiB. `None`: all that is free.
    lend_mib: Option<u32>,
}

impl WorkersBench {
    async fn start(&self, shape: ClusterShape) -> Result<NodeWithWorkers, CommandFailure> {
        let ClusterShape { n_workers, gbps, n_ctx, lend_mib } = shape;
        let key = uuid::Uuid::new_v4().to_string();
        let mut workers = Vec::new();
        let mut links = Vec::new();
        let mut addresses = Vec::new();
        for core in 0..n_workers {
            let lent = lend_mib.into_iter().flat_map(|mib| ["--lend-memory".to_owned(), mib.to_string()]);
            let args = ["--role", "worker", "--threads", "1"].map(str::to_owned).into_iter().chain(lent);
            let worker = NodeProcess::start(&key, args.map(OsString::from)).await?;
            pin(&worker, core).await?;
            let address = worker.url.trim_start_matches("http://").to_owned();
            match gbps {
                None => addresses.push(address),
                Some(gbps) => {
                    let link = Relay::start_both_ways(address.parse()?, gbps * 1e9 / 8.0).await?;
                    addresses.push(link.url.trim_start_matches("http://").to_owned());
                    links.push(link);
                }
            }
            workers.push(worker);
        }
        let mut args: Vec<OsString> = vec!["--model".into(), self.model.clone().into(), "--threads".into(), "1".into()];
        args.extend(["--slots", "1", "--ctx-size"].map(OsString::from));
        args.extend([n_ctx.to_string(), "--kv-cells".to_owned(), n_ctx.to_string()].map(OsString::from));
        if n_workers > 0 {
            args.extend(["--workers".into(), addresses.join(",").into()]);
            args.extend(self.ubatch.into_iter().flat_map(|n| ["--ubatch".into(), n.to_string().into()]));
        }
        if n_workers == 2 {
            let split = self.tensor_split.iter();
            args.extend(split.flat_map(|shares| ["--tensor-split".into(), shares.into()]));
        }
        let node = NodeProcess::start(&key, args).await?;
        if n_workers == 0 {
            pin(&node, 0).await?;
        }
        Ok(NodeWithWorkers { node, workers, _links: links })
    }
}

/// Pins all threads of a process, and the processes that it starts, to a core.
async fn pin(node: &NodeProcess, core: usize) -> Result<(), CommandFailure> {
    let pid = node.pid().ok_or_else(|| CommandFailure("the node has ended".into()))?.to_string();
    let mut command = tokio::process::Command::new("taskset");
    let pinned = command.args(["-a", "-c", "-p", &core.to_string(), &pid]).output().await;
    let pinned = pinned.map_err(|error| CommandFailure(format!("taskset, which pins processes to cores: {error}")))?;
    match pinned.status.success() {
        true => Ok(()),
        false => Err(CommandFailure(format!("core {core}: {}", String::from_utf8_lossy(&pinned.stderr).trim()))),
    }
}
