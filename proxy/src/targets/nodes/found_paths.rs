//! The addresses of a node that was found in the network.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_link::remote::NodePaths;
use baton_schemas::handoff::KvSource;

/// The addresses of a node that was found in the network. Clones are the same.
#[derive(Debug, Clone)]
pub struct FoundPaths {
    process: Arc<AtomicU64>,
    /// What it announces, or a stranger in its name: each other node reaches some of these.
    pub paths: NodePaths,
    /// Where it has proven the cluster key to this endpoint.
    pub proven: NodePaths,
}

impl FoundPaths {
    /// The announced and the proven addresses of the process that has proven the cluster key.
    pub fn new(process: u64, paths: NodePaths, proven: NodePaths) -> FoundPaths {
        FoundPaths { process: Arc::new(AtomicU64::new(process)), paths, proven }
    }

    /// The node was started again: this process has proven the key now.
    pub fn set_process(&self, process: u64) {
        self.process.store(process, Ordering::Relaxed);
    }

    /// The same source of KV, at these addresses.
    pub(super) fn source(&self, source: KvSource) -> KvSource {
        KvSource { paths: self.paths.addresses(), process: self.process.load(Ordering::Relaxed), ..source }
    }
}
