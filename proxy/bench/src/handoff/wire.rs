//! Measures the speed of moving computed KV from one cache into another, and of each stage on one core. A plain copy of as
//! many bytes through the same kind of socket is measured beside it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use baton_proxy::serve::CommandFailure;
use baton_schemas::kv::{Codec, all_finite};
use baton_tryout::capture::{Captured, capture};
use baton_tryout::stats::median;
use serde::Serialize;

use super::codecs;
use super::pair::{HandoffBench, pull};

/// Repetitions. Each takes a fraction of a second.
const ROUNDS: usize = 7;

/// Rates in GB/s of KV.
#[derive(Debug, Clone, Serialize)]
pub(super) struct WireSpeed {
    pub(super) n_tokens: usize,
    pub(super) n_bytes: u64,
    /// From the request to the last chunk in the other cache.
    pub(super) pull: f64,
    /// `write_all` of one buffer into a loopback socket, read into another buffer.
    pub(super) copy: f64,
    /// Median over the rounds of `pull` ÷ `copy`.
    pub(super) ratio: f64,
    pub(super) stages: Vec<StageSpeed>,
    /// `pull` and `ratio` by round.
    pub(super) pull_rounds: Vec<f64>,
    pub(super) ratio_rounds: Vec<f64>,
}

/// Speed of one stage on one otherwise idle core.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StageSpeed {
    pub(super) name: &'static str,
    pub(super) gb_s: f64,
}

pub(super) async fn measure(bench: &mut HandoffBench) -> Result<WireSpeed, CommandFailure> {
    let prompt = bench.long.clone();
    let node = bench.decode(&["--role", "decode", "--slots", "1"]).await?;
    eprintln!("wire speed: {} tokens, computed before", prompt.len());
    // This pull makes the prefill node compute the prompt if it has not yet.
    pull(&node, &bench.prefill.url, prompt.clone()).await?;
    let mut pulls = Vec::new();
    let mut copies = Vec::new();
    let mut ratios = Vec::new();
    let mut imports = Vec::new();
    let mut n_bytes = 0;
    for round in 0..ROUNDS {
        eprintln!("wire speed: round {}", round + 1);
        bench.forget(&node, 1).await?;
        let timings = pull(&node, &bench.prefill.url, prompt.clone()).await?.timings;
        n_bytes = timings.n_bytes;
        let copied = tokio::task::spawn_blocking(move || copy(n_bytes as usize)).await??;
        let rate = |ms: f64| n_bytes as f64 / ms / 1e6;
        pulls.push(rate(timings.total_ms));
        copies.push(rate(copied * 1e3));
        ratios.push(copied * 1e3 / timings.total_ms);
        imports.push(rate(timings.import_ms));
    }
    let captured = capture(bench.source(), prompt[..prompt.len() - 1].to_vec()).await?;
    let export = captured.n_bytes() as f64 / captured.timings.export_ms / 1e6;
    let mut stages = vec![StageSpeed { name: "export from llama.cpp (the node's own clock)", gb_s: export }];
    stages.extend(tokio::task::spawn_blocking(move || in_process(&captured)).await??);
    stages.push(StageSpeed { name: "import into llama.cpp (the node's own clock)", gb_s: median(&imports) });
    Ok(WireSpeed {
        n_tokens: prompt.len(),
        n_bytes,
        pull: median(&pulls),
        copy: median(&copies),
        ratio: median(&ratios),
        stages,
        pull_rounds: pulls,
        ratio_rounds: ratios,
    })
}

/// Seconds of a plain copy through a loopback socket, between buffers that are already in memory.
fn copy(n_bytes: usize) -> std::io::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let sent = vec![1u8; n_bytes];
    let writer = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        // Wait for the reader's start signal.
        stream.read_exact(&mut [0])?;
        stream.write_all(&sent)
    });
    let (mut stream, _) = listener.accept()?;
    let mut received = vec![2u8; n_bytes];
    let began = Instant::now();
    stream.write_all(&[1])?;
    stream.read_exact(&mut received)?;
    let took = began.elapsed().as_secs_f64();
    match writer.join() {
        Ok(written) => written.map(|()| took),
        Err(_) => Err(std::io::Error::other("the writing thread panicked")),
    }
}

/// The stages that need no engine.
fn in_process(captured: &Captured) -> Result<Vec<StageSpeed>, CommandFailure> {
    let n_bytes = captured.n_bytes() as f64;
    let rate = |seconds: f64| n_bytes / seconds / 1e9;
    let chunks = || captured.chunks.iter().flat_map(|chunk| chunk.tensors());
    let dtype = captured.handoff.layout.tensors().next().map(|rows| rows.dtype);
    let dtype = dtype.ok_or_else(|| CommandFailure("the model has no KV".into()))?;
    let hash = || {
        let mut hasher = blake3::Hasher::new_keyed(&[7; 32]);
        for rows in chunks() {
            hasher.update(rows);
        }
        std::hint::black_box(hasher.finalize());
    };
    let scan = || {
        std::hint::black_box(chunks().all(|rows| all_finite(dtype, rows)));
    };
    let mut warm = vec![1u8; captured.n_bytes()];
    let mut warm_copy = || fill(&mut warm, captured);
    let mut fresh_copy = || {
        let mut fresh = vec![0u8; captured.n_bytes()];
        fill(&mut fresh, captured);
    };
    let mut writes = Vec::new();
    let mut reads = Vec::new();
    for _ in 0..ROUNDS {
        let run = codecs::once(captured, Codec::None)?;
        writes.push(rate(run.write_seconds));
        reads.push(rate(run.read_seconds));
    }
    Ok(vec![
        StageSpeed { name: "write frames (digest)", gb_s: median(&writes) },
        StageSpeed { name: "  BLAKE3 alone", gb_s: rate(seconds(hash)) },
        StageSpeed { name: "read frames (digest, copy, scan)", gb_s: median(&reads) },
        StageSpeed { name: "  looking for NaN alone", gb_s: rate(seconds(scan)) },
        StageSpeed { name: "  copying alone, memory in use before", gb_s: rate(seconds(&mut warm_copy)) },
        StageSpeed { name: "  copying alone, fresh memory", gb_s: rate(seconds(&mut fresh_copy)) },
    ])
}

fn fill(buffer: &mut [u8], captured: &Captured) {
    let mut at = 0;
    for rows in captured.chunks.iter().flat_map(|chunk| chunk.tensors()) {
        buffer[at..at + rows.len()].copy_from_slice(rows);
        at += rows.len();
    }
    std::hint::black_box(buffer);
}

/// The median seconds of several runs.
fn seconds(mut work: impl FnMut()) -> f64 {
    let times = (0..ROUNDS).map(|_| {
        let began = Instant::now();
        work();
        began.elapsed().as_secs_f64()
    });
    median(&times.collect::<Vec<_>>())
}
