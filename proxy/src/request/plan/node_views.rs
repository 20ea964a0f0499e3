//! The snapshot of a model's nodes for one request.

use baton_planner::rates::TransferRates;
use baton_planner::reason::BarReason;
use baton_planner::snapshot::{NodeView, RequestSize, Snapshot};
use baton_schemas::node::NodeInfo;

use super::plan_request::PlanRequest;
use crate::targets::models::{ImageNeed, ServedModel, expected_output};
use crate::targets::nodes::{Node, PromptHashes, Task};

/// The nodes at this moment. `turn` is the request's number, for policies that take turns.
pub(super) fn snapshot(model: &ServedModel, request: &PlanRequest<'_>, turn: u64) -> Snapshot {
    let hashes = PromptHashes::new(request.scope, request.tokens).for_kv(request.lossless_kv);
    let n_prompt = u32::try_from(request.tokens.len()).unwrap_or(u32::MAX);
    snapshot_of_size(model, request, n_prompt, &hashes, turn)
}

/// The nodes as a prompt of `n_prompt` tokens sees them.
pub(super) fn snapshot_of_size(
    model: &ServedModel,
    request: &PlanRequest<'_>,
    n_prompt: u32,
    hashes: &PromptHashes<'_>,
    turn: u64,
) -> Snapshot {
    let routes = model.routes.view();
    let size = RequestSize {
        n_prompt,
        n_replayed: request.n_replayed,
        n_output: expected_output(&routes.n_output, request.max_tokens),
    };
    let prefill = model.prefill.iter().enumerate().map(|(p, node)| {
        let view = waking_if(request.may_wake, node.view(Task::Prefill, hashes));
        let barred = view.barred.map(|reason| if reason == BarReason::Down { BarReason::PREFILL_DOWN } else { reason });
        let barred = barred.or_else(|| {
            let info = node.planned_info()?;
            let lacks_projector = !ImageNeed::of_prompt(request.projector).is_met_by(&info);
            model.bars_prefill(&info).or(lacks_projector.then_some(BarReason::NoProjector))
        });
        NodeView { barred: barred.or(request.exclude_prefill.contains(&p).then_some(BarReason::JustFailed)), ..view }
    });
    let for_kv = |row: Vec<TransferRates>| row.into_iter().map(|link| link.for_kv(request.lossless_kv)).collect();
    let links = routes.links.into_iter().map(for_kv).collect();
    Snapshot {
        request: size,
        prefill: prefill.collect(),
        decode: decode_nodes(model, request, &size, hashes),
        links,
        barred_pairs: barred_pairs(model, request),
        corrections: routes.corrections,
        turn,
    }
}

/// The view of a plan that wakes no machine bars those that sleep.
fn waking_if(may_wake: bool, view: NodeView) -> NodeView {
    let barred = view.wake_ms.filter(|_| !may_wake).map(|_| BarReason::Asleep);
    NodeView { barred: view.barred.or(barred), ..view }
}

/// Why no handoff is tried between two nodes: the decode node would refuse the KV, or handoffs have failed.
fn barred_pairs(model: &ServedModel, request: &PlanRequest<'_>) -> Vec<Vec<Option<BarReason>>> {
    let hands_over_images = |node: &Node| node.planned_info().is_some_and(|info| info.hands_over_images);
    let mut barred = model.pairs.barred();
    for (p, row) in barred.iter_mut().enumerate() {
        for (d, reason) in row.iter_mut().enumerate() {
            let are_known = || hands_over_images(&model.prefill[p]) && hands_over_images(&model.decode[d]);
            let images = (request.projector.is_some() && !are_known()).then_some(BarReason::Images);
            *reason = model.bars_pair(p, d).or(*reason).or(images);
        }
    }
    barred
}

/// Returns the decode nodes. A node is barred if it cannot generate for this request, or if another one should.
fn decode_nodes(
    model: &ServedModel,
    request: &PlanRequest<'_>,
    size: &RequestSize,
    hashes: &PromptHashes<'_>,
) -> Vec<NodeView> {
    let infos: Vec<_> = model.decode.iter().map(|node| node.planned_info()).collect();
    let unfit: Vec<_> = infos.iter().map(|info| unfit(model, info.as_deref()?, request, size.n_prompt)).collect();
    let looked_at = model.decode.iter().enumerate().map(|(i, node)| {
        let mut view = waking_if(request.may_wake, node.view(Task::Decode, hashes));
        if request.seat.is_some_and(|seat| seat != i) {
            view.n_queued = view.n_queued.saturating_add(u32::try_from(node.places.n_wanted()).unwrap_or(u32::MAX));
        }
        let barred = unfit[i].or(view.barred).or(request.exclude.contains(&i).then_some(BarReason::JustFailed));
        NodeView { barred, ..view }
    });
    let mut views: Vec<_> = looked_at.collect();
    // A failing node is better than none, but a node that has just failed this request is used only if there is no
    // other.
    for has_just_failed in [false, true] {
        if views.iter().any(|view| view.barred.is_none()) {
            break;
        }
        let answers = |i: usize| model.decode[i].info().is_some();
        let those = |i: &usize| answers(*i) && request.exclude.contains(i) == has_just_failed;
        for i in (0..views.len()).filter(those) {
            views[i].barred = unfit[i];
        }
    }
    // If one node has room for the whole reply, bar the nodes that would cut it short.
    let n_ctx = |i: usize| infos[i].as_ref().map_or(0, |info| u64::from(info.n_ctx));
    let open = (0..views.len()).filter(|&i| views[i].barred.is_none());
    let longest = open.map(n_ctx).max().unwrap_or(0);
    let n_output = request.max_tokens.map_or(size.n_output.ceil() as u64, u64::from);
    let wanted = (u64::from(size.n_prompt) + n_output).min(longest);
    for (_, view) in views.iter_mut().enumerate().filter(|(i, view)| view.barred.is_none() && n_ctx(*i) < wanted) {
        view.barred = Some(BarReason::ContextTooSmall);
    }
    views
}

/// Returns the reason why even a healthy decode node cannot generate for this request.
fn unfit(model: &ServedModel, info: &NodeInfo, request: &PlanRequest<'_>, n_prompt: u32) -> Option<BarReason> {
    // Reserve room for one new token, unless none is wanted.
    let n_needed = u64::from(n_prompt) + u64::from(request.max_tokens != Some(0));
    let lacks_projector = !ImageNeed::of_prompt(request.projector).is_met_by(info);
    let barred = model.bars_decode(info).or(lacks_projector.then_some(BarReason::NoProjector));
    barred.or((n_needed > u64::from(info.n_ctx)).then_some(BarReason::ContextTooSmall))
}
