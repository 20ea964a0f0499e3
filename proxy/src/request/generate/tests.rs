//! A context of the client's own size, and one that goes on, on the simulator.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use async_trait::async_trait;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::wrapper::EngineWrapper;
use baton_link::{Engine, SequenceStream};
use baton_schemas::FinishReason;
use baton_schemas::SequenceRequest;
use baton_schemas::generate::{Conversation, Input, Message};
use baton_schemas::node::NodeInfo;
use baton_schemas::{EngineError, MessageRole, Token};
use futures::StreamExt;

use super::*;
use crate::account::{Account, KeyLimits};
use crate::http::HttpBackend;
use crate::observe::tests::{app, caller, over_models, request};
use crate::reply_event::EventKind;
use crate::serve::request_service::RequestService;
use crate::targets::models::ServedModel;
use crate::targets::nodes::{Health, Node};

/// Longer than any reply here.
const LONG: u32 = 1_000_000;

/// A chat of one message; every token of its reply is reported.
fn chat(text: &str, context: &[Token]) -> GenerateRequest {
    let message = Message::new(MessageRole::User, text.into());
    let conversation = Conversation { messages: vec![message], ..Conversation::default() };
    GenerateRequest { input: Input::Chat(conversation), context: Some(context.to_vec()), ..request("m") }
}

/// How a reply went.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    n_prompt: u32,
    n_cached: u32,
    n_completion: u32,
    is_cut: bool,
    context: Option<Vec<Token>>,
}

async fn ask(app: &RequestService, request: GenerateRequest) -> Result<Outcome, RequestError> {
    let mut reply = app.generate(request, caller()).await?;
    let mut outcome = Outcome { n_prompt: reply.n_prompt, ..Outcome::default() };
    while let Some(event) = reply.events.next().await {
        match event?.kind {
            EventKind::Started(cached) => outcome.n_cached = cached.n_cached,
            EventKind::Context { tokens } => outcome.context = Some(tokens),
            EventKind::Finished { reason, n_completion, .. } => {
                outcome.is_cut = reason == FinishReason::Length;
                outcome.n_completion = n_completion;
            }
            _ => {}
        }
    }
    Ok(outcome)
}

#[tokio::test]
async fn prompt_and_reply_stay_within_the_clients_context() {
    let app = app().await;
    let within = |num_ctx, max_tokens| GenerateRequest { num_ctx, max_tokens, ..request("m") };
    let plain = ask(&app, within(None, Some(8))).await.unwrap();
    let n_prompt = plain.n_prompt;
    for (num_ctx, max_tokens, n_expected) in [
        (n_prompt + 3, None, 3),
        (n_prompt + 3, Some(8), 3),
        (n_prompt + 3, Some(2), 2),
        (n_prompt + 9, Some(8), 8),
        (LONG, Some(8), 8),
    ] {
        let outcome = ask(&app, within(Some(num_ctx), max_tokens)).await.unwrap();
        assert_eq!((outcome.n_completion, outcome.is_cut), (n_expected, true), "{num_ctx} {max_tokens:?}");
        assert_eq!(outcome.context, None, "nobody asked for it");
    }
    for num_ctx in [n_prompt, n_prompt - 1] {
        let refused = ask(&app, within(Some(num_ctx), None)).await.unwrap_err();
        let RequestError::ChosenContextExceeded { n_prompt: n_tokens, num_ctx: chosen, .. } = refused else {
            panic!("{refused:?}")
        };
        assert_eq!((n_tokens, chosen), (n_prompt, num_ctx));
    }
    // Agents match these words to shorten their history.
    let refused = ask(&app, GenerateRequest { num_ctx: Some(1), ..chat("hi", &[]) }).await.unwrap_err().to_string();
    for words in ["maximum context length is 1 tokens", "exceeds the available context size"] {
        assert!(refused.contains(words), "{refused}");
    }
}

#[test]
fn a_context_that_is_no_smaller_than_the_models_is_no_limit() {
    let limit = |num_ctx, max_tokens| GenerateRequest { num_ctx, max_tokens, ..request("m") }.max_tokens_after(10, 64);
    assert_eq!(limit(None, None), None);
    assert_eq!(limit(Some(64), None), None);
    assert_eq!(limit(Some(63), None), Some(53));
    assert_eq!(limit(Some(63), Some(0)), Some(0));
    assert_eq!(limit(Some(9), None), Some(0));
}

