//! `POST /baton/plan`: plans a request and explains the plan, without generating.

use std::sync::Arc;

use baton_schemas::node::NodeInfo;
use baton_schemas::{EngineError, GenerateRequest};

use super::caller::Caller;
use super::failover::ask;
use super::plan::explanation::{Explanation, NodeWorkers};
use super::plan::{self, PlanRequest};
use super::prompt::{self, PromptNode};
use crate::admission::Admission;
use crate::error::RequestError;
use crate::targets::model_loading::KeepWish;
use crate::targets::models::ServedModel;
use crate::targets::nodes::{Node, WorkerReport};
use crate::targets::{Target, Targets};

/// Explains the route that a request would take now. The request must be admitted, because its prompt is rendered.
pub async fn explain(
    admission: &Admission,
    targets: &Targets,
    request: &GenerateRequest,
    caller: &Caller,
) -> Result<Explanation, RequestError> {
    let target = targets.resolve(Some(&request.model), &caller.account)?;
    let Target::Nodes { model, .. } = &target else {
        let feature =
            "plans of a model that only upstreams serve: the one with the fewest replies gets the request".to_owned();
        return Err(EngineError::Unsupported { feature }.into());
    };
    caller.account.take_request()?;
    let _lease = targets.lease(&target, KeepWish::of(request.keep_alive, &caller.account)).await?;
    let _permit = admission.admit_brief(&caller.account).await?;
    let prepare = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
        let at = PromptNode { node: &node, info: &info, key: caller.account.tag() };
        prompt::prepare(at, model.longest_context(&info), request).await
    };
    let prompt = ask(model, Some(&request.model), request.images(), &caller.poison, prepare).await?;
    caller.account.charge_tokens(prompt.tokens.len() as u64);
    let explained = plan::explain(model, &PlanRequest::of_prompt(&prompt, caller, &[]));
    Ok(Explanation::new(request.model.clone(), &explained, workers(model)))
}

/// The nodes of a model that compute with workers, each once.
fn workers(model: &ServedModel) -> Vec<NodeWorkers> {
    let mut found: Vec<NodeWorkers> = Vec::new();
    for node in model.decode.iter().chain(&model.prefill) {
        let workers = node.info().map(|info| WorkerReport::of(&info, false)).unwrap_or_default();
        if !workers.is_empty() && !found.iter().any(|known| known.node == node.name) {
            found.push(NodeWorkers { node: node.name.clone(), workers });
        }
    }
    found
}
