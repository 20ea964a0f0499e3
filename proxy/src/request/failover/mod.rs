//! The events of one choice, despite lost engines, failing engines and late tokens.
//!
//! A sequence is a function of its prompt, its sampling and the tokens so far, so any engine with the same model can
//! continue it. The reader of the stream sees a pause and then the next token.
//!
//! ```text
//! begin ─> Streaming ─────> Done
//!            │    ▲
//!            ├─> Hedging    when the first token is late, until one of two routes gives it
//!            │    │
//!            └─> TakingUp   when the engine is lost or fails, until another one continues
//! ```

mod hedge;
mod learning;
mod losses;
mod poison;
mod progress;
mod retryable;
mod route_run;
mod start_retry;
mod take_up;
mod token_deadline;
mod well_formed;

use baton_link::SequenceStream;
use baton_planner::reason::FailureReason;
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::sequence::{CachedTokens, FinishReason, SequenceEvent, Timings};
use baton_schemas::{EngineError, SequenceRequest};
use futures::{StreamExt, TryStreamExt};
use tokio::sync::watch;
use tracing::Span;

use self::hedge::{Race, RaceEvent};
use self::losses::{LossKind, Losses};
pub use self::poison::{PoisonMark, Visit};
use self::progress::StreamProgress;
use self::retryable::{has_other_engine, is_engine_failure, is_transient};
use self::route_run::{RouteRun, RunEvent, accept};
pub use self::start_retry::{StartRetry, ask};
use self::take_up::{LostRoute, take_up};
use self::token_deadline::Overdue;
use crate::admission::{Place, SlotUse};
use crate::request::plan::Plan;
use crate::targets::models::ImageNeed;
use crate::targets::nodes::{FallbackReason, Task};

/// The engines that a sequence may lose without a token in between, and the processes that may end under its prompt, before
/// its client gets the error.
const MAX_LOSSES: u32 = 8;

/// A sequence that survives the loss of its engine.
pub struct Resilient {
    state: SequenceState,
    /// The prompt and the tokens so far, which any engine needs to continue.
    request: SequenceRequest,
    progress: StreamProgress,
    losses: Losses,
    mark: PoisonMark,
    /// A request gets no third route.
    was_hedged: bool,
    /// Its place goes where it goes on.
    place: Option<Place>,
    followers: watch::Sender<Plan>,
    /// Covers the whole sequence, whichever nodes it is on.
    span: Span,
}

enum SequenceState {
    /// One engine generates.
    Streaming(Box<RouteRun>),
    /// Two engines race for the first token.
    Hedging(Box<Race>),
    /// No engine generates; the search for one that continues is running.
    TakingUp(Box<LostRoute>),
    /// The last event, or an error, was passed on.
    Done,
}

/// A transition: the state that follows, and the event that the reader gets, if any.
struct NextState {
    state: SequenceState,
    event: Option<SequenceEvent>,
}

impl From<SequenceState> for NextState {
    fn from(state: SequenceState) -> NextState {
        NextState { state, event: None }
    }
}

impl Resilient {
    /// Starts a sequence on `plan`'s decode node. Returns once the node has accepted it. Where hedging is configured, it
    /// returns as soon as the first token is late, and acceptance is then awaited with the token. The span lives as long
    /// as the sequence. Errors: the node's refusal, or that it is lost.
    pub async fn begin(
        plan: Plan,
        mut request: SequenceRequest,
        mark: PoisonMark,
        span: Span,
    ) -> Result<Resilient, EngineError> {
        plan.name_sources(&mut request, &span);
        let followers = watch::Sender::new(plan.clone());
        let mut run = RouteRun::claim(plan, &mark);
        // The wait for the first token begins here.
        let due = run.deadline.due();
        let mut acceptance = accept(&run.plan, request.clone(), &span);
        run.events = tokio::select! {
            biased;
            accepted = &mut acceptance => accepted?,
            () = tokio::time::sleep_until(due.at), if run.plan.model.deadlines.hedge => {
                futures::stream::once(acceptance).try_flatten().boxed()
            }
        };
        Ok(Resilient {
            state: SequenceState::Streaming(Box::new(run)),
            request,
            progress: StreamProgress::default(),
            losses: Losses::default(),
            mark,
            was_hedged: false,
            place: None,
            followers,
            span,
        })
    }

