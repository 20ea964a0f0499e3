//! States that are wrong, at the wrong place or missing are refused, although their MAC is right.

use baton_schemas::kv::record::{RecordHeader, RecordKind};
use baton_schemas::kv::*;
use serde_json::json;

use crate::sample::{self, payload, read_all, sealed};

/// The offset of the values in a state record's payload.
const VALUES: usize = 48;

/// The stream of the hybrid sample: head, wait, frame to 5, its states in two records, frame to 9, the first states of 12, the
/// last frame, the last state, end.
fn good() -> Vec<Vec<u8>> {
    sample::stream_of(sample::hybrid(), Codec::None, Mac::Blake3)
}

/// What a reader makes of the records of [`good`] with these numbers, sealed again in this order, each after `change`.
fn read(order: &[usize], change: impl Fn(usize, &mut Vec<u8>)) -> (Vec<HandoffRecord>, Result<(), FrameError>) {
    let good = good();
    let stream = order.iter().zip(0..).flat_map(|(&record, index)| {
        let mut bytes = payload(&good[record]).to_vec();
        change(record, &mut bytes);
        sealed(sample::kind(&good[record], record as u32), index, &bytes)
    });
    let mut reader = sample::reader_of(sample::hybrid());
    let (said, end) = read_all(&mut reader, &stream.collect::<Vec<u8>>());
    if let Err(refused) = &end {
        assert_eq!(reader.read(&mut &b"x"[..]), Err(refused.clone()), "dead afterwards");
    }
    (said, end)
}

/// Why a reader refuses the records with these numbers.
fn refusal(order: &[usize]) -> FrameError {
    read(order, |_, _| {}).1.expect_err("the stream was taken")
}

