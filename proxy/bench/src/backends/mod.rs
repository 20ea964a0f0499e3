//! `baton-bench backends`: what handoffs between the devices of this machine cost, and whether they are exact.
//!
//! For each model it runs the examination that `baton doctor` shows, for more rounds, and reports more of its figures. Large
//! models are not fetched but made up on this machine, in real shapes and with random weights: neither speed nor equality
//! depends on what a model says. `docs/backends.md` explains each figure.

mod args;
mod host;
mod made_up;
pub(crate) mod model;
mod report;
mod shapes;
mod weights;

use std::ffi::OsString;

use baton_engines::llama::devices::{self, Device};
use baton_fetch::PullOptions;
use baton_link::transport::Transport;
use baton_model::gguf::Gguf;
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, model_files, signals};
use baton_schemas::kv::Codec;
use baton_tryout::examination::{self, Examination, Examined, Machine};
use tokio_util::sync::CancellationToken;

pub(super) use self::args::BackendsBenchArgs;
use self::model::BackendModel;
use self::report::{BackendsFigures, ModelFigures};
use crate::report::{ChartFolder, Destination};

/// Runs the benchmark. A signal ends it, its nodes, and the writing of a file.
pub(super) async fn run(args: BackendsBenchArgs) -> Result<(), CommandFailure> {
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    tokio::select! {
        done = measure(args) => done,
        () = stop.cancelled() => Err(CommandFailure("stopped".into())),
    }
}

async fn measure(args: BackendsBenchArgs) -> Result<(), CommandFailure> {
    // Whatever is wrong with the arguments is said before minutes of work.
    let models = args.models()?;
    let known = devices::all()?;
    let bench =
        Bench { devices: examination::chosen(&known, &args.devices)?, options: model_files::pull_options()?, args };
    let destination = Destination::open("backends", &bench.args.files, &ChartFolder::default())?;
    let machine = Machine::with(&known);
    if let Some(missing) = &machine.missing {
        return Err(CommandFailure(missing.clone()));
    }
    let has_gpu = machine.gpus().next().is_some();
    if !has_gpu {
        eprintln!("no GPU was found: the processor is measured against itself");
    }
    let mut figures = BackendsFigures {
        date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
        driver: if has_gpu { host::nvidia_driver().await } else { None },
        machine,
        threads: bench.args.threads.unwrap_or_else(n_cores),
        sizes: bench.args.sizes(),
        models: Vec::new(),
    };
    for model in &models {
        figures.models.push(bench.figures(model).await);
        destination.save(&figures)?;
    }
    destination.publish(&figures, &figures.report())
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
        figures.file_bytes = Gguf::open(&file)?.files.n_bytes();
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
            is_thorough: false,
            draft: None,
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
