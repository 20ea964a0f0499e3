//! The snapshot, out of what is running.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use baton_planner::rates::Curve;
use baton_planner::reason::{BarReason, FailureReason};
use baton_schemas::handoff::HandoffFailure;
use baton_schemas::node::NodeInfo;

use super::{
    BreakerState, EndpointState, FallbackState, LinkState, ModelState, NodeState, RatePoint, RequestsState,
    ResidencyState, Task, TransitionState, UpstreamState,
};
use crate::observe::Journal;
use crate::observe::readiness::failed_loads;
use crate::targets::model_loading::Presence;
use crate::targets::nodes::{
    BreakerView, Fallback, FallbackReason, Fallbacks, Life, Node, Pool, ServedModel, Transition,
};
use crate::targets::upstreams::{self, Member, UpstreamPool};

/// What a snapshot is taken of.
pub struct Observed<'a> {
    /// The models and their nodes.
    pub pool: &'a Pool,
    /// Servers that are asked in text.
    pub upstreams: &'a UpstreamPool,
    /// Admitted and waiting requests.
    pub requests: RequestsState,
    /// The last routes.
    pub journal: &'a Journal,
    /// Bytes that own models may take; `None`: no limit.
    pub memory_budget: Option<u64>,
}

/// Takes a snapshot. The nodes' addresses are for operators only.
pub fn snapshot(observed: &Observed<'_>, with_addresses: bool) -> EndpointState {
    let &Observed { pool, upstreams, .. } = observed;
    let models = pool.models();
    EndpointState {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        at_ms: unix_ms(SystemTime::now()),
        // Only the server knows.
        is_stopping: false,
        requests: observed.requests.clone(),
        models: models.iter().map(|served| model(served, &models, with_addresses)).collect(),
        upstreams: upstreams.members.iter().map(|member| upstream(member, with_addresses)).collect(),
        memory_budget_bytes: observed.memory_budget.unwrap_or(0),
        routes: observed.journal.latest(),
        warnings: pool.unused().iter().map(ToString::to_string).chain(failed_loads(pool)).collect(),
    }
}

fn model(model: &ServedModel, all: &[Arc<ServedModel>], with_addresses: bool) -> ModelState {
    let decodes = |n: &Arc<Node>| !is_anothers(model, all, n, ServedModel::bars_decode);
    let prefills = |n: &Arc<Node>| !is_anothers(model, all, n, ServedModel::bars_prefill);
    let decode = model.decode.iter().filter(|n| decodes(n)).map(|n| NodeState {
        barred: bar(model, n, ServedModel::bars_decode),
        ..node(n, Task::Decode, with_addresses)
    });
    let prefill = model.prefill.iter().filter(|n| prefills(n)).map(|n| NodeState {
        barred: bar(model, n, ServedModel::bars_prefill),
        ..node(n, Task::Prefill, with_addresses)
    });
    let known = model.routes.view();
    let from = (0..).zip(model.prefill.iter().zip(&known.links)).filter(|(_, (from, _))| prefills(from));
    let links = from.flat_map(|(p, (from, row))| {
        let to = (0..).zip(model.decode.iter().zip(row)).filter(|(_, (to, _))| decodes(to));
        to.map(move |(d, (to, link))| LinkState {
            prefill: from.name.clone(),
            decode: to.name.clone(),
            bytes_per_second: link.bytes_per_second,
            rtt_ms: link.rtt_ms,
            tail_ms: link.tail_ms,
            breaker: model.pairs.view(p, d).map(|view| breaker(view, HandoffFailure::as_str)).unwrap_or_default(),
        })
    });
    ModelState {
        name: model.name.get().cloned().unwrap_or_default(),
        aliases: model.aliases.clone(),
        policy: model.policy.name().to_string(),
        nodes: decode.chain(prefill).collect(),
        links: links.collect(),
        fallbacks: fallbacks(&model.fallbacks, FallbackReason::as_str),
        prediction_error: known.error,
        mean_output_tokens: crate::targets::nodes::expected_output(&known.n_output, None),
        residency: model.resident.as_ref().map(|resident| residency(resident.presence())),
    }
}

/// Why a node cannot do something for a model.
type Bars = fn(&ServedModel, &NodeInfo) -> Option<BarReason>;

fn bar(model: &ServedModel, node: &Node, bars: Bars) -> Option<String> {
    bars(model, &*node.info()?).map(|reason| reason.as_str().to_owned())
}

