//! The life of a request, from an admitted `GenerateRequest` to a stream of text.

pub(crate) mod clock;
mod event;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engines::DeltaStream;
use baton_engines::trace::TARGET;
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::HandoffTimings;
use baton_schemas::image::PromptImages;
use baton_schemas::node::NodeInfo;
use baton_schemas::sequence::{CacheScope, Delta, Group, Timings};
use baton_schemas::{EngineError, FinishReason, GenerateRequest, SequenceRequest, Token};
use futures::stream::SelectAll;
use futures::{Stream, StreamExt};
use tokio::sync::watch;
use tracing::Instrument;

use self::clock::Clock;
pub use self::event::{Event, TokenLogprobs};
use crate::admission::{Account, Permit, QueuePlace};
use crate::app::App;
use crate::error::RequestError;
use crate::failover::{Attempts, Resilient, ask_about};
use crate::observe::RequestWatch;
use crate::plan::explanation::Explanation;
use crate::plan::policy::Policy;
use crate::plan::{self, Plan, PlanRequest};
use crate::pool::{Node, ServedModel};
use crate::prompt;
use crate::residency::Stay;
use crate::stream::ChoiceReply;
use crate::tools::ReplyForm;
use crate::upstream::{self, ServedByUpstreams, TextChoice, text_events};

/// Serves a request: the whole of its life but HTTP.
///
/// Returns once every choice is accepted by an engine. Dropping what it returns, or this future, cancels the request
/// within one step of its engine.
pub async fn generate(app: &App, mut request: GenerateRequest, caller: &Caller) -> Result<Generation, RequestError> {
    let mut watch = RequestWatch::begin(&app.observer, caller, request.n);
    match accept(app, &mut request, caller, &mut watch).await {
        Ok((permit, accepted)) => {
            let (n_prompt, route) = (accepted.n_prompt, accepted.route.clone());
            tracing::debug!(request_id = caller.request_id, n_prompt, route, "accepted");
            let sampling = request.sampling.clone();
            Ok(Generation { n_prompt, route, sampling, events: hold(permit, watch, accepted, &request) })
        }
        Err(error) => {
            watch.failed(&error);
            Err(error)
        }
    }
}

/// Admits a request and finds what accepts every choice: the model's nodes, or an upstream where there are none, or none
/// that can take it.
async fn accept(
    app: &App,
    request: &mut GenerateRequest,
    caller: &Caller,
    watch: &mut RequestWatch,
) -> Result<(Permit, Accepted), RequestError> {
    let (model, upstreams) = app.who_serves(&request.model, &caller.account)?;
    if let Some(model) = &model {
        // The client's own choice once more, over the model's.
        model.sampling.apply(&mut request.sampling);
        request.chosen.apply(&mut request.sampling);
    }
    let request = &*request;
    let name = model.as_ref().and_then(|model| model.name.get()).or(upstreams.as_ref().map(|serving| &serving.name));
    watch.is_for(name.map_or("", String::as_str));
    // Before a place in the house is taken: who waits for memory, which has a bound of its own, keeps nobody else out.
    let loaded = match &model {
        Some(model) => load(app, model, request, watch).await,
        None => Ok(Loaded::default()),
    };
    let loaded = match loaded {
        Err(error) if upstreams.is_none() => return Err(error),
        loaded => loaded,
    };
    app.admission.set_slots(app.n_slots());
    let span = tracing::info_span!(target: TARGET, parent: watch.span(), "admission_wait");
    let permit = app.admission.admit(&caller.account, &caller.place).instrument(span).await?;
    watch.meter(permit.meter());
    let attempts = Attempts::about(request.images());
    let accepted = match (model, upstreams) {
        (Some(model), None) => on_nodes(&model, request, caller, loaded, (watch, attempts)).await?,
        (Some(model), Some(serving)) => {
            // Tokens mean nothing to an upstream, so for them an engine is waited for.
            let attempts = if request.earlier_tokens().is_empty() { attempts.with_deputy() } else { attempts };
            match on_nodes(&model, request, caller, loaded, (watch, attempts)).await {
                Err(error) if may_go_upstream(&error) => {
                    model.fallbacks.count("upstream");
                    tracing::info!(request_id = caller.request_id, %error, "no engine takes the request: asking an upstream");
                    match on_upstream(&serving, request, caller, watch, Some("no_engine")).await {
                        // What the upstream does not take an engine will, when one is back.
                        Err(RequestError::InvalidField { .. } | RequestError::Blind { .. }) => return Err(error),
                        outcome => outcome?,
                    }
                }
                outcome => outcome?,
            }
        }
        (None, Some(serving)) => on_upstream(&serving, request, caller, watch, None).await?,
        (None, None) => return Err(RequestError::ModelNotFound { model: request.model.clone() }),
    };
    permit.charge_prompt(accepted.n_prompt);
    Ok((permit, accepted))
}

