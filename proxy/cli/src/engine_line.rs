//! The line of a ready message that says how large an engine is.

use baton_schemas::counted::counted;
use baton_schemas::node::NodeInfo;

/// An engine's context and slots, and the memory that it takes.
pub(super) fn engine_line(info: &NodeInfo) -> String {
    let size = format!("a context of {}, {}", counted(info.n_ctx, "token"), counted(info.n_slots, "slot"));
    let mib = |bytes: u64| bytes >> 20;
    match info.memory.bytes() {
        // The simulator.
        0 => size,
        _ => format!(
            "{size}; {} MiB of weights, and {} MiB of KV cache for all slots together",
            mib(info.memory.model),
            mib(info.memory.kv)
        ),
    }
}
