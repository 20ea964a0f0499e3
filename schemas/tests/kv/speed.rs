//! How fast streams are written and read on one core. Prints, asserts no figure:
//! `cargo test --release -p baton-schemas --test kv speed -- --ignored --nocapture`.

use std::time::Instant;

use baton_schemas::kv::*;
use bytes::Bytes;

use crate::sample;

/// A Llama-3.1-8B: 32 layers of 8 KV heads of 128, F16; frames of 512 positions are 64 MiB.
const N_POSITIONS: u32 = 512;
const N_FRAMES: u32 = 8;

fn handoff() -> Handoff {
    let rows = sample::rows(Dtype::F16, 1024);
    let layers = vec![LayerShape { k: rows, v: Some(rows) }; 32];
    let layout = KvLayout { rope: RopePairing::Interleaved, sections: vec![Section { window: None, layers }] };
    Handoff { layout, start: 0, tokens: (0..N_POSITIONS * N_FRAMES).collect(), ..sample::handoff() }
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    let handoff = handoff();
    let first = sample::chunk(&handoff.layout, 0, N_POSITIONS, &[0]);
    let n_bytes = first.n_bytes() * N_FRAMES as usize;
    let rate = |since: Instant| n_bytes as f64 / since.elapsed().as_secs_f64() / 1e9;
    for codec in Codec::ALL {
        let (mut writer, head) = Writer::begin(b"k", handoff.clone(), codec).unwrap();
        let mut stream: Vec<Bytes> = head;
        let since = Instant::now();
        for frame in 0..N_FRAMES {
            let starts = SectionRows { start: frame * N_POSITIONS, ..first.sections[0].clone() };
            let chunk = Chunk { p0: starts.start, p1: starts.start + N_POSITIONS, sections: vec![starts] };
            stream.extend(writer.frame(&chunk).unwrap());
        }
        println!("{codec:?}: written at {:.2} GB/s", rate(since));
        let stream = stream.concat();
        println!("{codec:?}: {:.3} of the size", stream.len() as f64 / n_bytes as f64);
        for push in [16 << 10, 64 << 10, 1 << 20] {
            let mut reader = Reader::new(b"k", handoff.clone(), &[codec]).unwrap();
            let since = Instant::now();
            for mut piece in stream.chunks(push) {
                while let Some(event) = reader.read(&mut piece).unwrap() {
                    std::hint::black_box(&event);
                }
            }
            println!("{codec:?}: read at {:.2} GB/s in pieces of {} KiB", rate(since), push >> 10);
            assert_eq!(reader.position(), handoff.end());
        }
    }
    let mut copy = vec![1u8; first.n_bytes()];
    let since = Instant::now();
    let key = blake3::Hasher::new_keyed(&[7; 32]);
    for _ in 0..N_FRAMES {
        key.clone().update(&copy);
    }
    println!("BLAKE3 alone: {:.2} GB/s", rate(since));
    let since = Instant::now();
    for _ in 0..N_FRAMES {
        copy.copy_from_slice(&vec![3u8; first.n_bytes()]);
    }
    println!("fresh memory, filled and copied: {:.2} GB/s", rate(since));
}
