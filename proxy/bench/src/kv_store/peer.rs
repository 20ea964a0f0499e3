//! llama-server beside Baton: the same file and the same prompts, whose KV is in its slot, in its prompt cache in memory
//! (`--cache-ram`), or in a file that it was told to write (`--slot-save-path`).

use std::ffi::OsString;
use std::path::Path;

use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_tryout::prompts::Prompts;
use reqwest::Response;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::disk::{self, ColdReads};
use super::report::{KvFrom, KvSample, StoredFigures};
use super::{N_OTHER, N_REPLY, N_WARM_UP};
use crate::llama_server::{PeerServer, PeerServerOptions};

/// The most MiB of its prompt cache: as much as the nodes' stores may take.
const CACHE_MIB: &str = "65536";

/// llama-server chooses.
const ANY_SLOT: i32 = -1;

/// The longest line of a stream.
const MAX_LINE: usize = 1 << 20;

/// A file for each prompt.
fn file_name(idx: usize) -> String {
    format!("prompt-{idx}.bin")
}

/// A reply.
pub(super) struct PeerReply {
    /// From the begin to the first token.
    ttft_ms: f64,
    pub(super) tokens: Vec<Token>,
    /// Prompt tokens that were not computed.
    pub(super) n_cached: u32,
}

/// An event of a stream, as far as it is read.
#[derive(Deserialize)]
struct CompletionEvent {
    #[serde(default)]
    tokens: Vec<Token>,
    /// In the last event.
    timings: Option<CacheTimings>,
}

#[derive(Deserialize)]
struct CacheTimings {
    cache_n: u32,
}

/// Measures each prompt in each place. `folder` is empty and on the disk that counts.
pub(super) async fn measure(
    options: PeerServerOptions<'_>,
    folder: &Path,
    prompts: &mut Prompts,
    asked: &[&[Token]],
    figures: &mut StoredFigures,
) -> Result<(), CommandFailure> {
    let computed = first_life(options, folder, prompts, asked, figures).await?;
    let settled = folder.to_owned();
    tokio::task::spawn_blocking(move || disk::settle(&settled)).await??;
    for from in [KvFrom::WarmDisk, KvFrom::ColdDisk] {
        if from == KvFrom::ColdDisk && ColdReads::of(folder)? != ColdReads::Possible {
            continue;
        }
        let server = start(options, folder, "0").await?;
        reply(&server, &prompts.next(N_WARM_UP), Instant::now()).await?;
        if from == KvFrom::ColdDisk {
            disk::leave_page_cache(folder)?;
        }
        for (idx, (prompt, computed)) in asked.iter().zip(&computed).enumerate() {
            let began = Instant::now();
            move_slot(&server, "restore", idx).await?;
            let moved_ms = began.elapsed().as_secs_f64() * 1e3;
            let reply = reply(&server, prompt, began).await?;
            figures.add_of_peer(prompt.len(), sample(from, &reply, Some(moved_ms), prompt, computed));
        }
        server.stop().await?;
    }
    Ok(())
}

/// Measures what needs no restart, and leaves a file of each prompt. Returns the computed replies.
async fn first_life(
    options: PeerServerOptions<'_>,
    folder: &Path,
    prompts: &mut Prompts,
    asked: &[&[Token]],
    figures: &mut StoredFigures,
) -> Result<Vec<Vec<Token>>, CommandFailure> {
    let server = start(options, folder, CACHE_MIB).await?;
    reply(&server, &prompts.next(N_WARM_UP), Instant::now()).await?;
    let mut all_computed = Vec::new();
    for (idx, prompt) in asked.iter().enumerate() {
        let first = reply(&server, prompt, Instant::now()).await?;
        let computed = first.tokens.clone();
        let again = reply(&server, prompt, Instant::now()).await?;
        move_slot(&server, "save", idx).await?;
        reply(&server, &prompts.next(N_OTHER), Instant::now()).await?;
        let from_memory = reply(&server, prompt, Instant::now()).await?;
        for (from, reply) in [(KvFrom::Computed, first), (KvFrom::Slot, again), (KvFrom::Memory, from_memory)] {
            figures.add_of_peer(prompt.len(), sample(from, &reply, None, prompt, &computed));
        }
        all_computed.push(computed);
    }
    server.stop().await?;
    Ok(all_computed)
}

