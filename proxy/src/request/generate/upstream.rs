//! Starts requests on upstreams: if only upstreams serve the model, or if no node can start the request.

use std::future::ready;
use std::sync::{Arc, Mutex, PoisonError};

use baton_planner::policy::PolicyName;
use baton_planner::reason::RouteReason;
use baton_planner::upstreams::{PlannedTarget, choose};
use baton_schemas::{EngineError, GenerateRequest};
use baton_upstream::StrictGap;
use futures::FutureExt;
use tracing::{Instrument, Span};

use super::start::{HeldModel, StartedChoices, StartedRequest, Starting, UpstreamChoice};
use crate::account::request_memory::{HeldPart, MemoryCharge, MemoryFull, RequestHold};
use crate::admission::RequestPlaces;
use crate::error::RequestError;
use crate::request::caller::Caller;
use crate::request::kv_loss::KvWish;
use crate::request::plan::{self, route_words};
use crate::request::warnings::{Warning, Warnings};
use crate::targets::models::ServedModel;
use crate::targets::nodes::FallbackReason;
use crate::targets::text_prefixes::PromptOutline;
use crate::targets::upstreams::{self, FirstChoices, ServedByUpstreams, StartedChoice};

/// Starts the choices for which there are places on the first upstream that begins to answer. `reason`, if given, is
/// announced instead of the reason for which that upstream was chosen.
pub(super) async fn start_on_upstreams(
    starting: &mut Starting<'_>,
    serving: &ServedByUpstreams,
    reason: Option<RouteReason>,
) -> Result<StartedRequest, RequestError> {
    let Starting { request, caller, watch, places, meter, prompt } = starting;
    if !request.earlier_tokens().is_empty() {
        let problem = "an upstream counts in tokens of its own; send the history to /api/chat".to_owned();
        return Err(RequestError::InvalidField { field: "context", problem });
    }
    let n_prompt = upstreams::estimated_tokens(request);
    watch.usage.reserve(n_prompt as usize, request.max_tokens, request.n)?;
    let span = watch.span().clone();
    // Once for all attempts and choices.
    let needs_strict = serving.upstreams.iter().any(|one| one.server.client.settings().kind.needs_strict(request));
    let gap = if needs_strict { StrictGap::of(request) } else { None };
    let started = {
        let watch = Mutex::new(&mut **watch);
        let admitted = || {
            let mut watch = watch.lock().unwrap_or_else(PoisonError::into_inner);
            watch.admitted(Arc::clone(meter));
            // The upstream computes from now on, even if the client leaves before the first piece.
            watch.usage.begin(n_prompt, request.n, Arc::clone(meter));
        };
        let request_id = &caller.request_id;
        let _calls = charge_calls(&caller.memory, request, request.n)?;
        let first =
            FirstChoices { request, prompt, choice: 0, n_most: request.n, request_id, gap, admitted: &admitted };
        upstreams::start(serving, places, &first).instrument(span).await
    };
    let started = started.inspect_err(|_| watch.usage.never_began())?;
    let n_prompt = prompt.n_tokens;
    let reason = match (reason, started.reason) {
        (Some(RouteReason::NoEngine), _) => RouteReason::NoEngine,
        (Some(planned), RouteReason::OnlyUpstream) => planned,
        (_, reason) => reason,
    };
    watch.upstream(&started, reason, n_prompt);
    let route = route_words::of_upstream(started.server.name(), reason, started.prediction.as_ref());
    let n_first = started.choices.len() as u32;
    started.choices.iter().for_each(|choice| warn_of_broken_promise(request, choice, &caller.warnings));
    let mut choices: Vec<UpstreamChoice> =
        started.choices.into_iter().map(|choice| ready(Ok(choice)).boxed()).collect();
    if n_first < request.n {
        let source = Arc::new(LateSource {
            serving: serving.clone(),
            places: places.clone(),
            request: request.clone(),
            prompt: Arc::clone(prompt),
            _part: caller.memory.part(),
            memory: caller.memory.clone(),
            request_id: caller.request_id.clone(),
            warnings: caller.warnings.clone(),
            gap,
            span: watch.span().clone(),
        });
        choices.extend((n_first..request.n).map(|choice| Arc::clone(&source).late_choice(choice).boxed()));
    }
    let choices = StartedChoices::Text { choices };
    Ok(StartedRequest { n_prompt, route, choices, prompt: None, plan: None, loaded: HeldModel::default() })
}

/// Charges the calls of choices that are requested at once for their images: as text, and in the body. Their texts are
/// charged with the request.
fn charge_calls(
    memory: &RequestHold,
    request: &GenerateRequest,
    n_choices: u32,
) -> Result<Option<MemoryCharge>, MemoryFull> {
    let in_base64: usize = request.images().iter().map(|image| image.bytes().len().div_ceil(3) * 4).sum();
    match in_base64 {
        0 => Ok(None),
        n_bytes => memory.more(n_bytes.saturating_mul(2 * n_choices as usize)),
    }
}

/// Warns of a schema that the upstream of this choice need not hold, though the client's dialect promises that.
fn warn_of_broken_promise(request: &GenerateRequest, choice: &StartedChoice, warnings: &Warnings) {
    if let Some((gap, constraint)) = choice.gap.zip(request.constraint.as_deref()) {
        warnings.add(Warning::NotPromised { field: constraint.field().to_owned(), gap });
    }
}

