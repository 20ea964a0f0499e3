//! Measures how fast frames are written and read, on one core under `taskset -c 0`. Prints figures and asserts none:
//! `cargo test --release --workspace --test kv speed::speed -- --ignored --nocapture`.
//!
//! `counts_aegis` and `counts_blake3` are run under `valgrind --tool=callgrind --collect-atstart=no`, with
//! `--toggle-collect='*written_once*'` or `'*read_once*'`: the count is of [`N_COUNTED_BYTES`].

use std::hint::black_box;
use std::time::{Duration, Instant};

use baton_schemas::kv::record::RecordKind;
use baton_schemas::kv::*;
use bytes::Bytes;
use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::sample;

/// The layout of Llama-3.1-8B: 32 layers of 8 KV heads of 128, F16. Frames of 512 positions are 64 MiB.
const N_POSITIONS: u32 = 512;
const N_FRAMES: u32 = 8;

fn handoff() -> Handoff {
    let rows = sample::rows(Dtype::F16, 1024);
    let layers = vec![LayerShape { k: rows, v: Some(rows) }; 32];
    let layout = KvLayout {
        rope: RopePairing::Interleaved,
        sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
        states: Vec::new(),
    };
    Handoff { layout, start: 0, tokens: (0..N_POSITIONS * N_FRAMES).collect(), ..sample::handoff() }
}

fn rotation() -> KeyRotation {
    let frequencies = (0..64).map(|i| 500_000f64.powf(-f64::from(i) / 64.0)).collect();
    KeyRotation { sections: vec![Some(SectionRotation { head_size: 128, frequencies })] }
}

/// Rows of random fractions: a codec finds no more repetition than in real KV.
fn section(handoff: &Handoff) -> SectionRows {
    let mut random = StdRng::seed_from_u64(1);
    let mut tensor = || {
        let values = (0..N_POSITIONS * 1024).map(|_| f16::from_f32(random.random_range(-4.0..4.0)));
        Bytes::from(values.flat_map(f16::to_le_bytes).collect::<Vec<u8>>())
    };
    let layers = handoff.layout.sections[0].layers.iter().map(|_| LayerRows { k: tensor(), v: tensor() }).collect();
    SectionRows { start: 0, layers }
}

