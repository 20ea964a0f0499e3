//! Every engine keeps the contract of [`Engine`]: the simulator, a node around it, and llama.cpp with the real model,
//! if that is available.

mod checks;

use std::sync::Arc;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::node::{ClusterKey, Listener, router};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_schemas::EngineError;
use baton_schemas::node::Role;
use tokio_util::sync::CancellationToken;

fn sim() -> Arc<dyn Engine> {
    Arc::new(SimEngine::new(SimConfig {
        prefill_tps: 50_000.0,
        decode_tps: 500.0,
        n_ctx: 2_048,
        max_queued: 8,
        ..SimConfig::default()
    }))
}

/// The client of a node around `engine`, which serves on a Unix socket until `stop`.
async fn remote(engine: Arc<dyn Engine>, stop: CancellationToken) -> RemoteEngine {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("node.sock");
    let listener = Listener::bind(&format!("unix:{}", socket.display()).parse().unwrap()).await.unwrap();
    let router = router(engine, Role::Both, ClusterKey::new("secret"));
    tokio::spawn(async move {
        let _folder = folder;
        listener.serve(router, stop).await.unwrap();
    });
    RemoteEngine::new(&NodeAddress::Unix(socket), "secret").unwrap()
}

#[tokio::test]
async fn the_simulator_keeps_the_contract() {
    checks::check(sim()).await;
}

#[tokio::test]
async fn a_node_keeps_the_contract() {
    let stop = CancellationToken::new();
    checks::check(Arc::new(remote(sim(), stop.clone()).await)).await;
    stop.cancel();
}

#[cfg(feature = "llama")]
#[tokio::test]
async fn llama_keeps_the_contract() {
    let Some(model) = crate::models::smollm2() else { return };
    checks::check(open_llama(model)).await;
}

/// Quick enough for a machine that emulates another.
#[cfg(feature = "llama")]
#[tokio::test]
async fn llama_with_random_weights_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny.gguf");
    tiny_gguf::write_with_template(&model, tiny_gguf::Architecture::Llama, 1);
    check(open_llama(model)).await;
}

#[cfg(feature = "llama")]
fn open_llama(model: std::path::PathBuf) -> Arc<dyn Engine> {
    use baton_engines::registry::{self, EngineOptions};

    let config =
        EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), max_queued: Some(8), ..crate::models::of_llama(model) };
    registry::open(config, None).unwrap()
}

/// Checks an engine, and the same engine through a node's socket.
#[cfg(feature = "models")]
pub(crate) async fn check(engine: Arc<dyn Engine>) {
    checks::check(Arc::clone(&engine)).await;
    let stop = CancellationToken::new();
    checks::check(Arc::new(remote(engine, stop.clone()).await)).await;
    stop.cancel();
}

#[tokio::test]
async fn a_node_reveals_nothing_without_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("node.sock");
    let listener = Listener::bind(&format!("unix:{}", socket.display()).parse().unwrap()).await.unwrap();
    let router = router(sim(), Role::Both, ClusterKey::new("secret"));
    let stop = CancellationToken::new();
    let server = tokio::spawn(listener.serve(router, stop.clone()));

    for wrong in ["", "Secret", "secret2"] {
        let stranger = RemoteEngine::new(&NodeAddress::Unix(socket.clone()), wrong).unwrap();
        assert_eq!(stranger.info().await.unwrap_err(), EngineError::Unauthorized);
        assert_eq!(stranger.detokenize(&[65]).await.unwrap_err(), EngineError::Unauthorized);
    }
    // It does not even reveal which paths exist.
    let client = reqwest::Client::builder().unix_socket(socket.clone()).build().unwrap();
    for path in ["/", "/node/v1/info", "/node/v1/proof?message=00", "/node/v1/nothing"] {
        assert_eq!(client.get(format!("http://node{path}")).send().await.unwrap().status(), 401, "{path}");
    }
    // With the key, invalid bodies are refused as such.
    let post = |body: &'static str| client.post("http://node/node/v1/tokenize").bearer_auth("secret").body(body).send();
    for body in ["", "[]", "{\"text\":7}", "\u{0}"] {
        assert_eq!(post(body).await.unwrap().status(), 400, "{body:?}");
    }
    stop.cancel();
    server.await.unwrap().unwrap();
}
