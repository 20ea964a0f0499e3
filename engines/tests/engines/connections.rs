//! What a node's connections may cost: pullers that do not read, and strangers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::engine::{KvEvent, KvStream};
use baton_link::handoff::{HttpPuller, KvPuller, LocalKv, PullEvent, PullOrder, PullPolicy};
use baton_link::node::{ClusterKey, Listener, ServerTls, router};
use baton_link::transport::Transport;
use baton_link::wrapper::EngineWrapper;
use baton_schemas::handoff::{Blame, HandoffFailure, KvSource, LinkMeasurement, PrefillRequest, STATE_BPS};
use baton_schemas::kv::{Chunk, Codec, HandoffId, LayerRows, SectionRows};
use baton_schemas::node::{BASE_PATH, Role};
use baton_schemas::{CacheScope, EngineError, Token};
use futures::StreamExt;
use futures::future::BoxFuture;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::peers::{self, KEY, TestNode};

/// A condition that has not come by then never comes.
const DEADLINE: Duration = Duration::from_secs(20);

/// A pull of a whole prompt.
async fn pull(client: &Client, url: &str, engine: &dyn Engine, tokens: Vec<Token>) -> Response {
    pull_call(client, url, engine, tokens).await.send().await.unwrap().error_for_status().unwrap()
}

async fn pull_call(client: &Client, url: &str, engine: &dyn Engine, tokens: Vec<Token>) -> RequestBuilder {
    call_of(client, url, &pull_request(engine, tokens).await)
}

fn call_of(client: &Client, url: &str, request: &PrefillRequest) -> RequestBuilder {
    client.post(format!("{url}{BASE_PATH}/prefill")).bearer_auth(KEY).json(request)
}

async fn pull_request(engine: &dyn Engine, tokens: Vec<Token>) -> PrefillRequest {
    PrefillRequest {
        images: None,
        handoff: HandoffId([7; 16]),
        tokens,
        start: 0,
        codecs: vec![Codec::None as u8],
        state_codecs: Vec::new(),
        state_bps: None,
        macs: Vec::new(),
        checkpoints: Vec::new(),
        fingerprint: engine.info().await.unwrap().kv.unwrap().fingerprint,
        cache_scope: CacheScope::default(),
        ephemeral: false,
        gives_way: false,
        held_only: false,
    }
}

#[tokio::test]
async fn an_impossible_rate_of_a_link_is_refused() {
    let engine: Arc<dyn Engine> = Arc::new(SimEngine::new(peers::small_sim()));
    let node = peers::node(Arc::clone(&engine), Role::Prefill, KEY).await;
    let plain = pull_request(&*engine, peers::tokens(20)).await;
    for (state_bps, expected) in [
        (None, StatusCode::OK),
        (Some(*STATE_BPS.start()), StatusCode::OK),
        (Some(*STATE_BPS.end()), StatusCode::OK),
        (Some(0), StatusCode::BAD_REQUEST),
        (Some(STATE_BPS.start() - 1), StatusCode::BAD_REQUEST),
        (Some(STATE_BPS.end() + 1), StatusCode::BAD_REQUEST),
        (Some(u64::MAX), StatusCode::BAD_REQUEST),
    ] {
        let request = PrefillRequest { state_bps, ..plain.clone() };
        let reply = call_of(&Client::new(), &node.url, &request).send().await.unwrap();
        assert_eq!(reply.status(), expected, "{state_bps:?}");
    }
}

