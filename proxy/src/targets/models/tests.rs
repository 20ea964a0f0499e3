//! Which weights a name stands for, as nodes come, go and change.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::wrapper::{EngineWrapper, UnusedEngine};
use baton_planner::reason::BarReason;
use baton_schemas::EngineError;
use baton_schemas::node::{NodeInfo, NodeLoad, Role};

use super::*;
use crate::account::{Account, KeyLimits};
use crate::error::RequestErrorKind;
use crate::http::HttpBackend;
use crate::observe::readiness::Readiness;
use crate::serve::request_service::RequestService;
use crate::targets::nodes::{Health, Node, StateChange, StateReason};

/// An engine that reports its load and takes no requests.
struct SilentEngine;

#[async_trait]
impl EngineWrapper for SilentEngine {
    fn inner(&self) -> &dyn Engine {
        &UnusedEngine
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        Ok(NodeLoad::default())
    }
}

/// A node runs these weights under this name.
async fn runs(health: &Arc<Health>, weights: &str, name: &str) {
    let sim = SimEngine::new(SimConfig { model: weights.into(), ..SimConfig::default() });
    let info = NodeInfo { model: name.into(), ..sim.info().await.unwrap() };
    health.note_answer(Arc::new(info));
}

fn goes_down(health: &Arc<Health>) {
    health.note_failure(&StateChange::new(StateReason::Unreachable, "gone"), Duration::from_secs(2));
}

/// An endpoint over two nodes that are starting, with or without a name for what they run.
fn endpoint(name: Option<&str>) -> (RequestService, [Arc<Health>; 2]) {
    let mut decode = Vec::new();
    let mut healths = Vec::new();
    for i in 1..=2 {
        let health = Health::new(format!("decode-{i}"));
        decode.push(Node::new(format!("decode-{i}"), None, Arc::new(SilentEngine), Arc::clone(&health)));
        healths.push(health);
    }
    let name = name.map_or_else(OnceLock::new, |name| OnceLock::from(name.to_owned()));
    let model = ServedModel::new(name, Vec::new(), decode.clone(), Vec::new());
    let pool = Arc::new(ModelPool::with_undeclared(vec![Arc::new(model)], decode));
    serve_reported_models(&pool, Vec::new(), Arc::new);
    (RequestService::over(pool), healths.try_into().unwrap())
}

#[tokio::test(start_paused = true)]
async fn choices_that_start_together_are_shared_out_among_draft_nodes() {
    let info = SimEngine::new(SimConfig::default()).info().await.unwrap();
    let node = |name: &str, role, n_slots| {
        let health = Health::new(name.to_owned());
        health.note_answer(Arc::new(NodeInfo { role, n_slots, ..info.clone() }));
        Node::new(name.to_owned(), None, Arc::new(SilentEngine), health)
    };
    let decode = node("decode-1", Role::Both, 8);
    let helpers =
        vec![node("draft-1", Role::Draft, 2), node("prefill-1", Role::Prefill, 9), node("draft-2", Role::Draft, 3)];
    let model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), vec![Arc::clone(&decode)], helpers);
    let chosen = (0..6).map(|n_begun| model.draft_node(&decode, n_begun).map(|node| node.name.clone()));
    let names = ["draft-2", "draft-1", "draft-2", "draft-1", "draft-2"].map(|name| Some(name.to_owned()));
    assert_eq!(chosen.collect::<Vec<_>>(), [&names[..], &[None]].concat(), "each has as many as it has slots");
}

#[tokio::test(start_paused = true)]
async fn a_node_elsewhere_does_not_pull_from_an_engine_of_this_endpoint_and_reloads_keep_that_engine() {
    let [own_health, elsewhere_health, lending_health] = ["local", "decode-1", "lending"].map(Health::new);
    let engine = || Arc::new(SilentEngine);
    let own = Node::new("local".into(), None, engine(), Arc::clone(&own_health));
    let url = Some("http://192.0.2.2:9000".to_owned());
    let elsewhere = Node::new("decode-1".into(), url, engine(), Arc::clone(&elsewhere_health));
    let socket = "/tmp/baton-1/node.sock".into();
    let lending = Node::at_socket("lending".into(), socket, engine(), Arc::clone(&lending_health));
    for health in [&own_health, &elsewhere_health, &lending_health] {
        runs(health, "m", "m").await;
    }
    let decode = vec![own, Arc::clone(&elsewhere)];
    let mut model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, vec![Arc::clone(&lending)]);
    model.own_engine = Some(Arc::default());
    model.lending_engine = Some(lending);
    assert_eq!((model.bars_pair(0, 0), model.bars_pair(0, 1)), (None, Some(BarReason::PREFILL_DOWN)));
    let pool = ModelPool::of(vec![Arc::new(model)]);
    assert_eq!(pool.remote_nodes().len(), 1, "its machine is this one");
    let first = || unreachable!("a model is served");
    pool.replace_nodes(&[], &[elsewhere], first, Arc::new);
    let prefill: Vec<String> = pool.models()[0].prefill.iter().map(|node| node.name.clone()).collect();
    assert_eq!(prefill, ["lending", "decode-1"]);
}