async fn start(options: PeerServerOptions<'_>, folder: &Path, cache_mib: &str) -> Result<PeerServer, CommandFailure> {
    let more: [OsString; 4] = ["--cache-ram".into(), cache_mib.into(), "--slot-save-path".into(), folder.into()];
    PeerServer::start(options, more).await
}

/// A server with its prompt cache, which writes no files.
pub(super) async fn start_with_cache(options: PeerServerOptions<'_>) -> Result<PeerServer, CommandFailure> {
    PeerServer::start(options, ["--cache-ram".into(), CACHE_MIB.into()]).await
}

/// Continues a prompt greedily by exactly `n_new` tokens, in the slot that the server chooses.
pub(super) async fn complete(server: &PeerServer, prompt: &[Token], n_new: u32) -> Result<PeerReply, CommandFailure> {
    let began = Instant::now();
    read(server.post("/completion", &body(prompt, n_new, ANY_SLOT)).await?, began).await
}

/// Writes the slot to the file of a prompt, or reads it from there.
async fn move_slot(server: &PeerServer, action: &str, idx: usize) -> Result<(), CommandFailure> {
    let path = format!("/slots/0?action={action}");
    server.post(&path, &json!({ "filename": file_name(idx) })).await.map(drop)
}

fn sample(from: KvFrom, reply: &PeerReply, moved_ms: Option<f64>, prompt: &[Token], computed: &[Token]) -> KvSample {
    let all_but_last = prompt.len() as u32 - 1;
    let n_there = match from {
        KvFrom::Computed => all_but_last.saturating_sub(reply.n_cached),
        _ => reply.n_cached,
    };
    KvSample::of_peer(from, reply.ttft_ms, moved_ms, n_there == all_but_last, reply.tokens == computed)
}

/// The reply to a prompt, whose time began at `began`.
async fn reply(server: &PeerServer, prompt: &[Token], began: Instant) -> Result<PeerReply, CommandFailure> {
    read(server.post("/completion", &body(prompt, N_REPLY, 0)).await?, began).await
}

fn body(prompt: &[Token], n_new: u32, slot: i32) -> Value {
    json!({
        "prompt": prompt, "n_predict": n_new, "temperature": 0.0, "ignore_eos": true, "cache_prompt": true,
        "return_tokens": true, "stream": true, "id_slot": slot,
    })
}

/// Reads a stream to its end. Errors: it is none, or lacks tokens or timings.
async fn read(mut stream: Response, began: Instant) -> Result<PeerReply, CommandFailure> {
    let (mut line, mut ttft_ms) = (Vec::new(), None);
    let (mut tokens, mut timings) = (Vec::new(), None);
    while let Some(bytes) = stream.chunk().await? {
        let arrived = began.elapsed().as_secs_f64() * 1e3;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            line.extend_from_slice(part);
            if line.len() > MAX_LINE {
                return Err(CommandFailure("llama-server sends a line without end".into()));
            }
            if !line.ends_with(b"\n") {
                continue;
            }
            if let Some(event) = line.strip_prefix(b"data: ") {
                let event: CompletionEvent = serde_json::from_slice(event)?;
                if !event.tokens.is_empty() {
                    ttft_ms.get_or_insert(arrived);
                }
                tokens.extend(event.tokens);
                timings = event.timings.or(timings);
            }
            line.clear();
        }
    }
    match (ttft_ms, timings) {
        (Some(ttft_ms), Some(CacheTimings { cache_n })) => Ok(PeerReply { ttft_ms, tokens, n_cached: cache_n }),
        _ => Err(CommandFailure("llama-server's stream has no tokens or no timings".into())),
    }
}
