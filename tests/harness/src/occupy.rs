//! Work from other clients that occupies a node.

use std::time::Duration;

use baton_link::Engine;
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_schemas::CacheScope;
use baton_schemas::SequenceRequest;
use baton_schemas::handoff::PrefillRequest;
use baton_schemas::kv::{Codec, HandoffId};
use baton_schemas::node::{NodeInfo, NodeLoad};
use tokio::task::JoinSet;

use crate::{CLUSTER_KEY, eventually_async};

const RETRY: Duration = Duration::from_millis(20);

/// Takes the only slot of a node and the only place in its queue. Dropping the result frees both.
pub async fn fill(url: &str) -> JoinSet<()> {
    let crowd = (0..2).map(|i| occupy(url.to_owned(), i)).collect();
    eventually_async("a full node", async || {
        let load = load(url).await;
        load.active_slots == 1 && load.queued == 1
    })
    .await;
    crowd
}

/// A node's own report of its load.
pub async fn load(url: &str) -> NodeLoad {
    let call = reqwest::Client::new().get(format!("{url}/node/v1/load")).bearer_auth(CLUSTER_KEY);
    call.send().await.unwrap().json().await.unwrap()
}

/// Takes a slot of a node, or a place in its queue, until it is dropped. A reply that is not read does not advance. Asks
/// again while the node refuses: two that arrive together can find one place, because the first has not left the queue yet.
pub async fn occupy(url: String, i: u32) {
    let client = reqwest::Client::new();
    let node = |call: &str| format!("{url}/node/v1/{call}");
    let info = client.get(node("info")).bearer_auth(CLUSTER_KEY).send().await.unwrap();
    let info: NodeInfo = info.json().await.unwrap();
    let n_tokens = info.n_ctx - 2;
    let tokens: Vec<u32> = (0..n_tokens).map(|t| (t * (i + 1)) % 200).collect();
    if info.role.decodes() {
        let request = || SequenceRequest {
            prompt: tokens[..8].to_vec(),
            ignore_eos: true,
            ephemeral: true,
            ..SequenceRequest::default()
        };
        let engine = RemoteEngine::new(&NodeAddress::Url(url.clone()), CLUSTER_KEY).unwrap();
        let _reply = loop {
            match engine.generate(request()).await {
                Ok(reply) => break reply,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        };
        std::future::pending().await
    } else {
        let request = || PrefillRequest {
            images: None,
            handoff: HandoffId(rand::random()),
            tokens: tokens.clone(),
            start: 0,
            codecs: vec![Codec::None as u8],
            state_codecs: Vec::new(),
            state_bps: None,
            macs: Vec::new(),
            checkpoints: Vec::new(),
            fingerprint: info.kv.as_ref().unwrap().fingerprint,
            cache_scope: CacheScope(u64::from(i)),
            ephemeral: false,
            gives_way: false,
            held_only: false,
        };
        let _reply = loop {
            match client.post(node("prefill")).json(&request()).bearer_auth(CLUSTER_KEY).send().await {
                Ok(reply) if reply.status().is_success() => break reply,
                _ => tokio::time::sleep(RETRY).await,
            }
        };
        std::future::pending().await
    }
}
