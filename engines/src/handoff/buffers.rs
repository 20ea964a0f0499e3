//! Reuses the buffers of chunks: fresh memory costs a page fault for every 4 KiB, which is more than copying rows into
//! it.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Buffers that are kept for reuse: the usual number of chunks in flight. They outlive a handoff.
const MAX_KEPT: usize = 4;

/// A pool of buffers. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ChunkBuffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl ChunkBuffers {
    /// A buffer from the pool, with its old content, or an empty one.
    pub fn take(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Shares a buffer, which returns to the pool when the last reference to it is dropped.
    pub fn lend(&self, buffer: Vec<u8>) -> Bytes {
        Bytes::from_owner(LentBuffer { buffer, home: self.clone() })
    }

    /// Returns a buffer to the pool, or frees it if the pool is full.
    pub fn put(&self, buffer: Vec<u8>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MAX_KEPT {
            kept.push(buffer);
        }
    }
}

struct LentBuffer {
    buffer: Vec<u8>,
    home: ChunkBuffers,
}

impl AsRef<[u8]> for LentBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        self.home.put(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_returns_when_its_last_reference_is_dropped() {
        let buffers = ChunkBuffers::default();
        let whole = buffers.lend(vec![1, 2, 3]);
        let part = whole.slice(1..2);
        drop(whole);
        assert!(buffers.take().is_empty(), "a slice is still in use");
        drop(part);
        assert_eq!(buffers.take(), [1, 2, 3]);
        drop((0..10).map(|i| buffers.lend(vec![i])).collect::<Vec<_>>());
        assert_eq!(std::iter::from_fn(|| Some(buffers.take()).filter(|b| !b.is_empty())).count(), MAX_KEPT);
    }
}
