//! Requests whose engines' processes end under them.

use std::collections::BTreeSet;

use baton_link::LoadStream;
use baton_schemas::generate::Input;
use baton_schemas::node::{NodeLoad, Phase};
use baton_schemas::{GenerateRequest, Token};
use futures::future::join_all;
use futures::stream;
use tokio::sync::watch;

use super::*;
use crate::error::RequestError;
use crate::http::HttpBackend;
use crate::observe::tests::{caller, over_models, request as generate_request};
use crate::serve::request_service::RequestService;
use crate::targets::nodes::NodeState;

/// The token that ends a process.
const POISON: Token = 255;

/// When a process ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum EndsIn {
    Prompt,
    Reply,
    /// After so many tokens of each process.
    EachProcess(usize),
}

/// An engine whose process ends while it works on [`POISON`], with all its streams, and is replaced at once.
struct Fragile {
    sim: SimEngine,
    ends_in: EndsIn,
    /// The number of the process, less one.
    n_ends: watch::Sender<u64>,
    /// How long it works on a poisoned prompt, and on the tokens so far of a stream that it continues.
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
            if n_generated > 0 {
                tokio::time::sleep(works_for).await;
            }
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
                    EndsIn::EachProcess(n) => is_token && n_tokens - n_generated == n,
                };
                if is_poison && is_due {
                    // The process may end meanwhile under another sequence.
                    tokio::select! {
                        biased;
                        _ = ends.changed() => {}
                        () = tokio::time::sleep(works_for) => n_ends.send_modify(|n| *n += 1),
                    }
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

    /// Starts a sequence on the first node.
    async fn begin(&self, request: SequenceRequest, mark: PoisonMark) -> Result<SequenceStream, EngineError> {
        let others: Vec<usize> = (1..self.model.decode.len()).collect();
        let ask = PlanRequest { exclude: &others, ..PlanRequest::of_sequence(&request) };
        let plan = plan(&self.model, &ask).unwrap();
        Ok(Resilient::begin(plan, request, mark, Span::none()).await?.into_events())
    }

    /// Runs a request whose first engine is the first node.
    async fn run(&self, request: SequenceRequest) -> Result<Vec<Token>, EngineError> {
        tokens(self.begin(request, PoisonMark::default()).await?).await
    }

    /// Runs four choices of a request whose first engine is the first node.
    async fn run_four(&self, request: SequenceRequest) -> Vec<Result<Vec<Token>, EngineError>> {
        let mark = PoisonMark::default();
        let mut choices = Vec::new();
        for _ in 0..4 {
            choices.push(self.begin(request.clone(), mark.clone()).await.unwrap());
        }
        join_all(choices.into_iter().map(tokens)).await
    }
}

