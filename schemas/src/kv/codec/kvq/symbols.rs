//! The integers of a channel as symbols of its class, in four streams.
//!
//! Each stream has a quarter of the rows of every channel. The four are independent, so a processor decodes them side
//! by side.

use super::KvqError;
use super::bits::{BitReader, BitWriter};
use super::classes::{ClassCode, Coding, ESCAPED_FOURS, SymbolTable, coding};
use super::huffman::{Code, MAX_LENGTH};

/// The number of streams.
pub(super) const N_STREAMS: usize = 4;

/// Bits of an escaped integer.
const ESCAPED_BITS: u32 = 16;

/// The most bits of an integer: an escape, the upper part, the lower part. In a group, each has a code of its own.
const MOST_BITS: usize = 11 + 11 + 16 + 12;

/// Rows of each stream but the last, which may have fewer.
pub(super) fn stream_rows(n_rows: usize) -> usize {
    n_rows.div_ceil(N_STREAMS).max(1)
}

/// Writes a channel's integers.
pub(super) fn write(streams: &mut [BitWriter; N_STREAMS], class: u8, integers: &[i16]) {
    let n = stream_rows(integers.len());
    streams.iter_mut().for_each(|out| out.reserve(MOST_BITS * (n + 3)));
    let quarters = integers.chunks(n);
    match coding(class) {
        Coding::Zeros => {}
        Coding::Fours(code) => {
            for (out, quarter) in streams.iter_mut().zip(quarters) {
                quarter.chunks(4).for_each(|four| write_four(out, code, four));
            }
        }
        Coding::Ones { upper, n_lower } => {
            for (out, quarter) in streams.iter_mut().zip(quarters) {
                write_ones(out, upper, n_lower, quarter);
            }
        }
    }
}

fn put(out: &mut BitWriter, code: Code) {
    out.put(code.bits.into(), code.length.into());
}

fn write_ones(out: &mut BitWriter, code: &ClassCode, n_lower: u32, integers: &[i16]) {
    // So that the upper part rounds to the nearest.
    let half = (1 << n_lower) >> 1;
    for integer in integers {
        let shifted = i32::from(*integer) + half;
        let upper = shifted >> n_lower;
        match code.codes.get((upper + code.n) as usize).filter(|_| upper <= code.n) {
            Some(listed) => put(out, *listed),
            None => {
                put(out, code.escape());
                out.put(u32::from((upper as i16).cast_unsigned()), ESCAPED_BITS);
            }
        }
        out.put(shifted.cast_unsigned() & ((1 << n_lower) - 1), n_lower);
    }
}

/// Writes up to four integers; missing ones count as 0.
fn write_four(out: &mut BitWriter, code: &ClassCode, four: &[i16]) {
    let is_listed = four.iter().all(|q| (-1..=1).contains(q));
    let padded: [i16; 4] = std::array::from_fn(|i| four.get(i).copied().unwrap_or(0));
    if is_listed {
        let [a, b, c, d] = padded.map(|q| (q + 1) as usize);
        put(out, code.codes[a + 3 * b + 9 * c + 27 * d]);
    } else {
        put(out, code.escape());
        if let Coding::Ones { upper, n_lower } = coding(ESCAPED_FOURS) {
            write_ones(out, upper, n_lower, &padded);
        }
    }
}

