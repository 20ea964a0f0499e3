//! Whether the endpoint is well, as `/health` tells load balancers: once it has started, it is as long as one of its
//! models could be answered for.

use std::sync::Arc;

use crate::app::App;
use crate::http::Health;
use crate::targets::model_loading::Resident;
use crate::targets::nodes::{Life, Node, ServedModel, Status, names};

/// Which models could answer a request that came now.
pub(crate) struct Standing {
    /// One of them could.
    answers: bool,
    /// Of each that could not, why. The endpoint is well as long as another can: a balancer that took it out of service
    /// for one would take all of them from their clients.
    problems: Vec<Health>,
}

impl Standing {
    /// Whether a request sent now would be answered.
    pub(crate) fn health(mut self) -> Health {
        if self.answers || self.problems.is_empty() { Health::Ok } else { self.problems.swap_remove(0) }
    }

    /// What is said beside that it would be. Which model it is is not for everybody: it is in the state.
    pub(crate) fn warnings(self) -> Vec<String> {
        let silent = self.problems.into_iter().filter_map(|problem| match problem {
            Health::Ok => None,
            Health::Loading { reason } | Health::Unavailable { reason } => {
                Some(format!("a model cannot be answered for now: {reason}"))
            }
        });
        if self.answers { silent.collect() } else { Vec::new() }
    }
}

/// Looks at all models.
pub(crate) fn standing(app: &App) -> Standing {
    let (models, upstreams) = (app.pool.models(), app.upstreams.load());
    let (mut answers, mut is_starting) = (upstreams.answers(), false);
    let mut problems = Vec::new();
    for model in models.iter().filter(|model| model.resident.is_none()) {
        let deputies = || model.name.get().and_then(|name| upstreams.serving(name, false));
        let is_ready = model.decode.iter().any(|node| model.ready_decode(node).is_some());
        if is_ready || deputies().is_some_and(|serving| serving.can_answer()) {
            answers = true;
        } else {
            is_starting |= first_silent(model).is_some_and(|(node, _)| node.health.is_new());
            problems.push(why_silent(model));
        }
    }
    // One that is loaded when it is needed could, until it was tried; that it failed is a warning of its own. While the
    // endpoint starts, what is always there is waited for all the same, unless the other has been loaded before. A
    // restart later on takes nothing out of service.
    let could = |resident: &Resident| !is_starting || resident.health.last_info().is_some();
    answers |= models.iter().filter_map(|model| model.resident.as_deref()).any(could);
    let is_local = |name: &str| models.iter().any(|model| model.names().any(|known| names::are_same(known, name)));
    if upstreams.unanswered(is_local).is_some() {
        problems.push(Health::Unavailable { reason: "no upstream of a model answers, or all are busy".to_owned() });
    }
    if models.is_empty() && upstreams.models().is_empty() && upstreams.may_yet_list() {
        problems.push(Health::Unavailable { reason: "no upstream has told its models yet".to_owned() });
    }
    Standing { answers, problems }
}

/// The first of a model's nodes that has something to say of why it cannot generate.
fn first_silent(model: &ServedModel) -> Option<(&Arc<Node>, Status)> {
    let mut nodes = model.decode.iter().map(|node| (node, node.health.status()));
    nodes.find(|(_, status)| !matches!(status.life(), Life::Ready | Life::Suspect))
}

