//! Rows to integers to streams.

use std::ops::Range;

use super::bits::BitWriter;
use super::classes::{ZEROS, class_of};
use super::history::{Channels, MEAN_PARTS, in_range, ratio};
use super::symbols::{self, N_STREAMS};
use super::{BLOCK_ROWS, Form, KvqError, LayoutTensor, Level, Rotation, n_exact, slabs, tensors};
use crate::kv::chunk::Chunk;
use crate::kv::codec::floats;
use crate::kv::codec::knowledge::{ModelKnowledge, TensorProfile};
use crate::kv::finite::all_finite;
use crate::kv::layout::KvLayout;
use crate::kv::rotation::{Angles, KeyRotation, rotate};

/// Integers beyond this are refused: the tensor is then written with a larger step, or as it is.
const LARGEST: f32 = 32_000.0;

/// The largest step of a profile, in spreads of the rows.
const MAX_STEP: f32 = 2.0;

/// A history of fewer rows says too little about a channel, unless there are even fewer rows to encode.
const MIN_HISTORY: u64 = 32;

/// Encodes the tensors of a stream.
pub(in crate::kv) struct KvqEncoder {
    level: Level,
    tensors: Vec<LayoutTensor>,
    rotation: Rotation,
    /// Empty: there is no profile.
    profile: Vec<TensorProfile>,
    /// Of each tensor; `None` before its first side information.
    channels: Vec<Option<Channels>>,
    work: EncodeMemory,
}

/// The steps that a tensor begins with.
#[derive(Debug, Clone, Copy)]
enum Steps<'a> {
    /// The same for all channels: so much of the spread of the tensor's values around their channels' means.
    OfSpread(f32),
    /// This one, times what [`Channels::steps`] says of each channel.
    Given(f32, &'a [u8]),
}

/// Memory that all tensors reuse.
#[derive(Default)]
struct EncodeMemory {
    angles: Angles,
    row: Vec<f32>,
    by_row: Vec<i16>,
    by_channel: Vec<i16>,
    streams: [BitWriter; N_STREAMS],
}

/// Rows of one tensor.
#[derive(Clone, Copy)]
struct Source<'a> {
    tensor: LayoutTensor,
    rotation: &'a Rotation,
    /// The position of the first row.
    start: u32,
    bytes: &'a [u8],
}

/// A block's values by channel.
struct Measured {
    means: Vec<f32>,
    /// Around the means.
    variances: Vec<f32>,
    /// Magnitudes.
    largest: Vec<f32>,
}

/// A value is too far from its channel's mean.
struct TooLarge;

/// The variance of every channel of every tensor of a chunk, in canonical order, over the rows and in the form that are
/// quantized: K without its rotation. The chunk fits the layout.
pub(in crate::kv) fn channel_variances(
    layout: &KvLayout,
    rotation: Option<&KeyRotation>,
    chunk: &Chunk,
) -> Vec<Vec<f32>> {
    let rotation = Rotation { pairing: layout.rope, keys: rotation.cloned() };
    let starts = chunk.sections.iter().map(|section| section.start).collect::<Vec<_>>();
    let shapes = layout.sections.iter().flat_map(|section| &section.layers);
    // A missing V is not a tensor.
    let exist = shapes.flat_map(|layer| [true, layer.v.is_some()]);
    let with_rows = chunk.tensors().zip(exist).filter_map(|(rows, exists)| exists.then_some(rows));
    let mut work = EncodeMemory::default();
    let measured = tensors(layout).into_iter().zip(with_rows).map(|(tensor, bytes)| {
        let start = starts[tensor.section];
        let n_exact = n_exact(start, bytes.len() / tensor.rows.bytes());
        let bytes = &bytes[n_exact * tensor.rows.bytes()..];
        work.measure(Source { tensor, rotation: &rotation, start: start + n_exact as u32, bytes }).variances
    });
    measured.collect()
}

impl KvqEncoder {
    pub(in crate::kv::codec) fn new(layout: &KvLayout, known: ModelKnowledge<'_>, level: Level) -> KvqEncoder {
        let tensors = tensors(layout);
        let channels = vec![None; tensors.len()];
        KvqEncoder {
            level,
            tensors,
            rotation: Rotation { pairing: layout.rope, keys: known.rotation.cloned() },
            profile: known.tensors.to_vec(),
            channels,
            work: EncodeMemory::default(),
        }
    }

