//! What a sequence's life teaches, and what is told of it at its end.

use baton_schemas::SequenceRequest;
use baton_schemas::handoff::HandoffTimings;
use baton_schemas::sequence::Timings;
use tokio::time::Instant;

use super::Resilient;
use crate::targets::nodes::{Claim, Task};

impl Resilient {
    /// The first token, here or after an engine was lost.
    pub(super) fn first_token_came(&mut self) {
        self.claims.iter_mut().for_each(Claim::prompt_done);
        self.plan.decode().succeeded(Task::Decode);
        self.plan.decode().remember(self.request.cache_scope, &self.request.prompt);
        let actual_ms = self.planned.elapsed().as_secs_f64() * 1e3;
        let Some(prediction) = self.plan.prediction.filter(|_| !self.is_taken_up) else { return };
        let routes = &self.plan.model.routes;
        match &self.handoff {
            // What was predicted did not take place.
            Some(handoff) if handoff.failure.is_some() => {}
            Some(handoff) => {
                routes.note_error(prediction.ttft_ms, actual_ms);
                let beside_ms = handoff.prefill_ms - handoff.stalled_ms - handoff.compute_ms;
                // KV is asked for once there is a slot for it.
                let own_ms = actual_ms - self.slot_ms - handoff.queue_ms - beside_ms.max(0.0);
                routes.correct(self.plan.route.prefill, self.plan.route.decode, prediction.own_ms(), own_ms);
            }
            None => {
                routes.note_error(prediction.ttft_ms, actual_ms);
                self.first_token_ms = Some(actual_ms);
            }
        }
    }

    pub(super) fn learn_handoff(&mut self, timings: &HandoffTimings) {
        self.handoff = Some(*timings);
        self.plan.model.learn_handoff(self.plan.route, timings);
        if let Some(failure) = timings.failure {
            self.plan.model.fallbacks.count(failure.as_str());
        }
        if let Some(prefill) = self.plan.prefill().filter(|_| timings.failure.is_none()) {
            prefill.remember(self.request.cache_scope, &self.request.prompt);
        }
    }

    pub(super) fn learn_finished(&self, timings: &Timings) {
        let (model, node) = (&self.plan.model, self.plan.decode());
        // One that was taken up computes its own tokens again, or began while another route was heard; a prompt with
        // images takes what its images take.
        if !self.is_taken_up && self.request.images.is_none() {
            model.learn_stream(self.plan.route, timings);
        }
        if let Some((prediction, actual_ms)) = self.plan.prediction.zip(self.first_token_ms) {
            let beside_ms = timings.prompt_ms - timings.compute_ms - prediction.step_ms;
            let own_ms = actual_ms - timings.queue_ms - beside_ms.max(0.0);
            model.routes.correct(None, self.plan.route.decode, prediction.own_ms(), own_ms);
        }
        model.routes.learn_output(self.request.max_tokens, self.request.generated.len() as u32);
        let tokens = [&self.request.prompt[..], &self.request.generated[..]].concat();
        node.remember(self.request.cache_scope, &tokens);
    }
}

/// What came from the engines of one sequence so far.
#[derive(Default)]
pub(super) struct Earlier {
    pub(super) started: bool,
    pub(super) handed_over: bool,
    /// Positions of the prompt that nobody had to compute for this sequence's first decode node.
    pub(super) n_there: u32,
    pub(super) first_token: Option<Instant>,
    /// Tokens that came before the last engine was lost.
    pub(super) n_tokens: u32,
}

impl Earlier {
    /// The account of a sequence whose last engine says this.
    pub(super) fn and(&self, timings: Timings, request: &SequenceRequest) -> Timings {
        if self.n_tokens == 0 {
            return timings;
        }
        Timings {
            prompt_n: (request.prompt.len() as u32).saturating_sub(self.n_there),
            predicted_n: timings.predicted_n + self.n_tokens,
            predicted_ms: self.first_token.map_or(0.0, |first| first.elapsed().as_secs_f64() * 1e3),
            ..timings
        }
    }
}
