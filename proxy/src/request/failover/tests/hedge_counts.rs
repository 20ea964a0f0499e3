//! What a hedged request counts as while its two routes are in different phases.

use baton_planner::rates::TransferRates;

use super::*;
use crate::account::Account;
use crate::admission::{Admission, AdmissionLimits, EngineWork, RequestAdmission, WorkPhase};

/// The first events of a stream. Then nothing comes.
type Said = Vec<Result<SequenceEvent, EngineError>>;

/// An engine whose streams say so much.
struct Says(SimEngine, Said);

#[async_trait]
impl EngineWrapper for Says {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        Ok(futures::stream::iter(self.1.clone()).chain(futures::stream::pending()).boxed())
    }
}

/// A model whose first route hands over to an engine that says `first`. Its second route is direct, on an engine that says
/// `second`.
async fn model_of(first: Said, second: Said) -> Arc<ServedModel> {
    let decode = vec![node("first", Says(sim(), first)).await, node("second", Says(sim(), second)).await];
    let info = sim().info().await.unwrap();
    let health = Health::new("prefill");
    health.note_answer(Arc::new(info));
    let prefill = Node::new("prefill".into(), Some("http://192.0.2.1:9000".into()), Arc::new(sim()), health);
    for node in decode.iter().chain([&prefill]) {
        node.places.set(4);
        node.learn(|rates| (rates.prefill, rates.decode) = (Curve::constant(1e4), Curve::constant(1e3)));
    }
    let mut model = ServedModel::new(OnceLock::from("sim".to_owned()), Vec::new(), decode, vec![prefill]);
    model.deadlines = HEDGED;
    model.routes.learn_link(0, 0, |link: &mut TransferRates| link.learn_probe(1.0, 1_000_000_000, 1.0));
    Arc::new(model)
}

/// The slots that the request has, and whether it counts as running, before it is hedged and after that; and the places that it then
/// has at the second node.
async fn counts_of(first: Said, second: Said) -> ([(usize, bool); 2], usize) {
    let model = model_of(first, second).await;
    let request = request();
    let ask = PlanRequest { policy: Some(PolicyName::AlwaysHandoff.policy()), ..PlanRequest::of_sequence(&request) };
    let plan = plan(&model, &ask).unwrap();
    assert_eq!((plan.route.prefill, plan.route.decode), (Some(0), 0));
    let admission = Admission::new(AdmissionLimits::default());
    admission.set_targets(model.decode.iter().map(|node| Arc::clone(&node.places)).collect());
    let account = Arc::new(Account::new("k", Default::default()));
    let permit = admission.enter(&account, &RequestAdmission::default());
    let work = Arc::<EngineWork>::default();
    let place = permit.places(&work).try_next(&model.decode[0].places);
    let mut sequence = Resilient::begin(plan, request, PoisonMark::default(), Span::none()).await.unwrap();
    sequence.keep_place(Some(place.unwrap()));
    let mut events = sequence.into_events();
    let mut counts = Vec::new();
    for seconds in [0.5, 3.0] {
        let until = Instant::now() + Duration::from_secs_f64(seconds);
        while tokio::time::timeout_at(until, events.next()).await.is_ok() {}
        counts.push((admission.n_places(), matches!(work.phase(), WorkPhase::WorksSince(_))));
        assert_eq!(count(&model, FallbackReason::Hedged), counts.len() as u64 - 1);
    }
    (counts.try_into().unwrap(), model.decode[1].places.n_taken())
}

#[tokio::test(start_paused = true)]
async fn a_hedged_request_counts_as_the_further_of_its_two_routes() {
    let started = || Ok(SequenceEvent::Started(CachedTokens::default()));
    let [nothing, waits] = [(0, false), (1, false)];
    let works = (1, true);
    // A route that hands over has a slot, and its prompt waits, until it says that the prefill has begun.
    for (first, second, expected) in [
        (vec![], vec![], ([nothing, nothing], 0)),
        (vec![started()], vec![], ([waits, waits], 0)),
        (vec![], vec![started()], ([nothing, works], 1)),
        (vec![started()], vec![started()], ([waits, works], 1)),
        (vec![started(), Ok(SequenceEvent::PrefillBegun)], vec![], ([works, works], 0)),
        (vec![started()], vec![started(), Err(EngineError::lost("killed"))], ([waits, waits], 0)),
        (vec![], vec![started(), Err(EngineError::lost("killed"))], ([nothing, nothing], 0)),
    ] {
        let case = format!("{first:?}, {second:?}");
        assert_eq!(counts_of(first, second).await, expected, "{case}");
    }
}
