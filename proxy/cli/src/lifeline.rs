//! A child and its parent: what the child tells, and how it ends when its parent is gone, however it went.
//!
//! The parent holds the other end of the child's standard input and never writes. That pipe is the portable way; on Linux
//! the kernel's parent-death signal also reaches a child that is stopped or stuck.

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use baton_schemas::node::ChildEvent;
use rustix::process::{Signal, getpid, kill_process};

use super::terminal;

/// How long a child may take to stop after the signal, before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// Sends this process `signal` when its parent is gone, after removing its socket, and kills it if that is not enough.
pub(super) fn tie_to_parent(signal: Signal, socket: Option<PathBuf>) {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(signal)) {
        tracing::debug!(%error, "no parent-death signal; the pipe will do");
    }
    let wait_for_end = move || {
        let mut nothing = [0; 64];
        // The parent never writes: any return but an interruption is its end.
        while std::io::stdin().read(&mut nothing).is_ok_and(|n| n > 0) {}
        if let Some(socket) = socket {
            // Best effort: whether it was there no longer matters.
            let _ = std::fs::remove_file(socket);
        }
        if kill_process(getpid(), signal).is_ok() {
            std::thread::sleep(GRACE);
        }
        if kill_process(getpid(), Signal::KILL).is_err() {
            std::process::abort();
        }
    };
    if std::thread::Builder::new().name("lifeline".into()).spawn(wait_for_end).is_err() {
        tracing::warn!("the thread that watches the parent cannot start; this process may outlive its parent");
    }
}

/// Standard output is the channel to the parent.
pub(super) fn tell_parent(event: &ChildEvent) {
    let written = serde_json::to_string(event).map_err(std::io::Error::from).and_then(terminal::print_line);
    if let Err(error) = written {
        tracing::error!(%error, "an event could not be written");
    }
}