    /// Keeps the sequence's place until its stream is dropped.
    pub fn keep_place(&mut self, place: Option<Place>) {
        self.place = place;
    }

    /// The sequence's place is where this run is.
    fn note_run(&mut self, run: &RouteRun) {
        self.place.iter_mut().for_each(|place| place.note_at(&run.plan.decode().places, run.slot_use));
    }

    /// Returns a receiver of the current plan, which changes with the route.
    pub fn follow(&self) -> watch::Receiver<Plan> {
        self.followers.subscribe()
    }

    /// The sequence's events, as a single engine would give them. Dropping the stream cancels the sequence.
    pub fn into_events(mut self) -> SequenceStream {
        let events = async_stream::try_stream! {
            while let Some(event) = self.next_event().await? {
                yield event;
            }
        };
        events.boxed()
    }

    /// Moves from state to state until there is an event for the reader. Returns `None` after the last one.
    async fn next_event(&mut self) -> Result<Option<SequenceEvent>, EngineError> {
        loop {
            // After an error the state stays `Done`.
            let next = match std::mem::replace(&mut self.state, SequenceState::Done) {
                SequenceState::Streaming(run) => self.stream(run).await?,
                SequenceState::Hedging(race) => self.race(*race).await?,
                SequenceState::TakingUp(lost) => self.take_up(*lost).await?,
                SequenceState::Done => return Ok(None),
            };
            self.state = next.state;
            if next.event.is_some() {
                return Ok(next.event);
            }
        }
    }

    /// `Streaming` → itself with each event, `Hedging` when the first token is late, `TakingUp` when the engine is lost,
    /// `Done` with the last event.
    async fn stream(&mut self, mut run: Box<RouteRun>) -> Result<NextState, EngineError> {
        match run.next().await {
            RunEvent::Sequence(Ok(event)) => Ok(self.stream_on(run, event)),
            RunEvent::Sequence(Err(error)) if error.is_lost_engine() || self.may_fail_over(&run, &error) => {
                self.lose(*run, LossKind::of(&error), error)
            }
            RunEvent::Sequence(Err(error)) => Err(self.first_failure_or(error)),
            RunEvent::Overdue(Overdue::Late) => Ok(self.hedge(run).into()),
            RunEvent::Overdue(Overdue::Stuck) => {
                let waited = run.deadline.longest_wait().as_secs_f32();
                let error = EngineError::lost(format!("no token for {waited} s, though its node lives"));
                self.lose(*run, LossKind::Stuck, error)
            }
        }
    }

    /// `Hedging` → `Streaming` on the route that gives the first token, or on the second one if the first is lost or stuck.
    async fn race(&mut self, mut race: Race) -> Result<NextState, EngineError> {
        match race.next().await {
            RaceEvent::First(Ok(event)) if is_decisive(&event) => Ok(self.stream_on(race.first, event)),
            RaceEvent::First(Ok(event)) => {
                let event = self.receive(&mut race.first, event);
                self.note_run(race.ahead());
                Ok(NextState { state: SequenceState::Hedging(Box::new(race)), event })
            }
            RaceEvent::First(Err(error)) if is_transient(&error) || self.may_fail_over(&race.first, &error) => {
                if error.is_lost_engine() || is_engine_failure(&error) {
                    self.count_loss(&race.first, LossKind::of(&error), &error);
                }
                self.mark.stay_at(&race.second.visit);
                Ok(self.switch_to(race.into_second()).into())
            }
            RaceEvent::First(Err(error)) => Err(self.first_failure_or(error)),
            RaceEvent::Second(Ok(event)) => {
                let is_decisive = is_decisive(&event);
                race.second.note_use(&event, &self.request);
                self.note_run(race.ahead());
                race.held_back.push(event);
                if !is_decisive {
                    return Ok(SequenceState::Hedging(Box::new(race)).into());
                }
                race.first.learn_overtaken();
                race.first.plan.model.fallbacks.count(FallbackReason::HedgeWon);
                Ok(self.switch_to(race.into_second()).into())
            }
            RaceEvent::Second(Err(error)) => {
                tracing::info!(%error, "the second route of a late request was lost; the first one is awaited");
                if error.is_lost_engine() {
                    race.second.plan.decode().failed(Task::Decode, FailureReason::DecodeLost);
                    self.mark.lost(&race.second.visit);
                    self.mark.stay_at(&race.first.visit);
                }
                self.note_run(&race.first);
                Ok(SequenceState::Streaming(race.first).into())
            }
            RaceEvent::FirstIsStuck => Ok(self.switch_to(race.into_second()).into()),
        }
    }

