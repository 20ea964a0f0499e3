//! The calls of a node to a worker, a machine that lends its devices (docs/workers.md).
//!
//! | call | reply |
//! |---|---|
//! | `GET /node/v1/worker` | [`WorkerDescription`] |
//! | `GET /node/v1/worker/session` | an upgrade to [`SESSION_UPGRADE`], or a refusal |
//!
//! After the upgrade the connection carries the bytes of ggml's RPC protocol. Both calls need the cluster key. A
//! refusal of the session says why by its status: 401 the key, 426 the version, 503 another node uses the worker.

use serde::{Deserialize, Serialize};

/// The upgrade that opens a session.
pub const SESSION_UPGRADE: &str = "baton-worker";

/// The header with the [`WORKER_VERSION`] of the node that asks for a session.
pub const VERSION_HEADER: &str = "baton-worker-version";

/// The version of what a session carries. ggml's protocol has the numbers of its tensor operations, so this is raised
/// with each llama.cpp; a test of `engines/src/workers/` notices an update.
pub const WORKER_VERSION: u16 = 1;

/// The most devices that a description may have, and the most workers of a node: ggml's own limit of servers.
pub const MAX_WORKERS: usize = 16;

/// The name, in options too, of the worker that is a process of the node's own machine.
pub const LOCAL_WORKER: &str = "local";

/// The devices that a worker lends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerDescription {
    /// Its [`WORKER_VERSION`].
    pub version: u16,
    /// Its devices, in ggml's order.
    pub devices: Vec<LentDevice>,
    /// Bytes that it lends of each device's memory. `None`: all that is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory: Option<u64>,
    /// True while a node uses it.
    pub is_busy: bool,
}

/// A device that a worker lends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LentDevice {
    /// Its name and model, such as `CUDA0 (NVIDIA GB10)`.
    pub name: String,
    /// Its free memory when the worker started, bytes; 0 if unknown.
    pub memory: u64,
    /// True for a processor, false for a GPU.
    #[serde(default)]
    pub is_processor: bool,
}

/// A worker that computes a part of a node's model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerShare {
    /// The worker's address as the operator wrote it, or `local`.
    pub name: String,
    /// The devices that it lends, as [`LentDevice::name`].
    pub devices: Vec<String>,
    /// Layers that it computes. The output layer counts as one.
    pub layers: u32,
}
