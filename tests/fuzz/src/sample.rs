//! Small handoffs with everything that a stream can contain. [`handoff`]: a full and a sliding-window section, every type of
//! floats, a layer without V, rows that a window leaves out. [`hybrid`], [`quantized`], [`recurrent`] and [`compressed`]: states,
//! every quantized type, no rows at all, rows of several tokens.

use baton_schemas::kv::record::RecordHeader;
use baton_schemas::kv::*;
use bytes::Bytes;
use half::{bf16, f16};

pub const CLUSTER_KEY: &[u8] = b"a cluster key of the tests";

/// Positions of the frames of [`stream`], and where the windowed section starts in each.
pub const FRAMES: [(u32, u32, u32); 3] = [(2, 5, 5), (5, 9, 7), (9, 12, 9)];

pub fn rows(dtype: Dtype, n_values: u32) -> Rows {
    Rows { dtype, n_values }
}

pub fn layout() -> KvLayout {
    let full = LayerShape { k: rows(Dtype::F16, 64), v: Some(rows(Dtype::Bf16, 32)) };
    let windowed = LayerShape { k: rows(Dtype::F32, 32), v: None };
    let section = |window, layers| Section { window, n_rot: [0; 2], tokens_per_row: 1, layers };
    let sections = vec![section(None, vec![full; 2]), section(Some(4), vec![windowed])];
    KvLayout { rope: RopePairing::HalfSplit, sections, states: Vec::new() }
}

/// How K is rotated in [`layout`]: partly in the first section, not at all in the second.
pub fn rotation() -> KeyRotation {
    let frequencies = vec![1.0, 0.25, 0.0625];
    KeyRotation { sections: vec![Some(SectionRotation { head_size: 16, frequencies }), None] }
}

pub fn handoff() -> Handoff {
    Handoff {
        id: HandoffId(std::array::from_fn(|i| i as u8)),
        fingerprint: Fingerprint { vocabulary: [0xAA; 32], weights: [0x55; 32] },
        layout: layout(),
        start: 2,
        tokens: (0..12).map(|i| i * 1000 + 7).collect(),
    }
}

/// [`handoff`] of a hybrid model: one section, and states.
pub fn hybrid() -> Handoff {
    let mut hybrid = handoff();
    hybrid.layout.sections.truncate(1);
    hybrid.layout.states = states();
    hybrid
}

/// [`handoff`] of a model without attention.
pub fn recurrent() -> Handoff {
    let mut recurrent = hybrid();
    recurrent.layout.sections.clear();
    recurrent
}

/// [`handoff`] of a quantized cache of every type, rotated.
pub fn quantized() -> Handoff {
    let layer = |k, v| LayerShape { k: rows(k, 64), v: Some(rows(v, 32)) };
    let layers = vec![
        layer(Dtype::Q8_0, Dtype::Q4_0),
        layer(Dtype::Q4_1, Dtype::Q5_0),
        layer(Dtype::Q5_1, Dtype::Iq4Nl),
        layer(Dtype::F16, Dtype::Q8_0),
    ];
    let sections = vec![Section { window: None, n_rot: [64, 32], tokens_per_row: 1, layers }];
    Handoff { layout: KvLayout { sections, ..layout() }, ..handoff() }
}

/// [`handoff`] of a model whose first section has a row for five tokens: one of the frames has none of them.
pub fn compressed() -> Handoff {
    let mut compressed = handoff();
    compressed.layout.sections[0].tokens_per_row = 5;
    compressed.layout.states = states();
    compressed
}

/// Two layers' states: convolutions, then recurrences.
fn states() -> Vec<StateShape> {
    let state = |kind, dtype, n_values| StateShape { kind, values: rows(dtype, n_values) };
    vec![
        state(StateKind::Convolution, Dtype::F32, 5),
        state(StateKind::Convolution, Dtype::F32, 7),
        state(StateKind::Recurrence, Dtype::F32, 32),
        state(StateKind::Recurrence, Dtype::F16, 64),
    ]
}

/// A number of a place, from which its value follows.
fn mixed(section: usize, layer: usize, is_v: bool, position: u32, i: u32) -> u32 {
    section as u32 * 31 + layer as u32 * 17 + u32::from(is_v) * 7 + position * 5 + i * 3
}

