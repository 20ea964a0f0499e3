//! The readiness that `/health` reports to load balancers. Once the endpoint has started, it is ready as long as one of
//! its models can answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model_name;
use crate::targets::model_loading::LoadableModel;
use crate::targets::models::{ModelPool, ServedModel, UnusedNode};
use crate::targets::nodes::{HealthStatus, Node, NodeState};
use crate::targets::upstreams::UpstreamPool;

/// Readiness for a request sent now. Anyone may see the reasons, so they have no paths and no addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// It would be answered.
    Ok,
    /// It would be answered later.
    Loading {
        /// The cause of the wait.
        reason: String,
    },
    /// It would fail.
    Unavailable {
        /// The cause.
        reason: String,
    },
}

/// The readiness of all models.
struct ModelsReadiness {
    any_answers: bool,
    /// Why the others cannot. They do not make the endpoint unready: a load balancer would take it out of service for all
    /// models because of one.
    problems: Vec<Readiness>,
}

/// Returns whether a request sent now would be answered.
pub fn readiness(pool: &ModelPool, upstreams: &UpstreamPool) -> Readiness {
    let mut models = models_readiness(pool, upstreams);
    if models.any_answers || models.problems.is_empty() { Readiness::Ok } else { models.problems.swap_remove(0) }
}

/// Differences from the configuration that do not stop requests, a sentence each. Anyone may see them, so they name nodes
/// but no models and no addresses; the snapshot has those.
pub fn warnings(pool: &ModelPool, upstreams: &UpstreamPool) -> Vec<String> {
    let n_failed = failed_loads(pool).len();
    let failed = (n_failed > 0).then(|| format!("own models that could not be loaded: {n_failed}"));
    let models = models_readiness(pool, upstreams);
    let silent = models.problems.into_iter().filter(|_| models.any_answers).filter_map(|problem| match problem {
        Readiness::Ok => None,
        Readiness::Loading { reason } | Readiness::Unavailable { reason } => {
            Some(format!("a model cannot be answered for now: {reason}"))
        }
    });
    pool.unused_nodes().iter().map(UnusedNode::public_words).chain(failed).chain(silent).collect()
}

/// Models that could not be loaded on demand, a sentence each. Names models: for operators.
pub(super) fn failed_loads(pool: &ModelPool) -> Vec<String> {
    let failed = |model: &Arc<ServedModel>| {
        let why = model.loadable.as_ref()?.report().last_failure?;
        Some(format!("the model {:?} could not be loaded: {why}", model.name.get().map_or("", String::as_str)))
    };
    pool.models().iter().filter_map(failed).collect()
}

/// How many nodes are in each state. Nodes of models that are loaded on demand are left out: for them, not running is
/// normal.
pub fn node_states(pool: &ModelPool) -> BTreeMap<NodeState, usize> {
    let models = pool.models();
    // Count a node once: it is in the lists of all models that it may serve, and may have both tasks.
    let mut nodes: Vec<&Arc<Node>> = Vec::new();
    let permanent = models.iter().filter(|model| model.loadable.is_none());
    for node in permanent.flat_map(|model| model.decode.iter().chain(&model.prefill)) {
        if !nodes.iter().any(|known| Arc::ptr_eq(known, node)) {
            nodes.push(node);
        }
    }
    let mut states = BTreeMap::new();
    for node in nodes {
        *states.entry(node.health.state()).or_default() += 1;
    }
    states
}

fn models_readiness(pool: &ModelPool, upstreams: &UpstreamPool) -> ModelsReadiness {
    let models = pool.models();
    let mut any_answers = upstreams.answers();
    let mut is_starting = false;
    let mut problems = Vec::new();
    for model in models.iter().filter(|model| model.loadable.is_none()) {
        let serving = || model.name.get().and_then(|name| upstreams.serving(name, false));
        let is_ready = model.decode.iter().any(|node| model.ready_decode(node).is_some());
        // It is woken by a request.
        let can_wake = || model.decode.iter().any(|node| node.time_to_wake().is_some_and(|time| time.is_ok()));
        if is_ready || can_wake() || serving().is_some_and(|serving| serving.can_answer()) {
            any_answers = true;
        } else {
            is_starting |= first_silent(model).is_some_and(|(node, _)| node.health.is_new());
            problems.push(why_silent(model));
        }
    }
    // A model that is loaded on demand counts as one that answers; a failed load is a warning of its own. While the
    // endpoint starts, it counts only if it was loaded before, because the permanent models are still expected.
    let could_answer = |model: &LoadableModel| !is_starting || model.health.last_info().is_some();
    any_answers |= models.iter().filter_map(|model| model.loadable.as_deref()).any(could_answer);
    let is_local = |name: &str| models.iter().any(|model| model.names().any(|known| model_name::are_same(known, name)));
    if upstreams.unanswered(is_local).is_some() {
        problems.push(Readiness::Unavailable { reason: "no upstream of a model answers, or all are busy".to_owned() });
    }
    if models.is_empty() && upstreams.models().is_empty() && upstreams.may_yet_list() {
        problems.push(Readiness::Unavailable { reason: "no upstream has listed its models yet".to_owned() });
    }
    ModelsReadiness { any_answers, problems }
}

/// The first of a model's decode nodes whose state explains why it cannot generate.
fn first_silent(model: &ServedModel) -> Option<(&Arc<Node>, HealthStatus)> {
    let mut nodes = model.decode.iter().map(|node| (node, node.health.status()));
    nodes.find(|(_, status)| !matches!(status.state(), NodeState::Ready | NodeState::Suspect))
}

