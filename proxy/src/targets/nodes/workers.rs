//! The workers of a node, as the endpoint shows them.

use baton_schemas::node::NodeInfo;
use baton_schemas::worker::LOCAL_WORKER;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A worker that computes a part of a node's model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerReport {
    /// `worker-1`, `worker-2`, in the order of the node's option, or `local` for a process of the node's machine.
    pub name: String,
    /// Its address; only for operators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The devices that it lends.
    pub devices: Vec<String>,
    /// Layers that it computes. The output counts as one.
    pub layers: u32,
}

impl WorkerReport {
    /// The workers of a node.
    pub fn of(info: &NodeInfo, with_address: bool) -> Vec<WorkerReport> {
        let report = |(i, worker): (usize, &baton_schemas::worker::WorkerShare)| WorkerReport {
            name: match worker.name.as_str() {
                LOCAL_WORKER => LOCAL_WORKER.to_owned(),
                _ => format!("worker-{}", i + 1),
            },
            address: with_address.then(|| worker.name.clone()),
            devices: worker.devices.clone(),
            layers: worker.layers,
        };
        info.workers.iter().enumerate().map(report).collect()
    }
}
