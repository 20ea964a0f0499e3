//! The arrival times of a stream's tokens.

use std::time::Instant;

use baton_link::Engine;
use baton_link::remote::RemoteEngine;
use baton_proxy::serve::CommandFailure;
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::{CachedTokens, Timings};
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;

/// A finished stream.
pub(super) struct Timeline {
    pub(super) sent: Instant,
    pub(super) tokens: Vec<Instant>,
    /// The same tokens.
    pub(super) ids: Vec<Token>,
    /// Tokens of the prompt.
    pub(super) n_prompt: u32,
    /// Tokens of it whose KV was there.
    pub(super) cached: CachedTokens,
    /// The engine's own.
    pub(super) timings: Timings,
    /// The report of the prompt's handoff, if one was requested.
    pub(super) handoff: Option<HandoffReport>,
}

/// A request that continues a prompt greedily by exactly `n_new` tokens.
pub(super) fn greedy(prompt: Vec<Token>, n_new: u32) -> SequenceRequest {
    SequenceRequest {
        prompt,
        sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
        max_tokens: Some(n_new),
        ignore_eos: true,
        ..SequenceRequest::default()
    }
}

/// Runs a request to its end.
pub(super) async fn stream(engine: &RemoteEngine, request: SequenceRequest) -> Result<Timeline, CommandFailure> {
    let n_prompt = request.prompt.len() as u32;
    let (tokens, ids, cached, timings) = (Vec::new(), Vec::new(), CachedTokens::default(), Timings::default());
    let mut timeline = Timeline { sent: Instant::now(), tokens, ids, n_prompt, cached, timings, handoff: None };
    let mut deltas = engine.generate(request).await?;
    while let Some(delta) = deltas.next().await {
        match delta? {
            SequenceEvent::Token(token) => {
                timeline.tokens.push(Instant::now());
                timeline.ids.push(token.id);
            }
            SequenceEvent::Handoff(report) => timeline.handoff = Some(report),
            SequenceEvent::Started(cached) => timeline.cached = cached,
            SequenceEvent::PrefillBegun => {}
            SequenceEvent::Finished { timings, .. } => timeline.timings = timings,
        }
    }
    Ok(timeline)
}

impl Timeline {
    /// Time to first token, seconds.
    pub(super) fn ttft(&self) -> f64 {
        self.tokens.first().map_or(f64::NAN, |first| (*first - self.sent).as_secs_f64())
    }

    /// Gaps between tokens, seconds.
    pub(super) fn gaps(&self) -> impl Iterator<Item = f64> + '_ {
        self.tokens.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64())
    }
}
