//! Requests whose engines' processes end under them.

use std::collections::BTreeSet;

use baton_schemas::Token;
use futures::future::join_all;
use tokio::sync::watch;

use super::*;

/// The token that ends a process.
const POISON: Token = 255;

/// When a process ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum EndsIn {
    Prompt,
    Reply,
}

/// An engine whose process ends while it works on [`POISON`], with all its streams, and is replaced at once.
struct Fragile {
    sim: SimEngine,
    ends_in: EndsIn,
    /// The number of the process, less one.
    n_ends: watch::Sender<u64>,
    /// How long it works on a poisoned prompt.
    works_for: Duration,
}

#[async_trait]
impl EngineWrapper for Fragile {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn info(&self) -> Result<NodeInfo, EngineError> {
        let process = *self.n_ends.borrow() + 1;
        Ok(NodeInfo { process, ..self.sim.info().await? })
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let is_poison = request.prompt.contains(&POISON);
        let n_generated = request.generated.len();
        let mut events = self.sim.generate(request).await?;
        let n_ends = self.n_ends.clone();
        let mut ends = self.n_ends.subscribe();
        ends.borrow_and_update();
        let ends_in = self.ends_in;
        let works_for = self.works_for;
        let stream = async_stream::stream! {
            let mut n_tokens = n_generated;
            loop {
                let event = tokio::select! {
                    biased;
                    _ = ends.changed() => None,
                    event = events.next() => event,
                };
                let Some(event) = event else {
                    yield Err(EngineError::lost("the process has ended"));
                    return;
                };
                let is_token = matches!(event, Ok(SequenceEvent::Token(_)));
                let is_due = match ends_in {
                    EndsIn::Prompt => !is_token,
                    EndsIn::Reply => is_token && n_tokens == 4,
                };
                if is_poison && is_due {
                    tokio::time::sleep(works_for).await;
                    n_ends.send_modify(|n| *n += 1);
                    yield Err(EngineError::lost("the process has ended"));
                    return;
                }
                n_tokens += usize::from(is_token);
                yield event;
            }
        };
        Ok(stream.boxed())
    }
}

struct FragileCluster {
    model: Arc<ServedModel>,
    n_ends: Vec<watch::Sender<u64>>,
}

impl FragileCluster {
    async fn of(n_nodes: usize, ends_in: EndsIn, works_for: Duration, deadlines: Deadlines) -> FragileCluster {
        let n_ends: Vec<_> = (0..n_nodes).map(|_| watch::Sender::new(0)).collect();
        let mut nodes = Vec::new();
        for (i, n_ends) in n_ends.iter().enumerate() {
            let config = SimConfig { prefill_tps: 5_000.0, decode_tps: 100.0, n_slots: 300, ..SimConfig::default() };
            let sim = SimEngine::new(config);
            nodes.push(node(&format!("{i}"), Fragile { sim, ends_in, n_ends: n_ends.clone(), works_for }).await);
        }
        FragileCluster { model: model_within(nodes, deadlines), n_ends }
    }

    fn n_ended(&self) -> u64 {
        self.n_ends.iter().map(|n| *n.borrow()).sum()
    }

    /// Runs a request whose first engine is the first node.
    async fn run(&self, request: SequenceRequest) -> Result<Vec<Token>, EngineError> {
        let others: Vec<usize> = (1..self.model.decode.len()).collect();
        let ask = PlanRequest {
            tokens: &request.prompt,
            n_replayed: 0,
            scope: request.cache_scope,
            max_tokens: request.max_tokens,
            policy: None,
            projector: None,
            exclude: &others,
            exclude_prefill: &[],
        };
        let plan = plan(&self.model, &ask).unwrap();
        let mut events = Resilient::begin(plan, request, PoisonMark::default(), Span::none()).await?.into_events();
        let mut tokens = Vec::new();
        while let Some(event) = events.next().await {
            if let SequenceEvent::Token(token) = event? {
                tokens.push(token.id);
            }
        }
        Ok(tokens)
    }
}

fn innocent(i: u32) -> SequenceRequest {
    SequenceRequest { prompt: (1..60).map(|t| (t + i) % 100 + 1).collect(), max_tokens: Some(60), ..request() }
}

fn poison() -> SequenceRequest {
    SequenceRequest { prompt: vec![POISON; 20], ..request() }
}

