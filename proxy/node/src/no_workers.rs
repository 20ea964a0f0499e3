//! The workers of a build without llama.cpp: none.

use baton_engines::registry::EngineStartError;
use baton_link::transport::Transport;
use baton_model::options::WorkerEndpoint;
use baton_proxy::config::transport_args::TransportArgs;
use baton_schemas::node::NodeInfo;

use super::event::Tell;
use super::failure::NodeFailure;
use super::options::WantedEngine;

pub(crate) struct ConnectedWorkers {
    pub(crate) endpoints: Vec<WorkerEndpoint>,
}

impl ConnectedWorkers {
    pub(crate) fn blamed(&self, error: EngineStartError) -> NodeFailure {
        error.into()
    }

    pub(crate) fn check(&self, _info: Option<&NodeInfo>) -> Result<(), NodeFailure> {
        Ok(())
    }
}

pub(crate) async fn connect(
    _engine: WantedEngine<'_>,
    _addresses: &TransportArgs,
    _key: &str,
    _transport: Transport,
    _tell: Tell,
) -> Result<ConnectedWorkers, NodeFailure> {
    Ok(ConnectedWorkers { endpoints: Vec::new() })
}
