//! A worker: a node that lends this machine's devices. [`baton_engines::workers`] does it.

use std::sync::Arc;

use baton_engines::workers::server::worker_router;
use baton_engines::workers::session::{Lender, LenderOptions};
use tokio_util::sync::CancellationToken;

use super::door::{Behind, Door};
use super::event::Serves;
use super::failure::NodeFailure;
use super::options::NodeOptions;

/// Serves, once it is known what is lent.
pub(crate) async fn start(options: &NodeOptions, door: Door, stop: &CancellationToken) -> Result<Behind, NodeFailure> {
    let lender = lender(options).await?;
    let devices = lender.devices().into_iter().map(|device| device.name).collect();
    let router = worker_router(Arc::new(lender), door.cluster_key());
    let server = tokio::spawn(door.listener.serve(router, stop.clone()));
    Ok(Behind { server, serves: Serves::Devices(devices) })
}

/// Asks for the devices. Errors: there are none as configured.
pub(crate) async fn lender(options: &NodeOptions) -> Result<Lender, NodeFailure> {
    let lender = LenderOptions {
        program: std::env::current_exe().map_err(NodeFailure::setup)?,
        device: options.engine.device.clone(),
        threads: options.engine.threads,
        max_memory: options.lend_memory.map(|mib| u64::from(mib) << 20),
    };
    Lender::start(lender).await.map_err(NodeFailure::setup)
}
