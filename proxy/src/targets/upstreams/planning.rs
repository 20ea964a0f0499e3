//! Describes the upstreams of a model at one moment, for the planner.

use baton_planner::cost::Prediction;
use baton_planner::reason::BarReason;
use baton_planner::snapshot::RequestSize;
use baton_planner::upstreams::{UpstreamSnapshot, UpstreamView};
use baton_upstream::{ModelCapability, UpstreamError};

use super::{ServedByUpstreams, ServingUpstream};
use crate::targets::models::expected_output;
use crate::targets::text_prefixes::PromptOutline;

/// The upstreams at this moment, as a plan for this prompt sees them. Upstreams in `tried` have just failed or refused the request.
/// `own` is the best route of the model's own nodes, if they are an alternative.
pub fn snapshot(
    serving: &ServedByUpstreams,
    tried: &[usize],
    prompt: &PromptOutline,
    own: Option<Prediction>,
) -> UpstreamSnapshot {
    let usable = usable(serving, tried);
    let views: Vec<UpstreamView> = (0..)
        .zip(&serving.upstreams)
        .map(|(i, it)| view(it, prompt, incapable(it, prompt).or_else(|| bar(it, i, tried, &usable))))
        .collect();
    let lengths = views.iter().filter(|view| view.rates.output.is_known());
    let lengths: Vec<f64> = lengths.map(|view| expected_output(&view.rates.output, prompt.max_tokens)).collect();
    let n_output = match lengths.len() {
        0 => expected_output(&Default::default(), prompt.max_tokens),
        n => lengths.iter().sum::<f64>() / n as f64,
    };
    let request = RequestSize { n_prompt: prompt.n_tokens.max(1), n_replayed: 0, n_output };
    UpstreamSnapshot { request, upstreams: views, own, turn: serving.turn }
}

/// The upstreams that may be tried next; equals take turns to be the first. A failed or silent upstream is tried only if there
/// is no other. A silent one may be computing a reply and unable to answer anything else.
pub(super) fn usable(serving: &ServedByUpstreams, tried: &[usize]) -> Vec<usize> {
    let n = serving.upstreams.len();
    let rank = |idx: &usize| {
        let server = &serving.upstreams[*idx].server;
        (!server.breaker.would_pass(), server.is_silent())
    };
    let mut open: Vec<usize> = (0..n).map(|i| (i + serving.turn) % n).collect();
    open.retain(|idx| {
        let ServingUpstream { server, model } = &serving.upstreams[*idx];
        !tried.contains(idx) && server.busy_for(model).is_none()
    });
    let first = open.iter().map(rank).min();
    open.retain(|idx| Some(rank(idx)) == first);
    open
}

/// A prompt may have so many times fewer tokens than estimated.
const SPARSE: u32 = 2;

/// The error of a request that this upstream's model cannot answer, whatever its state.
///
/// Errors: the model lacks what the request needs, or its context is too small for the prompt.
pub(super) fn check_capable(
    ServingUpstream { server, model }: &ServingUpstream,
    prompt: &PromptOutline,
) -> Result<(), UpstreamError> {
    if let Some(lacking) = server.lacks(model, &prompt.needs) {
        return Err(UpstreamError::Unsupported { field: field_of(lacking) });
    }
    match server.n_ctx(model) {
        Some(n_ctx) if prompt.n_tokens / SPARSE > n_ctx => {
            Err(UpstreamError::TooLong { n_prompt: prompt.n_tokens, n_ctx })
        }
        _ => Ok(()),
    }
}

/// The field of a request that needs this.
pub(super) fn field_of(capability: ModelCapability) -> &'static str {
    match capability {
        ModelCapability::Tools => "tools",
        ModelCapability::Thinking => "reasoning_effort",
        ModelCapability::Embeddings | ModelCapability::Rerank => "input",
    }
}

fn incapable(upstream: &ServingUpstream, prompt: &PromptOutline) -> Option<BarReason> {
    let lacking = upstream.server.lacks(&upstream.model, &prompt.needs).map(|lacking| match lacking {
        ModelCapability::Tools => BarReason::NoTools,
        ModelCapability::Thinking | ModelCapability::Embeddings | ModelCapability::Rerank => BarReason::NoThinking,
    });
    lacking.or_else(|| check_capable(upstream, prompt).is_err().then_some(BarReason::ContextTooSmall))
}

/// The reason why this upstream is not asked now.
fn bar(upstream: &ServingUpstream, idx: usize, tried: &[usize], usable: &[usize]) -> Option<BarReason> {
    if tried.contains(&idx) {
        return Some(BarReason::JustFailed);
    }
    let is_busy = || upstream.server.busy_for(&upstream.model).is_some();
    let is_usable = usable.contains(&idx);
    (!is_usable).then(|| if is_busy() { BarReason::Busy } else { BarReason::Suspect })
}

fn view(upstream: &ServingUpstream, prompt: &PromptOutline, barred: Option<BarReason>) -> UpstreamView {
    let ServingUpstream { server, model } = upstream;
    let known = server.measures.of(model);
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    UpstreamView {
        name: server.name().to_owned(),
        barred,
        n_slots: count(server.places.n_places()),
        n_running: count(server.places.n_taken()),
        n_waiting: count(server.places.n_wanted()),
        n_backlog: known.n_backlog as u32,
        open: known.open,
        n_held: known.learned.held(&server.measures.runs(prompt)),
        belief: known.learned.belief(),
        rates: known.learned.rates,
        age: known.age,
        n_passed_over: known.n_passed_over,
        n_untaught: known.n_untaught,
    }
}

/// A request was sent to the upstream of this index: the others have missed a measurement.
pub(super) fn note_sent(serving: &ServedByUpstreams, chosen: usize) {
    let others = serving.upstreams.iter().enumerate().filter(|(i, _)| *i != chosen);
    others.for_each(|(_, ServingUpstream { server, model })| server.measures.passed_over(model));
}
