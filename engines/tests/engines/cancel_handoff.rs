//! Clients that leave at random points of a handoff leave no slots, connections or tasks on either node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::handoff::{KvPuller, PullPolicy};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_schemas::node::Role;
use baton_schemas::sequence::{FinishReason, SequenceEvent};
use baton_schemas::{CacheScope, SequenceRequest, Token};
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use crate::own_process::is_own;
use crate::peers;
use crate::peers::counting::Counting;
use crate::peers::{KEY, TestNode, node, puller, request};

/// The idle connections, and their tasks, that may exist at any time. A leak would add one for each cancellation.
const IDLE: usize = 12;

/// The longest wait for a slot or a token.
const PATIENCE_AT_MOST: Duration = Duration::from_secs(120);

/// A prefill node, a decode node, and a client of the decode node.
struct NodePair {
    prefill: Arc<Counting>,
    decode: Arc<dyn Engine>,
    client: RemoteEngine,
    prefill_node: TestNode,
    _decode_node: TestNode,
}

impl NodePair {
    async fn new(prefill: Arc<dyn Engine>, decode: Arc<dyn Engine>) -> NodePair {
        let prefill = Arc::new(Counting::new(prefill));
        let prefill_node = node(Arc::clone(&prefill) as Arc<dyn Engine>, Role::Prefill, KEY).await;
        let decode_node = node(Arc::clone(&decode), Role::Decode, KEY).await;
        let client = RemoteEngine::new(&NodeAddress::Url(decode_node.url.clone()), KEY).unwrap();
        NodePair { prefill, decode, client, prefill_node, _decode_node: decode_node }
    }

    fn request(&self, prompt: &[Token], n: u32) -> SequenceRequest {
        SequenceRequest { ignore_eos: true, ..request(prompt, n, Some(&self.prefill_node.url)) }
    }

    async fn is_idle(&self) -> bool {
        let loads = [self.prefill.load().await.unwrap(), self.decode.load().await.unwrap()];
        loads.iter().all(|load| (load.active_slots, load.queued) == (0, 0))
    }

    /// Checks that a whole handoff succeeds.
    async fn check_works(&self, prompt: &[Token]) {
        let reply = peers::generate(&self.client, self.request(prompt, 2)).await;
        let handoff = reply.handoff.unwrap();
        assert_eq!((handoff.failure, handoff.n_tokens as usize), (None, prompt.len() - 1));
    }
}

/// The numbers of clients that left in each stage.
#[derive(Debug, Default)]
struct Stages {
    queued: usize,
    pulling: usize,
    decoding: usize,
    /// The most requests that waited on the prefill node at once.
    prefill_queue: u32,
}

/// Tokens of a reply, which takes longer than any client waits, on a processor.
const N_TOKENS: u32 = 1_000;

/// What a client waits for before its patience starts. Without this wait, no client on a slow machine would get that
/// far.
#[derive(Clone, Copy, PartialEq)]
enum Waits {
    No,
    ForSlot,
    ForToken,
}

/// Reads a reply until `patience` is over and leaves. Returns the last event.
async fn leave_after(
    engine: &dyn Engine,
    request: SequenceRequest,
    waits: Waits,
    patience: Duration,
) -> Option<SequenceEvent> {
    let mut last = None;
    // The timeout drops the stream, like a client that leaves.
    let reply = if waits == Waits::No {
        tokio::time::timeout(patience, engine.generate(request)).await.ok()
    } else {
        Some(tokio::time::timeout(PATIENCE_AT_MOST, engine.generate(request)).await.expect("the engine answers"))
    };
    let mut events = reply?.unwrap();
    let is_there = |last: &Option<SequenceEvent>| match waits {
        Waits::No => true,
        Waits::ForSlot => last.is_some(),
        Waits::ForToken => matches!(last, Some(SequenceEvent::Token(_))),
    };
    while !is_there(&last) {
        let next = tokio::time::timeout(PATIENCE_AT_MOST, events.next()).await.expect("the reply goes on");
        last = Some(next.expect("an endless reply").unwrap());
    }
    let read = async {
        while let Some(event) = events.next().await {
            last = Some(event.unwrap());
        }
    };
    // A GPU may generate all tokens before the client leaves.
    if tokio::time::timeout(patience, read).await.is_ok() {
        let is_whole = matches!(&last, Some(SequenceEvent::Finished { reason: FinishReason::Length, timings })
            if timings.predicted_n + 1 >= N_TOKENS);
        assert!(is_whole, "an endless reply ended: {last:?}");
    }
    last
}

/// A pseudo-random number: the test must be the same every time.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// The number of open file descriptors of this process, if the system reports it.
fn open_files() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count())
}

fn live_tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

async fn eventually(what: &str, holds: impl AsyncFn() -> bool) -> Duration {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(30), "waited for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    began.elapsed()
}

/// A number of clients that all leave.
#[derive(Clone, Copy)]
struct Storm {
    n_clients: usize,
    at_once: usize,
    /// Tokens of the longest prompt.
    max_prompt: u64,
    max_patience_ms: u64,
}