/// Why a reader refuses the stream after `change` to the payload of the record with this number.
fn bad_record(record: usize, change: impl Fn(&mut Vec<u8>)) -> FrameError {
    let order: Vec<usize> = (0..=record).collect();
    let changed = |number: usize, bytes: &mut Vec<u8>| {
        if number == record {
            change(bytes)
        }
    };
    read(&order, changed).1.expect_err("the stream was taken")
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn all_states_of_a_position_are_yielded_once_with_their_last_record() {
    let (said, end) = read(&(0..10).collect::<Vec<_>>(), |_, _| {});
    assert_eq!(end, Ok(()));
    let kinds: Vec<String> = said
        .iter()
        .map(|record| match record {
            HandoffRecord::State(state) => format!("state {}", state.position()),
            HandoffRecord::Frame(kv) => format!("frame {}", kv.span().p1),
            HandoffRecord::Head(head) => format!("head {:?} {}", head.states_at, head.version),
            HandoffRecord::Wait(_) => "wait".into(),
            other => format!("{other:?}").chars().take(3).collect(),
        })
        .collect();
    let wanted = ["head [5, 12] 2", "wait", "frame 5", "state 5", "frame 9", "frame 12", "state 12", "End"];
    assert_eq!(kinds, wanted);
    // All of them before the first frame: a reader takes them when they come.
    let (said, end) = read(&[0, 3, 4, 6, 8, 2, 5, 7, 9], |_, _| {});
    assert_eq!(end, Ok(()));
    assert!(matches!(&said[1..3], [HandoffRecord::State(_), HandoffRecord::State(_)]), "{said:?}");
}

#[test]
fn a_stream_without_all_states_does_not_end() {
    assert_eq!(refusal(&[0, 2, 5, 7, 9]), FrameError::StateMissing { position: 5 });
    assert_eq!(refusal(&[0, 2, 3, 5, 7, 9]), FrameError::StateMissing { position: 5 });
    assert_eq!(refusal(&[0, 2, 3, 4, 5, 7, 9]), FrameError::StateMissing { position: 12 });
    assert_eq!(refusal(&[0, 2, 3, 4, 5, 6, 7, 9]), FrameError::StateMissing { position: 12 });
    assert_eq!(refusal(&[0, 3, 4, 6, 8, 2, 5, 9]), FrameError::Incomplete { next: 9, end: 12 });
}

#[test]
fn states_come_once_and_in_order() {
    assert_eq!(refusal(&[0, 4]), FrameError::StateOrder { position: 5, expected: 0, found: 1 });
    assert_eq!(refusal(&[0, 3, 3]), FrameError::StateOrder { position: 5, expected: 1, found: 0 });
    assert_eq!(refusal(&[0, 3, 6]), FrameError::StatePosition { position: 12, expected: Some(5) });
    assert_eq!(refusal(&[0, 3, 4, 3]), FrameError::StatePosition { position: 5, expected: Some(12) });
    assert_eq!(refusal(&[0, 3, 4, 6, 8, 8]), FrameError::NoMoreStates { record: 5 });
}

#[test]
fn states_belong_to_a_position_that_the_head_names_and_to_the_readers_tokens() {
    for position in [0, 2, 4, 6, 12, 13, u32::MAX] {
        let refused = bad_record(3, |state| put(state, 0, position));
        assert_eq!(refused, FrameError::StatePosition { position, expected: Some(5) });
    }
    assert_eq!(bad_record(3, |state| state[16] ^= 1), FrameError::StatePrefix { position: 5 });
    // A state of the same length of another prompt.
    for (token, position) in [(0, 5), (4, 5), (5, 12), (11, 12)] {
        let mut handoff = sample::hybrid();
        handoff.tokens[token] += 1;
        let records = good();
        let stream = [0, 3, 4, 6, 8].into_iter().zip(0..).flat_map(|(record, index)| {
            sealed(sample::kind(&records[record], record as u32), index, payload(&records[record]))
        });
        let (said, end) = read_all(&mut sample::reader_of(handoff), &stream.collect::<Vec<u8>>());
        assert_eq!(end, Err(FrameError::StatePrefix { position }), "token {token}");
        assert_eq!(said.len(), if position == 5 { 1 } else { 2 });
    }
}

#[test]
fn states_have_exactly_their_size_and_number() {
    let length = |found| FrameError::StateLength { position: 5, expected: VALUES + 20, found };
    assert_eq!(bad_record(3, |state| state.push(0)), length(VALUES + 21));
    assert_eq!(bad_record(3, |state| _ = state.pop()), length(VALUES + 19));
    assert_eq!(bad_record(3, |state| state.truncate(VALUES)), length(VALUES));
    for n_bytes in [0, 47] {
        assert_eq!(bad_record(3, |state| state.truncate(n_bytes)), FrameError::StateTooShort { n_bytes });
    }
    let count = |found| FrameError::StateCount { position: 5, most: 4, found };
    for found in [0, 5, u32::MAX] {
        assert_eq!(bad_record(3, |state| put(state, 8, found)), count(found));
    }
    let two = bad_record(3, |state| put(state, 8, 2));
    assert_eq!(two, FrameError::StateLength { position: 5, expected: VALUES + 48, found: VALUES + 20 });
    assert_eq!(bad_record(3, |state| state[13] = 1), FrameError::StateReserved { position: 5 });
    assert_eq!(bad_record(3, |state| state[12] = 9), FrameError::UnknownStateCodec { position: 5, codec: 9 });
}

#[test]
fn a_length_is_believed_within_the_states_that_are_missing() {
    let limit = (VALUES + sample::hybrid().layout.state_bytes()) as u64;
    for (order, limit) in [(&[0][..], limit), (&[0, 3], limit - 20), (&[0, 3, 4], limit)] {
        let record = order.len() as u32;
        let records = good();
        let before = order.iter().zip(0..).flat_map(|(&number, index)| {
            sealed(sample::kind(&records[number], number as u32), index, payload(&records[number]))
        });
        let before: Vec<u8> = before.collect();
        let kind = RecordKind::State;
        for length in [limit + 1, 1 << 40, u64::MAX] {
            let header = RecordHeader { kind, index: record, length }.to_bytes();
            let refused = read_all(&mut sample::reader_of(sample::hybrid()), &[&before[..], &header].concat()).1;
            assert_eq!(refused, Err(FrameError::TooLong { record, kind, length, limit }));
        }
        let header = RecordHeader { kind, index: record, length: limit }.to_bytes();
        let mut reader = sample::reader_of(sample::hybrid());
        assert_eq!(read_all(&mut reader, &[&before[..], &header].concat()).1, Ok(()), "it is waited for");
        assert!(reader.space().len() <= 64 << 10, "memory grows with what arrives");
    }
}

#[test]
fn memory_for_states_grows_with_what_arrives_and_not_with_the_claimed_length() {
    let mut handoff = sample::recurrent();
    let values = Rows { dtype: Dtype::F32, n_values: 1 << 27 };
    handoff.layout.states = vec![StateShape { kind: StateKind::Recurrence, values }; 2];
    let (_, head) = HandoffWriter::begin(sample::CLUSTER_KEY, handoff.clone(), Codec::None, Mac::Blake3).unwrap();
    let mut reader = sample::reader_of(handoff);
    let header = RecordHeader { kind: RecordKind::State, index: 1, length: 48 + (1 << 30) }.to_bytes();
    assert_eq!(read_all(&mut reader, &[head.concat(), header.to_vec()].concat()).1, Ok(()));
    for _ in 0..3 {
        let n = reader.space().len();
        assert!(n <= 64 << 10, "{n} bytes for the next bytes of a gigabyte");
        assert_eq!(reader.filled(n), Ok(None));
    }
}

#[test]
fn one_value_that_is_not_finite_refuses_its_states() {
    let mut at = VALUES;
    for (index, state) in sample::hybrid().layout.states.iter().enumerate().take(3) {
        for value in (at..at + state.values.bytes()).step_by(4) {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let put = |record: &mut Vec<u8>| record[value..value + 4].copy_from_slice(&bad.to_le_bytes());
                let refused = bad_record(6, put);
                assert_eq!(refused, FrameError::StateNotFinite { position: 12, state: index }, "at {value}");
            }
        }
        at += state.values.bytes();
    }
    let (said, end) = read(&[0, 3, 4, 6, 8], |record, bytes| {
        if record == 8 {
            bytes[VALUES + 1] = 0x7C;
        }
    });
    assert_eq!(end, Err(FrameError::StateNotFinite { position: 12, state: 3 }));
    assert_eq!(said.len(), 2, "the earlier position's states stay valid");
}

