//! `POST /baton/plan`: plans a request and explains the plan, without generating.

use std::sync::Arc;

use baton_schemas::GenerateRequest;
use baton_schemas::node::NodeInfo;

use super::caller::Caller;
use super::failover::ask;
use super::generate::may_go_to_peers;
use super::plan::explanation::{Explanation, NodeWorkers};
use super::plan::{self, PlanRequest};
use super::prompt::{self, PromptNode};
use crate::admission::Admission;
use crate::error::RequestError;
use crate::targets::model_loading::KeepWish;
use crate::targets::models::ServedModel;
use crate::targets::nodes::{Node, WorkerReport};
use crate::targets::text_prefixes::PromptOutline;
use crate::targets::upstreams::{self, ServedByUpstreams};
use crate::targets::{Target, Targets};

/// Explains the route that a request would take now. The request must be admitted, because its prompt is rendered.
pub async fn explain(
    admission: &Admission,
    targets: &Targets,
    request: &GenerateRequest,
    caller: &Caller,
) -> Result<Explanation, RequestError> {
    let target = targets.resolve(Some(&request.model), &caller.account)?;
    caller.account.take_request()?;
    let (model, peers) = match &target {
        Target::Upstreams(serving) => {
            let seeing = upstreams::seeing(serving, request, &caller.request_id).await?;
            let snapshot = upstreams::snapshot(&seeing, &[], &outline(&seeing, request, caller), None);
            return Ok(Explanation::of_upstreams(request.model.clone(), &snapshot));
        }
        Target::Nodes { model, fallback } => (model, fallback.as_ref().and_then(ServedByUpstreams::peers)),
    };
    let _lease = targets.lease(&target, KeepWish::of(request.keep_alive, &caller.account)).await?;
    let _permit = admission.admit_brief(&caller.account).await?;
    let prepare = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
        let at = PromptNode { node: &node, info: &info, key: caller.account.tag() };
        prompt::prepare(at, model.longest_context(&info), request).await
    };
    let prompt = ask(model, Some(&request.model), request.images(), &caller.poison, prepare).await?;
    caller.account.charge_tokens(prompt.tokens.len() as u64);
    let explained = plan::explain(model, &PlanRequest::of_prompt(&prompt, request, caller));
    let explanation = Explanation::new(request.model.clone(), &explained, workers(model));
    let Some(peers) = peers.filter(|_| may_go_to_peers(model, request, caller)) else { return Ok(explanation) };
    let own = explained.choice.and_then(|choice| explained.candidates[choice.candidate].prediction);
    // Speeds of nodes are measured without requests.
    if own.is_none() {
        return Ok(explanation);
    }
    let snapshot = upstreams::snapshot(&peers, &[], &outline(&peers, request, caller), own);
    Ok(explanation.with_upstreams(&snapshot))
}

fn outline(serving: &ServedByUpstreams, request: &GenerateRequest, caller: &Caller) -> PromptOutline {
    PromptOutline::new(&serving.name, request, caller.cache_scope, upstreams::estimated_tokens(request))
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
