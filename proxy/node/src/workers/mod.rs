//! Connects a node to its workers before its engine starts. [`baton_engines::workers`] does it.

mod lent;
mod waiting;

use std::sync::Arc;

use baton_engines::engine_options::WrittenOptions;
use baton_engines::llama::devices::{self, CPU};
use baton_engines::llama::shares::told_memory;
use baton_engines::registry::EngineStartError;
use baton_engines::workers::session::{Lender, LenderOptions};
use baton_engines::workers::tunnel::{Refusals, TunnelSetup, WorkerSource};
use baton_link::transport::Transport;
use baton_model::options::{WorkerEndpoint, lent_shares};
use baton_process::parent;
use baton_proxy::config::engine_options;
use baton_proxy::config::transport_args::TransportArgs;
use baton_schemas::node::{NodeInfo, WORKERS_KEY_VARIABLE};
use baton_schemas::worker::LOCAL_WORKER;

use self::lent::LentOf;
use self::waiting::until_usable;
use super::event::Tell;
use super::failure::NodeFailure;
use super::options::WantedEngine;

/// The workers of an engine that starts.
#[derive(Default)]
pub(crate) struct ConnectedWorkers {
    pub(crate) endpoints: Vec<WorkerEndpoint>,
    refusals: Refusals,
    /// The number of first layers that the first one is to compute, if it is exact.
    lent: Option<u32>,
}

impl ConnectedWorkers {
    /// Why the engine did not start. A worker that has refused memory may have it at the next start.
    pub(crate) fn blamed(&self, error: EngineStartError) -> NodeFailure {
        match self.refusals.last() {
            Some(worker) => NodeFailure::Elsewhere {
                message: format!("the worker {worker} refuses memory: {error}"),
                summary: "a worker refuses memory that it described as free",
            },
            None => error.into(),
        }
    }

    /// Checks that the worker got exactly the lent layers. Errors: free memory has changed while the model was loaded.
    pub(crate) fn check(&self, info: Option<&NodeInfo>) -> Result<(), NodeFailure> {
        let found = info.and_then(|info| info.workers.first()).map(|worker| worker.layers);
        match (self.lent, found) {
            (Some(wanted), Some(found)) if wanted != found => Err(NodeFailure::Elsewhere {
                message: format!(
                    "the worker has {found} layers and not {wanted}: this machine's free memory has changed meanwhile"
                ),
                summary: "the memory of its machine has changed while the model was loading",
            }),
            _ => Ok(()),
        }
    }
}

/// Opens a port of loopback for each configured worker, in their order. Waits for workers that cannot be used yet, as
/// long as it takes: the machines of a cluster start in any order. Errors: mistakes of the operator.
pub(crate) async fn connect(
    engine: WantedEngine<'_>,
    addresses: &TransportArgs,
    key: &str,
    transport: Transport,
    tell: Tell,
) -> Result<ConnectedWorkers, NodeFailure> {
    let options = engine.options;
    let Some(workers) = options.workers.as_deref().filter(|workers| !workers.is_empty()) else {
        return Ok(ConnectedWorkers::default());
    };
    let of_cluster = std::env::var(WORKERS_KEY_VARIABLE).ok().filter(|key| !key.is_empty());
    let key = of_cluster.unwrap_or_else(|| key.to_owned());
    let refusals = Refusals::default();
    let setup = TunnelSetup { key, transport, on_lost: Arc::new(end_process), refusals: refusals.clone() };
    let mut sources = Vec::with_capacity(workers.len() + 1);
    for name in workers {
        sources.push(source(name, options, addresses).await?);
    }
    let lent = lent::layers(engine, &setup, &sources[0], tell).await?;
    let shares = match lent {
        Some(LentOf { n: 0, .. }) => return Ok(ConnectedWorkers::default()),
        Some(LentOf { n, n_layers }) => Some(lent_shares(n, n_layers).to_vec()),
        None => engine_options::workers::shares(options),
    };
    let own_free = devices::free_gpu_memory().map_err(NodeFailure::setup)?;
    if lent.is_some() && own_free == 0 {
        // Without a GPU, a process here computes the other layers.
        sources.push(source(LOCAL_WORKER, options, addresses).await?);
    }
    let told = match shares {
        None => vec![None; sources.len()],
        Some(shares) => {
            let told = told_memory(&shares, sources.len(), own_free);
            let told = told.map_err(|message| NodeFailure::setup(format!("--tensor-split {message}")))?;
            told.into_iter().map(Some).collect()
        }
    };
    let mut endpoints = Vec::with_capacity(sources.len());
    for (source, told) in sources.iter().zip(told) {
        endpoints.push(until_usable(source, tell, async || setup.open(source, told).await).await?);
    }
    Ok(ConnectedWorkers { endpoints, refusals, lent: lent.map(|lent| lent.n) })
}

async fn source(name: &str, options: &WrittenOptions, addresses: &TransportArgs) -> Result<WorkerSource, NodeFailure> {
    if name != LOCAL_WORKER {
        return Ok(WorkerSource::Node { name: name.to_owned(), url: addresses.node_url(name) });
    }
    let program = std::env::current_exe().map_err(NodeFailure::setup)?;
    let options = LenderOptions { program, device: Some(CPU.to_owned()), threads: options.threads, max_memory: None };
    Lender::start(options).await.map(|lender| WorkerSource::Local(Arc::new(lender))).map_err(NodeFailure::setup)
}

/// Ends this process, whose engine cannot go on without a worker. What has started it starts it again.
fn end_process(worker: &str, reason: &str) {
    tracing::error!(worker, reason, "a worker is lost; this process ends, because the engine cannot go on without it");
    parent::end_at_once()
}