    /// `TakingUp` → `Streaming` on the engine that accepts the rest.
    async fn take_up(&mut self, lost: LostRoute) -> Result<NextState, EngineError> {
        let taken_up = take_up(lost, &mut self.request, &mut self.mark, &self.span).await;
        let run = taken_up.map_err(|error| self.first_failure_or(error))?;
        Ok(self.switch_to(Box::new(run)).into())
    }

    fn stream_on(&mut self, mut run: Box<RouteRun>, event: SequenceEvent) -> NextState {
        let is_last = matches!(event, SequenceEvent::Finished { .. });
        let event = self.receive(&mut run, event);
        self.note_run(&run);
        NextState { state: if is_last { SequenceState::Done } else { SequenceState::Streaming(run) }, event }
    }

    /// Learns from an event. Returns the event that the reader gets, if any.
    fn receive(&mut self, run: &mut RouteRun, event: SequenceEvent) -> Option<SequenceEvent> {
        run.note_use(&event, &self.request);
        match event {
            SequenceEvent::Started(CachedTokens { n_cached, .. }) => {
                if run.has_slot(n_cached, &self.request) {
                    self.followers.send_replace(run.plan.clone());
                }
                self.progress.start(n_cached).then_some(event)
            }
            SequenceEvent::PrefillBegun => {
                run.prefill_begun();
                None
            }
            SequenceEvent::Handoff(report) => {
                run.prefill_begun();
                // A node of an older version does not report this time.
                let report = report.with_after_prefill(report.after_prefill_ms);
                run.learn_handoff(&report, &self.request);
                self.note_prefill(run, &report);
                self.progress.hand_over(&report).then_some(SequenceEvent::Handoff(report))
            }
            SequenceEvent::Token(mut token) => {
                if !run.has_token {
                    run.learn_first_token(&self.request);
                }
                token.drafts = self.progress.token(token.drafts);
                self.losses.n_in_a_row = 0;
                self.mark.token(&mut run.visit);
                self.request.generated.push(token.id);
                run.deadline.expect_next_token(&run.plan);
                Some(SequenceEvent::Token(token))
            }
            SequenceEvent::Finished { reason, timings } => {
                self.mark.clear();
                run.learn_finished(&timings, &self.request);
                Some(SequenceEvent::Finished { reason, timings: self.progress.timings(timings, &self.request) })
            }
        }
    }

    /// Notes a prefill node that may have ended under the prompt. The decode node computes the prompt now.
    fn note_prefill(&mut self, run: &mut RouteRun, report: &HandoffReport) {
        let visit = run.prefill_visit.take();
        let may_have_ended = matches!(report.failure, Some(HandoffFailure::PrefillLost | HandoffFailure::PrefillDown));
        if let Some(visit) = visit.filter(|_| may_have_ended) {
            self.mark.lost(&visit);
            self.mark.stay_at(&run.visit);
        }
    }

    /// The first token is late: `Streaming` → `Hedging`, if that is configured and another node is ready.
    fn hedge(&mut self, mut run: Box<RouteRun>) -> SequenceState {
        run.count_late();
        let is_first_try = self.request.generated.is_empty() && !self.mark.is_quarantined();
        if !run.plan.model.deadlines.hedge || self.was_hedged || !is_first_try {
            return SequenceState::Streaming(run);
        }
        match hedge::start(&run.plan, &self.request, &self.mark, &self.span) {
            Ok(second) => {
                tracing::info!(route = %second.plan, "a late request was started a second time; the first token decides");
                run.plan.model.fallbacks.count(FallbackReason::Hedged);
                self.was_hedged = true;
                SequenceState::Hedging(Box::new(Race { first: run, second: Box::new(second), held_back: Vec::new() }))
            }
            Err(error) => {
                tracing::info!(%error, "there is no second route for a late request; the first one is awaited");
                SequenceState::Streaming(run)
            }
        }
    }