/// Runs `work` on each item and prints the rate of the fastest run, which other processes disturbed least.
fn measure<T>(what: &str, n_bytes: usize, items: impl IntoIterator<Item = T>, mut work: impl FnMut(T)) {
    let mut best = Duration::MAX;
    for item in items {
        let since = Instant::now();
        work(item);
        best = best.min(since.elapsed());
    }
    println!("{what}: {:.2} GB/s", n_bytes as f64 / best.as_secs_f64() / 1e9);
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    let handoff = handoff();
    let section = section(&handoff);
    let n_bytes = N_POSITIONS as usize * handoff.layout.bytes_per_position();
    for (codec, mac) in Codec::OF_ROWS.into_iter().flat_map(|codec| Mac::ALL.map(|mac| (codec, mac))) {
        let (mut writer, head) = HandoffWriter::begin_as(
            b"k",
            handoff.clone(),
            StreamChoice {
                codec,
                state_codec: Codec::None,
                mac,
                checkpoints: &[],
                known: ModelKnowledge { rotation: Some(&rotation()), tensors: &[] },
            },
        )
        .unwrap();
        let mut frames = Vec::new();
        measure(&format!("{codec:?}, {mac:?}: written"), n_bytes, 0..N_FRAMES, |frame| {
            let rows = SectionRows { start: frame * N_POSITIONS, ..section.clone() };
            let chunk = Chunk { p0: rows.start, p1: rows.start + N_POSITIONS, sections: vec![rows] };
            frames.push(writer.frame(&chunk).unwrap());
        });
        let frames: Vec<Vec<u8>> = frames.into_iter().map(|pieces| pieces.concat()).collect();
        println!("{codec:?}: {:.3} of the size", frames[0].len() as f64 / n_bytes as f64);
        for (push, recycle) in [(64 << 10, false), (16 << 10, true), (64 << 10, true), (1 << 20, true)] {
            let mut reader = HandoffReader::new(b"k", handoff.clone(), &[codec]).unwrap();
            assert!(reader.read(&mut &head.concat()[..]).unwrap().is_some());
            let memory = if recycle { "recycled" } else { "fresh" };
            let what = format!("{codec:?}, {mac:?}: read in pieces of {} KiB, {memory} memory", push >> 10);
            measure(&what, n_bytes, &frames, |frame| {
                for mut piece in frame.chunks(push) {
                    match reader.read(&mut piece).unwrap() {
                        Some(HandoffRecord::Frame(kv)) if recycle => reader.recycle(kv.into_buffer()),
                        event => drop(black_box(event)),
                    }
                }
            });
            assert_eq!(reader.position(), handoff.end());
        }
    }
    let from = vec![1u8; n_bytes];
    let mut to = vec![2u8; n_bytes];
    measure("BLAKE3 alone", n_bytes, 0..8, |_| _ = black_box(blake3::keyed_hash(&[7; 32], &from)));
    let key = HandoffKey::derive(b"k", handoff.id);
    let whole = Bytes::from(from.clone());
    measure("sealing with AEGIS alone", n_bytes, 0..8, |_| {
        black_box(key.seal(Mac::Aegis128x2, RecordKind::Frame, 1, vec![whole.clone()]));
    });
    measure("looking for values that are not finite alone", n_bytes, 0..8, |_| {
        _ = black_box(all_finite(Dtype::F16, &from))
    });
    measure("copying alone", n_bytes, 0..8, |_| to.copy_from_slice(&from));
    measure("copying to fresh memory", n_bytes, 0..8, |_| drop(black_box(from.clone())));
}

/// Frames of 64 positions, so that callgrind takes seconds.
const N_COUNTED: u32 = 64;
/// KV of 64 positions: 8 MiB.
const N_COUNTED_BYTES: usize = 8 << 20;

#[inline(never)]
fn written_once(writer: &mut HandoffWriter, chunk: &Chunk) -> Vec<Bytes> {
    writer.frame(chunk).unwrap()
}

#[inline(never)]
fn read_once(reader: &mut HandoffReader, mut frame: &[u8]) -> Option<HandoffRecord> {
    reader.read(&mut frame).unwrap()
}

fn counts(mac: Mac) {
    let handoff = Handoff { tokens: (0..N_COUNTED).collect(), ..handoff() };
    assert_eq!(N_COUNTED as usize * handoff.layout.bytes_per_position(), N_COUNTED_BYTES);
    let row = Bytes::from(vec![1; N_COUNTED as usize * 2048]);
    let layers = vec![LayerRows { k: row.clone(), v: row }; 32];
    let chunk = Chunk { p0: 0, p1: N_COUNTED, sections: vec![SectionRows { start: 0, layers }] };
    let (mut writer, head) = HandoffWriter::begin(b"k", handoff.clone(), Codec::None, mac).unwrap();
    let mut reader = HandoffReader::new(b"k", handoff, &[Codec::None]).unwrap();
    // Both nodes recycle their buffers.
    reader.recycle(vec![0; 2 * N_COUNTED_BYTES]);
    assert!(reader.read(&mut &head.concat()[..]).unwrap().is_some());
    let frame = written_once(&mut writer, &chunk).concat();
    assert!(matches!(read_once(&mut reader, &frame), Some(HandoffRecord::Frame(_))));
}

#[test]
#[ignore = "a measurement under callgrind"]
fn counts_aegis() {
    counts(Mac::Aegis128x2);
}

#[test]
#[ignore = "a measurement under callgrind"]
fn counts_blake3() {
    counts(Mac::Blake3);
}
