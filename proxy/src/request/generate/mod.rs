//! The life of a request: target, admission, prompt, plan, start, hold.
//!
//! This file shows the order of the stages. `start` contains prompt, plan and start; `hold` keeps the reply until
//! its last token.

mod choice;
mod hold;
mod late_choice;
mod start;
mod upstream;

use std::sync::Arc;
use std::time::Instant;

use baton_link::trace::TARGET;
use baton_schemas::GenerateRequest;
use baton_schemas::generate::Sampling;
use tracing::Instrument;

pub use self::hold::EventStream;
use self::hold::hold;
use self::start::{HeldModel, StartedRequest, Starting, start_on_nodes};
pub(super) use self::upstream::may_go_to_peers;
use self::upstream::{fall_back, start_on_peers, start_on_upstreams};
use super::caller::Caller;
use crate::admission::{Admission, Permit};
use crate::error::RequestError;
use crate::observe::{Observer, RequestWatch};
use crate::targets::model_loading::KeepWish;
use crate::targets::text_prefixes::PromptOutline;
use crate::targets::upstreams::estimated_tokens;
use crate::targets::{Target, Targets};
use crate::usage::RequestUsage;

/// An accepted request: the data known before its first token, and the events that follow.
///
/// Dropping it cancels all its sequences and returns its permit.
pub struct Generation {
    /// Tokens of the rendered prompt.
    pub n_prompt: u32,
    /// Where this request runs and why, for `x-baton-route`.
    pub route: String,
    /// The sampling parameters, with the model's defaults where the client set none.
    pub sampling: Sampling,
    /// Events of all choices, interleaved. Ends after every choice has finished, or with an error.
    pub events: EventStream,
}

/// Serves a request, independent of HTTP.
///
/// Returns once an engine has accepted every choice that has a place, or an upstream has begun to answer them. The other
/// choices start as they get places. Dropping this future, or what it returns, cancels the request within one step of its
/// engine.
pub async fn generate(
    admission: &Admission,
    targets: &Targets,
    observer: &Arc<Observer>,
    mut request: GenerateRequest,
    caller: &Caller,
) -> Result<Generation, RequestError> {
    let trace = caller.trace.clone();
    let usage = RequestUsage::new(&observer.usage, &caller.account, caller.secret);
    let mut watch = RequestWatch::begin(observer, &caller.request_id, usage, trace, request.n);
    match admit_and_start(admission, targets, &mut request, caller, &mut watch).await {
        Ok((permit, started)) => {
            let n_prompt = started.n_prompt;
            let route = started.route.clone();
            tracing::debug!(request_id = caller.request_id, n_prompt, route, "accepted");
            let sampling = request.sampling.clone();
            Ok(Generation { n_prompt, route, sampling, events: hold(permit, watch, started, &request) })
        }
        Err(error) => {
            watch.failed(&error);
            Err(error)
        }
    }
}

/// Finds the target, admits the request, and starts every choice that has a place.
async fn admit_and_start(
    admission: &Admission,
    targets: &Targets,
    request: &mut GenerateRequest,
    caller: &Caller,
    watch: &mut RequestWatch,
) -> Result<(Permit, StartedRequest), RequestError> {
    let target = targets.resolve(Some(&request.model), &caller.account)?;
    watch.is_for(target.name());
    apply_sampling_defaults(&target, request);
    // Before memory: a key whose rate is exhausted must not unload another key's model.
    caller.admission.charge(&caller.account, request.n as usize).await?;
    caller.account.check_budgets()?;
    // Load before admission: what waits for memory has no place. Loading has its own limit.
    let wish = KeepWish::of(request.keep_alive, &caller.account);
    // An upstream knows no keys, so only an operator's wish reaches it.
    request.keep_alive = request.keep_alive.filter(|_| caller.account.limits.is_operator);
    let loaded = load(targets, &target, wish, watch).await;
    if let (Err(error), false) = (&loaded, target.has_fallback()) {
        return Err(error.clone());
    }
    admission.set_targets(targets.places());
    let permit = admission.enter(&caller.account, &caller.admission);
    let mut starting = Starting::new(request, caller, watch, &permit, outline(&target, request, caller));
    let started = match &target {
        Target::Upstreams(upstreams) => start_on_upstreams(&mut starting, upstreams, None).await?,
        Target::Nodes { model, fallback } => {
            match start_on_peers(&mut starting, model, fallback.as_ref()).await {
                Some(started) => started,
                // Its places on nodes are free again before it waits for one on an upstream.
                None => match (start_on_nodes(&mut starting, model, loaded, fallback.is_some()).await, fallback) {
                    (Err(error), Some(upstreams)) => fall_back(&mut starting, model, upstreams, error).await?,
                    (outcome, _) => outcome?,
                },
            }
        }
    };
    permit.charge_prompt(started.n_prompt);
    watch.usage.begin(started.n_prompt, request.n, permit.meter());
    Ok((permit, started))
}

/// The input of the upstreams' plan, if there are upstreams.
fn outline(target: &Target, request: &GenerateRequest, caller: &Caller) -> PromptOutline {
    match target {
        Target::Nodes { fallback: None, .. } => PromptOutline::default(),
        Target::Nodes { fallback: Some(serving), .. } | Target::Upstreams(serving) => {
            PromptOutline::new(&serving.name, request, caller.cache_scope, estimated_tokens(request))
        }
    }
}

/// Applies the model's sampling defaults, then the client's own values over them.
fn apply_sampling_defaults(target: &Target, request: &mut GenerateRequest) {
    if let Some(model) = target.served_model() {
        model.sampling.apply(&mut request.sampling);
        request.chosen.apply(&mut request.sampling);
    }
}

/// Loads a model that is not in memory.
async fn load(
    targets: &Targets,
    target: &Target,
    wish: KeepWish,
    watch: &RequestWatch,
) -> Result<HeldModel, RequestError> {
    let asked = Instant::now();
    let lease = targets.lease(target, wish);
    let lease = match target.served_model() {
        Some(_) => {
            let span = tracing::info_span!(target: TARGET, parent: watch.span(), "model_load");
            lease.instrument(span).await?
        }
        None => None,
    };
    Ok(HeldModel { lease, waited: asked.elapsed() })
}

#[cfg(test)]
mod tests;
