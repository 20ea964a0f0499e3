//! Plans from nodes with contexts of different lengths.

use std::sync::OnceLock;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_planner::rates::Curve;
use baton_planner::reason::{BarReason, FailureReason};
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::model_difference::ModelDifference;
use baton_schemas::node::{NodeInfo, Role};
use baton_schemas::{CacheScope, Token};

use super::*;
use crate::targets::nodes::{Health, PromptHashes};
use crate::targets::text_prefixes::PromptOutline;

/// One model on nodes that hold so many tokens.
async fn model(contexts: &[u32]) -> Arc<ServedModel> {
    let mut decode = Vec::new();
    for n_ctx in contexts {
        let sim = SimEngine::new(SimConfig { n_ctx: *n_ctx, ..SimConfig::default() });
        let health = Health::new("it");
        health.note_answer(Arc::new(sim.info().await.unwrap()));
        decode.push(Node::new(format!("holds {n_ctx}"), None, Arc::new(sim), health));
    }
    Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, Vec::new()))
}

/// What bars each node for a prompt of so many tokens.
fn barred(model: &ServedModel, n_prompt: u32, max_tokens: Option<u32>, exclude: &[usize]) -> Vec<Option<BarReason>> {
    let tokens: Vec<Token> = (0..n_prompt).collect();
    let request = PlanRequest { max_tokens, exclude, ..PlanRequest::of_tokens(&tokens, CacheScope::SHARED) };
    explain(model, &request).candidates.iter().map(|candidate| candidate.barred).collect()
}

const SMALL: Option<BarReason> = Some(BarReason::ContextTooSmall);
const DECODE_LOST: Option<BarReason> = Some(BarReason::Failure(FailureReason::DecodeLost));

#[tokio::test(start_paused = true)]
async fn a_prompt_that_fills_a_context_leaves_no_room_for_a_reply() {
    let model = model(&[32]).await;
    assert_eq!(barred(&model, 31, Some(1), &[]), [None]);
    assert_eq!(barred(&model, 32, Some(1), &[]), [SMALL]);
    assert_eq!(barred(&model, 32, None, &[]), [SMALL]);
    assert_eq!(barred(&model, 32, Some(0), &[]), [None], "none is wanted");
}

#[tokio::test(start_paused = true)]
async fn a_reply_is_not_cut_short_where_another_node_has_room() {
    let model = model(&[64, 1_024]).await;
    assert_eq!(barred(&model, 20, Some(44), &[]), [None, None]);
    assert_eq!(barred(&model, 20, Some(45), &[]), [SMALL, None]);
    assert_eq!(barred(&model, 20, Some(5_000), &[]), [SMALL, None], "and nobody has room for all of it");
    assert_eq!(barred(&model, 20, None, &[]), [SMALL, None], "replies of 256 tokens are expected at first");
    assert_eq!(barred(&model, 20, Some(45), &[1]), [None, Some(BarReason::JustFailed)], "short is better than none");
    assert_eq!(barred(&model, 64, Some(45), &[1]), [SMALL, None], "but not where it cannot begin");
}

#[tokio::test(start_paused = true)]
async fn a_second_route_avoids_the_prefill_node_of_the_first() {
    let prefill = async |name: &str| {
        let sim = SimEngine::new(SimConfig::default());
        let health = Health::new(name);
        health.note_answer(Arc::new(sim.info().await.unwrap()));
        Node::new(name.into(), Some("http://192.0.2.1:9000".into()), Arc::new(sim), health)
    };
    let decode = model(&[1_000]).await.decode.clone();
    let prefill = vec![prefill("slow").await, prefill("other").await];
    let model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill);
    let ask = |exclude_prefill| {
        let request = PlanRequest { exclude_prefill, ..PlanRequest::of_tokens(&[1; 100], CacheScope::SHARED) };
        explain(&model, &request).snapshot.prefill.iter().map(|node| node.barred).collect::<Vec<_>>()
    };
    assert_eq!(ask(&[]), [None, None]);
    assert_eq!(ask(&[0]), [Some(BarReason::JustFailed), None]);
}

