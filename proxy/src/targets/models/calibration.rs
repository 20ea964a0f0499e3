//! Measures rates that no request has measured yet, on idle nodes.
//!
//! A plan needs a prefill rate and a decode rate of each decode node, a prefill rate of each prefill node, and the rate
//! of each link between them. One short made-up prompt measures an unknown rate. Links are measured again from time to
//! time, because a network changes without any request that would show it.
//!
//! A measurement gives way: an engine that gets a request ends it before the next step, because prompts that share a
//! step change the rounding of each other's numbers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_planner::cost::Route;
use baton_schemas::CacheScope;
use baton_schemas::handoff::HandoffFailure;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest, Token};
use futures::StreamExt;
use tokio::time::Instant;

use super::served_model::ServedModel;
use crate::targets::nodes::{Node, NodeClaim, Task};

/// The interval between two searches for unknown rates.
const INTERVAL: Duration = Duration::from_millis(500);

/// The maximum age of a link's measurement on idle nodes.
const LINK_AGE: Duration = Duration::from_secs(300);

/// The pause after a failed measurement. Doubles with each failure in a row, up to [`LINK_AGE`].
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// The longest that a measurement may take.
const DEADLINE: Duration = Duration::from_secs(60);

/// Tokens of a made-up prompt: enough for a rate, and few enough for a slow machine.
const PROMPT_TOKENS: u32 = 256;

/// The same for a node that computes with workers: several of its batches, since it computes one while a worker computes the next.
const PIPELINE_TOKENS: u32 = 2_048;

/// Tokens of the reply to a made-up prompt.
const OUTPUT_TOKENS: u32 = 8;

/// A measurement that may be due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Measurement {
    /// Prefill and decode rates of a decode node.
    Decode(usize),
    /// The prefill rate of a prefill node, and a handoff from it to a decode node.
    Prefill(usize, usize),
    /// The rate of a link.
    Link(usize, usize),
}

/// When a measurement is repeated.
#[derive(Debug, Clone, Copy)]
struct NextMeasurement {
    at: Instant,
    /// Failures since the last success.
    n_failed: u32,
    /// The last success showed a prefill node's rate. It is forgotten when the layers of a node with a worker are divided anew.
    showed_rate: bool,
}

/// How a measurement ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MeasurementEnd {
    Measured,
    /// A request came.
    GaveWay,
    Failed,
}

impl NextMeasurement {
    /// The next time after a measurement.
    fn after(outcome: MeasurementEnd, before: Option<NextMeasurement>) -> NextMeasurement {
        let n_failed = before.map_or(0, |due| due.n_failed);
        let (pause, n_failed) = match outcome {
            MeasurementEnd::Measured => (LINK_AGE, 0),
            MeasurementEnd::GaveWay => (RETRY_AFTER, n_failed),
            MeasurementEnd::Failed => {
                (RETRY_AFTER.saturating_mul(1 << n_failed.min(8)).min(LINK_AGE), n_failed.saturating_add(1))
            }
        };
        NextMeasurement { at: Instant::now() + pause, n_failed, showed_rate: false }
    }
}

/// Calibrates a model's nodes until the model is dropped. A model with one route needs no rates, because there is no
/// choice.
pub fn keep_calibrated(model: &Arc<ServedModel>) {
    if model.prefill.is_empty() && model.decode.len() < 2 {
        return;
    }
    let model = Arc::downgrade(model);
    tokio::spawn(async move {
        let mut due: HashMap<Measurement, NextMeasurement> = HashMap::new();
        while let Some(model) = model.upgrade() {
            for unknown in unknowns(&model, &due) {
                let measured = tokio::time::timeout(DEADLINE, measure(&model, unknown)).await;
                if let Ok(Err(error)) = &measured {
                    tracing::debug!(?unknown, %error, "a rate could not be measured; it is tried again later");
                }
                let outcome = match measured {
                    Ok(Ok(())) => MeasurementEnd::Measured,
                    Ok(Err(EngineError::GaveWay)) => MeasurementEnd::GaveWay,
                    Ok(Err(_)) | Err(_) => MeasurementEnd::Failed,
                };
                let next = NextMeasurement::after(outcome, due.get(&unknown).copied());
                let showed_rate = outcome == MeasurementEnd::Measured && has_prefill_rate(&model, unknown);
                due.insert(unknown, NextMeasurement { showed_rate, ..next });
            }
            drop(model);
            tokio::time::sleep(INTERVAL).await;
        }
    });
}

