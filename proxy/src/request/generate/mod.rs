//! The life of a request, from an admitted `GenerateRequest` to a stream of text.

mod caller;
pub(crate) mod clock;
mod reply;

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engines::trace::TARGET;
use baton_planner::reason::RouteReason;
use baton_reply::tools::{NoThinking, ReplyForm};
use baton_schemas::image::PromptImages;
use baton_schemas::node::NodeInfo;
use baton_schemas::sequence::Group;
use baton_schemas::{EngineError, GenerateRequest, SequenceRequest, Token};
use tracing::Instrument;

pub use self::caller::{Caller, Standing};
use self::reply::{Accepted, Choices, hold};
pub use self::reply::{EventStream, Generation};
use crate::app::App;
use crate::error::RequestError;
use crate::observe::RequestWatch;
use crate::request::admission::Permit;
use crate::request::failover::{Resilient, StartRetry, ask_about};
use crate::request::plan::explanation::Explanation;
use crate::request::plan::{self, PlanRequest};
use crate::request::prompt;
use crate::targets::model_loading::Stay;
use crate::targets::nodes::{FallbackReason, Node, ServedModel};
use crate::targets::upstreams::{self, ServedByUpstreams};

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
    let attempts = StartRetry::about(request.images());
    let accepted = match (model, upstreams) {
        (Some(model), None) => on_nodes(&model, request, caller, loaded, (watch, attempts)).await?,
        (Some(model), Some(serving)) => {
            // Tokens mean nothing to an upstream, so for them an engine is waited for.
            let attempts = if request.earlier_tokens().is_empty() { attempts.with_upstream() } else { attempts };
            match on_nodes(&model, request, caller, loaded, (watch, attempts)).await {
                Err(error) if may_go_upstream(&error) => {
                    model.fallbacks.count(FallbackReason::Upstream);
                    tracing::info!(request_id = caller.request_id, %error, "no engine takes the request: asking an upstream");
                    match on_upstream(&serving, request, caller, watch, Some(RouteReason::NoEngine)).await {
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
    (watch, mut attempts): (&mut RequestWatch, StartRetry),
) -> Result<Accepted, RequestError> {
    let Loaded { stay, waited } = loaded?;
    if attempts.has_upstream() && !model.decode.iter().any(|node| model.ready_decode(node).is_some()) {
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
    reason: Option<RouteReason>,
) -> Result<Accepted, RequestError> {
    if !request.earlier_tokens().is_empty() {
        let problem = "an upstream counts in tokens of its own; send the history to /api/chat".to_owned();
        return Err(RequestError::InvalidField { field: "context", problem });
    }
    let starting = upstreams::start(serving, request, &caller.request_id).instrument(watch.span().clone());
    let started = starting.await?;
    let (n_prompt, reason) = (upstreams::estimated_tokens(request), reason.unwrap_or(started.reason));
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
        let form = form_of(request, &info)?;
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

/// Waits for an engine, prepares the prompt, plans, and starts every choice.
async fn start(
    model: &Arc<ServedModel>,
    request: &GenerateRequest,
    caller: &Caller,
    attempts: &mut StartRetry,
    watch: &mut RequestWatch,
) -> Result<Accepted, RequestError> {
    let (node, info) = model.ready_as(&request.model, attempts.failed(), attempts.sight()).await?;
    check_biases(request, &info)?;
    let mut form = form_of(request, &info)?;
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

/// The form that a model gives the reply to a request.
fn form_of(request: &GenerateRequest, info: &NodeInfo) -> Result<ReplyForm, RequestError> {
    ReplyForm::of(request, &info.facts.chat_template)
        .map_err(|NoThinking| RequestError::Incapable { model: request.model.clone(), capability: "thinking" })
}

/// The prompt, and what it says of the reply's form.
async fn prompt_of(
    node: &Node,
    on: (&NodeInfo, u32),
    request: &GenerateRequest,
    form: &mut ReplyForm,
) -> Result<Vec<Token>, RequestError> {
    let prompt = prompt::prepare(node, on, request, form).await?;
    if let Some(tail) = form.prompt_tail(&prompt) {
        form.read_prompt_tail(&node.engine.detokenize(tail).await?);
    }
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

#[cfg(test)]
mod tests;
