//! A damaged stream is refused or yields the same records, never others.

use baton_schemas::kv::*;

use crate::sample::{self, read_all};

/// Every kind of stream: each codec, each MAC, and what else a layout can have.
fn streams() -> impl Iterator<Item = (Handoff, Vec<u8>)> {
    let codecs = Codec::OF_ROWS.map(|codec| (sample::handoff(), codec, Mac::Blake3));
    let layouts = [sample::hybrid(), sample::recurrent(), sample::quantized(), sample::handoff()];
    let layouts = layouts.map(|handoff| (handoff, Codec::None, Mac::Aegis128x2));
    let coded = [Codec::Kvq, Codec::StateF16, Codec::StateInt8].map(|codec| (sample::hybrid(), codec, Mac::Blake3));
    let all = codecs.into_iter().chain(layouts).chain(coded);
    all.map(|(handoff, codec, mac)| (handoff.clone(), sample::stream_of(handoff, codec, mac).concat()))
}

fn events(handoff: &Handoff, stream: &[u8]) -> Vec<HandoffRecord> {
    let (events, end) = read_all(&mut sample::reader_of(handoff.clone()), stream);
    assert_eq!(end, Ok(()));
    events
}

#[test]
fn a_flipped_bit_anywhere_is_refused_and_what_came_before_stands() {
    for (handoff, good) in streams() {
        let expected = events(&handoff, &good);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            let mut reader = sample::reader_of(handoff.clone());
            let (said, end) = read_all(&mut reader, &bad);
            assert_eq!(said, expected[..said.len()], "byte {at}");
            // A length that grew within its limit makes the reader wait for more.
            assert!(end.is_err() || !reader.is_ended(), "byte {at}");
            if end.is_err() {
                assert_eq!(reader.read(&mut &[][..]), end.map(|()| None), "dead afterwards");
            }
        }
    }
}

#[test]
fn a_cut_stream_never_ends() {
    for (handoff, good) in streams() {
        let expected = events(&handoff, &good);
        for at in 0..good.len() {
            let mut reader = sample::reader_of(handoff.clone());
            let (said, end) = read_all(&mut reader, &good[..at]);
            assert_eq!(end, Ok(()));
            assert!(!reader.is_ended() && said.len() < expected.len(), "cut at {at}");
            assert_eq!(said, expected[..said.len()]);
        }
    }
}

#[test]
fn byte_by_byte_is_as_good_as_at_once() {
    for (handoff, stream) in streams() {
        let mut reader = sample::reader_of(handoff.clone());
        let said: Vec<HandoffRecord> = stream.iter().flat_map(|byte| read_all(&mut reader, &[*byte]).0).collect();
        assert_eq!(said, events(&handoff, &stream));
    }
}

#[test]
fn a_stream_filled_into_the_readers_room_is_read_like_one_that_is_copied() {
    for (handoff, stream) in streams() {
        for n_at_once in [1, 7, 100, usize::MAX] {
            let mut reader = sample::reader_of(handoff.clone());
            let mut said = Vec::new();
            let mut left = &stream[..];
            while !left.is_empty() {
                let space = reader.space();
                let n = left.len().min(space.len()).min(n_at_once);
                assert!(n > 0, "a reader that expects more has room for it");
                space[..n].copy_from_slice(&left[..n]);
                left = &left[n..];
                said.extend(reader.filled(n).unwrap());
            }
            assert_eq!(said, events(&handoff, &stream), "{n_at_once} at once");
            assert!(reader.is_ended() && reader.space().is_empty());
        }
    }
}

#[test]
fn only_the_mac_that_the_head_names_is_accepted() {
    for (named, used) in [(Mac::Blake3, Mac::Aegis128x2), (Mac::Aegis128x2, Mac::Blake3)] {
        let mut records = sample::sealed_stream(Codec::None, named);
        records.truncate(1);
        let wait = sample::sealed_stream(Codec::None, used).swap_remove(1);
        let refused = FrameError::Mac { record: 1, kind: record::RecordKind::Wait };
        let (said, end) = read_all(&mut sample::reader(), &[records.concat(), wait].concat());
        assert_eq!((said.len(), end), (1, Err(refused)), "{used:?} after a head that names {named:?}");
    }
}

/// Returns what a reader makes of the records in this order.
fn refusal(order: &[usize]) -> FrameError {
    let records = sample::stream(Codec::None);
    let stream: Vec<u8> = order.iter().flat_map(|&i| records[i].clone()).collect();
    read_all(&mut sample::reader(), &stream).1.unwrap_err()
}

#[test]
fn records_come_once_and_in_order() {
    assert_eq!(refusal(&[0, 1, 2, 2]), FrameError::Index { expected: 3, found: 2 });
    assert_eq!(refusal(&[0, 1, 3]), FrameError::Index { expected: 2, found: 3 });
    assert_eq!(refusal(&[0, 2, 1]), FrameError::Index { expected: 1, found: 2 });
    assert_eq!(refusal(&[1]), FrameError::Index { expected: 0, found: 1 });
    assert_eq!(refusal(&[0, 0]), FrameError::Index { expected: 1, found: 0 });
    assert_eq!(refusal(&[0, 1, 2, 3, 4, 5, 5]), FrameError::AfterEnd);
}

#[test]
fn a_record_is_worth_nothing_in_another_handoff_or_under_another_key() {
    let stream = sample::stream(Codec::None).concat();
    let mut other = sample::handoff();
    other.id.0[15] ^= 1;
    for (key, handoff) in [(sample::CLUSTER_KEY, other), (b"another key", sample::handoff())] {
        let mut reader = HandoffReader::new(key, handoff, &Codec::OF_ROWS).unwrap();
        let refused = FrameError::Mac { record: 0, kind: record::RecordKind::Head };
        assert_eq!(read_all(&mut reader, &stream), (vec![], Err(refused)));
    }
    // Moving a byte from the cluster key to the id must change the derived key.
    let mut id = sample::handoff().id;
    let mut longer = b"k".to_vec();
    longer.push(id.0[0]);
    id.0.rotate_left(1);
    for mac in Mac::ALL {
        let pieces = HandoffKey::derive(&longer, id).seal(mac, record::RecordKind::Wait, 0, vec![]);
        let other = HandoffKey::derive(b"k", sample::handoff().id);
        assert_ne!(pieces, other.seal(mac, record::RecordKind::Wait, 0, vec![]));
    }
}
