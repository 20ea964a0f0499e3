//! Pulls real KV into this process, like a decode node, and keeps the chunks.

use std::time::Duration;

use baton_link::Engine;
use baton_link::remote::RemoteEngine;
use baton_link::transport::Transport;
use baton_proxy::serve::CommandFailure;
use baton_schemas::CacheScope;
use baton_schemas::Token;
use baton_schemas::handoff::PrefillRequest;
use baton_schemas::kv::{
    Chunk, Codec, Handoff, HandoffId, HandoffReader, HandoffRecord, PrefillTimings, VerifiedState,
};
use baton_schemas::node::BASE_PATH;
use futures::StreamExt;

/// The longest pull. Usually the prefill node has cached the prompt, but a processor may have to compute that of a large model.
const DEADLINE: Duration = Duration::from_secs(600);

/// A handoff that was received completely.
pub struct Captured {
    /// The requested tokens and the layout of their KV.
    pub handoff: Handoff,
    /// The decoded KV in the order of its tokens.
    pub chunks: Vec<Chunk>,
    /// The states after the last token, if the model has recurrent layers.
    pub state: Option<VerifiedState>,
    /// The prefill node's own timings.
    pub timings: PrefillTimings,
}

impl Captured {
    /// Bytes of all rows.
    pub fn n_bytes(&self) -> usize {
        self.chunks.iter().map(Chunk::n_bytes).sum()
    }
}

/// A node whose KV is captured.
#[derive(Clone, Copy)]
pub struct CaptureSource<'a> {
    /// The node's address, without a path.
    pub url: &'a str,
    /// The node's client.
    pub engine: &'a RemoteEngine,
    pub key: &'a str,
    pub transport: &'a Transport,
    /// If true, the node does not keep the prompt in its cache.
    pub ephemeral: bool,
}

/// Pulls the KV of `tokens` from a node.
pub async fn capture(source: CaptureSource<'_>, tokens: Vec<Token>) -> Result<Captured, CommandFailure> {
    tokio::time::timeout(DEADLINE, read(source, tokens))
        .await
        .map_err(|_| CommandFailure("a pull takes too long".into()))?
}

async fn read(source: CaptureSource<'_>, tokens: Vec<Token>) -> Result<Captured, CommandFailure> {
    let info = source.engine.info().await?;
    let kv = info.kv.ok_or_else(|| CommandFailure("this model's KV is not handed over".into()))?;
    let id = HandoffId(rand::random());
    let request = PrefillRequest {
        handoff: id,
        tokens: tokens.clone(),
        images: None,
        start: 0,
        codecs: vec![Codec::None as u8],
        state_codecs: Vec::new(),
        state_bps: None,
        macs: Vec::new(),
        checkpoints: Vec::new(),
        fingerprint: kv.fingerprint,
        cache_scope: CacheScope::SHARED,
        ephemeral: source.ephemeral,
        gives_way: false,
        held_only: false,
    };
    let handoff = Handoff { id, fingerprint: kv.fingerprint, layout: kv.layout, start: 0, tokens };
    let mut reader = HandoffReader::new(source.key.as_bytes(), handoff.clone(), &[Codec::None])?;
    let client = source.transport.client().build()?;
    let call = client.post(format!("{}{BASE_PATH}/prefill", source.url)).bearer_auth(source.key);
    let mut pieces = call.json(&request).send().await?.error_for_status()?.bytes_stream();
    let mut chunks = Vec::new();
    let mut last_state = None;
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        let mut input = &piece[..];
        while let Some(event) = reader.read(&mut input)? {
            match event {
                HandoffRecord::Frame(kv) => chunks.push(kv.into_chunk()),
                HandoffRecord::State(state) => last_state = Some(state),
                HandoffRecord::End(end) => {
                    return Ok(Captured { handoff, chunks, state: last_state, timings: end.timings });
                }
                HandoffRecord::Error(error) => return Err(error.into()),
                HandoffRecord::Head(_) | HandoffRecord::Wait(_) => {}
            }
        }
    }
    Err(CommandFailure("the prefill node's stream ended early".into()))
}