#[tokio::test]
async fn a_reply_is_gone_on_with_from_its_tokens() {
    let app = app().await;
    let first = ask(&app, chat("hi", &[])).await.unwrap();
    let earlier = first.context.unwrap();
    assert_eq!(earlier.len() as u32, first.n_prompt + first.n_completion);
    let alone = ask(&app, chat("and?", &[])).await.unwrap();
    let second = ask(&app, chat("and?", &earlier)).await.unwrap();
    assert_eq!(second.n_prompt, earlier.len() as u32 + alone.n_prompt);
    assert!(second.n_cached >= earlier.len() as u32 - 1, "{second:?}");
    let context = second.context.unwrap();
    assert!(context.starts_with(&earlier));
    assert_eq!(context.len() as u32, second.n_prompt + second.n_completion);
}

#[tokio::test]
async fn tokens_that_the_model_does_not_have_are_refused() {
    let refused = ask(&app().await, chat("hi", &[1, 5_000])).await.unwrap_err();
    assert!(matches!(&refused, RequestError::InvalidField { field: "context", .. }), "{refused:?}");
}

/// An endpoint over one model on these engines.
async fn served_by(engines: Vec<impl Engine>) -> RequestService {
    let mut nodes = Vec::new();
    for (i, engine) in engines.into_iter().enumerate() {
        let health = Health::new("it");
        health.note_answer(Arc::new(engine.info().await.unwrap()));
        nodes.push(Node::new(i.to_string(), None, Arc::new(engine), health));
    }
    let model = ServedModel::new(OnceLock::from("m".to_owned()), vec![], nodes, Vec::new());
    over_models(vec![Arc::new(model)])
}

/// Refuses or loses some sequences, by the order in which they arrive.
struct Unsteady {
    sim: SimEngine,
    n_asked: AtomicU32,
}

