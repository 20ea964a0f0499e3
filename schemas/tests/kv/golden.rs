//! The streams in `tests/fixtures/kv/` pin the format: other readers are tested with them. A change that reads or
//! writes them differently needs a new format version. `BATON_WRITE_FIXTURES=1` with `--test-threads=1` rewrites the
//! files.

use std::path::PathBuf;

use baton_schemas::kv::{Codec, Handoff, HandoffRecord, Mac};

use crate::sample::{self, read_all};

/// A stored stream.
struct Stored {
    name: &'static str,
    handoff: fn() -> Handoff,
    codec: Codec,
    mac: Mac,
}

/// Each codec with BLAKE3, AEGIS without a codec, and what else a layout can have.
const STREAMS: [Stored; 12] = [
    Stored { name: "none", handoff: sample::handoff, codec: Codec::None, mac: Mac::Blake3 },
    Stored { name: "planes_zstd", handoff: sample::handoff, codec: Codec::PlanesZstd, mac: Mac::Blake3 },
    Stored { name: "q8_0", handoff: sample::handoff, codec: Codec::Q8_0, mac: Mac::Blake3 },
    Stored { name: "kvq", handoff: sample::handoff, codec: Codec::Kvq, mac: Mac::Blake3 },
    Stored { name: "kvq_fast", handoff: sample::handoff, codec: Codec::KvqFast, mac: Mac::Blake3 },
    Stored { name: "aegis128x2", handoff: sample::handoff, codec: Codec::None, mac: Mac::Aegis128x2 },
    Stored { name: "hybrid", handoff: sample::hybrid, codec: Codec::None, mac: Mac::Blake3 },
    Stored { name: "state_f16", handoff: sample::hybrid, codec: Codec::StateF16, mac: Mac::Blake3 },
    Stored { name: "state_int8", handoff: sample::hybrid, codec: Codec::StateInt8, mac: Mac::Blake3 },
    Stored { name: "recurrent", handoff: sample::recurrent, codec: Codec::None, mac: Mac::Blake3 },
    Stored { name: "compressed", handoff: sample::compressed, codec: Codec::None, mac: Mac::Blake3 },
    Stored { name: "quantized", handoff: sample::quantized, codec: Codec::None, mac: Mac::Blake3 },
];

impl Stored {
    fn written(&self) -> Vec<u8> {
        sample::stream_of((self.handoff)(), self.codec, self.mac).concat()
    }

    /// The bytes of the file.
    fn stored(&self) -> Vec<u8> {
        let file = format!("../tests/fixtures/kv/{}.bin", self.name);
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file);
        if std::env::var_os("BATON_WRITE_FIXTURES").is_some() {
            std::fs::write(&path, self.written()).unwrap();
        }
        std::fs::read(&path).unwrap()
    }

    fn events(&self, stream: &[u8]) -> Vec<HandoffRecord> {
        let mut reader = sample::reader_of((self.handoff)());
        let (events, end) = read_all(&mut reader, stream);
        assert_eq!(end, Ok(()));
        assert!(reader.is_ended());
        events
    }
}

#[test]
fn stored_streams_are_read_as_ever() {
    for stream in STREAMS {
        assert_eq!(stream.events(&stream.stored()), stream.events(&stream.written()), "{}", stream.name);
    }
}

#[test]
fn streams_are_written_as_ever() {
    // Not zstd's: another version of zstd may write other bytes.
    for stream in STREAMS.into_iter().filter(|stream| stream.codec != Codec::PlanesZstd) {
        let (written, stored) = (stream.written(), stream.stored());
        let first = written.iter().zip(&stored).position(|(written, stored)| written != stored);
        assert!(
            first.is_none() && written.len() == stored.len(),
            "{}: {} bytes written, {} stored, first difference at byte {first:?}",
            stream.name,
            written.len(),
            stored.len()
        );
    }
}
