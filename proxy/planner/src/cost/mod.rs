//! Predicts the time of every route.
//!
//! Direct: `queue + restore + uncached tokens ÷ prefill rate + step`. Handoff: `round trip + queue + restore + max(prefill +
//! last chunk's wire, first chunk's prefill + wire) + tail + step`. What a node's store has is restored if that is faster than
//! computing it; the decode node pulls the rest meanwhile. Prefill and wire overlap, except for the first chunk's prefill and
//! the last chunk's wire. A model with states of recurrent layers has their time on the wire after the last chunk, as far as
//! it was seen not to overlap; and its decode node computes the head of the reply itself. The tail is the last chunk's export,
//! check and import. Completion adds a step for each further token. The rates are those measured at this prompt length and
//! this number of streams.
//!
//! If a machine sleeps, the time until it is awake comes first. Such a route is open only where it pays: every route without
//! a sleeping machine is predicted to complete later, or there is none.

mod prediction;
mod prompt_start;

use baton_schemas::handoff::PULL_AHEAD;

pub use self::prediction::Prediction;
use self::prediction::{RouteSeconds, after_waking, corrected, prediction};
use self::prompt_start::PromptStart;
pub use self::prompt_start::{n_cached, n_promised};
use super::reason::{BarReason, RouteKind};
use super::snapshot::{NodeView, RequestSize, Snapshot};
use crate::rates::{FIRST_CHUNK_TOKENS, LAST_CHUNK_TOKENS, REPLY_HEAD_TOKENS, TransferRates, WireBytes, batch_size};

/// The minimum gain of a handoff, or of leaving the own nodes, as a share of the other route's time to first token. Predictions
/// err, and a handoff that does not pay is worse than none. It is not a share of the completion time, because a long reply takes long on
/// every route and would outweigh a first token in half the time.
const MARGIN: f64 = 0.02;

/// The minimum gain of a handoff in milliseconds: a smaller gain is within the error of a prediction.
const MIN_GAIN_MS: f64 = 5.0;

/// The least gain in milliseconds for which a route with this time to first token is left for a less usual one.
pub(crate) fn worthwhile_gain_ms(ttft_ms: f64) -> f64 {
    (MARGIN * ttft_ms).max(MIN_GAIN_MS)
}

/// The nodes that serve a request, as indices into the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The node that generates.
    pub decode: usize,
    /// The node that computes the prompt, if that is another.
    pub prefill: Option<usize>,
}