fn unknowns(model: &ServedModel, due: &HashMap<Measurement, NextMeasurement>) -> Vec<Measurement> {
    let idle = |node: &Node, task| node.load().active_slots == 0 && node.is_trusted(task);
    let decodes = |node: &Node| model.ready_decode(node).is_some_and(|info| info.generates) && idle(node, Task::Decode);
    let prefills =
        |node: &Node| node.info().is_some_and(|info| model.bars_prefill(&info).is_none()) && idle(node, Task::Prefill);
    let is_due = |unknown: &Measurement| {
        let is_forgotten = |due: &NextMeasurement| due.showed_rate && !has_prefill_rate(model, *unknown);
        due.get(unknown).is_none_or(|due| due.at <= Instant::now() || is_forgotten(due))
    };
    let links = model.routes.view().links;
    let mut found = Vec::new();
    for (d, decode) in model.decode.iter().enumerate().filter(|(_, node)| decodes(node)) {
        let rates = decode.rates();
        if !rates.decode.is_known() || !rates.prefill.is_known() {
            found.push(Measurement::Decode(d));
        }
        for (p, prefill) in model.prefill.iter().enumerate().filter(|(_, node)| prefills(node)) {
            if prefill.kv_source().is_none() || prefill.name == decode.name || model.bars_pair(p, d).is_some() {
                continue;
            }
            found.push(Measurement::Link(p, d));
            // On a slow link one handoff may not show the tail. Then further handoffs would not show it, either.
            let tried = due.get(&Measurement::Prefill(p, d)).is_some_and(|due| due.n_failed == 0);
            if !prefill.rates().prefill.is_known() || (links[p][d].tail_ms <= 0.0 && !tried) {
                found.push(Measurement::Prefill(p, d));
            }
        }
    }
    found.retain(is_due);
    found
}

/// Returns true if the prefill rate that a measurement shows is known.
fn has_prefill_rate(model: &ServedModel, unknown: Measurement) -> bool {
    matches!(unknown, Measurement::Prefill(p, _) if model.prefill[p].rates().prefill.is_known())
}

async fn measure(model: &ServedModel, unknown: Measurement) -> Result<(), EngineError> {
    match unknown {
        Measurement::Decode(decode) => try_out(model, Route { decode, prefill: None }).await,
        Measurement::Prefill(prefill, decode) => try_out(model, Route { decode, prefill: Some(prefill) }).await,
        Measurement::Link(prefill, decode) => {
            let Some(source) = model.prefill[prefill].kv_source() else { return Ok(()) };
            let link = model.decode[decode].engine.measure_link(&source).await?;
            model.routes.learn_link(prefill, decode, |known| {
                known.learn_probe(link.rtt_ms, link.n_bytes, link.seconds);
            });
            Ok(())
        }
    }
}