/// Errors that an upstream may be without: not the request's own.
fn may_go_upstream(error: &RequestError) -> bool {
    use EngineError::{Lost, QueueFull, Unavailable};
    let of_engine = matches!(error, RequestError::Engine(Lost { .. } | QueueFull { .. } | Unavailable { .. }));
    of_engine || matches!(error, RequestError::Unavailable { .. })
}

/// The right to use a model that comes and goes, and how long it took to come.
#[derive(Default)]
struct Loaded {
    stay: Option<Stay>,
    waited: Duration,
}

/// Loads a model that is not in memory.
async fn load(
    app: &App,
    model: &ServedModel,
    request: &GenerateRequest,
    watch: &RequestWatch,
) -> Result<Loaded, RequestError> {
    let span = tracing::info_span!(target: TARGET, parent: watch.span(), "model_load");
    let asked = Instant::now();
    let stay = app.stay(model, request.keep_alive).instrument(span).await?;
    Ok(Loaded { stay, waited: asked.elapsed() })
}

/// Finds nodes that accept every choice. Where somebody else could answer, none is waited for.
async fn on_nodes(
    model: &Arc<ServedModel>,
    request: &GenerateRequest,
    caller: &Caller,
    loaded: Result<Loaded, RequestError>,
    (watch, mut attempts): (&mut RequestWatch, Attempts),
) -> Result<Accepted, RequestError> {
    let Loaded { stay, waited } = loaded?;
    if attempts.has_deputy() && !model.decode.iter().any(|node| model.ready_decode(node).is_some()) {
        let retry_after = Duration::from_secs(1);
        return Err(RequestError::Unavailable { reason: "no engine is ready".to_owned(), retry_after });
    }
    loop {
        match start(model, request, caller, &mut attempts, watch).await {
            Err(error) => attempts.go_on(model, error).await?,
            Ok(accepted) => return Ok(Accepted { stay, waited, ..accepted }),
        }
    }
}

/// Finds an upstream that begins to answer.
async fn on_upstream(
    serving: &ServedByUpstreams,
    request: &GenerateRequest,
    caller: &Caller,
    watch: &mut RequestWatch,
    reason: Option<&'static str>,
) -> Result<Accepted, RequestError> {
    if !request.earlier_tokens().is_empty() {
        let problem = "an upstream counts in tokens of its own; send the history to /api/chat".to_owned();
        return Err(RequestError::InvalidField { field: "context", problem });
    }
    let starting = upstream::start(serving, request, &caller.request_id).instrument(watch.span().clone());
    let started = starting.await?;
    let (n_prompt, reason) = (upstream::estimated_tokens(request), reason.unwrap_or(started.reason));
    watch.upstream(started.member.name(), reason, n_prompt, started.asked);
    let route = format!("upstream; upstream={}; reason={reason}", started.member.name());
    let choices = Choices::Text(started.choices);
    Ok(Accepted { n_prompt, route, choices, plan: None, stay: None, waited: Duration::ZERO })
}

/// What would be done with a request now, and why. It is rendered like any other, so it has to be admitted.
pub async fn explain(app: &App, request: &GenerateRequest, caller: &Caller) -> Result<Explanation, RequestError> {
    let model = app.pool.find_for(Some(&request.model), &caller.account)?;
    let _stay = app.stay(&model, request.keep_alive).await?;
    let _permit = app.admission.admit_brief(&caller.account)?;
    let served = &model;
    let prompt = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
        check_biases(request, &info)?;
        let form = ReplyForm::of(request, &info)?;
        let prompt = prompt::prepare(&node, (&info, served.longest_context(&info)), request, &form).await?;
        Ok((prompt, projector(request, &info)))
    };
    let (prompt, projector) = ask_about(&model, Some(&request.model), request.images(), prompt).await?;
    let asked = Prompt { tokens: &prompt, projector: projector.as_deref(), max_tokens: request.max_tokens };
    let explained = plan::explain(&model, &plan_request(asked, caller, &[]));
    Ok(Explanation::new(request.model.clone(), &explained))
}

