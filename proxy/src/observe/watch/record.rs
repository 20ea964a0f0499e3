//! What is written of a request: its course until now, and what counts at its end.

use std::time::{Instant, UNIX_EPOCH};

use baton_planner::cost::Prediction;
use baton_planner::policy::PolicyName;
use baton_planner::reason::RouteKind;

use super::super::{RequestOutcome, RouteRecord, TokenSources};
use super::{RequestWatch, TakenRoute, millis};
use crate::error::RequestErrorKind;
use crate::observe::metrics::requests::{RequestSummary, RouteSummary};

impl RequestWatch {
    fn route_summary(&self) -> Option<RouteSummary> {
        let taken = self.taken.as_ref()?;
        let since = |from: Instant, to: Option<Instant>| to.map(|to| to.saturating_duration_since(from).as_secs_f64());
        let predicted =
            taken.route.prediction.map(|prediction| prediction.ttft_ms / 1e3).filter(|seconds| *seconds > 0.0);
        let (drafts, lost_drafters) = self.drafts();
        Some(RouteSummary {
            kind: taken.route.kind,
            reason: taken.route.reason,
            n_prompt: taken.route.n_prompt,
            sources: self.sources(taken.route.n_prompt),
            n_completion: self.n_completion(),
            queued: since(self.arrived, self.slot),
            ttft: since(self.arrived, self.first_token),
            prediction_ratio: since(taken.at, self.first_token).zip(predicted).map(|(was, said)| was / said),
            completion_ratio: self.completion_ratio(taken),
            handoff: self.handoff,
            drafts,
            lost_drafters,
        })
    }

    fn sources(&self, n_prompt: u32) -> TokenSources {
        let n_transferred = self.upstream_prefill.map_or(0, |prefill| prefill.n_transferred);
        TokenSources::of(n_prompt, self.cached, self.handoff.as_ref(), n_transferred)
    }

    /// Actual ÷ predicted time to the last token, for a complete reply.
    fn completion_ratio(&self, taken: &TakenRoute) -> Option<f64> {
        // Several choices share an engine's steps, and their tokens come in one stream.
        if self.outcome() != RequestOutcome::Done || self.n_choices != 1 || self.n_completion() == 0 {
            return None;
        }
        let Prediction { ttft_ms, step_ms, .. } = taken.route.prediction?;
        let predicted_ms = ttft_ms + f64::from(self.n_completion() - 1) * step_ms;
        (predicted_ms > 0.0).then(|| taken.at.elapsed().as_secs_f64() * 1e3 / predicted_ms)
    }

    /// How much earlier a handed over prompt was done than it is predicted for the best machine alone, ms.
    fn saved_ms(&self, taken: &TakenRoute, outcome: Option<RequestOutcome>) -> Option<f64> {
        // As for a completion's prediction: several choices share an engine's steps.
        let is_comparable = outcome == Some(RequestOutcome::Done) && self.n_choices == 1 && self.n_completion() > 0;
        let was_handed_over = is_comparable && taken.route.kind == RouteKind::Handoff;
        let direct = taken.route.best_direct.as_ref().filter(|_| was_handed_over)?;
        let first_token = self.first_token?;
        let decode_ms = millis(first_token, Instant::now());
        // Alone, the machine that generated would have had the same neighbours, of which no plan knows.
        let is_same_decode = direct.node == taken.route.decode && self.moved_to.is_none();
        let direct_decode_ms = if is_same_decode { decode_ms } else { direct.decode_ms(self.n_completion()) };
        Some(direct.ttft_ms + direct_decode_ms - millis(taken.at, first_token) - decode_ms)
    }