#[tokio::test(start_paused = true)]
async fn a_draft_node_is_no_reason_for_a_route() {
    let node = async |role| {
        let sim = SimEngine::new(SimConfig::default());
        let health = Health::new("p");
        health.note_answer(Arc::new(NodeInfo { role, ..sim.info().await.unwrap() }));
        Node::new(format!("{role:?}"), Some("http://192.0.2.1:9000".into()), Arc::new(sim), health)
    };
    let planned = async |prefill: Vec<Arc<Node>>| {
        let decode = model(&[1_000]).await.decode.clone();
        let model = Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill));
        let request = PlanRequest::of_tokens(&[1; 100], CacheScope::SHARED);
        (explain(&model, &request).candidates.len(), plan(&model, &request).unwrap().reason)
    };
    let wrong_role = RouteReason::Barred(BarReason::WrongRole);
    assert_eq!(planned(vec![node(Role::Draft).await]).await, (1, RouteReason::OnlyRoute));
    assert_eq!(planned(vec![node(Role::Draft).await, node(Role::Decode).await]).await, (2, wrong_role));
    let lost = node(Role::Draft).await;
    lost.failed(Task::Prefill, FailureReason::Handoff(HandoffFailure::PrefillLost));
    assert_eq!(planned(vec![lost]).await, (1, RouteReason::OnlyRoute));
}

#[tokio::test(start_paused = true)]
async fn a_node_under_suspicion_is_better_than_one_that_has_just_failed_this_request() {
    let model = model(&[1_000, 1_000]).await;
    model.decode[1].failed(Task::Decode, FailureReason::DecodeLost);
    let failed = Some(BarReason::JustFailed);
    assert_eq!(barred(&model, 20, Some(1), &[]), [None, DECODE_LOST]);
    assert_eq!(barred(&model, 20, Some(1), &[0]), [failed, None]);
    assert_eq!(barred(&model, 20, Some(1), &[0, 1]), [None, None], "any is better than none");
}

#[tokio::test(start_paused = true)]
async fn kv_of_other_weights_is_planned_only_for_decode_nodes_that_may_take_it() {
    let node = async |name: &str, weights: &str, takes_other_weights: bool| {
        let sim = SimEngine::new(SimConfig { model: weights.into(), ..SimConfig::default() });
        let health = Health::new(name);
        health.note_answer(Arc::new(NodeInfo { takes_other_weights, ..sim.info().await.unwrap() }));
        Node::new(name.into(), Some("http://192.0.2.1:9000".into()), Arc::new(sim), health)
    };
    let other = Some(BarReason::Differs(ModelDifference::OtherWeights));
    let handoffs = async |lenient: &[bool]| {
        let prefill = vec![node("same", "ours", false).await, node("other", "theirs", false).await];
        let mut decode = Vec::new();
        for (i, takes_other_weights) in lenient.iter().enumerate() {
            decode.push(node(&format!("decode-{i}"), "ours", *takes_other_weights).await);
        }
        let model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill);
        barred(&model, 100, Some(1), &[]).split_off(lenient.len())
    };
    assert_eq!(handoffs(&[false]).await, [None, other]);
    assert_eq!(handoffs(&[true]).await, [None, None]);
    assert_eq!(handoffs(&[false, true]).await, [None, None, other, None]);
    assert_eq!(handoffs(&[false, false]).await, [None, None, other, other]);
}

/// A model with one node in both lists.
async fn both(n_decode: usize) -> ServedModel {
    let decode = model(&vec![1_000; n_decode]).await.decode.clone();
    ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode.clone(), decode)
}

fn hands_over(model: &ServedModel, decode: usize, failure: Option<HandoffFailure>) {
    let timings = HandoffReport { failure, ..HandoffReport::default() };
    model.learn_handoff(Route { decode, prefill: Some(0) }, &timings, false);
}

