use half::f16;
use proptest::prelude::*;

use super::super::super::layout::{Dtype, LayerShape, Section};
use super::super::super::rotation::{Angles, SectionRotation, rotate};
use super::super::floats;
use super::super::knowledge::{self, ModelKnowledge, TensorProfile};
use super::*;

const HEAD: u32 = 16;

fn layout(dtype: Dtype, rope: RopePairing) -> KvLayout {
    let rows = Rows { dtype, n_values: 2 * HEAD };
    let layer = LayerShape { k: rows, v: Some(rows) };
    KvLayout {
        rope,
        sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers: vec![layer] }],
        states: Vec::new(),
    }
}

fn keys() -> KeyRotation {
    let frequencies = (0..6).map(|i| 0.2f64.powi(i)).collect();
    KeyRotation { sections: vec![Some(SectionRotation { head_size: HEAD, frequencies })] }
}

/// Values around a mean for each channel, and their spread.
fn values(n_rows: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let mut row = |channel: u32| {
        f32::from(channel as i16 - 16) * 0.3 + (random() + random() + random()) * (1 + channel) as f32 * 0.05
    };
    (0..n_rows).flat_map(|_| (0..2 * HEAD).map(&mut row).collect::<Vec<_>>()).collect()
}

fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.block_bytes()];
    floats::store(dtype, values, &mut bytes);
    bytes
}

fn values_of(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes()];
    floats::load(dtype, bytes, &mut values);
    values
}

fn knowing(rotation: Option<&KeyRotation>) -> ModelKnowledge<'_> {
    ModelKnowledge { rotation, tensors: &[] }
}

/// Frames of one tensor through encoder and decoder. Returns the encoded frames and the decoded ones.
fn through(
    layout: &KvLayout,
    keys: Option<KeyRotation>,
    start: u32,
    frames: &[Vec<u8>],
) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let mut encoder = KvqEncoder::new(layout, knowing(keys.as_ref()), Level::Quality);
    let mut decoder = KvqDecoder::new(layout, keys);
    let mut at = start;
    let pairs = frames.iter().map(|bytes| {
        let encoded = encoder.encode(0, at, bytes).unwrap();
        assert!(encoded.len() <= max_encoded_bytes(bytes.len()));
        let mut decoded = vec![0xEE; bytes.len()];
        decoder.decode(0, at, &encoded, &mut decoded).unwrap();
        at += (bytes.len() / layout.sections[0].layers[0].k.bytes()) as u32;
        (encoded, decoded)
    });
    pairs.unzip()
}

/// Rotates K as a model does.
fn rotated(rope: RopePairing, keys: &KeyRotation, start: u32, values: &mut [f32]) {
    let rotation = keys.sections[0].as_ref().unwrap();
    let mut angles = Angles::default();
    angles.prepare(0, rotation, start, values.len() / 32);
    for (i, row) in values.chunks_mut(32).enumerate() {
        rotate(rope, HEAD as usize, row, angles.row(i), 1.0);
    }
}

fn rms(values: impl Iterator<Item = f32> + Clone) -> f32 {
    let n = values.clone().count().max(1) as f32;
    (values.map(|v| v * v).sum::<f32>() / n).sqrt()
}

#[test]
fn the_error_is_a_fixed_part_of_the_spread() {
    for (dtype, rope, keys) in [
        (Dtype::F16, RopePairing::HalfSplit, Some(keys())),
        (Dtype::F16, RopePairing::Interleaved, Some(keys())),
        (Dtype::F32, RopePairing::None, None),
        (Dtype::Bf16, RopePairing::Interleaved, None),
    ] {
        let layout = layout(dtype, rope);
        let mut at = 100;
        let frames: Vec<Vec<u8>> = [64, 700, 1, 40]
            .map(|n| {
                let mut values = values(n, n as u64);
                if let Some(keys) = &keys {
                    rotated(rope, keys, at, &mut values);
                }
                at += n as u32;
                bytes_of(dtype, &values)
            })
            .to_vec();
        let spread =
            rms(values(700, 1).chunks(32).flat_map(|row| (0..32).map(move |c| row[c] - (c as f32 - 16.0) * 0.3)));
        let (encoded, decoded) = through(&layout, keys, 100, &frames);
        for (i, (was, is)) in frames.iter().zip(&decoded).enumerate() {
            let (was, is) = (values_of(dtype, was), values_of(dtype, is));
            let error = rms(was.iter().zip(&is).map(|(a, b)| a - b));
            // Evenly distributed errors, and what BF16 rounds.
            let expected = Level::Quality.step() * spread / 12f32.sqrt();
            assert!(error < 1.15 * expected + if dtype == Dtype::Bf16 { 0.006 } else { 0.0 }, "frame {i}: {error}");
            assert!(i == 2 || error > 0.7 * expected, "frame {i}: {error} of {expected}");
            if dtype == Dtype::F16 && i < 2 {
                assert!(encoded[i].len() * 2 < frames[i].len(), "{} of {}", encoded[i].len(), frames[i].len());
            }
        }
        assert_eq!(encoded[1][0], Form::Fresh as u8, "64 rows say little about 700");
        assert_eq!(encoded[3][0], Form::Continued as u8);
    }
}