/// Reads a channel's integers, as many as `integers` has.
pub(super) fn read(streams: &mut [BitReader<'_>; N_STREAMS], class: u8, integers: &mut [i16]) {
    let n = stream_rows(integers.len());
    match coding(class) {
        Coding::Zeros => integers.fill(0),
        Coding::Fours(code) => {
            for (stream, quarter) in streams.iter_mut().zip(integers.chunks_mut(n)) {
                quarter.chunks_mut(4).for_each(|four| read_four(stream, code, four));
            }
        }
        Coding::Ones { upper, n_lower: 0 } => {
            let mut quarters = integers.chunks_mut(n);
            let mut quarters: [&mut [i16]; N_STREAMS] = std::array::from_fn(|_| quarters.next().unwrap_or_default());
            // Side by side, as far as all have four.
            let n_together = quarters.iter().map(|quarter| quarter.len()).min().unwrap_or(0) / 4 * 4;
            let [a, b, c, d] = streams;
            let mut together =
                quarters.each_mut().map(|quarter| quarter[..n_together].as_chunks_mut::<4>().0.iter_mut());
            let [qa, qb, qc, qd] = &mut together;
            for (((qa, qb), qc), qd) in qa.zip(qb).zip(qc).zip(qd) {
                read_together([(a, qa), (b, qb), (c, qc), (d, qd)], &upper.symbols);
            }
            for (stream, quarter) in streams.iter_mut().zip(quarters) {
                read_ones(stream, upper, 0, &mut quarter[n_together..]);
            }
        }
        Coding::Ones { upper, n_lower } => {
            for (stream, quarter) in streams.iter_mut().zip(integers.chunks_mut(n)) {
                read_ones(stream, upper, n_lower, quarter);
            }
        }
    }
}

/// Reads four integers of every stream. Four codes fit the bits of one refill.
#[inline]
fn read_together(mut streams: [(&mut BitReader<'_>, &mut [i16; 4]); N_STREAMS], symbols: &SymbolTable) {
    for (stream, _) in &mut streams {
        stream.refill();
    }
    for i in 0..4 {
        for (stream, integers) in &mut streams {
            let symbol = symbols[stream.peek() as usize & ((1 << MAX_LENGTH) - 1)];
            stream.skip(symbol.length());
            integers[i] = if symbol.is_escape() { escaped(stream) } else { symbol.value() };
        }
    }
}

/// Reads an integer after its escape. Leaves the reader refilled.
#[cold]
fn escaped(stream: &mut BitReader<'_>) -> i16 {
    stream.refill();
    let integer = (stream.take(ESCAPED_BITS) as u16).cast_signed();
    stream.refill();
    integer
}

fn read_ones(stream: &mut BitReader<'_>, code: &ClassCode, n_lower: u32, integers: &mut [i16]) {
    let half = (1 << n_lower) >> 1;
    for integer in integers {
        stream.refill();
        let symbol = code.symbols[stream.peek() as usize & ((1 << MAX_LENGTH) - 1)];
        stream.skip(symbol.length());
        let upper = if symbol.is_escape() { escaped(stream) } else { symbol.value() };
        let lower = stream.take(n_lower).cast_signed();
        // Only a damaged stream leaves the range, and gets some integer.
        *integer = ((i32::from(upper) << n_lower) + lower - half) as i16;
    }
}

fn read_four(stream: &mut BitReader<'_>, code: &ClassCode, four: &mut [i16]) {
    stream.refill();
    let symbol = code.symbols[stream.peek() as usize & ((1 << MAX_LENGTH) - 1)];
    stream.skip(symbol.length());
    let mut padded = [0; 4];
    if symbol.is_escape() {
        if let Coding::Ones { upper, n_lower } = coding(ESCAPED_FOURS) {
            read_ones(stream, upper, n_lower, &mut padded);
        }
    } else {
        let group = symbol.value();
        padded = [group % 3, group / 3 % 3, group / 9 % 3, group / 27].map(|q| q - 1);
    }
    four.copy_from_slice(&padded[..four.len()]);
}

/// Writes the streams, each after its length in bytes (u32).
pub(super) fn finish(streams: &mut [BitWriter; N_STREAMS], out: &mut Vec<u8>) {
    for stream in streams {
        stream.finish(|bytes| {
            out.extend((bytes.len() as u32).to_le_bytes());
            out.extend_from_slice(bytes);
        });
    }
}

/// Splits the streams off `rest`.
pub(super) fn open<'a>(rest: &mut &'a [u8]) -> Result<[BitReader<'a>; N_STREAMS], KvqError> {
    let mut streams = [const { None }; N_STREAMS];
    for stream in &mut streams {
        let (length, later) = rest.split_first_chunk::<4>().ok_or(KvqError::Truncated)?;
        let (bytes, later) = later.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(KvqError::Truncated)?;
        *rest = later;
        *stream = Some(BitReader::new(bytes));
    }
    Ok(streams.map(|stream| stream.unwrap_or_else(|| BitReader::new(&[]))))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::classes::LAST;
    use super::*;

    proptest! {
        #[test]
        fn every_class_writes_every_integer(
            class in 1..=LAST,
            size in 0..15u32,
            integers in prop::collection::vec(any::<i16>(), 0..70),
        ) {
            // Most are small; some are whatever an i16 can be, except those that do not fit after rounding.
            let integers: Vec<i16> = integers.iter().map(|q| (q >> size).clamp(-32_000, 32_000)).collect();
            let mut writers: [BitWriter; N_STREAMS] = Default::default();
            write(&mut writers, class, &integers);
            write(&mut writers, 0, &integers);
            let mut out = Vec::new();
            finish(&mut writers, &mut out);
            let mut rest = &out[..];
            let mut readers = open(&mut rest).unwrap();
            prop_assert!(rest.is_empty());
            let mut read_back = vec![1; integers.len()];
            read(&mut readers, class, &mut read_back);
            prop_assert_eq!(read_back, integers);
            for reader in readers {
                prop_assert_eq!(reader.finish(), Ok(()));
            }
        }
    }
}
