//! Prompt, plan, start: how a request begins on nodes.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use baton_link::SequenceStream;
use baton_link::trace::TARGET;
use baton_reply::tools::ReplyForm;
use baton_schemas::image::PromptImages;
use baton_schemas::sequence::Group;
use baton_schemas::{EngineError, GenerateRequest, SequenceRequest, Token};
use futures::future::BoxFuture;
use tokio::sync::watch;
use tracing::Instrument;

use super::late_choice::{LateChoice, of_choice};
use crate::admission::{Permit, RequestPlaces, SlotUse};
use crate::error::RequestError;
use crate::observe::RequestWatch;
use crate::request::caller::Caller;
use crate::request::failover::{PoisonMark, Resilient, StartRetry};
use crate::request::plan::{Plan, PlanRequest};
use crate::request::prompt::{self, PreparedPrompt, PromptNode};
use crate::request::prompt_logprobs::{ScoredPrompt, prompt_logprobs};
use crate::request::seats::{Seats, planned};
use crate::request::warnings::{Warning, Warnings};
use crate::targets::model_loading::ModelLease;
use crate::targets::models::{NodeWait, ServedModel};
use crate::targets::text_prefixes::PromptOutline;
use crate::targets::upstreams::StartedChoice;

/// A request that no engine has started.
pub(super) struct Starting<'a> {
    pub(super) request: &'a GenerateRequest,
    pub(super) caller: &'a Caller,
    pub(super) watch: &'a mut RequestWatch,
    pub(super) places: RequestPlaces,
    /// Counts its tokens.
    pub(super) meter: Arc<AtomicU32>,
    /// The input of the upstreams' plan; empty if none serves the model.
    pub(super) prompt: Arc<PromptOutline>,
}

impl<'a> Starting<'a> {
    pub(super) fn new(
        request: &'a GenerateRequest,
        caller: &'a Caller,
        watch: &'a mut RequestWatch,
        permit: &Permit,
        prompt: PromptOutline,
    ) -> Starting<'a> {
        let places = permit.places(watch.work());
        Starting { request, caller, watch, places, meter: permit.meter(), prompt: Arc::new(prompt) }
    }
}

/// A request whose first choices were accepted.
pub(super) struct StartedRequest {
    /// Tokens of the prompt; an estimate on upstreams.
    pub(super) n_prompt: u32,
    /// The value of `x-baton-route`.
    pub(super) route: String,
    pub(super) choices: StartedChoices,
    /// The prompt's tokens with their log-probabilities, if the client asks for them.
    pub(super) prompt: Option<ScoredPrompt>,
    /// The plan of the first choice, which may change until the first result.
    pub(super) plan: Option<watch::Receiver<Plan>>,
    /// Keeps the model in memory.
    pub(super) loaded: HeldModel,
}

/// The choices of one request, before their first event.
pub(super) enum StartedChoices {
    /// Tokens, from engines.
    Tokens {
        form: Box<ReplyForm>,
        model: Arc<ServedModel>,
        /// The maximum number of new tokens per choice.
        max_tokens: Option<u32>,
        /// The prompt, if the client wants the tokens of prompt and reply.
        context: Option<Vec<Token>>,
        /// Each keeps its place until it ends. One that starts late waits for its place first.
        choices: Vec<SequenceStream>,
    },
    /// Text, from an upstream.
    Text { choices: Vec<UpstreamChoice> },
}

/// A choice on an upstream. Its stream keeps its place. One that starts late awaits its place, and then the upstream.
pub(super) type UpstreamChoice = BoxFuture<'static, Result<StartedChoice, RequestError>>;

/// The lease of a model that is loaded on demand, and how long loading took.
#[derive(Default)]
pub(super) struct HeldModel {
    pub(super) lease: Option<ModelLease>,
    pub(super) waited: Duration,
}

