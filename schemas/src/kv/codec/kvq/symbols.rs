//! The integers of a channel as symbols of its class, in four streams.
//!
//! Each stream has a quarter of the rows of every channel. The four are independent, so a processor decodes them side
//! by side.

use super::KvqError;
use super::bits::{BitReader, BitWriter};
use super::classes::{ClassCode, Coding, ESCAPED_FOURS, coding};
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
                match n_lower {
                    0 => write_ones::<0>(out, upper, quarter),
                    1 => write_ones::<1>(out, upper, quarter),
                    2 => write_ones::<2>(out, upper, quarter),
                    3 => write_ones::<3>(out, upper, quarter),
                    _ => *out = write_each(std::mem::take(out), upper, n_lower, quarter),
                }
            }
        }
    }
}

fn add(out: &mut BitWriter, code: Code) {
    out.add(code.bits.into(), code.length.into());
}

/// Writes integers of at most 3 lower bits: four of them fit the bits between two flushes.
fn write_ones<const N_LOWER: u32>(stream: &mut BitWriter, code: &ClassCode, integers: &[i16]) {
    // A local writer, whose address no function gets, stays in the processor's registers.
    let mut out = std::mem::take(stream);
    // So that the upper part rounds to the nearest.
    let half = (1 << N_LOWER) >> 1;
    let (fours, rest) = integers.as_chunks::<4>();
    for four in fours {
        let shifted = four.map(|integer| i32::from(integer) + half);
        let codes = shifted.map(|shifted| code.listed(((shifted >> N_LOWER) + code.n).cast_unsigned()));
        if codes.iter().all(|code| code.length > 0) {
            for (code, shifted) in codes.into_iter().zip(shifted) {
                let lower = (shifted & ((1 << N_LOWER) - 1)).cast_unsigned();
                out.add(u64::from(code.bits) | u64::from(lower) << code.length, u32::from(code.length) + N_LOWER);
            }
            out.flush();
        } else {
            out = write_each(out, code, N_LOWER, four);
        }
    }
    *stream = write_each(out, code, N_LOWER, rest);
}

/// Writes integers of which any may be escaped, one by one.
fn write_each(mut out: BitWriter, code: &ClassCode, n_lower: u32, integers: &[i16]) -> BitWriter {
    let half = (1 << n_lower) >> 1;
    for integer in integers {
        let shifted = i32::from(*integer) + half;
        let upper = shifted >> n_lower;
        let listed = code.listed((upper + code.n).cast_unsigned());
        if listed.length > 0 {
            add(&mut out, listed);
        } else {
            add(&mut out, code.escape());
            out.add(u64::from((upper as i16).cast_unsigned()), ESCAPED_BITS);
        }
        out.add(u64::from((shifted & ((1 << n_lower) - 1)).cast_unsigned()), n_lower);
        out.flush();
    }
    out
}

/// Writes up to four integers; missing ones count as 0.
fn write_four(out: &mut BitWriter, code: &ClassCode, four: &[i16]) {
    let is_listed = four.iter().all(|q| (-1..=1).contains(q));
    let padded: [i16; 4] = std::array::from_fn(|i| four.get(i).copied().unwrap_or(0));
    if is_listed {
        let [a, b, c, d] = padded.map(|q| (q + 1) as usize);
        add(out, code.codes[a + 3 * b + 9 * c + 27 * d]);
        out.flush();
    } else {
        add(out, code.escape());
        out.flush();
        if let Coding::Ones { upper, n_lower } = coding(ESCAPED_FOURS) {
            *out = write_each(std::mem::take(out), upper, n_lower, &padded);
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
        Coding::Ones { upper, n_lower: 0 } => read_together::<0>(streams, upper, integers),
        Coding::Ones { upper, n_lower: 1 } => read_together::<1>(streams, upper, integers),
        Coding::Ones { upper, n_lower: 2 } => read_together::<2>(streams, upper, integers),
        Coding::Ones { upper, n_lower: 3 } => read_together::<3>(streams, upper, integers),
        Coding::Ones { upper, n_lower } => {
            for (stream, quarter) in streams.iter_mut().zip(integers.chunks_mut(n)) {
                read_ones(stream, upper, n_lower, quarter);
            }
        }
    }
}

/// Reads the streams side by side, as far as all have four integers. Four of at most 3 lower bits fit the bits of one
/// refill.
fn read_together<const N_LOWER: u32>(streams: &mut [BitReader<'_>; N_STREAMS], code: &ClassCode, integers: &mut [i16]) {
    let mut quarters = integers.chunks_mut(stream_rows(integers.len()));
    let quarters: [&mut [i16]; N_STREAMS] = std::array::from_fn(|_| quarters.next().unwrap_or_default());
    let n_together = quarters.iter().map(|quarter| quarter.len()).min().unwrap_or(0) / 4 * 4;
    let [a, b, c, d] = quarters.map(|quarter| quarter.split_at_mut(n_together));
    // Local readers, whose address no function gets, stay in the processor's registers.
    let [mut of_a, mut of_b, mut of_c, mut of_d] = *streams;
    let [fours_a, fours_b, fours_c, fours_d] = [a.0, b.0, c.0, d.0].map(|integers| integers.as_chunks_mut::<4>().0);
    for (((a, b), c), d) in fours_a.iter_mut().zip(fours_b).zip(fours_c).zip(fours_d) {
        of_a.refill();
        of_b.refill();
        of_c.refill();
        of_d.refill();
        for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
            *a = read_one(&mut of_a, code, N_LOWER);
            *b = read_one(&mut of_b, code, N_LOWER);
            *c = read_one(&mut of_c, code, N_LOWER);
            *d = read_one(&mut of_d, code, N_LOWER);
        }
    }
    *streams = [of_a, of_b, of_c, of_d];
    for (stream, rest) in streams.iter_mut().zip([a.1, b.1, c.1, d.1]) {
        read_ones(stream, code, N_LOWER, rest);
    }
}

/// Reads an integer after its escape. Leaves the reader refilled. Readers are passed by value, because one whose address
/// is taken does not stay in the processor's registers.
#[cold]
fn escaped(mut stream: BitReader<'_>) -> (i16, BitReader<'_>) {
    stream.refill();
    let integer = (stream.take(ESCAPED_BITS) as u16).cast_signed();
    stream.refill();
    (integer, stream)
}

/// Reads an integer, for which a refill has bits.
#[inline]
fn read_one(stream: &mut BitReader<'_>, code: &ClassCode, n_lower: u32) -> i16 {
    let symbol = code.symbols[stream.peek() as usize & ((1 << MAX_LENGTH) - 1)];
    stream.skip(symbol.length());
    let mut upper = symbol.value();
    if symbol.is_escape() {
        (upper, *stream) = escaped(*stream);
    }
    let half = (1 << n_lower) >> 1;
    let lower = stream.take(n_lower).cast_signed();
    // Only a damaged stream leaves the range, and gets some integer.
    ((i32::from(upper) << n_lower) + lower - half) as i16
}

fn read_ones(stream: &mut BitReader<'_>, code: &ClassCode, n_lower: u32, integers: &mut [i16]) {
    for integer in integers {
        stream.refill();
        *integer = read_one(stream, code, n_lower);
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
