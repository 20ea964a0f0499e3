//! Readers yield what writers write.

use baton_schemas::EngineError;
use baton_schemas::kv::*;
use proptest::prelude::*;

use crate::sample::{self, read_all};

/// Checks the reader's chunk against the written one: equal without a lossy codec, else close.
fn check_chunk(codec: Codec, written: &Chunk, read: Chunk, layout: &KvLayout) {
    // Half a step of the largest value, or of the spread of the values, in both elements of a pair; and BF16's own rounding.
    let largest_error = match codec {
        Codec::None | Codec::PlanesZstd | Codec::StateF16 | Codec::StateInt8 => 0.0,
        Codec::Q8_0 => 3.75 / 127.0 / 2.0 + 3.75 / 256.0,
        Codec::Kvq | Codec::KvqFast => 0.6,
    };
    if !codec.is_lossy() {
        return assert_eq!(&read, written);
    }
    read.check(layout).unwrap();
    let shapes = layout.sections.iter().flat_map(|s| &s.layers).flat_map(|l| [Some(l.k), l.v]);
    for ((written, read), rows) in written.tensors().zip(read.tensors()).zip(shapes) {
        let Some(rows) = rows else { continue };
        for (a, b) in rows.dtype.values(written).zip(rows.dtype.values(read)) {
            assert!((a - b).abs() <= largest_error, "{codec:?}: {a} became {b}");
        }
    }
}

/// Checks read states against the written ones: F32 as close as their codec promises, others equal.
fn check_states(codec: Codec, written: &[bytes::Bytes], read: &VerifiedState) {
    assert_eq!(read.n_bytes(), read.layout().state_bytes());
    for (state, (written, read)) in read.layout().states.iter().zip(written.iter().zip(read.tensors())) {
        let dtype = state.values.dtype;
        let largest = dtype.values(written).fold(0.0f32, |largest, v| largest.max(v.abs()));
        let error = match codec {
            _ if dtype != Dtype::F32 => 0.0,
            Codec::StateF16 => largest / 4_096.0,
            Codec::StateInt8 => largest / 253.0,
            _ => 0.0,
        };
        assert_eq!(written.len(), read.len());
        for (a, b) in dtype.values(written).zip(dtype.values(read)) {
            assert!((a - b).abs() <= error, "{codec:?}: {a} became {b}");
        }
    }
}

/// The codecs that can encode a handoff's rows, or its states.
fn codecs_of(layout: &KvLayout) -> impl Iterator<Item = Codec> {
    Codec::ALL.into_iter().filter(|codec| codec.check(layout).is_ok() || codec.check_states(layout).is_ok())
}

#[test]
fn a_stream_says_what_was_written_with_every_codec() {
    for codec in Codec::OF_ROWS {
        let mut reader = sample::reader();
        let (events, end) = read_all(&mut reader, &sample::stream(codec).concat());
        assert_eq!(end, Ok(()), "{codec:?}");
        assert!(reader.is_ended());
        let mut events = events.into_iter();
        assert!(matches!(events.next(), Some(HandoffRecord::Head(head)) if head.codec == codec));
        assert_eq!(events.next(), Some(HandoffRecord::Wait(Wait { queued_ahead: 1, n_done: 0, has_begun: false })));
        for chunk in sample::chunks() {
            let Some(HandoffRecord::Frame(kv)) = events.next() else { panic!("a frame is missing") };
            check_chunk(codec, &chunk, kv.into_chunk(), &sample::layout());
        }
        assert!(
            matches!(events.next(), Some(HandoffRecord::End(end)) if end.n_frames == 3 && end.timings.prefill_ms == 12.0)
        );
        assert_eq!(events.next(), None);
    }
}

