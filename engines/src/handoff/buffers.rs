//! Buffers of chunks, used again.
//!
//! Memory fresh from the system costs a page fault for every 4 KiB, which is more than copying the rows into it.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Buffers kept for later: as many as chunks are usually on their way. They outlive a handoff, so that the next one
/// finds them.
const MAX_KEPT: usize = 4;

/// Where buffers wait for their next use. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct ChunkBuffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl ChunkBuffers {
    /// A buffer that was used before, with what is in it, or an empty one.
    pub fn take(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Shares a buffer. It comes back when the last part of it is dropped.
    pub fn lend(&self, buffer: Vec<u8>) -> Bytes {
        Bytes::from_owner(LentBuffer { buffer, home: self.clone() })
    }

    /// Keeps a buffer for later, if there are not many already.
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
    fn a_buffer_comes_back_with_its_last_part() {
        let buffers = ChunkBuffers::default();
        let whole = buffers.lend(vec![1, 2, 3]);
        let part = whole.slice(1..2);
        drop(whole);
        assert!(buffers.take().is_empty(), "a part is still in use");
        drop(part);
        assert_eq!(buffers.take(), [1, 2, 3]);
        drop((0..10).map(|i| buffers.lend(vec![i])).collect::<Vec<_>>());
        assert_eq!(std::iter::from_fn(|| Some(buffers.take()).filter(|b| !b.is_empty())).count(), MAX_KEPT);
    }
}
