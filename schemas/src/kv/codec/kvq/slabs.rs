//! Channels that are processed together: whole heads, few enough for a processor's cache.

use std::ops::Range;

/// Channels of a slab, unless a head has more: with [`BLOCK_ROWS`](super::BLOCK_ROWS) rows 256 KiB of integers.
const WIDTH: usize = 256;

/// Rows that are transposed together.
const TILE: usize = 16;

/// The slabs of a row of `n_values`, in heads of `head_size`, or 1 if heads do not matter.
pub(super) fn slabs(n_values: usize, head_size: usize) -> impl Iterator<Item = Range<usize>> {
    let width = (WIDTH / head_size).max(1) * head_size;
    (0..n_values).step_by(width).map(move |first| first..(first + width).min(n_values))
}

/// The channels of a slab in the order of their streams: by class, then by index.
pub(super) fn in_order(classes: &[u8]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..classes.len()).collect();
    order.sort_by_key(|&channel| classes[channel]);
    order
}

/// Turns `[n_rows][width]` into `[width][n_rows]`.
pub(super) fn to_channels(by_row: &[i16], width: usize, by_channel: &mut [i16]) {
    let n_rows = by_row.len() / width.max(1);
    for tile in tiles(n_rows) {
        let from = Matrix { first: tile.start * width, stride: width, n: tile.len(), width };
        let to = Matrix { first: tile.start, stride: n_rows, n: width, width: tile.len() };
        transpose(by_row, from, by_channel, to);
    }
}

/// Turns some rows of `[width][n_rows]` into `[rows][width]`.
pub(super) fn to_rows(by_channel: &[i16], n_rows: usize, rows: Range<usize>, by_row: &mut [i16]) {
    let width = by_channel.len() / n_rows.max(1);
    let from = Matrix { first: rows.start, stride: n_rows, n: width, width: rows.len() };
    let to = Matrix { first: 0, stride: width, n: rows.len(), width };
    transpose(by_channel, from, by_row, to);
}

/// `n` rows of `width` values, one every `stride` values from `first` on.
#[derive(Clone, Copy)]
struct Matrix {
    first: usize,
    stride: usize,
    n: usize,
    width: usize,
}

impl Matrix {
    fn at(self, row: usize, column: usize) -> usize {
        self.first + row * self.stride + column
    }
}

/// Transposes a matrix in blocks of 4 × 4: each block's rows are words of 64 bits, of which parts are exchanged.
fn transpose(source: &[i16], from: Matrix, target: &mut [i16], to: Matrix) {
    let whole = |n: usize| n / 4 * 4;
    for row in (0..whole(from.n)).step_by(4) {
        for column in (0..whole(from.width)).step_by(4) {
            let word = |i: usize| {
                let at = from.at(row + i, column);
                source[at..at + 4].iter().rev().fold(0u64, |word, value| word << 16 | u64::from(value.cast_unsigned()))
            };
            for (i, word) in transposed([word(0), word(1), word(2), word(3)]).into_iter().enumerate() {
                let at = to.at(column + i, row);
                let values: [i16; 4] = std::array::from_fn(|j| ((word >> (16 * j)) as u16).cast_signed());
                target[at..at + 4].copy_from_slice(&values);
            }
        }
    }
    for row in 0..from.n {
        let first = if row < whole(from.n) { whole(from.width) } else { 0 };
        for column in first..from.width {
            target[to.at(column, row)] = source[from.at(row, column)];
        }
    }
}

/// Transposes four words of four values.
fn transposed([a, b, c, d]: [u64; 4]) -> [u64; 4] {
    const EVEN: u64 = 0x0000_FFFF_0000_FFFF;
    const LOW: u64 = 0x0000_0000_FFFF_FFFF;
    let pairs = |a: u64, b: u64| ((a & EVEN) | ((b & EVEN) << 16), ((a >> 16) & EVEN) | (b & !EVEN));
    let halves = |a: u64, b: u64| ((a & LOW) | (b << 32), (a >> 32) | (b & !LOW));
    let (ab, ab_odd) = pairs(a, b);
    let (cd, cd_odd) = pairs(c, d);
    let (first, third) = halves(ab, cd);
    let (second, fourth) = halves(ab_odd, cd_odd);
    [first, second, third, fourth]
}

/// The ranges of rows that are transposed together.
pub(super) fn tiles(n_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n_rows).step_by(TILE).map(move |first| first..(first + TILE).min(n_rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_whole_heads() {
        let slabs = |n, head| slabs(n, head).collect::<Vec<_>>();
        assert_eq!(slabs(192, 64), [0..192]);
        assert_eq!(slabs(1024, 96), [0..192, 192..384, 384..576, 576..768, 768..960, 960..1024]);
        assert_eq!(slabs(600, 1), [0..256, 256..512, 512..600]);
        assert_eq!(slabs(1024, 512), [0..512, 512..1024]);
    }

    #[test]
    fn transposing_twice_changes_nothing() {
        for (n_rows, width) in [(1, 1), (16, 4), (37, 5), (512, 3)] {
            let by_row: Vec<i16> = (0..(n_rows * width) as i16).collect();
            let mut by_channel = vec![0; by_row.len()];
            to_channels(&by_row, width, &mut by_channel);
            assert_eq!(by_channel[n_rows * (width - 1)], (width - 1) as i16);
            let mut again = vec![0; by_row.len()];
            for tile in tiles(n_rows) {
                let out = &mut again[tile.start * width..tile.end * width];
                to_rows(&by_channel, n_rows, tile, out);
            }
            assert_eq!(again, by_row);
        }
    }
}
