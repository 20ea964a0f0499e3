//! Wrong records and messages with a right MAC are refused; so is wrong input to a writer.

use baton_schemas::kv::record::{HEADER_BYTES, MAC_BYTES, RecordHeader, RecordKind};
use baton_schemas::kv::*;
use serde_json::json;

use crate::refusal;
use crate::sample::{self, payload, read_all, sealed};

#[test]
fn a_record_header_is_believed_within_bounds_only() {
    let header = |kind, length| RecordHeader { kind, index: 1, length }.to_bytes().to_vec();
    // A frame's header for two sections, and the rows of all ten positions.
    let longest = 56 + 10 * sample::layout().bytes_per_position() as u64;
    for (kind, limit) in [
        (RecordKind::Frame, longest),
        (RecordKind::Wait, 65_536),
        (RecordKind::End, 65_536),
        (RecordKind::Error, 65_536),
    ] {
        for length in [limit + 1, 1 << 40, u64::MAX] {
            let refused = FrameError::TooLong { record: 1, kind, length, limit };
            assert_eq!(refusal(Codec::None, &[header(kind, length)]), refused);
        }
        let mut reader = sample::reader();
        let start = [sample::stream(Codec::None)[0].clone(), header(kind, limit)].concat();
        assert_eq!(read_all(&mut reader, &start).1, Ok(()), "the longest possible is waited for");
    }
    let first = RecordHeader { kind: RecordKind::Head, index: 0, length: (1 << 20) + 1 };
    assert!(matches!(read_all(&mut sample::reader(), &first.to_bytes()).1, Err(FrameError::TooLong { .. })));
    let wrong = |at: usize, byte: u8| {
        let mut record = sealed(RecordKind::Wait, 1, b"{}");
        record[at] = byte;
        refusal(Codec::None, &[record])
    };
    assert_eq!(wrong(0, b'b'), FrameError::Magic { record: 1 });
    assert_eq!(wrong(4, 0), FrameError::RecordKind { record: 1, kind: 0 });
    assert_eq!(wrong(4, 7), FrameError::RecordKind { record: 1, kind: 7 });
    assert_eq!(wrong(7, 1), FrameError::Reserved { record: 1 });
    assert_eq!(wrong(20, b'['), FrameError::Mac { record: 1, kind: RecordKind::Wait });
}

/// Returns what a reader makes of a head with `value` at `field`.
fn bad_head(field: &str, value: serde_json::Value) -> FrameError {
    let good = sample::stream(Codec::None)[0].clone();
    let mut head: serde_json::Value = serde_json::from_slice(payload(&good)).unwrap();
    assert!(!head[field].is_null());
    head[field] = value;
    let record = sealed(RecordKind::Head, 0, head.to_string().as_bytes());
    read_all(&mut sample::reader(), &record).1.unwrap_err()
}

#[test]
fn the_head_is_the_one_that_was_asked_for() {
    assert_eq!(bad_head("version", json!(2)), FrameError::Version { expected: 1, found: 2 });
    assert_eq!(bad_head("handoff", json!("00".repeat(16))), FrameError::HandoffId);
    let other = Fingerprint { weights: [1; 32], ..sample::handoff().fingerprint };
    assert_eq!(bad_head("fingerprint", json!(other)), FrameError::Fingerprint);
    let mut layout = sample::layout();
    layout.rope = RopePairing::Interleaved;
    assert_eq!(bad_head("layout", json!(layout)), FrameError::Layout);
    let range = |found_start, found_end| FrameError::Range { start: 2, end: 12, found_start, found_end };
    assert_eq!(bad_head("start", json!(0)), range(0, 12));
    assert_eq!(bad_head("end", json!(13)), range(2, 13));
    for (field, value) in [("codec", json!("gzip")), ("start", json!(-1)), ("handoff", json!("zz"))] {
        assert!(matches!(bad_head(field, value), FrameError::Message { record: 0, .. }), "{field}");
    }
    let mut reader = HandoffReader::new(sample::CLUSTER_KEY, sample::handoff(), &[Codec::None]).unwrap();
    let refused = read_all(&mut reader, &sample::stream(Codec::Q8_0)[0]).1;
    assert_eq!(refused, Err(FrameError::CodecRefused { codec: Codec::Q8_0 }));
}

#[test]
fn a_mac_that_was_not_offered_is_refused_but_every_reader_accepts_blake3() {
    let head = |mac, macs: &[Mac]| {
        let offer = Offer { codecs: &[Codec::None], state_codecs: &[], macs };
        let reader = HandoffReader::with_placement(sample::CLUSTER_KEY, sample::handoff(), offer, Contiguous);
        read_all(&mut reader.unwrap(), &sample::sealed_stream(Codec::None, mac)[0]).1
    };
    let refused = Err(FrameError::MacRefused { mac: Mac::Aegis128x2 });
    assert_eq!(head(Mac::Aegis128x2, &[]), refused);
    assert_eq!(head(Mac::Aegis128x2, &[Mac::Blake3]), refused);
    assert_eq!(head(Mac::Aegis128x2, &Mac::ALL), Ok(()));
    assert_eq!(head(Mac::Blake3, &[]), Ok(()));
}

