//! Draft nodes: what they send over their connection, and what becomes of one that fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use baton_engines::sim::SimEngine;
use baton_link::drafts::{DraftBoard, DraftOrder, RemoteDrafts};
use baton_link::handoff::{KvPuller, PullPolicy};
use baton_link::wrapper::EngineWrapper;
use baton_link::{Engine, SequenceStream};
use baton_schemas::draft::{DraftRequest, DrafterLoss, MAX_AHEAD};
use baton_schemas::handoff::KvSource;
use baton_schemas::node::Role;
use baton_schemas::sequence::{CachedTokens, GeneratedToken, SequenceEvent};
use baton_schemas::{CacheScope, EngineError, SequenceRequest, Token};
use futures::StreamExt;
use tiny_gguf::Architecture;

use crate::models;
use crate::peers::{self, KEY, TestNode};

fn sim() -> Arc<SimEngine> {
    Arc::new(SimEngine::new(peers::small_sim()))
}

/// The deadline of what must happen sooner or later.
fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Lets a node draft for a sequence of the simulator.
async fn follow(url: &str, tokens: &[Token]) -> RemoteDrafts {
    follow_of(&*sim(), url, tokens).await
}

/// The same for a sequence of an engine.
async fn follow_of(engine: &dyn Engine, url: &str, tokens: &[Token]) -> RemoteDrafts {
    let info = engine.info().await.unwrap();
    let sampling = peers::request(tokens, 1, None).sampling;
    let vocabulary = info.fingerprint.unwrap().vocabulary;
    let request = DraftRequest { vocabulary, tokens: tokens.to_vec(), sampling, cache_scope: CacheScope::SHARED };
    let order = DraftOrder { source: KvSource::at(url), request, n_vocab: info.n_vocab };
    peers::puller(PullPolicy::default()).drafts(order).expect("it calls draft nodes")
}

/// The first `n` candidates.
async fn candidates(board: &Arc<DraftBoard>, n: usize) -> Vec<Token> {
    let waiting = Arc::clone(board);
    tokio::task::spawn_blocking(move || waiting.wait(n, deadline())).await.unwrap();
    let mut found = Vec::new();
    board.candidates(n, &mut found);
    found
}

/// Why the drafts of a node for a sequence have ended.
async fn loss(board: &Arc<DraftBoard>) -> Option<DrafterLoss> {
    let waiting = Arc::clone(board);
    // No node sends so many.
    tokio::task::spawn_blocking(move || waiting.wait(MAX_AHEAD + 1, deadline())).await.unwrap();
    board.loss()
}

