//! [`WholeBlob`]: a sequence that llama.cpp can import in place of another.

/// A whole state of a compressed cache: consecutive positions from 0, all rows that these complete, and finite values.
pub(in crate::llama) struct WholeBlob(Vec<u8>);

impl WholeBlob {
    /// Only for [`super::write`], which checks what it writes.
    pub(super) fn written(bytes: Vec<u8>) -> WholeBlob {
        WholeBlob(bytes)
    }

    pub(in crate::llama) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
