//! `baton-bench speculate`: the same questions without and with speculation, in turn.
//!
//! Two nodes have the same model and options but for `--speculation`. Only one of them computes at a time. What speculation has
//! learned in earlier rounds it keeps, as it does in use.

mod cases;
mod report;
mod spoken;

use std::ffi::OsString;
use std::time::Instant;

use baton_fetch as models;
use baton_link::Engine;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::generate::Sampling;
use baton_schemas::sequence::Timings;
use baton_schemas::{KeyTag, SequenceEvent, SequenceRequest};
use baton_tryout::node_process::NodeProcess;
use clap::Args;
use futures::StreamExt;

use self::cases::{CASES, SpeculationCase};
use self::report::{SpeculationFigures, SpeculationRow};
use self::spoken::Spoken;
use super::report::{ChartFolder, Destination, ReportFiles};

/// Options of `baton-bench speculate`.
#[derive(Args)]
pub(crate) struct SpeculateBenchArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// Repetitions of each pair; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Tokens of each reply at most
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..=8192))]
    tokens: u32,
    /// Streams at once
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u32).range(1..=64))]
    streams: Vec<u32>,
    /// Temperature of the replies; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Compute threads
    #[arg(long)]
    threads: Option<u32>,
    #[command(flatten)]
    files: ReportFiles,
}

/// Runs the benchmark.
pub(super) async fn run(args: SpeculateBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("speculate", &args.files, &ChartFolder::default())?;
    let model = models::pull(&args.model, &model_files::pull_options()?).await?;
    let n_slots = args.streams.iter().max().copied().unwrap_or(1);
    let mut node_args: Vec<OsString> =
        vec!["--model".into(), model.into(), "--slots".into(), n_slots.to_string().into()];
    node_args.extend(args.threads.into_iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
    let key = uuid::Uuid::new_v4().to_string();
    let node = |speculation: &'static str| {
        let args = node_args.iter().cloned().chain(["--speculation".into(), speculation.into()]);
        NodeProcess::start(&key, args)
    };
    let nodes = [node("off").await?, node("auto").await?];
    let mut figures = SpeculationFigures { rows: Vec::new() };
    for &n_streams in &args.streams {
        for case in &CASES {
            let mut pairs = Vec::new();
            for round in 0..args.rounds {
                let [without, with] = &nodes;
                let pair = [
                    ask(without, case, round, n_streams, &args).await?,
                    ask(with, case, round, n_streams, &args).await?,
                ];
                pairs.push(pair);
            }
            figures.rows.push(SpeculationRow::new(case.name, n_streams as usize, &pairs));
            destination.save(&figures)?;
        }
    }
    destination.publish(&figures, &figures.report(&args.model))
}

/// The replies of `n_streams` at once to one question.
async fn ask(
    node: &NodeProcess,
    case: &SpeculationCase,
    round: u32,
    n_streams: u32,
    args: &SpeculateBenchArgs,
) -> Result<Vec<Spoken>, CommandFailure> {
    let replies = (0..n_streams).map(async |stream| {
        let prompt = node.engine.render(&case.conversation(round * n_streams + stream), KeyTag::default()).await?;
        let sampling = Sampling { temperature: args.temperature, seed: u64::from(round), ..Sampling::default() };
        let request = SequenceRequest {
            prompt,
            sampling,
            max_tokens: Some(args.tokens),
            constraint: case.constraint()?,
            ..SequenceRequest::default()
        };
        reply(node, request).await
    });
    futures::future::try_join_all(replies).await
}

async fn reply(node: &NodeProcess, request: SequenceRequest) -> Result<Spoken, CommandFailure> {
    let mut spoken = Spoken { tokens: Vec::new(), arrived: Vec::new(), timings: Timings::default() };
    let mut events = node.engine.generate(request).await?;
    while let Some(event) = events.next().await {
        match event? {
            SequenceEvent::Token(token) => {
                spoken.tokens.push(token.id);
                spoken.arrived.push(Instant::now());
            }
            SequenceEvent::Finished { timings, .. } => spoken.timings = timings,
            SequenceEvent::Started { .. } | SequenceEvent::Handoff(_) => {}
        }
    }
    Ok(spoken)
}
