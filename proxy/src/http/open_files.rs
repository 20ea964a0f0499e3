//! How many connections the process may hold.
//!
//! Each takes a file descriptor, and a stream takes a second one to its engine. The limit that a shell gives a process
//! is often 1,024 (256 on macOS); what the system would allow is far more, and only has to be asked for.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that are asked for. macOS refuses more than 10,240.
const WANTED: u64 = if cfg!(target_os = "macos") { 10_240 } else { 32_768 };

/// Descriptors for everything but connections: model files, logs, pipes to the engine.
const RESERVED: u64 = 64;

/// Connections that are held even where the limit is so low that some accepts will fail.
const LEAST: u64 = 64;

/// Raises the process's limit as far as is useful and allowed. Children inherit it.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(WANTED, |maximum| maximum.min(WANTED));
    if current.is_some_and(|current| current < wanted) {
        let limit = Rlimit { current: Some(wanted), maximum };
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!(%error, "the limit of open files stays as it is");
        }
    }
}

/// Connections that may be open at once, each with another one to an engine.
pub fn max_connections() -> usize {
    let current = getrlimit(Resource::Nofile).current.unwrap_or(WANTED).min(WANTED);
    (current.saturating_sub(RESERVED) / 2).max(LEAST) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_their_engines() {
        raise_limit();
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let n = max_connections() as u64;
        assert!(n >= LEAST && (2 * n <= limit || n == LEAST), "{n} of {limit}");
    }
}
