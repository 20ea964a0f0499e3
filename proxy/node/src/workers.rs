//! Connects a node to its workers before its engine starts. [`baton_engines::workers`] does it.

use std::sync::Arc;
use std::time::Duration;

use baton_engines::engine_options::WrittenOptions;
use baton_engines::llama::devices::{self, CPU};
use baton_engines::llama::shares::told_memory;
use baton_engines::registry::EngineStartError;
use baton_engines::workers::session::{Lender, LenderOptions};
use baton_engines::workers::tunnel::{Refusals, TunnelSetup, WorkerFailure, WorkerSource};
use baton_link::transport::Transport;
use baton_model::options::WorkerEndpoint;
use baton_process::parent;
use baton_proxy::config::engine_options;
use baton_proxy::config::transport_args::TransportArgs;
use baton_schemas::node::WORKERS_KEY_VARIABLE;
use baton_schemas::worker::LOCAL_WORKER;

use super::event::{NodeEvent, Tell};
use super::failure::NodeFailure;

/// The pause between two attempts to reach a worker.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The workers of an engine that starts.
#[derive(Default)]
pub(crate) struct ConnectedWorkers {
    pub(crate) endpoints: Vec<WorkerEndpoint>,
    refusals: Refusals,
}

impl ConnectedWorkers {
    /// Why the engine did not start. A worker that has refused memory may have it at the next start.
    pub(crate) fn blamed(&self, error: EngineStartError) -> NodeFailure {
        match self.refusals.last() {
            Some(worker) => NodeFailure::Elsewhere(format!("the worker {worker} refuses memory: {error}")),
            None => error.into(),
        }
    }
}

/// Opens a port of loopback for each configured worker, in their order. Waits for workers that cannot be used yet, as
/// long as it takes: the machines of a cluster start in any order. Errors: mistakes of the operator.
pub(crate) async fn connect(
    options: &WrittenOptions,
    addresses: &TransportArgs,
    key: &str,
    transport: Transport,
    tell: Tell,
) -> Result<ConnectedWorkers, NodeFailure> {
    let Some(workers) = options.workers.as_deref().filter(|workers| !workers.is_empty()) else {
        return Ok(ConnectedWorkers::default());
    };
    let told = match engine_options::workers::shares(options) {
        None => vec![None; workers.len()],
        Some(shares) => {
            let own_free = devices::free_gpu_memory().map_err(NodeFailure::setup)?;
            let told = told_memory(&shares, workers.len(), own_free);
            let told = told.map_err(|message| NodeFailure::setup(format!("--tensor-split {message}")))?;
            told.into_iter().map(Some).collect()
        }
    };
    let of_cluster = std::env::var(WORKERS_KEY_VARIABLE).ok().filter(|key| !key.is_empty());
    let key = of_cluster.unwrap_or_else(|| key.to_owned());
    let refusals = Refusals::default();
    let setup = TunnelSetup { key, transport, on_lost: Arc::new(end_process), refusals: refusals.clone() };
    let mut endpoints = Vec::with_capacity(workers.len());
    for (name, told) in workers.iter().zip(told) {
        let source = source(name, options, addresses).await?;
        endpoints.push(open(&setup, &source, told, tell).await?);
    }
    Ok(ConnectedWorkers { endpoints, refusals })
}

async fn source(name: &str, options: &WrittenOptions, addresses: &TransportArgs) -> Result<WorkerSource, NodeFailure> {
    if name != LOCAL_WORKER {
        return Ok(WorkerSource::Node { name: name.to_owned(), url: addresses.node_url(name) });
    }
    let program = std::env::current_exe().map_err(NodeFailure::setup)?;
    let options = LenderOptions { program, device: Some(CPU.to_owned()), threads: options.threads, max_memory: None };
    Lender::start(options).await.map(|lender| WorkerSource::Local(Arc::new(lender))).map_err(NodeFailure::setup)
}

/// Opens the tunnel to a worker. Says once why it waits, and again when the reason changes.
async fn open(
    setup: &TunnelSetup,
    source: &WorkerSource,
    told: Option<u64>,
    tell: Tell,
) -> Result<WorkerEndpoint, NodeFailure> {
    let mut said = String::new();
    loop {
        match setup.open(source, told).await {
            Ok(endpoint) => return Ok(endpoint),
            Err(failure @ (WorkerFailure::Address(_) | WorkerFailure::Client(_) | WorkerFailure::Port(_))) => {
                return Err(NodeFailure::setup(failure));
            }
            Err(failure) => {
                let reason = failure.to_string();
                if reason != said {
                    said.clone_from(&reason);
                    tell(NodeEvent::WaitsForWorker { worker: source.name().to_owned(), reason });
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Ends this process, whose engine cannot go on without a worker. What has started it starts it again.
fn end_process(worker: &str, reason: &str) {
    tracing::error!(worker, reason, "a worker is lost; this process ends, because the engine cannot go on without it");
    parent::end_at_once()
}