#[async_trait]
impl EngineWrapper for Unsteady {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        match self.n_asked.fetch_add(1, Ordering::AcqRel) {
            5 => Err(EngineError::QueueFull { limit: 1 }),
            6 => Err(EngineError::lost("gone")),
            _ => self.sim.generate(request).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn choices_that_start_late_survive_a_full_queue_and_a_lost_node() {
    let sim = SimEngine::new(SimConfig { prefill_tps: 10_000.0, decode_tps: 1_000.0, ..SimConfig::default() });
    let app = served_by(vec![Unsteady { sim, n_asked: AtomicU32::new(0) }]).await;
    let mut reply = app.generate(GenerateRequest { n: 10, ..request("m") }, caller()).await.unwrap();
    let mut finished = BTreeSet::new();
    while let Some(event) = reply.events.next().await {
        let event = event.unwrap();
        assert!(app.state(false).requests.slots <= 4);
        if let EventKind::Finished { n_completion, .. } = event.kind {
            assert_eq!(n_completion, 8);
            finished.insert(event.choice);
        }
    }
    assert_eq!(finished, (0..10).collect());
    drop(reply);
    let requests = app.state(false).requests;
    assert_eq!((requests.running, requests.slots), (0, 0));
}

/// Refuses every sequence.
struct Refuses {
    sim: SimEngine,
    error: Option<EngineError>,
}

#[async_trait]
impl EngineWrapper for Refuses {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        match &self.error {
            Some(error) => Err(error.clone()),
            None => self.sim.generate(request).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_refuses_its_key_or_everything_is_not_the_clients_fault() {
    let engine = |error| Refuses { sim: SimEngine::new(SimConfig::default()), error };
    for error in [EngineError::Unauthorized, EngineError::QueueFull { limit: 0 }] {
        let app = served_by(vec![engine(Some(error.clone())), engine(None)]).await;
        assert!(app.generate(request("m"), caller()).await.is_ok(), "another node takes it: {error}");
        let app = served_by(vec![engine(Some(error.clone()))]).await;
        let refused = app.generate(request("m"), caller()).await.err().expect("no node takes it");
        assert!(matches!(&refused, RequestError::Engine(shown) if *shown == error), "{refused:?}");
    }
}

/// The choice whose sequence ends processes. It starts after the others: a node has two slots.
const POISONOUS: u32 = 2;

/// An engine whose process ends under one choice: the first of all processes before the sequence is accepted, the others
/// in its prompt.
struct Fragile {
    sim: SimEngine,
    n_ends: AtomicU32,
    n_ends_of_all: Arc<AtomicU32>,
}

#[async_trait]
impl EngineWrapper for Fragile {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn info(&self) -> Result<NodeInfo, EngineError> {
        let process = u64::from(self.n_ends.load(Ordering::Acquire)) + 1;
        Ok(NodeInfo { process, ..self.sim.info().await? })
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let seed = self::request("m").sampling.seed.wrapping_add(POISONOUS.into());
        if request.sampling.seed != seed {
            return self.sim.generate(request).await;
        }
        self.n_ends.fetch_add(1, Ordering::AcqRel);
        let ended = EngineError::lost("the process has ended");
        match self.n_ends_of_all.fetch_add(1, Ordering::AcqRel) {
            0 => Err(ended),
            _ => Ok(futures::stream::iter([Err(ended)]).boxed()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_poisonous_choice_that_starts_late_ends_two_processes() {
    let n_ends = Arc::new(AtomicU32::new(0));
    let config = SimConfig { prefill_tps: 10_000.0, decode_tps: 1_000.0, n_slots: 2, ..SimConfig::default() };
    let engine = || Fragile {
        sim: SimEngine::new(config.clone()),
        n_ends: AtomicU32::new(0),
        n_ends_of_all: Arc::clone(&n_ends),
    };
    let app = served_by(vec![engine(), engine(), engine()]).await;
    let mut reply = app.generate(GenerateRequest { n: 6, ..request("m") }, caller()).await.unwrap();
    let error = loop {
        match reply.events.next().await.expect("an error") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    let is_poison = matches!(error, RequestError::Engine(EngineError::Poison { n_processes: 2 }));
    assert_eq!((is_poison, n_ends.load(Ordering::Acquire)), (true, 2), "{error:?}");
}

/// An engine that loses each choice that starts late once, before it accepts it.
struct LosesLate {
    sim: SimEngine,
    lost: Mutex<BTreeSet<u64>>,
    n_running: Arc<AtomicU32>,
    /// The most late choices that ran at once.
    most: Arc<AtomicU32>,
}

/// A late choice that runs.
struct RunningChoice(Arc<AtomicU32>);

impl Drop for RunningChoice {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[async_trait]
impl EngineWrapper for LosesLate {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let seed = request.sampling.seed;
        // Two choices start first.
        if seed.wrapping_sub(self::request("m").sampling.seed) < 2 {
            return self.sim.generate(request).await;
        }
        if self.lost.lock().unwrap().insert(seed) {
            return Err(EngineError::lost("gone"));
        }
        let events = self.sim.generate(request).await?;
        self.most.fetch_max(self.n_running.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
        let running = RunningChoice(Arc::clone(&self.n_running));
        Ok(events.inspect(move |_| _ = &running).boxed())
    }
}

#[tokio::test(start_paused = true)]
async fn choices_in_quarantine_that_start_late_run_one_after_another() {
    let sim = SimEngine::new(SimConfig { n_slots: 2, decode_tps: 10.0, ..SimConfig::default() });
    let most = Arc::new(AtomicU32::new(0));
    let engine =
        LosesLate { sim, lost: Mutex::default(), n_running: Arc::new(AtomicU32::new(0)), most: Arc::clone(&most) };
    let app = served_by(vec![engine]).await;
    let mut reply = app.generate(GenerateRequest { n: 4, ..request("m") }, caller()).await.unwrap();
    let mut n_finished = 0;
    while let Some(event) = reply.events.next().await {
        n_finished += u32::from(matches!(event.unwrap().kind, EventKind::Finished { .. }));
    }
    assert_eq!((n_finished, most.load(Ordering::Acquire)), (4, 1));
}

/// An engine whose queue has room for one sequence, and is full.
struct Full(SimEngine);

#[async_trait]
impl EngineWrapper for Full {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        Err(EngineError::QueueFull { limit: 1 })
    }
}

#[tokio::test(start_paused = true)]
async fn only_choices_that_start_together_can_be_too_many_for_a_queue() {
    let app = served_by(vec![Full(SimEngine::new(SimConfig::default()))]).await;
    for (max_concurrent, is_wrong) in [(1, false), (4, true)] {
        let limits = KeyLimits { max_concurrent: Some(max_concurrent), ..KeyLimits::default() };
        let caller = Caller { account: Arc::new(Account::new("k", limits)), ..caller() };
        let Err(error) = app.generate(GenerateRequest { n: 4, ..request("m") }, caller).await else { panic!() };
        match error {
            RequestError::InvalidField { field: "n", .. } => assert!(is_wrong, "{max_concurrent}"),
            RequestError::Engine(EngineError::QueueFull { limit: 1 }) => assert!(!is_wrong, "{max_concurrent}"),
            error => panic!("{error:?}"),
        }
    }
}

/// An engine that is lost under the first sequence, after some events.
struct BreaksOff {
    sim: SimEngine,
    n_asked: Arc<AtomicU32>,
}

#[async_trait]
impl EngineWrapper for BreaksOff {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let events = self.sim.generate(request).await?;
        match self.n_asked.fetch_add(1, Ordering::AcqRel) {
            0 => {
                let lost = futures::stream::iter([Err(EngineError::lost("gone"))]);
                Ok(events.take(4).chain(lost).boxed())
            }
            _ => Ok(events),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_place_of_a_sequence_goes_where_it_goes_on() {
    let n_asked = Arc::new(AtomicU32::new(0));
    let engine = || BreaksOff {
        sim: SimEngine::new(SimConfig { n_slots: 1, ..SimConfig::default() }),
        n_asked: n_asked.clone(),
    };
    let app = served_by(vec![engine(), engine()]).await;
    let model = app.targets.pool.models().remove(0);
    let taken = || model.decode.iter().map(|node| node.places.n_taken()).collect::<Vec<_>>();
    let mut reply = app.generate(request("m"), caller()).await.unwrap();
    let first = taken();
    let mut last = Vec::new();
    while let Some(event) = reply.events.next().await {
        event.unwrap();
        last = taken();
    }
    assert_eq!(n_asked.load(Ordering::Acquire), 2);
    assert_eq!((first.iter().sum::<usize>(), last.iter().sum::<usize>()), (1, 1));
    assert_ne!(first, last);
    drop(reply);
    assert_eq!(taken(), [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn no_node_gets_more_than_it_runs_at_once() {
    let sim = || SimEngine::new(SimConfig { n_slots: 2, decode_tps: 10.0, ..SimConfig::default() });
    let most = Arc::new(AtomicU32::new(0));
    let counted = |sim| Counted { sim, n_running: Arc::new(AtomicU32::new(0)), most: Arc::clone(&most) };
    let app = served_by(vec![counted(sim()), counted(sim())]).await;
    // Some have choices that wait for places of the node that has their prompt.
    let ask = async |n| {
        let mut reply = app.generate(GenerateRequest { n, ..request("m") }, caller()).await.unwrap();
        while let Some(event) = reply.events.next().await {
            event.unwrap();
        }
    };
    futures::future::join_all([1, 1, 3, 1, 5, 1, 1, 2].map(ask)).await;
    assert_eq!(most.load(Ordering::Acquire), 2);
    let requests = app.state(false).requests;
    assert_eq!((requests.running, requests.slots, requests.waiting, requests.limit), (0, 0, 0, 4));
}

/// Notes the most sequences at once on one node.
struct Counted {
    sim: SimEngine,
    n_running: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
}

#[async_trait]
impl EngineWrapper for Counted {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let events = self.sim.generate(request).await?;
        self.most.fetch_max(self.n_running.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
        let running = RunningChoice(Arc::clone(&self.n_running));
        Ok(events.inspect(move |_| _ = &running).boxed())
    }
}