/// What a reader makes of a head with `value` at `field`.
fn head(handoff: Handoff, field: &str, value: serde_json::Value) -> Result<(), FrameError> {
    let good = sample::stream_of(handoff.clone(), Codec::None, Mac::Blake3);
    let mut head: serde_json::Value = serde_json::from_slice(payload(&good[0])).unwrap();
    head[field] = value;
    read_all(&mut sample::reader_of(handoff), &sealed(RecordKind::Head, 0, head.to_string().as_bytes())).1
}

#[test]
fn the_head_names_the_end_and_earlier_positions_that_are_handed_over() {
    for good in [json!([12]), json!([3, 12]), json!([3, 4, 5, 6, 7, 8, 9, 12])] {
        assert_eq!(head(sample::hybrid(), "states_at", good.clone()), Ok(()), "{good}");
    }
    let bad = [
        json!([]),
        json!([5]),
        json!([12, 13]),
        json!([13]),
        json!([2, 12]),
        json!([5, 5, 12]),
        json!([7, 5, 12]),
        json!([3, 4, 5, 6, 7, 8, 9, 10, 12]),
    ];
    for bad in bad {
        let found = bad.as_array().unwrap().len();
        let refused = FrameError::StatePositions { found, start: 2, end: 12 };
        assert_eq!(head(sample::hybrid(), "states_at", bad.clone()), Err(refused), "{bad}");
    }
    let refused = FrameError::StatePositions { found: 1, start: 2, end: 12 };
    assert_eq!(head(sample::handoff(), "states_at", json!([12])), Err(refused), "a model without states");
    let unknown = head(sample::hybrid(), "state_codec", json!("of_next_year"));
    assert!(matches!(unknown, Err(FrameError::Message { record: 0, .. })), "{unknown:?}");
}

#[test]
fn a_model_without_states_gets_none() {
    let state = sealed(RecordKind::State, 1, payload(&good()[3]));
    let stream = [sample::stream(Codec::None)[0].clone(), state].concat();
    assert_eq!(read_all(&mut sample::reader(), &stream).1, Err(FrameError::NoStates { record: 1 }));
    let part = sample::state_parts(&sample::hybrid().layout, 12, &[4]).remove(0);
    let begun = HandoffWriter::begin(sample::CLUSTER_KEY, sample::handoff(), Codec::None, Mac::Blake3);
    assert!(matches!(begun.unwrap().0.state(&part), Err(WriteError::Chunk(_))));
}

