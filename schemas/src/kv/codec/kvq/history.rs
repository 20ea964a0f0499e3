//! What both ends know about a tensor's channels: each one's step, mean and class.
//!
//! The first encoded rows of a tensor bring these. Later frames need no such side information, which would take a tenth
//! of a frame of 64 positions: means and classes follow from the rows before. This uses integers only, so both ends
//! derive the same.

use super::KvqError;
use super::classes::{self, class_of};

/// Means are in 1/16 of a channel's step.
pub(super) const MEAN_PARTS: f32 = 16.0;

/// Side information per channel: the mean, the class, and the step if the channels' steps differ.
const BYTES: usize = 3;

/// After as many rows, their weight is halved.
const REMEMBERED: u64 = 1024;

/// The range of steps. Products with any integer stay finite.
const STEPS: std::ops::RangeInclusive<f32> = 1e-30..=1e30;

/// The step of a channel whose [`Channels::steps`] is `s` is the tensor's, times `2^((s - 128) / 8)`.
pub(super) const EQUAL_STEP: u8 = 128;

/// The channels of a tensor.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Channels {
    /// The step between the values of two integers.
    pub(super) step: f32,
    /// Each channel's own step, relative to `step`; empty if all are [`EQUAL_STEP`].
    pub(super) steps: Vec<u8>,
    /// In 1/16 of the channel's step.
    pub(super) means: Vec<i16>,
    pub(super) classes: Vec<u8>,
    /// The rows that the sums count.
    pub(super) n_rows: u64,
    /// Sums of the values, in 1/16 of the channel's step.
    sums: Vec<i64>,
    /// Sums of the integers' magnitudes.
    magnitudes: Vec<u64>,
}

impl Channels {
    /// Channels without a history.
    pub(super) fn new(step: f32, steps: Vec<u8>, means: Vec<i16>) -> Channels {
        let n = means.len();
        Channels { step, steps, means, classes: vec![0; n], n_rows: 0, sums: vec![0; n], magnitudes: vec![0; n] }
    }

    /// The steps of all channels.
    pub(super) fn channel_steps(&self) -> impl Iterator<Item = f32> + '_ {
        (0..self.means.len()).map(|i| self.step * self.steps.get(i).map_or(1.0, |step| ratio(*step)))
    }

    /// Counts the integers of one channel.
    pub(super) fn count(&mut self, channel: usize, integers: &[i16]) {
        // At most 512 integers: the sums fit.
        let sum: i32 = integers.iter().map(|q| i32::from(*q)).sum();
        let magnitude: i32 = integers.iter().map(|q| i32::from(*q).abs()).sum();
        let n = integers.len() as i64;
        self.sums[channel] += 16 * i64::from(sum) + n * i64::from(self.means[channel]);
        self.magnitudes[channel] += u64::from(magnitude.unsigned_abs());
    }

    /// Ends the counting of `n_rows` rows of every channel.
    pub(super) fn counted(&mut self, n_rows: usize) {
        self.n_rows += n_rows as u64;
        while self.n_rows > REMEMBERED {
            self.n_rows /= 2;
            self.sums.iter_mut().for_each(|sum| *sum >>= 1);
            self.magnitudes.iter_mut().for_each(|sum| *sum >>= 1);
        }
    }

    /// Derives means and classes for the next rows. There must have been some.
    pub(super) fn advance(&mut self) {
        let n = self.n_rows.max(1);
        let signed = n.cast_signed();
        for (mean, sum) in self.means.iter_mut().zip(&self.sums) {
            let rounded = (sum + signed / 2).div_euclid(signed);
            *mean = rounded.clamp(i16::MIN.into(), i16::MAX.into()) as i16;
        }
        for (class, sum) in self.classes.iter_mut().zip(&self.magnitudes) {
            // Half an integer more than were seen: what was always 0 may change.
            *class = class_of(((sum << 12) + 2048) / n);
        }
    }

    /// Writes the side information.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.step.to_le_bytes());
        out.push(u8::from(!self.steps.is_empty()));
        out.extend_from_slice(&self.steps);
        out.extend(self.means.iter().flat_map(|mean| mean.to_le_bytes()));
        out.extend_from_slice(&self.classes);
    }

    /// Parses the side information of `n` channels at the start of `rest`.
    pub(super) fn read(rest: &mut &[u8], n: usize) -> Result<Channels, KvqError> {
        let (&[s0, s1, s2, s3, has_steps], later) = rest.split_first_chunk::<5>().ok_or(KvqError::Truncated)?;
        let step = f32::from_le_bytes([s0, s1, s2, s3]);
        if !STEPS.contains(&step) {
            return Err(KvqError::Step(step.to_string()));
        }
        if has_steps > 1 {
            return Err(KvqError::Mode(has_steps));
        }
        let n_steps = n * usize::from(has_steps);
        let (side, later) = later.split_at_checked(n_steps + BYTES * n).ok_or(KvqError::Truncated)?;
        *rest = later;
        let (steps, side) = side.split_at(n_steps);
        let (means, classes) = side.split_at(2 * n);
        let means = means.as_chunks::<2>().0.iter().map(|mean| i16::from_le_bytes(*mean)).collect();
        if let Some(class) = classes.iter().find(|class| **class > classes::LAST) {
            return Err(KvqError::Class(*class));
        }
        Ok(Channels { classes: classes.to_vec(), ..Channels::new(step, steps.to_vec(), means) })
    }
}