/// What of a prompt matters to its plan.
struct Prompt<'a> {
    tokens: &'a [Token],
    /// Which one sees its images, if it has any.
    projector: Option<&'a str>,
    /// New tokens after it at most.
    max_tokens: Option<u32>,
}

fn plan_request<'a>(
    Prompt { tokens, projector, max_tokens }: Prompt<'a>,
    caller: &Caller,
    failed: &'a [usize],
) -> PlanRequest<'a> {
    PlanRequest {
        tokens,
        n_replayed: 0,
        scope: caller.cache_scope,
        max_tokens,
        policy: caller.policy,
        projector,
        exclude: failed,
        exclude_prefill: &[],
    }
}

/// What is known once engines have accepted every choice.
struct Accepted {
    n_prompt: u32,
    route: String,
    choices: Choices,
    /// The plan that its first choice is on, as long as nothing has come of it.
    plan: Option<watch::Receiver<Plan>>,
    /// Holds the model in memory.
    stay: Option<Stay>,
    /// How long the model was waited for.
    waited: Duration,
}

/// The choices of one request.
enum Choices {
    /// From an engine: tokens.
    Tokens {
        form: Box<ReplyForm>,
        model: Arc<ServedModel>,
        /// New tokens in each at most.
        max_tokens: Option<u32>,
        /// The prompt, if its tokens and those of the reply are to be told.
        context: Option<Vec<Token>>,
        deltas: Vec<DeltaStream>,
    },
    /// From an upstream: text.
    Text(Vec<TextChoice>),
}

/// Waits for an engine, prepares the prompt, plans, and starts every choice.
async fn start(
    model: &Arc<ServedModel>,
    request: &GenerateRequest,
    caller: &Caller,
    attempts: &mut Attempts,
    watch: &mut RequestWatch,
) -> Result<Accepted, RequestError> {
    let (node, info) = model.ready_as(&request.model, attempts.failed(), attempts.sight()).await?;
    check_biases(request, &info)?;
    let mut form = ReplyForm::of(request, &info)?;
    let span = tracing::info_span!(target: TARGET, parent: watch.span(), "prompt", node = node.name);
    let n_ctx = model.longest_context(&info);
    let prompt = prompt_of(node, (&info, n_ctx), request, &mut form);
    let prompt = attempts.call(model, node, prompt).instrument(span).await?;
    // One plan for all choices: they share the prompt, which is computed once.
    let span = tracing::info_span!(target: TARGET, parent: watch.span(), "plan");
    let projector = projector(request, &info);
    let max_tokens = request.max_tokens_after(prompt.len() as u32, n_ctx);
    let seen = Prompt { tokens: &prompt, projector: projector.as_deref(), max_tokens };
    let plan = span.in_scope(|| plan::plan(model, &plan_request(seen, caller, attempts.failed())))?;
    watch.planned(&plan, prompt.len() as u32);
    let (mut choices, n_prompt, route) =
        (Vec::with_capacity(request.n as usize), prompt.len() as u32, plan.to_string());
    let constraint = form.constraint(request);
    let context = request.context.is_some().then(|| prompt.clone());
    let images = projector.map(|projector| PromptImages { projector, images: request.images().to_vec() });
    let base = SequenceRequest { constraint, images, max_tokens, ..sequence(request, prompt, caller) };
    let mut followed = None;
    for choice in 0..request.n {
        let mut sequence = base.clone();
        // Each choice draws with its own seed.
        sequence.sampling.seed = sequence.sampling.seed.wrapping_add(u64::from(choice));
        let node = plan.decode();
        let span = tracing::info_span!(target: TARGET, parent: watch.span(), "decode", choice, node = node.name);
        let accepted = Resilient::begin(plan.for_choice(choice), sequence, span).await;
        attempts.note(model, node, &accepted);
        let accepted = accepted.map_err(|error| refused(error, request))?;
        followed.get_or_insert_with(|| accepted.follow());
        choices.push(accepted.into_deltas());
    }
    let choices =
        Choices::Tokens { form: Box::new(form), model: Arc::clone(model), max_tokens, context, deltas: choices };
    Ok(Accepted { n_prompt, route, choices, plan: followed, stay: None, waited: Duration::ZERO })
}