#[tokio::test(start_paused = true)]
async fn images_are_handed_over_between_nodes_with_their_projector() {
    let node = async |projector: Option<&str>, url: Option<&str>, hands_over_images: bool| {
        let sim = SimEngine::new(SimConfig::default());
        let health = Health::new("it");
        let projector = projector.map(str::to_owned);
        health.note_answer(Arc::new(NodeInfo { projector, hands_over_images, ..sim.info().await.unwrap() }));
        // A node in both lists would be one that has its KV already.
        let name = if url.is_some() { "p" } else { "it" };
        Node::new(name.to_owned(), url.map(str::to_owned), Arc::new(sim), health)
    };
    let policy = Some(PolicyName::AlwaysHandoff.policy());
    let of = |projector| PlanRequest { policy, projector, ..PlanRequest::of_tokens(&[1; 100], CacheScope::SHARED) };
    let url = Some("http://192.0.2.1:9000");
    let model = async |of_prefill: &str, prefill_does: bool, decode_does: bool| {
        let decode = vec![
            node(None, None, true).await,
            node(Some("ours"), None, decode_does).await,
            node(Some("other"), None, true).await,
        ];
        let prefill = vec![node(Some(of_prefill), url, prefill_does).await];
        Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill))
    };
    let able = model("ours", true, true).await;
    let plan = super::plan(&able, &of(Some("ours"))).unwrap();
    assert_eq!(plan.route, Route { decode: 1, prefill: Some(0) }, "{plan}");
    // The time to encode an image is not known.
    assert!(plan.prediction.is_none(), "{plan}");
    let barred: Vec<_> = explain(&able, &of(Some("ours"))).snapshot.decode.iter().map(|node| node.barred).collect();
    assert_eq!(barred, [Some(BarReason::NoProjector), None, Some(BarReason::NoProjector)]);
    assert!(super::plan(&able, &of(Some("gone"))).is_err());
    for (model, reason) in [
        (model("ours", false, true).await, BarReason::Images),
        (model("ours", true, false).await, BarReason::Images),
        (model("other", true, true).await, BarReason::NoProjector),
    ] {
        let plan = super::plan(&model, &of(Some("ours"))).unwrap();
        let direct = Route { decode: 1, prefill: None };
        assert_eq!((plan.route, plan.reason), (direct, RouteReason::Barred(reason)), "{plan}");
        assert!(super::plan(&model, &of(None)).unwrap().prefill().is_some(), "others are handed over");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_wants_lossless_kv_is_planned_with_the_bytes_of_lossless_pulls() {
    let model = both(1).await;
    let route = Route { decode: 0, prefill: Some(0) };
    let pull = |n_bytes, is_lossy| HandoffReport { n_tokens: 1_000, n_bytes, is_lossy, ..HandoffReport::default() };
    model.learn_handoff(route, &pull(10_000_000, true), false);
    model.learn_handoff(route, &pull(40_000_000, false), true);
    let per_token = |lossless_kv| {
        let request = PlanRequest { lossless_kv, ..PlanRequest::of_tokens(&[1; 100], CacheScope::SHARED) };
        explain(&model, &request).snapshot.links[0][0].wire_bytes().per_token
    };
    assert_eq!((per_token(false), per_token(true)), (10_000.0, 40_000.0));
}

#[tokio::test(start_paused = true)]
async fn a_late_pull_does_not_open_the_breaker() {
    let model = both(1).await;
    let fails = |failure| {
        hands_over(&model, 0, Some(failure));
        model.prefill[0].breakers.of(Task::Prefill).is_open()
    };
    assert!(!fails(HandoffFailure::PrefillLate));
    assert!(fails(HandoffFailure::PrefillStalled));
}

#[tokio::test(start_paused = true)]
async fn a_node_fails_at_one_task_and_does_the_other() {
    let model = both(1).await;
    let node = &model.decode[0];
    let prefill_busy = Some(BarReason::Failure(FailureReason::Handoff(HandoffFailure::PrefillBusy)));
    let barred = || {
        [Task::Decode, Task::Prefill].map(|task| node.view(task, &PromptHashes::new(CacheScope::SHARED, &[1])).barred)
    };
    hands_over(&model, 0, Some(HandoffFailure::PrefillBusy));
    assert_eq!(barred(), [None, prefill_busy], "it generates as well as ever");
    assert!(node.is_trusted(Task::Decode) && !node.is_trusted(Task::Prefill));
    node.succeeded(Task::Decode);
    assert_eq!(barred(), [None, prefill_busy], "a reply says nothing of its prefills");
    assert_eq!(node.health.state().as_str(), "suspect");
    node.failed(Task::Decode, FailureReason::DecodeLost);
    hands_over(&model, 0, None);
    assert_eq!(barred(), [DECODE_LOST, None]);
    node.succeeded(Task::Decode);
    assert_eq!((barred(), node.health.state().as_str()), ([None, None], "ready"));
}

#[tokio::test(start_paused = true)]
async fn a_decode_node_that_cannot_take_the_kv_leaves_the_prefill_node_to_others() {
    use HandoffFailure::{AddressRefused, CanaryFailed, FingerprintMismatch, ImportFailed};
    for failure in [AddressRefused, CanaryFailed, FingerprintMismatch, ImportFailed] {
        let decode = model(&[1_000, 1_000]).await.decode.clone();
        let prefill = Node::new("p".into(), None, Arc::clone(&decode[0].engine), Arc::clone(&decode[0].health));
        let model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, vec![prefill]);
        let model = Arc::new(model);
        hands_over(&model, 0, Some(failure));
        let reason = Some(BarReason::Failure(FailureReason::Handoff(failure)));
        let n = 20;
        assert_eq!(barred(&model, n, Some(1), &[]), [None, None, reason, None], "direct twice, then handoffs");
        assert!(model.prefill[0].is_trusted(Task::Prefill));
        assert_eq!(model.pairs.view(0, 0).unwrap().counts[&failure], 1);
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(barred(&model, n, Some(1), &[]), [None; 4], "the pair is tried again");
        hands_over(&model, 0, None);
        assert!(!model.pairs.view(0, 0).unwrap().is_open);
    }
}

