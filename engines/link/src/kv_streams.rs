//! Counts the streams of KV that this process sends or receives, so that transfers of model files give way: a prompt waits
//! for its KV, and nobody waits for a file.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Of the whole process, as its network is.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// Bytes of model files in a second while KV moves: little beside a link of 1 Gb/s, and enough that no deadline ends the transfer.
const BESIDE_KV: u64 = 4 << 20;

/// A stream of KV, until it is dropped.
pub(crate) struct KvStreamOpen(());

impl KvStreamOpen {
    pub(crate) fn new() -> KvStreamOpen {
        OPEN.fetch_add(1, Ordering::Relaxed);
        KvStreamOpen(())
    }
}

impl Drop for KvStreamOpen {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How long a transfer of a model's file rests after so many bytes: not at all while no KV moves.
pub fn pause_after(n_bytes: u64) -> Duration {
    pause_beside(OPEN.load(Ordering::Relaxed), n_bytes)
}

fn pause_beside(n_streams: usize, n_bytes: u64) -> Duration {
    match n_streams {
        0 => Duration::ZERO,
        _ => Duration::from_secs_f64(n_bytes as f64 / BESIDE_KV as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_give_way_while_kv_moves() {
        // Other tests may move KV meanwhile, so the count is only compared from below.
        let _open = KvStreamOpen::new();
        assert_eq!(pause_after(BESIDE_KV), Duration::from_secs(1));
        assert_eq!(pause_beside(0, BESIDE_KV), Duration::ZERO);
    }
}