#[test]
fn readers_and_writers_of_version_1_refuse_states_and_quantized_rows() {
    for handoff in [sample::hybrid(), sample::recurrent(), sample::quantized()] {
        let good = sample::stream_of(handoff.clone(), Codec::None, Mac::Blake3);
        let mut layout = handoff.layout.clone();
        // What version 1 knows of the layout: it ignores fields that it does not know, and compares the rest.
        layout.states.clear();
        let rows = Rows { dtype: Dtype::F16, n_values: 64 };
        let known = vec![Section {
            window: None,
            n_rot: [0; 2],
            tokens_per_row: 1,
            layers: vec![LayerShape { k: rows, v: None }],
        }];
        layout.sections = if layout.is_quantized() || layout.sections.is_empty() { known } else { layout.sections };
        let older = Handoff { layout, ..handoff.clone() };
        let refused = read_all(&mut sample::reader_of(older), &good.concat()).1;
        assert_eq!(refused, Err(FrameError::Version { expected: 1, found: 2 }));
        let refused = head(handoff.clone(), "version", json!(1));
        assert_eq!(refused, Err(FrameError::Version { expected: 2, found: 1 }));
    }
    let head = sample::stream(Codec::None).remove(0);
    let head = String::from_utf8(payload(&head).to_vec()).unwrap();
    assert!(head.starts_with(r#"{"version":1,"#), "{head}");
    assert!(!head.contains("state") && !head.contains("n_rot"), "{head}");
}

#[test]
fn a_writer_refuses_states_that_a_reader_would() {
    let layout = sample::hybrid().layout;
    let choice = |checkpoints| StreamChoice {
        codec: Codec::None,
        state_codec: Codec::None,
        mac: Mac::Blake3,
        checkpoints,
        known: ModelKnowledge::default(),
    };
    for bad in [&[2][..], &[12], &[7, 5], &[3, 4, 5, 6, 7, 8, 9, 10]] {
        let refused = HandoffWriter::begin_as(sample::CLUSTER_KEY, sample::hybrid(), choice(bad)).err();
        assert!(matches!(refused, Some(WriteError::Frame(FrameError::StatePositions { .. }))), "{bad:?}");
    }
    let (mut writer, _) = HandoffWriter::begin_as(sample::CLUSTER_KEY, sample::hybrid(), choice(&[5])).unwrap();
    let refused = |refused: Result<Vec<bytes::Bytes>, WriteError>, wanted| {
        assert_eq!(refused, Err(WriteError::Frame(wanted)));
    };
    let [early, late] = [5, 12].map(|position| sample::state_parts(&layout, position, &[2, 2]));
    refused(writer.state(&late[0]), FrameError::StatePosition { position: 12, expected: Some(5) });
    refused(writer.state(&early[1]), FrameError::StateOrder { position: 5, expected: 0, found: 2 });
    let mut short = early[0].clone();
    short.tensors[1].truncate(4);
    assert!(matches!(writer.state(&short), Err(WriteError::Chunk(_))));
    for part in &early {
        writer.state(part).unwrap();
    }
    refused(writer.state(&early[0]), FrameError::StatePosition { position: 5, expected: Some(12) });
    for chunk in sample::chunks_of(&layout) {
        writer.frame(&chunk).unwrap();
    }
    writer.state(&late[0]).unwrap();
    refused(writer.end(PrefillTimings::default()), FrameError::StateMissing { position: 12 });
    writer.state(&late[1]).unwrap();
    refused(writer.state(&late[1]), FrameError::StatePosition { position: 12, expected: None });
    writer.end(PrefillTimings::default()).unwrap();
}

/// The payload of the record with the first three states of the end, with this codec, and what a reader makes of it after
/// `change`.
fn narrowed(codec: Codec, change: impl Fn(&mut Vec<u8>)) -> (usize, Result<(), FrameError>) {
    let good = sample::stream_of(sample::hybrid(), codec, Mac::Blake3);
    let stream = [0, 3, 4, 6].into_iter().zip(0..).flat_map(|(number, index)| {
        let mut bytes = payload(&good[number]).to_vec();
        if number == 6 {
            change(&mut bytes);
        }
        sealed(sample::kind(&good[number], number as u32), index, &bytes)
    });
    let stream: Vec<u8> = stream.collect();
    (payload(&good[6]).len(), read_all(&mut sample::reader_of(sample::hybrid()), &stream).1)
}

#[test]
fn narrower_states_have_exactly_their_size_and_finite_scales_and_values() {
    // 5, 7 and 32 values, each state in one block: the scale, and the values.
    for (codec, n_bytes, last) in [(Codec::StateF16, 3 * 4 + 2 * 44, 68), (Codec::StateInt8, 3 * 4 + 44, 36)] {
        assert_eq!(narrowed(codec, |_| {}), (VALUES + n_bytes, Ok(())), "{codec:?}");
        let length = |found| Err(FrameError::StateLength { position: 12, expected: VALUES + n_bytes, found });
        assert_eq!(narrowed(codec, |state| state.push(0)).1, length(VALUES + n_bytes + 1));
        assert_eq!(narrowed(codec, |state| _ = state.pop()).1, length(VALUES + n_bytes - 1));
        let whole = VALUES + 44 * 4;
        assert_eq!(narrowed(codec, |state| state.resize(whole, 0)).1, length(whole), "as long as plain ones");
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (state, at) in [(0, VALUES), (2, VALUES + n_bytes - last)] {
                let refused = narrowed(codec, |bytes| bytes[at..at + 4].copy_from_slice(&bad.to_le_bytes())).1;
                assert_eq!(refused, Err(FrameError::StateNotFinite { position: 12, state }), "{codec:?} {bad}");
            }
        }
        let other = if codec == Codec::StateF16 { Codec::StateInt8 } else { Codec::StateF16 };
        let refused = FrameError::OtherStateCodec { position: 12, expected: codec, found: other };
        assert_eq!(narrowed(codec, |state| state[12] = other as u8).1, Err(refused));
    }
    let refused = narrowed(Codec::StateF16, |bytes| bytes[VALUES + 4..VALUES + 6].copy_from_slice(&[0, 0x7C])).1;
    assert_eq!(refused, Err(FrameError::StateNotFinite { position: 12, state: 0 }), "an infinite F16");
}

#[test]
fn a_codec_of_states_is_taken_only_where_it_was_offered_and_is_one() {
    for codec in [Codec::StateF16, Codec::StateInt8] {
        let stream = sample::stream_of(sample::hybrid(), codec, Mac::Blake3).concat();
        let read = |state_codecs: &[Codec]| {
            let offer = Offer { codecs: &[Codec::None], state_codecs, macs: &[] };
            let reader = HandoffReader::with_placement(sample::CLUSTER_KEY, sample::hybrid(), offer, Contiguous);
            read_all(&mut reader.unwrap(), &stream).1
        };
        assert_eq!(read(&[Codec::None, codec]), Ok(()));
        assert_eq!(read(&[]), Err(FrameError::StateCodecRefused { codec }));
        let other = if codec == Codec::StateF16 { Codec::StateInt8 } else { Codec::StateF16 };
        assert_eq!(read(&[other]), Err(FrameError::StateCodecRefused { codec }));
        // As a codec of rows.
        let name = serde_json::to_value(codec).unwrap();
        assert_eq!(head(sample::hybrid(), "codec", name.clone()), Err(FrameError::CodecRefused { codec }));
        assert_eq!(head(sample::handoff(), "state_codec", name), Err(FrameError::StateCodecRefused { codec }));
    }
    let kvq = head(sample::hybrid(), "state_codec", json!("kvq"));
    assert_eq!(kvq, Err(FrameError::StateCodecRefused { codec: Codec::Kvq }));
    // States that are as they are need no offer.
    let offer = Offer { codecs: &[Codec::None], state_codecs: &[Codec::StateInt8], macs: &[] };
    let reader = HandoffReader::with_placement(sample::CLUSTER_KEY, sample::hybrid(), offer, Contiguous);
    assert_eq!(read_all(&mut reader.unwrap(), &good().concat()).1, Ok(()));
}
