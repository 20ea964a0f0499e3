//! `baton doctor`: lists this machine's devices, and checks that KV moves between them and from other nodes.
//!
//! The checks are those of [`baton_tryout::examination`]. `docs/backends.md` explains them.

mod args;
mod report;

use std::fmt;
use std::path::PathBuf;

use baton_engines::engine_options::WrittenOptions;
use baton_engines::llama::devices;
use baton_fetch as models;
use baton_model::gguf::{Gguf, UnfitDraft};
use baton_proxy::config::engine_options;
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, model_files, signals};
use baton_schemas::node::KEY_VARIABLE;
use baton_tryout::examination::{self, Examination, ExaminedDraft};
use tokio_util::sync::CancellationToken;

pub(crate) use self::args::DoctorArgs;
use self::report::DoctorReport;

/// Runs every check. A signal ends the command and all its processes at once.
pub(super) async fn run(args: DoctorArgs) -> Result<(), CommandFailure> {
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    tokio::select! {
        done = check(args) => done,
        () = stop.cancelled() => Err(CommandFailure("stopped".into())),
    }
}

#[allow(clippy::print_stdout, reason = "the report is the command's result")]
async fn check(args: DoctorArgs) -> Result<(), CommandFailure> {
    let json = args.json;
    let report = report(args).await?;
    match json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{report}"),
    }
    match report.n_failed() {
        0 => Ok(()),
        n => Err(CommandFailure(format!("{n} of the checks failed"))),
    }
}

/// Finds the devices and the model, and runs every check.
async fn report(args: DoctorArgs) -> Result<DoctorReport, CommandFailure> {
    let transport = args.transport.or_paired();
    let cluster_key = transport.cluster_key()?;
    if cluster_key.is_none() && !args.prefill.is_empty() {
        let cure = "pair the machines with `baton pair`, or set";
        return Err(CommandFailure(format!("--prefill needs the cluster's key: {cure} {KEY_VARIABLE}")));
    }
    let DoctorArgs { threads, max_canary_distance, .. } = args;
    let engine = WrittenOptions { threads, max_canary_distance, ..WrittenOptions::default() };
    if let Some((key, problem)) = engine_options::problems(&engine).first() {
        return Err(CommandFailure(format!("{} {problem}", engine_options::flag(key))));
    }
    let threads = threads.into_iter().flat_map(|n| ["--threads".into(), n.to_string().into()]);
    let distance = max_canary_distance.into_iter().flat_map(|n| ["--max-canary-distance".into(), n.to_string().into()]);
    let known = devices::all()?;
    let devices = examination::chosen(&known, &args.devices)?;
    let model = models::pull(&args.model, &model_files::pull_options()?).await?;
    let header = Gguf::open(&model)?;
    let draft = args.draft.map(|path| examined_draft(path, &header)).transpose()?;
    let system_findings = examination::findings(header.files.n_bytes());
    let examination = Examination {
        model: model.into(),
        devices,
        prefill: args.prefill.iter().map(|address| transport.node_url(address)).collect(),
        n_tokens: args.tokens as usize,
        n_new: args.new_tokens,
        n_rounds: 1,
        warms_up: false,
        is_thorough: true,
        draft,
        node_args: threads.chain(distance).chain(transport.to_args()).collect(),
        transport: transport.transport()?,
        key: cluster_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string()),
    };
    Ok(DoctorReport::new(&known, system_findings, examination.complete().await?))
}

/// The draft model, which a node can run even if it cannot guess beside the model. Errors: it can guess nothing for the model.
fn examined_draft(path: PathBuf, model: &Gguf) -> Result<ExaminedDraft, CommandFailure> {
    let unusable = |why: &dyn fmt::Display| CommandFailure(format!("--draft {} cannot be used: {why}", path.display()));
    let header = Gguf::open(&path).map_err(|error| unusable(&error))?;
    let runs_beside_model = match model.check_draft(&header) {
        Ok(()) => true,
        Err(why @ UnfitDraft::HasStates) => {
            eprintln!("--draft {}: {why}. It is measured as one", path.display());
            false
        }
        Err(why) => return Err(unusable(&why)),
    };
    Ok(ExaminedDraft { file: path.into(), runs_beside_model })
}
