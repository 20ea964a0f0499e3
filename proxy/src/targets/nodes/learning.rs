//! From what requests report to rates.

use baton_planner::cost::Route;
use baton_planner::reason::FailureReason;
use baton_schemas::handoff::{Blame, HandoffReport};
use baton_schemas::sequence::Timings;

use super::{ServedModel, Task};

/// Fewer measure the launch and not the rate.
const MIN_TOKENS: f64 = 16.0;
const MIN_STEPS: f64 = 4.0;

impl ServedModel {
    /// A handoff on this route succeeded, or failed for a reason that a breaker counts.
    pub fn learn_handoff(&self, route: Route, timings: &HandoffReport) {
        let Some((p, prefill)) = route.prefill.and_then(|p| Some((p, self.prefill.get(p)?))) else { return };
        if let Some(failure) = timings.failure {
            match failure.blame() {
                Blame::Nobody => {}
                Blame::Prefill => prefill.failed(Task::Prefill, FailureReason::Handoff(failure)),
                Blame::Pair => self.pairs.failed(p, route.decode, failure),
            }
            return;
        }
        prefill.succeeded(Task::Prefill);
        self.pairs.succeeded(p, route.decode);
        let computed = f64::from(timings.n_computed);
        // Not from its slot to its last token: other prompts are computed meanwhile. A node that does not tell its share
        // is taken for one that computes nothing else.
        let alone_ms =
            if timings.compute_ms > 0.0 { timings.compute_ms } else { timings.prefill_ms - timings.stalled_ms };
        if computed >= MIN_TOKENS {
            prefill.learn(|rates| rates.prefill.learn(computed, computed / (alone_ms / 1e3)));
        }
        self.routes.learn_link(p, route.decode, |link| link.learn_transfer(timings));
    }

    /// A stream on this route is complete.
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
                rates.prefill.learn(computed, computed / (timings.compute_ms / 1e3));
            }
        });
    }
}
