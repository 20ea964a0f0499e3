//! Streams whose engines die, at every token.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use baton_engines::Engine;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_schemas::Token;
use baton_schemas::generate::Conversation;
use baton_schemas::node::{NodeInfo, NodeLoad, TokenizeRequest};
use tokio::sync::watch;

use super::*;
use crate::plan::plan;
use crate::pool::{EngineState, Node, ServedModel, expected_output};

/// A simulator whose streams break after so many tokens, a number of times.
struct Mortal {
    sim: SimEngine,
    dies_after: u32,
    n_deaths: AtomicU32,
}

#[async_trait]
impl Engine for Mortal {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        self.sim.info().await
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        self.sim.load().await
    }

    async fn render(&self, conversation: &Conversation) -> Result<Vec<Token>, EngineError> {
        self.sim.render(conversation).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.sim.tokenize(request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        self.sim.detokenize(tokens).await
    }

    async fn generate(&self, request: SequenceRequest) -> Result<DeltaStream, EngineError> {
        let mut deltas = self.sim.generate(request).await?;
        let dies = self.n_deaths.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok();
        let dies_after = self.dies_after;
        let stream = async_stream::stream! {
            let mut n_tokens = 0;
            while let Some(delta) = deltas.next().await {
                let is_token = matches!(delta, Ok(Delta::Token(_)));
                if dies && n_tokens == dies_after && !matches!(delta, Ok(Delta::Started { .. })) {
                    yield Err(EngineError::lost("killed"));
                    return;
                }
                n_tokens += u32::from(is_token);
                yield delta;
            }
        };
        Ok(stream.boxed())
    }
}

fn sim() -> SimEngine {
    SimEngine::new(SimConfig { prefill_tps: 10_000.0, decode_tps: 1_000.0, ..SimConfig::default() })
}

async fn node(name: &str, engine: impl Engine) -> Arc<Node> {
    let info = engine.info().await.unwrap();
    let (sender, state) = watch::channel(EngineState::Ready(Arc::new(info)));
    // The node's life never changes in these tests.
    std::mem::forget(sender);
    Node::new(name.into(), None, Arc::new(engine), state)
}

fn mortal(dies_after: u32, n_deaths: u32) -> Mortal {
    Mortal { sim: sim(), dies_after, n_deaths: AtomicU32::new(n_deaths) }
}

fn model(decode: Vec<Arc<Node>>) -> Arc<ServedModel> {
    Arc::new(ServedModel::new(OnceLock::from("sim".to_owned()), Vec::new(), decode, Vec::new()))
}

fn request() -> SequenceRequest {
    SequenceRequest { prompt: (1..100).collect(), max_tokens: Some(12), ignore_eos: true, ..SequenceRequest::default() }
}

/// Tokens, how often the stream said that it started, and how many tokens it says it has.
async fn run(model: &Arc<ServedModel>) -> Result<(Vec<Token>, u32, u32), EngineError> {
    let request = request();
    let ask = PlanRequest {
        tokens: &request.prompt,
        scope: request.cache_scope,
        max_tokens: request.max_tokens,
        policy: None,
        exclude: &[],
    };
    let plan = plan(model, &ask).unwrap();
    let deltas = plan.decode().engine.generate(request.clone()).await?;
    let mut deltas = Resilient::new(plan, request, deltas).into_deltas();
    let (mut tokens, mut n_started) = (Vec::new(), 0);
    while let Some(delta) = deltas.next().await {
        match delta? {
            Delta::Started { .. } => n_started += 1,
            Delta::Handoff(_) => {}
            Delta::Token(token) => tokens.push(token.id),
            Delta::Finished { timings, .. } => return Ok((tokens, n_started, timings.predicted_n)),
        }
    }
    panic!("the stream was cut");
}

#[tokio::test(start_paused = true)]
async fn a_stream_goes_on_wherever_its_engine_dies() {
    let (expected, _, _) = run(&model(vec![node("immortal", sim()).await])).await.unwrap();
    assert_eq!(expected.len(), 12);
    for dies_after in 0..=12 {
        // On another engine.
        let pair = model(vec![node("mortal", mortal(dies_after, 9)).await, node("spare", sim()).await]);
        assert_eq!(run(&pair).await.unwrap(), (expected.clone(), 1, 12), "after {dies_after}");
        // On the same one, restarted.
        let alone = model(vec![node("mortal", mortal(dies_after, 1)).await]);
        assert_eq!(run(&alone).await.unwrap(), (expected.clone(), 1, 12), "after {dies_after}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_dies_at_every_token_is_given_up_only_without_progress() {
    let (expected, _, _) = run(&model(vec![node("immortal", sim()).await])).await.unwrap();
    let slow = model(vec![node("mortal", mortal(1, 11)).await]);
    assert_eq!(run(&slow).await.unwrap(), (expected, 1, 12));
    let hopeless = model(vec![node("mortal", mortal(0, 1_000)).await]);
    assert!(matches!(run(&hopeless).await, Err(EngineError::Lost { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_stream_waits_half_a_minute_for_an_engine_and_then_ends_with_an_error() {
    for comes_back in [true, false] {
        let engine = mortal(3, 1);
        let info = Arc::new(engine.info().await.unwrap());
        let (state, watched) = watch::channel(EngineState::Ready(Arc::clone(&info)));
        let model = model(vec![Node::new("mortal".into(), None, Arc::new(engine), watched)]);
        // In the middle of the stream: 99 tokens of prompt at 10,000 a second, then one a millisecond.
        let goes = async {
            tokio::time::sleep(Duration::from_millis(12)).await;
            state.send_replace(EngineState::Failed { reason: "gone".into(), retry_in: Duration::from_secs(2) });
            tokio::time::sleep(TAKE_UP_DEADLINE / 2).await;
            if comes_back {
                state.send_replace(EngineState::Ready(info));
            }
        };
        let began = Instant::now();
        let (outcome, ()) = tokio::join!(run(&model), goes);
        match comes_back {
            true => assert_eq!(outcome.unwrap().0.len(), 12),
            false => {
                assert!(matches!(outcome, Err(EngineError::Lost { .. })), "{outcome:?}");
                assert!(began.elapsed() >= TAKE_UP_DEADLINE);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_node_is_avoided_and_counted() {
    let pair = model(vec![node("mortal", mortal(3, 1)).await, node("spare", sim()).await]);
    run(&pair).await.unwrap();
    assert_eq!(pair.decode[0].breaker.counts().get("decode_lost"), Some(&1));
    assert!(!pair.decode[0].breaker.would_pass());
    // Back within five seconds.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(pair.decode[0].breaker.would_pass());
}

#[tokio::test(start_paused = true)]
async fn predictions_are_learned_from_what_happens() {
    let model = model(vec![node("a", sim()).await]);
    for _ in 0..20 {
        run(&model).await.unwrap();
    }
    let rates = model.decode[0].rates();
    let decode = rates.decode.at(1.0).unwrap();
    assert!((decode / 1_000.0 - 1.0).abs() < 0.1, "{decode} tokens/s");
    let expected = expected_output(&model.routes.view().n_output, None);
    assert!(expected < 100.0, "replies of 12 tokens were seen, not of {expected}");
}
