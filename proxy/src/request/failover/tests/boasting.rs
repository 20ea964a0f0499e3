//! Nodes that say they hold prompts that they never saw.

use baton_schemas::CacheScope;
use baton_schemas::held::{HeldDigest, HeldKey, HeldPiece, HeldPieces, KvTier, PieceUse};
use baton_schemas::node::NodeLoad;

use super::*;

/// The version of its list.
const LIST: u64 = 7;

/// A simulator whose list names these prompts. Counts the sequences that it gets.
struct Boaster {
    sim: SimEngine,
    prompts: Vec<Vec<Token>>,
    n_asked: Arc<AtomicU32>,
}

#[async_trait]
impl EngineWrapper for Boaster {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        Ok(NodeLoad { held: LIST, ..self.sim.load().await? })
    }

    async fn held(&self, key: &HeldKey) -> Result<HeldDigest, EngineError> {
        let piece = |tokens: &Vec<Token>| HeldPiece {
            scope: CacheScope::SHARED,
            before: None,
            from: 0,
            tokens: tokens.as_slice().into(),
            tier: KvTier::Slot,
            use_at: PieceUse::Anywhere,
            is_exact: true,
        };
        Ok(HeldPieces { version: LIST, pieces: self.prompts.iter().map(piece).collect() }.digest(key))
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.n_asked.fetch_add(1, Ordering::AcqRel);
        self.sim.generate(request).await
    }
}

/// A node whose list names these prompts, and the number of sequences that it got.
async fn boaster(prompts: &[Vec<Token>]) -> (Arc<Node>, Arc<AtomicU32>) {
    let n_asked = Arc::new(AtomicU32::new(0));
    let engine = Boaster { sim: sim(), prompts: prompts.to_vec(), n_asked: Arc::clone(&n_asked) };
    let health = Health::new("it");
    health.note_answer(Arc::new(Engine::info(&engine).await.unwrap()));
    (Node::new("boaster".into(), Some("http://192.0.2.1:9000".into()), Arc::new(engine), health), n_asked)
}

/// Twelve prompts without a common beginning.
fn prompts() -> Vec<Vec<Token>> {
    (0..12).map(|i| (0..600).map(|t| (i + t * 7) % 250).collect()).collect()
}

/// Nodes have reported their loads, and what they hold.
async fn reports() {
    tokio::time::sleep(Duration::from_secs(5)).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_lies_about_what_it_holds_attracts_no_more_requests() {
    let (boaster, n_asked) = boaster(&prompts()).await;
    // Faster, so the boaster is chosen only for what it says it holds.
    let honest = SimEngine::new(SimConfig { prefill_tps: 12_000.0, decode_tps: 1_000.0, ..SimConfig::default() });
    let model = model(vec![node("honest", honest).await, boaster]);
    let mut lured = Vec::new();
    for prompt in prompts() {
        // A load from the middle of the request before would make the boaster look busy.
        reports().await;
        let before = n_asked.load(Ordering::Acquire);
        run_of(SequenceRequest { prompt, ..request() }, Span::none(), &model).await.unwrap();
        lured.push(n_asked.load(Ordering::Acquire) > before);
    }
    assert_eq!(lured, [vec![true; 3], vec![false; 9]].concat(), "three broken promises end the belief");
}

#[tokio::test(start_paused = true)]
async fn a_prefill_node_that_computes_what_it_said_it_holds_is_believed_no_more() {
    let (boaster, _) = boaster(&prompts()).await;
    let decode = vec![node("decode", sim()).await];
    let model = Arc::new(ServedModel::new(OnceLock::from("sim".to_owned()), Vec::new(), decode, vec![boaster]));
    reports().await;
    let mut missing = Vec::new();
    for prompt in prompts().into_iter().take(5) {
        let request = SequenceRequest { prompt, ..request() };
        let ask =
            PlanRequest { policy: Some(PolicyName::AlwaysHandoff.policy()), ..PlanRequest::of_sequence(&request) };
        let plan = plan(&model, &ask).unwrap();
        missing.push(plan.n_missing());
        let computed = HandoffReport { n_tokens: 599, n_computed: 599, n_cached: 0, ..HandoffReport::default() };
        RouteRun::claim(plan, &PoisonMark::default()).learn_handoff(&computed, &request);
    }
    assert!(missing[0] == 0 && missing.is_sorted(), "{missing:?}");
    assert_eq!(missing[3..], [599, 599], "it is planned like a node that holds nothing: {missing:?}");
}
