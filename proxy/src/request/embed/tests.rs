//! Vectors from the simulator, and from one that dies on the way.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::wrapper::EngineWrapper;
use baton_link::{EmbedStream, Engine};
use baton_schemas::embed::RerankFacts;

use super::*;
use crate::http::HttpBackend;
use crate::observe::tests::caller;
use crate::observe::{RequestOutcome, metrics};
use crate::serve::request_service::RequestService;
use crate::targets::models::ModelPool;
use crate::targets::nodes::Health;

/// A simulator whose streams of vectors break after two, a number of times. Counts the texts that it is asked for.
struct MortalEmbedder {
    sim: SimEngine,
    n_deaths: AtomicU32,
    n_asked: Arc<AtomicU32>,
}

#[async_trait]
impl EngineWrapper for MortalEmbedder {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        self.n_asked.fetch_add(request.inputs.len() as u32, Ordering::AcqRel);
        let deltas = self.sim.embed(request).await?;
        match self.n_deaths.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)) {
            Ok(_) => {
                let lost = futures::stream::iter([Err(EngineError::lost("killed"))]);
                // It has said that it begins.
                Ok(deltas.take(3).chain(lost).boxed())
            }
            Err(_) => Ok(deltas),
        }
    }
}

fn sim() -> SimEngine {
    SimEngine::new(SimConfig { prefill_tps: 100_000.0, n_ctx: 32, ..SimConfig::default() })
}

/// An endpoint on one node that dies so often, and the count of the texts it was asked for.
async fn app(n_deaths: u32, spares: usize) -> (RequestService, Arc<AtomicU32>) {
    let n_asked = Arc::new(AtomicU32::new(0));
    let mortal = MortalEmbedder { sim: sim(), n_deaths: AtomicU32::new(n_deaths), n_asked: Arc::clone(&n_asked) };
    let mut decode = vec![node("mortal", mortal).await];
    for _ in 0..spares {
        decode.push(node("spare", sim()).await);
    }
    let model = ServedModel::new(OnceLock::from("m".to_owned()), vec![], decode, Vec::new());
    let pool = Arc::new(ModelPool::of(vec![Arc::new(model)]));
    (RequestService::over(pool), n_asked)
}

async fn node(name: &str, engine: impl Engine) -> Arc<Node> {
    let health = Health::new("it");
    health.note_answer(Arc::new(engine.info().await.unwrap()));
    Node::new(name.into(), None, Arc::new(engine), health)
}

fn request(texts: &[&str]) -> EmbedRequest {
    let inputs = texts.iter().map(|text| EmbedInput::Text((*text).to_owned())).collect();
    EmbedRequest {
        model: "m".into(),
        field: "input",
        task: EmbedTask::Embed,
        inputs,
        truncate: false,
        dimensions: None,
        keep_alive: None,
    }
}

/// A simulator that scores a document by the tokens of its pair.
struct SimReranker(SimEngine);

#[async_trait]
impl EngineWrapper for SimReranker {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn info(&self) -> Result<NodeInfo, EngineError> {
        let reranking = Some(RerankFacts { n_ctx: 32 });
        Ok(NodeInfo { generates: false, embedding: None, reranking, ..self.0.info().await? })
    }

    async fn pair(&self, PairRequest { query, document, .. }: &PairRequest) -> Result<Vec<Token>, EngineError> {
        Ok(format!("{query} {document}").bytes().map(Token::from).collect())
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        let scores = request.inputs.into_iter().map(|pair| EmbedEvent::Vector(vec![pair.len() as f32]));
        let end = EmbedEvent::Finished { timings: EmbedTimings::default() };
        Ok(futures::stream::iter(scores.chain([end]).map(Ok).collect::<Vec<_>>()).boxed())
    }
}

fn rerank(query: &str, documents: &[&str]) -> EmbedRequest {
    EmbedRequest { task: EmbedTask::Rerank { query: query.into() }, ..request(documents) }
}