/// The prompt, and what it says of the reply's form.
async fn prompt_of(
    node: &Node,
    on: (&NodeInfo, u32),
    request: &GenerateRequest,
    form: &mut ReplyForm,
) -> Result<Vec<Token>, RequestError> {
    let prompt = prompt::prepare(node, on, request, form).await?;
    form.look_at_prompt(node, &prompt).await?;
    Ok(prompt)
}

/// With which projector a request's images are seen, if it has any, on a node that has rendered its prompt.
fn projector(request: &GenerateRequest, info: &NodeInfo) -> Option<String> {
    info.projector.clone().filter(|_| !request.images().is_empty())
}

/// The one check of a client's numbers that needs the model.
fn check_biases(request: &GenerateRequest, info: &NodeInfo) -> Result<(), RequestError> {
    let unknown = request.sampling.logit_bias.iter().find(|(token, _)| *token >= info.n_vocab);
    unknown.map_or(Ok(()), |(token, _)| {
        let problem = format!("token {token} is not in the model's vocabulary of {} tokens", info.n_vocab);
        Err(RequestError::InvalidField { field: "logit_bias", problem })
    })
}

/// The request as an engine sees it.
fn sequence(request: &GenerateRequest, prompt: Vec<Token>, caller: &Caller) -> SequenceRequest {
    SequenceRequest {
        prompt,
        generated: Vec::new(),
        sampling: request.sampling.clone(),
        max_tokens: request.max_tokens,
        top_logprobs: request.top_logprobs,
        ignore_eos: request.ignore_eos,
        group: (request.n > 1).then(|| Group { id: rand::random(), size: request.n }),
        cache_scope: caller.cache_scope,
        constraint: None,
        ephemeral: false,
        images: None,
        kv_source: None,
    }
}

/// A full queue is worth waiting for, unless the request alone is more than it holds: the choices of one request are
/// taken from it together.
fn refused(error: EngineError, request: &GenerateRequest) -> RequestError {
    match error {
        EngineError::QueueFull { limit } if request.n > limit => RequestError::InvalidField {
            field: "n",
            problem: format!("must be at most {limit} on this server, but is {}", request.n),
        },
        error => error.into(),
    }
}

/// Turns the choices' deltas into events. The permit and the watch live as long as the stream.
fn hold(permit: Permit, mut watch: RequestWatch, accepted: Accepted, request: &GenerateRequest) -> EventStream {
    let Accepted { n_prompt, choices, mut plan, stay, waited, .. } = accepted;
    let clock = || Clock::start(n_prompt, watch.inter_token_latency(), permit.meter());
    let mut merged: SelectAll<_> = match choices {
        Choices::Tokens { form, model, max_tokens, context, deltas } => {
            let streams = (0..).zip(deltas).map(|(i, deltas)| {
                let model = Arc::clone(&model);
                // A sequence that is left before its end does not know that its reply is complete.
                let stopped = move |n_tokens| model.routes.learn_output(max_tokens, n_tokens);
                let reply = ChoiceReply::new(&form, &request.stop).after(context.clone());
                choice_events(i, deltas, (reply, stopped), clock()).boxed()
            });
            streams.collect()
        }
        Choices::Text(choices) => {
            (0..).zip(choices).map(|(i, choice)| text_events(i, choice, request, clock(), n_prompt).boxed()).collect()
        }
    };
    Box::pin(async_stream::stream! {
        let _stay = stay;
        while let Some(mut event) = merged.next().await {
            match &mut event {
                Ok(event) => {
                    if let Event::Finished { timings, .. } = event {
                        timings.queue_ms += waited.as_secs_f64() * 1e3;
                    }
                    if let Event::Usage { n_estimated, n_prompt, .. } = event {
                        permit.charge_prompt(n_prompt.saturating_sub(*n_estimated));
                    }
                    watch.event(event);
                }
                Err(error) => watch.failed(error),
            }
            let failed = event.is_err();
            if let Some(route) = plan.as_mut().and_then(|plan| rerouted(plan, &event, &mut watch)) {
                yield Ok(Event::Rerouted { route });
            }
            if event.as_ref().map_or(true, Event::is_result) {
                plan = None;
            }
            yield event;
            if failed {
                break;
            }
        }
    })
}

