//! Brings rows from the order of llama.cpp's cells, which are filled wherever they are free, into the order of
//! positions.

use std::ops::Range;

use bytes::Bytes;

use super::positions::TokenPositions;

/// The order of cells by their positions.
pub(super) struct CellOrder {
    /// Position of the first row. Without cells: the end of the chunk.
    pub(super) start: u32,
    /// Ranges of cells in the order of their positions; a single range if the cells are in order.
    runs: Vec<Range<usize>>,
}

impl CellOrder {
    /// Checks that `cells` are the last positions of `positions`, each once.
    pub(super) fn of(cells: &[i32], positions: &Range<u32>) -> Result<CellOrder, String> {
        let n = u32::try_from(cells.len()).unwrap_or(u32::MAX);
        let start = positions.end.checked_sub(n).filter(|start| *start >= positions.start);
        let Some(start) = start else {
            return Err(format!("{n} cells for the positions {positions:?}"));
        };
        // The cell of each position.
        let mut cell_of = vec![None; cells.len()];
        for (cell, position) in cells.iter().enumerate() {
            let offset = u32::try_from(*position).ok().and_then(|p| p.checked_sub(start));
            let place = offset.and_then(|offset| cell_of.get_mut(offset as usize));
            match place {
                Some(place @ None) => *place = Some(cell),
                Some(Some(_)) => return Err(format!("position {position} appears twice")),
                None => return Err(format!("position {position} is not among {start}..{}", positions.end)),
            }
        }
        Ok(CellOrder { start, runs: runs(cell_of.into_iter().flatten()) })
    }

    /// The same for cells on several axes, of which each has its position, height and width. Sorted by these they are in the
    /// order of the tokens. Errors: they are not exactly these tokens, each once.
    pub(super) fn of_axes(
        cells: &[[i32; 3]],
        tokens: &Range<u32>,
        positions: &TokenPositions,
    ) -> Result<CellOrder, String> {
        let mut order: Vec<usize> = (0..cells.len()).collect();
        order.sort_unstable_by_key(|cell| cells[*cell]);
        if cells.len() != tokens.len() {
            return Err(format!("{} cells for the tokens {tokens:?}", cells.len()));
        }
        for (token, cell) in tokens.clone().zip(&order) {
            let [position, ..] = cells[*cell];
            if u32::try_from(position) != Ok(positions.of(token)) {
                return Err(format!("token {token} has the position {position}, not {}", positions.of(token)));
            }
        }
        if order.windows(2).any(|two| cells[two[0]] == cells[two[1]]) {
            return Err("two cells have the same place in an image".to_owned());
        }
        Ok(CellOrder { start: tokens.start, runs: runs(order) })
    }

    /// The rows in the order of positions. `rows` holds a row of `row_bytes` for each cell; it is copied only if the
    /// cells are out of order.
    pub(super) fn sorted(&self, rows: Bytes, row_bytes: usize) -> Bytes {
        if self.runs.len() <= 1 {
            return rows;
        }
        let mut sorted = Vec::with_capacity(rows.len());
        for run in &self.runs {
            sorted.extend_from_slice(&rows[run.start * row_bytes..run.end * row_bytes]);
        }
        sorted.into()
    }
}

/// The ranges of cells that follow each other.
fn runs(cells: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for cell in cells {
        match runs.last_mut() {
            Some(run) if run.end == cell => run.end += 1,
            _ => runs.push(cell..cell + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use baton_schemas::image::{Image, ImageShape, SharedTokens};

    use super::*;

    #[test]
    fn cells_of_an_image_are_sorted_by_its_lines() {
        let shared = SharedTokens { tokens: 1..7, n_positions: 3 };
        let run = Image::new(&b"a"[..], "f").placeholders(&ImageShape { n_tokens: 8, shared: Some(shared) });
        let positions = TokenPositions::of_tokens(&run);
        // Two lines of three, whose second line llama.cpp put before the first.
        let line = |y: i32| [[1, 1 + y, 1], [1, 1 + y, 2], [1, 1 + y, 3]];
        let cells = [&line(1)[..], &[[0; 3]], &line(0), &[[4; 3]]].concat();
        let order = CellOrder::of_axes(&cells, &(0..8), &positions).unwrap();
        let rows: Vec<u8> = (0..8).collect();
        assert_eq!((order.start, &order.sorted(rows.into(), 1)[..]), (0, &[3, 4, 5, 6, 0, 1, 2, 7][..]));
        let refused = |cells: &[[i32; 3]]| CellOrder::of_axes(cells, &(0..8), &positions).is_err();
        assert!(refused(&cells[1..]), "a cell is missing");
        assert!(refused(&[&cells[..7], &[[5; 3]]].concat()), "the text goes on too late");
        assert!(refused(&[&line(0)[..], &[[0; 3]], &line(0), &[[4; 3]]].concat()), "a place is there twice");
    }

    fn sorted(cells: &[i32], positions: Range<u32>) -> Result<(u32, Vec<u8>), String> {
        let rows: Vec<u8> = cells.iter().flat_map(|p| [*p as u8, 0xAA]).collect();
        let order = CellOrder::of(cells, &positions)?;
        let sorted = order.sorted(rows.into(), 2);
        Ok((order.start, sorted.chunks(2).map(|row| row[0]).collect()))
    }

    #[test]
    fn rows_come_out_in_the_order_of_positions() {
        assert_eq!(sorted(&[4, 5, 6], 4..7), Ok((4, vec![4, 5, 6])));
        assert_eq!(sorted(&[6, 4, 5], 4..7), Ok((4, vec![4, 5, 6])));
        assert_eq!(sorted(&[6, 5, 4], 4..7), Ok((4, vec![4, 5, 6])));
        // A windowed cache that has dropped the first position.
        assert_eq!(sorted(&[6, 5], 4..7), Ok((5, vec![5, 6])));
        assert_eq!(sorted(&[], 4..7), Ok((7, vec![])));
    }

    #[test]
    fn sorted_cells_are_not_copied() {
        let rows = Bytes::from(vec![1, 2, 3]);
        let order = CellOrder::of(&[0, 1, 2], &(0..3)).unwrap();
        assert_eq!(order.sorted(rows.clone(), 1).as_ptr(), rows.as_ptr());
    }

    #[test]
    fn anything_but_the_last_positions_each_once_is_refused() {
        for cells in [&[4, 4, 5][..], &[4, 6], &[3, 4, 5], &[5, 6, 7], &[3, 4, 5, 6], &[-1, 5, 6], &[i32::MAX, 5, 6]] {
            assert!(CellOrder::of(cells, &(4..7)).is_err(), "{cells:?}");
        }
    }
}
