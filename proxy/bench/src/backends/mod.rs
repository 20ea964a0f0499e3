//! `baton-bench backends`: what handoffs between the devices of this machine cost, and whether they are exact.
//!
//! For each model it runs the examination that `baton doctor` shows, for more rounds, and reports more of its figures. Large
//! models are not fetched but made up on this machine, in real shapes and with random weights: neither speed nor equality
//! depends on what a model says. `docs/backends.md` explains each figure.

mod args;
mod host;
mod made_up;
mod model;
mod page;
mod report;
mod shapes;
mod weights;

use std::ffi::OsString;
use std::path::Path;

use baton_engines::llama::devices::{self, Device};
use baton_engines::transport::Transport;
use baton_fetch::PullOptions;
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, model_files, signals};
use baton_schemas::kv::Codec;
use baton_tryout::examination::{self, Examination, Examined, Machine};
use tokio_util::sync::CancellationToken;

pub(super) use self::args::BackendsBenchArgs;
use self::model::BackendModel;
use self::report::{BackendsReport, ModelFigures};

/// Runs the benchmark. A signal ends it, its nodes, and the writing of a file.
pub(super) async fn run(args: BackendsBenchArgs) -> Result<(), CommandFailure> {
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    tokio::select! {
        done = measure(args) => done,
        () = stop.cancelled() => Err(CommandFailure("stopped".into())),
    }
}

#[allow(clippy::print_stdout, reason = "the figures are the command's result")]
async fn measure(args: BackendsBenchArgs) -> Result<(), CommandFailure> {
    // Whatever is wrong with the arguments is said before minutes of work.
    let models = args.models()?;
    let known = devices::all()?;
    let bench =
        Bench { devices: examination::chosen(&known, &args.devices)?, options: model_files::pull_options()?, args };
    if let Some(page) = &bench.args.page {
        with_figures(page, "", "")?;
    }
    let machine = Machine::with(&known);
    if let Some(missing) = &machine.missing {
        return Err(CommandFailure(missing.clone()));
    }
    let has_gpu = machine.gpus().next().is_some();
    if !has_gpu {
        eprintln!("no GPU was found: the processor is measured against itself");
    }
    let mut report = BackendsReport {
        date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
        driver: if has_gpu { host::nvidia_driver().await } else { None },
        machine,
        threads: bench.args.threads.unwrap_or_else(n_cores),
        sizes: bench.args.sizes(),
        models: Vec::new(),
    };
    for model in &models {
        report.models.push(bench.figures(model).await);
        if let Some(path) = &bench.args.json {
            // Write after each model, so that an interruption loses no earlier figures.
            std::fs::write(path, serde_json::to_vec_pretty(&report)?)?;
        }
    }
    println!("{}", report.table());
    if let Some(page) = &bench.args.page {
        std::fs::write(page, with_figures(page, &report.title(), &report.page())?)?;
    }
    match report.n_failed() {
        0 => Ok(()),
        n => Err(CommandFailure(format!("{n} of the measurements failed"))),
    }
}

/// A page with this machine's figures. Errors: it cannot be read, or has no place for them.
fn with_figures(path: &Path, title: &str, figures: &str) -> Result<String, CommandFailure> {
    let unusable = |why: String| CommandFailure(format!("cannot write the figures into {}: {why}", path.display()));
    let page = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
    page::with_figures(&page, title, figures).ok_or_else(|| unusable("it has no marked part for them".into()))
}

/// What is the same for all models.
struct Bench {
    args: BackendsBenchArgs,
    devices: Vec<Device>,
    options: PullOptions,
}

impl Bench {
    /// Measures a model. If that is impossible, the reason is in the result, and other models can be measured.
    async fn figures(&self, model: &BackendModel) -> ModelFigures {
        eprintln!("{}", model.name());
        let mut figures = ModelFigures {
            name: model.name(),
            about: model.about(),
            file_bytes: 0,
            failure: None,
            examined: Examined::default(),
        };
        if let Err(CommandFailure(why)) = self.measure(model, &mut figures).await {
            figures.failure = Some(why);
        }
        if self.args.delete
            && let Err(CommandFailure(why)) = model.delete(&self.options).await
        {
            eprintln!("{why}");
        }
        figures
    }

    async fn measure(&self, model: &BackendModel, figures: &mut ModelFigures) -> Result<(), CommandFailure> {
        let file = model.file(&self.options).await?;
        figures.file_bytes = std::fs::metadata(&file)?.len();
        let sizes = self.args.sizes();
        // On a loopback a codec would only add its own time.
        let mut node_args: Vec<OsString> = ["--kv-codecs", Codec::None.as_str()].map(OsString::from).into();
        node_args.extend(self.args.threads.iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
        let examination = Examination {
            model: file.into(),
            devices: self.devices.clone(),
            prefill: Vec::new(),
            n_tokens: sizes.n_tokens as usize,
            n_new: sizes.n_new,
            n_rounds: sizes.n_rounds,
            warms_up: true,
            node_args,
            transport: Transport::default(),
            key: uuid::Uuid::new_v4().to_string(),
        };
        figures.examined = examination.complete().await?;
        Ok(())
    }
}

/// Compute threads of a node that is not told how many.
fn n_cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}
