//! The simulator's vectors: a pure function of the tokens. Texts that share runs of bytes have similar vectors.

use std::sync::Arc;

use baton_link::engine::EmbedStream;
use baton_schemas::embed::{EmbedEvent, EmbedSequences, EmbedTimings, EmbeddingFacts, Pooling};
use baton_schemas::{EngineError, Token};
use futures::StreamExt;
use tokio::time::Instant;

use super::backlog::Uncomputed;
use super::queue::SimQueuePlace;
use super::{SimState, millis};
use crate::engine_options::{SimAbort, SimWork};

/// The dimension of vectors.
const N_EMBD: u32 = 64;

/// Tokens of a run. A vector is the sum of a pseudo-random direction for each run in the text.
const RUN: usize = 3;

pub(super) fn facts(n_ctx: u32) -> EmbeddingFacts {
    EmbeddingFacts { n_embd: N_EMBD, n_ctx, pooling: Pooling::Mean, is_trained: false }
}

/// The vectors of a checked request, one after the other. Errors: the queue is full.
pub(super) fn stream(state: Arc<SimState>, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
    let mut place = SimQueuePlace::take(Arc::clone(&state))?;
    let mut uncomputed = Uncomputed::new(&state.backlog, request.inputs.iter().map(Vec::len).sum());
    let events = async_stream::stream! {
        let started = Instant::now();
        for input in &request.inputs {
            SimAbort::check(state.config.abort.as_ref(), SimWork::Embed, input);
            let step = state.prefill_steps.join(input.len(), state.step_cost());
            step.begun().await;
            if place.begin() && request.reports_begin {
                yield Ok(EmbedEvent::Begun);
            }
            step.computed().await;
            uncomputed.computed(input.len());
            yield Ok(EmbedEvent::Vector(of(input)));
        }
        let timings = EmbedTimings { queue_ms: 0.0, compute_ms: millis(started.elapsed()) };
        yield Ok(EmbedEvent::Finished { timings });
    };
    Ok(events.boxed())
}

/// The vector of a text, of length 1.
pub(super) fn of(tokens: &[Token]) -> Vec<f32> {
    let mut sum = vec![0f32; N_EMBD as usize];
    for run in tokens.windows(RUN.min(tokens.len().max(1))) {
        let mut hasher = blake3::Hasher::new();
        run.iter().for_each(|token| {
            hasher.update(&token.to_le_bytes());
        });
        let mut bytes = [0; N_EMBD as usize];
        hasher.finalize_xof().fill(&mut bytes);
        for (value, byte) in sum.iter_mut().zip(bytes) {
            *value += f32::from(byte) - 127.5;
        }
    }
    let length = sum.iter().map(|value| value * value).sum::<f32>().sqrt();
    sum.iter().map(|value| value / length.max(f32::MIN_POSITIVE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_nearer_to_one_that_shares_its_words() {
        let vector = |text: &str| of(&text.bytes().map(Token::from).collect::<Vec<_>>());
        let cosine = |a: &str, b: &str| vector(a).iter().zip(vector(b)).map(|(a, b)| a * b).sum::<f32>();
        assert!((cosine("a quiet river", "a quiet river") - 1.0).abs() < 1e-5);
        assert!(cosine("a quiet river", "the quiet rivers") > cosine("a quiet river", "stones fall down"));
        assert_eq!(vector("a").len(), N_EMBD as usize);
    }
}
