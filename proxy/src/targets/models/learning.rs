//! Turns the timings of requests into rates.

use baton_planner::cost::Route;
use baton_planner::rates::{Curve, batch_size};
use baton_planner::reason::FailureReason;
use baton_schemas::handoff::{Blame, HandoffReport};
use baton_schemas::sequence::Timings;

use super::served_model::ServedModel;
use crate::targets::nodes::Task;

/// The smallest samples. Smaller ones measure the launch and not the rate.
const MIN_TOKENS: f64 = 16.0;
const MIN_STEPS: f64 = 4.0;

impl ServedModel {
    /// Learns from a handoff on this route: rates from a success, a breaker's count from a failure. `lossless_kv`: its request
    /// wanted no lossy codec.
    pub fn learn_handoff(&self, route: Route, timings: &HandoffReport, lossless_kv: bool) {
        let Some((p, prefill)) = route.prefill.and_then(|p| Some((p, self.prefill.get(p)?))) else { return };
        if let Some(failure) = timings.failure {
            match failure.blame() {
                Blame::Nobody => self.handoff_untried(route),
                Blame::Prefill => prefill.failed(Task::Prefill, FailureReason::Handoff(failure)),
                Blame::Pair => {
                    self.handoff_untried(route);
                    self.pairs.failed(p, route.decode, failure);
                }
            }
            return;
        }
        prefill.succeeded(Task::Prefill);
        self.pairs.succeeded(p, route.decode);
        let computed = f64::from(timings.n_computed);
        // Other prompts are computed between this one's first and last token, so only its share counts. A node that does
        // not report its share is assumed to compute nothing else.
        let alone_ms =
            if timings.compute_ms > 0.0 { timings.compute_ms } else { timings.prefill_ms - timings.stalled_ms };
        if computed >= MIN_TOKENS {
            let slot_ms = timings.prefill_ms - timings.stalled_ms;
            prefill.learn(|rates| learn_prefill(&mut rates.prefill, computed, alone_ms, slot_ms));
        }
        self.routes.learn_link(p, route.decode, |link| link.learn_transfer(timings, lossless_kv));
        if let Some(distance) = timings.kv_distance {
            self.routes.learn_kv_distance(p, route.decode, distance);
        }
    }

    /// A handoff on this route was let through by the breakers, and shows nothing about the nodes.
    pub fn handoff_untried(&self, route: Route) {
        let Some((p, prefill)) = route.prefill.and_then(|p| Some((p, self.prefill.get(p)?))) else { return };
        prefill.breakers.of(Task::Prefill).untried();
        self.pairs.untried(p, route.decode);
    }

    /// Learns from a complete stream on this route.
    pub fn learn_stream(&self, route: Route, timings: &Timings) {
        let Some(node) = self.decode.get(route.decode) else { return };
        node.learn(|rates| {
            // The first token came with the prompt.
            let steps = f64::from(timings.predicted_n.saturating_sub(1));
            if steps >= MIN_STEPS {
                rates.decode.learn(timings.n_sharing.max(1.0), steps / (timings.predicted_ms / 1e3));
            }
            // The last one was decoded.
            let computed = f64::from(timings.prompt_n.saturating_sub(1));
            if computed >= MIN_TOKENS {
                let step_ms = timings.predicted_ms / steps.max(1.0);
                learn_prefill(&mut rates.prefill, computed, timings.compute_ms, timings.prompt_ms - step_ms);
            }
        });
    }
}

/// Learns a rate from a prompt of `n_tokens` whose share of the engine's work took `alone_ms` of `slot_ms`. Shares are by tokens, so
/// as many tokens were computed together as `slot_ms` is longer.
fn learn_prefill(rates: &mut Curve, n_tokens: f64, alone_ms: f64, slot_ms: f64) {
    let n_together = n_tokens * (slot_ms / alone_ms).max(1.0);
    rates.learn(batch_size(n_tokens, n_together), n_tokens / (alone_ms / 1e3));
}
