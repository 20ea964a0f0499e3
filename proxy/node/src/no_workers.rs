//! The workers of a build without llama.cpp: none.

use baton_engines::engine_options::WrittenOptions;
use baton_engines::registry::EngineStartError;
use baton_link::transport::Transport;
use baton_model::options::WorkerEndpoint;
use baton_proxy::config::transport_args::TransportArgs;

use super::event::Tell;
use super::failure::NodeFailure;

pub(crate) struct ConnectedWorkers {
    pub(crate) endpoints: Vec<WorkerEndpoint>,
}

impl ConnectedWorkers {
    pub(crate) fn blamed(&self, error: EngineStartError) -> NodeFailure {
        error.into()
    }
}

pub(crate) async fn connect(
    _options: &WrittenOptions,
    _addresses: &TransportArgs,
    _key: &str,
    _transport: Transport,
    _tell: Tell,
) -> Result<ConnectedWorkers, NodeFailure> {
    Ok(ConnectedWorkers { endpoints: Vec::new() })
}