/// Runs a made-up prompt that no node has cached on a route, in a cache scope of its own. The decode node keeps nothing.
/// Errors: the engine's, or that the handoff failed, even if the decode node computed the prompt itself; `GaveWay` if a
/// request came on either node.
async fn try_out(model: &ServedModel, route: Route) -> Result<(), EngineError> {
    let node = &model.decode[route.decode];
    let Some(info) = node.info() else { return Ok(()) };
    let has_workers = |p: usize| model.prefill[p].info().is_some_and(|info| !info.workers.is_empty());
    // Layers are lent by the rates of both engines, which must be those of one length.
    let n_wanted = match model.lending_engine.is_some() || route.prefill.is_some_and(has_workers) {
        true => PIPELINE_TOKENS,
        false => PROMPT_TOKENS,
    };
    let n_prompt = n_wanted.min(info.n_ctx.saturating_sub(OUTPUT_TOKENS + 1)).max(1);
    let request = SequenceRequest {
        prompt: (0..n_prompt).map(|_| rand::random_range(0..info.n_vocab.max(1)) as Token).collect(),
        max_tokens: Some(OUTPUT_TOKENS),
        ignore_eos: true,
        ephemeral: true,
        gives_way: true,
        cache_scope: CacheScope(rand::random()),
        kv_source: route.prefill.and_then(|p| model.prefill[p].kv_source()),
        ..SequenceRequest::default()
    };
    // If the handoff breaks, the decode node computes the prompt.
    let nodes = route.prefill.map(|p| &model.prefill[p]).into_iter().chain([node]);
    let mut claims: Vec<NodeClaim> = nodes.map(|node| node.claim_measurement(n_prompt)).collect();
    let mut deltas = node.engine.generate(request).await?;
    let mut failure = None;
    while let Some(delta) = deltas.next().await {
        match delta? {
            SequenceEvent::Handoff(timings) => {
                model.learn_handoff(route, &timings, false);
                failure = timings.failure;
            }
            SequenceEvent::Finished { timings, .. } => model.learn_stream(route, &timings),
            SequenceEvent::Token(_) => claims.iter_mut().for_each(NodeClaim::prompt_done),
            SequenceEvent::Started { .. } | SequenceEvent::PrefillBegun => {}
        }
    }
    match failure {
        None => Ok(()),
        Some(HandoffFailure::GaveWay) => Err(EngineError::GaveWay),
        Some(failure) => Err(EngineError::internal(format!("the handoff failed: {}", failure.as_str()))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::{Mutex, OnceLock};

    use async_trait::async_trait;
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::wrapper::EngineWrapper;
    use baton_link::{Engine, SequenceStream};
    use baton_planner::rates::Curve;
    use baton_schemas::handoff::{HandoffReport, KvSource, LinkMeasurement};
    use baton_schemas::node::NodeLoad;
    use baton_schemas::sequence::Timings;

    use super::*;
    use crate::targets::nodes::{Health, PromptHashes};

    /// A node on which this many pulls fail for a reason, and later ones succeed. Notes when it was asked to pull.
    struct Pulling {
        sim: SimEngine,
        failure: HandoffFailure,
        n_failures: AtomicU32,
        asked: Arc<Mutex<Vec<Instant>>>,
    }

    #[async_trait]
    impl EngineWrapper for Pulling {
        fn inner(&self) -> &dyn Engine {
            &self.sim
        }

        async fn measure_link(&self, _: &KvSource) -> Result<LinkMeasurement, EngineError> {
            Ok(LinkMeasurement { rtt_ms: 1.0, n_bytes: 1 << 24, seconds: 0.1 })
        }

        async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
            let mut handoff = HandoffReport { n_computed: 256, prefill_ms: 100.0, ..HandoffReport::default() };
            if request.kv_source.is_some() {
                self.asked.lock().unwrap().push(Instant::now());
                let fails = self.n_failures.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
                handoff.failure = fails.is_ok().then_some(self.failure);
            }
            let timings =
                Timings { predicted_n: 8, predicted_ms: 70.0, prompt_n: 256, prompt_ms: 99.0, ..Timings::default() };
            let finished = SequenceEvent::Finished { reason: baton_schemas::FinishReason::Length, timings };
            Ok(futures::stream::iter([Ok(SequenceEvent::Handoff(handoff)), Ok(finished)]).boxed())
        }
    }

    /// A node that never ends a prompt, and reports it from the first one on.
    struct Endless {
        sim: SimEngine,
        works: Arc<AtomicBool>,
    }

    #[async_trait]
    impl EngineWrapper for Endless {
        fn inner(&self) -> &dyn Engine {
            &self.sim
        }

        async fn load(&self) -> Result<NodeLoad, EngineError> {
            let n = u32::from(self.works.load(Ordering::Acquire));
            Ok(NodeLoad { active_slots: n, prefill_backlog: n * PROMPT_TOKENS, ..NodeLoad::default() })
        }

        async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
            self.works.store(true, Ordering::Release);
            Ok(futures::stream::pending().boxed())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_plan_waits_for_a_measurement() {
        let works = Arc::default();
        let node = async |name: &str| {
            let engine = Endless { sim: SimEngine::new(SimConfig::default()), works: Arc::clone(&works) };
            let health = Health::new(name);
            health.note_answer(Arc::new(Engine::info(&engine).await.unwrap()));
            Node::new(name.into(), Some("http://192.0.2.1:9000".into()), Arc::new(engine), health)
        };
        let (decode, prefill) = (vec![node("d").await], vec![node("p").await]);
        let model = Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill));
        keep_calibrated(&model);
        let work = |node: &Node, task| {
            assert_eq!((node.load().active_slots, node.load().prefill_backlog), (1, PROMPT_TOKENS));
            let view = node.view(task, &PromptHashes::new(CacheScope::SHARED, &[1]));
            (view.n_active, view.n_queued, view.n_backlog)
        };
        tokio::time::sleep(DEADLINE / 2).await;
        assert_eq!(work(&model.decode[0], Task::Decode), (0, 0, 0), "while its own rates are measured");
        tokio::time::sleep(DEADLINE).await;
        assert_eq!(work(&model.decode[0], Task::Decode), (0, 0, 0), "while a handoff is measured");
        assert_eq!(work(&model.prefill[0], Task::Prefill), (0, 0, 0), "while a handoff is measured");
    }

    /// A model that is calibrated, of whose pulls the first `n_failures` fail for this reason, and when they were asked for.
    async fn pulling(failure: HandoffFailure, n_failures: u32) -> (Arc<ServedModel>, Arc<Mutex<Vec<Instant>>>) {
        let asked = Arc::default();
        let sim = SimEngine::new(SimConfig::default());
        let pulling = Pulling { sim, failure, n_failures: n_failures.into(), asked: Arc::clone(&asked) };
        let info = Arc::new(Engine::info(&pulling).await.unwrap());
        let node = |name: &str, engine: Arc<dyn Engine>| {
            let health = Health::new(name);
            health.note_answer(Arc::clone(&info));
            Node::new(name.into(), Some("http://192.0.2.1:9000".into()), engine, health)
        };
        let decode = vec![node("d", Arc::new(pulling))];
        let prefill = vec![node("p", Arc::new(SimEngine::new(SimConfig::default())))];
        let model = Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill));
        keep_calibrated(&model);
        (model, asked)
    }

    /// The pauses in seconds between pulls, of which the first three fail for this reason.
    async fn pauses_after(failure: HandoffFailure) -> Vec<u64> {
        let (model, asked) = pulling(failure, 3).await;
        tokio::time::sleep(Duration::from_secs(120)).await;
        let asked = asked.lock().unwrap();
        assert!(model.prefill[0].rates().prefill.is_known());
        asked.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_handoff_that_failed_is_tried_again_soon_and_ever_less_often() {
        for failure in [HandoffFailure::ImportFailed, HandoffFailure::PrefillLate] {
            assert_eq!(pauses_after(failure).await, [5, 10, 20], "and once it went well, no more");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_that_is_forgotten_is_measured_again() {
        let (model, asked) = pulling(HandoffFailure::ImportFailed, 0).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        let before = asked.lock().unwrap().len();
        model.prefill[0].learn(|rates| rates.prefill = Curve::default());
        tokio::time::sleep(2 * INTERVAL).await;
        assert!(model.prefill[0].rates().prefill.is_known());
        assert_eq!(asked.lock().unwrap().len(), before + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_handoff_that_gave_way_is_not_a_failure() {
        assert_eq!(pauses_after(HandoffFailure::GaveWay).await, [5, 5, 5]);
    }
}
