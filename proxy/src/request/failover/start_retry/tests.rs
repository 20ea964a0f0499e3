//! Nodes that stop at any of their calls, and requests that do not notice.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use axum::extract::Request;
use axum::middleware::map_request;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::node::{ClusterKey, Listener, router};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_link::wrapper::EngineWrapper;
use baton_link::{EmbedStream, Engine, SequenceStream};
use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedSequences, EmbedTask};
use baton_schemas::generate::{ChatPrompt, Conversation, Input};
use baton_schemas::node::{NodeLoad, Role, TokenizeRequest};
use baton_schemas::stream_versions::{StreamVersions, VersionMismatch};
use baton_schemas::{GenerateRequest, KeyTag, SequenceRequest, Token};
use futures::StreamExt;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::http::HttpBackend;
use crate::observe::tests::{caller, request};
use crate::reply_event::EventKind;
use crate::serve::request_service::RequestService;
use crate::targets::models::ModelPool;
use crate::targets::nodes::{Health, NodeState, QuarantineLevel, StateChange, StateReason};

/// How a node ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// It answers nothing any more, and keeps its connections.
    Freezes,
    /// Calls to it break.
    Dies,
}

/// A simulator that answers so many calls, and then ends.
struct StoppingEngine {
    sim: SimEngine,
    n_calls: AtomicU32,
    end: End,
}

impl StoppingEngine {
    /// Answers nothing once `n_calls` are used up.
    async fn gate(&self, takes: u32) -> Result<(), EngineError> {
        let is_open = self.n_calls.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| match n {
            0 => None,
            n => Some(n - takes),
        });
        match (is_open, self.end) {
            (Ok(_), _) => Ok(()),
            (Err(_), End::Dies) => Err(EngineError::lost("gone")),
            (Err(_), End::Freezes) => std::future::pending().await,
        }
    }
}

#[async_trait]
impl EngineWrapper for StoppingEngine {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        self.gate(0).await?;
        self.sim.load().await
    }

    async fn render(&self, conversation: &Conversation, key: KeyTag) -> Result<Vec<Token>, EngineError> {
        self.gate(1).await?;
        self.sim.render(conversation, key).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.gate(1).await?;
        self.sim.tokenize(request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        self.gate(1).await?;
        self.sim.detokenize(tokens).await
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.gate(1).await?;
        self.sim.generate(request).await
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        self.gate(1).await?;
        self.sim.embed(request).await
    }
}

fn sim() -> SimEngine {
    SimEngine::new(SimConfig { prefill_tps: 100_000.0, decode_tps: 1_000.0, ..SimConfig::default() })
}

async fn node(name: &str, engine: impl Engine) -> Arc<Node> {
    let health = Health::new("it");
    health.note_answer(Arc::new(engine.info().await.unwrap()));
    Node::new(name.into(), None, Arc::new(engine), health)
}

/// An endpoint whose first node ends after so many calls, and whose second one is well.
async fn app(end: End, n_calls: u32) -> RequestService {
    let stopping = StoppingEngine { sim: sim(), n_calls: AtomicU32::new(n_calls), end };
    over(vec![node("stopping", stopping).await, node("spare", sim()).await]).0
}

/// What a request gives, however soon the node that it is sent to ends.
async fn check<T: PartialEq + std::fmt::Debug>(ask: impl AsyncFn(&RequestService) -> Result<T, RequestError>) {
    let expected = ask(&app(End::Dies, 1_000).await).await.unwrap();
    for end in [End::Freezes, End::Dies] {
        for n_calls in 0..8 {
            let app = app(end, n_calls).await;
            // The node was well until now.
            tokio::time::sleep(Duration::from_secs(1)).await;
            let began = Instant::now();
            let given = ask(&app).await;
            assert_eq!(given.unwrap_or_else(|error| panic!("{end:?} after {n_calls}: {error}")), expected);
            assert!(began.elapsed() < START_DEADLINE, "{end:?} after {n_calls}: {:?}", began.elapsed());
        }
    }
}

fn chat() -> ChatPrompt {
    let conversation = json!({ "messages": [{ "role": "user", "content": "hello" }] });
    ChatPrompt { conversation: serde_json::from_value(conversation).unwrap(), ..ChatPrompt::default() }
}