/// Another request that is always a little quicker to take what a breaker lets through.
#[derive(Debug)]
struct Outrun;

static OUTRUN: OnceLock<Arc<ServedModel>> = OnceLock::new();

impl Policy for Outrun {
    fn name(&self) -> PolicyName {
        PolicyName::AlwaysHandoff
    }

    fn choose(&self, snapshot: &Snapshot, candidates: &[RouteCandidate]) -> Option<baton_planner::policy::RouteChoice> {
        OUTRUN.get().unwrap().prefill[0].breakers.of(Task::Prefill).try_pass();
        PolicyName::AlwaysHandoff.policy().choose(snapshot, candidates)
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_comes_too_late_to_try_a_node_says_why_it_goes_elsewhere() {
    let decode = model(&[1_000]).await.decode.clone();
    let prefill = Node::new("p".into(), None, Arc::clone(&decode[0].engine), Arc::clone(&decode[0].health));
    let model = Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, vec![prefill]));
    assert!(OUTRUN.set(Arc::clone(&model)).is_ok());
    let lost = FailureReason::Handoff(HandoffFailure::PrefillLost);
    model.prefill[0].failed(Task::Prefill, lost);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ask = |policy| PlanRequest { policy, ..PlanRequest::of_tokens(&[1; 100], CacheScope::SHARED) };
    model.prefill[0].breakers.of(Task::Prefill).answered(tokio::time::Instant::now());
    let planned = plan(&model, &ask(Some(&Outrun))).unwrap();
    assert_eq!((planned.route.prefill, planned.reason), (None, RouteReason::Barred(lost.into())));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_is_not_rendered_is_planned_by_its_estimated_length_alone() {
    let outline = |n_tokens| {
        let mut outline = PromptOutline::default();
        (outline.n_tokens, outline.max_tokens) = (n_tokens, Some(1));
        outline
    };
    let model = model(&[u32::MAX]).await;
    model.decode[0].learn(|rates| {
        rates.prefill = Curve::constant(1_000.0);
        rates.decode = Curve::constant(100.0);
    });
    let prefill_ms = |n| estimated(&model, &outline(n), CacheScope::SHARED).unwrap().prefill_ms;
    assert!((prefill_ms(4_000_000) / prefill_ms(1_000_000) - 4.0).abs() < 0.01, "none is taken for shorter");
    let small = self::model(&[4_096]).await;
    assert_eq!(estimated(&small, &outline(u32::MAX), CacheScope::SHARED), None, "it fits no context");
}
