//! Measures each codec's compression ratio and speed on real KV.

use std::time::Instant;

use baton_proxy::serve::CommandFailure;
use baton_schemas::kv::{Codec, HandoffReader, HandoffRecord, HandoffWriter, Mac};
use baton_tryout::capture::{Captured, capture};
use baton_tryout::stats::median;
use serde::Serialize;

use super::pair::HandoffBench;

/// Repetitions. Few, because a codec's speed varies less than a network's.
const ROUNDS: usize = 3;

/// The figures of one codec. Speeds are in MB/s of plain KV and include the digests.
#[derive(Debug, Clone, Serialize)]
pub(super) struct CodecRow {
    pub(super) codec: Codec,
    /// Plain bytes ÷ bytes on the wire.
    pub(super) ratio: f64,
    pub(super) write_mb_s: f64,
    pub(super) read_mb_s: f64,
    /// The speeds by round.
    pub(super) write_rounds: Vec<f64>,
    pub(super) read_rounds: Vec<f64>,
}

pub(super) async fn measure(bench: &mut HandoffBench) -> Result<Vec<CodecRow>, CommandFailure> {
    eprintln!("codecs");
    let prompt = bench.prompts.next(bench.sizes.joining.min(1_000));
    let captured = capture(bench.source(), prompt).await?;
    tokio::task::spawn_blocking(move || Codec::OF_ROWS.into_iter().map(|codec| one(&captured, codec)).collect()).await?
}

fn one(captured: &Captured, codec: Codec) -> Result<CodecRow, CommandFailure> {
    let n_plain = captured.n_bytes() as f64;
    let mut ratios = Vec::new();
    let mut writes = Vec::new();
    let mut reads = Vec::new();
    for _ in 0..ROUNDS {
        let run = once(captured, codec)?;
        ratios.push(n_plain / run.n_wire_bytes as f64);
        writes.push(n_plain / run.write_seconds / 1e6);
        reads.push(n_plain / run.read_seconds / 1e6);
    }
    let (ratio, write_mb_s, read_mb_s) = (median(&ratios), median(&writes), median(&reads));
    Ok(CodecRow { codec, ratio, write_mb_s, read_mb_s, write_rounds: writes, read_rounds: reads })
}

/// One run of a codec over all chunks.
pub(super) struct CodecRun {
    pub(super) n_wire_bytes: usize,
    pub(super) write_seconds: f64,
    pub(super) read_seconds: f64,
}

/// Writes and reads all chunks.
pub(super) fn once(captured: &Captured, codec: Codec) -> Result<CodecRun, CommandFailure> {
    let key = b"a benchmark's key";
    let mac = Mac::best_first().first().copied().unwrap_or_default();
    let (mut writer, head) = HandoffWriter::begin(key, captured.handoff.clone(), codec, mac)?;
    let mut stream = head;
    let began = Instant::now();
    for chunk in &captured.chunks {
        stream.extend(writer.frame(chunk)?);
    }
    let write_seconds = began.elapsed().as_secs_f64();
    let mut reader = HandoffReader::new(key, captured.handoff.clone(), &[codec])?;
    let mut n_wire_bytes = 0;
    let began = Instant::now();
    for piece in &stream {
        n_wire_bytes += piece.len();
        let mut input = &piece[..];
        while let Some(event) = reader.read(&mut input)? {
            if let HandoffRecord::Frame(kv) = event {
                std::hint::black_box(kv.buffer());
            }
        }
    }
    let read_seconds = began.elapsed().as_secs_f64();
    match reader.position() == captured.handoff.end() {
        true => Ok(CodecRun { n_wire_bytes, write_seconds, read_seconds }),
        false => Err(CommandFailure("a written stream was not read to its end".into())),
    }
}
