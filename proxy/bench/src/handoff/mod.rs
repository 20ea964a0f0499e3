//! `baton-bench handoff`: measures the cost of handoffs between real nodes on loopback.
//!
//! Most figures are measured from outside, through the nodes' protocol. The single-core figures of codecs and stages run
//! in this process on KV that was pulled from a real model. `docs/handoff.md` explains each figure.

mod charts;
mod codecs;
mod fairness;
mod footprint;
mod overlap;
mod pair;
mod recorded;
mod report;
mod sizes;
mod streams;
mod wire;

use baton_fetch as models;
use baton_proxy::serve::CommandFailure;
use baton_proxy::serve::model_files;
use baton_schemas::kv::Codec;
use clap::{Args, ValueEnum};

use self::overlap::Link;
use self::pair::HandoffBench;
use self::report::HandoffFigures;
use self::sizes::HandoffSizes;
use crate::report::{ChartFolder, Destination, ReportFiles};

/// Options of `baton-bench handoff`.
#[derive(Args)]
pub(super) struct HandoffBenchArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// The most repetitions; medians are reported. A prompt length gets fewer if they take more than 60 s
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Compute threads of each node
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: u32,
    /// Prompt lengths in tokens, by commas [default: 128,512,2000]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(16..=8_000))]
    lengths: Vec<u32>,
    /// The codecs that `networks` compares, by commas; `state_f16` and `state_int8` are for models with states
    /// [default: none,planes_zstd,kvq,kvq_fast]
    #[arg(long, value_delimiter = ',', value_parser = codec)]
    codecs: Vec<Codec>,
    /// Run small sizes and one round, as a check that the benchmark works
    #[arg(long)]
    quick: bool,
    /// Only these measurements, by commas [default: all but networks]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<BenchSection>,
    #[command(flatten)]
    files: ReportFiles,
    #[command(flatten)]
    charts: ChartFolder,
}

impl HandoffBenchArgs {
    fn sizes(&self) -> HandoffSizes {
        let default = if self.quick { vec![64, 256] } else { vec![128, 512, 2_000] };
        let lengths: Vec<usize> = self.lengths.iter().map(|&n| n as usize).collect();
        HandoffSizes {
            lengths: if lengths.is_empty() { default } else { lengths },
            rounds: if self.quick { 1 } else { self.rounds },
            time_per_length: overlap::TIME_PER_LENGTH,
            joining: if self.quick { 256 } else { 2_000 },
            long: if self.quick { 600 } else { 4_000 },
            stream: if self.quick { 40 } else { 200 },
        }
    }
}

/// The codec of this name.
fn codec(name: &str) -> Result<Codec, String> {
    let found = Codec::ALL.into_iter().find(|codec| codec.as_str() == name);
    found.ok_or_else(|| format!("must be one of {}", Codec::ALL.map(Codec::as_str).join(", ")))
}

/// A group of measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchSection {
    /// The part of the transfer that overlaps with the prefill.
    Overlap,
    /// The same over networks of 0.1 to 10 Gb/s, with and without lossy codecs.
    Networks,
    /// A short prompt after a long one.
    Fairness,
    /// Cache to cache, compared with a plain copy.
    Wire,
    /// The memory of both nodes beyond their caches.
    Memory,
    /// The effect on running streams.
    Streams,
    /// Codecs on real KV.
    Codecs,
}

impl BenchSection {
    async fn measure(
        self,
        bench: &mut HandoffBench,
        codecs: &[Codec],
        figures: &mut HandoffFigures,
    ) -> Result<(), CommandFailure> {
        match self {
            BenchSection::Overlap => {
                figures.overlap = Some(overlap::measure(bench, &Link::RELATIVE, &Codec::OF_ROWS).await?);
            }
            BenchSection::Networks => {
                let compared = [Codec::None, Codec::PlanesZstd, Codec::Kvq, Codec::KvqFast];
                let codecs = if codecs.is_empty() { &compared[..] } else { codecs };
                figures.networks = Some(overlap::measure(bench, &Link::NETWORKS, codecs).await?);
            }
            BenchSection::Fairness => figures.fairness = Some(fairness::measure(bench).await?),
            BenchSection::Wire => figures.wire = Some(wire::measure(bench).await?),
            BenchSection::Memory => figures.memory = Some(footprint::measure(bench).await?),
            BenchSection::Streams => figures.streams = Some(streams::measure(bench).await?),
            BenchSection::Codecs => figures.codecs = Some(codecs::measure(bench).await?),
        }
        Ok(())
    }
}

/// Runs the benchmark.
pub(super) async fn run(args: HandoffBenchArgs) -> Result<(), CommandFailure> {
    let model = models::pull(&args.model, &model_files::pull_options()?).await?;
    let sizes = args.sizes();
    let destination = Destination::open("handoff", &args.files, &args.charts)?;
    let mut bench = HandoffBench::start(model, args.threads, sizes).await?;
    let mut figures = HandoffFigures { model: args.model, threads: args.threads, ..HandoffFigures::default() };
    let sections = BenchSection::value_variants().iter().filter(|section| match args.only.is_empty() {
        // It takes minutes for each length of prompts.
        true => **section != BenchSection::Networks,
        false => args.only.contains(section),
    });
    for section in sections {
        section.measure(&mut bench, &args.codecs, &mut figures).await?;
        destination.save(&figures)?;
    }
    let mut report = figures.report();
    recorded::add(&mut report, &figures);
    destination.publish(&figures, &report)
}