impl Route {
    pub fn kind(self) -> RouteKind {
        if self.prefill.is_some() { RouteKind::Handoff } else { RouteKind::Direct }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct RouteCandidate {
    pub route: Route,
    /// The predicted times; `None` if the route is barred or its rates are unknown.
    pub prediction: Option<Prediction>,
    /// The reason why the route cannot be taken, if there is one.
    pub barred: Option<BarReason>,
}

/// Returns all routes, direct ones first.
pub fn candidates(snapshot: &Snapshot) -> Vec<RouteCandidate> {
    let decoders = || 0..snapshot.decode.len();
    let direct = decoders().map(|decode| Route { decode, prefill: None });
    let handoff = (0..snapshot.prefill.len())
        .filter(|prefill| !snapshot.prefill[*prefill].only_drafts)
        .flat_map(|prefill| decoders().map(move |decode| Route { decode, prefill: Some(prefill) }));
    let mut all: Vec<_> = direct.chain(handoff).map(|route| candidate(snapshot, route)).collect();
    bar_needless_waking(snapshot, &mut all);
    all
}

/// Bars the routes for which a machine would have to be woken, unless that is predicted to complete earlier than every other
/// route, by what a handoff must gain, too. Whatever the policy: waking costs more than time.
fn bar_needless_waking(snapshot: &Snapshot, all: &mut [RouteCandidate]) {
    let wakes = |c: &RouteCandidate| c.barred.is_none() && wake_ms(snapshot, c.route).is_some();
    let awake: Vec<_> = all.iter().filter(|c| c.barred.is_none() && !wakes(c)).map(|c| c.prediction).collect();
    if awake.is_empty() {
        return;
    }
    // Where a route without waking cannot be predicted, nothing shows that waking pays.
    let known: Option<Vec<Prediction>> = awake.into_iter().collect();
    let first = known.and_then(|known| known.into_iter().min_by(|a, b| a.completion_ms.total_cmp(&b.completion_ms)));
    let pays = |woken: &Prediction| {
        first.is_some_and(|first| woken.completion_ms + worthwhile_gain_ms(first.ttft_ms) < first.completion_ms)
    };
    for c in all.iter_mut().filter(|c| wakes(c) && !c.prediction.as_ref().is_some_and(pays)) {
        *c = RouteCandidate { route: c.route, prediction: None, barred: Some(BarReason::Asleep) };
    }
}

/// Milliseconds until the sleeping machines of a route are awake, which wake at the same time. `None`: none of them sleeps.
fn wake_ms(snapshot: &Snapshot, route: Route) -> Option<f64> {
    let prefill = route.prefill.and_then(|p| snapshot.prefill[p].wake_ms);
    snapshot.decode[route.decode].wake_ms.into_iter().chain(prefill).reduce(f64::max)
}

fn candidate(snapshot: &Snapshot, route: Route) -> RouteCandidate {
    let decode = &snapshot.decode[route.decode];
    let prefill = route.prefill.map(|p| &snapshot.prefill[p]);
    let barred = decode.barred.or_else(|| {
        let prefill = prefill?;
        // A node in both lists already has its own KV. Names are unique.
        let itself = (prefill.name == decode.name).then_some(BarReason::SameNode);
        let pair = || *snapshot.barred_pairs.get(route.prefill?)?.get(route.decode)?;
        prefill.barred.or(itself).or(decode.kv.err().map(BarReason::NoHandoff)).or_else(pair)
    });
    if barred.is_some() {
        return RouteCandidate { route, prediction: None, barred };
    }
    let prediction = match (prefill, route.prefill) {
        // A decode node that holds the whole prompt pulls nothing.
        (Some(node), Some(p)) if PromptStart::of(&snapshot.request, decode).missing > 0.0 => {
            handoff(&snapshot.request, node, decode, &snapshot.links[p][route.decode])
        }
        _ => direct(&snapshot.request, decode),
    };
    let row = route.prefill.map_or(0, |p| 1 + p);
    let computed = PromptStart::of(&snapshot.request, prefill.unwrap_or(decode)).missing;
    let correction = snapshot.corrections.get(row).and_then(|row| row.get(route.decode));
    let correction = correction.map_or(1.0, |factors| factors.at(computed));
    let wake_ms = wake_ms(snapshot, route).unwrap_or(0.0);
    let prediction = prediction.map(|p| after_waking(corrected(p, correction), wake_ms));
    RouteCandidate { route, prediction, barred: None }
}

fn direct(request: &RequestSize, node: &NodeView) -> Option<Prediction> {
    let start = PromptStart::of(request, node);
    let prefill = prefill_seconds(node, start.missing)?;
    let step = step_seconds(node)?;
    let queue = prefill.others + slot_wait(request, node, step);
    let restore = start.restore;
    let ttft = queue + restore + prefill.own + start.replay(request) * step + step;
    let parts = RouteSeconds { queue, restore, prefill: prefill.own, wire: 0.0, after_prefill: 0.0, step, ttft };
    Some(prediction(request, parts))
}

fn handoff(request: &RequestSize, prefill: &NodeView, decode: &NodeView, link: &TransferRates) -> Option<Prediction> {
    let size = decode.kv.ok()?;
    let WireBytes { per_token: on_wire, .. } = link.wire_bytes();
    let kv_bytes = if on_wire > 0.0 { on_wire } else { f64::from(size.bytes_per_token) };
    if link.bytes_per_second <= 0.0 {
        return None;
    }
    let (here, there) = (PromptStart::of(request, decode), PromptStart::of(request, prefill));
    let step = step_seconds(decode)?;
    // Pulls of a model with states end before the reply's head. It is one small batch, which takes a step at least.
    let has_head = size.state_bytes > 0 && request.n_replayed == 0;
    let head = if has_head { REPLY_HEAD_TOKENS.min(here.missing - 1.0).max(0.0) } else { 0.0 };
    let head_seconds = if head > 0.0 { (head / decode.rates.prefill.at(head)?).max(step) } else { 0.0 };
    let moved = here.missing - head;
    let computed = (there.missing - head).max(0.0);
    let PrefillSeconds { own: compute, others } = prefill_seconds(prefill, computed)?;
    // Without a free slot on the prefill node, this prompt waits for its whole backlog.
    let is_full = prefill.n_active + prefill.n_queued >= prefill.n_slots.max(1);
    let queue = if is_full { seconds_behind(prefill, computed, prefill.n_backlog.into())? } else { others };
    let per_token = kv_bytes / link.bytes_per_second;
    let wire = moved * per_token + link.state_seconds(size.state_bytes);
    let last_chunk = moved.min(LAST_CHUNK_TOKENS) * per_token + link.after_prefill_state_seconds(size.state_bytes);
    // The prefill node sends cached KV at once.
    let first_chunk = match computed < moved {
        true => 0.0,
        false => (moved / 2.0).clamp(LAST_CHUNK_TOKENS, FIRST_CHUNK_TOKENS).min(moved) / computed.max(1.0) * compute,
    };
    let queue = queue + slot_wait(request, decode, step);
    // What is computed before the first position that is sent hides no rows.
    let beside_rows = compute * (moved / computed.max(1.0)).min(1.0);
    let unhidden = (moved * per_token - beside_rows).max(wire - compute);
    let after_prefill = last_chunk.max(first_chunk + unhidden) + link.tail_ms / 1e3;
    let pulled = there.restore + compute + after_prefill;
    let pull_begins = (here.restore - PULL_AHEAD.as_secs_f64()).max(0.0);
    let restore = there.restore + (here.restore - pulled).max(pull_begins);
    let reply = head_seconds + here.replay(request) * step + step;
    let ttft = link.rtt_ms / 1e3 + queue + restore + compute + after_prefill + reply;
    Some(prediction(request, RouteSeconds { queue, restore, prefill: compute, wire, after_prefill, step, ttft }))
}

struct PrefillSeconds {
    /// The computation of the prompt itself.
    own: f64,
    /// The computation of other prompts in the meantime.
    others: f64,
}

/// Predicts the prefill of `n` prompt tokens. Prompts in slots share steps, so each other prompt delays this one by no more than
/// this one's own length.
fn prefill_seconds(node: &NodeView, n: f64) -> Option<PrefillSeconds> {
    let others = f64::from(node.n_backlog).min(n * f64::from(node.n_active + node.n_queued).max(1.0));
    Some(PrefillSeconds { own: n / node.rates.prefill.at(n)?, others: seconds_behind(node, n, others)? })
}

/// The seconds by which `others` tokens of other prompts delay one of `n` tokens: all of them in steps that slots share, less
/// what this prompt takes alone.
fn seconds_behind(node: &NodeView, n: f64, others: f64) -> Option<f64> {
    let all = n + others;
    let together = all.min(n * f64::from(node.n_slots.max(1)));
    let rate = node.rates.prefill.at(batch_size(n, together))?;
    Some((all / rate - n / node.rates.prefill.at(n)?).max(0.0))
}

/// Seconds of one decode step after this request has joined the running streams.
fn step_seconds(node: &NodeView) -> Option<f64> {
    let n_streams = (node.n_active + 1).min(node.n_slots.max(1));
    Some(1.0 / node.rates.decode.at(f64::from(n_streams))?)
}

/// Seconds until a slot is free. Each queued request, and this one, waits for a stream to end.
fn slot_wait(request: &RequestSize, node: &NodeView, step: f64) -> f64 {
    let n_slots = node.n_slots.max(1);
    if node.n_active < n_slots {
        return 0.0;
    }
    // Streams are half done on average, and end one after another.
    let stream = request.n_output * step;
    stream * (0.5 + f64::from(node.n_queued)) / f64::from(n_slots)
}

#[cfg(test)]
pub(super) mod tests;
