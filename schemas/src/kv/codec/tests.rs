use half::f16;

use super::*;
use crate::kv::layout::{Dtype, LayerShape, RopePairing, Section};

fn rows(dtype: Dtype, n_values: u32) -> Rows {
    Rows { dtype, n_values }
}

/// A layout with one tensor.
fn layout(rows: Rows) -> KvLayout {
    let layers = vec![LayerShape { k: rows, v: None }];
    KvLayout {
        rope: RopePairing::None,
        sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
        states: Vec::new(),
    }
}

fn tensor(rows: Rows) -> TensorRows {
    TensorRows { index: 0, start: 0, rows }
}

fn encode(codec: Codec, rows: Rows, bytes: &[u8]) -> Result<Vec<u8>, CodecError> {
    Encoder::new(codec, &layout(rows), ModelKnowledge::default())?.unwrap().encode(tensor(rows), bytes)
}

fn decode(codec: Codec, rows: Rows, encoded: &[u8], n_bytes: usize) -> Result<Vec<u8>, CodecError> {
    let mut decoded = vec![0; n_bytes];
    let mut decoder = Decoder::new(codec, &layout(rows), None).unwrap().unwrap();
    decoder.decode(tensor(rows), encoded, &mut decoded).map(|()| decoded)
}

fn f16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()
}

#[test]
fn codecs_keep_their_numbers_and_names() {
    let names = ["none", "planes_zstd", "q8_0", "kvq", "kvq_fast", "state_f16", "state_int8"];
    for (codec, (number, name)) in Codec::ALL.into_iter().zip((0..).zip(names)) {
        assert_eq!((codec as u8, Codec::from_number(number)), (number, Some(codec)));
        assert_eq!(serde_json::to_value(codec).unwrap(), name);
        assert_eq!(codec.as_str(), name);
    }
    assert_eq!(Codec::from_number(7), None);
}

#[test]
fn planes_keep_every_bit_and_find_what_repeats() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let bytes: Vec<u8> = (0..64u32 * 4).flat_map(|i| (1.0 + i as f32 * 1e-3).to_le_bytes()).collect();
        let encoded = encode(Codec::PlanesZstd, rows(dtype, 64), &bytes).unwrap();
        assert!(encoded.len() < bytes.len());
        assert!(encoded.len() <= Codec::PlanesZstd.max_encoded_bytes(rows(dtype, 64), bytes.len()));
        assert_eq!(decode(Codec::PlanesZstd, rows(dtype, 64), &encoded, bytes.len()).unwrap(), bytes);
    }
}

#[test]
fn planes_of_another_length_are_refused() {
    let rows = rows(Dtype::F16, 2);
    let encoded = encode(Codec::PlanesZstd, rows, &[1, 2, 3, 4]).unwrap();
    let decode = |encoded: &[u8], n_bytes| decode(Codec::PlanesZstd, rows, encoded, n_bytes);
    assert_eq!(decode(&encoded, 4).unwrap(), [1, 2, 3, 4]);
    assert_eq!(decode(&encoded, 8), Err(CodecError::DecodedLength { expected: 8, found: 4 }));
    assert!(matches!(decode(&encoded, 2), Err(CodecError::Zstd(_))), "more than there is room for");
    let twice = [&encoded[..], &encoded].concat();
    let n = encoded.len();
    assert_eq!(decode(&twice, 8), Err(CodecError::EncodedLength { expected: n, found: 2 * n }));
    let skippable = [&encoded[..], &[0x50, 0x2A, 0x4D, 0x18, 1, 0, 0, 0, 9]].concat();
    assert_eq!(decode(&skippable, 4), Err(CodecError::EncodedLength { expected: n, found: n + 9 }));
    assert!(matches!(decode(&encoded[..n - 1], 4), Err(CodecError::Zstd(_))));
    assert!(decode(&[], 4).is_err());
    assert_eq!(decode(&encoded, 0), Err(CodecError::EncodedLength { expected: 0, found: n }));
}

#[test]
fn a_frame_that_claims_a_huge_size_takes_no_memory() {
    // A zstd frame header with a content size of 2^40 and no blocks to speak of.
    let mut claim = vec![0x28, 0xB5, 0x2F, 0xFD, 0b1110_0000];
    claim.extend((1u64 << 40).to_le_bytes());
    claim.extend([1, 0, 0]);
    assert!(decode(Codec::PlanesZstd, rows(Dtype::F16, 2), &claim, 4).is_err());
}

#[test]
fn q8_0_is_within_half_a_scale() {
    let values: Vec<f32> = (0..96).map(|i| (i as f32 - 40.0) * 0.37).collect();
    let bytes = f16s(&values);
    let rows = rows(Dtype::F16, 96);
    let encoded = encode(Codec::Q8_0, rows, &bytes).unwrap();
    assert_eq!(encoded.len(), 3 * 34);
    let decoded = decode(Codec::Q8_0, rows, &encoded, bytes.len()).unwrap();
    for (block, (was, is)) in bytes.chunks(64).zip(decoded.chunks(64)).enumerate() {
        let [was, is] =
            [was, is].map(|b| b.as_chunks().0.iter().map(|v| f16::from_le_bytes(*v).to_f32()).collect::<Vec<_>>());
        let largest = was.iter().fold(0.0f32, |a, v| a.max(v.abs()));
        for (was, is) in was.iter().zip(is) {
            // And F16's own rounding, of the scale and of the value.
            let bound = largest / 254.0 * (1.0 + 1.0 / 1024.0) + was.abs() / 2048.0;
            assert!((was - is).abs() <= bound, "block {block}: {was} became {is}");
        }
    }
}

