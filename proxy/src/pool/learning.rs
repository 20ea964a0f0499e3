//! From what requests report to rates.

use baton_schemas::handoff::HandoffTimings;
use baton_schemas::sequence::Timings;

use super::ServedModel;
use crate::plan::cost::Route;

/// Fewer measure the launch and not the rate.
const MIN_TOKENS: f64 = 16.0;
const MIN_STEPS: f64 = 4.0;

impl ServedModel {
    /// A handoff on this route succeeded, or failed for a reason that the node's breaker counts.
    pub fn learn_handoff(&self, route: Route, timings: &HandoffTimings) {
        let Some((p, prefill)) = route.prefill.and_then(|p| Some((p, self.prefill.get(p)?))) else { return };
        if let Some(failure) = timings.failure {
            if failure.is_the_nodes_fault() {
                prefill.failed(failure.as_str());
            }
            return;
        }
        prefill.succeeded();
        let computed = f64::from(timings.n_computed);
        let compute_ms = timings.prefill_ms - timings.stalled_ms;
        if computed >= MIN_TOKENS {
            prefill.learn(|rates| rates.prefill.learn(computed, computed / (compute_ms / 1e3)));
        }
        self.routes.learn_link(p, route.decode, |link| link.learn_transfer(timings));
    }

    /// A stream on this route is complete; `n_streams` shared the decode node's steps.
    pub fn learn_stream(&self, route: Route, timings: &Timings, n_streams: u32) {
        let Some(node) = self.decode.get(route.decode) else { return };
        let n_streams = f64::from(n_streams.max(1));
        node.learn(|rates| {
            // The first token came with the prompt.
            let steps = f64::from(timings.predicted_n.saturating_sub(1));
            if steps >= MIN_STEPS {
                rates.decode.learn(n_streams, steps / (timings.predicted_ms / 1e3));
            }
            let computed = f64::from(timings.prompt_n);
            if route.prefill.is_none() && computed >= MIN_TOKENS {
                // A prediction adds the first token's step to the prompt: here it comes off.
                let step_ms = rates.decode.at(n_streams).map_or(0.0, |rate| 1e3 / rate);
                let compute_ms = timings.prompt_ms - step_ms;
                // A prompt that takes less than a step measures what is uncertain of the step.
                if compute_ms > step_ms {
                    rates.prefill.learn(computed, computed / (compute_ms / 1e3));
                }
            }
        });
    }
}
