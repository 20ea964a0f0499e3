//! HTTP/1.1 connections that no call uses.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::local::LocalConnection;

/// How long idle connections are kept. Shorter than most servers keep them.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Idle connections, the longest idle ones first.
pub(super) struct IdleConnections {
    max: usize,
    kept: Mutex<Vec<IdleConnection>>,
}

struct IdleConnection {
    connection: Box<LocalConnection>,
    since: Instant,
}

impl IdleConnections {
    /// Keeps at most `max` connections.
    pub(super) fn new(max: usize) -> IdleConnections {
        IdleConnections { max, kept: Mutex::new(Vec::new()) }
    }

    /// Takes the connection that was used last, if the server has not closed it.
    pub(super) fn take(&self) -> Option<Box<LocalConnection>> {
        loop {
            let mut found = {
                let mut kept = self.lock();
                close_expired(&mut kept);
                kept.pop()?
            };
            if found.connection.is_usable() {
                return Some(found.connection);
            }
        }
    }

    /// Keeps a connection whose reply has ended, if it can be used again and there is room.
    pub(super) fn put(&self, mut connection: Box<LocalConnection>) {
        if !connection.is_usable() {
            return;
        }
        let mut kept = self.lock();
        close_expired(&mut kept);
        if kept.len() < self.max {
            kept.push(IdleConnection { connection, since: Instant::now() });
        }
    }

    /// Closes the connections that were idle for too long.
    pub(super) fn close_expired(&self) {
        close_expired(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, Vec<IdleConnection>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes those that were idle for too long.
fn close_expired(kept: &mut Vec<IdleConnection>) {
    let n_expired = kept.iter().take_while(|idle| idle.since.elapsed() > IDLE_TIMEOUT).count();
    kept.drain(..n_expired);
}

impl std::fmt::Debug for IdleConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdleConnections").field("max", &self.max).finish_non_exhaustive()
    }
}
