//! `baton node`: starts a node with an engine, or a worker, which lends its devices to such a node.
//!
//! The endpoint's counterpart is `baton_proxy::serve`. The command line makes [`NodeOptions`] of its flags and prints
//! [`NodeEvent`]s; it decides nothing.
//!
//! ```text
//! way to run   tied to its parent     tells its parent   announces itself   on a signal
//! Alone        no                     no                 yes                stops
//! Keeper       no; has a child, Kept  no                 no                 passes it on to its child
//! Kept         SIGTERM                yes                yes                stops
//! Child        SIGKILL (1)            yes                no                 nothing: its endpoint drains first
//!
//! (1) if the parent lives, after KV was stored
//! ```
//!
//! Rooms in reading order: `options` (what is asked for, and its mistakes), `start` (a running node), `door` (key,
//! certificate and address, the same for all), `end` (what stops it, and what it writes then), `engine_node` and `worker_node` (what is behind it), `models` (the model files on this machine), `workers` (the
//! machines that an engine computes with), `sleep` (after an idle time), `keeper` (the child that is started again), [`lend`] (a worker's child), [`render`] (an
//! engine's child, for its chat template).

mod door;
mod end;
mod engine_node;
mod event;
mod failure;
mod keeper;
#[cfg(feature = "llama")]
pub mod lend;
mod models;
mod options;
mod program_again;
pub mod render;
mod sleep;
mod start;
#[cfg(feature = "llama")]
mod worker_node;
#[cfg_attr(not(feature = "llama"), path = "no_workers.rs")]
mod workers;

pub use self::event::{NodeEvent, ReadyNode, Serves, Tell};
pub use self::keeper::keep;
pub use self::options::{CertificateFiles, NodeOptions, NodeTask, WayToRun};
pub use self::program_again::with_bounded_spinning;
pub use self::sleep::{IdleTime, SleepSettings};
pub use self::start::{RunningNode, check, start};