async fn tokens(mut events: SequenceStream) -> Result<Vec<Token>, EngineError> {
    let mut tokens = Vec::new();
    while let Some(event) = events.next().await {
        if let SequenceEvent::Token(token) = event? {
            tokens.push(token.id);
        }
    }
    Ok(tokens)
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
async fn a_poison_request_with_four_choices_ends_after_two_processes() {
    // At once, and after longer than a choice waits to be alone.
    for (ends_in, works_for) in
        [(EndsIn::Prompt, 0), (EndsIn::Reply, 0), (EndsIn::EachProcess(20), 0), (EndsIn::Prompt, 12)]
    {
        let cluster = FragileCluster::of(4, ends_in, Duration::from_secs(works_for), Deadlines::default()).await;
        let replies = cluster.run_four(SequenceRequest { max_tokens: Some(100), ..poison() }).await;
        let n_ended = cluster.n_ended();
        let n_processes = u32::try_from(n_ended).unwrap();
        assert_eq!(replies, vec![Err(EngineError::Poison { n_processes }); 4], "{ends_in:?} {works_for}");
        // 20 tokens end a quarantine.
        let most = if matches!(ends_in, EndsIn::EachProcess(_)) { 4 } else { 2 };
        assert!((2..=most).contains(&n_ended), "{ends_in:?} {works_for}: {n_ended}");
    }
}

/// When each token of a stream comes.
async fn token_times(mut events: SequenceStream) -> Vec<Instant> {
    let mut times = Vec::new();
    while let Some(event) = events.next().await {
        if let SequenceEvent::Token(_) = event.unwrap() {
            times.push(Instant::now());
        }
    }
    times
}

#[tokio::test(start_paused = true)]
async fn four_innocent_choices_go_on_one_after_another() {
    let cluster = FragileCluster::of(4, EndsIn::Prompt, Duration::ZERO, Deadlines::default()).await;
    let ends = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cluster.n_ends[0].send_modify(|n| *n += 1);
        Instant::now()
    };
    let mark = PoisonMark::default();
    let mut choices = Vec::new();
    for _ in 0..4 {
        choices.push(cluster.begin(innocent(0), mark.clone()).await.unwrap());
    }
    let (mut times, ended_at) = tokio::join!(join_all(choices.into_iter().map(token_times)), ends);
    for times in &mut times {
        assert_eq!(times.len(), 60);
        times.retain(|time| *time > ended_at);
    }
    times.sort();
    for pair in times.windows(2) {
        assert!(pair[0][15] <= pair[1][0], "the one before had its 16 tokens: {times:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_choices_in_quarantine_wait_for_their_turn_and_not_for_ever() {
    let pair = model(vec![node("fails", failing(3, 1, "it")).await, node("spare", sim()).await]);
    let visited = &pair.decode[0];
    let free = PoisonMark::default();
    let [mut first, mut isolated, mut watched] = [(); 3].map(|()| free.clone());
    for (mark, n_tokens) in [(&mut first, 0), (&mut isolated, 0), (&mut watched, 16)] {
        let mut visit = mark.visit(visited);
        (0..n_tokens).for_each(|_| mark.token(&mut visit));
        mark.lost(&visit);
    }
    assert!(first.take_turn().await && !first.take_turn().await);
    for (mark, longest_s) in [(&mut watched, 3), (&mut isolated, TAKE_UP_DEADLINE.as_secs())] {
        let began = Instant::now();
        assert!(mark.take_turn().await);
        assert_eq!(began.elapsed().as_secs(), longest_s);
    }
    // The engine of this choice fails, which needs no quarantine.
    let began = Instant::now();
    let cluster = FragileCluster { model: pair, n_ends: Vec::new() };
    assert_eq!(tokens(cluster.begin(request(), free).await.unwrap()).await.map(|tokens| tokens.len()), Ok(12));
    assert_eq!(count(&cluster.model, FallbackReason::EngineFailed), 1);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_poisonous_prompts_of_one_request_end_two_processes() {
    let cluster = FragileCluster::of(6, EndsIn::Prompt, Duration::ZERO, Deadlines::default()).await;
    let app = over_models(vec![Arc::clone(&cluster.model)]);
    // All prompts start on the first node.
    let others = &cluster.model.decode[1..];
    let infos: Vec<_> = others.iter().map(|node| node.info().unwrap()).collect();
    for node in others {
        node.health.note_failure(&StateChange::new(StateReason::Unreachable, "away"), Duration::from_secs(60));
    }
    let caller = caller();
    let mut replies = Vec::new();
    for _ in 0..6 {
        let request = GenerateRequest { input: Input::Tokens(vec![POISON; 20]), ..generate_request("sim") };
        replies.push(app.generate(request, caller.clone()).await.unwrap());
    }
    for (node, info) in others.iter().zip(infos) {
        node.health.note_answer(info);
    }
    let errors = replies.into_iter().map(|mut reply| async move {
        loop {
            if let Err(error) = reply.events.next().await.expect("an error") {
                return error;
            }
        }
    });
    for error in join_all(errors).await {
        assert!(matches!(error, RequestError::Engine(EngineError::Poison { n_processes: 2 })), "{error:?}");
    }
    assert_eq!(cluster.n_ended(), 2);
}

/// Sends a prompt as a client would, and reads the whole reply.
async fn ask(app: &RequestService, prompt: Vec<Token>, max_tokens: u32) -> Result<(), RequestError> {
    let request =
        GenerateRequest { input: Input::Tokens(prompt), max_tokens: Some(max_tokens), ..generate_request("sim") };
    let mut reply = app.generate(request, caller()).await?;
    while let Some(event) = reply.events.next().await {
        event?;
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn innocent_requests_are_never_blamed_while_clients_loop_poison() {
    let is_blamed =
        |reply: &Result<(), RequestError>| matches!(reply, Err(RequestError::Engine(EngineError::Poison { .. })));
    let kinds = [EndsIn::Prompt, EndsIn::Reply, EndsIn::EachProcess(20), EndsIn::EachProcess(60)];
    for (ends_in, n_nodes) in kinds.into_iter().flat_map(|ends_in| [1, 2, 4].map(|n_nodes| (ends_in, n_nodes))) {
        let cluster = FragileCluster::of(n_nodes, ends_in, Duration::from_millis(20), Deadlines::default()).await;
        let app = over_models(vec![Arc::clone(&cluster.model)]);
        // What has one node together with all others, or ends processes late, may also end with its eighth process.
        let may_be_lost = n_nodes == 1 || matches!(ends_in, EndsIn::EachProcess(_));
        let poison = join_all((0..2).map(async |_| {
            for _ in 0..6 {
                let reply = ask(&app, vec![POISON; 20], 1_000).await;
                assert!(is_blamed(&reply) || may_be_lost && reply.is_err(), "{ends_in:?} {n_nodes}: {reply:?}");
            }
        }));
        let innocents = join_all((0..12).map(async |i| {
            for k in 0..6 {
                // Some are short, and some outlive many processes.
                let reply = ask(&app, innocent(i * 7 + k).prompt, [10, 40, 400][i as usize % 3]).await;
                let is_well = reply.is_ok() || may_be_lost && !is_blamed(&reply);
                assert!(is_well, "{ends_in:?} {n_nodes} {i} {k}: {reply:?}");
            }
        }));
        tokio::join!(poison, innocents);
        println!("{ends_in:?}, {n_nodes} nodes: 12 poison requests ended {} processes", cluster.n_ended());
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_gets_tokens_between_the_ends_has_a_bound_too() {
    for (n_tokens, n_processes) in [(1, 2), (3, 2), (15, 2), (20, 4), (60, 4)] {
        let cluster = FragileCluster::of(6, EndsIn::EachProcess(n_tokens), Duration::ZERO, Deadlines::default()).await;
        let long = SequenceRequest { max_tokens: Some(1_000), ..poison() };
        assert_eq!(cluster.run(long).await, Err(EngineError::Poison { n_processes }), "{n_tokens} tokens");
        assert_eq!(cluster.n_ended(), u64::from(n_processes), "{n_tokens} tokens");
    }
}

#[tokio::test(start_paused = true)]
async fn streams_outlive_a_request_that_gets_tokens_between_the_ends() {
    for n_tokens in [3, 15, 20] {
        let cluster = FragileCluster::of(6, EndsIn::EachProcess(n_tokens), Duration::ZERO, Deadlines::default()).await;
        let long = |i| SequenceRequest { max_tokens: Some(300), sampling: warm(), ..innocent(i) };
        let killer = SequenceRequest { max_tokens: Some(1_000), ..poison() };
        let (replies, killed) = tokio::join!(join_all((0..12).map(|i| cluster.run(long(i)))), cluster.run(killer));
        assert!(matches!(killed, Err(EngineError::Poison { .. })), "{n_tokens} tokens: {killed:?}");
        assert!(cluster.n_ended() <= 4, "{n_tokens} tokens: {}", cluster.n_ended());
        let n_tokens_each: Vec<_> = replies.iter().map(|reply| reply.as_ref().map(Vec::len)).collect();
        assert_eq!(n_tokens_each, vec![Ok(300); 12], "{n_tokens} tokens");
    }
}

#[tokio::test(start_paused = true)]
async fn thirty_streams_of_a_dead_node_pause_briefly() {
    let cluster = FragileCluster::of(3, EndsIn::Prompt, Duration::from_secs(1), Deadlines::default()).await;
    let ends = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        cluster.n_ends[0].send_modify(|n| *n += 1);
    };
    let timed = async |i| {
        let began = Instant::now();
        let request = SequenceRequest { max_tokens: Some(300), sampling: warm(), ..innocent(i) };
        let n_tokens = cluster.run(request).await.map(|tokens| tokens.len());
        (n_tokens, began.elapsed())
    };
    let undisturbed = timed(0).await.1;
    let (replies, ()) = tokio::join!(join_all((0..30).map(timed)), ends);
    assert!(replies.iter().all(|(n_tokens, _)| *n_tokens == Ok(300)));
    let mut pauses: Vec<Duration> = replies.iter().map(|(_, took)| took.saturating_sub(undisturbed)).collect();
    pauses.sort();
    println!("pauses: median {:?}, longest {:?}", pauses[15], pauses[29]);
    assert!(pauses[15] < Duration::from_secs(2), "{pauses:?}");
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
async fn a_stream_outlives_three_processes_that_end_by_chance() {
    let cluster = FragileCluster::of(2, EndsIn::Prompt, Duration::ZERO, Deadlines::default()).await;
    let ends = async {
        for i in 0..3 {
            // The stream receives tokens in between.
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

/// An engine whose process was told to stop.
struct Stops(SimEngine);

#[async_trait]
impl EngineWrapper for Stops {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn info(&self) -> Result<NodeInfo, EngineError> {
        Ok(NodeInfo { process: 7, ..self.0.info().await? })
    }

    async fn loads(&self) -> Result<LoadStream, EngineError> {
        let stops = NodeLoad { phase: Phase::Stopping, ..self.0.load().await? };
        Ok(stream::iter([Ok(stops)]).chain(stream::pending()).boxed())
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_process_that_was_told_to_stop_shows_nothing() {
    let node = node("stops", Stops(sim())).await;
    let mut mark = PoisonMark::default();
    let visit = mark.visit(&node);
    while node.health.state() != NodeState::Draining {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    mark.lost(&visit);
    assert!(!mark.is_quarantined());
    assert!(node.has_crashed(8).await && !node.has_crashed(7).await, "process 7 answers");
}
