//! Streams to integers to rows.

use super::history::{Channels, MEAN_PARTS};
use super::{BLOCK_ROWS, Form, KvqError, LayoutTensor, Rotation, n_exact, slabs, symbols, tensors};
use crate::kv::codec::floats;
use crate::kv::layout::KvLayout;
use crate::kv::rotation::{Angles, KeyRotation, rotate};

/// Decodes the tensors of a stream.
pub(in crate::kv) struct KvqDecoder {
    tensors: Vec<LayoutTensor>,
    rotation: Rotation,
    /// Of each tensor; `None` before its first side information.
    channels: Vec<Option<Channels>>,
    work: DecodeMemory,
}

/// Memory that all tensors reuse.
#[derive(Default)]
struct DecodeMemory {
    angles: Angles,
    by_channel: Vec<i16>,
    tile: Vec<i16>,
    row: Vec<f32>,
}

/// Where the rows of a block go.
struct BlockPlace<'a> {
    tensor: LayoutTensor,
    rotation: &'a Rotation,
    /// The position of the first row.
    start: u32,
    bytes: &'a mut [u8],
}

impl KvqDecoder {
    pub(in crate::kv::codec) fn new(layout: &KvLayout, keys: Option<KeyRotation>) -> KvqDecoder {
        let tensors = tensors(layout);
        let channels = vec![None; tensors.len()];
        KvqDecoder {
            tensors,
            rotation: Rotation { pairing: layout.rope, keys },
            channels,
            work: DecodeMemory::default(),
        }
    }

    /// Decodes all of `encoded` into the rows of a tensor from position `start`. There is at least one.
    pub(in crate::kv::codec) fn decode(
        &mut self,
        index: usize,
        start: u32,
        encoded: &[u8],
        decoded: &mut [u8],
    ) -> Result<(), KvqError> {
        let tensor = *self.tensors.get(index).ok_or(KvqError::NoTensor(index))?;
        let (form, mut rest) = encoded.split_first().ok_or(KvqError::Truncated)?;
        if *form == Form::Plain as u8 {
            let plain = rest.split_off(..decoded.len()).ok_or(KvqError::Truncated)?;
            decoded.copy_from_slice(plain);
            return ended(rest);
        }
        let row_bytes = tensor.rows.bytes();
        let n_exact = n_exact(start, decoded.len() / row_bytes);
        let (exact, decoded) = decoded.split_at_mut(n_exact * row_bytes);
        exact.copy_from_slice(rest.split_off(..exact.len()).ok_or(KvqError::Truncated)?);
        let n_values = tensor.rows.n_values as usize;
        let mut channels = match *form {
            form if form == Form::Fresh as u8 => Channels::read(&mut rest, n_values)?,
            form if form == Form::Continued as u8 => {
                let mut before = self.channels[index].take().ok_or(KvqError::NothingToContinue)?;
                before.advance();
                before
            }
            form => return Err(KvqError::Mode(form)),
        };
        for (block, bytes) in decoded.chunks_mut(BLOCK_ROWS * row_bytes).enumerate() {
            if block > 0 {
                channels.advance();
            }
            let start = start + (n_exact + block * BLOCK_ROWS) as u32;
            let n_rows = bytes.len() / row_bytes;
            let target = BlockPlace { tensor, rotation: &self.rotation, start, bytes };
            self.work.block(target, &mut channels, &mut rest)?;
            channels.counted(n_rows);
        }
        self.channels[index] = Some(channels);
        ended(rest)
    }
}

fn ended(rest: &[u8]) -> Result<(), KvqError> {
    if rest.is_empty() { Ok(()) } else { Err(KvqError::Rest(rest.len())) }
}

impl DecodeMemory {
    fn block(&mut self, target: BlockPlace<'_>, channels: &mut Channels, rest: &mut &[u8]) -> Result<(), KvqError> {
        let rows = target.tensor.rows;
        let n_rows = target.bytes.len() / rows.bytes();
        let rotation = target.rotation.of(target.tensor);
        if let Some(rotation) = rotation {
            self.angles.prepare(target.tensor.section, rotation, target.start, n_rows);
        }
        let head_size = rotation.map_or(1, |rotation| rotation.head_size as usize);
        let steps: Vec<f32> = channels.channel_steps().map(|step| step / MEAN_PARTS).collect();
        for slab in slabs::slabs(rows.n_values as usize, head_size) {
            self.integers(channels, &slab, n_rows, rest)?;
            let (means, steps) = (&channels.means[slab.clone()], &steps[slab.clone()]);
            let means: Vec<f32> = means.iter().map(|mean| f32::from(*mean)).collect();
            self.row.resize(slab.len(), 0.0);
            let size = rows.dtype.block_bytes();
            for tile in slabs::tiles(n_rows) {
                self.tile.resize(tile.len() * slab.len(), 0);
                slabs::to_rows(&self.by_channel, n_rows, tile.clone(), &mut self.tile);
                for (i, integers) in tile.zip(self.tile.chunks_exact(slab.len())) {
                    for (((x, q), mean), step) in self.row.iter_mut().zip(integers).zip(&means).zip(steps) {
                        *x = (f32::from(*q) * MEAN_PARTS + mean) * step;
                    }
                    if rotation.is_some() {
                        rotate(target.rotation.pairing, head_size, &mut self.row, self.angles.row(i), 1.0);
                    }
                    let row = &mut target.bytes[i * rows.bytes()..][slab.start * size..slab.end * size];
                    floats::store(rows.dtype, &self.row, row);
                }
            }
        }
        Ok(())
    }

    /// Reads the integers of a slab, by channel, and counts them.
    fn integers(
        &mut self,
        channels: &mut Channels,
        slab: &std::ops::Range<usize>,
        n_rows: usize,
        rest: &mut &[u8],
    ) -> Result<(), KvqError> {
        let mut streams = symbols::open(rest)?;
        self.by_channel.resize(n_rows * slab.len(), 0);
        for channel in slabs::in_order(&channels.classes[slab.clone()]) {
            let integers = &mut self.by_channel[channel * n_rows..(channel + 1) * n_rows];
            symbols::read(&mut streams, channels.classes[slab.start + channel], integers);
            channels.count(slab.start + channel, integers);
        }
        streams.into_iter().try_for_each(|stream| stream.finish())
    }
}