#[tokio::test(start_paused = true)]
async fn a_reranker_scores_pairs_and_names_the_document_that_is_too_long() {
    let decode = vec![node("reranker", SimReranker(sim())).await];
    let model = ServedModel::new(OnceLock::from("m".to_owned()), vec![], decode, Vec::new());
    let reranker = RequestService::over(Arc::new(ModelPool::of(vec![Arc::new(model)])));
    let scored = reranker.embed(rerank("query", &["a", "bcd"]), &caller()).await.unwrap();
    assert_eq!((scored.vectors, scored.n_tokens), (vec![vec![7.0], vec![9.0]], 16));
    let long = "x".repeat(27);
    let refused = reranker.embed(rerank("query", &["a", "b", &long]), &caller()).await.unwrap_err();
    assert!(matches!(refused, RequestError::DocumentTooLong { idx: 2, n_tokens: 33, n_ctx: 32 }), "{refused:?}");
    let refused = reranker.embed(request(&["a"]), &caller()).await.unwrap_err();
    assert!(matches!(refused, RequestError::Engine(EngineError::Unsupported { .. })), "{refused:?}");
    let (generator, _) = app(0, 0).await;
    let refused = generator.embed(rerank("q", &["a"]), &caller()).await.unwrap_err();
    assert!(matches!(&refused, RequestError::InvalidField { field: "model", .. }), "{refused:?}");
    assert!(refused.to_string().contains("is no reranker: it generates text"), "{refused}");
}

const TEXTS: [&str; 5] = ["one", "two", "three", "four", "five"];

#[tokio::test(start_paused = true)]
async fn a_lost_node_costs_no_vector_and_none_is_computed_twice() {
    let (immortal, _) = app(0, 0).await;
    let expected = immortal.embed(request(&TEXTS), &caller()).await.unwrap();
    assert_eq!((expected.vectors.len(), expected.n_tokens), (5, 5 + 19));
    // On another node.
    let (pair, n_asked) = app(9, 1).await;
    assert_eq!(pair.embed(request(&TEXTS), &caller()).await.unwrap().vectors, expected.vectors);
    assert_eq!(n_asked.load(Ordering::Acquire), 5);
    // On the same one, restarted: what it had sent is not asked for again.
    let (alone, n_asked) = app(2, 0).await;
    assert_eq!(alone.embed(request(&TEXTS), &caller()).await.unwrap().vectors, expected.vectors);
    assert_eq!(n_asked.load(Ordering::Acquire), 5 + 3 + 1);
}

#[tokio::test(start_paused = true)]
async fn texts_that_are_too_long_are_refused_or_cut() {
    let (app, _) = app(0, 0).await;
    let long = "x".repeat(40);
    let refused = app.embed(request(&["short", &long]), &caller()).await.unwrap_err();
    assert!(
        matches!(refused, RequestError::InputTooLong { field: "input", idx: 1, n_tokens: 41, n_ctx: 32 }),
        "{refused:?}"
    );
    let cut = EmbedRequest { truncate: true, ..request(&[&long]) };
    let whole = app.embed(request(&["x".repeat(31).as_str()]), &caller()).await.unwrap();
    assert_eq!(app.embed(cut.clone(), &caller()).await.unwrap().vectors, whole.vectors);
}

#[tokio::test(start_paused = true)]
async fn what_the_model_shows_to_be_wrong_is_refused() {
    let (app, _) = app(0, 0).await;
    let check = async |request: EmbedRequest, field: &str| {
        let refused = app.embed(request.clone(), &caller()).await.unwrap_err();
        assert!(matches!(&refused, RequestError::InvalidField { field: f, .. } if *f == field), "{refused:?}");
    };
    check(EmbedRequest { dimensions: Some(8), ..request(&["a"]) }, "dimensions").await;
    check(EmbedRequest { inputs: vec![EmbedInput::Tokens(vec![])], ..request(&[]) }, "input").await;
    let vectors = app.embed(EmbedRequest { dimensions: Some(64), ..request(&["a"]) }, &caller()).await.unwrap();
    assert_eq!(vectors.vectors[0].len(), 64);
    let unknown = EmbedRequest { inputs: vec![EmbedInput::Tokens(vec![9_999])], ..request(&[]) };
    check(unknown, "input").await;
}

