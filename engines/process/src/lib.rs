//! Child processes, from their start to their end. All of Baton's children are kept here, and this crate knows no engine.
//!
//! ```text
//! parent                                     child
//! ChildCommand::spawn          ───────────►  parent::tie_to, tie_after: ends when its standard input does
//! ChildProcess::ready          ◄───────────  parent::tell: ready, or why not
//! ChildProcess::stop, or drop  ───────────►  standard input closes
//! Restarts: how long to wait before the next start
//! ```
//!
//! A child knows none of its parent's secrets unless it is given them, is in a process group of its own, and does not
//! outlive its parent.
//!
//! ```
//! use baton_process::ChildCommand;
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let script = r#"echo '{"event":"ready"}'; cat"#;
//! let mut child = ChildCommand::new("the example", "sh").args(["-c", script]).spawn().unwrap();
//! assert_eq!(child.ready().await.unwrap(), None, "it listens on no address");
//! child.stop().await;
//! # });
//! ```
//!
//! Rooms in reading order: [`ChildCommand`] starts a child, [`ChildProcess`] is one, [`CalledChild`] is one that a thread
//! calls by a socket, [`Restarts`] says when the next one may start. [`parent`] is the child's side.

mod called;
mod child;
mod command;
pub mod parent;
mod restarts;

pub use self::called::CalledChild;
pub use self::child::{ChildProcess, StartFailure};
pub use self::command::{ChildCommand, LOG_FORMAT_VARIABLE, log_children_as, remember_this_program};
pub use self::restarts::Restarts;