#[test]
fn a_stream_begins_with_its_head_and_has_no_other() {
    let frame = sealed(RecordKind::Frame, 0, payload(&sample::stream(Codec::None)[2]));
    let refused = FrameError::OutOfPlace { record: 0, kind: RecordKind::Frame };
    assert_eq!(read_all(&mut sample::reader(), &frame), (vec![], Err(refused)));
    let head = sealed(RecordKind::Head, 1, payload(&sample::stream(Codec::None)[0]));
    assert_eq!(refusal(Codec::None, &[head]), FrameError::OutOfPlace { record: 1, kind: RecordKind::Head });
}

#[test]
fn a_stream_ends_only_when_all_is_there() {
    let end = |index, end: serde_json::Value| sealed(RecordKind::End, index, end.to_string().as_bytes());
    let good = json!({"n_frames": 0, "start": 2, "end": 12});
    assert_eq!(refusal(Codec::None, &[end(1, good)]), FrameError::Incomplete { next: 2, end: 12 });
    let frames = sample::stream(Codec::None)[1..5].to_vec();
    let refusal = |message| refusal(Codec::None, &[frames.concat(), end(5, message)]);
    let counted = refusal(json!({"n_frames": 2, "start": 2, "end": 12}));
    assert_eq!(counted, FrameError::FrameCount { expected: 3, found: 2 });
    let range = FrameError::Range { start: 2, end: 12, found_start: 2, found_end: 11 };
    assert_eq!(refusal(json!({"n_frames": 3, "start": 2, "end": 11})), range);
    for timings in [json!({"queue_ms": -1.0}), json!({"prefill_ms": 1e300}), json!({"n_computed": 13})] {
        let refused = refusal(json!({"n_frames": 3, "start": 2, "end": 12, "timings": timings}));
        assert_eq!(refused, FrameError::Numbers { record: 5, kind: RecordKind::End });
    }
    assert!(matches!(refusal(json!({"n_frames": -1})), FrameError::Message { .. }));
}

#[test]
fn messages_are_json_and_possible() {
    let wait = |json: &[u8]| refusal(Codec::None, &[sealed(RecordKind::Wait, 1, json)]);
    for bad in [&b""[..], b"{", b"[1", b"\xFF", b"{} {}", br#"{"n_done": -1}"#, br#"{"n_done": 4294967296}"#] {
        assert!(matches!(wait(bad), FrameError::Message { record: 1, .. }), "{bad:?}");
    }
    assert_eq!(wait(br#"{"n_done": 13}"#), FrameError::Numbers { record: 1, kind: RecordKind::Wait });
    let refused = refusal(Codec::None, &[sealed(RecordKind::Error, 1, br#"{"kind": "no_such_error"}"#)]);
    assert!(matches!(refused, FrameError::Message { kind: RecordKind::Error, .. }));
    let unknown =
        [sample::stream(Codec::None)[0].clone(), sealed(RecordKind::Wait, 1, br#"{"mood": "good"}"#)].concat();
    assert_eq!(read_all(&mut sample::reader(), &unknown).0.last(), Some(&HandoffRecord::Wait(Wait::default())));
}

#[test]
fn impossible_handoffs_are_refused_at_both_ends() {
    let good = sample::handoff();
    let none = Handoff { start: 12, ..good.clone() };
    let empty = Handoff { start: 0, tokens: vec![], ..good.clone() };
    let shapeless = Handoff { layout: KvLayout { sections: vec![], ..good.layout.clone() }, ..good.clone() };
    for bad in [none, empty, shapeless] {
        let refused = HandoffReader::new(b"k", bad.clone(), &Codec::OF_ROWS).err();
        assert!(refused.is_some());
        assert_eq!(HandoffWriter::begin(b"k", bad, Codec::None, Mac::Blake3).err(), refused.map(WriteError::Handoff));
    }
    let mut odd = good;
    odd.layout.sections[1].layers[0].k.n_values = 33;
    let refused = HandoffWriter::begin(b"k", odd, Codec::Q8_0, Mac::Blake3).err();
    assert_eq!(refused, Some(WriteError::Codec(CodecError::Blocks { n_values: 33, block: 32 })));
}

#[test]
fn a_writer_refuses_what_a_reader_would() {
    let (mut writer, head) =
        HandoffWriter::begin(sample::CLUSTER_KEY, sample::handoff(), Codec::None, Mac::Blake3).unwrap();
    assert_eq!(head.concat().len(), HEADER_BYTES + payload(&head.concat()).len() + MAC_BYTES);
    let chunks = sample::chunks();
    assert!(matches!(writer.frame(&chunks[1]), Err(WriteError::Frame(FrameError::Positions { .. }))));
    let mut short = chunks[0].clone();
    short.sections[0].layers[0].k.truncate(2);
    assert!(matches!(writer.frame(&short), Err(WriteError::Chunk(_))));
    let early = writer.end(PrefillTimings::default());
    assert_eq!(early, Err(WriteError::Frame(FrameError::Incomplete { next: 2, end: 12 })));
    for chunk in &chunks {
        writer.frame(chunk).unwrap();
    }
    let timings = PrefillTimings { queue_ms: f64::NAN, ..Default::default() };
    assert!(matches!(writer.end(timings), Err(WriteError::Frame(FrameError::Numbers { .. }))));
    writer.end(PrefillTimings::default()).unwrap();
    assert_eq!(writer.wait(Wait::default()), Err(WriteError::Ended));
}