    /// The request's course until now. `outcome` is known at its end.
    pub(super) fn record(&self, outcome: Option<RequestOutcome>) -> RouteRecord {
        let taken = self.taken.as_ref();
        let route = taken.map(|taken| &taken.route);
        let since_arrival = |at: Option<Instant>| at.map(|at| millis(self.arrived, at));
        let policy = route.map_or("", |route| route.policy.map_or(route.kind.as_str(), PolicyName::as_str));
        RouteRecord {
            at_ms: self.arrived_at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64),
            request_id: self.request_id.clone(),
            model: self.model.clone(),
            decode: route.map(|route| route.decode.clone()).unwrap_or_default(),
            prefill: route.and_then(|route| route.prefill.clone()),
            policy: policy.to_owned(),
            reason: route.map_or("", |route| route.reason.as_str()).to_owned(),
            n_prompt: route.map_or(0, |route| route.n_prompt),
            n_cached: self.cached.n_cached,
            sources: self.sources(route.map_or(0, |route| route.n_prompt)),
            restore_ms: self.restore_ms,
            n_completion: self.n_completion(),
            drafts: self.drafts().0.all(),
            n_vectors: None,
            admitted_ms: since_arrival(self.admitted),
            before_plan_ms: since_arrival(taken.map(|taken| taken.at)).unwrap_or_default(),
            slot_ms: since_arrival(self.slot),
            waiting_since_ms: None,
            running_since_ms: None,
            predicted: route.and_then(|route| route.prediction),
            predicted_ttft_ms: route.and_then(|route| Some(route.prediction?.ttft_ms)),
            predicted_direct_ttft_ms: route.and_then(|route| route.direct_ttft_ms),
            predicted_direct: route.and_then(|route| route.best_direct.clone()),
            saved_ms: taken.and_then(|taken| self.saved_ms(taken, outcome)),
            ttft_ms: taken.zip(self.first_token).map(|(taken, first)| millis(taken.at, first)),
            e2e_ms: millis(self.arrived, Instant::now()),
            handoff: self.handoff,
            upstream_prefill: self.upstream_prefill,
            simulated: route.is_some_and(|route| route.simulated),
            moved_to: self.moved_to.clone(),
            outcome,
            error: self.error.map(|error| error.as_str().to_owned()),
        }
    }
}