#[test]
fn a_profile_gives_each_channel_its_own_step() {
    let layout = layout(Dtype::F32, RopePairing::None);
    let n_channels = 2 * HEAD as usize;
    // An octave from channel to channel, around a step of 1/8.
    let channel_steps: Vec<u8> = (0..n_channels).map(|channel| 128 + 8 * (channel % 4) as u8 - 8).collect();
    let tensor = TensorProfile { step: 0.125, channel_steps };
    let profile = vec![tensor; 2];
    assert_eq!(knowledge::check(&profile, &layout), Ok(()));
    let errors = [Level::Quality, Level::Fast].map(|level| {
        let known = ModelKnowledge { rotation: None, tensors: &profile };
        let mut encoder = KvqEncoder::new(&layout, known, level);
        let mut decoder = KvqDecoder::new(&layout, None);
        let mut at = 100;
        let mut errors = vec![0.0f32; n_channels];
        for n_rows in [600, 40] {
            let was = values(n_rows, 11);
            let bytes = bytes_of(Dtype::F32, &was);
            let encoded = encoder.encode(0, at, &bytes).unwrap();
            let mut decoded = vec![0xEE; bytes.len()];
            decoder.decode(0, at, &encoded, &mut decoded).unwrap();
            at += n_rows as u32;
            for (i, (a, b)) in was.iter().zip(values_of(Dtype::F32, &decoded)).enumerate() {
                errors[i % n_channels] = errors[i % n_channels].max((a - b).abs());
            }
        }
        errors
    });
    for (errors, level) in errors.iter().zip([Level::Quality, Level::Fast]) {
        for (channel, error) in errors.iter().enumerate() {
            let step = level.profiled_step() * 0.125 * 2f32.powi(channel as i32 % 4 - 1);
            assert!((0.4..0.51).contains(&(error / step)), "channel {channel}: {error} of {step}");
        }
    }
}

#[test]
fn a_value_far_beyond_a_profile_is_kept() {
    let layout = layout(Dtype::F16, RopePairing::None);
    let tensor = TensorProfile { step: 1e-4, channel_steps: vec![0; 2 * HEAD as usize] };
    let profile = vec![tensor; 2];
    let frame = bytes_of(Dtype::F16, &values(64, 9));
    let known = ModelKnowledge { rotation: None, tensors: &profile };
    let encoded = KvqEncoder::new(&layout, known, Level::Quality).encode(0, 9, &frame).unwrap();
    let mut decoded = vec![0; frame.len()];
    KvqDecoder::new(&layout, None).decode(0, 9, &encoded, &mut decoded).unwrap();
    let pairs = values_of(Dtype::F16, &frame).into_iter().zip(values_of(Dtype::F16, &decoded));
    assert!(pairs.into_iter().all(|(was, is)| (was - is).abs() < 1e-3));
}

#[test]
fn the_first_positions_of_a_sequence_are_exact() {
    let layout = layout(Dtype::F16, RopePairing::HalfSplit);
    let row_bytes = 2 * 2 * HEAD as usize;
    for start in 0..6 {
        let frame = bytes_of(Dtype::F16, &values(40, 5));
        let (_, decoded) = through(&layout, Some(keys()), start, std::slice::from_ref(&frame));
        let exact = 4usize.saturating_sub(start as usize) * row_bytes;
        assert_eq!(decoded[0][..exact], frame[..exact]);
        assert_ne!(decoded[0], frame);
    }
    let short = bytes_of(Dtype::F16, &values(2, 5));
    assert_eq!(through(&layout, None, 1, std::slice::from_ref(&short)).1[0], short);
}