#[test]
fn an_error_ends_the_stream() {
    let (mut writer, head) =
        HandoffWriter::begin(sample::CLUSTER_KEY, sample::handoff(), Codec::None, Mac::Blake3).unwrap();
    let error = EngineError::QueueFull { limit: 4 };
    let stream = [head, writer.error(&error).unwrap()].concat().concat();
    assert_eq!(writer.wait(Wait::default()), Err(WriteError::Ended));
    let mut reader = sample::reader();
    assert_eq!(read_all(&mut reader, &stream).0.last(), Some(&HandoffRecord::Error(error)));
    assert!(reader.is_ended());
    assert_eq!(reader.read(&mut &b"x"[..]), Err(FrameError::AfterEnd));
}

#[test]
fn an_error_too_long_to_send_is_an_error_still() {
    let (mut writer, head) =
        HandoffWriter::begin(sample::CLUSTER_KEY, sample::handoff(), Codec::None, Mac::Blake3).unwrap();
    let record = writer.error(&EngineError::invalid("x".repeat(70_000))).unwrap();
    let (events, end) = read_all(&mut sample::reader(), &[head, record].concat().concat());
    assert_eq!(end, Ok(()));
    assert!(matches!(&events[1], HandoffRecord::Error(EngineError::Internal { .. })), "{events:?}");
}

#[test]
fn the_rows_go_where_the_importer_wants_them() {
    // K of every layer, then V, each after four bytes of the importer's own, with the first tensor last.
    let place = |span: &Span, layout: &KvLayout| {
        let mut n_bytes = 0;
        let lengths: Vec<usize> = span.tensors(layout).map(|(_, n)| n).collect();
        let mut tensors: Vec<_> = lengths
            .iter()
            .rev()
            .map(|n| {
                n_bytes += 4 + n;
                n_bytes - n..n_bytes
            })
            .collect();
        tensors.reverse();
        Places { n_bytes, tensors }
    };
    for codec in [Codec::None, Codec::PlanesZstd] {
        let offer = Offer { codecs: &[codec], state_codecs: &[], macs: &[] };
        let mut reader = HandoffReader::with_placement(sample::CLUSTER_KEY, sample::handoff(), offer, place).unwrap();
        let (events, end) = read_all(&mut reader, &sample::stream(codec).concat());
        assert_eq!(end, Ok(()));
        let frames = events.into_iter().filter_map(|e| if let HandoffRecord::Frame(kv) = e { Some(kv) } else { None });
        for (kv, chunk) in frames.zip(sample::chunks()) {
            let first = &kv.tensors()[0];
            assert_eq!(first.end, kv.buffer().len());
            assert_eq!(kv.buffer()[first.start - 4..first.start], [0; 4]);
            assert_eq!(kv.into_chunk(), chunk);
        }
    }
}

#[test]
fn memory_of_earlier_frames_leaves_nothing_in_later_ones() {
    for codec in [Codec::None, Codec::PlanesZstd] {
        let mut reader = sample::reader();
        let stream = sample::stream(codec).concat();
        let mut rest = &stream[..];
        let mut chunks = sample::chunks().into_iter();
        // Larger than any frame needs, and not zeroed.
        reader.recycle(vec![0xFF; 1 << 20]);
        while let Some(event) = reader.read(&mut rest).unwrap() {
            let HandoffRecord::Frame(kv) = event else { continue };
            assert_eq!(kv.clone().into_chunk(), chunks.next().unwrap());
            reader.recycle(kv.into_buffer());
        }
        assert!(reader.is_ended() && chunks.next().is_none());
    }
}

#[test]
fn a_placement_that_does_not_fit_is_refused() {
    let place = |_: &Span, _: &KvLayout| Places { n_bytes: 8, tensors: Vec::from([0..8, 8..8]) };
    let offer = Offer { codecs: &Codec::OF_ROWS, state_codecs: &[], macs: &Mac::ALL };
    let mut reader = HandoffReader::with_placement(sample::CLUSTER_KEY, sample::handoff(), offer, place).unwrap();
    let (_, end) = read_all(&mut reader, &sample::stream(Codec::None).concat());
    assert_eq!(end, Err(FrameError::Placement { p0: 2, p1: 5 }));
}

