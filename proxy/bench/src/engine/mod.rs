//! `baton-bench engine`: compares the engine, through its node's socket, with a plain llama.cpp loop.
//!
//! Both use the same build, model, threads and batch size. Each round measures the plain loop and then the engine, so
//! that a machine that becomes slower affects both. Medians of rounds are compared.

mod node;
mod report;

use std::ffi::OsString;
use std::sync::Arc;

use baton_engines::llama::reference::{Reference, ReferenceOptions, Run};
use baton_engines::registry::EngineOptions;
use baton_fetch as models;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::Token;
use baton_tryout::stats::{median, percentile};
use clap::{Args, ValueEnum};

use self::node::BenchNode;
use self::report::{EngineFigures, EngineMemory, EngineRounds, EngineRow, StepLatency};
use super::report::{ChartFolder, Destination, ReportFiles};
use super::timeline::Timeline;

/// Options of `baton-bench engine`.
#[derive(Args)]
pub(crate) struct EngineBenchArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// Repetitions; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Measure only these parts (all, unless given)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS")]
    only: Vec<EnginePart>,
    /// Compute threads of the engine and of the plain loop
    #[arg(long)]
    threads: Option<u32>,
    #[command(flatten)]
    files: ReportFiles,
}

/// A part of `baton-bench engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EnginePart {
    /// Prompts of 512 and 2,000 tokens.
    Prefill,
    /// 1, 4 and 8 streams, and one with idle conversations in the cache.
    Decode,
    /// A long prompt that joins running streams.
    Joining,
    /// Resident memory, compared with the buffer sizes that llama.cpp reports.
    Memory,
}

const PREFILL_LENGTHS: [usize; 2] = [512, 2_000];
const STREAMS: [usize; 3] = [1, 4, 8];
const DECODE_TOKENS: u32 = 128;
const SHORT_PROMPT: usize = 32;
/// Streams that are running when the long prompt joins.
const RUNNING: usize = 3;
const JOINING_PROMPT: usize = 2_000;

