//! Conversations that leave their slot, of an engine as it is served.

use baton_engines::registry::{self, EngineOptions};
use baton_schemas::generate::Sampling;
use baton_schemas::sequence::CachedTokens;
use baton_schemas::{CacheScope, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;

use crate::models;

#[tokio::test]
async fn a_conversation_outlives_its_slot_and_its_reply_stays_the_same() {
    let Some(model) = models::smollm2() else { return };
    let n_slots = Some(1);
    let options = EngineOptions { n_threads: Some(1), n_ctx: Some(512), n_slots, ..models::of_llama(model) };
    let engine = registry::open(options, None).unwrap();
    let ask = async |from: Token, scope: u64| {
        let request = SequenceRequest {
            prompt: (from..from + 200).collect(),
            sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
            max_tokens: Some(16),
            ignore_eos: true,
            cache_scope: CacheScope(scope),
            ..SequenceRequest::default()
        };
        let mut events = engine.generate(request).await.unwrap();
        let (mut cached, mut tokens, mut n_computed) = (CachedTokens::default(), Vec::new(), 0);
        while let Some(event) = events.next().await {
            match event.unwrap() {
                SequenceEvent::Started(found) => cached = found,
                SequenceEvent::Token(token) => tokens.push(token.id),
                SequenceEvent::Finished { timings, .. } => n_computed = timings.prompt_n,
                SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
            }
        }
        (cached, n_computed, tokens)
    };
    let (cached, n_computed, expected) = ask(100, 1).await;
    assert_eq!((cached, n_computed), (CachedTokens::default(), 200));
    // The only slot is another's now.
    assert_eq!(ask(3_000, 2).await.1, 200);
    let from_memory = CachedTokens { n_cached: 199, memory: 199, disk: 0 };
    assert_eq!(ask(100, 1).await, (from_memory, 1, expected.clone()));
    let (cached, n_computed, theirs) = ask(100, 2).await;
    assert_eq!((cached, n_computed, theirs), (CachedTokens::default(), 200, expected), "another scope");
}
