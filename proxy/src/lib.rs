//! The Baton endpoint.
//!
//! Read [`generate::generate`] first: it is the life of a request. Everything else here is one of its stages, or the
//! life of the process around it. No model code runs in this crate: an engine is another process, reached as a node.

pub mod failover;
pub mod generate;

pub mod admission;
pub mod app;
pub mod cli;
pub mod config;
pub mod embed;
pub mod engine_args;
pub mod error;
pub mod http;
pub mod metrics;
pub mod models;
pub mod node_watch;
pub mod observe;
pub mod plan;
pub mod pool;
pub mod probe;
pub mod prompt;
pub mod residency;
pub mod socket_folder;
mod standing;
pub mod state;
pub mod stream;
pub mod supervisor;
pub mod telemetry;
pub mod tools;
pub mod transport_args;
pub mod upstream;