async fn until_active(engine: &dyn Engine, n: u32, deadline: Duration) {
    let reached = async {
        while engine.load().await.unwrap().active_slots != n {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(tokio::time::timeout(deadline, reached).await.is_ok(), "{n} slots are never active");
}

/// Checks that a slot is free before the deadline: within 10 s after its puller was behind, and a margin for computing.
async fn slot_is_freed(engine: Arc<dyn Engine>, client: Client, url: &str, tokens: Vec<Token>, deadline: Duration) {
    let unread = pull(&client, url, &*engine, tokens).await;
    is_freed(engine, unread, deadline).await;
}

/// The same for a puller that has offered to go on without HTTP.
async fn raw_slot_is_freed(engine: Arc<dyn Engine>, client: Client, url: &str, tokens: Vec<Token>) {
    let call = pull_call(&client, url, &*engine, tokens).await;
    let reply = call.header("connection", "upgrade").header("upgrade", "baton-kv").send().await.unwrap();
    assert_eq!(reply.status(), StatusCode::SWITCHING_PROTOCOLS);
    let mut unread = reply.upgrade().await.unwrap();
    assert_eq!(unread.read_u32().await.unwrap(), u32::from_be_bytes(*b"BKV1"), "records without HTTP");
    is_freed(engine, unread, DEADLINE).await;
}

async fn is_freed(engine: Arc<dyn Engine>, unread: impl Send, deadline: Duration) {
    let began = Instant::now();
    until_active(&*engine, 1, DEADLINE).await;
    until_active(&*engine, 0, deadline).await;
    assert!(began.elapsed() > Duration::from_secs(5), "a short pause costs nothing: {:?}", began.elapsed());
    drop(unread);
}

/// More KV than all buffers between two nodes hold.
fn large_sim() -> Arc<dyn Engine> {
    Arc::new(SimEngine::new(SimConfig { kv_bytes_per_token: 16 << 10, ..peers::small_sim() }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_puller_that_does_not_read_frees_its_slot() {
    let tokens = peers::tokens(4_000);
    let plain = async {
        let engine = large_sim();
        let node = peers::node(Arc::clone(&engine), Role::Prefill, KEY).await;
        slot_is_freed(engine, Client::new(), &node.url, tokens.clone(), DEADLINE).await;
    };
    let raw = async {
        let engine = large_sim();
        let node = peers::node(Arc::clone(&engine), Role::Prefill, KEY).await;
        raw_slot_is_freed(engine, Client::new(), &node.url, tokens.clone()).await;
    };
    let http_2 = async {
        let engine = large_sim();
        let node = peers::node(Arc::clone(&engine), Role::Prefill, KEY).await;
        let client = Client::builder().http2_prior_knowledge().build().unwrap();
        slot_is_freed(engine, client, &node.url, tokens.clone(), DEADLINE).await;
    };
    let over_tls = async {
        let folder = tempfile::tempdir().unwrap();
        let [cert, key] = ["cert.pem", "key.pem"].map(|name| folder.path().join(name));
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let engine = large_sim();
        let tls = ServerTls::load(&cert, &key).unwrap();
        let node = peers::serve(Arc::clone(&engine), Role::Prefill, KEY, Some(tls)).await;
        let client = Transport::new(Some(&cert), false).unwrap().client().build().unwrap();
        let url = node.url.replace("http://127.0.0.1", "https://localhost");
        slot_is_freed(Arc::clone(&engine), client.clone(), &url, tokens.clone(), DEADLINE).await;
        raw_slot_is_freed(engine, client, &url, tokens.clone()).await;
    };
    let unix = async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.sock");
        let listener = Listener::bind(&format!("unix:{}", path.display()).parse().unwrap()).await.unwrap();
        let engine = large_sim();
        let router = router(Arc::clone(&engine), Role::Prefill, ClusterKey::new(KEY));
        let stop = CancellationToken::new();
        let _stop = stop.clone().drop_guard();
        tokio::spawn(listener.serve(router, stop));
        let client = Client::builder().unix_socket(path).build().unwrap();
        slot_is_freed(engine, client, "http://node", tokens.clone(), DEADLINE).await;
    };
    tokio::join!(plain, raw, http_2, over_tls, unix);
}

/// Pulls for an engine whose step takes 12 s after the first chunk, longer than a prefill node waits.
struct SlowSteps(Arc<HttpPuller>);

impl KvPuller for SlowSteps {
    fn introduce(&self, local: LocalKv) {
        self.0.introduce(local);
    }

    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent> {
        let mut pulled = self.0.pull(order, notify);
        let (taken, engine) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut step = Duration::from_secs(12);
            while let Some(event) = pulled.recv().await {
                taken.send(event).await.unwrap();
                tokio::time::sleep(std::mem::take(&mut step)).await;
            }
        });
        engine
    }

    fn measure_link(&self, source: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        self.0.measure_link(source)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_node_whose_step_is_long_gets_its_kv_or_blames_nobody() {
    let check = async |read_ahead: usize| {
        // Much more than the buffers of the sockets hold.
        let sim = || SimConfig { kv_bytes_per_token: 16 << 10, ..peers::small_sim() };
        let node = peers::node(Arc::new(SimEngine::new(sim())), Role::Prefill, KEY).await;
        let puller = peers::puller(PullPolicy { read_ahead, ..PullPolicy::default() });
        let decoder = SimEngine::with_puller(sim(), Some(Arc::new(SlowSteps(puller))));
        let reply = peers::generate(&decoder, peers::request(&peers::tokens(3_001), 2, Some(&node.url))).await;
        reply.handoff.unwrap()
    };
    let (read, unread) = tokio::join!(check(PullPolicy::default().read_ahead), check(1 << 20));
    assert_eq!((read.n_tokens, read.failure), (3_000, None), "{read:?}");
    let blame = unread.failure.map(HandoffFailure::blame);
    assert_eq!(blame, Some(Blame::Nobody), "{unread:?}");
    assert!((1..3_000).contains(&unread.n_tokens), "what came stays valid: {unread:?}");
}

#[cfg(feature = "llama")]
#[tokio::test(flavor = "multi_thread")]
async fn a_puller_that_does_not_read_frees_the_slot_of_a_real_model() {
    use baton_engines::registry::EngineOptions;

    let Some(model) = crate::models::smollm2() else { return };
    let config = EngineOptions {
        n_threads: Some(1),
        n_ctx: Some(2_048),
        n_slots: Some(1),
        n_ubatch: Some(128),
        ..crate::models::of_llama(model)
    };
    let engine: Arc<dyn Engine> = crate::models::start(config, None).await;
    let node = peers::node(Arc::clone(&engine), Role::Prefill, KEY).await;
    let tokens = (0..2_000).map(|i| 300 + i % 1_000).collect();
    // Computing what fits into the sockets' buffers takes a busy machine some time. Other replies have 60 s.
    slot_is_freed(engine, Client::new(), &node.url, tokens, Duration::from_secs(50)).await;
}

async fn small_node() -> TestNode {
    peers::node(Arc::new(SimEngine::new(peers::small_sim())), Role::Both, KEY).await
}

#[tokio::test]
async fn a_stranger_loses_its_connection_after_its_first_request() {
    let node = small_node().await;
    let stream = TcpStream::connect(&node.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    // It answers pings for as long as the connection is open.
    let connection = tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let request = http::Request::get("http://node/node/v1/info").body(()).unwrap();
    let (reply, _) = client.send_request(request, true).unwrap();
    assert_eq!(reply.await.unwrap().status(), StatusCode::UNAUTHORIZED);
    let closed = tokio::time::timeout(DEADLINE, connection).await;
    assert!(closed.is_ok(), "the connection of a stranger stays open");

    let mut stream = TcpStream::connect(&node.address).await.unwrap();
    stream.write_all(b"GET /node/v1/info HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
    let mut reply = String::new();
    let closed = tokio::time::timeout(DEADLINE, stream.read_to_string(&mut reply)).await;
    assert!(closed.is_ok() && reply.starts_with("HTTP/1.1 401") && reply.contains("connection: close"), "{reply}");
}

#[tokio::test]
async fn a_stranger_that_ignores_the_goodbye_is_cut_off() {
    let node = small_node().await;
    let mut stream = TcpStream::connect(&node.address).await.unwrap();
    // GET /node, and no answer to any ping.
    let head = [&[0x82, 0x86, 0x04, 5][..], b"/node", &[0x01, 4], b"node"].concat();
    let head = [&[0, 0, head.len() as u8, 1, 5, 0, 0, 0, 1][..], &head].concat();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    stream.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..], &head].concat()).await.unwrap();
    let mut replies = Vec::new();
    let closed = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut replies)).await;
    assert!(closed.is_ok(), "the connection of a stranger stays open");
}

/// An engine whose chunks are larger than a frame may be.
struct LargeChunks(SimEngine);

#[async_trait]
impl EngineWrapper for LargeChunks {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        let p1 = request.tokens.len() as u32;
        let rows = || vec![0; 8 * p1 as usize].into();
        let sections = vec![SectionRows { start: 0, layers: vec![LayerRows { k: rows(), v: rows() }] }];
        Ok(futures::stream::iter([Ok(KvEvent::Chunk(Chunk { p0: 0, p1, sections }))]).boxed())
    }
}

#[tokio::test]
async fn a_frame_that_cannot_be_written_ends_the_pull_with_an_error() {
    let sim = || SimConfig { n_ctx: 8_192, ..peers::small_sim() };
    let node = peers::node(Arc::new(LargeChunks(SimEngine::new(sim()))), Role::Prefill, KEY).await;
    let decoder = SimEngine::with_puller(sim(), Some(peers::puller(PullPolicy::default())));
    let reply = peers::generate(&decoder, peers::request(&peers::tokens(5_000), 2, Some(&node.url))).await;
    // It is lost if the stream ends in silence.
    assert_eq!(reply.handoff.unwrap().failure, Some(HandoffFailure::PrefillRefused));
}
