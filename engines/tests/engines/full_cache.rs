//! A cache that is too small for all sequences: some are preempted and continued, and none is lost.

use std::sync::Arc;

use baton_engines::registry::{self, EngineOptions};
use baton_schemas::generate::Sampling;
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use tiny_gguf::Architecture;

use crate::models;

const N_NEW: u32 = 150;

#[tokio::test]
async fn sequences_that_do_not_fit_together_all_complete() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny.gguf");
    tiny_gguf::write(&model, Architecture::Llama, 1);
    let config = EngineOptions { n_threads: Some(1), n_ctx: Some(512), n_cells: Some(512), ..models::of_llama(model) };
    let engine = registry::open(config, None).unwrap();
    // Four rounds: forks of one long prefix, and other prompts that evict the slot they were forked from.
    let prompts = (0..12).map(|i| match i % 3 {
        0 => (0..100).map(|k| 3 + (k * (2 * i + 3)) % 200).collect(),
        _ => (0..100).chain([100 + i]).map(|k| 10 + k).collect::<Vec<Token>>(),
    });
    let mut streams = Vec::new();
    for prompt in prompts {
        let request = SequenceRequest {
            prompt,
            sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
            max_tokens: Some(N_NEW),
            ignore_eos: true,
            ..SequenceRequest::default()
        };
        let engine = Arc::clone(&engine);
        streams.push(tokio::spawn(async move {
            let mut n_started = 0;
            let mut n_tokens = 0;
            let mut events = engine.generate(request).await.unwrap();
            while let Some(event) = events.next().await {
                match event.unwrap() {
                    SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
                    SequenceEvent::Started { .. } => n_started += 1,
                    SequenceEvent::Token(_) => n_tokens += 1,
                    SequenceEvent::Finished { .. } => return (n_started, n_tokens),
                }
            }
            panic!("a stream ended without its last event");
        }));
    }
    for stream in streams {
        let done = tokio::time::timeout(std::time::Duration::from_secs(240), stream).await;
        assert_eq!(done.expect("no progress").unwrap(), (1, N_NEW));
    }
    // The last event is sent within a step, but the load is published only after it.
    let idle = async {
        while engine.load().await.map(|load| (load.active_slots, load.queued)).unwrap() != (0, 0) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), idle).await.expect("slots and queue are empty again");
}
