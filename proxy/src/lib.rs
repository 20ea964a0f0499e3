//! The Baton endpoint.
//!
//! Read [`request::generate::generate`] first: it is the life of a request. Everything else here is one of its stages,
//! or the life of the process around it. No model code runs in this crate: an engine is another process, reached as a
//! node.

pub mod account;
mod choice_clock;
pub mod config;
pub mod error;
pub mod http;
pub mod log_target;
pub mod model_name;
pub mod observe;
pub mod reply_event;
pub mod request;
pub mod serve;
pub mod targets;