    /// Continues the sequence on this run alone.
    fn switch_to(&mut self, run: Box<RouteRun>) -> SequenceState {
        // The other choices of the group stay where they are.
        self.request.group = None;
        self.note_run(&run);
        if self.request.generated.is_empty() {
            self.progress.restart();
        }
        self.followers.send_replace(run.plan.clone());
        SequenceState::Streaming(run)
    }

    /// The engine stopped: → `TakingUp`, or `Done` if nothing is left to generate. Dropping the run cancels the sequence
    /// on its node. Errors: too many engines were lost in a row.
    fn lose(&mut self, run: RouteRun, kind: LossKind, error: EngineError) -> Result<NextState, EngineError> {
        self.losses.n_in_a_row += 1;
        self.place.iter_mut().for_each(|place| place.note(SlotUse::NoSlot));
        self.count_loss(&run, kind, &error);
        self.progress.lose(self.request.generated.len());
        if self.is_complete(run.n_ctx) {
            // The engine was lost between the last token and the last event.
            let timings = self.progress.timings(Timings::default(), &self.request);
            let event = SequenceEvent::Finished { reason: FinishReason::Length, timings };
            return Ok(NextState { state: SequenceState::Done, event: Some(event) });
        }
        if self.losses.n_in_a_row.max(self.mark.n_lost() as u32) >= MAX_LOSSES {
            return Err(error);
        }
        Ok(SequenceState::TakingUp(Box::new(LostRoute { plan: run.plan, error })).into())
    }

    /// Counts the stop of the decode node, in its breaker and in the fallbacks.
    fn count_loss(&mut self, run: &RouteRun, kind: LossKind, error: &EngineError) {
        let node = run.plan.decode();
        let fallbacks = &run.plan.model.fallbacks;
        match kind {
            LossKind::Lost => {
                // The outcome of the handoff may have been lost with the decode node.
                run.prefill_visit.iter().for_each(|visit| self.mark.lost(visit));
                self.mark.lost(&run.visit);
                node.failed(Task::Decode, FailureReason::DecodeLost);
                node.forget();
                fallbacks.count(FallbackReason::DecodeLost);
            }
            LossKind::Stuck => fallbacks.count(FallbackReason::DecodeLost),
            LossKind::Failed => {
                node.failed(Task::Decode, FailureReason::EngineFailed);
                fallbacks.count(FallbackReason::EngineFailed);
                self.losses.engine_failure = Some(error.clone());
            }
        }
        let n_generated = self.request.generated.len();
        tracing::warn!(node = node.name, %error, n_generated, "an engine stopped mid-stream; Baton looks for another one");
    }

    /// Returns true if another engine should continue where this one failed. Only once per sequence: if two engines fail,
    /// the request counts as the cause.
    fn may_fail_over(&self, run: &RouteRun, error: &EngineError) -> bool {
        let image_need = ImageNeed::of_prompt(self.request.projector());
        is_engine_failure(error)
            && self.losses.engine_failure.is_none()
            && has_other_engine(&run.plan.model, &[run.plan.route.decode], image_need)
    }

    /// The error that the client gets: the first of several engine failures.
    fn first_failure_or(&self, error: EngineError) -> EngineError {
        self.losses.engine_failure.clone().filter(|_| is_engine_failure(&error)).unwrap_or(error)
    }

    /// Returns true if no more tokens can follow: the client wants no more, or the context is full.
    fn is_complete(&self, n_ctx: usize) -> bool {
        let n_generated = self.request.generated.len();
        let n_tokens = self.request.prompt.len() + n_generated;
        self.request.max_tokens.is_some_and(|n| n_generated >= n as usize) || n_tokens >= n_ctx
    }
}

/// Returns true for an event that decides a race.
fn is_decisive(event: &SequenceEvent) -> bool {
    matches!(event, SequenceEvent::Token(_) | SequenceEvent::Finished { .. })
}

#[cfg(test)]
mod tests;