/// The step of a channel relative to its tensor's.
pub(super) fn ratio(step: u8) -> f32 {
    let eighths = i32::from(step) - i32::from(EQUAL_STEP);
    (f64::from(eighths) / 8.0).exp2() as f32
}

/// A step in the range of steps.
pub(super) fn in_range(step: f32) -> f32 {
    step.clamp(*STEPS.start(), *STEPS.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels() -> Channels {
        Channels { classes: vec![3, 0], ..Channels::new(0.5, vec![128, 136], vec![-5, 160]) }
    }

    #[test]
    fn side_information_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        channels().write(&mut bytes);
        assert_eq!(bytes.len(), 5 + 2 + 6);
        let mut rest = &bytes[..];
        assert_eq!(Channels::read(&mut rest, 2), Ok(channels()));
        assert!(rest.is_empty());
        assert_eq!(Channels::read(&mut &bytes[..12], 2), Err(KvqError::Truncated));
        assert_eq!(channels().channel_steps().collect::<Vec<_>>(), [0.5, 1.0]);
        for bad in [f32::NAN, 0.0, -1.0, f32::INFINITY, 1e-38] {
            let bytes = [&bad.to_le_bytes()[..], &bytes[4..]].concat();
            assert!(matches!(Channels::read(&mut &bytes[..], 2), Err(KvqError::Step(_))), "{bad}");
        }
        bytes[12] = classes::LAST + 1;
        assert_eq!(Channels::read(&mut &bytes[..], 2), Err(KvqError::Class(classes::LAST + 1)));
        bytes[4] = 2;
        assert_eq!(Channels::read(&mut &bytes[..], 2), Err(KvqError::Mode(2)));
    }

    #[test]
    fn means_and_classes_follow_the_rows_before() {
        let mut channels = channels();
        channels.count(0, &[1, -1, 3, 1]);
        channels.count(1, &[0, 0, 0, 0]);
        channels.counted(4);
        channels.advance();
        // Of (16 - 5), (-16 - 5), (48 - 5), (16 - 5); and a channel that was always its mean.
        assert_eq!(channels.means, [11, 160]);
        assert_eq!(channels.classes, [class_of(6 * 4096 / 4 + 512), class_of(512)]);
        for _ in 0..10 {
            channels.count(0, &[2; 512]);
            channels.counted(512);
            assert!(channels.n_rows <= REMEMBERED);
        }
    }
}