/// The route, if it is not what was said of it.
fn rerouted(
    plan: &mut watch::Receiver<Plan>,
    event: &Result<Event, RequestError>,
    watch: &mut RequestWatch,
) -> Option<String> {
    // Without a sender the stream is over, and its last plan stands.
    let has_changed = plan.has_changed().unwrap_or(false);
    let now = plan.borrow_and_update();
    if has_changed {
        watch.rerouted(&now);
    }
    match event {
        Ok(Event::Handoff { timings: HandoffTimings { failure: Some(failure), .. }, .. }) => {
            Some(format!("{}; failure={}", *now, failure.as_str()))
        }
        _ => has_changed.then(|| now.to_string()),
    }
}

/// One choice: tokens to text, up to a stop string or the engine's own end.
fn choice_events(
    choice: u32,
    mut deltas: DeltaStream,
    (mut reply, stopped): (ChoiceReply, impl Fn(u32) + Send),
    mut clock: Clock,
) -> impl Stream<Item = Result<Event, RequestError>> + Send {
    async_stream::try_stream! {
        loop {
            match deltas.next().await.unwrap_or_else(|| Err(EngineError::lost("no last delta")))? {
                Delta::Started { n_cached } => {
                    clock.started(n_cached);
                    yield Event::Started { choice, n_cached };
                }
                Delta::Handoff(timings) => {
                    clock.n_computed = clock.n_computed.saturating_sub(timings.n_tokens);
                    yield Event::Handoff { choice, timings };
                }
                Delta::Token(token) => {
                    clock.token();
                    let step = reply.feed(token);
                    for part in step.parts {
                        yield part.of(choice);
                    }
                    if step.stopped {
                        // The engine's own account comes with the last delta, which is not waited for: dropping the
                        // stream is what stops the engine.
                        stopped(clock.n_tokens);
                        if let Some(tokens) = reply.take_context() {
                            yield Event::Context { choice, tokens };
                        }
                        yield finished(choice, &reply, FinishReason::Stop, &clock, clock.timings());
                        break;
                    }
                }
                Delta::Finished { reason, timings } => {
                    let rest = reply.finish(reason);
                    let reason = if rest.stopped { FinishReason::Stop } else { reason };
                    for part in rest.parts {
                        yield part.of(choice);
                    }
                    if let Some(tokens) = reply.take_context() {
                        yield Event::Context { choice, tokens };
                    }
                    yield finished(choice, &reply, reason, &clock, timings);
                    break;
                }
            }
        }
    }
}

/// The end of a choice whose sequence ended for this reason.
fn finished(choice: u32, reply: &ChoiceReply, reason: FinishReason, clock: &Clock, timings: Timings) -> Event {
    Event::Finished {
        choice,
        reason: reply.reason(reason),
        stop: reply.stop_string(),
        n_completion: clock.n_tokens,
        n_reasoning: reply.n_reasoning(),
        timings,
    }
}

/// Who asks, as far as the layers below HTTP need to know.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Separates callers in the prefix cache; derived from the API key that was presented.
    pub cache_scope: CacheScope,
    /// The id in `x-request-id`, for the log.
    pub request_id: String,
    /// What the presented key says of who asks.
    pub standing: Standing,
    /// Whose limits it is under.
    pub account: Arc<Account>,
    /// Where it stands while it waits to be admitted.
    pub place: QueuePlace,
    /// How this request is to be planned, if not as configured.
    pub policy: Option<&'static dyn Policy>,
    /// The span of the client's trace that asks, if its request names one.
    pub trace: Option<opentelemetry::Context>,
}

/// What the presented key says of who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has to present a key here.
    Anyone,
    /// A key of the endpoint's owner.
    Operator,
    /// Somebody else's key, or none where one is needed and this path does without.
    Guest,
}

/// An accepted request: what is known before its first token, and the events that follow.
///
/// Dropping it cancels all its sequences and gives its permit back.
pub struct Generation {
    /// Tokens in the rendered prompt.
    pub n_prompt: u32,
    /// One line on where this request runs and why, for `x-baton-route`.
    pub route: String,
    /// How tokens are drawn, with the model's defaults where the client chose nothing.
    pub sampling: Sampling,
    /// Events of all choices, interleaved. Ends after every choice has finished, or with an error.
    pub events: EventStream,
}

/// See [`Generation::events`].
pub type EventStream = Pin<Box<dyn Stream<Item = Result<Event, RequestError>> + Send>>;

#[cfg(test)]
mod tests;
