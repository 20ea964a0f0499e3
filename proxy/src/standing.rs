//! Whether the endpoint is well, as `/health` tells load balancers: it is as long as one of its models could be
//! answered for.

use std::sync::Arc;

use crate::app::App;
use crate::http::Health;
use crate::pool::{Life, Node, ServedModel, names};

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
    let mut answers = upstreams.answers();
    let mut problems = Vec::new();
    for model in models.iter().filter(|model| model.resident.is_none()) {
        let deputies = || model.name.get().and_then(|name| upstreams.serving(name, false));
        let is_ready = model.decode.iter().any(|node| model.ready_decode(node).is_some());
        if is_ready || deputies().is_some_and(|serving| serving.can_answer()) {
            answers = true;
        } else {
            problems.push(why_silent(model));
        }
    }
    // One that is loaded when it is needed could, until it was tried; that it failed is a warning of its own. What is
    // still on its way is waited for all the same.
    let is_loading = problems.iter().any(|problem| matches!(problem, Health::Loading { .. }));
    answers |= !is_loading && models.iter().any(|model| model.resident.is_some());
    let is_local = |name: &str| models.iter().any(|model| model.names().any(|known| names::are_same(known, name)));
    if upstreams.unanswered(is_local).is_some() {
        problems.push(Health::Unavailable { reason: "no upstream of a model answers".to_owned() });
    }
    if models.is_empty() && upstreams.models().is_empty() && upstreams.may_yet_list() {
        problems.push(Health::Unavailable { reason: "no upstream has told its models yet".to_owned() });
    }
    Standing { answers, problems }
}

/// Why none of a model's nodes can generate, from the first of them that has something to say.
fn why_silent(model: &ServedModel) -> Health {
    for node in &model.decode {
        let status = node.health.status();
        match status.life() {
            Life::Ready | Life::Suspect => {}
            Life::Starting | Life::Unloaded => return Health::Loading { reason: status.words },
            Life::Draining | Life::Down => return Health::Unavailable { reason: status.words },
        }
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

    use baton_engines::sim::{SimConfig, SimEngine};

    use super::*;
    use crate::http::Backend;
    use crate::observe::tests::app;
    use crate::pool::{self, Pool};

    /// A model whose node has not answered yet.
    fn starting(name: &str) -> Arc<ServedModel> {
        let sim = Arc::new(SimEngine::new(SimConfig::default()));
        let node = Node::new(name.to_owned(), None, sim, pool::Health::new("it"));
        Arc::new(ServedModel::new(OnceLock::from(name.to_owned()), Vec::new(), vec![node], Vec::new()))
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
