//! One choice's deltas, whatever happens to the engines behind them.
//!
//! A sequence is a function of its prompt, its sampling and the tokens so far, so any engine with the same model can
//! take it up where another left it. The reader of the stream sees a pause and then the next token.

mod account;
mod attempts;
mod engine_failure;
mod hedge;
mod patience;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::DeltaStream;
use baton_schemas::handoff::HandoffTimings;
use baton_schemas::sequence::{Delta, FinishReason, Timings};
use baton_schemas::{EngineError, SequenceRequest};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{Instrument, Span};

use self::account::Earlier;
use self::attempts::may_pass;
pub use self::attempts::{Attempts, ask, ask_about};
use self::engine_failure::is_engine_failure;
use self::hedge::Hedge;
use self::patience::Patience;
use crate::error::RequestError;
use crate::request::plan::{self, Plan, PlanRequest};
use crate::targets::nodes::{Claim, Sight, Task};

/// Engines that one sequence may lose in a row, without a token between, before its client is told.
const MAX_ATTEMPTS: u32 = 8;

/// Between attempts to find an engine that goes on.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// How long an engine that goes on is looked for. It outlasts the restart of a local engine, and of a node that its
/// machine's service manager starts again.
const TAKE_UP_DEADLINE: Duration = Duration::from_secs(30);

/// A sequence on its way through the pool.
pub struct Resilient {
    plan: Plan,
    /// Who wants to know what it is on now.
    followers: watch::Sender<Plan>,
    request: SequenceRequest,
    deltas: DeltaStream,
    claims: Vec<Claim>,
    planned: Instant,
    /// Tokens one sequence may hold.
    n_ctx: usize,
    /// A second route for the first token, and the wait that it may belong to.
    hedge: Option<Hedge>,
    /// There was one. A request has no third route.
    was_hedged: bool,
    /// The last wait ended because no token came, though the node lives.
    is_stuck: bool,
    /// An engine failed at it, and another one has it now.
    engine_failure: Option<EngineError>,
    patience: Patience,
    /// It goes on where it did not begin: its engine was lost, or a second route was quicker. When that one had its slot
    /// was not noted, so nothing is learned from its times.
    is_taken_up: bool,
    /// What came of the handoff, if there was one.
    handoff: Option<HandoffTimings>,
    /// When it had its slot on the decode node, after the plan.
    slot_ms: f64,
    /// When the first token of a direct route came, after the plan.
    first_token_ms: Option<f64>,
    /// Deltas that have come and were not passed on yet: those of a second route that has become the only one.
    said: VecDeque<Delta>,
    /// Of its whole life, whichever nodes it is on.
    span: Span,
}

impl Resilient {
    /// Starts a sequence on `plan`'s decode node. Returns once the node has accepted it; or, where a second route may be
    /// started, once its first token is late, and then that it is accepted is waited for as the token is. The span
    /// lives as long as the sequence. Errors: the node's refusal, or that it is lost.
    pub async fn begin(plan: Plan, mut request: SequenceRequest, span: Span) -> Result<Resilient, EngineError> {
        request.kv_source = plan.kv_source(&span);
        let mut patience = Patience::for_first_token(&plan);
        // The wait for the first token begins here.
        let (planned, (late, _)) = (Instant::now(), patience.due());
        let (claims, n_ctx) = (plan.claim(), n_ctx_of(&plan));
        let mut acceptance = acceptance(&plan, request.clone(), &span);
        let deltas = tokio::select! {
            biased;
            accepted = &mut acceptance => accepted?,
            () = tokio::time::sleep_until(late), if plan.model.deadlines.hedge => {
                futures::stream::once(acceptance).try_flatten().boxed()
            }
        };
        Ok(Resilient {
            followers: watch::Sender::new(plan.clone()),
            plan,
            request,
            deltas,
            claims,
            planned,
            n_ctx,
            hedge: None,
            was_hedged: false,
            is_stuck: false,
            engine_failure: None,
            patience,
            is_taken_up: false,
            handoff: None,
            slot_ms: 0.0,
            first_token_ms: None,
            said: VecDeque::new(),
            span,
        })
    }

