//! The connection that carries all streams of a node, over real sockets: versions, hostile endpoints, backpressure, and
//! what a node does with its streams when a connection ends.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::map_request;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::node::{ClusterKey, Listener, router_speaking};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_link::wrapper::EngineWrapper;
use baton_link::{Engine, SequenceStream};
use baton_schemas::node::{BASE_PATH, NodeErrorReply, Role};
use baton_schemas::sequence::{CachedTokens, FinishReason, GeneratedToken, SequenceEvent, Timings};
use baton_schemas::stream_versions::{StreamVersions, VersionMismatch};
use baton_schemas::streams::{
    FrameBuffer, MAX_CREDIT, MAX_NODE_PAYLOAD, NewStream, NodeFrame, StreamWork, put_body, put_credit, put_start,
};
use baton_schemas::{EngineError, SequenceRequest};
use bytes::BytesMut;
use futures::StreamExt;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use crate::peers::link::{Link, LinkedNode};
use crate::peers::{self, KEY, TestNode};

/// A condition that has not come by then never comes.
const DEADLINE: Duration = Duration::from_secs(30);

fn sim() -> Arc<dyn Engine> {
    Arc::new(SimEngine::new(SimConfig { decode_tps: 500.0, prefill_tps: 0.0, n_slots: 128, ..SimConfig::default() }))
}

fn client(node: &TestNode) -> RemoteEngine {
    RemoteEngine::new(&NodeAddress::Url(node.url.clone()), KEY).unwrap()
}

fn request(tag: u32, n_tokens: u32) -> SequenceRequest {
    SequenceRequest { ignore_eos: true, ..peers::request(&[tag % 250, 7, 9], n_tokens, None) }
}

async fn until_idle(engine: &dyn Engine) {
    let idle = async {
        while engine.load().await.unwrap().active_slots > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, idle).await.expect("a slot is never freed");
}

/// A raw connection of an endpoint, after the upgrade.
struct RawEndpoint {
    io: TcpStream,
}

