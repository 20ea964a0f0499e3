//! What is noted of requests that run on the simulator.

use std::sync::{Arc, OnceLock};

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_schemas::constraint::Constraint;
use baton_schemas::generate::{Input, Sampling, Thinking};
use baton_schemas::sampling_fields::SamplingFields;
use baton_schemas::tools::ToolUse;
use baton_schemas::{CacheScope, GenerateRequest};
use futures::StreamExt;
use serde_json::json;

use super::*;
use crate::account::request_memory::RequestHold;
use crate::account::{Account, KeyLimits};
use crate::admission::RequestAdmission;
use crate::http::HttpBackend;
use crate::observe::snapshot::{EndpointState, RequestsState};
use crate::request::caller::{Caller, CallerRole};
use crate::request::poison_case::PoisonCase;
use crate::serve::request_service::RequestService;
use crate::targets::models::{ModelPool, ServedModel};
use crate::targets::nodes::{Health, Node, NodeState};

/// An endpoint over these models of nodes.
pub(crate) fn over_models(models: Vec<Arc<ServedModel>>) -> RequestService {
    RequestService::over(Arc::new(ModelPool::of(models)))
}

pub(crate) async fn app() -> RequestService {
    let sim = SimEngine::new(SimConfig { prefill_tps: 10_000.0, decode_tps: 1_000.0, ..SimConfig::default() });
    let health = Health::new("it");
    health.note_answer(Arc::new(sim.info().await.unwrap()));
    let node = Node::new("local".into(), Some("http://10.0.0.7:9000".into()), Arc::new(sim), health);
    let model = ServedModel::new(OnceLock::from("m".to_owned()), vec!["alias".into()], vec![node], Vec::new());
    over_models(vec![Arc::new(model)])
}

pub(crate) fn request(model: &str) -> GenerateRequest {
    GenerateRequest {
        model: model.into(),
        input: Input::Text("a secret prompt".into()),
        n: 1,
        sampling: Sampling::default(),
        chosen: SamplingFields::default(),
        max_tokens: Some(8),
        stop: [].into(),
        top_logprobs: None,
        ignore_eos: true,
        constraint: None,
        tools: ToolUse::default(),
        thinking: Thinking::AsSaid,
        keep_alive: None,
        num_ctx: None,
        context: None,
        prompt_logprobs: None,
        predicted: None,
        is_streamed: true,
    }
}

pub(crate) fn caller() -> Caller {
    Caller {
        cache_scope: CacheScope::SHARED,
        request_id: "req_1".into(),
        role: CallerRole::Anyone,
        account: Arc::new(Account::new("anyone", KeyLimits::default())),
        secret: None,
        admission: RequestAdmission::default(),
        poison: PoisonCase::default(),
        memory: RequestHold::default(),
        warnings: Default::default(),
        kv_loss: Default::default(),
        policy: None,
        trace: None,
    }
}

#[tokio::test]
async fn a_request_leaves_its_route_with_what_was_predicted_and_what_happened() {
    let app = app().await;
    let mut done = app.generate(request("alias"), caller()).await.unwrap();
    let RequestsState { running, waiting, .. } = app.state(false).requests;
    assert_eq!((running, waiting), (0, 1), "the engine has not said that it has a slot");
    done.events.next().await.unwrap().unwrap();
    let state = app.state(false);
    let RequestsState { running, waiting, .. } = state.requests;
    assert_eq!((running, waiting, state.open.len(), state.routes.len()), (1, 0, 1, 0));
    let row = &state.open[0];
    assert_eq!((row.outcome, row.decode.as_str(), row.reason.as_str()), (None, "local", "only_route"));
    assert!(row.admitted_ms.unwrap() <= row.before_plan_ms && row.before_plan_ms <= row.e2e_ms);
    while let Some(event) = done.events.next().await {
        event.unwrap();
    }
    drop(done);
    let mut left = app.generate(request("m"), caller()).await.unwrap();
    left.events.next().await.unwrap().unwrap();
    drop(left);
    assert!(app.generate(request("nothing"), caller()).await.is_err());

    let state = app.state(false);
    assert_eq!((state.requests.running, state.open.len()), (0, 0));
    let [refused, cancelled, done] = &state.routes[..] else { panic!("{:?}", state.routes) };
    assert_eq!((refused.outcome, refused.error.as_deref()), (Some(RequestOutcome::Refused), Some("model_not_found")));
    assert_eq!((cancelled.outcome, done.outcome), (Some(RequestOutcome::Cancelled), Some(RequestOutcome::Done)));
    assert_eq!((done.model.as_str(), done.decode.as_str(), done.reason.as_str()), ("m", "local", "only_route"));
    assert_eq!((done.n_completion, done.request_id.as_str()), (8, "req_1"));
    let first_token_ms = done.before_plan_ms + done.ttft_ms.unwrap();
    assert!(done.slot_ms.unwrap() >= done.before_plan_ms && done.slot_ms.unwrap() <= first_token_ms);
    assert!(done.n_prompt > 0 && done.ttft_ms.unwrap() > 0.0 && done.e2e_ms >= done.ttft_ms.unwrap());

    // What the engine takes nothing of has not failed.
    let refused = GenerateRequest { constraint: Some(Constraint::JsonObject.into()), ..request("m") };
    assert!(app.generate(refused, caller()).await.is_err());
    assert_eq!(app.state(false).routes[0].outcome, Some(RequestOutcome::Refused));

    let node = &state.models[0].nodes[0];
    assert_eq!((node.state, node.slots, node.engine.as_str()), (NodeState::Ready, 4, "sim"));
    assert!(!node.decode_rates.is_empty(), "learned from the request");
}

#[tokio::test]
async fn the_snapshot_survives_json_and_holds_neither_prompts_nor_unasked_addresses() {
    let app = app().await;
    let mut reply = app.generate(request("m"), caller()).await.unwrap();
    while reply.events.next().await.is_some() {}
    drop(reply);
    let hidden = serde_json::to_string(&app.state(false)).unwrap();
    assert!(!hidden.contains("secret") && !hidden.contains("10.0.0.7"), "{hidden}");
    let shown = app.state(true);
    let json = serde_json::to_value(&shown).unwrap();
    assert_eq!(json["models"][0]["nodes"][0]["address"], json!("http://10.0.0.7:9000"));
    assert_eq!(serde_json::from_value::<EndpointState>(json).unwrap(), shown);
}
