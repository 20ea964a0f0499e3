//! Learns from a run: rates of nodes and links, corrections of predictions, and which node caches which prefix.

use baton_planner::reason::FailureReason;
use baton_schemas::SequenceRequest;
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::sequence::Timings;

use super::route_run::RouteRun;
use crate::targets::nodes::{FallbackReason, NodeClaim, Task};

impl RouteRun {
    /// The run's first token came.
    pub(super) fn learn_first_token(&mut self, request: &SequenceRequest) {
        self.has_token = true;
        self.claims.iter_mut().for_each(NodeClaim::prompt_done);
        self.plan.decode().succeeded(Task::Decode);
        self.plan.decode().remember(request.cache_scope, &request.prompt);
        self.blame_prefill();
        let actual_ms = self.elapsed_ms();
        let Some(prediction) = self.plan.prediction.filter(|_| self.is_first_route) else { return };
        let routes = &self.plan.model.routes;
        match &self.times.handoff {
            // A failed handoff is not what was predicted, so its times correct nothing.
            Some(handoff) if handoff.failure.is_some() => {}
            Some(handoff) => {
                let others_ms = handoff.prefill_ms - handoff.stalled_ms - handoff.compute_ms;
                // The decode node pulls KV only once it has a slot.
                let own_ms = actual_ms - self.times.slot_ms - handoff.queue_ms - others_ms.max(0.0);
                if self.plan.is_tried_by(handoff.n_computed) {
                    let predicted_ms = prediction.own_ms_given(handoff.compute_ms);
                    routes.correct(self.plan.route, handoff.n_computed, predicted_ms, own_ms);
                }
            }
            None => self.times.first_token_ms = Some(actual_ms),
        }
    }

    /// If the prefill node computed NaN or infinity, the prompt is not the cause: the decode node has computed it.
    fn blame_prefill(&self) {
        let failure = self.times.handoff.and_then(|handoff| handoff.failure);
        if failure == Some(HandoffFailure::NotFinite)
            && let Some(prefill) = self.plan.prefill()
        {
            prefill.failed(Task::Prefill, FailureReason::Handoff(HandoffFailure::NotFinite));
        }
    }

    /// The prompt's handoff ended.
    pub(super) fn learn_handoff(&mut self, timings: &HandoffReport, request: &SequenceRequest) {
        self.deadline.restart();
        self.times.handoff = Some(*timings);
        // Images take time to encode, so their tokens show no rate of the prefill node.
        let n_computed = if request.images.is_some() { 0 } else { timings.n_computed };
        let timings_of_node = HandoffReport { n_computed, ..*timings };
        self.plan.model.learn_handoff(self.plan.route, &timings_of_node, request.lossless_kv);
        if let Some(failure) = timings.failure {
            self.plan.model.fallbacks.count(FallbackReason::Handoff(failure));
        } else if let Some(prefill) = self.plan.prefill() {
            prefill.note_held(self.plan.promised.prefill, timings.n_cached);
            prefill.remember(request.cache_scope, &request.prompt);
        }
    }

    /// The sequence is complete. `timings` are the engine's own.
    pub(super) fn learn_finished(&self, timings: &Timings, request: &SequenceRequest) {
        let model = &self.plan.model;
        // Learn only from plain requests: an engine that continues a sequence computes its tokens again, a second route
        // starts while the first one runs, and images take time to encode.
        if self.is_first_route && request.images.is_none() {
            model.learn_stream(self.plan.route, timings);
        }
        let predicted = self.plan.prediction.filter(|_| self.plan.is_tried_by(timings.prompt_n));
        if let Some((prediction, actual_ms)) = predicted.zip(self.times.first_token_ms) {
            let others_ms = timings.prompt_ms - timings.compute_ms - prediction.step_ms;
            let own_ms = actual_ms - timings.queue_ms - others_ms.max(0.0);
            let predicted_ms = prediction.own_ms_given(timings.compute_ms);
            model.routes.correct(self.plan.route, timings.prompt_n, predicted_ms, own_ms);
        }
        model.routes.learn_output(request.max_tokens, request.generated.len() as u32);
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        self.plan.decode().remember(request.cache_scope, &tokens);
        if self.times.handoff.is_some_and(|handoff| handoff.failure.is_none()) && request.group.is_none() {
            model.return_kv(self.plan.route, request);
        }
    }

    /// Another route gave the first token. This route's prediction was wrong by at least the time waited.
    pub(super) fn learn_overtaken(&self) {
        if let Some(prediction) = &self.plan.prediction {
            let (routes, waited_ms) = (&self.plan.model.routes, self.elapsed_ms());
            routes.correct(self.plan.route, self.plan.n_missing(), prediction.own_ms(), waited_ms);
        }
    }
}
