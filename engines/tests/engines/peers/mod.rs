//! Shared by the tests of handoffs between nodes: nodes on loopback, requests, and whole replies.

pub(crate) mod ca;
pub(crate) mod counting;
pub(crate) mod fake;
pub(crate) mod link;
pub(crate) mod recording;

use std::sync::Arc;

use baton_engines::sim::SimConfig;
use baton_link::Engine;
use baton_link::handoff::{HttpPuller, PullPolicy};
use baton_link::node::{ClusterKey, Listener, ServerTls, router};
use baton_schemas::CacheScope;
use baton_schemas::handoff::{HandoffReport, KvSource};
use baton_schemas::node::Role;
use baton_schemas::sequence::{SequenceEvent, Timings};
use baton_schemas::{SequenceRequest, Token};
use futures::StreamExt;
use tokio_util::sync::CancellationToken;

/// The cluster key of honest nodes.
pub(crate) const KEY: &str = "the cluster's secret";

/// A node on loopback, which stops when this is dropped.
pub(crate) struct TestNode {
    /// `HOST:PORT`
    pub(crate) address: String,
    /// `http://HOST:PORT`
    pub(crate) url: String,
    stop: CancellationToken,
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Serves an engine.
pub(crate) async fn node(engine: Arc<dyn Engine>, role: Role, key: &str) -> TestNode {
    serve(engine, role, key, None).await
}

/// Serves an engine, with TLS if there is a certificate.
pub(crate) async fn serve(engine: Arc<dyn Engine>, role: Role, key: &str, tls: Option<ServerTls>) -> TestNode {
    let mut listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.tcp_address().unwrap().to_string();
    if let Some(tls) = tls {
        listener = listener.with_tls(tls);
    }
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let router = router(engine, role, ClusterKey::new(key));
    tokio::spawn(async move { listener.serve(router, stopped).await.unwrap() });
    TestNode { url: format!("http://{address}"), address, stop }
}

/// A puller with the cluster key.
pub(crate) fn puller(policy: PullPolicy) -> Arc<HttpPuller> {
    Arc::new(HttpPuller::new(KEY, policy).unwrap())
}

/// A simulator that computes without delay, with little KV and short chunks.
pub(crate) fn small_sim() -> SimConfig {
    SimConfig {
        prefill_tps: 0.0,
        decode_tps: 0.0,
        chunk_tokens: 8,
        kv_bytes_per_token: 16,
        n_slots: 64,
        ..SimConfig::default()
    }
}

/// A request for `n` greedy tokens, with KV from `url`.
pub(crate) fn request(prompt: &[Token], n: u32, url: Option<&str>) -> SequenceRequest {
    let kv_source = url.map(KvSource::at);
    let mut request =
        SequenceRequest { prompt: prompt.to_vec(), max_tokens: Some(n), kv_source, ..SequenceRequest::default() };
    (request.sampling.temperature, request.sampling.repeatable) = (0.0, true);
    request
}

/// The same request in a cache scope of its own.
pub(crate) fn request_alone(prompt: &[Token], n: u32, url: &str, scope: u64) -> SequenceRequest {
    SequenceRequest { cache_scope: CacheScope(scope), ..request(prompt, n, Some(url)) }
}

/// A whole reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) tokens: Vec<Token>,
    pub(crate) timings: Timings,
    pub(crate) handoff: Option<HandoffReport>,
}

/// Generates to the end.
pub(crate) async fn generate(engine: &dyn Engine, request: SequenceRequest) -> Reply {
    let mut events = engine.generate(request).await.unwrap();
    let mut tokens = Vec::new();
    let mut handoff = None;
    while let Some(event) = events.next().await {
        match event.unwrap() {
            SequenceEvent::Started { .. } | SequenceEvent::PrefillBegun => {}
            SequenceEvent::Handoff(timings) => handoff = Some(timings),
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::Finished { timings, .. } => return Reply { tokens, timings, handoff },
        }
    }
    panic!("the stream was cut");
}

/// `n` tokens of the simulator's vocabulary.
pub(crate) fn tokens(n: u32) -> Vec<Token> {
    (0..n).map(|i| 1 + i % 250).collect()
}
