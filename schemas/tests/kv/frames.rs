//! Wrong frames with a right MAC are refused: a peer with the key can still send wrong frames.

use baton_schemas::kv::record::{RecordHeader, RecordKind};
use baton_schemas::kv::*;

use crate::refusal;
use crate::sample::{self, payload, read_all, sealed};

/// The offset of the rows in a frame's payload.
const BODY: usize = 56;

/// Returns what a reader makes of a good stream's first frame after `change` to its payload.
fn bad_frame(codec: Codec, change: impl Fn(&mut Vec<u8>)) -> FrameError {
    bad_frame_at(codec, 2, change)
}

/// Returns what a reader makes of the frame at `record` after `change`, and after the records before it.
fn bad_frame_at(codec: Codec, record: usize, change: impl Fn(&mut Vec<u8>)) -> FrameError {
    let good = sample::stream(codec);
    let mut bytes = payload(&good[record]).to_vec();
    change(&mut bytes);
    refusal(codec, &[good[1..record].concat(), sealed(RecordKind::Frame, record as u32, &bytes)])
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn frames_go_on_where_the_last_one_ended() {
    let next = 2;
    let end = 12;
    for codec in Codec::OF_ROWS {
        for (p0, p1) in [(3, 5), (1, 5), (2, 2), (2, 1), (2, 13), (2, u32::MAX), (u32::MAX, 0), (5, 9)] {
            let refused = bad_frame(codec, |frame| {
                put(frame, 0, p0);
                put(frame, 4, p1);
            });
            assert_eq!(refused, FrameError::Positions { p0, p1, next, end }, "{codec:?}");
        }
    }
    let frames = sample::stream(Codec::None);
    let again = [sealed(RecordKind::Frame, 1, payload(&frames[2])), sealed(RecordKind::Frame, 2, payload(&frames[2]))];
    assert_eq!(refusal(Codec::None, &again), FrameError::Positions { p0: 2, p1: 5, next: 5, end: 12 });
}

#[test]
fn sections_start_where_they_may() {
    let start = |section, start, latest| FrameError::SectionStart { section, start, earliest: 2, latest, p0: 2, p1: 5 };
    for codec in Codec::OF_ROWS {
        assert_eq!(bad_frame(codec, |frame| put(frame, 48, 3)), start(0, 3, 2), "a full section, late");
        assert_eq!(bad_frame(codec, |frame| put(frame, 48, 1)), start(0, 1, 2));
        assert_eq!(bad_frame(codec, |frame| put(frame, 52, 6)), start(1, 6, 5), "behind the frame");
        assert_eq!(bad_frame(codec, |frame| put(frame, 52, 0)), start(1, 0, 5));
        let count = |found| FrameError::SectionCount { p0: 2, p1: 5, expected: 2, found };
        assert_eq!(bad_frame(codec, |frame| put(frame, 44, 1)), count(1));
        assert_eq!(bad_frame(codec, |frame| put(frame, 44, u32::MAX)), count(u32::MAX));
    }
}

#[test]
fn rows_that_decoding_needs_cannot_be_left_out() {
    // The token at 12 attends to 4 positions: 9, 10, 11 and its own.
    let refused = bad_frame_at(Codec::None, 4, |frame| put(frame, 52, 10));
    assert_eq!(refused, FrameError::SectionStart { section: 1, start: 10, earliest: 9, latest: 9, p0: 9, p1: 12 });
    let (mut writer, _) =
        HandoffWriter::begin(sample::CLUSTER_KEY, sample::handoff(), Codec::None, Mac::Blake3).unwrap();
    let late = sample::chunk(&sample::layout(), 2, 12, &[2, 10]);
    assert!(matches!(writer.frame(&late), Err(WriteError::Frame(FrameError::SectionStart { .. }))));
    assert!(writer.frame(&sample::chunk(&sample::layout(), 2, 12, &[2, 9])).is_ok(), "a refusal changes nothing");
}

#[test]
fn bodies_have_exactly_their_length() {
    let good = payload(&sample::stream(Codec::None)[2]).len() as u64 - BODY as u64;
    let wrong = |found| FrameError::BodyLength { p0: 2, p1: 5, expected: good, found };
    assert_eq!(bad_frame(Codec::None, |frame| frame.push(0)), wrong(good + 1));
    assert_eq!(bad_frame(Codec::None, |frame| _ = frame.pop()), wrong(good - 1));
    assert_eq!(bad_frame(Codec::None, |frame| frame.truncate(BODY)), wrong(0));
    for codec in [Codec::PlanesZstd, Codec::Q8_0] {
        assert!(matches!(bad_frame(codec, |frame| frame.push(0)), FrameError::BodyLength { .. }));
        assert!(matches!(bad_frame(codec, |frame| _ = frame.pop()), FrameError::BodyLength { .. }));
        assert!(matches!(bad_frame(codec, |frame| frame.truncate(BODY)), FrameError::BodyLength { .. }));
        let count = FrameError::TensorCount { p0: 2, p1: 5, expected: 5, found: 6 };
        assert_eq!(bad_frame(codec, |frame| put(frame, BODY, 6)), count);
        // One tensor a byte longer, the next a byte shorter.
        let shifted = bad_frame(codec, |frame| {
            let length = |i: usize| u32::from_le_bytes(frame[BODY + 4 + 4 * i..][..4].try_into().unwrap());
            let a = length(0);
            let b = length(1);
            put(frame, BODY + 4, a + 1);
            put(frame, BODY + 8, b - 1);
        });
        assert!(matches!(shifted, FrameError::Decode { tensor: 0, .. }), "{shifted}");
        assert!(matches!(bad_frame(codec, |frame| put(frame, BODY + 4, u32::MAX)), FrameError::BodyLength { .. }));
    }
    for codec in Codec::OF_ROWS {
        assert_eq!(bad_frame(codec, |frame| frame.truncate(47)), FrameError::FrameTooShort { n_bytes: 47 });
        assert_eq!(bad_frame(codec, Vec::clear), FrameError::FrameTooShort { n_bytes: 0 });
    }
}

#[test]
fn frames_belong_to_the_readers_tokens() {
    let wrong = |p0, p1| FrameError::Prefix { p0, p1 };
    for codec in Codec::OF_ROWS {
        assert_eq!(bad_frame(codec, |frame| frame[8] ^= 1), wrong(2, 5));
        for (token, refused) in [(0, wrong(2, 5)), (4, wrong(2, 5)), (5, wrong(5, 9)), (11, wrong(9, 12))] {
            let mut handoff = sample::handoff();
            handoff.tokens[token] += 1;
            let mut reader = HandoffReader::new(sample::CLUSTER_KEY, handoff, &[codec]).unwrap();
            assert_eq!(read_all(&mut reader, &sample::stream(codec).concat()).1, Err(refused), "token {token}");
        }
    }
}

#[test]
fn one_value_that_is_not_finite_refuses_its_frame() {
    for (record, (chunk, (p0, p1, _))) in sample::chunks().iter().zip(sample::FRAMES).enumerate() {
        let mut at = BODY;
        // The sample's only layer without V is the last, so both lists of tensors have the same order.
        for (tensor, (bytes, rows)) in chunk.tensors().zip(sample::layout().tensors()).enumerate() {
            let bad: &[&[u8]] = match rows.dtype {
                Dtype::F16 => &[&[0, 0x7C], &[0, 0xFC], &[1, 0x7E]],
                Dtype::Bf16 => &[&[0x80, 0x7F], &[0x80, 0xFF], &[0xC0, 0x7F]],
                Dtype::F32 => &[&[0, 0, 0x80, 0x7F], &[0, 0, 0x80, 0xFF], &[0, 0, 0xC0, 0x7F]],
                quantized => panic!("{quantized:?} in the sample"),
            };
            for value in (at..at + bytes.len()).step_by(rows.dtype.block_bytes()) {
                for bad in bad {
                    let put = |frame: &mut Vec<u8>| frame[value..][..bad.len()].copy_from_slice(bad);
                    let refused = bad_frame_at(Codec::None, 2 + record, put);
                    assert_eq!(refused, FrameError::NotFinite { p0, p1, tensor }, "at {value}: {bad:?}");
                }
            }
            at += bytes.len();
        }
    }
}

#[test]
fn no_codec_carries_a_value_that_is_not_finite() {
    let mut chunk = sample::chunks().remove(0);
    let mut k = chunk.sections[0].layers[1].k.to_vec();
    k[70..72].copy_from_slice(&[0, 0x7C]);
    chunk.sections[0].layers[1].k = k.into();
    let (mut writer, head) =
        HandoffWriter::begin(sample::CLUSTER_KEY, sample::handoff(), Codec::PlanesZstd, Mac::Blake3).unwrap();
    let stream = [head, writer.frame(&chunk).unwrap()].concat().concat();
    let refused = FrameError::NotFinite { p0: 2, p1: 5, tensor: 2 };
    assert_eq!(read_all(&mut sample::reader(), &stream).1, Err(refused));
    let (mut writer, _) =
        HandoffWriter::begin(sample::CLUSTER_KEY, sample::handoff(), Codec::Q8_0, Mac::Blake3).unwrap();
    assert_eq!(writer.frame(&chunk), Err(WriteError::Codec(CodecError::Scale { block: 1 })));
    let scale = bad_frame(Codec::Q8_0, |frame| frame[BODY + 24..][..2].copy_from_slice(&[0, 0x7C]));
    let reason = CodecError::Scale { block: 0 };
    assert_eq!(scale, FrameError::Decode { p0: 2, p1: 5, tensor: 0, reason });
}

#[test]
fn frames_are_encoded_as_the_head_says() {
    let other = FrameError::OtherCodec { p0: 2, p1: 5, expected: Codec::None, found: Codec::Q8_0 };
    assert_eq!(bad_frame(Codec::None, |frame| frame[40] = 2), other);
    assert_eq!(bad_frame(Codec::None, |frame| frame[40] = 9), FrameError::UnknownCodec { p0: 2, p1: 5, codec: 9 });
    assert_eq!(bad_frame(Codec::None, |frame| frame[42] = 1), FrameError::FrameReserved { p0: 2, p1: 5 });
}

#[test]
fn the_limits_of_a_frame_hold_whatever_the_layout() {
    let rows = sample::rows(Dtype::F32, 1 << 20);
    let layers = vec![LayerShape { k: rows, v: Some(rows) }; 16];
    let layout = KvLayout {
        rope: RopePairing::None,
        sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
        states: Vec::new(),
    };
    let handoff = Handoff { layout, start: 0, tokens: vec![0; 10_000], ..sample::handoff() };
    for codec in Codec::OF_ROWS {
        let (_, head) = HandoffWriter::begin(sample::CLUSTER_KEY, handoff.clone(), codec, Mac::Blake3).unwrap();
        let mut reader = HandoffReader::new(sample::CLUSTER_KEY, handoff.clone(), &[codec]).unwrap();
        read_all(&mut reader, &head.concat()).1.unwrap();
        let header = RecordHeader { kind: RecordKind::Frame, index: 1, length: 1 << 32 };
        let refused = read_all(&mut reader, &header.to_bytes()).1;
        assert!(matches!(refused, Err(FrameError::TooLong { limit, .. }) if limit < 3 << 30), "{refused:?}");
    }
    let span = |p1| Span { p0: 0, p1, starts: vec![0] }.check(&handoff.layout, 0, 10_000);
    assert_eq!(span(8), Ok(()));
    let limit = 1 << 30;
    assert_eq!(span(9), Err(FrameError::TooManyBytes { p0: 0, p1: 9, n_bytes: 9 << 27, limit }));
    assert_eq!(span(4097), Err(FrameError::TooManyPositions { p0: 0, p1: 4097, limit: 4096 }));
}

#[test]
fn one_scale_that_is_not_finite_refuses_a_quantized_frame() {
    let good = sample::stream_of(sample::quantized(), Codec::None, Mac::Blake3);
    let mut at = 52;
    for (tensor, rows) in sample::quantized().layout.tensors().enumerate() {
        let n_scales = match rows.dtype {
            Dtype::Q4_1 | Dtype::Q5_1 => 2,
            _ => 1,
        };
        let n_bytes = 3 * rows.bytes();
        for scale in (at..at + n_bytes).step_by(rows.dtype.block_bytes()).flat_map(|at| [at, at + 2 * (n_scales - 1)]) {
            let mut bytes = payload(&good[2]).to_vec();
            bytes[scale..scale + 2].copy_from_slice(&[0, 0x7C]);
            let stream = [good[..2].concat(), sealed(RecordKind::Frame, 2, &bytes)].concat();
            let (_, end) = read_all(&mut sample::reader_of(sample::quantized()), &stream);
            assert_eq!(end, Err(FrameError::NotFinite { p0: 2, p1: 5, tensor }), "at {scale}");
        }
        at += n_bytes;
    }
}

#[test]
fn quantized_rows_travel_as_they_are_or_not_at_all() {
    for codec in [Codec::PlanesZstd, Codec::Q8_0, Codec::Kvq, Codec::KvqFast] {
        let reason = CodecError::Quantized { dtype: Dtype::Q8_0 };
        assert_eq!(codec.check(&sample::quantized().layout), Err(reason.clone()));
        let written = HandoffWriter::begin(sample::CLUSTER_KEY, sample::quantized(), codec, Mac::Blake3);
        assert_eq!(written.err(), Some(WriteError::Codec(reason.clone())));
        let good = sample::stream_of(sample::quantized(), Codec::None, Mac::Blake3);
        let mut head: HandoffHead = serde_json::from_slice(payload(&good[0])).unwrap();
        head.codec = codec;
        let head = sealed(RecordKind::Head, 0, &serde_json::to_vec(&head).unwrap());
        let (_, end) = read_all(&mut sample::reader_of(sample::quantized()), &head);
        assert_eq!(end, Err(FrameError::Codec { codec, reason }));
    }
}
