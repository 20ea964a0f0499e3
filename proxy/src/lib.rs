//! The Baton endpoint.
//!
//! Read [`generate::generate`] first: it is the life of a request. Everything else here is one of its stages, or the
//! life of the process around it. No model code runs in this crate: an engine is another process, reached as a node.

pub mod error;
pub mod generate;
pub mod http;
pub mod models;
pub mod stream;
