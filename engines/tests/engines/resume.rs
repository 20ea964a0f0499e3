//! A greedy sequence that another engine resumes continues identically to the bit, wherever it was interrupted.

use baton_engines::registry::{self, EngineOptions};
use baton_link::Engine;
use baton_schemas::generate::Sampling;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{SequenceRequest, Token};
use futures::StreamExt;

use crate::models;

const N_TOKENS: u32 = 72;

/// The tokens, and the bits of each token's log-probability.
async fn reply(engine: &dyn Engine, request: SequenceRequest) -> Vec<(Token, u32)> {
    let mut events = engine.generate(request).await.unwrap();
    let mut reply = Vec::new();
    while let Some(event) = events.next().await {
        if let SequenceEvent::Token(token) = event.unwrap() {
            reply.push((token.id, token.logprobs.unwrap().chosen.to_bits()));
        }
    }
    reply
}

#[tokio::test]
async fn a_resumed_greedy_sequence_is_identical_to_the_bit() {
    let Some(model) = models::smollm2() else { return };
    let engine =
        registry::open(EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), ..models::of_llama(model) }, None)
            .unwrap();
    for text in ["A story about a fox and a hen:", "def fibonacci(n):\n"] {
        let text =
            TokenizeRequest { text: text.into(), add_special: true, parse_special: false, key: Default::default() };
        let prompt = engine.tokenize(&text).await.unwrap();
        let request = SequenceRequest {
            prompt,
            sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
            max_tokens: Some(N_TOKENS),
            top_logprobs: Some(0),
            ignore_eos: true,
            // Nothing is cached, so each run is like the first on a new engine.
            ephemeral: true,
            ..SequenceRequest::default()
        };
        let whole = reply(&*engine, request.clone()).await;
        assert_eq!(whole.len(), N_TOKENS as usize);
        for at in [1, 40, 71] {
            let generated = whole[..at].iter().map(|(token, _)| *token).collect();
            let resumed = reply(&*engine, SequenceRequest { generated, ..request.clone() }).await;
            assert_eq!(resumed, whole[at..], "resumed after {at} tokens");
        }
    }
}
