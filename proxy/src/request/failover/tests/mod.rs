//! Streams whose engines die, at every token.

mod boasting;
mod drafted;
mod guesses;
mod hedge_counts;
mod malformed;
mod poison;
mod traced;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::wrapper::EngineWrapper;
use baton_planner::deadlines::Deadlines;
use baton_planner::policy::PolicyName;
use baton_planner::rates::Curve;
use baton_planner::reason::FailureReason;
use baton_schemas::image::PromptImages;
use baton_schemas::node::NodeInfo;
use baton_schemas::{CacheScope, Token};
use tokio::time::Instant;

use super::take_up::{RETRY_PAUSE, TAKE_UP_DEADLINE};
use super::*;
use crate::request::plan::{PlanRequest, plan};
use crate::targets::models::{ServedModel, expected_output};
use crate::targets::nodes::{FallbackReason, Health, Node, StateChange, StateReason};

/// A simulator whose streams break after so many tokens, a number of times.
struct MortalEngine {
    sim: SimEngine,
    dies_after: u32,
    n_deaths: AtomicU32,
    of: EngineError,
}

/// A simulator that shows that it lives, and gives no token before so long. Counts the streams that run.
struct Late {
    sim: SimEngine,
    by: Duration,
    /// Not even that it accepts the sequence.
    from_the_start: bool,
    n_running: Arc<AtomicU32>,
}

/// Lives as long as a stream.
struct RunningStream(Arc<AtomicU32>);

impl Drop for RunningStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn late_sim() -> Late {
    Late { sim: sim(), by: Duration::ZERO, from_the_start: false, n_running: Arc::default() }
}

#[async_trait]
impl EngineWrapper for Late {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let mut events = self.sim.generate(request).await?;
        self.n_running.fetch_add(1, Ordering::AcqRel);
        let running = RunningStream(Arc::clone(&self.n_running));
        let mut by = self.by;
        if self.from_the_start {
            tokio::time::sleep(std::mem::take(&mut by)).await;
        }
        let stream = async_stream::stream! {
            let _running = running;
            let mut is_late = false;
            while let Some(event) = events.next().await {
                if matches!(event, Ok(SequenceEvent::Token(_))) && !std::mem::replace(&mut is_late, true) {
                    tokio::time::sleep(by).await;
                }
                yield event;
            }
        };
        Ok(stream.boxed())
    }
}

#[async_trait]
impl EngineWrapper for MortalEngine {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let mut events = self.sim.generate(request).await?;
        let dies = self.n_deaths.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok();
        let dies_after = self.dies_after;
        let of = self.of.clone();
        let stream = async_stream::stream! {
            let mut n_tokens = 0;
            while let Some(event) = events.next().await {
                let is_token = matches!(event, Ok(SequenceEvent::Token(_)));
                if dies && n_tokens == dies_after && !matches!(event, Ok(SequenceEvent::Started { .. })) {
                    yield Err(of);
                    return;
                }
                n_tokens += u32::from(is_token);
                yield event;
            }
        };
        Ok(stream.boxed())
    }
}

/// A simulator whose prefill node computes NaN. It computes the prompt itself, or NaN as well.
struct SpoiltHandoff {
    sim: SimEngine,
    fails_too: bool,
}

#[async_trait]
impl EngineWrapper for SpoiltHandoff {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let mut own = self.sim.generate(SequenceRequest { kv_source: None, ..request }).await?;
        let started = own.next().await;
        let report = HandoffReport { failure: Some(HandoffFailure::NotFinite), ..HandoffReport::default() };
        let handed_over =
            futures::stream::iter(started).chain(futures::stream::iter([Ok(SequenceEvent::Handoff(report))]));
        Ok(match self.fails_too {
            true => handed_over.chain(futures::stream::iter([Err(EngineError::NotFinite)])).boxed(),
            false => handed_over.chain(own).boxed(),
        })
    }
}