    /// Encodes the rows of a tensor from position `start`. There is at least one.
    pub(in crate::kv::codec) fn encode(&mut self, index: usize, start: u32, bytes: &[u8]) -> Result<Vec<u8>, KvqError> {
        let tensor = *self.tensors.get(index).ok_or(KvqError::NoTensor(index))?;
        if !all_finite(tensor.rows.dtype, bytes) {
            return Err(KvqError::NotFinite);
        }
        let row_bytes = tensor.rows.bytes();
        let n_exact = n_exact(start, bytes.len() / row_bytes);
        let (exact, rest) = bytes.split_at(n_exact * row_bytes);
        let source = Source { tensor, rotation: &self.rotation, start: start + n_exact as u32, bytes: rest };
        let before = self.channels[index].take();
        let n_rows = rest.len() / row_bytes;
        // Side information pays for a frame with many more rows than the history.
        let enough = (n_rows.min(BLOCK_ROWS) as u64 / 4).max(MIN_HISTORY).min(n_rows as u64);
        let continues = |before: &&Channels| before.n_rows >= enough;
        let steps = self.profile.get(index).map_or(Steps::OfSpread(self.level.step()), |tensor| {
            Steps::Given(self.level.profiled_step() * tensor.step, &tensor.channel_steps)
        });
        let mut encoded = Err(TooLarge);
        if n_rows > 0 {
            if let Some(before) = before.as_ref().filter(continues) {
                let mut channels = before.clone();
                channels.advance();
                encoded = self.work.write(source, channels, Form::Continued, exact);
            }
            if encoded.is_err() {
                let channels = self.work.examine(source, steps);
                encoded = self.work.write(source, channels, Form::Fresh, exact);
            }
        }
        match encoded {
            Ok((out, channels)) if out.len() <= bytes.len() => {
                self.channels[index] = Some(channels);
                Ok(out)
            }
            _ => {
                self.channels[index] = before;
                Ok([&[Form::Plain as u8], bytes].concat())
            }
        }
    }
}

impl Source<'_> {
    fn head_size(&self) -> usize {
        self.rotation.of(self.tensor).map_or(1, |rotation| rotation.head_size as usize)
    }

    fn n_rows(&self) -> usize {
        self.bytes.len() / self.tensor.rows.bytes()
    }

    /// The rows in blocks.
    fn blocks(self) -> impl Iterator<Item = Self> {
        let pieces = self.bytes.chunks(BLOCK_ROWS * self.tensor.rows.bytes()).zip(0..);
        pieces.map(move |(bytes, block)| Source { bytes, start: self.start + block * BLOCK_ROWS as u32, ..self })
    }
}

impl EncodeMemory {
    /// Calls `with` for each row of a slab, K without its rotation.
    fn rows(&mut self, source: Source<'_>, slab: &Range<usize>, mut with: impl FnMut(&[f32])) {
        let rows = source.tensor.rows;
        let rotation = source.rotation.of(source.tensor);
        if let Some(rotation) = rotation {
            self.angles.prepare(source.tensor.section, rotation, source.start, source.n_rows());
        }
        self.row.resize(slab.len(), 0.0);
        for (i, bytes) in source.bytes.chunks_exact(rows.bytes()).enumerate() {
            let size = rows.dtype.block_bytes();
            floats::load(rows.dtype, &bytes[slab.start * size..slab.end * size], &mut self.row);
            if let Some(rotation) = rotation {
                let head_size = rotation.head_size as usize;
                rotate(source.rotation.pairing, head_size, &mut self.row, self.angles.row(i), -1.0);
            }
            with(&self.row);
        }
    }

    /// Measures the channels of a block.
    fn measure(&mut self, block: Source<'_>) -> Measured {
        let n_values = block.tensor.rows.n_values as usize;
        let n_rows = block.n_rows().max(1) as f32;
        let mut means = vec![0.0f32; n_values];
        let mut variances = vec![0.0f32; n_values];
        let mut largest = vec![0.0f32; n_values];
        for slab in slabs::slabs(n_values, block.head_size()) {
            let mut sums = vec![0.0f32; slab.len()];
            let mut squares = vec![0.0f32; slab.len()];
            let most = &mut largest[slab.clone()];
            self.rows(block, &slab, |row| {
                for (((x, sum), square), most) in row.iter().zip(&mut sums).zip(&mut squares).zip(&mut *most) {
                    *sum += x;
                    *square += x * x;
                    *most = most.max(x.abs());
                }
            });
            let of_slab = means[slab.clone()].iter_mut().zip(&mut variances[slab]);
            for ((mean, variance), (sum, square)) in of_slab.zip(sums.iter().zip(&squares)) {
                *mean = sum / n_rows;
                *variance = (square / n_rows - *mean * *mean).max(0.0);
            }
        }
        Measured { means, variances, largest }
    }