/// A poison request after `after`, on one node with innocent ones.
async fn check(n_innocent: u32, ends_in: EndsIn, after: Duration) {
    let cluster = FragileCluster::of(4, ends_in, Duration::ZERO, Deadlines::default()).await;
    let expected = join_all((0..n_innocent).map(|i| cluster.run(innocent(i)))).await;
    let poison = async {
        tokio::time::sleep(after).await;
        cluster.run(poison()).await
    };
    let (replies, poisoned) = tokio::join!(join_all((0..n_innocent).map(|i| cluster.run(innocent(i)))), poison);
    assert_eq!(poisoned, Err(EngineError::Poison { n_processes: 2 }), "{ends_in:?} {after:?}");
    assert_eq!(cluster.n_ended(), 2, "{ends_in:?} {after:?}");
    assert_eq!(count(&cluster.model, FallbackReason::Poison), 1);
    for (reply, expected) in replies.iter().zip(&expected) {
        assert_eq!(reply.as_ref().map(Vec::len), Ok(60), "{ends_in:?} {after:?}");
        assert_eq!(reply, expected, "{ends_in:?} {after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_poison_request_ends_after_two_processes_and_the_other_streams_go_on() {
    // While the others' prompts are computed, while they generate, and shortly before their end.
    for after in [0, 5, 100, 300, 500].map(Duration::from_millis) {
        for ends_in in [EndsIn::Prompt, EndsIn::Reply] {
            check(8, ends_in, after).await;
        }
    }
    check(0, EndsIn::Prompt, Duration::ZERO).await;
    check(1, EndsIn::Reply, Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn both_routes_of_a_hedged_poison_request_count() {
    let cluster = FragileCluster::of(4, EndsIn::Prompt, Duration::from_secs(5), HEDGED).await;
    cluster.model.decode.iter().for_each(|node| {
        node.learn(|rates| (rates.prefill, rates.decode) = (Curve::constant(5e3), Curve::constant(100.0)));
    });
    assert_eq!(cluster.run(poison()).await, Err(EngineError::Poison { n_processes: 2 }));
    assert_eq!((cluster.n_ended(), count(&cluster.model, FallbackReason::Hedged)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_links_break_is_no_poison() {
    // The streams break, and the processes live on.
    let model = model(vec![node("a", mortal(0, 2)).await, node("b", mortal(0, 2)).await]);
    run(&model).await.unwrap();
    assert_eq!(count(&model, FallbackReason::DecodeLost), 4);
    assert_eq!(count(&model, FallbackReason::Poison), 0);
}

/// A node that is gone, which nobody has noticed yet.
struct Gone(SimEngine);

#[async_trait]
impl EngineWrapper for Gone {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn info(&self) -> Result<NodeInfo, EngineError> {
        Err(EngineError::lost("refused"))
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        Err(EngineError::lost("refused"))
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_that_were_gone_before_are_no_evidence() {
    let cluster = FragileCluster::of(2, EndsIn::Reply, Duration::ZERO, Deadlines::default()).await;
    let info = cluster.model.decode[0].info().unwrap();
    let gone = || {
        let health = Health::new("gone");
        health.note_answer(Arc::clone(&info));
        Node::new("gone".into(), None, Arc::new(Gone(sim())), health)
    };
    let nodes = [&cluster.model.decode[..1], &[gone(), gone(), gone()], &cluster.model.decode[1..]].concat();
    let served = FragileCluster { model: model(nodes), n_ends: cluster.n_ends.clone() };
    let ends = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        cluster.n_ends[0].send_modify(|n| *n += 1);
    };
    let (reply, ()) = tokio::join!(served.run(innocent(0)), ends);
    assert_eq!(reply.map(|tokens| tokens.len()), Ok(60));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_ended_by_chance_under_a_lone_suspect_does_not_matter_after_a_token() {
    let cluster = FragileCluster::of(2, EndsIn::Prompt, Duration::ZERO, Deadlines::default()).await;
    let ends = async {
        for i in 0..10 {
            // Each stream receives tokens in between.
            tokio::time::sleep(Duration::from_millis(400)).await;
            cluster.n_ends[i % 2].send_modify(|n| *n += 1);
        }
    };
    let long = SequenceRequest { max_tokens: Some(600), ..innocent(0) };
    let (reply, ()) = tokio::join!(cluster.run(SequenceRequest { sampling: warm(), ..long }), ends);
    assert_eq!(reply.map(|tokens| tokens.len()), Ok(600));
}

/// A sampled reply: its tokens so far are computed at once.
fn warm() -> baton_schemas::generate::Sampling {
    baton_schemas::generate::Sampling { temperature: 1.0, ..Default::default() }
}

#[tokio::test(start_paused = true)]
async fn a_node_with_256_streams_dies_and_all_go_on_without_a_second_failure() {
    const N: usize = 256;
    let mortal = watch::Sender::new(0);
    let mut nodes = Vec::new();
    for i in 0..4 {
        let config = SimConfig {
            prefill_tps: 50_000.0,
            decode_tps: 50.0,
            n_slots: if i == 0 { N as u32 } else { 64 },
            max_queued: 16,
            ..SimConfig::default()
        };
        let sim = SimEngine::new(config);
        let n_ends = if i == 0 { mortal.clone() } else { watch::Sender::new(0) };
        nodes.push(
            node(&format!("{i}"), Fragile { sim, ends_in: EndsIn::Prompt, n_ends, works_for: Duration::ZERO }).await,
        );
    }
    let cluster = FragileCluster { model: model_within(nodes, Deadlines::default()), n_ends: vec![mortal.clone()] };
    let long = |i: u32| SequenceRequest { max_tokens: Some(2_000 + i), ..innocent(i % 90) };
    let dies = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let health = &cluster.model.decode[0].health;
        health.note_failure(&StateChange::new(StateReason::Unreachable, "gone"), Duration::from_secs(60));
        mortal.send_modify(|n| *n += 1);
    };
    let began = Instant::now();
    let (replies, ()) = tokio::join!(join_all((0..N as u32).map(|i| cluster.run(long(i)))), dies);
    let lengths: BTreeSet<usize> = replies.iter().filter_map(|reply| Some(reply.as_ref().ok()?.len())).collect();
    let failed: Vec<_> = replies.iter().filter_map(|reply| reply.as_ref().err()).collect();
    assert!(failed.is_empty(), "{} of {N} failed: {:?}", failed.len(), failed[0]);
    assert_eq!(lengths.len(), N);
    assert_eq!(count(&cluster.model, FallbackReason::DecodeLost), N as u64, "no stream is lost twice");
    println!("256 streams ended after {:?}", began.elapsed());
}