#[tokio::test(start_paused = true)]
async fn embeddings_survive_the_loss_of_their_node_at_any_call() {
    let inputs = ["one", "two", "three"].map(|text| EmbedInput::Text(text.to_owned())).to_vec();
    let request = EmbedRequest {
        model: "m".into(),
        field: "input",
        task: EmbedTask::Embed,
        inputs,
        truncate: false,
        dimensions: None,
        keep_alive: None,
    };
    check(async |app| Ok(app.embed(request.clone(), &caller()).await?.vectors)).await;
}

#[tokio::test(start_paused = true)]
async fn short_calls_survive_the_loss_of_their_node_at_any_call() {
    let text = || TokenizeRequest {
        text: "some text".into(),
        add_special: false,
        parse_special: false,
        key: Default::default(),
    };
    check(async |app| app.tokenize(Some("m"), text(), &caller()).await).await;
    check(async |app| app.detokenize(None, vec![65, 66, 67], &caller()).await).await;
    check(async |app| app.count(Some("m"), chat(), &caller()).await).await;
    check(async |app| app.render(Some("m"), chat(), &caller()).await).await;
    check(async |app| Ok(app.explain(request("m"), &caller()).await?.n_prompt)).await;
}

#[tokio::test(start_paused = true)]
async fn a_reply_survives_the_loss_of_its_node_at_any_call() {
    check(async |app| {
        let mut events = app.generate(request("m"), caller()).await?.events;
        let mut reply = String::new();
        while let Some(event) = events.next().await {
            if let EventKind::Text { text, .. } = event?.kind {
                reply += &text;
            }
        }
        Ok(reply)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_needs_one_call_and_a_reply_the_end_of_the_prompt_too() {
    for (n_calls, is_answered) in [(1, [true, false]), (3, [true, true])] {
        let app = async || {
            let stopping = StoppingEngine { sim: sim(), n_calls: AtomicU32::new(n_calls), end: End::Dies };
            let node = node("thinks", stopping).await;
            let mut info = (*node.info().unwrap()).clone();
            info.facts.chat_template = "</think>".to_owned();
            node.health.note_answer(Arc::new(info));
            over(vec![node]).0
        };
        let request = || GenerateRequest { input: Input::Chat(chat().conversation), ..request("m") };
        let explained = app().await.explain(request(), &caller()).await.is_ok();
        let replied = app().await.generate(request(), caller()).await.is_ok();
        assert_eq!([explained, replied], is_answered, "{n_calls}");
    }
}

/// A node that refuses every sequence.
struct Refusing(SimEngine, EngineError);

#[async_trait]
impl EngineWrapper for Refusing {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        Err(self.1.clone())
    }
}

/// An endpoint over these nodes.
fn over(decode: Vec<Arc<Node>>) -> (RequestService, Arc<ServedModel>) {
    let model = Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, Vec::new()));
    let app = RequestService::over(Arc::new(ModelPool::of(vec![Arc::clone(&model)])));
    (app, model)
}

fn full() -> Refusing {
    Refusing(sim(), EngineError::QueueFull { limit: 1 })
}