impl RawEndpoint {
    async fn connect(node: &TestNode) -> RawEndpoint {
        let mut io = TcpStream::connect(&node.address).await.unwrap();
        let head = format!(
            "GET {BASE_PATH}/streams HTTP/1.1\r\nhost: node\r\nauthorization: Bearer {KEY}\r\nconnection: upgrade\r\n\
             upgrade: baton-streams\r\nbaton-streams-versions: 1-1\r\n\r\n"
        );
        io.write_all(head.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        while !reply.ends_with(b"\r\n\r\n") {
            reply.push(io.read_u8().await.unwrap());
        }
        let reply = String::from_utf8(reply).unwrap().to_lowercase();
        assert!(reply.starts_with("http/1.1 101") && reply.contains("baton-streams-version: 1"), "{reply}");
        RawEndpoint { io }
    }

    async fn send(&mut self, write: impl FnOnce(&mut BytesMut)) {
        let mut bytes = BytesMut::new();
        write(&mut bytes);
        match self.io.write_all(&bytes).await {
            // The node closes a connection at the first frame that is wrong.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
            sent => sent.unwrap(),
        }
    }

    /// What the node sends until it closes the connection.
    async fn rest(mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let closed = tokio::time::timeout(DEADLINE, self.io.read_to_end(&mut bytes)).await;
        // A reset is as good as an end.
        drop(closed.expect("the connection stays open"));
        bytes
    }
}

/// A start whose body fits into one piece, or the first piece of a longer one.
fn start(out: &mut BytesMut, stream: u32, body: &[u8]) {
    let new = NewStream { work: StreamWork::Generate, credit: 64, traceparent: None, body };
    let _rest = put_start(out, stream, &new);
}

fn piece(out: &mut BytesMut, stream: u32) {
    let _rest = put_body(out, stream, b"more");
}

fn json(request: &SequenceRequest) -> Vec<u8> {
    serde_json::to_vec(request).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_breaks_the_protocol_loses_its_connection_and_its_streams() {
    let engine = sim();
    let node = peers::node(Arc::clone(&engine), Role::Both, KEY).await;
    let bystander = client(&node);
    let mut undisturbed = bystander.generate(request(1, 10_000)).await.unwrap();
    let hostile = async |write: fn(&mut BytesMut)| {
        let mut endpoint = RawEndpoint::connect(&node).await;
        endpoint.send(|out| start(out, 1, &json(&request(2, 10_000)))).await;
        endpoint.send(write).await;
        endpoint.rest().await;
    };
    hostile(|out| out.extend_from_slice(&[255, 255, 255, 255, 2, 0, 0, 0, 1, 0, 0, 0])).await;
    hostile(|out| out.extend_from_slice(&[0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0])).await;
    hostile(|out| put_credit(out, 9, 1)).await;
    hostile(|out| (0..3).for_each(|_| put_credit(out, 1, MAX_CREDIT))).await;
    hostile(|out| start(out, 1, b"{}")).await;
    hostile(|out| piece(out, 1)).await;
    hostile(|out| piece(out, 7)).await;
    hostile(|out| (2..40).for_each(|stream| start(out, stream, &[b' '; 70_000]))).await;
    // Only the bystander's stream is left, and it goes on.
    let left = async {
        while engine.load().await.unwrap().active_slots != 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, left).await.expect("the streams of a closed connection keep their slots");
    for _ in 0..100 {
        undisturbed.next().await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_body_is_refused_and_the_connection_stays() {
    let node = peers::node(sim(), Role::Both, KEY).await;
    let mut endpoint = RawEndpoint::connect(&node).await;
    endpoint.send(|out| start(out, 1, b"{\"prompt\":\"text\"}")).await;
    endpoint.send(|out| start(out, 2, &json(&request(1, 3)))).await;
    let mut inbox = FrameBuffer::new(MAX_NODE_PAYLOAD);
    let mut said = Vec::new();
    while said.len() < 2 {
        while let Some(frame) = inbox.next_frame().unwrap() {
            match NodeFrame::parse(frame).unwrap() {
                NodeFrame::Error(json) => {
                    let reply: NodeErrorReply = serde_json::from_slice(json).unwrap();
                    assert!(matches!(reply.error, EngineError::InvalidRequest { .. }), "{reply:?}");
                    said.push(frame.stream);
                }
                NodeFrame::Event(json) if json.starts_with(b"{\"finished\"") => said.push(frame.stream),
                _ => {}
            }
        }
        assert_ne!(endpoint.io.read_buf(inbox.space()).await.unwrap(), 0);
    }
    assert_eq!(said, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_streams_on_one_connection_are_equal_to_single_ones() {
    for link in Link::ALL {
        let node = LinkedNode::serve(sim(), link).await;
        let engine = node.client();
        let one = async |engine: &RemoteEngine, i| peers::generate(engine, request(i, 50 + i)).await.tokens;
        let alone = join_all((0..100).map(async |i| one(&node.client(), i).await)).await;
        let together = join_all((0..100).map(|i| one(&engine, i))).await;
        assert_eq!(alone, together, "{link:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_does_not_read_stops_only_its_stream() {
    for link in Link::ALL {
        let engine: Arc<dyn Engine> = Arc::new(SimEngine::new(SimConfig { decode_tps: 0.0, ..SimConfig::default() }));
        let node = LinkedNode::serve(Arc::clone(&engine), link).await;
        let remote = node.client();
        let unread = remote.generate(request(1, 5_000)).await.unwrap();
        let reply = peers::generate(&remote, request(2, 5_000)).await;
        assert_eq!(reply.tokens.len(), 5_000, "{link:?}");
        assert_eq!(engine.load().await.unwrap().active_slots, 1, "{link:?}: the unread stream waits");
        // All of it is there for a reader that comes late.
        let n = unread.filter(|event| std::future::ready(matches!(event, Ok(SequenceEvent::Token(_))))).count().await;
        assert_eq!(n, 5_000, "{link:?}");
        drop(remote.generate(request(3, 5_000)).await.unwrap());
        until_idle(&*engine).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_connection_cancels_its_streams() {
    let engine = sim();
    let node = peers::node(Arc::clone(&engine), Role::Both, KEY).await;
    let mut endpoint = RawEndpoint::connect(&node).await;
    for stream in 1..=20 {
        endpoint.send(|out| start(out, stream, &json(&request(stream, 10_000)))).await;
    }
    let active = async {
        while engine.load().await.unwrap().active_slots != 20 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, active).await.expect("the streams start");
    drop(endpoint);
    until_idle(&*engine).await;
}

/// A node with these versions.
async fn node_speaking(versions: StreamVersions) -> (String, CancellationToken) {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let url = format!("http://{}", listener.tcp_address().unwrap());
    let stop = CancellationToken::new();
    let router = router_speaking(versions, sim(), Role::Both, ClusterKey::new(KEY), stop.clone());
    tokio::spawn(listener.serve(router, stop.clone()));
    (url, stop)
}

#[tokio::test]
async fn peers_use_their_newest_common_version_or_name_both() {
    let versions = |oldest, newest| StreamVersions { oldest, newest };
    for (node, endpoint) in
        [(versions(1, 1), versions(1, 2)), (versions(1, 2), versions(1, 1)), (versions(2, 3), versions(1, 2))]
    {
        let (url, stop) = node_speaking(node).await;
        let remote = RemoteEngine::new(&NodeAddress::Url(url), KEY).unwrap().speaking(endpoint);
        assert_eq!(remote.info().await.unwrap().engine, "sim");
        assert_eq!(peers::generate(&remote, request(1, 5)).await.tokens.len(), 5, "{node} and {endpoint}");
        stop.cancel();
    }
    for (node, endpoint) in [(versions(2, 2), versions(1, 1)), (versions(1, 1), versions(2, 3))] {
        let (url, stop) = node_speaking(node).await;
        let remote = RemoteEngine::new(&NodeAddress::Url(url), KEY).unwrap().speaking(endpoint);
        let mismatch = EngineError::VersionMismatch(VersionMismatch { node, endpoint });
        assert_eq!(remote.info().await.unwrap_err(), mismatch);
        assert_eq!(remote.generate(request(1, 5)).await.err(), Some(mismatch));
        stop.cancel();
    }
}

/// Serves these routes as a node's address.
async fn serving(router: Router) -> (RemoteEngine, CancellationToken) {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let url = format!("http://{}", listener.tcp_address().unwrap());
    let stop = CancellationToken::new();
    tokio::spawn(listener.serve(router, stop.clone()));
    (RemoteEngine::new(&NodeAddress::Url(url), KEY).unwrap(), stop)
}

#[tokio::test]
async fn a_refused_upgrade_loses_the_node_and_never_blames_the_request() {
    // A reverse proxy that passes no upgrade.
    let strip = map_request(|mut request: Request| async move {
        request.headers_mut().remove("upgrade");
        request
    });
    let node = router_speaking(StreamVersions::OURS, sim(), Role::Both, ClusterKey::new(KEY), CancellationToken::new());
    let (remote, stop) = serving(node.layer(strip)).await;
    assert_eq!(remote.info().await.unwrap().engine, "sim");
    let lost = remote.generate(request(1, 5)).await.err();
    assert!(matches!(&lost, Some(EngineError::Lost { detail }) if detail.contains("upgrade")), "{lost:?}");
    stop.cancel();

    let answered = async |status: StatusCode, body: String| {
        let (remote, stop) = serving(Router::new().fallback(move || async move { (status, body) })).await;
        let error = remote.generate(request(1, 5)).await.err();
        stop.cancel();
        error
    };
    let said = |error: EngineError| serde_json::to_string(&NodeErrorReply { error }).unwrap();
    // Only a node says of itself that it is from before this protocol.
    let lost = answered(StatusCode::NOT_FOUND, "not here".to_owned()).await;
    assert!(matches!(&lost, Some(EngineError::Lost { .. })), "{lost:?}");
    let old = answered(StatusCode::NOT_FOUND, said(EngineError::invalid("no such call"))).await;
    let mismatch = VersionMismatch { node: StreamVersions::BEFORE, endpoint: StreamVersions::OURS };
    assert_eq!(old, Some(EngineError::VersionMismatch(mismatch)));
    let full = EngineError::Unavailable { reason: "too many connections".into() };
    assert_eq!(answered(StatusCode::SERVICE_UNAVAILABLE, said(full.clone())).await, Some(full));
}

#[tokio::test]
async fn calls_of_older_endpoints_are_refused_with_what_to_update() {
    let node = peers::node(sim(), Role::Both, KEY).await;
    let http = reqwest::Client::new();
    let url = |call| format!("{}{BASE_PATH}/{call}", node.url);
    let body = request(1, 1);
    for call in
        [http.post(url("generate")).json(&body), http.post(url("embed")).json(&body), http.get(url("load/stream"))]
    {
        let reply: NodeErrorReply = call.bearer_auth(KEY).send().await.unwrap().json().await.unwrap();
        assert!(reply.error.to_string().contains("Update the endpoint"), "{reply:?}");
    }
}

/// Gives all its streams a token at the same moment, like the thread of a real engine.
struct StepEngine {
    sim: SimEngine,
    steps: broadcast::Sender<u32>,
}

#[async_trait]
impl EngineWrapper for StepEngine {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let mut steps = self.steps.subscribe();
        let events = async_stream::stream! {
            yield Ok(SequenceEvent::Started(CachedTokens::in_slot(0)));
            while let Ok(id) = steps.recv().await {
                yield Ok(SequenceEvent::Token(GeneratedToken { id, bytes: b"a".to_vec(), special: false, logprobs: None, drafts: None }));
            }
            yield Ok(SequenceEvent::Finished { reason: FinishReason::Stop, timings: Timings::default() });
        };
        Ok(events.boxed())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tokens_of_a_step_leave_in_few_frames() {
    const N_STREAMS: u32 = 128;
    const N_STEPS: u32 = 50;
    let steps = broadcast::Sender::new(64);
    let engine = StepEngine { sim: SimEngine::new(SimConfig::default()), steps: steps.clone() };
    let node = peers::node(Arc::new(engine), Role::Both, KEY).await;
    let mut endpoint = RawEndpoint::connect(&node).await;
    for stream in 1..=N_STREAMS {
        endpoint.send(|out| start(out, stream, &json(&request(1, 1)))).await;
    }
    let mut inbox = FrameBuffer::new(MAX_NODE_PAYLOAD);
    let (mut n_started, mut n_frames, mut n_tokens, mut n_sent) = (0, 0, 0, 0);
    while n_tokens < N_STREAMS * N_STEPS {
        if n_started == N_STREAMS && n_tokens == n_sent * N_STREAMS {
            steps.send(n_sent).unwrap();
            n_sent += 1;
        }
        assert_ne!(endpoint.io.read_buf(inbox.space()).await.unwrap(), 0);
        while let Some(frame) = inbox.next_frame().unwrap() {
            match NodeFrame::parse(frame).unwrap() {
                NodeFrame::Step(tokens) => {
                    n_frames += 1;
                    n_tokens += tokens.count() as u32;
                }
                NodeFrame::Event(_) => n_started += 1,
                _ => {}
            }
        }
    }
    eprintln!("{n_frames} frames for {N_STEPS} steps of {N_STREAMS} streams");
    // A busy machine may split a step, but a frame a token would be 6,400.
    assert!(n_frames <= 10 * N_STEPS, "{n_frames} frames for {N_STEPS} steps");
}