/// Why none of a model's nodes can generate.
fn why_silent(model: &ServedModel) -> Health {
    if let Some((_, status)) = first_silent(model) {
        return match status.life() {
            Life::Draining | Life::Down => Health::Unavailable { reason: status.words },
            Life::Starting | Life::Unloaded | Life::Ready | Life::Suspect => Health::Loading { reason: status.words },
        };
    }
    let only_prefill = |node: &Arc<Node>| node.info().is_some_and(|info| !info.role.decodes());
    let reason = match model.decode.iter().all(only_prefill) {
        true => "the nodes that are to generate only compute prompts (--role prefill)",
        false => "no node runs what a model's name stands for",
    };
    Health::Unavailable { reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::time::Duration;

    use baton_engines::Engine;
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_schemas::keep_alive::KeepAlive;
    use baton_schemas::node::NodeInfo;
    use tokio::sync::watch;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::http::Backend;
    use crate::observe::tests::app;
    use crate::targets::model_loading::{Process, ResidentSettings};
    use crate::targets::nodes::{self, Pool, Why};

    /// A model whose node has this life.
    fn served(name: &str, life: &Arc<nodes::Health>) -> ServedModel {
        let sim = Arc::new(SimEngine::new(SimConfig::default()));
        let node = Node::new(name.to_owned(), None, sim, Arc::clone(life));
        ServedModel::new(OnceLock::from(name.to_owned()), Vec::new(), vec![node], Vec::new())
    }

    /// A model whose node has not answered yet.
    fn starting(name: &str) -> Arc<ServedModel> {
        Arc::new(served(name, &nodes::Health::new("it")))
    }

    /// A model that comes and goes, and is not there.
    fn unloaded(name: &str) -> (Arc<ServedModel>, Arc<nodes::Health>) {
        let health = nodes::Health::of_a_kept_one(name);
        health.unloads();
        let keep_alive = KeepAlive::Forever;
        let settings =
            ResidentSettings { name: name.to_owned(), estimated_bytes: 1, outline: None, n_slots: 1, keep_alive };
        let process = Process {
            wanted: watch::Sender::new(false),
            health: Arc::clone(&health),
            pid: Arc::default(),
            stop: CancellationToken::new(),
            tracker: TaskTracker::new(),
        };
        let mut model = served(name, &health);
        model.resident = Some(Resident::new(settings, process));
        (Arc::new(model), health)
    }

    async fn info() -> Arc<NodeInfo> {
        Arc::new(SimEngine::new(SimConfig::default()).info().await.unwrap())
    }

    /// An endpoint with `[model]`, which is starting, and one of `[[models]]`; and their lives.
    async fn house() -> (App, [Arc<nodes::Health>; 2]) {
        let life = nodes::Health::of_a_kept_one("m");
        let (other, other_life) = unloaded("n");
        let pool = Arc::new(Pool::of(vec![Arc::new(served("m", &life)), other]));
        (App { pool, ..app().await }, [life, other_life])
    }

    #[tokio::test]
    async fn until_the_default_model_has_started_only_another_that_was_loaded_answers() {
        let (app, [_, other]) = house().await;
        assert!(matches!(app.health(), Health::Loading { .. }), "{:?}", app.health());
        other.answers(info().await);
        assert_eq!(app.health(), Health::Ok);
        other.unloads();
        assert_eq!(app.health(), Health::Ok, "it can be loaded again");
    }

    #[tokio::test]
    async fn a_default_model_that_restarts_is_a_warning_beside_one_that_can_be_loaded() {
        let (app, [life, _]) = house().await;
        life.answers(info().await);
        assert_eq!((app.health(), app.warnings().len()), (Health::Ok, 0));
        life.loads("ended");
        assert_eq!(app.health(), Health::Ok);
        assert!(app.warnings()[0].contains("cannot be answered for"), "{:?}", app.warnings());
        // Alone it leaves nobody who answers.
        let alone = Pool::of(vec![app.pool.models()[0].clone()]);
        let app = App { pool: Arc::new(alone), ..app };
        assert!(matches!(app.health(), Health::Loading { .. }), "{:?}", app.health());
    }

    #[tokio::test]
    async fn a_default_model_that_does_not_start_is_a_warning_beside_one_that_can_be_loaded() {
        let (app, [life, _]) = house().await;
        life.fails(&Why::plainly("start_failed", "broken"), Duration::from_secs(1));
        assert_eq!((app.health(), app.warnings().len()), (Health::Ok, 1));
        life.loads("starts");
        assert_eq!((app.health(), app.warnings().len()), (Health::Ok, 1), "it is tried again");
    }

    #[tokio::test]
    async fn one_model_that_cannot_be_answered_for_is_a_warning_beside_another() {
        let ready = app().await;
        assert_eq!((ready.health(), ready.warnings().len()), (Health::Ok, 0));
        let both = [ready.pool.models()[0].clone(), starting("n")].to_vec();
        let app = App { pool: Arc::new(Pool::of(both)), ..ready };
        assert_eq!(app.health(), Health::Ok);
        assert!(
            app.warnings().iter().any(|warning| warning.contains("cannot be answered for")),
            "{:?}",
            app.warnings()
        );
        let app = App { pool: Arc::new(Pool::of(vec![starting("n")])), ..app };
        assert!(matches!(app.health(), Health::Loading { .. }), "{:?}", app.health());
        assert!(app.warnings().is_empty());
    }
}