async fn reported() {
    tokio::time::sleep(3 * REPORT_INTERVAL).await;
}

/// The node that a request for this model would be asked of, or the kind of the error.
async fn serving(app: &RequestService, name: &str) -> Result<String, RequestErrorKind> {
    let account = Account::new("anyone", KeyLimits::default());
    let model =
        app.targets.pool.find_for(Some(name), |model| account.may_use(model.names())).map_err(|error| error.kind())?;
    let ready = model.ready_node(Some(name), &[], ImageNeed::None).await.map_err(|error| error.kind())?;
    Ok(ready.0.name.clone())
}

fn barred(app: &RequestService, model: usize) -> Vec<Option<String>> {
    app.state(false).models[model].nodes.iter().map(|node| node.unused_reason.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_configured_name_is_for_what_the_first_node_runs_and_not_the_fastest() {
    let (app, [first, second]) = endpoint(Some("m"));
    runs(&second, "new", "other").await;
    reported().await;
    let (served, ()) = tokio::join!(serving(&app, "m"), async {
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        runs(&first, "old", "one").await;
    });
    assert_eq!(served.unwrap(), "decode-1");
    reported().await;
    // The other node serves what it runs under its own name, and a warning says so.
    assert_eq!(serving(&app, "other").await.unwrap(), "decode-2");
    assert_eq!((app.readiness(), app.warnings().len()), (Readiness::Ok, 1));
    let warnings = app.state(false).warnings;
    assert!(warnings[0].starts_with("decode-2 runs other weights") && warnings[0].contains("\"m\""), "{warnings:?}");
}

#[tokio::test(start_paused = true)]
async fn a_first_node_that_is_down_is_not_waited_for() {
    let (app, [first, second]) = endpoint(Some("m"));
    goes_down(&first);
    runs(&second, "new", "other").await;
    assert_eq!(serving(&app, "m").await.unwrap(), "decode-2");
    runs(&first, "old", "one").await;
    reported().await;
    assert_eq!(serving(&app, "m").await.unwrap(), "decode-2", "what a name stands for does not change by a return");
    assert_eq!(app.warnings().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_name_follows_its_nodes_to_new_weights_once_none_has_the_old() {
    for configured in [Some("m"), None] {
        let (app, [first, second]) = endpoint(configured);
        for health in [&first, &second] {
            runs(health, "old", "m").await;
        }
        reported().await;
        assert_eq!(serving(&app, "m").await.unwrap(), "decode-1");
        let old = app.targets.pool.models();

        runs(&first, "new", "m").await;
        reported().await;
        assert_eq!(serving(&app, "m").await.unwrap(), "decode-2", "which still has the old ones");
        assert_eq!(barred(&app, 0), [Some("other_weights".to_owned()), None]);
        assert_eq!((app.readiness(), app.warnings().len()), (Readiness::Ok, 1));

        // It may come back with the old ones: for a while nobody serves the name, and no health is claimed.
        goes_down(&second);
        reported().await;
        assert!(matches!(app.readiness(), Readiness::Unavailable { .. }));
        assert_eq!(serving(&app, "m").await.unwrap_err(), RequestErrorKind::Unavailable);
        tokio::time::sleep(Duration::from_secs(31)).await;
        assert_eq!(serving(&app, "m").await.unwrap(), "decode-1", "{configured:?}");
        assert_eq!((app.readiness(), app.warnings().len()), (Readiness::Ok, 0));
        assert_eq!(app.targets.pool.models().len(), 1);
        // Streams that began on the old weights do not go on on the new ones.
        assert!(old[0].ready_node(None, &[], ImageNeed::None).await.is_err());

        runs(&second, "new", "m").await;
        reported().await;
        assert_eq!(barred(&app, 0), [None, None]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_the_only_node_with_other_weights_is_followed_at_once() {
    let (app, [first, second]) = endpoint(None);
    runs(&second, "third", "t").await;
    runs(&first, "old", "m").await;
    reported().await;
    runs(&first, "new", "m").await;
    reported().await;
    assert_eq!((serving(&app, "m").await.unwrap().as_str(), app.readiness()), ("decode-1", Readiness::Ok));
    // Under another name it is another model, and nobody answers to the old name any more.
    runs(&first, "newer", "n").await;
    reported().await;
    assert_eq!(serving(&app, "n").await.unwrap(), "decode-1");
    assert_eq!(
        (serving(&app, "m").await.unwrap_err(), app.readiness()),
        (RequestErrorKind::ModelNotFound, Readiness::Ok)
    );
}
