//! The configuration: one file, flags over it, one check, then values that cannot be wrong.
//!
//! Flags win over the file, the file over the defaults. Every mistake is reported at once, in the file and in the flags.
//! Nothing reads the environment after start-up. A key is a field in `raw.rs`, with its flag if it has one;
//! `serve_config.rs` has its checked form. Options of engines are declared in [`baton_engines::engine_options`].

mod adoption;
mod changes;
mod defaults;
mod diagnose;
pub mod engine_options;
mod error;
mod file;
mod flags;
mod hint;
mod keys;
mod node_address;
mod on_demand_models;
mod problems;
mod raw;
mod raw_day;
mod schema;
mod serve_config;
pub mod state_folder;
mod text_file;
pub mod transport_args;
mod upstream;
mod wake;
mod written;

pub use self::adoption::{AdoptHost, AdoptionConfig, UpstreamAlias};
pub use self::changes::SettingsInForce;
pub use self::defaults::{API_KEY_VARIABLE, DEFAULT_LISTEN, DEFAULT_MODEL, OLLAMA_LISTEN, OWN_KEY_VARIABLE};
pub use self::error::{ConfigError, ConfigProblem, Mistakes};
pub use self::file::ConfigFile;
pub use self::flags::ConfigFlags;
pub use self::keys::{RawKey, hash_text};
pub use self::node_address::node_url;
pub use self::on_demand_models::{LoadingConfig, OnDemandModelConfig, RawOnDemandModel};
pub use self::raw::{RawConfig, RawDeadlines, RawModel, RawTracing};
pub use self::serve_config::{RoutingConfig, ServeConfig, StartupConfig};
pub use self::text_file::read_text;
pub use self::upstream::{RawUpstream, plain_upstream};
pub use self::wake::{NodeWake, RawWake};

#[cfg(test)]
mod tests;