#[test]
fn rows_of_every_type_and_states_are_read_as_they_were_written() {
    let handoffs =
        [sample::handoff(), sample::hybrid(), sample::recurrent(), sample::quantized(), sample::compressed()];
    for handoff in handoffs {
        for codec in codecs_of(&handoff.layout) {
            let stream = sample::stream_of(handoff.clone(), codec, Mac::Blake3).concat();
            let (events, end) = read_all(&mut sample::reader_of(handoff.clone()), &stream);
            assert_eq!(end, Ok(()));
            let mut states = Vec::new();
            let mut chunks = sample::chunks_of(&handoff.layout).into_iter();
            for event in events {
                match event {
                    HandoffRecord::State(state) => states.push(state),
                    HandoffRecord::Frame(kv) => {
                        check_chunk(codec, &chunks.next().unwrap(), kv.into_chunk(), &handoff.layout);
                    }
                    _ => {}
                }
            }
            assert!(chunks.next().is_none());
            let wanted = if handoff.layout.states.is_empty() { &[][..] } else { &[5, 12] };
            assert_eq!(states.iter().map(VerifiedState::position).collect::<Vec<_>>(), wanted);
            for state in states {
                let whole = sample::state_parts(&handoff.layout, state.position(), &[4]).remove(0);
                check_states(codec, &whole.tensors, &state);
            }
        }
    }
}

/// Generates a layout of up to 3 sections whose rows are whole blocks of every codec, and up to 5 states.
fn any_layout() -> impl Strategy<Value = KvLayout> {
    let floats = vec![Dtype::F16, Dtype::Bf16, Dtype::F32];
    let state = (prop::sample::select(floats.clone()), 1..40u32, any::<bool>());
    let state = state.prop_map(|(dtype, n_values, is_convolution)| StateShape {
        kind: if is_convolution { StateKind::Convolution } else { StateKind::Recurrence },
        values: Rows { dtype, n_values },
    });
    let states = prop::collection::vec(state, 0..6);
    let sections = prop_oneof![3 => any_sections(floats), 1 => any_sections(Dtype::ALL.to_vec())];
    (sections, states).prop_filter_map("a layout has something", |(sections, states)| {
        let layout = KvLayout { rope: RopePairing::Interleaved, sections, states };
        layout.check().is_ok().then_some(layout)
    })
}

fn any_sections(dtypes: Vec<Dtype>) -> impl Strategy<Value = Vec<Section>> {
    let dtype = prop::sample::select(dtypes);
    let rows = (dtype, 1..4u32).prop_map(|(dtype, n)| Rows { dtype, n_values: 32 * n });
    let layer = (rows.clone(), prop::option::of(rows)).prop_map(|(k, v)| LayerShape { k, v });
    let section = (prop::option::of(1..9u32), 1..6u32, prop::collection::vec(layer, 1..4));
    let section = section.prop_map(|(window, n, layers)| {
        let tokens_per_row = if window.is_some() { 1 } else { n };
        Section { window, n_rot: [0; 2], tokens_per_row, layers }
    });
    prop::collection::vec(section, 0..4)
}

