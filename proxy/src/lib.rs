//! The Baton endpoint.
//!
//! Read [`request::generate::generate`] first: it is the life of a request. Everything else here is one of its stages,
//! or the life of the process around it. No model code runs in this crate: an engine is another process, reached as a
//! node.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use baton_proxy::config::ConfigFile;
//! use baton_proxy::serve::{CommandFailure, ConfigSource, Endpoint};
//!
//! # async fn serve() -> Result<(), CommandFailure> {
//! let read = |other: Option<&Path>| ConfigFile::read(other.unwrap_or(Path::new("baton.toml")))?.check(vec![]);
//! let config = read(None).map_err(|error| CommandFailure(error.to_string()))?;
//! let endpoint = Endpoint::start(config, ConfigSource { path: None, read: Arc::new(read) }).await?;
//! endpoint.finished().await
//! # }
//! ```

pub mod account;
pub mod admission;
mod arrived_drafts;
mod choice_clock;
pub mod config;
pub mod error;
pub mod http;
mod instance;
mod latency_buckets;
pub mod log_file;
pub mod log_queue;
pub mod log_target;
pub mod model_name;
pub mod observe;
pub mod reply_counts;
pub mod reply_event;
pub mod request;
pub mod serve;
pub mod targets;
mod token_gaps;
pub mod usage;
pub mod utc_day;