#[tokio::test(start_paused = true)]
async fn what_happened_can_be_scraped() {
    let (app, _) = app(0, 0).await;
    app.embed(request(&TEXTS), &caller()).await.unwrap();
    app.embed(EmbedRequest { model: "secret".into(), ..request(&TEXTS) }, &caller()).await.unwrap_err();
    let dropped = tokio::time::timeout(Duration::ZERO, app.embed(request(&TEXTS), &caller())).await;
    assert!(dropped.is_err(), "the simulator takes its time");
    let text = metrics::text(&app.observer, &app.state(false));
    for line in [
        r#"baton_embedding_requests_total{model="m",outcome="done"} 1"#,
        r#"baton_embedding_requests_total{model="m",outcome="cancelled"} 1"#,
        r#"baton_embedding_requests_total{model="unknown",outcome="refused"} 1"#,
        r#"baton_embedding_request_errors_total{model="unknown",reason="model_not_found"} 1"#,
        r#"baton_embedding_tokens_total{model="m"} 24"#,
        r#"baton_embedding_vectors_total{model="m"} 5"#,
        r#"baton_embedding_request_latency_seconds_count{model="m"} 1"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    assert!(!text.contains("secret"));
    let state = app.state(false);
    let rows: Vec<_> =
        state.routes.iter().map(|row| (row.outcome.unwrap(), row.n_vectors, row.decode.as_str())).collect();
    let [cancelled, refused, done] = rows[..] else { panic!("{rows:?}") };
    assert_eq!((cancelled.0, refused), (RequestOutcome::Cancelled, (RequestOutcome::Refused, Some(0), "")));
    assert_eq!((done.0, done.1), (RequestOutcome::Done, Some(5)));
    assert!(!done.2.is_empty(), "the node that computed them");
    assert!(state.open.is_empty() && state.requests.running == 0);
}

/// Notes how many texts and tokens each call has.
struct SizeLog {
    sim: SimEngine,
    sizes: Arc<Mutex<Vec<(usize, usize)>>>,
}

#[async_trait]
impl EngineWrapper for SizeLog {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        let n_tokens = request.inputs.iter().map(Vec::len).sum();
        self.sizes.lock().unwrap().push((request.inputs.len(), n_tokens));
        self.sim.embed(request).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_with_many_texts_lets_others_in_between() {
    let sizes = Arc::default();
    let log = SizeLog {
        sim: SimEngine::new(SimConfig { prefill_tps: 10_000.0, n_ctx: 8_192, ..SimConfig::default() }),
        sizes: Arc::clone(&sizes),
    };
    let model = ServedModel::new(OnceLock::from("m".to_owned()), vec![], vec![node("log", log).await], Vec::new());
    let app = RequestService::over(Arc::new(ModelPool::of(vec![Arc::new(model)])));
    let short = vec!["x"; 130];
    let medium = "x".repeat(1_500);
    let long = "x".repeat(6_000);
    let texts = [&short[..], &[medium.as_str(); 3], &[long.as_str()], &["y"]].concat();
    let whole = app.embed(request(&texts), &caller()).await.unwrap();
    assert_eq!(whole.vectors.len(), texts.len());
    assert_eq!(whole.vectors.last(), app.embed(request(&["y"]), &caller()).await.unwrap().vectors.last());
    let asked = std::mem::take(&mut *sizes.lock().unwrap());
    assert!(asked.iter().all(|&(n, n_tokens)| n <= PIECE_TEXTS && (n_tokens <= PIECE_TOKENS || n == 1)), "{asked:?}");
    assert_eq!(asked.iter().map(|&(n, _)| n).sum::<usize>(), texts.len() + 1, "none is computed twice: {asked:?}");

    // The other request is computed after one piece, though 2,048 texts came first.
    let texts = vec!["abcdefgh"; 2_048];
    let caller = caller();
    let mut many = Box::pin(app.embed(request(&texts), &caller));
    while sizes.lock().unwrap().is_empty() {
        assert!(tokio::time::timeout(Duration::from_millis(1), &mut many).await.is_err());
    }
    assert_eq!(app.state(false).requests.slots, 1);
    let one = app.embed(request(&["z"]), &caller);
    let (is_first, n_pieces) = tokio::select! {
        _ = &mut many => (false, 0),
        one = one => (one.is_ok(), sizes.lock().unwrap().len()),
    };
    assert!(is_first && n_pieces <= 4, "{n_pieces} pieces");
    assert_eq!(many.await.unwrap().vectors.len(), 2_048);
}

/// A node of a version that does not say when it begins.
struct Silent(SimEngine);

#[async_trait]
impl EngineWrapper for Silent {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn info(&self) -> Result<NodeInfo, EngineError> {
        Ok(NodeInfo { reports_begin: false, ..self.0.info().await? })
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        assert!(!request.reports_begin, "an older endpoint cannot read it, and an older node does not know it");
        self.0.embed(request).await
    }
}

#[tokio::test(start_paused = true)]
async fn texts_that_wait_in_the_queue_of_their_node_count_as_waiting_if_it_says_so() {
    // A text takes seconds.
    let slow = || SimEngine::new(SimConfig { prefill_tps: 1.0, n_ctx: 32, ..SimConfig::default() });
    for (node, while_first_runs) in
        [(node("it", slow()).await, (1, 1, 1)), (node("older", Silent(slow())).await, (2, 2, 0))]
    {
        let model = ServedModel::new(OnceLock::from("m".to_owned()), vec![], vec![node], Vec::new());
        let app = RequestService::over(Arc::new(ModelPool::of(vec![Arc::new(model)])));
        let counts = || {
            let requests = app.state(false).requests;
            (requests.running, requests.slots, requests.waiting)
        };
        let caller = caller();
        let mut first = Box::pin(app.embed(request(&["a text"]), &caller));
        let mut second = Box::pin(app.embed(request(&["another"]), &caller));
        for embedding in [&mut first, &mut second] {
            assert!(tokio::time::timeout(Duration::from_secs(1), embedding).await.is_err());
        }
        assert_eq!(counts(), while_first_runs);
        tokio::select! {
            biased;
            first = &mut first => assert_eq!(first.unwrap().vectors.len(), 1),
            _ = &mut second => panic!("the first one was first"),
        }
        drop(first);
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut second).await.is_err());
        assert_eq!(counts(), (1, 1, 0));
        assert_eq!(second.await.unwrap().vectors.len(), 1);
        assert_eq!(counts(), (0, 0, 0));
    }
}

