//! The streams in `tests/fixtures/kv/` pin the format: other readers are tested with them. A change that reads or
//! writes them differently needs a new format version. `BATON_WRITE_FIXTURES=1` with `--test-threads=1` rewrites the
//! files.

use std::path::PathBuf;

use baton_schemas::kv::{Codec, HandoffRecord};

use crate::sample::{self, read_all};

/// Returns the stored stream of a codec.
fn fixture(codec: Codec) -> Vec<u8> {
    let name = serde_json::to_value(codec).unwrap();
    let file = format!("../tests/fixtures/kv/{}.bin", name.as_str().unwrap());
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("BATON_WRITE_FIXTURES").is_some() {
        std::fs::write(&path, sample::stream(codec).concat()).unwrap();
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
    for codec in Codec::ALL {
        assert_eq!(events(&fixture(codec)), events(&sample::stream(codec).concat()), "{codec:?}");
    }
}

#[test]
fn streams_are_written_as_ever() {
    // Not zstd's: another version of zstd may write other bytes.
    for codec in [Codec::None, Codec::Q8_0] {
        let written = sample::stream(codec).concat();
        let stored = fixture(codec);
        let first = written.iter().zip(&stored).position(|(written, stored)| written != stored);
        assert!(
            first.is_none() && written.len() == stored.len(),
            "{codec:?}: {} bytes written, {} stored, first difference at byte {first:?}",
            written.len(),
            stored.len()
        );
    }
}