/// Runs the clients and counts the stages in which they left.
async fn run_storm(pair: &NodePair, storm: Storm) -> Stages {
    let mut seed = 42;
    let mut n_begun = 0;
    let mut running = FuturesUnordered::new();
    let mut stages = Stages::default();
    while n_begun < storm.n_clients || !running.is_empty() {
        while running.len() < storm.at_once && n_begun < storm.n_clients {
            n_begun += 1;
            let n_prompt = 65 + random(&mut seed) % (storm.max_prompt - 65);
            // The first tokens are the prompt's number, so that no two prompts share a prefix.
            let number = [n_begun / 200, n_begun % 200].map(|digit| 1 + digit as u32);
            let prompt: Vec<Token> = number.into_iter().chain((2..n_prompt as u32).map(|i| 1 + i % 250)).collect();
            let patience = Duration::from_millis(random(&mut seed) % storm.max_patience_ms);
            let waits = match n_begun % 5 {
                0 => Waits::ForToken,
                1 => Waits::ForSlot,
                _ => Waits::No,
            };
            running.push(leave_after(&pair.client, pair.request(&prompt, N_TOKENS), waits, patience));
        }
        match running.next().await {
            Some(None) => stages.queued += 1,
            Some(Some(SequenceEvent::Started { .. })) => stages.pulling += 1,
            Some(Some(SequenceEvent::Finished { .. })) => {}
            Some(Some(_)) => stages.decoding += 1,
            None => {}
        }
        stages.prefill_queue = stages.prefill_queue.max(pair.prefill.load().await.unwrap().queued);
    }
    stages
}

/// Runs a storm of clients, and checks that slots, connections and tasks are freed.
async fn nothing_stays(pair: &NodePair, storm: Storm) {
    pair.check_works(&vec![7; 100]).await;
    let files = open_files();
    let tasks = live_tasks();
    let stages = run_storm(pair, storm).await;
    println!("{} cancelled: {stages:?}", storm.n_clients);
    let Stages { queued, pulling, decoding, prefill_queue } = stages;
    assert!(queued > 0 && pulling > 0 && decoding > 0 && prefill_queue > 0, "clients must leave in every stage");

    let idle_after = eventually("all slots to be free", async || pair.is_idle().await).await;
    let n_positions = pair.prefill.n_positions();
    let closed_after = eventually("all connections and tasks to end", async || {
        let files_ended = open_files().zip(files).is_none_or(|(now, before)| now <= before + IDLE);
        files_ended && live_tasks() <= tasks + IDLE
    })
    .await;
    println!("slots were free after {idle_after:?}, connections closed after {closed_after:?}");
    println!("files {files:?} → {:?}, tasks {tasks} → {}", open_files(), live_tasks());
    // Since then, the node has computed only the next handoff.
    pair.check_works(&vec![8; 100]).await;
    assert_eq!(pair.prefill.n_positions(), n_positions + 99, "the node computed more than the next handoff");
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_simulated_clients_leave_nothing() {
    if !is_own("cancel_handoff::five_hundred_simulated_clients_leave_nothing") {
        return;
    }
    let config = SimConfig { prefill_tps: 100_000.0, decode_tps: 200.0, chunk_tokens: 64, ..SimConfig::default() };
    let prefill = SimEngine::new(SimConfig { n_slots: 2, ..config.clone() });
    let policy = PullPolicy::default();
    let decode = SimEngine::with_puller(SimConfig { n_slots: 8, ..config }, Some(puller(policy) as Arc<dyn KvPuller>));
    let pair = NodePair::new(Arc::new(prefill), Arc::new(decode)).await;
    let storm = Storm { n_clients: 500, at_once: 16, max_prompt: 3_000, max_patience_ms: 150 };
    nothing_stays(&pair, storm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_stops_within_a_chunk() {
    // A chunk takes 100 ms.
    let config = SimConfig { prefill_tps: 2_560.0, chunk_tokens: 256, ..SimConfig::default() };
    let prefill = Arc::new(SimEngine::new(config.clone()));
    let decode = Arc::new(SimEngine::with_puller(config, Some(puller(PullPolicy::default()) as Arc<dyn KvPuller>)));
    let pair = NodePair::new(prefill, decode).await;
    for n_chunks in 1..=3 {
        let scope = CacheScope(n_chunks);
        let request = SequenceRequest { cache_scope: scope, ..pair.request(&peers::tokens(16_000), 10) };
        let before = pair.prefill.n_positions();
        let reply = pair.client.generate(request).await.unwrap();
        eventually("the prefill to be under way", async || pair.prefill.n_positions() >= before + n_chunks * 256).await;
        drop(reply);
        let at_leaving = pair.prefill.n_positions();
        eventually("the prefill's end", async || pair.is_idle().await).await;
        // Since then, the node has computed only the rest of one chunk and the next handoff.
        pair.check_works(&vec![n_chunks as u32 + 100; 100]).await;
        let more = pair.prefill.n_positions() - at_leaving - 99;
        assert!(more <= 256, "{more} positions were computed after the client had left");
    }
}

#[cfg(feature = "llama")]
#[tokio::test(flavor = "multi_thread")]
async fn sixty_clients_of_a_real_model_leave_nothing() {
    use baton_engines::registry::EngineOptions;

    use crate::models;
    if !is_own("cancel_handoff::sixty_clients_of_a_real_model_leave_nothing") {
        return;
    }
    let Some(model) = models::smollm2() else { return };
    let base = models::of_llama(model);
    let config = EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), n_slots: Some(2), n_ubatch: Some(64), ..base };
    let prefill = models::start(config.clone(), None).await;
    let decode = models::start(
        EngineOptions { n_slots: Some(6), ..config },
        Some(puller(PullPolicy::default()) as Arc<dyn KvPuller>),
    );
    let pair = NodePair::new(prefill, decode.await).await;
    let storm = Storm { n_clients: 60, at_once: 8, max_prompt: 200, max_patience_ms: 4_000 };
    nothing_stays(&pair, storm).await;
}