impl Drop for RequestWatch {
    fn drop(&mut self) {
        let outcome = self.outcome();
        self.observer.metrics.ended(&RequestSummary {
            model: &self.model,
            outcome,
            error: self.error,
            admission: self.admission(),
            route: self.route_summary(),
            e2e: self.arrived.elapsed().as_secs_f64(),
        });
        let error = self.error.map(RequestErrorKind::as_str);
        self.span.record("outcome", outcome.as_str()).record("error", error);
        let record = self.record(Some(outcome));
        if self.taken.is_some() {
            self.span.record("model", record.model.as_str()).record("decode", record.decode.as_str());
            self.span.record("prefill", record.prefill.as_deref()).record("reason", record.reason.as_str());
            self.span.record("n_prompt", record.n_prompt).record("n_cached", record.n_cached);
            self.span.record("n_completion", record.n_completion);
            tracing::info!(
                request_id = record.request_id,
                key = self.usage.key(),
                model = record.model,
                decode = record.decode,
                prefill = record.prefill.as_deref().unwrap_or_default(),
                prefill_ms = record.upstream_prefill.map(|prefill| prefill.prefill_ms),
                n_transferred = record.upstream_prefill.map(|prefill| prefill.n_transferred),
                moved_to = record.moved_to,
                reason = record.reason,
                n_prompt = record.n_prompt,
                n_cached = record.n_cached,
                n_completion = record.n_completion,
                first_token_ms = record.first_token_ms().unwrap_or_default(),
                e2e_ms = record.e2e_ms,
                outcome = outcome.as_str(),
                error = error.unwrap_or_default(),
                "request ended"
            );
            self.observer.history.ended(&record);
        }
        self.observer.journal.push(record);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use baton_planner::reason::RouteReason;
    use baton_schemas::draft::{DraftCounts, DraftReport, DrafterKind, DrafterLoss};
    use baton_schemas::sequence::{FinishReason, Timings};

    use super::*;
    use crate::account::Account;
    use crate::observe::{DirectPrediction, Observer, PlannedRoute};
    use crate::reply_event::{EventKind, ReplyEvent};
    use crate::usage::RequestUsage;

    /// A reply of 11 tokens, of which the `direct` machine alone is predicted to have the first after an hour, and then one a second.
    fn ended(kind: RouteKind, direct: &str, n_choices: u32, is_complete: bool) -> (RouteRecord, Arc<Observer>) {
        let observer = Arc::<Observer>::default();
        let usage = RequestUsage::new(&observer.usage, &Arc::new(Account::of_everyone()), None);
        let mut watch = RequestWatch::begin(&observer, "req_1", usage, None, n_choices);
        watch.admitted(Arc::new(AtomicU32::new(11)));
        watch.planned(PlannedRoute {
            n_prompt: 8_000,
            kind,
            reason: RouteReason::Faster,
            policy: None,
            decode: "mac".into(),
            prefill: Some("spark".into()),
            prediction: None,
            direct_ttft_ms: None,
            best_direct: Some(DirectPrediction { node: direct.into(), ttft_ms: 3.6e6, step_ms: 1_000.0 }),
            simulated: false,
        });
        for choice in 0..if is_complete { n_choices } else { 0 } {
            let timings = Default::default();
            let kind = EventKind::Finished {
                reason: FinishReason::Stop,
                stop: None,
                n_completion: 11,
                n_reasoning: 0,
                timings,
            };
            watch.event(&ReplyEvent { choice, kind });
        }
        drop(watch);
        (observer.journal.latest().remove(0), observer)
    }

    #[test]
    fn a_handoff_tells_what_it_saved_against_the_best_machine_alone() {
        let saved = |direct| {
            let (record, observer) = ended(RouteKind::Handoff, direct, 1, true);
            for _ in 0..10 {
                observer.history.tick(std::time::SystemTime::now(), Default::default());
            }
            let [sample] = &observer.history.since(0)[..] else { panic!("one sample") };
            assert_eq!((sample.compared, Some(sample.saved_ms)), (1, record.saved_ms));
            assert_eq!(record.predicted_direct.unwrap().node, direct);
            (sample.saved_ms, record.e2e_ms)
        };
        // The same machine saves time until its first token only; another one would also have generated at its own rate.
        for (direct, predicted_ms) in [("mac", 3.6e6), ("studio", 3.61e6)] {
            let (saved_ms, e2e_ms) = saved(direct);
            assert!(saved_ms < predicted_ms && saved_ms > predicted_ms - e2e_ms, "{direct}: {saved_ms}, {e2e_ms}");
        }
        for (kind, n_choices, is_complete) in
            [(RouteKind::Direct, 1, true), (RouteKind::Handoff, 2, true), (RouteKind::Handoff, 1, false)]
        {
            let (record, _) = ended(kind, "mac", n_choices, is_complete);
            assert_eq!(record.saved_ms, None, "{record:?}");
        }
    }

    #[test]
    fn guesses_of_a_choice_count_once_whether_it_ends_or_its_client_leaves() {
        let counts = |n, n_accepted| DraftCounts { n, n_accepted };
        let observer = Arc::<Observer>::default();
        let usage = RequestUsage::new(&observer.usage, &Arc::new(Account::of_everyone()), None);
        let mut watch = RequestWatch::begin(&observer, "req_1", usage, None, 2);
        for choice in 0..2 {
            let verified = Some((DrafterKind::PromptLookup, counts(5, 3)));
            let drafts = watch.drafts_of(choice);
            drafts.lock().token(Some(DraftReport { verified, loss: Some(DrafterLoss::Late) }));
            drafts.lock().token(None);
        }
        assert_eq!(watch.drafts().0.all(), counts(10, 4), "a right one of each choice has not come");
        let mut timings = Timings { drafter_lost: Some(DrafterLoss::Late), ..Timings::default() };
        *timings.drafts.of_mut(DrafterKind::PromptLookup) = counts(9, 6);
        let (reason, n_completion) = (FinishReason::Stop, 11);
        let kind = EventKind::Finished { reason, stop: None, n_completion, n_reasoning: 0, timings };
        watch.event(&ReplyEvent { choice: 1, kind });
        let (totals, lost) = watch.drafts();
        assert_eq!((totals.all(), lost.len()), (counts(14, 8), 2));
        drop(watch);
        assert_eq!(observer.journal.latest().remove(0).drafts, counts(14, 8));
    }
}