/// The reason why none of a model's nodes can generate.
fn why_silent(model: &ServedModel) -> Readiness {
    if let Some((_, status)) = first_silent(model) {
        return match status.state() {
            NodeState::Draining | NodeState::Down | NodeState::Asleep | NodeState::Waking => {
                Readiness::Unavailable { reason: status.words }
            }
            NodeState::Starting | NodeState::Unloaded | NodeState::Ready | NodeState::Suspect => {
                Readiness::Loading { reason: status.words }
            }
        };
    }
    Readiness::Unavailable { reason: model.why_unserved().into() }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::time::Duration;

    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::Engine;
    use baton_schemas::keep_alive::KeepAlive;
    use baton_schemas::node::NodeInfo;
    use tokio::sync::watch;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::targets::model_loading::{LoadableSettings, ModelProcess};
    use crate::targets::nodes::{Health, StateChange, StateReason};

    /// A model whose only node has this health.
    fn served(name: &str, health: &Arc<Health>) -> ServedModel {
        let sim = Arc::new(SimEngine::new(SimConfig::default()));
        let node = Node::new(name.to_owned(), None, sim, Arc::clone(health));
        ServedModel::new(OnceLock::from(name.to_owned()), Vec::new(), vec![node], Vec::new())
    }

    /// A model whose node has not answered yet.
    fn starting(name: &str) -> Arc<ServedModel> {
        Arc::new(served(name, &Health::new("it")))
    }

    /// A model that is loaded on demand, and is not loaded.
    fn unloaded(name: &str) -> (Arc<ServedModel>, Arc<Health>) {
        let health = Health::supervised(name);
        health.note_unloaded();
        let keep_alive = KeepAlive::Forever;
        let settings = LoadableSettings { name: name.to_owned(), estimated_bytes: 1, outline: None, keep_alive };
        let process = ModelProcess {
            wanted: watch::Sender::new(false),
            health: Arc::clone(&health),
            pid: Arc::default(),
            stop: CancellationToken::new(),
            tracker: TaskTracker::new(),
        };
        let mut model = served(name, &health);
        model.loadable = Some(LoadableModel::new(settings, process));
        (Arc::new(model), health)
    }

    async fn info() -> Arc<NodeInfo> {
        Arc::new(SimEngine::new(SimConfig::default()).info().await.unwrap())
    }

    /// `[model]`, which is starting, and one of `[[models]]`.
    fn starting_model_and_unloaded_model() -> (ModelPool, [Arc<Health>; 2]) {
        let health = Health::supervised("m");
        let (other, other_health) = unloaded("n");
        (ModelPool::of(vec![Arc::new(served("m", &health)), other]), [health, other_health])
    }

    fn readiness_of(pool: &ModelPool) -> Readiness {
        readiness(pool, &UpstreamPool::default())
    }

    fn warnings_of(pool: &ModelPool) -> Vec<String> {
        warnings(pool, &UpstreamPool::default())
    }

    #[tokio::test]
    async fn before_the_default_model_has_started_only_a_model_that_was_loaded_answers() {
        let (pool, [_, other]) = starting_model_and_unloaded_model();
        assert!(matches!(readiness_of(&pool), Readiness::Loading { .. }), "{:?}", readiness_of(&pool));
        other.note_answer(info().await);
        assert_eq!(readiness_of(&pool), Readiness::Ok);
        other.note_unloaded();
        assert_eq!(readiness_of(&pool), Readiness::Ok, "it can be loaded again");
    }

    #[tokio::test]
    async fn a_default_model_that_restarts_is_a_warning_if_another_can_be_loaded() {
        let (pool, [health, _]) = starting_model_and_unloaded_model();
        health.note_answer(info().await);
        assert_eq!((readiness_of(&pool), warnings_of(&pool).len()), (Readiness::Ok, 0));
        health.note_loading(StateReason::Ended);
        assert_eq!(readiness_of(&pool), Readiness::Ok);
        assert!(warnings_of(&pool)[0].contains("cannot be answered for"), "{:?}", warnings_of(&pool));
        // Alone, it leaves nothing that answers.
        let alone = ModelPool::of(vec![pool.models()[0].clone()]);
        assert!(matches!(readiness_of(&alone), Readiness::Loading { .. }), "{:?}", readiness_of(&alone));
    }

    #[tokio::test]
    async fn a_default_model_that_does_not_start_is_a_warning_if_another_can_be_loaded() {
        let (pool, [health, _]) = starting_model_and_unloaded_model();
        health.note_failure(&StateChange::new(StateReason::StartFailed, "broken"), Duration::from_secs(1));
        assert_eq!((readiness_of(&pool), warnings_of(&pool).len()), (Readiness::Ok, 1));
        health.note_loading(StateReason::Starts);
        assert_eq!((readiness_of(&pool), warnings_of(&pool).len()), (Readiness::Ok, 1), "it is tried again");
    }

    #[tokio::test]
    async fn a_model_that_cannot_answer_is_a_warning_if_another_can() {
        let health = Health::new("it");
        health.note_answer(info().await);
        let ready = Arc::new(served("m", &health));
        let pool = ModelPool::of(vec![Arc::clone(&ready)]);
        assert_eq!((readiness_of(&pool), warnings_of(&pool).len()), (Readiness::Ok, 0));
        let pool = ModelPool::of(vec![ready, starting("n")]);
        assert_eq!(readiness_of(&pool), Readiness::Ok);
        let is_warned = |warning: &String| warning.contains("cannot be answered for");
        assert!(warnings_of(&pool).iter().any(is_warned), "{:?}", warnings_of(&pool));
        let pool = ModelPool::of(vec![starting("n")]);
        assert!(matches!(readiness_of(&pool), Readiness::Loading { .. }), "{:?}", readiness_of(&pool));
        assert!(warnings_of(&pool).is_empty());
    }
}
