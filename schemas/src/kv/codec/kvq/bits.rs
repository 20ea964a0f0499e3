//! Streams of bits. The first bit is the lowest of the first byte.

use super::KvqError;

/// Writes bits.
#[derive(Default)]
pub(super) struct BitWriter {
    /// The stream and room for more.
    bytes: Vec<u8>,
    n_bytes: usize,
    /// Bits that are not in `bytes` yet. Fewer than 8 after a flush.
    pending: u64,
    n_pending: u32,
}

impl BitWriter {
    /// Makes room for `n` more bits. Bits without room are lost.
    pub(super) fn reserve(&mut self, n: usize) {
        let needed = self.n_bytes + n / 8 + 16;
        if self.bytes.len() < needed {
            self.bytes.resize(needed, 0);
        }
    }

    /// Appends the lowest `n` bits of `bits`. The others must be 0. At most 56 bits may be added from one
    /// [`BitWriter::flush`] to the next.
    #[inline]
    pub(super) fn add(&mut self, bits: u64, n: u32) {
        self.pending |= bits << self.n_pending;
        self.n_pending += n;
    }

    /// Moves all whole bytes into the stream.
    #[inline]
    pub(super) fn flush(&mut self) {
        debug_assert!(self.n_bytes + 8 <= self.bytes.len(), "no room was made");
        if let Some(word) = self.bytes.get_mut(self.n_bytes..self.n_bytes + 8) {
            word.copy_from_slice(&self.pending.to_le_bytes());
        }
        self.n_bytes += (self.n_pending >> 3) as usize;
        self.pending >>= self.n_pending & !7;
        self.n_pending &= 7;
    }

    /// Pads the last byte with zeros, returns the stream, and starts a new one in the same memory.
    pub(super) fn finish(&mut self, out: impl FnOnce(&[u8])) {
        self.reserve(64);
        self.flush();
        let n_last = usize::from(self.n_pending > 0);
        self.bytes[self.n_bytes] = self.pending as u8;
        out(&self.bytes[..self.n_bytes + n_last]);
        self.n_bytes = 0;
        self.pending = 0;
        self.n_pending = 0;
    }
}

/// Reads bits. After the end it reads zeros, and [`BitReader::finish`] reports it, so that no read needs a check.
#[derive(Clone, Copy)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    /// Bytes that were taken, also past the end.
    n_taken: usize,
    bits: u64,
    n_bits: u32,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        BitReader { bytes, n_taken: 0, bits: 0, n_bits: 0 }
    }

    /// Makes at least 56 bits ready.
    #[inline]
    pub(super) fn refill(&mut self) {
        let next = match self.bytes.get(self.n_taken..self.n_taken + 8) {
            Some(bytes) => u64::from_le_bytes(bytes.try_into().unwrap_or_default()),
            None => near_the_end(self.bytes, self.n_taken),
        };
        self.bits |= next << self.n_bits;
        // As many whole bytes as there was room for.
        self.n_taken += ((63 - self.n_bits) >> 3) as usize;
        self.n_bits |= 56;
    }

    /// The next bits. The lowest `n` are valid after a refill, as long as no more than 56 were taken since.
    #[inline]
    pub(super) fn peek(&self) -> u64 {
        self.bits
    }

    /// Skips `n` bits that are ready.
    #[inline]
    pub(super) fn skip(&mut self, n: u32) {
        self.bits >>= n;
        self.n_bits -= n;
    }

    /// Takes `n` bits that are ready, at most 32.
    #[inline]
    pub(super) fn take(&mut self, n: u32) -> u32 {
        let taken = (self.bits & ((1 << n) - 1)) as u32;
        self.skip(n);
        taken
    }

    /// Checks that exactly the stream was read: all of its bytes, and zeros after its last bit.
    pub(super) fn finish(self) -> Result<(), KvqError> {
        let n_read = 8 * self.n_taken as u64 - u64::from(self.n_bits);
        let whole = n_read.div_ceil(8) == self.bytes.len() as u64;
        let padding = self.bytes.last().map_or(0, |last| u64::from(*last) >> (n_read % 8));
        match whole && (n_read.is_multiple_of(8) || padding == 0) {
            true => Ok(()),
            false => Err(KvqError::StreamLength { n_bytes: self.bytes.len(), n_bits: n_read }),
        }
    }
}

/// The bytes of `stream` from `n_taken` on, and zeros.
#[cold]
fn near_the_end(stream: &[u8], n_taken: usize) -> u64 {
    let rest = stream.get(n_taken..).unwrap_or_default();
    let mut bytes = [0; 8];
    bytes[..rest.len()].copy_from_slice(rest);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        let fields: Vec<(u32, u32)> =
            (0..500u32).map(|i| (i.wrapping_mul(0x9E37_79B9) >> (32 - (i % 28 + 1)), i % 28 + 1)).collect();
        let mut writer = BitWriter::default();
        let mut stream = Vec::new();
        writer.reserve(32 * fields.len());
        for (bits, n) in &fields {
            writer.add(u64::from(*bits), *n);
            writer.flush();
        }
        writer.finish(|bytes| stream.extend_from_slice(bytes));
        let read = |stream: &[u8], n_fields: usize| {
            let mut reader = BitReader::new(stream);
            let same = fields.iter().take(n_fields).all(|(bits, n)| {
                reader.refill();
                reader.take(*n) == *bits
            });
            (same, reader.finish())
        };
        assert_eq!(read(&stream, 500), (true, Ok(())));
        assert!(read(&stream, 490).1.is_err(), "a rest");
        assert!(read(&stream[..stream.len() - 1], 500).1.is_err(), "a missing byte");
        let longer = [&stream[..], &[0]].concat();
        assert!(read(&longer, 500).1.is_err(), "a byte too many");
        writer.add(1, 1);
        writer.finish(|bytes| assert_eq!(bytes, [1], "a new stream"));
        let mut padded = BitReader::new(&[0b11]);
        padded.refill();
        padded.skip(1);
        assert!(padded.finish().is_err(), "padding that is not zero");
    }
}
