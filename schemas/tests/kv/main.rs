//! Handoff streams through writer and reader, complete and damaged.
#![cfg(test)]

#[allow(unreachable_pub, dead_code, reason = "a module of the fuzz project too, and not every user needs all")]
#[path = "../../../tests/fuzz/src/sample.rs"]
mod sample;

mod corruption;
mod frames;
mod golden;
mod messages;
mod round_trips;
mod speed;
mod states;

use baton_schemas::kv::{Codec, FrameError};

/// Returns why a reader refuses a stream with a good head, followed by `records`.
fn refusal(codec: Codec, records: &[Vec<u8>]) -> FrameError {
    let stream = [sample::stream(codec)[0].clone(), records.concat()].concat();
    let mut reader = sample::reader();
    let refused = sample::read_all(&mut reader, &stream).1.expect_err("the stream was taken");
    assert_eq!(reader.read(&mut &b"x"[..]), Err(refused.clone()), "dead afterwards");
    refused
}
