//! A second engine of `[model]` on this machine: it computes prompts alone, the first layers by a worker and the others here.
//! The own engine pulls their KV by a socket, and generates alone. Both map the same file.
//!
//! It is a process of its own: ggml ends the process that loses a worker, and replies must go on then.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_engines::engine_options::WrittenOptions;
use baton_link::Engine;
use baton_model::gguf::Gguf;
use baton_model::limits::WORKERS_UBATCH;
use baton_model::options::LentLayers;
use baton_planner::layer_split::{LayerSplit, MAX_CHANGES, MeasuredSplit};
use baton_planner::rates::Curve;
use tokio::sync::watch;

use super::failure::CommandFailure;
use super::remote_nodes::cluster_key;
use super::supervisor::{self, ChildSpec, NextStart, Supervised};
use crate::config::transport_args::TransportArgs;
use crate::config::{StartupConfig, engine_options};
use crate::log_target::NOTICE;
use crate::observe::telemetry;
use crate::targets::nodes::Node;

/// Its name in routes.
pub const LENDING_ENGINE: &str = "lending";

/// How often the number of lent layers is compared with the measured rates.
const INTERVAL: Duration = Duration::from_secs(10);

/// The length of prompts by whose rates it is chosen, tokens: several batches.
const N_PROMPT: f64 = 2_048.0;

/// How often it is looked whether the process has ended.
const END_POLL: Duration = Duration::from_millis(100);

/// The engine that lends layers. Dropping `supervised` ends its process.
pub(super) struct LendingEngine {
    pub node: Arc<Node>,
    pub supervised: Supervised,
}

/// Starts it with the options `engine` and the model at `path`, once the engine `own` is ready: the memory of that one counts first.
/// Errors: the model has fewer layers than are to be lent, or there is no cluster key.
pub(super) fn start(
    startup: &StartupConfig,
    engine: &WrittenOptions,
    path: &Path,
    own: &Arc<Node>,
) -> Result<LendingEngine, CommandFailure> {
    let n_layers = Gguf::open(path)?.n_layer().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    if let Some(LentLayers::First(n)) = engine.lend_layers.filter(|lent| lent.exceed(n_layers)) {
        return Err(CommandFailure(format!("--lend-layers {n} is more than the model's {n_layers} layers")));
    }
    let transport = &startup.transport;
    let key = cluster_key(engine_options::workers::remote(engine), transport)?;
    let spec = ChildSpec {
        log_name: "the engine that lends layers".to_owned(),
        args: args(engine, transport, path)?,
        // The own engine pulls with it.
        key: key.clone(),
        pull_key: None,
        workers_key: key,
        store_secret: None,
        traces_to: telemetry::endpoint(startup.otlp_endpoint.as_deref()),
    };
    let (wanted, is_wanted) = watch::channel(false);
    // Nobody waits for its first start: replies need it as little as any prefill node.
    let (supervised, _) = supervisor::supervise(spec, is_wanted)?;
    let client = Arc::clone(&supervised.engine) as Arc<dyn Engine>;
    let node =
        Node::at_socket(LENDING_ENGINE.to_owned(), supervised.socket.clone(), client, Arc::clone(&supervised.health));
    let kept = KeptLending {
        own: Arc::clone(own),
        node: Arc::clone(&node),
        wanted,
        next_start: supervised.next_start.clone(),
        pid: Arc::clone(&supervised.pid),
        engine: engine.clone(),
        transport: transport.clone(),
        path: path.to_owned(),
        n_layers,
    };
    let stop = supervised.stop.clone();
    tokio::spawn(async move { stop.run_until_cancelled(kept.keep()).await });
    Ok(LendingEngine { node, supervised })
}

fn args(engine: &WrittenOptions, transport: &TransportArgs, path: &Path) -> Result<Vec<OsString>, serde_json::Error> {
    let model = [OsString::from("--model"), path.into(), "--role".into(), "prefill".into()];
    Ok(engine_options::to_args(engine)?.into_iter().chain(transport.to_args()).chain(model).collect())
}

/// Starts the engine, and with `auto` changes the number of lent layers by measured rates.
struct KeptLending {
    own: Arc<Node>,
    node: Arc<Node>,
    wanted: watch::Sender<bool>,
    next_start: NextStart,
    pid: Arc<AtomicU32>,
    engine: WrittenOptions,
    transport: TransportArgs,
    path: PathBuf,
    n_layers: u32,
}

impl KeptLending {
    async fn keep(self) {
        while self.own.info().is_none() {
            tokio::time::sleep(END_POLL).await;
        }
        self.wanted.send_replace(true);
        if let Some(LentLayers::Planned(_)) = self.engine.lend_layers {
            self.follow_rates().await;
        }
    }

    /// It begins with as many layers as the worker's memory holds. Each change starts the process again.
    async fn follow_rates(&self) {
        let mut measured = Vec::new();
        for _ in 0..MAX_CHANGES {
            let (before, best) = loop {
                tokio::time::sleep(INTERVAL).await;
                if let Some(found) = self.better(&mut measured) {
                    break found;
                }
            };
            if best == 0 {
                tracing::info!(target: NOTICE, "no layers are lent: by its measured rate the worker makes no prompt faster");
                self.wanted.send_replace(false);
                return;
            }
            tracing::info!(target: NOTICE, "by measured rates the worker computes the first {best} layers; it had {before}");
            if let Err(CommandFailure(error)) = self.lend(best).await {
                tracing::warn!(error, "the number of lent layers stays as it is");
                return;
            }
        }
    }

    /// The number of layers that are lent now, and a better one, once both engines' rates are measured.
    fn better(&self, measured: &mut Vec<MeasuredSplit>) -> Option<(u32, u32)> {
        let n_lent = self.node.info()?.workers.first()?.layers;
        let [own_tps, tps] = [&self.own, &self.node].map(|node| node.rates().prefill.at(N_PROMPT));
        let (own_tps, tps) = (own_tps?, tps?);
        // The first number is what the worker's memory holds.
        let most = measured.first().map_or(n_lent, |first| first.n_lent);
        let at = measured.iter().position(|split| split.n_lent == n_lent);
        match at {
            Some(at) => measured[at].tps = tps,
            None => measured.push(MeasuredSplit { n_lent, tps }),
        }
        let n_batches = N_PROMPT as u32 / self.engine.ubatch.unwrap_or(WORKERS_UBATCH).max(1);
        let best = LayerSplit { n_layers: self.n_layers, most, own_tps, n_batches }.next(n_lent, measured);
        let is_idle = self.node.load().active_slots == 0;
        (best != n_lent && is_idle).then_some((n_lent, best))
    }

    async fn lend(&self, n: u32) -> Result<(), CommandFailure> {
        let engine = WrittenOptions { lend_layers: Some(LentLayers::First(n)), ..self.engine.clone() };
        self.next_start.set_args(args(&engine, &self.transport, &self.path)?)?;
        self.wanted.send_replace(false);
        while self.pid.load(Ordering::Relaxed) != 0 {
            tokio::time::sleep(END_POLL).await;
        }
        // They were those of another division.
        self.node.learn(|rates| rates.prefill = Curve::default());
        self.wanted.send_replace(true);
        Ok(())
    }
}
