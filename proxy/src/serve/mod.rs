//! Assembles a running endpoint from its configuration: its own engines' processes, nodes elsewhere, upstreams,
//! HTTP servers, and the reload of a changed file. Reads no command line and prints nothing; `baton serve` does both.

mod adoption;
mod cluster_models;
mod cluster_nodes;
mod config_in_force;
mod config_source;
mod discovery;
mod endpoint;
mod endpoint_url;
mod failure;
mod first_start;
mod lending;
mod local_files;
pub mod model_files;
pub mod model_names;
pub mod models_folder;
mod on_demand_models;
mod own_models;
mod planning;
mod primary_model;
mod reload;
mod remote_nodes;
mod removed_keys;
pub mod request_service;
pub mod service_manager;
pub mod signals;
mod socket_folder;
pub mod store_secret;
mod supervisor;
mod usage_ledger;

pub use self::adoption::{
    FoundModel, ProbeOutcome, ServerFound, ServerPlace, ServerProgram, ServerSeen, look_for_servers,
};
pub use self::config_in_force::changes_between;
pub use self::config_source::{ConfigSource, ReadConfig};
pub use self::discovery::look_around;
pub use self::endpoint::{DRAIN_DEADLINE, Endpoint, ReadyEndpoint, check_start};
pub use self::endpoint_url::endpoint_url;
pub use self::failure::CommandFailure;
pub use self::lending::LENDING_ENGINE;
pub use self::local_files::{problems as local_problems, store_key_problem};
pub use self::model_files::mlx_environment;
pub use self::supervisor::THREAD_WAIT;