    /// The plan that the sequence is on, as it changes: what was planned may turn out otherwise.
    pub fn follow(&self) -> watch::Receiver<Plan> {
        self.followers.subscribe()
    }

    /// The sequence's deltas: those of a single engine, whoever they come from. Dropping the stream cancels.
    pub fn into_deltas(mut self) -> DeltaStream {
        let deltas = async_stream::try_stream! {
            let mut earlier = Earlier::default();
            let mut n_attempts = 0;
            loop {
                match self.next_delta().await {
                    Ok(Delta::Started { n_cached }) => {
                        self.has_begun(n_cached);
                        if !std::mem::replace(&mut earlier.started, true) {
                            earlier.n_there = n_cached;
                            yield Delta::Started { n_cached };
                        }
                    }
                    Ok(Delta::Handoff(timings)) => {
                        self.patience.begins_anew();
                        self.learn_handoff(&timings);
                        if !std::mem::replace(&mut earlier.handed_over, true) {
                            earlier.n_there += timings.n_tokens;
                            yield Delta::Handoff(timings);
                        }
                    }
                    Ok(Delta::Token(token)) => {
                        if n_attempts > 0 || self.request.generated.is_empty() {
                            self.first_token_came();
                        }
                        earlier.first_token.get_or_insert_with(Instant::now);
                        n_attempts = 0;
                        self.request.generated.push(token.id);
                        self.patience = Patience::for_next_token(&self.plan);
                        yield Delta::Token(token);
                    }
                    Ok(Delta::Finished { reason, timings }) => {
                        self.learn_finished(&timings);
                        yield Delta::Finished { reason, timings: earlier.and(timings, &self.request) };
                        break;
                    }
                    Err(error) if error.is_lost_engine() || self.may_fail_over(&error) => {
                        n_attempts += 1;
                        self.left_by(&error);
                        earlier.n_tokens = self.request.generated.len() as u32;
                        if self.is_complete() {
                            // The engine died between the last token and saying so.
                            let timings = earlier.and(Timings::default(), &self.request);
                            yield Delta::Finished { reason: FinishReason::Length, timings };
                            break;
                        }
                        if n_attempts >= MAX_ATTEMPTS {
                            Err(error.clone())?;
                        }
                        self.take_up(error).await.map_err(|error| self.first_of(error))?;
                    }
                    Err(error) => Err(self.first_of(error))?,
                }
            }
        };
        deltas.boxed()
    }

    /// It has its slot, with this much of its tokens' KV. Nobody is asked for what is there.
    fn has_begun(&mut self, n_cached: u32) {
        self.patience.begins_anew();
        self.slot_ms = self.planned.elapsed().as_secs_f64() * 1e3;
        if self.plan.prefill().is_some() && n_cached as usize >= self.request.n_prefill() {
            let plan = self.plan.cached();
            self.claims = plan.claim();
            self.is_on(plan);
        }
    }

