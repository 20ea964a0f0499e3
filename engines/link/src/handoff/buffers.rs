//! Reuses the buffers of chunks: fresh memory costs a page fault for every 4 KiB, which is more than copying rows into
//! it.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Buffers that are kept for reuse: the usual number of chunks in flight. They outlive a handoff.
const MAX_KEPT: usize = 4;

/// The buffers of chunks that arrive.
pub type ChunkBuffers = BufferPool<Vec<u8>>;

/// A pool of buffers. Clones share it.
#[derive(Debug)]
pub struct BufferPool<B>(Arc<Mutex<Vec<B>>>);

impl<B> Default for BufferPool<B> {
    fn default() -> Self {
        BufferPool(Arc::default())
    }
}

impl<B> Clone for BufferPool<B> {
    fn clone(&self) -> Self {
        BufferPool(Arc::clone(&self.0))
    }
}

impl<B> BufferPool<B> {
    /// A buffer from the pool, with its old content. `None`: all are in use.
    pub fn take(&self) -> Option<B> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Returns a buffer to the pool, or frees it if the pool is full.
    pub fn put(&self, buffer: B) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MAX_KEPT {
            kept.push(buffer);
        }
    }
}

impl<B: AsRef<[u8]> + Send + 'static> BufferPool<B> {
    /// Shares a buffer, which returns to the pool when the last reference to it is dropped.
    pub fn lend(&self, buffer: B) -> Bytes {
        Bytes::from_owner(LentBuffer { buffer: Some(buffer), home: self.clone() })
    }
}

struct LentBuffer<B> {
    /// Always there, until it is dropped.
    buffer: Option<B>,
    home: BufferPool<B>,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for LentBuffer<B> {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map(B::as_ref).unwrap_or_default()
    }
}

impl<B> Drop for LentBuffer<B> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.home.put(buffer);
        }
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
        assert!(buffers.take().is_none(), "a slice is still in use");
        drop(part);
        assert_eq!(buffers.take(), Some(vec![1, 2, 3]));
        drop((0..10).map(|i| buffers.lend(vec![i])).collect::<Vec<_>>());
        assert_eq!(std::iter::from_fn(|| buffers.take()).count(), MAX_KEPT);
    }
}