    /// Measures the first block: the step and the channels' means. Classes are found when the integers are known.
    fn examine(&mut self, source: Source<'_>, steps: Steps<'_>) -> Channels {
        let Measured { means, variances, largest } = self.measure(source.blocks().next().unwrap_or(source));
        let sum = variances.iter().map(|variance| f64::from(*variance)).sum::<f64>();
        let spread = (sum / variances.len() as f64).sqrt() as f32;
        let (step, of_channels) = match steps {
            // A profile with steps far beyond the rows' spread is damaged, or the text is unlike any that it was made from.
            Steps::Given(step, of_channels) => (step.min(MAX_STEP * spread), of_channels.to_vec()),
            Steps::OfSpread(relative) => (relative * spread, Vec::new()),
        };
        let relative = |channel: usize| of_channels.get(channel).map_or(1.0, |step| ratio(*step));
        // Also a step with which every value fits an integer.
        let needed = largest.iter().enumerate().map(|(channel, most)| most / relative(channel) / LARGEST * 1.1);
        let step = in_range(needed.fold(step, f32::max));
        let in_steps = |(channel, mean): (usize, &f32)| mean / (step * relative(channel)) * MEAN_PARTS;
        let means = means.iter().enumerate().map(|mean| in_steps(mean).round_ties_even() as i16).collect();
        Channels::new(step, of_channels, means)
    }

    /// Writes all of `source`. A fresh tensor's classes are set here.
    fn write(
        &mut self,
        source: Source<'_>,
        mut channels: Channels,
        form: Form,
        exact: &[u8],
    ) -> Result<(Vec<u8>, Channels), TooLarge> {
        let mut out = Vec::with_capacity(source.bytes.len() / 3 + exact.len());
        out.push(form as u8);
        out.extend_from_slice(exact);
        let mut body = Vec::with_capacity(source.bytes.len() / 3);
        for (i, block) in source.blocks().enumerate() {
            if i > 0 {
                channels.advance();
            }
            let is_fresh = i == 0 && form == Form::Fresh;
            self.block(block, &mut channels, is_fresh, &mut body)?;
            channels.counted(block.n_rows());
            if is_fresh {
                channels.write(&mut out);
            }
        }
        out.append(&mut body);
        Ok((out, channels))
    }

    fn block(
        &mut self,
        source: Source<'_>,
        channels: &mut Channels,
        is_fresh: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), TooLarge> {
        let n_rows = source.n_rows();
        for slab in slabs::slabs(channels.means.len(), source.head_size()) {
            self.quantize(source, channels, &slab)?;
            self.by_channel.resize(n_rows * slab.len(), 0);
            slabs::to_channels(&self.by_row, slab.len(), &mut self.by_channel);
            let integers = |channel: usize| &self.by_channel[channel * n_rows..(channel + 1) * n_rows];
            if is_fresh {
                for (channel, class) in channels.classes[slab.clone()].iter_mut().enumerate() {
                    let sum: u64 = integers(channel).iter().map(|q| u64::from(q.unsigned_abs())).sum();
                    *class = if sum == 0 { ZEROS } else { class_of((sum << 12) / n_rows as u64) };
                }
            }
            for channel in slabs::in_order(&channels.classes[slab.clone()]) {
                let class = channels.classes[slab.start + channel];
                symbols::write(&mut self.streams, class, integers(channel));
            }
            for channel in 0..slab.len() {
                channels.count(slab.start + channel, integers(channel));
            }
            symbols::finish(&mut self.streams, out);
        }
        Ok(())
    }

    /// Fills `by_row` with the integers of a slab.
    fn quantize(&mut self, source: Source<'_>, channels: &Channels, slab: &Range<usize>) -> Result<(), TooLarge> {
        let of_slab = || channels.steps.get(slab.clone()).unwrap_or_default();
        let mut inverses: Vec<f32> = of_slab().iter().map(|step| 1.0 / (channels.step * ratio(*step))).collect();
        inverses.resize(slab.len(), 1.0 / channels.step);
        let means: Vec<f32> = channels.means[slab.clone()].iter().map(|m| f32::from(*m) / MEAN_PARTS).collect();
        let mut by_row = std::mem::take(&mut self.by_row);
        by_row.clear();
        let mut largest = vec![0.0f32; slab.len()];
        self.rows(source, slab, |row| {
            let channels = inverses.iter().zip(&means).zip(&mut largest);
            by_row.extend(row.iter().zip(channels).map(|(x, ((inverse, mean), largest))| {
                let scaled = x * inverse - mean;
                *largest = largest.max(scaled.abs());
                // Adding 1.5 · 2^23 leaves a float no bits for a fraction, and its lowest bits are the integer.
                (scaled.clamp(-LARGEST, LARGEST) + 12_582_912.0).to_bits() as i16
            }));
        });
        self.by_row = by_row;
        match largest.iter().all(|largest| *largest <= LARGEST) {
            true => Ok(()),
            false => Err(TooLarge),
        }
    }
}
