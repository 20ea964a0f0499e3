//! `[model]`: its names, and this endpoint's own engine for it in a child process.

use std::ffi::OsString;
use std::sync::Arc;

use baton_fetch::{self as models, Located, cache};
use baton_link::Engine;
use futures::FutureExt;

use super::failure::CommandFailure;
use super::first_start::FirstStart;
use super::lending::{self, LendingEngine};
use super::model_files;
use super::model_names::ModelNames;
use super::remote_nodes::{cluster_key, key_to_discover};
use super::store_secret;
use super::supervisor::{self, ChildSpec, StartError, Supervised};
use crate::config::engine_options::workers::DividedEngines;
use crate::config::{ServeConfig, StartupConfig, engine_options};
use crate::observe::telemetry;
use crate::targets::nodes::Node;

/// The names of `[model]` before any node has answered.
#[derive(Default)]
pub(super) struct PrimaryNames {
    /// `None`: a node will say.
    pub name: Option<String>,
    pub aliases: Vec<String>,
}

impl PrimaryNames {
    /// The configured names, then those of the model's file if it is on this machine.
    pub(super) fn of(config: &ServeConfig) -> Result<PrimaryNames, CommandFailure> {
        let of_file = match config.startup.engine.kind() {
            _ if !config.routing.has_own_engine => None,
            kind if !kind.needs_file() => Some(ModelNames { name: kind.as_str().to_owned(), aliases: Vec::new() }),
            _ => match models::locate(&config.startup.source, &cache::default_folder()?)? {
                Located::File(path) => Some(ModelNames::of_file(&config.startup.source, &path)),
                Located::NeedsPull(_) => None,
            },
        };
        let (name, aliases) = of_file.map_or_else(Default::default, |names| (Some(names.name), names.aliases));
        let aliases = [aliases, config.aliases.clone()].concat();
        Ok(PrimaryNames { name: config.name.clone().or(name), aliases })
    }
}

/// This endpoint's own engine. Dropping `supervised` ends its process.
pub(super) struct OwnEngine {
    pub node: Arc<Node>,
    pub supervised: Supervised,
    pub first_start: FirstStart,
    /// The engine that computes prompts with a worker for it.
    pub lending: Option<LendingEngine>,
}

impl OwnEngine {
    /// All processes, and the first start of the one that generates.
    pub(super) fn supervised(self) -> (Vec<Supervised>, FirstStart) {
        let lending = self.lending.map(|lending| lending.supervised);
        ([self.supervised].into_iter().chain(lending).collect(), self.first_start)
    }
}

/// Starts a child process with the configured model, which is fetched first if need be.
pub(super) async fn start_own_engine(config: &ServeConfig) -> Result<OwnEngine, CommandFailure> {
    let StartupConfig { transport, source, otlp_endpoint, .. } = &config.startup;
    let DividedEngines { own: engine, lending } = &DividedEngines::of(&config.startup.engine);
    let mut args: Vec<OsString> = engine_options::to_args(engine)?.into_iter().chain(transport.to_args()).collect();
    let kind = engine.kind();
    let path = match kind.needs_file() {
        true => Some(model_files::locate_or_pull(source, kind).await?),
        false => None,
    };
    args.extend(path.iter().flat_map(|path| [OsString::from("--model"), path.into()]));
    let of_lending = lending.iter().flat_map(engine_options::workers::remote);
    let spec = ChildSpec {
        log_name: "this endpoint's own engine".to_owned(),
        args,
        key: None,
        pull_key: match config.startup.discover {
            true => Some(key_to_discover(transport)?),
            false => cluster_key(config.routing.prefill.iter().chain(of_lending), transport)?,
        },
        workers_key: cluster_key(engine_options::workers::remote(engine), transport)?,
        store_secret: store_secret::for_engine(engine, transport)?,
        traces_to: telemetry::endpoint(otlp_endpoint.as_deref()),
    };
    let (supervised, first_start) = supervisor::supervise(spec, supervisor::always())?;
    let engine = Arc::clone(&supervised.engine) as Arc<dyn Engine>;
    let node = Node::new("local".to_owned(), None, engine, Arc::clone(&supervised.health));
    let lending = lending.as_ref().zip(path.as_deref());
    let lending = lending.map(|(options, path)| lending::start(&config.startup, options, path, &node)).transpose()?;
    let first_start = first_start.map(|first| Ok(Some(first.unwrap_or(Err(StartError::Unwanted))?))).boxed();
    Ok(OwnEngine { node, supervised, first_start, lending })
}