/// The value of a place with this number. Every type of floats holds it exactly.
pub fn value(mixed: u32) -> f32 {
    (mixed % 61) as f32 / 8.0 - 3.75
}

/// The values of places with these numbers as `dtype`: one, or a block.
fn bytes_of(dtype: Dtype, mixed: &[u32]) -> Vec<u8> {
    let half = |value: f32| f16::from_f32(value).to_le_bytes().to_vec();
    let number = |i: usize, n_bits: u32| (mixed[i] % (1 << n_bits)) as u8;
    let nibbles = |n_bits| (0..16).map(|i| (number(i, n_bits) & 15) | number(i + 16, n_bits) << 4).collect::<Vec<u8>>();
    let fifth = || (0..32).fold(0u32, |bits, i| bits | u32::from(number(i, 5) >> 4) << i).to_le_bytes().to_vec();
    match dtype {
        Dtype::F32 => value(mixed[0]).to_le_bytes().to_vec(),
        Dtype::F16 => half(value(mixed[0])),
        Dtype::Bf16 => bf16::from_f32(value(mixed[0])).to_le_bytes().to_vec(),
        Dtype::Q4_0 => [half(0.5), nibbles(4)].concat(),
        Dtype::Q4_1 => [half(0.5), half(-3.75), nibbles(4)].concat(),
        Dtype::Q5_0 => [half(0.25), fifth(), nibbles(5)].concat(),
        Dtype::Q5_1 => [half(0.25), half(-3.75), fifth(), nibbles(5)].concat(),
        Dtype::Q8_0 => {
            let bytes = mixed.iter().map(|mixed| ((mixed % 61) as i8 - 30) as u8).collect();
            [half(0.125), bytes].concat()
        }
        Dtype::Iq4Nl => [half(0.03125), nibbles(4)].concat(),
    }
}

/// The rows or states of places with these numbers.
fn tensor(dtype: Dtype, mixed: impl Iterator<Item = u32>) -> Bytes {
    let mixed: Vec<u32> = mixed.collect();
    mixed.chunks(dtype.block_values()).flat_map(|mixed| bytes_of(dtype, mixed)).collect::<Vec<u8>>().into()
}

/// The states of a position in as many parts as there are numbers of states.
pub fn state_parts(layout: &KvLayout, position: u32, lengths: &[usize]) -> Vec<StatePart> {
    let mut first = 0;
    let part = lengths.iter().map(|n| {
        let shapes = layout.states.iter().enumerate().skip(first).take(*n);
        let tensors = shapes.map(|(index, StateShape { values, .. })| {
            tensor(values.dtype, (0..values.n_values).map(|i| position * 13 + index as u32 * 29 + i * 3))
        });
        let part = StatePart { position, first: first as u32, tensors: tensors.collect() };
        first += n;
        part
    });
    part.collect()
}

/// The KV of `[p0, p1)` whose sections start at `starts`.
pub fn chunk(layout: &KvLayout, p0: u32, p1: u32, starts: &[u32]) -> Chunk {
    let tensor = |section: usize, layer: usize, is_v: bool, start: u32, rows: Rows| {
        let row_indexes = layout.sections[section].rows_of(start, p1);
        let places = row_indexes.flat_map(|row| (0..rows.n_values).map(move |i| (row, i)));
        tensor(rows.dtype, places.map(|(row, i)| mixed(section, layer, is_v, row, i)))
    };
    let sections = layout.sections.iter().zip(starts).enumerate().map(|(s, (section, &start))| {
        let layers = section.layers.iter().enumerate().map(|(l, shape)| LayerRows {
            k: tensor(s, l, false, start, shape.k),
            v: shape.v.map_or_else(Bytes::new, |v| tensor(s, l, true, start, v)),
        });
        SectionRows { start, layers: layers.collect() }
    });
    Chunk { p0, p1, sections: sections.collect() }
}

/// The chunks of [`stream`].
pub fn chunks() -> Vec<Chunk> {
    chunks_of(&layout())
}

