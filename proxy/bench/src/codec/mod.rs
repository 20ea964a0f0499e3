//! `baton-bench codec`: what each KV codec costs in exactness and time, and what it saves.
//!
//! For each prompt, the model's predictions for the tokens that follow are computed from its KV as it is, and from the
//! KV that went through a codec. Their divergence is compared with a floor: the KV that the same model computes in
//! smaller batches, whose kernels add numbers in another order.

pub(crate) mod calibrate;
mod divergence;
mod q4_0;
mod recall;
mod report;
mod subject;
mod tried;

use baton_engines::codec_profile;
use baton_engines::llama::reference::Reference;
use baton_engines::llama::trial::KvTrial;
use baton_engines::registry::EngineOptions;
use baton_fetch as models;
use baton_model::gguf::Gguf;
use baton_proxy::serve::{CommandFailure, model_files};
use clap::Args;

use self::report::{CodecFigures, CodecModel};
use self::subject::{CodecSums, Subject};
use self::tried::TriedModel;
use crate::report::{ChartFolder, Destination, ReportFiles};

/// Options of `baton-bench codec`.
#[derive(Args)]
pub(super) struct CodecBenchArgs {
    /// .gguf files or catalogue names, by commas
    #[arg(long, short, default_value = "smollm2", value_delimiter = ',')]
    model: Vec<String>,
    /// Prompts whose predictions are compared
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=200))]
    prompts: u32,
    /// Their lengths in tokens in turn, by commas: from short to long, so that the figures hold for both
    #[arg(long, value_delimiter = ',', default_value = "600,900,1300,2000", value_parser = clap::value_parser!(u32).range(16..=16_000))]
    lengths: Vec<u32>,
    /// Prompts of 2,000 to 6,000 tokens with three facts each that the model is asked for
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    recall: u32,
    /// Tokens after each prompt whose predictions are compared
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=256))]
    tokens: u32,
    /// Positions of a frame
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=2_048))]
    chunk: u32,
    /// Compute threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: u32,
    #[command(flatten)]
    files: ReportFiles,
    #[command(flatten)]
    charts: ChartFolder,
}

/// Runs the benchmark.
pub(super) async fn run(args: CodecBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("codec", &args.files, &args.charts)?;
    let mut figures = CodecFigures::default();
    for name in &args.model {
        let path = models::pull(name, &model_files::pull_options()?).await?;
        let options = EngineOptions {
            n_slots: Some(1),
            n_threads: Some(args.threads),
            n_ubatch: Some(args.chunk.max(args.tokens).max(recall::MAX_QUESTION as u32)),
            ..EngineOptions::of(&path)
        };
        let sizes = CalibrationSizes {
            n_prompts: args.prompts,
            lengths: args.lengths.iter().map(|&n| n as usize).collect(),
            n_recall: args.recall as usize,
            n_tokens: args.tokens as usize,
            n_chunk: args.chunk as usize,
        };
        let name = name.rsplit(['/', '\\']).next().unwrap_or(name).to_owned();
        let model = tokio::task::spawn_blocking(move || measure(name, options, sizes)).await??;
        figures.models.push(model);
        destination.save(&figures)?;
    }
    destination.publish(&figures, &figures.report())
}

/// How much is measured.
struct CalibrationSizes {
    n_prompts: u32,
    /// Tokens of the prompts, in turn.
    lengths: Vec<usize>,
    /// Prompts with facts.
    n_recall: usize,
    n_tokens: usize,
    n_chunk: usize,
}

fn measure(name: String, options: EngineOptions, sizes: CalibrationSizes) -> Result<CodecModel, CommandFailure> {
    let gguf = Gguf::open(options.path()?)?;
    let fingerprint = gguf.fingerprint(&[])?;
    let path = options.path()?.to_owned();
    let model = Reference::load(options)?;
    let recalled = recall::LENGTHS.into_iter().max().filter(|_| sizes.n_recall > 0).unwrap_or(0) + recall::MAX_QUESTION;
    let longest = (sizes.lengths.iter().max().unwrap_or(&0) + sizes.n_tokens).max(recalled);
    let n_cells = u32::try_from(2 * longest)?.next_multiple_of(256);
    let trial = KvTrial::new(&model, n_cells)?;
    let profile = codec_profile::beside(&path, fingerprint, trial.layout());
    let mut tried =
        TriedModel { trial, profile, beginning: model.beginning(), text: model.tokenize(baton_tryout::prompts::TEXT) };
    let subjects = Subject::all(tried.trial.layout(), tried.profile.is_some());
    let mut tallies: Vec<(Subject, CodecSums)> =
        subjects.into_iter().map(|subject| (subject, CodecSums::default())).collect();
    for (n, &length) in sizes.lengths.iter().cycle().enumerate().take(sizes.n_prompts as usize) {
        eprintln!("{name}: prompt {} of {}, {length} tokens", n + 1, sizes.n_prompts);
        let (prompt, next) = tried.prompt(n, length, sizes.n_tokens);
        let plain = tried.trial.prefill(&prompt, sizes.n_chunk)?;
        let expected = tried.trial.logits(&plain, &next)?;
        for (subject, tally) in &mut tallies {
            let passed = subject.pass(&mut tried, &prompt, &plain)?;
            let found = tried.trial.logits(&passed.kv, &next)?;
            tally.add(&passed, &divergence::all(&expected, &found));
        }
    }
    let recall = match sizes.n_recall {
        0 => None,
        n => Some(recall::ask(&model, &mut tried, n, sizes.n_chunk)?),
    };
    Ok(CodecModel::new(name, sizes.n_prompts, tallies, recall))
}
