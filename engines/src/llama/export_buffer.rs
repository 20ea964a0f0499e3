//! The memory that chunks of KV are exported to.
//!
//! A GPU copies to pinned memory by itself, as fast as its bus allows. To other memory its driver copies by way of pinned
//! memory of its own, piece by piece. A chunk stays in its buffer until it is sent, so that hashing, encoding and sending it
//! overlap with computing the next one. Only the copy itself holds up the context.

use super::state::{PinnedMemory, StateBuffer};

/// Pinned memory is allocated in multiples of this, because each allocation takes milliseconds.
const STEP: usize = 1 << 20;

/// A buffer that grows as needed.
pub(super) struct ExportBuffer {
    /// ggml's index of the device whose pinned memory is used, if it has any.
    device: Option<usize>,
    memory: BufferMemory,
    n_bytes: usize,
}

enum BufferMemory {
    Heap(Vec<u8>),
    Pinned(PinnedMemory),
}

impl ExportBuffer {
    /// An empty buffer, in memory that is pinned for this device.
    pub(super) fn new(device: Option<usize>) -> Self {
        ExportBuffer { device, memory: BufferMemory::Heap(Vec::new()), n_bytes: 0 }
    }

    fn capacity(&self) -> usize {
        match &self.memory {
            BufferMemory::Heap(bytes) => bytes.capacity(),
            BufferMemory::Pinned(memory) => memory.bytes().len(),
        }
    }

    fn grow(&mut self, n_bytes: usize) {
        let pinned = self.device.and_then(|device| PinnedMemory::allocate(device, n_bytes.next_multiple_of(STEP)));
        match (pinned, &self.memory) {
            (Some(pinned), _) => self.memory = BufferMemory::Pinned(pinned),
            // There is no more of it, or none at all.
            (None, BufferMemory::Pinned(_)) => self.memory = BufferMemory::Heap(Vec::new()),
            (None, BufferMemory::Heap(_)) => {}
        }
    }

    /// Returns true if the device can copy to it by itself.
    #[cfg(test)]
    pub(super) fn is_pinned(&self) -> bool {
        matches!(self.memory, BufferMemory::Pinned(_))
    }
}

impl StateBuffer for ExportBuffer {
    /// The bytes are those of an earlier export, or zeros.
    fn resize(&mut self, n_bytes: usize) -> &mut [u8] {
        self.n_bytes = n_bytes;
        if n_bytes > self.capacity() {
            self.grow(n_bytes);
        }
        let all = match &mut self.memory {
            BufferMemory::Heap(bytes) => {
                if bytes.len() < n_bytes {
                    bytes.resize(n_bytes, 0);
                }
                &mut bytes[..]
            }
            BufferMemory::Pinned(memory) => memory.bytes_mut(),
        };
        &mut all[..n_bytes]
    }
}

impl AsRef<[u8]> for ExportBuffer {
    fn as_ref(&self) -> &[u8] {
        let all = match &self.memory {
            BufferMemory::Heap(bytes) => bytes,
            BufferMemory::Pinned(memory) => memory.bytes(),
        };
        &all[..self.n_bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::devices;

    #[test]
    fn a_buffer_has_the_length_asked_for_in_either_memory() {
        let gpu = devices::first_gpu(None, None).unwrap();
        for device in [None, gpu, Some(usize::MAX)] {
            let mut buffer = ExportBuffer::new(device);
            for n_bytes in [0, 3, STEP + 1, 5, 2 * STEP] {
                buffer.resize(n_bytes).fill(n_bytes as u8);
                assert_eq!(buffer.as_ref().len(), n_bytes);
                assert!(buffer.as_ref().iter().all(|byte| *byte == n_bytes as u8));
            }
            assert_eq!(buffer.is_pinned(), device.is_some() && device == gpu);
        }
    }
}
