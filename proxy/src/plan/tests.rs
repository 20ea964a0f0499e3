//! Plans from nodes with contexts of different lengths.

use std::sync::OnceLock;

use baton_engines::Engine;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_schemas::handoff::{HandoffFailure, HandoffTimings};

use super::*;
use crate::pool::Health;

/// One model on nodes that hold so many tokens.
async fn model(contexts: &[u32]) -> Arc<ServedModel> {
    let mut decode = Vec::new();
    for n_ctx in contexts {
        let sim = SimEngine::new(SimConfig { n_ctx: *n_ctx, ..SimConfig::default() });
        let health = Health::new("it");
        health.answers(Arc::new(sim.info().await.unwrap()));
        decode.push(Node::new(format!("holds {n_ctx}"), None, Arc::new(sim), health));
    }
    Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, Vec::new()))
}

/// What bars each node for a prompt of so many tokens.
fn barred(model: &ServedModel, n_prompt: u32, max_tokens: Option<u32>, exclude: &[usize]) -> Vec<Option<&'static str>> {
    let tokens: Vec<Token> = (0..n_prompt).collect();
    let scope = CacheScope::SHARED;
    let request =
        PlanRequest { tokens: &tokens, n_replayed: 0, scope, max_tokens, policy: None, exclude, exclude_prefill: &[] };
    explain(model, &request).candidates.iter().map(|candidate| candidate.barred).collect()
}

const SMALL: Option<&str> = Some("context_too_small");

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
    assert_eq!(barred(&model, 20, Some(45), &[1]), [None, Some("just_failed")], "short is better than none");
    assert_eq!(barred(&model, 64, Some(45), &[1]), [SMALL, None], "but not where it cannot begin");
}

#[tokio::test(start_paused = true)]
async fn a_second_route_avoids_the_prefill_node_of_the_first() {
    let prefill = async |name: &str| {
        let sim = SimEngine::new(SimConfig::default());
        let health = Health::new(name);
        health.answers(Arc::new(sim.info().await.unwrap()));
        Node::new(name.into(), Some("http://192.0.2.1:9000".into()), Arc::new(sim), health)
    };
    let decode = model(&[1_000]).await.decode.clone();
    let prefill = vec![prefill("slow").await, prefill("other").await];
    let model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill);
    let ask = |exclude_prefill| {
        let scope = CacheScope::SHARED;
        let request = PlanRequest {
            tokens: &[1; 100],
            n_replayed: 0,
            scope,
            max_tokens: None,
            policy: None,
            exclude: &[],
            exclude_prefill,
        };
        explain(&model, &request).snapshot.prefill.iter().map(|node| node.barred).collect::<Vec<_>>()
    };
    assert_eq!(ask(&[]), [None, None]);
    assert_eq!(ask(&[0]), [Some("just_failed"), None]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_was_merely_late_keeps_nobody_away_from_its_node() {
    let decode = model(&[1_000]).await.decode.clone();
    let model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode.clone(), decode);
    let fails = |failure| {
        let timings = HandoffTimings { failure: Some(failure), ..HandoffTimings::default() };
        model.learn_handoff(Route { decode: 0, prefill: Some(0) }, &timings);
        model.prefill[0].breaker.view().is_open
    };
    assert!(!fails(HandoffFailure::PrefillLate));
    assert!(fails(HandoffFailure::PrefillStalled));
}
