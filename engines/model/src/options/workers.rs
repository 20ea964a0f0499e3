//! Workers that compute a part of a model, as an engine reaches them.

use std::net::SocketAddr;

/// A worker that an engine reaches on loopback. `crate::workers` carries the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEndpoint {
    /// The worker's address as the operator wrote it, or `local`.
    pub name: String,
    /// Where ggml's RPC client connects to.
    pub endpoint: SocketAddr,
    /// Its devices, for people.
    pub devices: Vec<String>,
    /// Bytes of memory that it lends.
    pub memory: u64,
    /// True if it is a process of this machine, so that the memory is this machine's.
    pub is_local: bool,
    /// True if one of its devices is a processor.
    pub has_processor: bool,
}