fn sim() -> SimEngine {
    SimEngine::new(SimConfig { prefill_tps: 10_000.0, decode_tps: 1_000.0, ..SimConfig::default() })
}

async fn node(name: &str, engine: impl Engine) -> Arc<Node> {
    let info = engine.info().await.unwrap();
    let health = Health::new("it");
    health.note_answer(Arc::new(info));
    Node::new(name.into(), None, Arc::new(engine), health)
}

/// The projector of the nodes that see.
const EYES: &str = "eyes";

async fn seeing(name: &str, engine: impl Engine) -> Arc<Node> {
    let node = node(name, engine).await;
    let info = NodeInfo { projector: Some(EYES.to_owned()), ..(*node.info().unwrap()).clone() };
    node.health.note_answer(Arc::new(info));
    node
}

fn mortal(dies_after: u32, n_deaths: u32) -> MortalEngine {
    MortalEngine { sim: sim(), dies_after, n_deaths: AtomicU32::new(n_deaths), of: EngineError::lost("killed") }
}

/// Its engine fails, and says so.
fn failing(dies_after: u32, n_deaths: u32, what: &str) -> MortalEngine {
    MortalEngine { of: EngineError::internal(what), ..mortal(dies_after, n_deaths) }
}

fn model(decode: Vec<Arc<Node>>) -> Arc<ServedModel> {
    Arc::new(ServedModel::new(OnceLock::from("sim".to_owned()), Vec::new(), decode, Vec::new()))
}

fn request() -> SequenceRequest {
    SequenceRequest { prompt: (1..100).collect(), max_tokens: Some(12), ignore_eos: true, ..SequenceRequest::default() }
}

/// Tokens, how often the stream said that it started, and how many tokens it says it has.
async fn run(model: &Arc<ServedModel>) -> Result<(Vec<Token>, u32, u32), EngineError> {
    run_under(Span::none(), model).await
}

/// The same in a trace.
async fn run_under(span: Span, model: &Arc<ServedModel>) -> Result<(Vec<Token>, u32, u32), EngineError> {
    run_of(request(), span, model).await
}

/// The same of a prompt with an image.
async fn run_about_an_image(model: &Arc<ServedModel>) -> Result<(Vec<Token>, u32, u32), EngineError> {
    let images = PromptImages { projector: EYES.to_owned(), images: Vec::new() };
    run_of(SequenceRequest { images: Some(images), ..request() }, Span::none(), model).await
}

async fn run_of(
    request: SequenceRequest,
    span: Span,
    model: &Arc<ServedModel>,
) -> Result<(Vec<Token>, u32, u32), EngineError> {
    timed(request, span, model).await.map(|(tokens, n_started, timings)| (tokens, n_started, timings.predicted_n))
}