/// Whether a node serves another model and not this one, by what is known of it. Nodes lie in the lists of all models
/// that they may turn out to serve.
fn is_anothers(model: &ServedModel, all: &[Arc<ServedModel>], node: &Node, bars: Bars) -> bool {
    let Some(info) = node.last_info() else { return false };
    bars(model, &info).is_some() && all.iter().any(|model| bars(model, &info).is_none())
}

fn node(node: &Node, task: Task, with_address: bool) -> NodeState {
    let status = node.health.status();
    let breaker = breaker(node.breakers.of(task).view(), FailureReason::as_str);
    let life = match status.life() {
        // It fails at its other task.
        Life::Suspect if !status.is_silent() && !breaker.is_open => Life::Ready,
        life => life,
    };
    let info = status.running().map(Arc::clone);
    let (load, rates) = (node.load(), node.rates());
    let transition = |(transition, count): (Transition, u64)| TransitionState {
        from: transition.from,
        to: transition.to,
        reason: transition.reason.as_str().to_owned(),
        count,
    };
    let of_info = info.map(|info| NodeState {
        engine: info.engine.clone(),
        model: info.model.clone(),
        n_ctx: info.n_ctx,
        slots: info.n_slots,
        memory_bytes: info.memory.bytes(),
        ..NodeState::default()
    });
    NodeState {
        name: node.name.clone(),
        task,
        life,
        reason: (life != Life::Ready).then_some(status.words),
        life_since_ms: unix_ms(status.since),
        transitions: node.health.transitions().into_iter().map(transition).collect(),
        address: node.url.clone().filter(|_| with_address),
        active_slots: load.active_slots,
        queued: load.queued,
        prefill_backlog_tokens: load.prefill_backlog,
        free_kv_cells: load.free_cells,
        breaker,
        prefill_rates: points(&rates.prefill),
        decode_rates: points(&rates.decode),
        ..of_info.unwrap_or_default()
    }
}

fn residency(presence: Presence) -> ResidencyState {
    ResidencyState {
        life: presence.life.to_owned(),
        bytes: presence.bytes,
        measured_bytes: presence.measured_bytes,
        active: presence.n_active,
        waiting: u32::try_from(presence.n_waiting).unwrap_or(u32::MAX),
        expires_at_ms: presence.expires_at.map(unix_ms),
        loads: presence.n_loads,
        load_seconds: presence.load_time.as_secs_f64(),
        last_load_seconds: presence.last_load.as_secs_f64(),
        unloads: presence.unloads.iter().map(|(why, n)| (why.as_str().to_owned(), *n)).collect(),
        last_failure: presence.last_failure,
    }
}

fn upstream(member: &Member, with_address: bool) -> UpstreamState {
    let settings = member.client.settings();
    let (life, reason) = match member.life() {
        upstreams::Life::Unknown => (Life::Starting, None),
        upstreams::Life::Answers => (Life::Ready, None),
        upstreams::Life::Silent { reason } => (Life::Down, Some(reason.to_owned())),
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let running = member.n_running();
    UpstreamState {
        name: settings.name.clone(),
        kind: settings.kind.as_str().to_owned(),
        life,
        reason,
        address: with_address.then(|| settings.url.clone()),
        models: member.models(),
        running: count(running),
        waiting: count(member.n_claimed().saturating_sub(running)),
        limit: count(settings.max_concurrent),
        busy_ms: member.longest_busy().map_or(0, |left| left.as_millis() as u64),
        breaker: breaker(member.breaker.view(), |reason| reason),
        fallbacks: fallbacks(&member.fallbacks, |reason| reason),
    }
}

/// `word` names a reason.
fn breaker<R>(view: BreakerView<R>, word: fn(R) -> &'static str) -> BreakerState {
    BreakerState {
        is_open: view.is_open,
        failures_in_a_row: view.n_in_a_row,
        last_reason: view.last_reason.map(|reason| word(reason).to_owned()),
        failures: view.counts.into_iter().map(|(reason, n)| (word(reason).to_owned(), n)).collect(),
    }
}

/// `word` names a reason.
fn fallbacks<R: Copy + Ord>(fallbacks: &Fallbacks<R>, word: fn(R) -> &'static str) -> BTreeMap<String, FallbackState> {
    let state = |(reason, fallback): (R, Fallback)| {
        (word(reason).to_owned(), FallbackState { count: fallback.count, last_ms: unix_ms(fallback.last) })
    };
    fallbacks.view().into_iter().map(state).collect()
}

fn points(curve: &Curve) -> Vec<RatePoint> {
    let point = |(size, tokens_per_second)| RatePoint { size, tokens_per_second };
    curve.points().into_iter().map(point).collect()
}

fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