#[tokio::test(start_paused = true)]
async fn the_last_node_is_asked_though_its_breaker_is_open() {
    let (app, model) = over(vec![node("a", full()).await, node("b", full()).await, node("c", sim()).await]);
    model.decode[2].failed(Task::Decode, FailureReason::DecodeLost);
    let reply = app.generate(request("m"), caller()).await.unwrap();
    assert!(reply.route.contains("decode=c"), "{}", reply.route);
    assert_eq!(model.fallbacks.view()[&FallbackReason::DecodeBusy].count, 2);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_all_refuse_ends_with_their_refusal() {
    // The third is not there to be asked.
    let (app, model) = over(vec![node("a", full()).await, node("b", full()).await, node("c", sim()).await]);
    lose(&model.decode[2]);
    let refused = app.generate(request("m"), caller()).await.err();
    assert!(matches!(refused, Some(RequestError::Engine(EngineError::QueueFull { .. }))), "{refused:?}");
}

fn lose(node: &Node) {
    node.health.note_failure(&StateChange::new(StateReason::Unreachable, "gone"), Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_all_others_refuse_waits_for_a_lost_node() {
    let (app, model) = over(vec![node("a", full()).await, node("b", sim()).await]);
    lose(&model.decode[1]);
    let comes_back = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        model.decode[1].health.note_answer(Arc::new(sim().info().await.unwrap()));
    };
    let (reply, ()) = tokio::join!(app.generate(request("m"), caller()), comes_back);
    let reply = reply.unwrap();
    assert!(reply.route.contains("decode=b"), "{}", reply.route);
    assert_eq!(model.fallbacks.view()[&FallbackReason::DecodeBusy].count, 1, "one request met a full queue");
}

#[tokio::test(start_paused = true)]
async fn a_node_with_another_request_in_quarantine_is_better_than_one_that_has_refused() {
    let (app, model) = over(vec![node("a", full()).await, node("b", sim()).await]);
    let _isolated = model.decode[1].quarantine.enter(QuarantineLevel::Isolated).unwrap();
    for _ in 0..4 {
        let reply = app.generate(request("m"), caller()).await.unwrap();
        assert!(reply.route.contains("decode=b"), "{}", reply.route);
    }
}

#[tokio::test(start_paused = true)]
async fn a_free_node_is_asked_before_a_lost_one_is_waited_for() {
    let (app, model) = over(vec![node("a", full()).await, node("b", sim()).await, node("c", sim()).await]);
    lose(&model.decode[1]);
    let began = Instant::now();
    let reply = app.generate(request("m"), caller()).await.unwrap();
    assert!(reply.route.contains("decode=c"), "{}", reply.route);
    assert!(began.elapsed() < RETRY_PAUSE, "nothing was waited for");
}

/// An engine that is lost at its first sequences.
struct Stumbling {
    sim: SimEngine,
    n_losses: AtomicU32,
}

#[async_trait]
impl EngineWrapper for Stumbling {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        match self.n_losses.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)) {
            Ok(_) => Err(EngineError::lost("gone")),
            Err(_) => self.sim.generate(request).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_to_be_alone_is_no_part_of_the_search_for_an_engine() {
    let stumbling = |n| Stumbling { sim: sim(), n_losses: AtomicU32::new(n) };
    let (app, model) = over(vec![node("a", stumbling(2)).await, node("b", stumbling(2)).await]);
    // Other requests stay on both nodes, so that each attempt after a loss begins with the whole wait.
    let _others: Vec<_> = model.decode.iter().map(|node| node.quarantine.enter_anyway(QuarantineLevel::Free)).collect();
    let began = Instant::now();
    app.generate(request("m"), caller()).await.unwrap();
    assert!(began.elapsed() > START_DEADLINE, "it waited longer than it may search");
    assert_eq!(model.fallbacks.view()[&FallbackReason::DecodeLost].count, 4);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_not_available_is_not_counted_as_busy() {
    let stops = Refusing(sim(), EngineError::Unavailable { reason: "stopping".into() });
    let (app, model) = over(vec![node("a", stops).await, node("b", sim()).await]);
    app.generate(request("m"), caller()).await.unwrap();
    let counts: Vec<_> = model.fallbacks.view().into_iter().map(|(reason, n)| (reason, n.count)).collect();
    assert_eq!(counts, [(FallbackReason::DecodeUnavailable, 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_node_of_another_version_is_left_out_and_another_one_is_asked() {
    let mismatch = VersionMismatch { node: StreamVersions::BEFORE, endpoint: StreamVersions::OURS };
    let other = Refusing(sim(), EngineError::VersionMismatch(mismatch));
    let (app, model) = over(vec![node("a", other).await, node("b", sim()).await]);
    let reply = app.generate(request("m"), caller()).await.unwrap();
    assert!(reply.route.contains("decode=b"), "{}", reply.route);
    let counts: Vec<_> = model.fallbacks.view().into_iter().map(|(reason, n)| (reason, n.count)).collect();
    assert_eq!(counts, [(FallbackReason::DecodeUnavailable, 1)]);
    assert_eq!(model.decode[0].health.state(), NodeState::Down);
}

#[tokio::test]
async fn a_node_behind_a_proxy_that_passes_no_upgrade_is_replaced_by_another_one() {
    let strip = map_request(|mut request: Request| async move {
        request.headers_mut().remove("upgrade");
        request
    });
    let routes = router(Arc::new(sim()), Role::Both, ClusterKey::new("key"));
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = NodeAddress::Url(format!("http://{}", listener.tcp_address().unwrap()));
    let stop = CancellationToken::new();
    tokio::spawn(listener.serve(routes.layer(strip), stop.clone()));
    let remote = RemoteEngine::new(&address, "key").unwrap();
    let refused = remote.generate(SequenceRequest::default()).await.err().unwrap();
    assert!(refused.is_lost_engine() && refused.to_string().contains("header `upgrade`"), "{refused}");
    let (app, _) = over(vec![node("proxied", remote).await, node("b", sim()).await]);
    let reply = app.generate(request("m"), caller()).await.unwrap();
    assert!(reply.route.contains("decode=b"), "{}", reply.route);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_request_that_an_engine_fails_at_is_asked_of_one_more() {
    let fails = |what: &str| Refusing(sim(), EngineError::internal(what));
    let (app, model) = over(vec![node("a", fails("first")).await, node("b", sim()).await]);
    let reply = app.generate(request("m"), caller()).await.unwrap();
    assert!(reply.route.contains("decode=b"), "{}", reply.route);
    let counts: Vec<_> = model.fallbacks.view().into_iter().map(|(reason, n)| (reason, n.count)).collect();
    assert_eq!(counts, [(FallbackReason::EngineFailed, 1)]);
    let decode = [node("a", fails("first")).await, node("b", fails("second")).await, node("c", sim()).await];
    let (app, _) = over(decode.to_vec());
    let failed = app.generate(request("m"), caller()).await.err();
    let expected = EngineError::internal("first");
    assert!(matches!(&failed, Some(RequestError::Engine(error)) if *error == expected), "{failed:?}");
}

/// A node with a projector.
async fn seeing(name: &str, engine: impl Engine) -> Arc<Node> {
    let node = node(name, engine).await;
    let info = NodeInfo { projector: Some("eyes".to_owned()), ..(*node.info().unwrap()).clone() };
    node.health.note_answer(Arc::new(info));
    node
}

/// A chat with an image.
fn seen() -> ChatPrompt {
    let images = vec![Image::new(&b"x"[..], "messages[0].content[0]")];
    ChatPrompt { conversation: Conversation { images, ..chat().conversation }, ..ChatPrompt::default() }
}

fn about_an_image() -> GenerateRequest {
    GenerateRequest { input: Input::Chat(seen().conversation), ..request("m") }
}

#[tokio::test(start_paused = true)]
async fn a_request_with_images_ends_as_its_nodes_that_see_say_and_not_as_a_blind_one_would() {
    for said in [
        EngineError::QueueFull { limit: 1 },
        EngineError::Unavailable { reason: "stopping".into() },
        EngineError::lost("gone"),
        EngineError::internal("broken"),
    ] {
        let refusing = async || seeing("a", Refusing(sim(), said.clone())).await;
        let (app, model) = over(vec![refusing().await, node("blind", sim()).await]);
        let began = Instant::now();
        let refused = app.generate(about_an_image(), caller()).await.err();
        assert!(matches!(&refused, Some(RequestError::Engine(error)) if *error == said), "{refused:?}");
        // Only one that was lost is waited for, and nobody else was there to be asked.
        let is_lost = said.is_lost_engine();
        let was_patient = began.elapsed() >= START_DEADLINE;
        assert_eq!((was_patient, model.fallbacks.view().is_empty()), (is_lost, !is_lost), "{said}");
        // Another one that sees takes it.
        let (app, _) = over(vec![refusing().await, node("blind", sim()).await, seeing("c", sim()).await]);
        let reply = app.generate(about_an_image(), caller()).await.unwrap();
        assert!(reply.route.contains("decode=c"), "{said}: {}", reply.route);
    }
}

#[tokio::test(start_paused = true)]
async fn an_image_is_refused_as_unseen_only_where_all_nodes_are_known_to_be_blind() {
    let seeing = seeing("a", sim()).await;
    let blind = node("blind", sim()).await;
    let (app, _) = over(vec![Arc::clone(&blind), Arc::clone(&seeing)]);
    let ask = async |app: &RequestService| app.generate(about_an_image(), caller()).await.err();
    assert!(ask(&app).await.is_none());
    lose(&seeing);
    let refused = ask(&app).await;
    assert!(matches!(refused, Some(RequestError::Unavailable { .. })), "{refused:?}");
    let counted = app.count(Some("m"), seen(), &caller()).await;
    assert!(matches!(counted, Err(RequestError::Unavailable { .. })), "{counted:?}");
    let (app, _) = over(vec![blind]);
    assert!(matches!(ask(&app).await, Some(RequestError::ImagesUnsupported { .. })));
    let counted = app.count(Some("m"), seen(), &caller()).await;
    assert!(matches!(counted, Err(RequestError::ImagesUnsupported { .. })), "{counted:?}");
}