/// A node that refuses all texts, or does not answer.
struct Answers(SimEngine, Option<EngineError>);

#[async_trait]
impl EngineWrapper for Answers {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn embed(&self, _: EmbedSequences) -> Result<EmbedStream, EngineError> {
        match &self.1 {
            Some(error) => Err(error.clone()),
            None => std::future::pending().await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_for_vectors_waits_until_its_node_has_accepted_it_and_is_refused_if_it_is_wrong() {
    let app = async |answer: Option<EngineError>| {
        let decode = vec![node("it", Answers(sim(), answer)).await];
        let model = ServedModel::new(OnceLock::from("m".to_owned()), vec![], decode, Vec::new());
        RequestService::over(Arc::new(ModelPool::of(vec![Arc::new(model)])))
    };
    let (silent, caller) = (app(None).await, caller());
    let mut waiting = Box::pin(silent.embed(request(&["a"]), &caller));
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut waiting).await.is_err());
    let requests = silent.state(false).requests;
    assert_eq!((requests.running, requests.slots, requests.waiting), (0, 0, 1), "the node has not answered");
    for (answer, outcome) in [
        (EngineError::invalid("no such text"), RequestOutcome::Refused),
        (EngineError::internal("broken"), RequestOutcome::Failed),
    ] {
        let app = app(Some(answer)).await;
        app.embed(request(&["a"]), &caller).await.unwrap_err();
        assert_eq!(app.state(false).routes[0].outcome, Some(outcome));
    }
}
