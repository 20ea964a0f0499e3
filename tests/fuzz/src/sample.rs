//! A small handoff with everything that a stream can contain: a full and a sliding-window section, every dtype, a layer
//! without V, rows that a window leaves out.

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
    let sections =
        vec![Section { window: None, layers: vec![full; 2] }, Section { window: Some(4), layers: vec![windowed] }];
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

/// The value at a place. Every dtype holds it exactly.
pub fn value(section: usize, layer: usize, is_v: bool, position: u32, i: u32) -> f32 {
    let mixed = section as u32 * 31 + layer as u32 * 17 + u32::from(is_v) * 7 + position * 5 + i * 3;
    (mixed % 61) as f32 / 8.0 - 3.75
}

/// `value` as `dtype`.
pub fn bytes_of(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::F32 => value.to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

/// The values in `bytes`.
pub fn floats(dtype: Dtype, bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(dtype.bytes()).map(move |value| match dtype {
        Dtype::F32 => f32::from_le_bytes(value.try_into().unwrap()),
        Dtype::F16 => f16::from_le_bytes(value.try_into().unwrap()).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes(value.try_into().unwrap()).to_f32(),
    })
}

/// The KV of `[p0, p1)` whose sections start at `starts`.
pub fn chunk(layout: &KvLayout, p0: u32, p1: u32, starts: &[u32]) -> Chunk {
    let tensor = |section: usize, layer: usize, is_v: bool, start: u32, rows: Rows| {
        let places = (start..p1).flat_map(|position| (0..rows.n_values).map(move |i| (position, i)));
        let bytes = places.flat_map(|(position, i)| bytes_of(rows.dtype, value(section, layer, is_v, position, i)));
        Bytes::from(bytes.collect::<Vec<u8>>())
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
    FRAMES.iter().map(|&(p0, p1, windowed)| chunk(&layout(), p0, p1, &[p0, windowed])).collect()
}

/// A whole stream, one record per element: head, wait, three frames, end.
pub fn stream(codec: Codec) -> Vec<Vec<u8>> {
    sealed_stream(codec, Mac::Blake3)
}

/// The same with another MAC.
pub fn sealed_stream(codec: Codec, mac: Mac) -> Vec<Vec<u8>> {
    let (mut writer, head) = HandoffWriter::begin_knowing(
        CLUSTER_KEY,
        handoff(),
        codec,
        mac,
        ModelKnowledge { rotation: Some(&rotation()), tensors: &[] },
    )
    .unwrap();
    let mut records = vec![head, writer.wait(Wait { queued_ahead: 1, n_done: 0 }).unwrap()];
    records.extend(chunks().iter().map(|chunk| writer.frame(chunk).unwrap()));
    let timings = PrefillTimings { queue_ms: 0.5, prefill_ms: 12.0, n_computed: 10, n_cached: 2, ..Default::default() };
    records.push(writer.end(timings).unwrap());
    records.into_iter().map(|pieces| pieces.concat()).collect()
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
    HandoffReader::new(CLUSTER_KEY, handoff(), &Codec::ALL).unwrap()
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
