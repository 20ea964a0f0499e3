//! Waiting for a choice's next delta: its deadlines, and a second route for a first token that is late.
//!
//! Off unless it is configured. A sequence is a function of its prompt, its sampling and its seed, so both routes say the
//! same, and it does not matter whose first token is taken: from then on there is one route again.

use baton_engines::DeltaStream;
use baton_engines::trace::TARGET;
use baton_schemas::EngineError;
use baton_schemas::sequence::Delta;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::time::Instant;

use super::attempts::may_pass;
use super::engine_failure::is_engine_failure;
use super::patience::{Due, Patience};
use super::{Resilient, acceptance, n_ctx_of, projector_of};
use crate::error::RequestError;
use crate::request::plan::{self, Plan, PlanRequest};
use crate::targets::nodes::{Claim, Task};

/// A second route, until one of the two has given a token. Dropping it cancels its sequence.
pub(super) struct Hedge {
    plan: Plan,
    deltas: DeltaStream,
    claims: Vec<Claim>,
    began: Instant,
    /// What it said before its first token: that it started, and what came of a handoff.
    said: Vec<Delta>,
}

/// Which of two routes spoke first, or that neither did in time.
enum Heard {
    First(Result<Delta, EngineError>),
    Second(Result<Delta, EngineError>),
    Nothing(Due),
}

impl Resilient {
    /// The next delta, of whichever route delivers first while there are two.
    pub(super) async fn next_delta(&mut self) -> Result<Delta, EngineError> {
        loop {
            if let Some(delta) = self.said.pop_front() {
                return Ok(delta);
            }
            match self.hear().await {
                // With its first word that counts, a route is the only one.
                Heard::First(Ok(delta @ (Delta::Token(_) | Delta::Finished { .. }))) => {
                    self.hedge = None;
                    return Ok(delta);
                }
                Heard::First(Err(error))
                    if self.hedge.is_some() && (may_pass(&error) || self.may_fail_over(&error)) =>
                {
                    if error.is_lost_engine() || is_engine_failure(&error) {
                        self.left_by(&error);
                    }
                    self.take_the_hedge();
                }
                Heard::First(outcome) => return outcome,
                Heard::Second(Ok(delta @ (Delta::Token(_) | Delta::Finished { .. }))) => {
                    self.learn_that_it_was_late();
                    self.plan.model.fallbacks.count("hedge_won");
                    self.take_the_hedge();
                    self.said.push_back(delta);
                }
                Heard::Second(Ok(delta)) => self.hedge.iter_mut().for_each(|hedge| hedge.said.push(delta.clone())),
                Heard::Second(Err(error)) => {
                    tracing::info!(%error, "the second route of a late request was lost");
                    if let Some(hedge) = self.hedge.take().filter(|_| error.is_lost_engine()) {
                        hedge.plan.decode().failed(Task::Decode, "decode_lost");
                    }
                }
                Heard::Nothing(Due::Late) => self.late(),
                Heard::Nothing(Due::Stuck) if self.hedge.is_some() => self.take_the_hedge(),
                Heard::Nothing(Due::Stuck) => {
                    (self.hedge, self.is_stuck) = (None, true);
                    let waited = self.patience.at_most().as_secs_f32();
                    return Err(EngineError::lost(format!("no token for {waited} s, though its node lives")));
                }
            }
        }
    }

    async fn hear(&mut self) -> Heard {
        let (at, due) = self.patience.due();
        let Resilient { deltas, hedge, .. } = self;
        let second = match hedge {
            Some(hedge) => hedge.deltas.next().left_future(),
            None => std::future::pending().right_future(),
        };
        let ended = || Err(EngineError::lost("no last delta"));
        tokio::select! {
            biased;
            delta = deltas.next() => Heard::First(delta.unwrap_or_else(ended)),
            delta = second => Heard::Second(delta.unwrap_or_else(ended)),
            () = tokio::time::sleep_until(at) => Heard::Nothing(due),
        }
    }

    /// The token is late: counts it, and starts a second route for a first one if that is wanted and there is one.
    fn late(&mut self) {
        self.patience.found_late();
        let (model, node, reason) = (&self.plan.model, &self.plan.decode().name, self.patience.reason);
        model.fallbacks.count(reason);
        let waited_ms = self.planned.elapsed().as_millis();
        tracing::warn!(node, reason, waited_ms, "a token is late; its node lives and is waited for");
        if !model.deadlines.hedge || self.was_hedged || !self.request.generated.is_empty() {
            return;
        }
        match self.start_hedge() {
            Ok(hedge) => {
                tracing::info!(route = %hedge.plan, "a late request was started a second time");
                self.plan.model.fallbacks.count("hedged");
                (self.hedge, self.was_hedged) = (Some(hedge), true);
            }
            Err(error) => tracing::info!(%error, "there is no second route for a late request"),
        }
    }

    fn start_hedge(&self) -> Result<Hedge, RequestError> {
        let mut request = self.request.clone();
        // Its other choices run on their own.
        request.group = None;
        let exclude = [self.plan.route.decode];
        let ask = PlanRequest {
            tokens: &request.prompt,
            n_replayed: 0,
            scope: request.cache_scope,
            max_tokens: request.max_tokens,
            policy: self.plan.asked_policy,
            projector: projector_of(&request),
            exclude: &exclude,
            // It may be what the first route waits for.
            exclude_prefill: self.plan.route.prefill.as_slice(),
        };
        let plan = plan::plan(&self.plan.model, &ask)?;
        if plan.route.decode == self.plan.route.decode {
            return Err(EngineError::Unavailable { reason: "no other node is ready".into() }.into());
        }
        let node = &plan.decode().name;
        let span = tracing::info_span!(target: TARGET, parent: &self.span, "decode", node, hedged = true);
        request.kv_source = plan.kv_source(&span);
        // Begins when it is first polled, beside the first route, which may still speak.
        let mut deltas = futures::stream::once(acceptance(&plan, request, &span)).try_flatten();
        let deltas = async_stream::stream! {
            // The span is the stream's, and lives as long as it does.
            let _span = span;
            while let Some(delta) = deltas.next().await {
                yield delta;
            }
        };
        Ok(Hedge { claims: plan.claim(), plan, deltas: deltas.boxed(), began: Instant::now(), said: Vec::new() })
    }

    /// The second route is the only one from now on. Drops, and so cancels, the first.
    fn take_the_hedge(&mut self) {
        let Some(Hedge { plan, deltas, claims, began, said }) = self.hedge.take() else { return };
        self.said.extend(said);
        // Tokens to come are waited for as this route predicts them.
        self.patience = Patience::for_first_token(&plan);
        (self.n_ctx, self.request.group) = (n_ctx_of(&plan), None);
        (self.handoff, self.first_token_ms, self.is_taken_up) = (None, None, true);
        (self.deltas, self.claims, self.planned) = (deltas, claims, began);
        self.is_on(plan);
    }

    /// What the first route's prediction was wrong by is not known, but that it was, and by how much at least.
    fn learn_that_it_was_late(&self) {
        if let Some(prediction) = &self.plan.prediction {
            let (route, waited_ms) = (self.plan.route, self.planned.elapsed().as_secs_f64() * 1e3);
            self.plan.model.routes.note_error(prediction.ttft_ms, waited_ms);
            self.plan.model.routes.correct(route.prefill, route.decode, prediction.own_ms(), waited_ms);
        }
    }
}