/// Starts the choices that get their places after the others.
struct LateSource {
    serving: ServedByUpstreams,
    places: RequestPlaces,
    request: GenerateRequest,
    prompt: Arc<PromptOutline>,
    /// Keeps the memory of the request's texts.
    _part: HeldPart,
    memory: RequestHold,
    request_id: String,
    /// A reply that comes whole has its warnings after its last choice has begun.
    warnings: Warnings,
    gap: Option<StrictGap>,
    span: Span,
}

impl LateSource {
    async fn late_choice(self: Arc<Self>, choice: u32) -> Result<StartedChoice, RequestError> {
        let LateSource { serving, places, request, prompt, memory, request_id, gap, span, .. } = &*self;
        let _call = charge_calls(memory, request, 1)?;
        let late = FirstChoices { request, prompt, choice, n_most: 1, request_id, gap: *gap, admitted: &|| {} };
        let started = upstreams::start(serving, places, &late).instrument(span.clone()).await?;
        let begun =
            started.choices.into_iter().next().ok_or_else(|| EngineError::lost("an upstream began no reply"))?;
        warn_of_broken_promise(request, &begun, &self.warnings);
        Ok(begun)
    }
}

/// Starts a request on an upstream that serves the same model as its nodes, if it is predicted to be done first there. `None`: the
/// nodes are, or no such upstream began to answer.
pub(super) async fn start_on_peers(
    starting: &mut Starting<'_>,
    model: &ServedModel,
    fallback: Option<&ServedByUpstreams>,
) -> Option<StartedRequest> {
    let Starting { request, caller, prompt, .. } = &*starting;
    let peers = fallback?.peers().filter(|_| may_go_to_peers(model, request, caller))?;
    let own = plan::estimated(model, prompt, caller.cache_scope)?;
    let choice = choose(&upstreams::snapshot(&peers, &[], prompt, Some(own)))?;
    match choice.target {
        PlannedTarget::Own => {
            model.routes.texts.remember(prompt);
            None
        }
        PlannedTarget::Upstream(_) => {
            let request_id = &caller.request_id;
            match start_on_upstreams(starting, &peers, Some(choice.reason)).await {
                Ok(started) => Some(started),
                Err(error) => {
                    tracing::info!(request_id, %error, "no upstream of the same model took the request; using own nodes");
                    None
                }
            }
        }
    }
}

/// Returns true if upstreams that serve the same model as these nodes may answer. They have other tokens, get no images, and are not
/// asked for lossless KV. Other policies than the fastest one are about nodes.
pub(in crate::request) fn may_go_to_peers(model: &ServedModel, request: &GenerateRequest, caller: &Caller) -> bool {
    let policy = caller.policy.unwrap_or(model.policy);
    let is_for_any = request.earlier_tokens().is_empty() && request.images().is_empty();
    policy.name() == PolicyName::Fastest && is_for_any && caller.kv_loss.wish != Some(KvWish::Lossless)
}

/// Starts a request on upstreams after nodes refused it with this error, if upstreams can help.
pub(super) async fn fall_back(
    starting: &mut Starting<'_>,
    model: &ServedModel,
    serving: &ServedByUpstreams,
    error: RequestError,
) -> Result<StartedRequest, RequestError> {
    if !is_worth_falling_back(&error) {
        return Err(error);
    }
    model.fallbacks.count(FallbackReason::Upstream);
    let request_id = &starting.caller.request_id;
    tracing::info!(request_id, %error, "no engine accepted the request; trying upstreams");
    match start_on_upstreams(starting, serving, Some(RouteReason::NoEngine)).await {
        // The upstream cannot serve this request, but an engine can once it is back.
        Err(
            RequestError::InvalidField { .. }
            | RequestError::FieldUnsupported { .. }
            | RequestError::ImagesUnsupported { .. },
        ) => Err(error),
        outcome => outcome,
    }
}

/// Returns true for errors of engines, and false if the request itself is wrong.
fn is_worth_falling_back(error: &RequestError) -> bool {
    use EngineError::{Lost, NoResources, Unauthorized, Unavailable};
    match error {
        RequestError::Engine(Lost { .. } | NoResources { .. } | Unavailable { .. } | Unauthorized) => true,
        RequestError::Engine(error) => error.is_busy(),
        error => matches!(error, RequestError::Unavailable { .. }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_schemas::generate::{Conversation, Input};
    use baton_schemas::image::Image;

    use super::*;
    use crate::account::request_memory::RequestMemory;
    use crate::observe::tests::request;

    #[test]
    fn the_calls_of_a_request_with_images_are_charged_before_they_are_written() {
        let memory = RequestMemory::new(64 << 20, 8 << 20);
        let hold = RequestHold::default();
        hold.keep(MemoryCharge::new(Arc::clone(&memory), None), Duration::ZERO);
        let images = vec![Image::new(vec![0; 3 << 20], "f")];
        let input = Input::Chat(Conversation { images, ..Conversation::default() });
        let about = GenerateRequest { input, ..request("m") };
        let charge = charge_calls(&hold, &about, 1).unwrap().unwrap();
        assert_eq!(memory.in_use().held, 8 << 20);
        drop(charge);
        assert_eq!((memory.in_use().held, charge_calls(&hold, &about, 2).err()), (0, Some(MemoryFull)));
        assert!(charge_calls(&hold, &request("m"), 16).unwrap().is_none());
    }
}
