//! The places of a frame's tensors in the buffer that receives them.

use std::ops::Range;

use super::frame::Span;
use super::layout::KvLayout;

/// The length of a buffer, and each tensor's range in it, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The length of the buffer. The importer must write the bytes outside of the tensors: they hold zeros, or data of
    /// an earlier frame.
    pub n_bytes: usize,
    /// The tensors' ranges, in the order of [`Span::tensors`]. They may be anywhere in the buffer.
    pub tensors: Vec<Range<usize>>,
}

/// Lays out the buffer for a frame. An importer that needs the rows in another form, such as the blob that llama.cpp
/// reads, lets the reader write them there as they arrive, and need not copy them.
///
/// The span comes from a peer. It was checked against the layout and the requested range, so its size is bounded. It is
/// not authenticated yet, so only memory may depend on it.
pub trait Placement {
    /// Returns the layout of the buffer for the rows of `span`.
    fn place(&mut self, span: &Span, layout: &KvLayout) -> Places;
}

/// Places one tensor after the other, without gaps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contiguous;

impl Placement for Contiguous {
    fn place(&mut self, span: &Span, layout: &KvLayout) -> Places {
        let mut n_bytes = 0;
        let tensors = span.tensors(layout).map(|(_, len)| {
            n_bytes += len;
            n_bytes - len..n_bytes
        });
        let tensors = tensors.collect();
        Places { n_bytes, tensors }
    }
}

impl<F: FnMut(&Span, &KvLayout) -> Places> Placement for F {
    fn place(&mut self, span: &Span, layout: &KvLayout) -> Places {
        self(span, layout)
    }
}

impl Places {
    /// Returns true if the rows of `span` fit: every tensor has its length, and no tensors overlap.
    pub(super) fn fit(&self, span: &Span, layout: &KvLayout) -> bool {
        let lengths = span.tensors(layout).map(|(_, len)| Some(len));
        let inside = |range: &Range<usize>| range.end <= self.n_bytes;
        if !self.tensors.iter().map(|range| range.end.checked_sub(range.start)).eq(lengths) {
            return false;
        }
        let mut sorted: Vec<_> = self.tensors.iter().filter(|range| !range.is_empty()).collect();
        sorted.sort_by_key(|range| range.start);
        self.tensors.iter().all(inside) && sorted.is_sorted_by(|a, b| a.end <= b.start)
    }

    /// The bytes of each tensor in a buffer of `n_bytes`. The rows of a frame must [fit](Places::fit).
    pub(super) fn split<'a>(&self, mut buffer: &'a mut [u8]) -> Vec<&'a mut [u8]> {
        let mut in_order: Vec<usize> = (0..self.tensors.len()).collect();
        in_order.sort_by_key(|tensor| (self.tensors[*tensor].start, self.tensors[*tensor].end));
        let mut parts: Vec<&mut [u8]> = self.tensors.iter().map(|_| Default::default()).collect();
        let mut n_passed = 0;
        for tensor in in_order {
            let Range { start, end } = self.tensors[tensor];
            if start < end {
                let (_, rest) = std::mem::take(&mut buffer).split_at_mut(start - n_passed);
                (parts[tensor], buffer) = rest.split_at_mut(end - start);
                n_passed = end;
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::layout::{Dtype, LayerShape, RopePairing, Rows, Section};

    #[test]
    fn places_fit_if_every_tensor_has_its_own_bytes() {
        let rows = Rows { dtype: Dtype::F16, n_values: 4 };
        let layers = vec![LayerShape { k: rows, v: Some(rows) }];
        let layout = KvLayout {
            rope: RopePairing::None,
            sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
            states: Vec::new(),
        };
        let span = Span { p0: 2, p1: 5, starts: vec![2] };
        let fit = |n_bytes, tensors: &[Range<usize>]| Places { n_bytes, tensors: tensors.to_vec() }.fit(&span, &layout);
        assert_eq!(Contiguous.place(&span, &layout), Places { n_bytes: 48, tensors: vec![0..24, 24..48] });
        assert!(fit(48, &[0..24, 24..48]));
        assert!(fit(100, &[60..84, 7..31]), "in any order, with gaps");
        assert!(!fit(47, &[0..24, 24..48]), "past the end");
        assert!(!fit(48, &[0..24, 23..47]), "overlapping");
        assert!(!fit(48, &[0..24, 24..48, 48..48]), "one too many");
        assert!(!fit(48, &[0..25, 25..48]), "wrong lengths");
    }

    #[test]
    fn every_tensor_gets_its_own_bytes_of_the_buffer() {
        let places = Places { n_bytes: 10, tensors: vec![6..9, 0..2, 4..4, 2..5] };
        let mut buffer: Vec<u8> = (0..10).collect();
        assert_eq!(places.split(&mut buffer), [&[6, 7, 8][..], &[0, 1], &[], &[2, 3, 4]]);
    }
}