/// The simulator's reply after these tokens.
async fn said_after(tokens: &[Token], n: u32) -> Vec<Token> {
    peers::generate(&*sim(), peers::request(tokens, n, None)).await.tokens
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_node_says_what_its_model_would_and_follows_the_sequence() {
    let node = peers::node(sim(), Role::Draft, KEY).await;
    let mut tokens = peers::tokens(20);
    let drafts = follow(&node.url, &tokens).await;
    let expected = said_after(&tokens, 8).await;
    assert_eq!(candidates(&drafts.board, 8).await, expected);
    // As long as it is right it goes on.
    tokens.extend(&expected[..5]);
    drafts.board.tell(&expected[..5]);
    assert_eq!(candidates(&drafts.board, 3).await, expected[5..]);
    // Then something else comes.
    let other = (expected[5] + 1) % 250;
    tokens.push(other);
    drafts.board.tell(&[other]);
    assert_eq!(candidates(&drafts.board, 6).await, said_after(&tokens, 6).await);
    assert_eq!(drafts.board.loss(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hybrid_model_drafts_as_a_node_and_goes_back_where_it_was_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hybrid.gguf");
    tiny_gguf::write(&file, Architecture::Qwen35, 1);
    let engine = models::start(models::of_llama(&file), None).await;
    let node = peers::node(Arc::clone(&engine), Role::Draft, KEY).await;
    let said_after = async |tokens: &[Token]| peers::generate(&*engine, peers::request(tokens, 6, None)).await.tokens;
    let mut tokens = peers::tokens(20);
    let expected = said_after(&tokens).await;
    let drafts = follow_of(&*engine, &node.url, &tokens).await;
    assert_eq!(candidates(&drafts.board, 6).await, expected);
    let other = (expected[0] + 1) % 250;
    tokens.push(other);
    drafts.board.tell(&[other]);
    assert_eq!(candidates(&drafts.board, 6).await, said_after(&tokens).await);
    assert_eq!(drafts.board.loss(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_node_is_never_further_ahead_than_it_may_be_and_frees_its_slot() {
    let engine = sim();
    let node = peers::node(engine.clone(), Role::Draft, KEY).await;
    let drafts = follow(&node.url, &peers::tokens(9)).await;
    assert_eq!(candidates(&drafts.board, MAX_AHEAD).await.len(), MAX_AHEAD);
    assert_eq!(engine.load().await.unwrap().active_slots, 1);
    drop(drafts);
    harness::eventually_async("the slot to be free", async || engine.load().await.unwrap().active_slots == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_draft_node_of_this_model_drafts_nothing() {
    let check = async |node: TestNode, expected: DrafterLoss| {
        let drafts = follow(&node.url, &peers::tokens(9)).await;
        assert_eq!(loss(&drafts.board).await, Some(expected));
    };
    check(peers::node(sim(), Role::Both, KEY).await, DrafterLoss::Refused).await;
    check(peers::node(sim(), Role::Draft, "another key").await, DrafterLoss::Refused).await;
    check(peers::node(Arc::new(OtherVocabulary(sim())), Role::Draft, KEY).await, DrafterLoss::OtherVocabulary).await;
    let gone = peers::node(sim(), Role::Draft, KEY).await.url.clone();
    harness::eventually_async("its port to be closed", async || {
        tokio::net::TcpStream::connect(gone.trim_start_matches("http://")).await.is_err()
    })
    .await;
    let drafts = follow(&gone, &peers::tokens(9)).await;
    assert_eq!(loss(&drafts.board).await, Some(DrafterLoss::Lost));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_node_serves_nothing_else() {
    let node = peers::node(sim(), Role::Draft, KEY).await;
    let address = baton_link::remote::NodeAddress::Url(node.url.clone());
    let client = baton_link::remote::RemoteEngine::new(&address, KEY).unwrap();
    let refused = client.generate(peers::request(&peers::tokens(9), 2, None)).await.err();
    let Some(EngineError::Unsupported { feature }) = refused else { panic!("{refused:?}") };
    assert_eq!(feature, "generating: its role is draft");
    assert_eq!(client.info().await.unwrap().role, Role::Draft);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_node_that_stops_ends_its_drafts_at_once() {
    let node = peers::node(sim(), Role::Draft, KEY).await;
    let drafts = follow(&node.url, &peers::tokens(9)).await;
    candidates(&drafts.board, 4).await;
    drop(node);
    assert_eq!(loss(&drafts.board).await, Some(DrafterLoss::Lost));
}

#[tokio::test(flavor = "multi_thread")]
async fn candidates_of_another_vocabulary_end_the_drafts() {
    let node = peers::node(Arc::new(OutOfRange(sim())), Role::Draft, KEY).await;
    let drafts = follow(&node.url, &peers::tokens(9)).await;
    assert_eq!(loss(&drafts.board).await, Some(DrafterLoss::Invalid));
    let mut none = Vec::new();
    drafts.board.candidates(9, &mut none);
    assert!(none.is_empty());
}

/// Says that it has another vocabulary.
struct OtherVocabulary(Arc<SimEngine>);

#[async_trait]
impl EngineWrapper for OtherVocabulary {
    fn inner(&self) -> &dyn Engine {
        &*self.0
    }

    async fn info(&self) -> Result<baton_schemas::node::NodeInfo, EngineError> {
        let mut info = self.inner().info().await?;
        info.fingerprint.iter_mut().for_each(|fingerprint| fingerprint.vocabulary = [9; 32]);
        Ok(info)
    }
}

/// Generates tokens that do not exist.
struct OutOfRange(Arc<SimEngine>);

#[async_trait]
impl EngineWrapper for OutOfRange {
    fn inner(&self) -> &dyn Engine {
        &*self.0
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let token = |id| {
            SequenceEvent::Token(GeneratedToken { id, bytes: vec![], special: false, logprobs: None, drafts: None })
        };
        let events = [SequenceEvent::Started(CachedTokens::default()), token(3), token(Token::MAX)];
        Ok(futures::stream::iter(events).map(Ok).chain(futures::stream::pending()).boxed())
    }
}
