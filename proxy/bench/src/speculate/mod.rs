//! `baton-bench speculate`: the same questions without and with speculation, in turn.
//!
//! Nodes with the same model and options but for their drafters, and llama-server if there is one, answer each question one after
//! another: only one of them computes at a time, and each round begins at the other end. What drafters have learned in earlier rounds
//! they keep, as they do in use. `--simulate` prints what published machines would gain, by the cost model alone.

mod args;
mod cases;
mod guesser;
mod llama_server;
mod question;
mod report;
mod simulated;
mod spoken;
mod subject;

use std::path::Path;

use baton_engines::llama::head_cost;
use baton_engines::registry::EngineOptions;
use baton_model::options::Speculation;
use baton_proxy::serve::{CommandFailure, model_files};

pub(super) use self::args::SpeculateBenchArgs;
use self::guesser::Guesser;
use self::question::SpeculationQuestion;
use self::report::{HeadFigures, RoundReplies, SpeculationFigures, SpeculationRow};
use self::subject::DraftingServer;
use super::report::{ChartFolder, Destination};
use crate::backends::model::BackendModel;

/// Passes of the model's own head of which the median counts.
const HEAD_PASSES: u32 = 48;

/// Runs the benchmark.
pub(super) async fn run(args: SpeculateBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("speculate", &args.files, &ChartFolder::default())?;
    if args.simulate {
        let figures = simulated::run();
        return destination.publish(&figures, &simulated::report(&figures));
    }
    let model = BackendModel::parse(&args.model)?;
    let pull = model_files::pull_options()?;
    let file = model.file(&pull).await?;
    let subjects = subject::start(&args, &file).await?;
    let head = if subjects.iter().any(|subject| subject.guesser == Guesser::Head) {
        head_cost(&args, &file).await?
    } else {
        None
    };
    let mut figures = SpeculationFigures { rows: Vec::new(), head };
    for &n_streams in &args.streams {
        for case in cases::of(&model) {
            let mut rounds = Vec::new();
            for round in 0..args.rounds {
                eprintln!("{} of {}, {n_streams} streams, round {}", case.name, model.name(), round + 1);
                let first = &subjects[0];
                let questions = SpeculationQuestion::of_round(first.node()?, case, round, n_streams, &args).await?;
                rounds.push(ask_all(&subjects, questions, round, &args).await?);
            }
            for (idx, subject) in subjects.iter().enumerate() {
                figures.rows.push(SpeculationRow::new(case.name, subject, idx, &rounds));
            }
            destination.save(&figures)?;
        }
    }
    destination.publish(&figures, &figures.report(&model))
}

/// Measures the model's own head in this process. The nodes are idle meanwhile.
async fn head_cost(args: &SpeculateBenchArgs, file: &Path) -> Result<Option<HeadFigures>, CommandFailure> {
    let options =
        EngineOptions { n_threads: args.threads, speculation: Some(Speculation::Auto), ..EngineOptions::of(file) };
    let measured = tokio::task::spawn_blocking(move || head_cost::head_cost(&options, HEAD_PASSES)).await?;
    let cost = measured.map_err(|error| CommandFailure(error.to_string()))?;
    Ok(cost.map(|cost| HeadFigures { pass_ms: 1e3 * cost.pass_seconds, step_ms: 1e3 * cost.step_seconds }))
}

/// The replies of each subject to the questions of a round. A client's prediction needs the reply that it predicts, so it comes last.
async fn ask_all(
    subjects: &[DraftingServer],
    questions: Vec<SpeculationQuestion>,
    round: u32,
    args: &SpeculateBenchArgs,
) -> Result<RoundReplies, CommandFailure> {
    let mut order: Vec<usize> = (0..subjects.len()).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order.sort_by_key(|idx| subjects[*idx].guesser == Guesser::Prediction);
    let mut replies: RoundReplies = subjects.iter().map(|_| Vec::new()).collect();
    for idx in order {
        let subject = &subjects[idx];
        let predicted = subject.guesser == Guesser::Prediction;
        let asked = questions.iter().enumerate().map(async |(stream, question)| {
            let question = match predicted {
                true => question.predicting(&replies[0][stream].tokens, args.right, u64::from(round)),
                false => question.clone(),
            };
            subject.ask(question).await
        });
        let spoken = futures::future::try_join_all(asked).await?;
        replies[idx] = spoken;
    }
    Ok(replies)
}