/// The records of a handoff with these chunks. States come in parts of `n_states` at the end, and at the first chunk's end if it
/// is not the last; each part before the record with its number in `before`, if that is possible.
fn stream_with_states(handoff: &Handoff, codec: Codec, chunks: &[Chunk], n_states: usize, before: &[usize]) -> Vec<u8> {
    let checkpoints: Vec<u32> =
        chunks.first().map(|chunk| chunk.p1).filter(|p1| *p1 < handoff.end()).into_iter().collect();
    let [codec, state_codec] = sample::of_parts(codec);
    let choice = StreamChoice {
        codec,
        state_codec,
        mac: Mac::Blake3,
        checkpoints: &checkpoints,
        known: ModelKnowledge::default(),
    };
    let (mut writer, head) = HandoffWriter::begin_as(b"k", handoff.clone(), choice).unwrap();
    let n = handoff.layout.states.len();
    let lengths: Vec<usize> = (0..n).step_by(n_states).map(|first| n_states.min(n - first)).collect();
    let parts =
        handoff.states_at(&checkpoints).into_iter().flat_map(|p| sample::state_parts(&handoff.layout, p, &lengths));
    let mut parts = parts.zip(before.iter().cycle()).peekable();
    let mut stream = head;
    for (index, chunk) in chunks.iter().enumerate() {
        while let Some((part, _)) = parts.next_if(|(_, before)| **before <= index) {
            stream.extend(writer.state(&part).unwrap());
        }
        stream.extend(writer.frame(chunk).unwrap());
    }
    parts.for_each(|(part, _)| stream.extend(writer.state(&part).unwrap()));
    stream.extend(writer.end(PrefillTimings::default()).unwrap());
    stream.concat()
}

proptest! {
    #[test]
    fn any_handoff_round_trips_however_it_is_cut(
        layout in any_layout(),
        start in 0..5u32,
        lengths in prop::collection::vec(1..9u32, 1..5),
        late in prop::collection::vec(0.0..=1.0f64, 15),
        cuts in prop::collection::vec(1..2000usize, 1..20),
        n_states in 1..6usize,
        before in prop::collection::vec(0..6usize, 4),
    ) {
        let end = start + lengths.iter().sum::<u32>();
        let handoff = Handoff { layout: layout.clone(), start, tokens: (0..end).collect(), ..sample::handoff() };
        let mut next = start;
        let mut late = late.into_iter().cycle();
        let chunks: Vec<Chunk> = lengths.iter().map(|n| {
            let (p0, p1) = (next, next + n);
            next = p1;
            let starts: Vec<u32> = layout.sections.iter().map(|section| {
                let Some(window) = section.window else { return p0 };
                // At the latest start that the window allows, or earlier.
                let latest = (end + 1).saturating_sub(window).clamp(p0, p1);
                p0 + (f64::from(latest - p0) * late.next().unwrap()).round() as u32
            }).collect();
            sample::chunk(&layout, p0, p1, &starts)
        }).collect();
        for codec in codecs_of(&layout) {
            let stream = stream_with_states(&handoff, codec, &chunks, n_states, &before);
            let mut reader = HandoffReader::new(b"k", handoff.clone(), &Codec::OF_ROWS).unwrap();
            let mut events = Vec::new();
            let mut rest = &stream[..];
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                let (some, end) = read_all(&mut reader, now);
                prop_assert_eq!(end, Ok(()));
                events.extend(some);
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert!(reader.is_ended());
            let (at_once, _) = read_all(&mut HandoffReader::new(b"k", handoff.clone(), &Codec::OF_ROWS).unwrap(), &stream);
            prop_assert_eq!(&events, &at_once);
            for event in &events {
                let HandoffRecord::State(state) = event else { continue };
                let whole = sample::state_parts(&layout, state.position(), &[layout.states.len()]).remove(0);
                check_states(codec, &whole.tensors, state);
            }
            let n_complete = events.iter().filter(|event| matches!(event, HandoffRecord::State(_))).count();
            let checkpoints = if chunks.len() > 1 { 2 } else { 1 };
            prop_assert_eq!(n_complete, if layout.states.is_empty() { 0 } else { checkpoints });
            let frames = events.into_iter().filter_map(|e| if let HandoffRecord::Frame(kv) = e { Some(kv) } else { None });
            let frames: Vec<_> = frames.collect();
            prop_assert_eq!(frames.len(), chunks.len());
            for (kv, chunk) in frames.into_iter().zip(&chunks) {
                check_chunk(codec, chunk, kv.into_chunk(), &layout);
            }
        }
    }
}