/// The same with all timings.
async fn timed(
    request: SequenceRequest,
    span: Span,
    model: &Arc<ServedModel>,
) -> Result<(Vec<Token>, u32, Timings), EngineError> {
    let ask = PlanRequest::of_sequence(&request);
    let plan = plan(model, &ask).unwrap();
    let mut events = Resilient::begin(plan, request, PoisonMark::default(), span).await?.into_events();
    let mut tokens = Vec::new();
    let mut n_started = 0;
    while let Some(event) = events.next().await {
        match event? {
            SequenceEvent::Started { .. } => n_started += 1,
            SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::Finished { timings, .. } => return Ok((tokens, n_started, timings)),
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

/// Notes whether the KV of each sequence may stay.
struct Staying {
    engine: MortalEngine,
    ephemeral: Arc<Mutex<Vec<bool>>>,
}

#[async_trait]
impl EngineWrapper for Staying {
    fn inner(&self) -> &dyn Engine {
        &self.engine
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.ephemeral.lock().unwrap().push(request.ephemeral);
        EngineWrapper::generate(&self.engine, request).await
    }
}

#[tokio::test(start_paused = true)]
async fn what_goes_on_elsewhere_after_its_key_was_removed_leaves_nothing_there() {
    let ephemeral: Arc<Mutex<Vec<bool>>> = Arc::default();
    let staying = |engine| Staying { engine, ephemeral: Arc::clone(&ephemeral) };
    let nodes = vec![node("mortal", staying(mortal(3, 9))).await, node("spare", staying(mortal(0, 0))).await];
    let model = model(nodes);
    let removed_keys = Arc::clone(&model.removed_keys);
    let removal = async {
        // In the middle of the stream: 99 tokens of prompt at 10,000 a second, then one a millisecond.
        tokio::time::sleep(Duration::from_millis(11)).await;
        removed_keys.note(&[CacheScope(7)], &[]);
    };
    let of_key = SequenceRequest { cache_scope: CacheScope(7), ..request() };
    let (reply, ()) = tokio::join!(run_of(of_key, Span::none(), &model), removal);
    assert_eq!(reply.unwrap().0.len(), 12, "it goes on");
    assert_eq!(*ephemeral.lock().unwrap(), [false, true]);
    // Another key's.
    run(&model).await.unwrap();
    assert_eq!(ephemeral.lock().unwrap().last(), Some(&false));
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
        let info = Arc::new(Engine::info(&engine).await.unwrap());
        let health = Health::new("mortal");
        health.note_answer(Arc::clone(&info));
        let model = model(vec![Node::new("mortal".into(), None, Arc::new(engine), Arc::clone(&health))]);
        // In the middle of the stream: 99 tokens of prompt at 10,000 a second, then one a millisecond.
        let goes = async {
            tokio::time::sleep(Duration::from_millis(12)).await;
            health.note_failure(&StateChange::new(StateReason::Unreachable, "gone"), Duration::from_secs(2));
            tokio::time::sleep(TAKE_UP_DEADLINE / 2).await;
            if comes_back {
                health.note_answer(info);
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
async fn a_stream_goes_on_elsewhere_once_where_its_engine_fails() {
    let (expected, _, _) = run(&model(vec![node("well", sim()).await])).await.unwrap();
    for fails_after in 0..=12 {
        let pair = model(vec![node("fails", failing(fails_after, 9, "it")).await, node("spare", sim()).await]);
        assert_eq!(run(&pair).await.unwrap(), (expected.clone(), 1, 12), "after {fails_after}");
        assert_eq!((count(&pair, FallbackReason::EngineFailed), count(&pair, FallbackReason::DecodeLost)), (1, 0));
        assert_eq!(pair.decode[0].breakers.of(Task::Decode).view().counts.get(&FailureReason::EngineFailed), Some(&1));
    }
}

#[tokio::test(start_paused = true)]
async fn what_fails_on_every_engine_ends_with_the_first_failure() {
    for fails_after in [0, 3] {
        let engine = async |what| node(what, failing(fails_after, 9, what)).await;
        let all = model(vec![engine("first").await, engine("second").await, engine("third").await]);
        let outcome = run(&all).await;
        assert_eq!(outcome, Err(EngineError::internal("first")));
        assert_eq!(count(&all, FallbackReason::EngineFailed), 1, "no third engine is asked");
        // Where there is no other, nothing is waited for.
        let alone = model(vec![engine("alone").await]);
        let began = Instant::now();
        assert_eq!(run(&alone).await, Err(EngineError::internal("alone")));
        assert!(count(&alone, FallbackReason::EngineFailed) == 0 && began.elapsed() < RETRY_PAUSE);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_about_an_image_goes_on_only_where_it_is_seen() {
    let (expected, _, _) = run(&model(vec![node("well", sim()).await])).await.unwrap();
    for fails_after in [0, 3] {
        let engine = async || seeing("fails", failing(fails_after, 9, "it")).await;
        let blind = node("blind", sim()).await;
        let began = Instant::now();
        let alone = model(vec![engine().await, Arc::clone(&blind)]);
        assert_eq!(run_about_an_image(&alone).await, Err(EngineError::internal("it")));
        assert!(began.elapsed() < RETRY_PAUSE, "nobody else is waited for: {:?}", began.elapsed());
        assert_eq!(count(&alone, FallbackReason::EngineFailed), 0);
        let others = model(vec![engine().await, Arc::clone(&blind), seeing("spare", sim()).await]);
        assert_eq!(run_about_an_image(&others).await.unwrap(), (expected.clone(), 1, 12));
        // One that is lost may be back.
        let lost = model(vec![seeing("mortal", mortal(fails_after, 1)).await, blind]);
        assert_eq!(run_about_an_image(&lost).await.unwrap(), (expected.clone(), 1, 12));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_node_is_avoided_and_counted() {
    let pair = model(vec![node("mortal", mortal(3, 1)).await, node("spare", sim()).await]);
    run(&pair).await.unwrap();
    assert_eq!(pair.decode[0].breakers.of(Task::Decode).view().counts.get(&FailureReason::DecodeLost), Some(&1));
    assert!(!pair.decode[0].breakers.of(Task::Decode).would_pass());
    // Back within five seconds.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(pair.decode[0].breakers.of(Task::Decode).would_pass());
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

#[tokio::test(start_paused = true)]
async fn a_few_computed_tokens_teach_no_correction() {
    // The rate was measured with long prompts, and short ones take longer.
    let model = model(vec![node("a", Late { by: Duration::from_millis(300), ..late_sim() }).await]);
    for t in 0..24 {
        let prompt = [&[t % 250][..], &(1..15).collect::<Vec<Token>>()].concat();
        run_of(SequenceRequest { prompt, ..request() }, Span::none(), &model).await.unwrap();
    }
    let [correction, ..] = model.routes.view().corrections[0][0].0;
    assert!((0.99..1.01).contains(&correction), "{correction}");
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_was_not_known_teaches_no_correction() {
    let model = model(vec![node("a", sim()).await]);
    let prompt: Vec<Token> = (0..8_000).map(|t| t % 250).collect();
    for _ in 0..24 {
        run_of(SequenceRequest { prompt: prompt.clone(), ..request() }, Span::none(), &model).await.unwrap();
        // The endpoint is started again, and the node keeps its cache.
        model.decode[0].forget();
    }
    let view = model.routes.view();
    assert!(view.corrections[0][0].0.iter().all(|factor| (0.9..1.1).contains(factor)), "{:?}", view.corrections);
}

#[tokio::test(start_paused = true)]
async fn a_rate_that_was_wrong_teaches_the_rate_and_no_correction() {
    let model = model(vec![node("a", sim()).await]);
    model.decode[0].learn(|rates| {
        rates.prefill = Curve::constant(1e6);
        rates.decode = Curve::constant(1_000.0);
    });
    let prompt: Vec<Token> = (0..8_000).map(|t| t % 250).collect();
    run_of(SequenceRequest { prompt, ..request() }, Span::none(), &model).await.unwrap();
    let view = model.routes.view();
    assert!(model.decode[0].rates().prefill.at(8_000.0).unwrap() < 2e4);
    assert!((0.95..1.05).contains(&view.corrections[0][0].at(8_000.0)), "{:?}", view.corrections);
}

/// A model on a node that is late by `by` and on one that is late by `other`, with the rates of both known. Also the
/// number of streams on the first.
async fn late_by(by: Duration, other: Duration, deadlines: Deadlines) -> (Arc<ServedModel>, Arc<AtomicU32>) {
    let n_running = Arc::new(AtomicU32::new(0));
    let first = Late { sim: sim(), by, from_the_start: false, n_running: Arc::clone(&n_running) };
    (late(first, other, deadlines).await, n_running)
}

/// A model on this node and on one that is late by `other`, with the rates of both known.
async fn late(first: Late, other: Duration, deadlines: Deadlines) -> Arc<ServedModel> {
    let second = Late { by: other, ..late_sim() };
    let decode = vec![node("late", first).await, node("spare", second).await];
    for node in &decode {
        node.learn(|rates| {
            rates.prefill = Curve::constant(10_000.0);
            rates.decode = Curve::constant(1_000.0);
        });
    }
    model_within(decode, deadlines)
}

fn model_within(decode: Vec<Arc<Node>>, deadlines: Deadlines) -> Arc<ServedModel> {
    let mut model = ServedModel::new(OnceLock::from("sim".to_owned()), Vec::new(), decode, Vec::new());
    model.deadlines = deadlines;
    Arc::new(model)
}

fn count(model: &ServedModel, reason: FallbackReason) -> u64 {
    model.fallbacks.view().get(&reason).map_or(0, |fallback| fallback.count)
}

const HEDGED: Deadlines =
    Deadlines { floor: Duration::from_secs(1), factor: 4.0, max: Duration::from_secs(60), hedge: true };

#[tokio::test(start_paused = true)]
async fn a_late_first_token_is_hedged_and_the_first_to_deliver_wins() {
    let (expected, _, _) = run(&model(vec![node("immortal", sim()).await])).await.unwrap();
    let seconds = Duration::from_secs;
    for (by, other, is_won) in [(20, 0, true), (20, 5, true), (3, 20, false)] {
        let (model, n_running) = late_by(seconds(by), seconds(other), HEDGED).await;
        let began = Instant::now();
        assert_eq!(run(&model).await.unwrap(), (expected.clone(), 1, 12), "{by} {other}");
        // Until the deadline, and then the faster of the two.
        let expected_s = by.min(1 + other);
        assert!((began.elapsed().as_secs_f64() - expected_s as f64).abs() < 0.2, "{:?}", began.elapsed());
        assert_eq!((count(&model, FallbackReason::FirstTokenLate), count(&model, FallbackReason::Hedged)), (1, 1));
        assert_eq!(count(&model, FallbackReason::HedgeWon), u64::from(is_won));
        assert_eq!(
            (n_running.load(Ordering::Acquire), count(&model, FallbackReason::DecodeLost)),
            (0, 0),
            "the loser is cancelled"
        );
        let corrected = model.routes.view().corrections[0][0].0.into_iter().fold(0.0, f64::max);
        assert!(corrected > 1.2, "that the route was late is learned: {corrected}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_late_to_accept_is_hedged() {
    let (expected, _, _) = run(&model(vec![node("immortal", sim()).await])).await.unwrap();
    for (by, other, is_won) in [(4, 0, true), (2, 20, false)] {
        let by = Duration::from_secs(by);
        let other = Duration::from_secs(other);
        let n_running = Arc::new(AtomicU32::new(0));
        let first = Late { sim: sim(), by, from_the_start: true, n_running: Arc::clone(&n_running) };
        let model = late(first, other, HEDGED).await;
        let began = Instant::now();
        assert_eq!(run(&model).await.unwrap(), (expected.clone(), 1, 12));
        let expected_s = by.min(Duration::from_secs(1) + other).as_secs_f64();
        assert!((began.elapsed().as_secs_f64() - expected_s).abs() < 0.2, "{:?}", began.elapsed());
        use FallbackReason::{DecodeLost, FirstTokenLate, HedgeWon, Hedged};
        let counts = [FirstTokenLate, Hedged, HedgeWon, DecodeLost].map(|reason| count(&model, reason));
        assert_eq!(counts, [1, 1, u64::from(is_won), 0]);
        assert_eq!(n_running.load(Ordering::Acquire), 0, "the loser is cancelled");
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_that_is_late_is_waited_for_where_nothing_is_hedged() {
    let deadlines = Deadlines { hedge: false, ..HEDGED };
    let (model, _) = late_by(Duration::from_secs(20), Duration::ZERO, deadlines).await;
    let began = Instant::now();
    run(&model).await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(20), "a node that lives is not cut off: {:?}", began.elapsed());
    assert_eq!((count(&model, FallbackReason::FirstTokenLate), count(&model, FallbackReason::Hedged)), (1, 0));
    // Until it is clear that nothing comes.
    let (model, _) = late_by(Duration::from_secs(3_600), Duration::ZERO, deadlines).await;
    let began = Instant::now();
    run(&model).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(70), "{:?}", began.elapsed());
    assert_eq!((count(&model, FallbackReason::FirstTokenLate), count(&model, FallbackReason::DecodeLost)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_hedge_without_a_second_node_is_none() {
    let (model, _) = late_by(Duration::from_secs(20), Duration::ZERO, HEDGED).await;
    let alone = model_within(vec![Arc::clone(&model.decode[0])], HEDGED);
    run(&alone).await.unwrap();
    assert_eq!((count(&alone, FallbackReason::FirstTokenLate), count(&alone, FallbackReason::Hedged)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_hedge_takes_over_when_the_first_route_dies() {
    let (expected, _, _) = run(&model(vec![node("immortal", sim()).await])).await.unwrap();
    let (model, _) = late_by(Duration::from_secs(5), Duration::from_secs(10), HEDGED).await;
    let breaks = Breaks(Arc::clone(&model.decode[0].engine), Duration::from_secs(3));
    let decode = vec![node("breaks", breaks).await, Arc::clone(&model.decode[1])];
    decode[0].learn(|rates| (rates.prefill, rates.decode) = (Curve::constant(1e4), Curve::constant(1e3)));
    let served = model_within(decode, HEDGED);
    let began = Instant::now();
    assert_eq!(run(&served).await.unwrap(), (expected, 1, 12));
    use FallbackReason::{DecodeLost, HedgeWon, Hedged};
    let counts = [Hedged, HedgeWon, DecodeLost].map(|reason| count(&served, reason));
    assert_eq!(counts, [1, 0, 1]);
    assert!(began.elapsed() < Duration::from_millis(11_200), "it did not begin again: {:?}", began.elapsed());
}

/// An engine whose streams break after so long.
struct Breaks(Arc<dyn Engine>, Duration);

#[async_trait]
impl EngineWrapper for Breaks {
    fn inner(&self) -> &dyn Engine {
        &*self.0
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let events = self.0.generate(request).await?;
        let after = self.1;
        let lost = futures::stream::once(async { Err(EngineError::lost("killed")) });
        Ok(events.take_until(tokio::time::sleep(after)).chain(lost).boxed())
    }
}

#[tokio::test(start_paused = true)]
async fn a_prefill_node_whose_nan_the_decode_node_does_not_compute_has_failed() {
    for fails_too in [false, true] {
        let decode = node("decode", SpoiltHandoff { sim: sim(), fails_too }).await;
        let health = Health::new("prefill");
        health.note_answer(Arc::new(sim().info().await.unwrap()));
        let prefill = Node::new("prefill".into(), Some("http://192.0.2.1:9000".into()), Arc::new(sim()), health);
        let name = OnceLock::from("sim".to_owned());
        let model = Arc::new(ServedModel::new(name, Vec::new(), vec![decode], vec![Arc::clone(&prefill)]));
        let request = request();
        let ask =
            PlanRequest { policy: Some(PolicyName::AlwaysHandoff.policy()), ..PlanRequest::of_sequence(&request) };
        let plan = plan(&model, &ask).unwrap();
        assert!(plan.prefill().is_some(), "{plan}");
        let sequence = Resilient::begin(plan, request, PoisonMark::default(), Span::none()).await.unwrap();
        let last = sequence.into_events().fold(None, async |_, event| Some(event)).await;
        assert_eq!(last.is_some_and(|event| event.is_err()), fails_too);
        assert_eq!(prefill.is_trusted(Task::Prefill), fails_too);
    }
}