    /// What a node has to see to go on.
    fn sight(&self) -> Sight<'_> {
        Sight::by(projector_of(&self.request))
    }

    fn is_on(&mut self, plan: Plan) {
        self.followers.send_replace(plan.clone());
        self.plan = plan;
    }

    fn is_complete(&self) -> bool {
        let n_generated = self.request.generated.len();
        let n_tokens = self.request.prompt.len() + n_generated;
        // A node that is gone is still known for what it was.
        self.request.max_tokens.is_some_and(|n| n_generated >= n as usize) || n_tokens >= self.n_ctx
    }

    /// The decode node is gone, or as good as gone.
    fn lost(&mut self, error: &EngineError) {
        let node = self.plan.decode();
        // A node that lives serves others well, as far as is known.
        if !std::mem::take(&mut self.is_stuck) {
            node.failed(Task::Decode, "decode_lost");
            node.forget();
        }
        self.plan.model.fallbacks.count("decode_lost");
        let n_generated = self.request.generated.len();
        tracing::warn!(node = node.name, %error, n_generated, "a decode node was lost: the stream is taken up elsewhere");
    }

    /// Finds another engine that goes on. Gives up with the error that came first.
    async fn take_up(&mut self, lost: EngineError) -> Result<(), EngineError> {
        // Its choices run on their own from here.
        self.request.group = None;
        // What is left of the sequence there ends, so that it stands in nobody's way.
        (self.deltas, self.claims) = (futures::stream::empty().boxed(), Vec::new());
        let deadline = Instant::now() + TAKE_UP_DEADLINE;
        // An engine that has failed at this sequence does not take it up again; one that is lost may, once it is back.
        let barred = is_engine_failure(&lost).then_some(self.plan.route.decode);
        let mut failed = vec![self.plan.route.decode];
        loop {
            match self.start_again(&mut failed, barred).await {
                Ok(()) => return Ok(()),
                Err(RequestError::Engine(error)) if !may_pass(&error) => return Err(error),
                Err(error) => tracing::info!(%error, "no engine takes the stream up yet"),
            }
            if Instant::now() >= deadline {
                return Err(lost);
            }
            // Those that failed may be back, or have room now.
            if failed.len() >= self.plan.model.n_seeing(self.sight()) {
                failed = barred.into_iter().collect();
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Starts what is left of the sequence on a node that has not failed yet, or else notes that it has. Never on
    /// `barred`.
    async fn start_again(&mut self, failed: &mut Vec<usize>, barred: Option<usize>) -> Result<(), RequestError> {
        let model = Arc::clone(&self.plan.model);
        model.any_ready_but(&[], self.sight()).await?;
        let tokens = [&self.request.prompt[..], &self.request.generated[..]].concat();
        let left = self.request.max_tokens.map(|n| n.saturating_sub(self.request.generated.len() as u32));
        let request = PlanRequest {
            tokens: &tokens,
            n_replayed: u32::try_from(tokens.len() - 1 - self.request.n_prefill()).unwrap_or(u32::MAX),
            scope: self.request.cache_scope,
            max_tokens: left,
            policy: self.plan.asked_policy,
            projector: projector_of(&self.request),
            exclude: failed.as_slice(),
            exclude_prefill: &[],
        };
        let plan = plan::plan(&model, &request)?;
        if barred == Some(plan.route.decode) {
            return Err(EngineError::Unavailable { reason: "no other engine is ready".into() }.into());
        }
        self.request.kv_source = plan.kv_source(&self.span);
        let claims = plan.claim();
        let accepted = acceptance(&plan, self.request.clone(), &self.span).await;
        self.deltas = accepted.inspect_err(|error| {
            failed.push(plan.route.decode);
            if error.is_lost_engine() {
                plan.decode().failed(Task::Decode, "decode_lost");
            }
        })?;
        tracing::info!(route = %plan, n_generated = self.request.generated.len(), "a stream was taken up");
        (self.claims, self.handoff, self.first_token_ms, self.is_taken_up) = (claims, None, None, true);
        (self.n_ctx, self.patience) = (n_ctx_of(&plan), Patience::for_first_token(&plan));
        self.planned = Instant::now();
        self.is_on(plan);
        Ok(())
    }
}

/// That a plan's decode node accepts a sequence, or refuses it, or is lost.
fn acceptance(
    plan: &Plan,
    request: SequenceRequest,
    span: &Span,
) -> BoxFuture<'static, Result<DeltaStream, EngineError>> {
    let node = Arc::clone(plan.decode());
    async move { node.call(node.engine.generate(request)).await }.instrument(span.clone()).boxed()
}

/// With which projector the images of a sequence are seen, if it has any.
fn projector_of(request: &SequenceRequest) -> Option<&str> {
    request.images.as_ref().map(|images| images.projector.as_str())
}

/// Tokens one sequence may hold on a plan's decode node.
fn n_ctx_of(plan: &Plan) -> usize {
    plan.decode().info().map_or(usize::MAX, |info| info.n_ctx as usize)
}

#[cfg(test)]
mod tests;
