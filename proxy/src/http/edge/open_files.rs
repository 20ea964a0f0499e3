//! The number of connections that the process may hold.
//!
//! Each connection takes a file descriptor, and a stream takes a second one for its engine. The limit of a shell is
//! often 1,024 (256 on macOS), but a process may raise its own far beyond that.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The requested limit of descriptors. macOS refuses more than 10,240.
const WANTED: u64 = if cfg!(target_os = "macos") { 10_240 } else { 32_768 };

/// Descriptors reserved for model files, logs and pipes to the engine.
const RESERVED: u64 = 64;

/// The minimum number of connections, even if the limit is so low that some accepts will fail.
const LEAST: u64 = 64;

/// Raises the process's limit of open files as far as is useful and allowed. Child processes inherit it.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(WANTED, |maximum| maximum.min(WANTED));
    if current.is_some_and(|current| current < wanted) {
        let limit = Rlimit { current: Some(wanted), maximum };
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!(%error, "raising the limit of open files failed; the old limit stays");
        }
    }
}

/// Returns how many connections may be open at once, each with another one to an engine.
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