/// The same positions of another layout of at most two sections, of which the second has a window.
pub fn chunks_of(layout: &KvLayout) -> Vec<Chunk> {
    FRAMES.iter().map(|&(p0, p1, windowed)| chunk(layout, p0, p1, &[p0, windowed][..layout.sections.len()])).collect()
}

/// A whole stream, one record per element: head, wait, three frames, end.
pub fn stream(codec: Codec) -> Vec<Vec<u8>> {
    sealed_stream(codec, Mac::Blake3)
}

/// The same with another MAC.
pub fn sealed_stream(codec: Codec, mac: Mac) -> Vec<Vec<u8>> {
    stream_of(handoff(), codec, mac)
}

/// The stream of one of the handoffs above, whose rows or states are encoded. If its layout has states, their records come between the frames: those of position
/// 5 after its frame, those of the end partly before the last frame and partly after it.
pub fn stream_of(handoff: Handoff, codec: Codec, mac: Mac) -> Vec<Vec<u8>> {
    let layout = handoff.layout.clone();
    let rotation = rotation();
    let known = ModelKnowledge { rotation: Some(&rotation).filter(|_| layout == self::layout()), tensors: &[] };
    let [codec, state_codec] = of_parts(codec);
    let choice = StreamChoice { codec, state_codec, mac, checkpoints: &[5], known };
    let (mut writer, head) = HandoffWriter::begin_as(CLUSTER_KEY, handoff, choice).unwrap();
    let mut records = vec![head, writer.wait(Wait { queued_ahead: 1, n_done: 0, has_begun: false }).unwrap()];
    let with_states = !layout.states.is_empty();
    for (index, chunk) in chunks_of(&layout).iter().enumerate() {
        if with_states && index == 2 {
            let early = state_parts(&layout, 12, &[3, 1]);
            records.push(writer.state(&early[0]).unwrap());
            records.push(writer.frame(chunk).unwrap());
            records.push(writer.state(&early[1]).unwrap());
        } else {
            records.push(writer.frame(chunk).unwrap());
        }
        if with_states && index == 0 {
            records.extend(state_parts(&layout, 5, &[1, 3]).iter().map(|part| writer.state(part).unwrap()));
        }
    }
    let timings = PrefillTimings { queue_ms: 0.5, prefill_ms: 12.0, n_computed: 10, n_cached: 2, ..Default::default() };
    records.push(writer.end(timings).unwrap());
    records.into_iter().map(|pieces| pieces.concat()).collect()
}

/// The codecs of rows and of states of a stream that has one of both.
pub fn of_parts(codec: Codec) -> [Codec; 2] {
    match codec {
        Codec::StateF16 | Codec::StateInt8 => [Codec::None, codec],
        _ => [codec, Codec::None],
    }
}

/// A record with this payload and a valid MAC.
pub fn sealed(kind: record::RecordKind, index: u32, payload: &[u8]) -> Vec<u8> {
    let key = HandoffKey::derive(CLUSTER_KEY, handoff().id);
    key.seal(Mac::Blake3, kind, index, vec![Bytes::copy_from_slice(payload)]).concat()
}

pub fn payload(record: &[u8]) -> &[u8] {
    &record[record::HEADER_BYTES..record.len() - record::MAC_BYTES]
}

/// The kind of a record in a valid stream.
pub fn kind(record: &[u8], index: u32) -> record::RecordKind {
    RecordHeader::parse(record.first_chunk().unwrap(), index).unwrap().kind
}

/// A reader of [`stream`].
pub fn reader() -> HandoffReader {
    reader_of(handoff())
}

/// A reader of [`stream_of`].
pub fn reader_of(handoff: Handoff) -> HandoffReader {
    HandoffReader::new(CLUSTER_KEY, handoff, &Codec::OF_ROWS).unwrap()
}

/// The output of `reader` for `bytes`, and how it ends.
pub fn read_all<P: Placement>(
    reader: &mut HandoffReader<P>,
    mut bytes: &[u8],
) -> (Vec<HandoffRecord>, Result<(), FrameError>) {
    let mut events = Vec::new();
    loop {
        match reader.read(&mut bytes) {
            Ok(Some(event)) => events.push(event),
            Ok(None) => return (events, Ok(())),
            Err(refused) => return (events, Err(refused)),
        }
    }
}