/// Runs the benchmark.
pub(super) async fn run(args: EngineBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("engine", &args.files, &ChartFolder::default())?;
    let model = models::pull(&args.model, &model_files::pull_options()?).await?;
    let options = EngineOptions { n_threads: args.threads, ..EngineOptions::of(&model) };
    let reference = Arc::new(tokio::task::spawn_blocking(move || Reference::load(options)).await??);
    let mut node_args: Vec<OsString> = vec!["--model".into(), model.clone().into(), "--slots".into(), "8".into()];
    node_args.extend(args.threads.into_iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
    let mut bench = EngineBench { reference, node_args, rounds: args.rounds, n_prompts: 0 };

    let wants = |part| args.only.is_empty() || args.only.contains(&part);
    let mut rows = Vec::new();
    if wants(EnginePart::Prefill) {
        for n in PREFILL_LENGTHS {
            rows.push(bench.prefill(n).await?);
        }
    }
    if wants(EnginePart::Decode) {
        for n in STREAMS {
            rows.push(bench.decode(n, 0).await?);
        }
        rows.push(bench.decode(1, IDLE_TOKENS).await?);
    }
    if wants(EnginePart::Joining) {
        rows.push(bench.joining("auto", &[]).await?);
        // As an engine without interleaving: the whole prompt in one step.
        rows.push(bench.joining("none", &["--prefill-budget", "2048", "--ubatch", "2048"]).await?);
    }
    let memory = if wants(EnginePart::Memory) { Some(bench.memory().await?) } else { None };
    let figures = EngineFigures { rows, memory };
    destination.publish(&figures, &figures.report(&args.model))
}

struct EngineBench {
    reference: Arc<Reference>,
    node_args: Vec<OsString>,
    rounds: u32,
    n_prompts: u32,
}

impl EngineBench {
    /// Starts a fresh node: the cache of earlier rounds would slow down later rounds, but not the plain loop.
    async fn node(&self, extra: &[&str]) -> Result<BenchNode, CommandFailure> {
        let args = self.node_args.iter().cloned().chain(extra.iter().map(OsString::from));
        BenchNode::start(args.collect()).await
    }

    /// A prompt of `n` tokens that shares no prefix with any other, so that no cache helps.
    fn prompt(&mut self, n: usize) -> Vec<Token> {
        self.n_prompts += 1;
        let mut tokens = self.reference.tokenize(&format!("{} ", self.n_prompts * 7919));
        let filler = self.reference.tokenize("The quick brown fox jumps over the lazy dog and runs into the wood. ");
        tokens.extend(filler.iter().cycle().take(n));
        tokens.truncate(n);
        tokens
    }

    async fn plain(&self, prompts: Vec<Vec<Token>>, n_new: usize) -> Result<Run, CommandFailure> {
        let reference = Arc::clone(&self.reference);
        let run = move || reference.greedy(&prompts, n_new, ReferenceOptions::default());
        Ok(tokio::task::spawn_blocking(run).await??)
    }

    /// Prefill rate: both compute n − 1 tokens, then decode one. The time is from the request to the first token.
    async fn prefill(&mut self, n: usize) -> Result<EngineRow, CommandFailure> {
        let mut plain = Vec::new();
        let mut engine = Vec::new();
        for _ in 0..self.rounds {
            let node = self.node(&[]).await?;
            let prompt = self.prompt(n);
            let warm_up = self.prompt(WARM_UP);
            node.warm_up(warm_up).await?;
            let run = self.plain(vec![prompt.clone()], 1).await?;
            plain.push(n as f64 / (run.prefill + run.decode).as_secs_f64());
            engine.push(n as f64 / node.stream(prompt, 1).await?.ttft());
        }
        Ok(EngineRow::new(format!("prefill {n} tokens")).compared(&plain, &engine))
    }

    /// Aggregate decode rate of `n` streams while all of them decode. The engine's cache also holds `n_idle` tokens of
    /// finished conversations; the plain loop's cache does not.
    async fn decode(&mut self, n: usize, n_idle: usize) -> Result<EngineRow, CommandFailure> {
        let mut plain = Vec::new();
        let mut engine = Vec::new();
        let mut gaps = Vec::new();
        let mut ttfts = Vec::new();
        let mut rounds = EngineRounds::default();
        for _ in 0..self.rounds {
            let node = self.node(&[]).await?;
            let warm_up = self.prompt(WARM_UP);
            node.warm_up(warm_up).await?;
            if n_idle > 0 {
                let earlier = self.prompt(n_idle);
                node.stream(earlier, 1).await?;
            }
            let prompts: Vec<_> = (0..n).map(|_| self.prompt(SHORT_PROMPT)).collect();
            let run = self.plain(prompts.clone(), DECODE_TOKENS as usize).await?;
            plain.push((n as u32 * DECODE_TOKENS) as f64 / run.decode.as_secs_f64());
            let streams = prompts.into_iter().map(|prompt| node.stream(prompt, DECODE_TOKENS));
            let timelines = futures::future::try_join_all(streams).await?;
            engine.push(aggregate_tps(&timelines));
            let of_round: Vec<f64> = timelines.iter().flat_map(Timeline::gaps).map(|s| s * 1e3).collect();
            let first: Vec<f64> = timelines.iter().map(|t| t.ttft() * 1e3).collect();
            rounds.add(&first, &of_round);
            gaps.extend(of_round);
            ttfts.extend(first);
        }
        let idle = if n_idle > 0 { format!(", {n_idle} idle tokens cached") } else { String::new() };
        let row = EngineRow { rounds, ..EngineRow::new(format!("decode, {n} streams{idle}")) };
        let row = row.compared(&plain, &engine);
        Ok(EngineRow { ttft_ms: Some(StepLatency::of(&ttfts)), itl_ms: Some(StepLatency::of(&gaps)), ..row })
    }

    /// Memory of a node that has filled much of its cache, and the buffer sizes that llama.cpp reports.
    async fn memory(&mut self) -> Result<EngineMemory, CommandFailure> {
        let node = self.node(&[]).await?;
        for _ in 0..4 {
            let prompt = self.prompt(JOINING_PROMPT);
            node.stream(prompt, 32).await?;
        }
        let buffers = node.buffers;
        let expected = buffers.model + buffers.kv + buffers.compute;
        let resident_mib = node.resident_mib();
        Ok(EngineMemory {
            model_mib: buffers.model,
            kv_mib: buffers.kv,
            compute_mib: buffers.compute,
            resident_mib,
            beyond_mib: resident_mib.map(|resident| resident - expected),
        })
    }

    /// Inter-token gaps of running streams while a long prompt joins, and when that prompt's first token comes.
    async fn joining(&mut self, budget: &str, args: &[&str]) -> Result<EngineRow, CommandFailure> {
        let mut gaps = Vec::new();
        let mut ttfts = Vec::new();
        let mut worst = Vec::new();
        let mut rounds = EngineRounds::default();
        for _ in 0..self.rounds {
            let node = self.node(args).await?;
            let warm_up = self.prompt(WARM_UP);
            node.warm_up(warm_up).await?;
            let prompts: Vec<_> = (0..RUNNING).map(|_| self.prompt(SHORT_PROMPT)).collect();
            let long = self.prompt(JOINING_PROMPT);
            let running = prompts.into_iter().map(|prompt| node.stream(prompt, JOINED_TOKENS));
            let joining = async {
                tokio::time::sleep(std::time::Duration::from_millis(500)).await;
                node.stream(long, 1).await
            };
            let (running, joined) = tokio::join!(futures::future::try_join_all(running), joining);
            let running = running?;
            let joined = joined?;
            let until = joined.tokens.first().copied().unwrap_or(joined.sent);
            let during: Vec<f64> = running
                .iter()
                .flat_map(|t| t.tokens.windows(2))
                .filter(|pair| pair[1] >= joined.sent && pair[0] <= until)
                .map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3)
                .collect();
            worst.push(percentile(&during, 100.0));
            rounds.add(&[joined.ttft() * 1e3], &during);
            gaps.extend(during);
            ttfts.push(joined.ttft() * 1e3);
        }
        Ok(EngineRow {
            rounds,
            itl_ms: Some(StepLatency { max: Some(median(&worst)), ..StepLatency::of(&gaps) }),
            ttft_ms: Some(StepLatency { p50: median(&ttfts), p99: None, max: None }),
            ..EngineRow::new(format!("{JOINING_PROMPT} tokens join {RUNNING} streams, interleaving: {budget}"))
        })
    }
}

/// Tokens of a prompt that lets a fresh engine measure its rates and touch its memory before it is measured.
const WARM_UP: usize = 256;

/// Tokens of finished conversations in the cache, for the row that shows their cost.
const IDLE_TOKENS: usize = 6_000;

/// Tokens of the running streams: enough to outlast the join of the long prompt.
const JOINED_TOKENS: u32 = 400;

/// Tokens per second in the time in which every stream is decoding.
fn aggregate_tps(timelines: &[Timeline]) -> f64 {
    let from = timelines.iter().filter_map(|t| t.tokens.first()).max();
    let to = timelines.iter().filter_map(|t| t.tokens.last()).min();
    let (Some(&from), Some(&to)) = (from, to) else { return f64::NAN };
    let n_tokens = timelines.iter().flat_map(|t| &t.tokens).filter(|&&at| at > from && at <= to).count();
    n_tokens as f64 / (to - from).as_secs_f64()
}