#[test]
fn extremes_stay_finite_and_close() {
    let layout = layout(Dtype::F16, RopePairing::None);
    let mut extreme = values(64, 9);
    extreme[70] = 65_504.0;
    extreme[71] = -65_504.0;
    let zeros = vec![0.0; extreme.len()];
    let constant = vec![3.0; extreme.len()];
    let tiny = vec![6e-8; extreme.len()];
    for values in [&extreme, &zeros, &constant, &tiny] {
        let frame = bytes_of(Dtype::F16, values);
        let (_, decoded) = through(&layout, None, 100, std::slice::from_ref(&frame));
        let is = values_of(Dtype::F16, &decoded[0]);
        let largest = values.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        let was = values_of(Dtype::F16, &frame);
        assert!(is.iter().zip(&was).all(|(a, b)| (a - b).abs() <= largest / 250.0), "{largest}");
    }
    // A later frame that its history does not fit.
    let frames = [bytes_of(Dtype::F16, &values(64, 3)), bytes_of(Dtype::F16, &extreme)];
    let (encoded, decoded) = through(&layout, None, 100, &frames);
    assert_ne!(encoded[1][0], Form::Continued as u8);
    assert_eq!(values_of(Dtype::F16, &decoded[1])[70].round() as i32 / 100, 655);
    for bad in [f32::NAN, f32::INFINITY] {
        let bytes = [f16::from_f32(bad).to_le_bytes(), [0, 0]].concat().repeat(16);
        let encoded = KvqEncoder::new(&layout, knowing(None), Level::Fast).encode(0, 9, &bytes);
        assert_eq!(encoded, Err(KvqError::NotFinite));
    }
}

#[test]
fn damaged_tensors_are_refused_by_name() {
    let layout = layout(Dtype::F16, RopePairing::HalfSplit);
    let frame = bytes_of(Dtype::F16, &values(40, 7));
    let (encoded, _) = through(&layout, Some(keys()), 50, std::slice::from_ref(&frame));
    let good = &encoded[0];
    let decode = |encoded: &[u8]| {
        let mut decoded = vec![0; frame.len()];
        KvqDecoder::new(&layout, Some(keys())).decode(0, 50, encoded, &mut decoded)
    };
    assert_eq!(decode(good), Ok(()));
    assert_eq!(decode(&[]), Err(KvqError::Truncated));
    assert_eq!(decode(&[&good[..], &[0]].concat()), Err(KvqError::Rest(1)));
    for n in [1, 5, 6, 40, good.len() - 1] {
        assert_eq!(decode(&good[..n]), Err(KvqError::Truncated), "{n}");
    }
    assert_eq!(decode(&[3, 0, 0]), Err(KvqError::Mode(3)));
    let continued = [&[Form::Continued as u8][..], &good[1..]].concat();
    assert_eq!(decode(&continued), Err(KvqError::NothingToContinue));
    assert_eq!(decode(&[&[Form::Plain as u8][..], &frame].concat()), Ok(()));
    assert_eq!(decode(&[&[Form::Plain as u8][..], &frame[1..]].concat()), Err(KvqError::Truncated));
    // A stream that gives a byte to its neighbour.
    let lengths_at = 1 + 5 + 3 * 2 * HEAD as usize;
    let mut moved = good.clone();
    moved[lengths_at] += 1;
    assert!(decode(&moved).is_err());
    let all_zeros = {
        let mut zeros = good.clone();
        zeros[1 + 5 + 2 * 2 * HEAD as usize..lengths_at].fill(0);
        zeros
    };
    assert!(matches!(decode(&all_zeros), Err(KvqError::StreamLength { n_bits: 0, .. })));
    let other = KvqDecoder::new(&layout, None).decode(2, 50, good, &mut vec![0; frame.len()]);
    assert_eq!(other, Err(KvqError::NoTensor(2)));
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(
        form in 0..4u8,
        mut bytes in prop::collection::vec(any::<u8>(), 0..800),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
        n_rows in 1..40usize,
    ) {
        let layout = layout(Dtype::F16, RopePairing::HalfSplit);
        let mut decoder = KvqDecoder::new(&layout, Some(keys()));
        let frame = bytes_of(Dtype::F16, &values(n_rows, 7));
        let mut damaged = KvqEncoder::new(&layout, knowing(Some(&keys())), Level::Fast).encode(0, 5, &frame).unwrap();
        let at = at.index(damaged.len());
        damaged[at] = to;
        let _ = decoder.decode(0, 5, &damaged, &mut vec![0; frame.len()]);
        bytes.insert(0, form);
        let mut decoded = vec![0; frame.len()];
        let _ = decoder.decode(0, 5, &bytes, &mut decoded);
        // Whatever was decoded is finite: the reader would refuse it otherwise, but it never has to.
        prop_assert!(form == Form::Plain as u8 || values_of(Dtype::F16, &decoded).iter().all(|v| v.is_finite()));
    }
}
