//! Workers: machines that lend their devices to a node, which computes one model with all of them (docs/workers.md).
//!
//! llama.cpp divides the layers; ggml's RPC protocol carries tensors and graphs. That protocol authenticates nobody,
//! its server trusts every byte, and its client ends the process on any failure. So it runs on loopback alone, between
//! processes that are made for it, and crosses the network inside a connection of the node protocol:
//!
//! ```text
//! engine's process                          worker's node                     child of one session
//! llama.cpp ─ loopback ─ tunnel ═ key, TLS ═ server ─ session ─ loopback ─ ggml's RPC server
//! ```
//!
//! [`tunnel`] is the end at the engine: it opens sessions, divides the layers, and notices workers that are lost.
//! [`server`] is a worker's node: one session at a time, each in a child that ends with it ([`session`]). [`child`] is
//! that child.

pub mod child;
mod pipe;
mod rpc_commands;
mod rpc_exchange;
pub mod server;
pub mod session;
pub mod tunnel;

#[cfg(test)]
mod tests {
    use baton_schemas::worker::WORKER_VERSION;

    /// A version of the protocol, and the binding whose llama.cpp has it.
    const VERSION_OF: (u16, &str) = (1, "0.1.161");

    #[test]
    fn the_version_is_raised_with_each_llama_cpp() {
        let lock = include_str!("../../../Cargo.lock");
        let package = lock.split("[[package]]").find(|package| package.contains("name = \"llama-cpp-sys-2\"")).unwrap();
        let (version, binding) = VERSION_OF;
        let is_known = package.contains(&format!("version = \"{binding}\"")) && version == WORKER_VERSION;
        assert!(is_known, "llama.cpp is another: compare commands.rs with its ggml-rpc.cpp, and raise WORKER_VERSION");
    }
}
