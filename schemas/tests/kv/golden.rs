//! The streams in `tests/fixtures/kv/` pin the format: other readers are tested with them. A change that reads or
//! writes them differently needs a new format version. `BATON_WRITE_FIXTURES=1` with `--test-threads=1` rewrites the
//! files.

use std::path::PathBuf;

use baton_schemas::kv::{Codec, HandoffRecord, Mac};

use crate::sample::{self, read_all};

/// Each codec with BLAKE3, and AEGIS without a codec.
const STREAMS: [(&str, Codec, Mac); 6] = [
    ("none", Codec::None, Mac::Blake3),
    ("planes_zstd", Codec::PlanesZstd, Mac::Blake3),
    ("q8_0", Codec::Q8_0, Mac::Blake3),
    ("kvq", Codec::Kvq, Mac::Blake3),
    ("kvq_fast", Codec::KvqFast, Mac::Blake3),
    ("aegis128x2", Codec::None, Mac::Aegis128x2),
];

/// Returns a stored stream.
fn fixture((name, codec, mac): (&str, Codec, Mac)) -> Vec<u8> {
    let file = format!("../tests/fixtures/kv/{name}.bin");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("BATON_WRITE_FIXTURES").is_some() {
        std::fs::write(&path, sample::sealed_stream(codec, mac).concat()).unwrap();
    }
    std::fs::read(&path).unwrap()
}

fn events(stream: &[u8]) -> Vec<HandoffRecord> {
    let mut reader = sample::reader();
    let (events, end) = read_all(&mut reader, stream);
    assert_eq!(end, Ok(()));
    assert!(reader.is_ended());
    events
}

#[test]
fn stored_streams_are_read_as_ever() {
    for stored in STREAMS {
        let (_, codec, mac) = stored;
        assert_eq!(events(&fixture(stored)), events(&sample::sealed_stream(codec, mac).concat()), "{stored:?}");
    }
}

#[test]
fn streams_are_written_as_ever() {
    // Not zstd's: another version of zstd may write other bytes.
    for file in STREAMS.into_iter().filter(|(_, codec, _)| *codec != Codec::PlanesZstd) {
        let (name, codec, mac) = file;
        let written = sample::sealed_stream(codec, mac).concat();
        let stored = fixture(file);
        let first = written.iter().zip(&stored).position(|(written, stored)| written != stored);
        assert!(
            first.is_none() && written.len() == stored.len(),
            "{name}: {} bytes written, {} stored, first difference at byte {first:?}",
            written.len(),
            stored.len()
        );
    }
}