/// Starts a request on nodes. Does not wait for a node if upstreams can answer instead.
pub(super) async fn start_on_nodes(
    starting: &mut Starting<'_>,
    model: &Arc<ServedModel>,
    loaded: Result<HeldModel, RequestError>,
    has_fallback: bool,
) -> Result<StartedRequest, RequestError> {
    // Before it waits for a node.
    prompt::refuse_linked(starting.request.linked_images())?;
    let loaded = loaded?;
    warn_of_unheld(starting.request, &starting.caller.warnings)?;
    if starting.caller.kv_loss.is_overruled(&starting.request.sampling) {
        starting.caller.warnings.add(Warning::LosslessKv);
    }
    let mut retry = StartRetry::about(starting.request.images(), PoisonMark::of_prompt(&starting.caller.poison));
    // An upstream has its own vocabulary, so a request that continues earlier tokens waits for an engine.
    let falls_back = has_fallback && starting.request.earlier_tokens().is_empty();
    if falls_back {
        retry = retry.with_upstream();
        if model.places().is_empty() {
            return Err(RequestError::unavailable("no engine is ready", Duration::from_secs(1)));
        }
    }
    let wait = if falls_back { NodeWait::NotAtAll } else { NodeWait::ForNodes };
    let mut seats = Seats::none(starting.places.clone(), starting.request.n as usize, wait);
    let span = tracing::info_span!(target: TARGET, parent: starting.watch.span(), "admission_wait");
    seats.take_any(model, Some(&starting.request.model)).instrument(span).await?;
    starting.watch.admitted(Arc::clone(&starting.meter));
    loop {
        match try_start(starting, &mut seats, model, &mut retry).await {
            Err(error) => {
                starting.watch.usage.never_began();
                retry.go_on(model, error).await?;
            }
            Ok(started) => return Ok(StartedRequest { loaded, ..started }),
        }
    }
}

/// Names the parts of schemas that nodes do not hold. Errors: the client asks to hold every part.
fn warn_of_unheld(request: &GenerateRequest, warnings: &Warnings) -> Result<(), RequestError> {
    for (asker, unheld) in request.unheld() {
        if let Some(part) = &unheld.refused {
            let of = asker.tool.map(|tool| format!("the schema of {tool:?}: ")).unwrap_or_default();
            let problem = format!("{of}'{part}' cannot be enforced; without 'strict' it is left out");
            return Err(EngineError::invalid_field(asker.field, problem).into());
        }
        warnings.add(Warning::unheld(asker, unheld));
    }
    Ok(())
}

