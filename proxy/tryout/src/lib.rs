//! Tries on this machine what Baton does with several: nodes and endpoints as children of a command, and what is asked of
//! them.
//!
//! `baton demo` shows a handoff ([`demo::run`]), `baton doctor` prints the results of an [`examination`], `baton chat`
//! starts an endpoint of its own ([`endpoint_process`]), and `baton-bench` measures nodes ([`node_process`]). Nothing here
//! measures speed for its own sake: that is `baton-bench`, a program of its own above this crate.
//!
//! In reading order: the children ([`node_process`], [`endpoint_process`]), what they are asked ([`prompts`],
//! [`capture`]), then [`examination`] and [`demo`]. It may use the endpoint's public parts (`baton-proxy`), and neither the
//! command line nor the benchmarks.
//!
//! ```no_run
//! use baton_tryout::node_process::NodeProcess;
//!
//! # async fn start() -> Result<(), baton_proxy::serve::CommandFailure> {
//! let node = NodeProcess::start("key", ["--engine", "sim"].map(Into::into)).await?;
//! println!("a simulated engine listens on {}", node.url);
//! # Ok(())
//! # }
//! ```

pub mod endpoint_process;
pub mod node_process;
pub mod program;

#[cfg(feature = "llama")]
pub mod capture;
pub mod machines;
#[cfg(feature = "mlx")]
pub mod mlx_folder;
pub mod prompts;
pub mod stats;

pub mod demo;
#[cfg(feature = "llama")]
pub mod examination;
