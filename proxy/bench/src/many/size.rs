//! The size of a cluster and of its load.

use serde::Serialize;

/// The streams that an endpoint has on one node at most: a connection carries 4,096, of which some stay free.
pub(super) const MAX_STREAMS_OF_NODE: u32 = 4_000;

/// The endpoints, nodes and streams of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct CellSize {
    pub(super) n_endpoints: u32,
    pub(super) n_nodes: u32,
    /// Streams of all endpoints together.
    pub(super) n_streams: u32,
}

impl CellSize {
    /// For reports.
    pub(super) fn name(&self) -> String {
        let CellSize { n_endpoints, n_nodes, n_streams } = self;
        format!("{n_endpoints} endpoints, {n_nodes} nodes, {n_streams} streams")
    }
}