/// Waits for an engine, prepares the prompt, plans, and starts every choice that has a place.
async fn try_start(
    starting: &mut Starting<'_>,
    seats: &mut Seats,
    model: &Arc<ServedModel>,
    retry: &mut StartRetry,
) -> Result<StartedRequest, RequestError> {
    let Starting { request, caller, watch, places, meter, .. } = starting;
    let (node, info) = retry.next_node(model, Some(&request.model)).await?;
    let span = tracing::info_span!(target: TARGET, parent: watch.span(), "prompt", node = node.name);
    let at = PromptNode { node, info: &info, key: caller.account.tag() };
    let prompt = async {
        let mut prompt = prompt::prepare(at, model.longest_context(&info), request).await?;
        prompt.read_tail(node).await?;
        Ok(prompt)
    };
    let prompt = retry.call(model, node, prompt).instrument(span).await?;
    watch.usage.reserve(prompt.tokens.len(), prompt.max_tokens, request.n)?;
    // One plan for all choices: they share the prompt, which is computed once.
    let span = tracing::info_span!(target: TARGET, parent: watch.span(), "plan");
    let plan = planned(&PlanRequest::of_prompt(&prompt, request, caller), seats, model, retry).instrument(span).await?;
    let n_prompt = prompt.tokens.len() as u32;
    watch.planned(plan.summary(n_prompt));

    let is_removed = model.removed_keys.contains(caller.cache_scope);
    let sequence = SequenceRequest { ephemeral: is_removed, ..sequence(request, &prompt, caller) };
    let scored = match request.prompt_logprobs {
        None => None,
        // On the node that continues the prompt: it then has it in its cache.
        Some(wanted) => {
            let span = tracing::info_span!(target: TARGET, parent: watch.span(), "prompt_logprobs");
            let node = plan.decode();
            // This computes the prompt.
            watch.usage.begin(n_prompt, request.n, Arc::clone(meter));
            let scored = prompt_logprobs(node, &sequence, wanted, seats.held.first_mut()).instrument(span);
            let scored = retry.call(model, node, scored).await;
            // The choices wait for slots of their own.
            seats.held.iter_mut().for_each(|place| place.note(SlotUse::NoSlot));
            Some(scored?)
        }
    };
    let n_first = seats.held.len() as u32;
    let group = (n_first > 1).then_some(Group { id: rand::random(), size: n_first });
    let mut choices = Vec::with_capacity(request.n as usize);
    let mut followed = None;
    for choice in 0..n_first {
        let sequence = SequenceRequest { group, ..of_choice(&sequence, choice) };
        let node = plan.decode();
        let span = tracing::info_span!(target: TARGET, parent: watch.span(), "decode", choice, node = node.name);
        let visit = retry.visit(node);
        let mut own_plan = plan.for_choice(choice);
        own_plan.n_before = choice;
        let accepted = Resilient::begin(own_plan, sequence, retry.mark().clone(), span).await;
        retry.note(model, &visit, &accepted);
        let accepted = accepted.map_err(|error| refused(error, n_first))?;
        followed.get_or_insert_with(|| accepted.follow());
        choices.push(accepted);
    }
    // Not before all are accepted: the next attempt needs the places, too.
    choices.iter_mut().for_each(|accepted| accepted.keep_place(seats.held.pop()));
    let mut choices: Vec<_> = choices.into_iter().map(Resilient::into_events).collect();
    // Choices that wait share the prompt.
    let sequence = Arc::new(sequence);
    for choice in n_first..request.n {
        let late = LateChoice {
            plan: plan.for_choice(choice),
            sequence: Arc::clone(&sequence),
            choice,
            policy: caller.policy,
            mark: retry.mark().of_late_choice(),
            request_span: watch.span().clone(),
        };
        choices.push(late.events(places.clone()));
    }
    let PreparedPrompt { tokens, form, max_tokens, .. } = prompt;
    let context = request.context.is_some().then_some(tokens);
    let choices =
        StartedChoices::Tokens { form: Box::new(form), model: Arc::clone(model), max_tokens, context, choices };
    let route = plan.to_string();
    Ok(StartedRequest { n_prompt, route, choices, prompt: scored, plan: followed, loaded: HeldModel::default() })
}

/// Builds the request for an engine.
fn sequence(request: &GenerateRequest, prompt: &PreparedPrompt, caller: &Caller) -> SequenceRequest {
    let images = |projector: &String| PromptImages { projector: projector.clone(), images: request.images().to_vec() };
    SequenceRequest {
        prompt: prompt.tokens.clone(),
        generated: Vec::new(),
        sampling: request.sampling.clone(),
        max_tokens: prompt.max_tokens,
        top_logprobs: request.top_logprobs,
        prompt_logprobs: None,
        reports_end: request.reports_end(),
        reports_drafts: true,
        ignore_eos: request.ignore_eos,
        group: None,
        cache_scope: caller.cache_scope,
        key: caller.account.tag(),
        constraint: prompt.form.constraint(request),
        ephemeral: false,
        gives_way: false,
        held_only: false,
        lossless_kv: caller.kv_loss.is_refused(&request.sampling),
        images: prompt.projector.as_ref().map(images),
        kv_source: None,
        draft_source: None,
        predicted: prompt.predicted.clone(),
    }
}

/// A full queue is worth a retry, unless more choices start together than the queue can hold.
fn refused(error: EngineError, n_together: u32) -> RequestError {
    match error {
        EngineError::QueueFull { limit } if (1..n_together).contains(&limit) => RequestError::InvalidField {
            field: "n",
            problem: format!("must be at most {limit} on this server, but is {n_together}"),
        },
        error => error.into(),
    }
}
