//! The rows of a plain frame, received at their places in the importer's buffer.

use crate::kv::finite::all_finite;
use crate::kv::frame::Span;
use crate::kv::layout::{Dtype, KvLayout};
use crate::kv::mac::RecordMac;
use crate::kv::placement::Places;

/// The number of bytes that arrive before they are hashed and checked. Small enough to stay in the core's cache, large
/// enough for one read from a socket, and for BLAKE3 to process many of its 1 KiB chunks at once. Of quantized rows, as
/// many whole blocks as fit.
const BLOCK: usize = 128 << 10;

/// Rows that are being received.
pub(in crate::kv) struct IncomingRows {
    buffer: Vec<u8>,
    places: Places,
    dtypes: Vec<Dtype>,
    /// The index of the tensor that is being received.
    tensor: usize,
    /// The place in the buffer of the tensor's next byte.
    filled: usize,
    /// The place up to which the tensor's bytes are hashed and checked.
    settled: usize,
    /// The first tensor with a value that is not finite. Reported only if the MAC is right: otherwise the MAC is the
    /// error.
    not_finite: Option<usize>,
}

impl IncomingRows {
    /// Prepares to receive the rows of `span` at `places` of `buffer`, where they fit.
    pub(super) fn new(span: &Span, layout: &KvLayout, places: Places, buffer: Vec<u8>) -> Self {
        let mut rows = IncomingRows {
            buffer,
            dtypes: span.tensors(layout).map(|(rows, _)| rows.dtype).collect(),
            places,
            tensor: 0,
            filled: 0,
            settled: 0,
            not_finite: None,
        };
        rows.go_to(0);
        rows
    }

    /// The room for the next bytes, at their place in the buffer. Empty if all rows have arrived.
    pub(super) fn space(&mut self) -> &mut [u8] {
        let end = self.settles_at();
        &mut self.buffer[self.filled..end]
    }

    /// Takes the first `n_bytes` of the room as received.
    pub(super) fn filled(&mut self, n_bytes: usize, mac: &mut RecordMac) {
        let Some(end) = self.places.tensors.get(self.tensor).map(|place| place.end) else { return };
        let settles_at = self.settles_at();
        self.filled = (self.filled + n_bytes).min(settles_at);
        if self.filled == settles_at {
            self.settle(mac);
        }
        if self.filled == end {
            self.go_to(self.tensor + 1);
        }
    }

    /// The place in the buffer at which the bytes before it are next hashed and checked.
    fn settles_at(&self) -> usize {
        let whole = |dtype: &Dtype| BLOCK - BLOCK % dtype.block_bytes();
        let next = self.places.tensors.get(self.tensor).zip(self.dtypes.get(self.tensor));
        next.map_or(self.filled, |(place, dtype)| place.end.min(self.settled + whole(dtype)))
    }

    /// Returns the buffer and its layout. Errors: the index of a tensor with a value that is not finite.
    pub(super) fn finish(self) -> Result<(Vec<u8>, Places), usize> {
        match self.not_finite {
            None => Ok((self.buffer, self.places)),
            Some(tensor) => Err(tensor),
        }
    }

    /// Hashes and checks the bytes that have arrived.
    fn settle(&mut self, mac: &mut RecordMac) {
        let block = &self.buffer[self.settled..self.filled];
        mac.update(block);
        if self.not_finite.is_none() && !all_finite(self.dtypes[self.tensor], block) {
            self.not_finite = Some(self.tensor);
        }
        self.settled = self.filled;
    }

    /// Moves to the first tensor at or after `tensor` that has rows.
    fn go_to(&mut self, tensor: usize) {
        let rest = self.places.tensors.iter().skip(tensor);
        self.tensor = tensor + rest.take_while(|place| place.is_empty()).count();
        self.filled = self.places.tensors.get(self.tensor).map_or(0, |place| place.start);
        self.settled = self.filled;
    }
}
