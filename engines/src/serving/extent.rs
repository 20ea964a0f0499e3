//! The positions of a slot's KV that are there, for engines that keep KV themselves. Layers that attend to all positions
//! have every one; layers with a sliding window have every position from some on.

use std::ops::Range;

use baton_schemas::kv::{KvLayout, Section};

/// The positions that a slot's KV has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SlotExtent {
    /// Positions that are complete, from 0 on.
    pub(crate) n: usize,
    /// The first position that layers with a window have; those before it were never received.
    pub(crate) window_from: usize,
}

impl SlotExtent {
    /// That of the first `n` positions.
    pub(crate) fn prefix(self, n: usize) -> SlotExtent {
        let n = n.min(self.n);
        SlotExtent { n, window_from: self.window_from.min(n) }
    }

    /// The first row of each section when `positions` are exported, as a part of a prompt that ends at `end`. Errors: a
    /// position is missing, or windowed rows that position `end` attends to.
    pub(crate) fn starts(self, layout: &KvLayout, positions: &Range<u32>, end: u32) -> Result<Vec<u32>, String> {
        let Range { start: p0, end: p1 } = *positions;
        if p0 >= p1 || p1 as usize > self.n {
            return Err(format!("the slot holds {} positions, not {p0}..{p1}", self.n));
        }
        let start = |section: &Section| {
            let Some(window) = section.window else { return Ok(p0) };
            let start = (self.window_from as u32).clamp(p0, p1);
            match start <= (end + 1).saturating_sub(window).clamp(p0, p1) {
                true => Ok(start),
                false => Err(format!("a window of {window} positions has none before {start}")),
            }
        };
        layout.sections.iter().map(start).collect()
    }

    /// The extent after `positions` are added, with the rows from `starts` on. Errors: they do not continue the
    /// slot, or are not those of the layout's sections.
    pub(crate) fn with(self, layout: &KvLayout, positions: &Range<u32>, starts: &[u32]) -> Result<SlotExtent, String> {
        let Range { start: p0, end: p1 } = *positions;
        if self.n != p0 as usize {
            return Err(format!("positions {p0}..{p1} do not continue a slot that holds {}", self.n));
        }
        let is_valid =
            |(section, start): (&Section, &u32)| *start == p0 || section.window.is_some() && (p0..=p1).contains(start);
        if starts.len() != layout.sections.len() || !layout.sections.iter().zip(starts).all(is_valid) {
            return Err(format!("the sections do not start in positions {p0}..{p1}"));
        }
        // Rows before a gap are of no use.
        let gap = starts.iter().copied().filter(|start| *start > p0).max();
        Ok(SlotExtent { n: p1 as usize, window_from: gap.map_or(self.window_from, |start| start as usize) })
    }

    /// Returns true if the next position, `n_present`, can be computed: every layer has all positions that it attends to.
    pub(crate) fn can_continue(self, layout: &KvLayout, n_present: usize) -> bool {
        let windows = layout.sections.iter().filter_map(|section| section.window);
        let has = |window: u32| self.window_from <= (n_present + 1).saturating_sub(window as usize);
        self.n == n_present && windows.max().is_none_or(has)
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{Dtype, LayerShape, RopePairing, Rows};

    use super::*;

    /// A section that keeps all positions, and one with a window of 4.
    fn layout() -> KvLayout {
        let rows = Rows { dtype: Dtype::F16, n_values: 2 };
        let section = |window| Section {
            window,
            n_rot: [0; 2],
            tokens_per_row: 1,
            layers: vec![LayerShape { k: rows, v: Some(rows) }],
        };
        KvLayout { rope: RopePairing::HalfSplit, sections: vec![section(None), section(Some(4))], states: Vec::new() }
    }

    #[test]
    fn windowed_rows_that_were_left_out_limit_what_can_be_done() {
        let layout = layout();
        let whole = SlotExtent::default().with(&layout, &(0..10), &[0, 0]).unwrap();
        assert_eq!(whole, SlotExtent { n: 10, window_from: 0 });
        let gap = whole.with(&layout, &(10..20), &[10, 17]).unwrap();
        assert_eq!(gap, SlotExtent { n: 20, window_from: 17 });
        assert!(gap.can_continue(&layout, 20), "position 20 attends to 17..=20");
        assert!(!gap.prefix(19).can_continue(&layout, 19), "position 19 attends to 16..=19");
        assert!(gap.prefix(10).window_from == 10 && !gap.can_continue(&layout, 19));
        assert_eq!(gap.starts(&layout, &(10..20), 20), Ok(vec![10, 17]));
        assert_eq!(gap.starts(&layout, &(0..10), 20), Ok(vec![0, 10]), "no windowed row at all");
        assert!(gap.starts(&layout, &(10..20), 19).unwrap_err().contains("none before 17"));
        assert!(gap.starts(&layout, &(10..21), 21).unwrap_err().contains("holds 20"));
    }

    #[test]
    fn rows_that_do_not_fit_the_layout_are_refused() {
        let layout = layout();
        for (positions, starts) in [(1..4, &[1, 1][..]), (0..4, &[0]), (0..4, &[1, 0]), (0..4, &[0, 5])] {
            assert!(SlotExtent::default().with(&layout, &positions, starts).is_err(), "{positions:?} {starts:?}");
        }
    }
}
