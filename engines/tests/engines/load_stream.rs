//! The stream of a node's loads over a real socket: its content, its end, and its limits.

use std::sync::Arc;
use std::time::Duration;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::node::{ClusterKey, LateEngine, Listener, stoppable_router};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_link::{Engine, LoadStream};
use baton_schemas::node::{NodeLoad, Phase, Role};
use baton_schemas::{EngineError, SequenceRequest};
use futures::StreamExt;
use tokio_util::sync::CancellationToken;

const KEY: &str = "secret";

/// A node, its late engine, and the token that stops it.
struct Rig {
    folder: tempfile::TempDir,
    late: LateEngine,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Rig {
    async fn start() -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("node.sock");
        let listener = Listener::bind(&format!("unix:{}", socket.display()).parse().unwrap()).await.unwrap();
        let late = LateEngine::default();
        let stop = CancellationToken::new();
        let router = stoppable_router(Arc::new(late.clone()), Role::Both, ClusterKey::new(KEY), stop.clone());
        let server = tokio::spawn(listener.serve(router, stop.clone()));
        Rig { folder, late, stop, server }
    }

    async fn ready() -> Rig {
        let rig = Rig::start().await;
        rig.late.set(sim());
        rig
    }

    fn client(&self, key: &str) -> RemoteEngine {
        RemoteEngine::new(&NodeAddress::Unix(self.folder.path().join("node.sock")), key).unwrap()
    }
}

fn sim() -> Arc<dyn Engine> {
    Arc::new(SimEngine::new(SimConfig { prefill_tps: 50_000.0, decode_tps: 100.0, ..SimConfig::default() }))
}

/// The first load in the stream for which `is_it` returns true.
async fn until(loads: &mut LoadStream, is_it: impl Fn(&NodeLoad) -> bool) -> NodeLoad {
    let found = async {
        loop {
            let load = loads.next().await.expect("the stream goes on").unwrap();
            if is_it(&load) {
                return load;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), found).await.expect("a load of that kind")
}

fn request(n_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        prompt: (1..20).collect(),
        max_tokens: Some(n_tokens),
        ignore_eos: true,
        ..SequenceRequest::default()
    }
}

#[tokio::test]
async fn changes_are_sent_and_so_are_heartbeats() {
    let rig = Rig::ready().await;
    let client = rig.client(KEY);
    let mut loads = client.loads().await.unwrap();
    let idle = until(&mut loads, |load| load.active_slots == 0).await;
    // The load is repeated while nothing changes.
    for _ in 0..3 {
        assert_eq!(until(&mut loads, |_| true).await, idle);
    }
    let mut reply = client.generate(request(1_000)).await.unwrap();
    reply.next().await.unwrap().unwrap();
    until(&mut loads, |load| load.active_slots == 1).await;
    drop(reply);
    until(&mut loads, |load| load.active_slots == 0).await;
}

#[tokio::test]
async fn after_the_end_of_a_reply_at_most_one_load_counts_its_slot() {
    let rig = Rig::ready().await;
    let client = rig.client(KEY);
    for n_tokens in [1, 2, 5, 9, 30] {
        let mut loads = client.loads().await.unwrap();
        let (sender, mut taken) = tokio::sync::mpsc::unbounded_channel();
        let reading = tokio::spawn(async move {
            while let Some(load) = loads.next().await {
                if sender.send(load.unwrap().active_slots).is_err() {
                    return;
                }
            }
        });
        let mut reply = client.generate(request(n_tokens)).await.unwrap();
        while let Some(event) = reply.next().await {
            event.unwrap();
        }
        // What had come before the end.
        while taken.try_recv().is_ok() {}
        taken.recv().await.unwrap();
        assert_eq!(taken.recv().await, Some(0), "{n_tokens} tokens");
        reading.abort();
    }
}

#[tokio::test]
async fn a_stopping_node_says_so_until_its_requests_have_finished() {
    let rig = Rig::ready().await;
    let client = rig.client(KEY);
    let mut loads = client.loads().await.unwrap();
    let mut reply = client.generate(request(100)).await.unwrap();
    until(&mut loads, |load| load.active_slots == 1).await;
    rig.stop.cancel();
    until(&mut loads, |load| load.phase == Phase::Stopping && load.active_slots == 1).await;
    let mut n_tokens = 0;
    while let Some(event) = reply.next().await {
        n_tokens += u32::from(matches!(event.unwrap(), baton_schemas::SequenceEvent::Token(_)));
    }
    assert_eq!(n_tokens, 100);
    while let Some(load) = loads.next().await {
        assert_eq!(load.unwrap().phase, Phase::Stopping);
    }
    rig.server.await.unwrap().unwrap();
    assert!(matches!(rig.folder.path().join("node.sock").try_exists(), Ok(false)));
}

#[tokio::test]
async fn a_node_whose_model_is_loading_says_so_and_refuses_the_rest() {
    let rig = Rig::start().await;
    let client = rig.client(KEY);
    assert_eq!(client.load().await.unwrap().phase, Phase::Starting);
    let mut loads = client.loads().await.unwrap();
    until(&mut loads, |load| load.phase == Phase::Starting).await;
    let loading = EngineError::Unavailable { reason: "the model is loading".into() };
    assert_eq!(client.info().await.unwrap_err(), loading);
    assert_eq!(client.detokenize(&[65]).await.unwrap_err(), loading);
    assert_eq!(client.generate(request(1)).await.err(), Some(loading));
    rig.late.set(sim());
    until(&mut loads, |load| load.phase == Phase::Serving).await;
    assert_eq!(client.info().await.unwrap().engine, "sim");
}

#[tokio::test]
async fn streams_need_the_key_and_their_number_is_limited() {
    let rig = Rig::ready().await;
    assert_eq!(rig.client("wrong").loads().await.err(), Some(EngineError::Unauthorized));
    let client = rig.client(KEY);
    let mut streams = Vec::new();
    let refused = loop {
        match client.loads().await {
            Ok(mut loads) => {
                until(&mut loads, |_| true).await;
                streams.push(loads);
            }
            Err(error) => break error,
        }
        assert!(streams.len() < 1_000);
    };
    assert!(matches!(refused, EngineError::Unavailable { .. }), "{refused}");
    assert_eq!(streams.len(), 64);
    // When a reader leaves, another stream can begin.
    streams.pop();
    let again = async {
        while client.loads().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), again).await.expect("a free place");
}