#[test]
fn q8_0_holds_the_ends_of_every_range() {
    let check = |dtype, values: [f32; 32], bytes: Vec<u8>| {
        let encoded = encode(Codec::Q8_0, rows(dtype, 32), &bytes).unwrap();
        let decoded = decode(Codec::Q8_0, rows(dtype, 32), &encoded, bytes.len()).unwrap();
        assert!(crate::kv::finite::all_finite(dtype, &decoded), "{dtype:?} {values:?}");
        decoded
    };
    let mut largest = [0.0; 32];
    (largest[3], largest[4]) = (65_504.0, -65_504.0);
    assert_eq!(check(Dtype::F16, largest, f16s(&largest)), f16s(&largest), "not infinite");
    let tiny = [6e-8; 32];
    check(Dtype::F16, tiny, f16s(&tiny));
    assert_eq!(check(Dtype::F16, [0.0; 32], f16s(&[0.0; 32])), f16s(&[0.0; 32]));
    let wide = [8.3e6f32; 32];
    check(Dtype::F32, wide, wide.iter().flat_map(|v| v.to_le_bytes()).collect());
    check(Dtype::Bf16, wide, wide.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect());
}

#[test]
fn q8_0_refuses_what_it_cannot_hold() {
    let odd = rows(Dtype::F16, 48);
    assert_eq!(encode(Codec::Q8_0, odd, &f16s(&[0.0; 96])), Err(CodecError::Blocks { n_values: 48, block: 32 }));
    for bad in [f32::NAN, f32::INFINITY, 1e30] {
        let mut values = [1.0f32; 64];
        values[40] = bad;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(encode(Codec::Q8_0, rows(Dtype::F32, 64), &bytes), Err(CodecError::Scale { block: 1 }), "{bad}");
    }
    let one = rows(Dtype::F16, 32);
    let mut encoded = encode(Codec::Q8_0, one, &f16s(&[1.0; 32])).unwrap();
    assert_eq!(decode(Codec::Q8_0, one, &encoded[1..], 64), Err(CodecError::EncodedLength { expected: 34, found: 33 }));
    for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
        encoded[..2].copy_from_slice(&bad.to_le_bytes());
        assert_eq!(decode(Codec::Q8_0, one, &encoded, 64), Err(CodecError::Scale { block: 0 }));
    }
}

/// The bytes of each tensor of a frame.
type FrameBytes = Vec<Vec<u8>>;

/// Frames of a layout with several tensors, encoded and decoded by so many coders.
fn by_coders(codec: Codec, n: usize, frames: &[FrameBytes]) -> (Vec<FrameBytes>, Vec<FrameBytes>) {
    let rows = rows(Dtype::F16, 128);
    let layers = vec![LayerShape { k: rows, v: Some(rows) }; frames[0].len() / 2];
    let layout = KvLayout {
        rope: RopePairing::None,
        sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
        states: Vec::new(),
    };
    let make = || Encoder::new(codec, &layout, ModelKnowledge::default());
    let mut encoders = Coders::of(n, make).unwrap().unwrap();
    let mut decoders = Coders::of(n, || Decoder::new(codec, &layout, None)).unwrap().unwrap();
    let mut start = 0;
    let coded = frames.iter().map(|frame| {
        let n_bytes = frame.iter().map(Vec::len).sum();
        let tensor = |index| TensorRows { index, start, rows };
        let encoded = encoders
            .for_all(frame.iter().enumerate(), n_bytes, |encoder, (index, rows)| encoder.encode(tensor(index), rows));
        let encoded = encoded.unwrap();
        let decoded = decoders.for_all(encoded.iter().enumerate(), n_bytes, |decoder, (index, encoded)| {
            let mut decoded = vec![0; frame[index].len()];
            decoder.decode(tensor(index), encoded, &mut decoded).map(|()| decoded)
        });
        start += (frame[0].len() / rows.bytes()) as u32;
        (encoded, decoded.unwrap())
    });
    coded.unzip()
}

#[test]
fn any_number_of_coders_writes_and_reads_the_same() {
    const N_TENSORS: usize = 8;
    let value = |i: usize| ((i * 2_654_435_761) % 65_536) as f32 / 65_536.0 - 0.5;
    // Shared among the coders, on one thread, and shared again: kvq remembers the frame before.
    let frames = [600, 20, 600].map(|n_rows| {
        let tensor =
            |t| f16s(&(0..n_rows * 128).map(|i| value(i * (t + 3)) + (i % 128) as f32 / 40.0).collect::<Vec<_>>());
        (0..N_TENSORS).map(tensor).collect::<Vec<_>>()
    });
    for codec in Codec::OF_ROWS.into_iter().filter(|codec| *codec != Codec::None) {
        let (encoded, decoded) = by_coders(codec, 1, &frames);
        assert_eq!(codec.is_lossy(), decoded != frames, "{codec:?}");
        for n in [2, 3, N_TENSORS] {
            assert!(by_coders(codec, n, &frames) == (encoded.clone(), decoded.clone()), "{codec:?} by {n}");
        }
    }
}
