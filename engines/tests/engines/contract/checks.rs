//! Checks of the contract of [`Engine`], for any engine with 4 slots, 2,048 tokens of context and 8 queue places.
//! Inputs come from the engine's own tokenizer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_link::Engine;
use baton_schemas::CacheScope;
use baton_schemas::embed::{EmbedEvent, EmbedSequences};
use baton_schemas::generate::{Conversation, Message, Sampling};
use baton_schemas::held::{HeldHasher, HeldKey, HeldTier};
use baton_schemas::node::TokenizeRequest;
use baton_schemas::sequence::{CachedTokens, GeneratedToken, Group};
use baton_schemas::{EngineError, FinishReason, MessageRole, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;

const N_SLOTS: usize = 4;
const MAX_QUEUED: usize = 8;
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs all checks, one after another, because they read the engine's load.
pub(crate) async fn check(engine: Arc<dyn Engine>) {
    let checks = async {
        a_stream_is_started_tokens_finished(&engine).await;
        a_limit_is_kept(&engine).await;
        the_same_seed_gives_the_same_tokens(&engine).await;
        a_resumed_sequence_continues_identically(&engine).await;
        invalid_requests_are_refused_before_the_stream(&engine).await;
        logprobs_are_sorted_and_complete(&engine).await;
        a_conversation_is_rendered_to_tokens(&engine).await;
        a_cached_prefix_is_reported_and_kept_within_its_scope(&engine).await;
        what_is_held_is_told_by_hashes_of_its_scope(&engine).await;
        the_prompt_of_a_group_is_computed_once(&engine).await;
        more_sequences_than_slots_all_complete(&engine).await;
        the_queue_is_bounded(&engine).await;
        a_dropped_stream_frees_its_slot(&engine).await;
        each_text_gets_its_own_vector(&engine).await;
        invalid_texts_are_refused_before_the_stream(&engine).await;
        dropped_vectors_free_their_place(&engine).await;
    };
    tokio::time::timeout(10 * DEADLINE, checks).await.expect("the contract's checks hang");
}

struct Reply {
    n_cached: u32,
    tokens: Vec<GeneratedToken>,
    reason: FinishReason,
}

impl Reply {
    fn ids(&self) -> Vec<Token> {
        self.tokens.iter().map(|t| t.id).collect()
    }
}

async fn reply(engine: &Arc<dyn Engine>, request: SequenceRequest) -> Reply {
    let mut events = engine.generate(request).await.unwrap();
    let Some(Ok(SequenceEvent::Started(CachedTokens { n_cached, .. }))) = events.next().await else {
        panic!("the first event is Started")
    };
    let mut tokens = Vec::new();
    loop {
        match events.next().await.expect("a stream ends with Finished").unwrap() {
            SequenceEvent::Token(token) => tokens.push(token),
            SequenceEvent::Finished { reason, timings } => {
                assert!(events.next().await.is_none(), "nothing follows Finished");
                assert_eq!(timings.predicted_n as usize, tokens.len());
                return Reply { n_cached, tokens, reason };
            }
            SequenceEvent::Started { .. } => panic!("Started comes once"),
            SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {
                panic!("no request of this suite names a source of KV")
            }
        }
    }
}

async fn tokens(engine: &Arc<dyn Engine>, text: &str) -> Vec<Token> {
    let request =
        TokenizeRequest { text: text.into(), add_special: false, parse_special: false, key: Default::default() };
    engine.tokenize(&request).await.unwrap()
}

async fn greedy(engine: &Arc<dyn Engine>, text: &str, max_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        prompt: tokens(engine, text).await,
        sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..SequenceRequest::default()
    }
}

fn warm(request: SequenceRequest, seed: u64) -> SequenceRequest {
    SequenceRequest {
        sampling: Sampling { temperature: 1.0, seed, repeatable: true, ..Sampling::default() },
        ..request
    }
}

async fn until_idle(engine: &Arc<dyn Engine>) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let load = engine.load().await.unwrap();
        if load.active_slots == 0 && load.queued == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "slots or queue places are leaked: {load:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn a_stream_is_started_tokens_finished(engine: &Arc<dyn Engine>) {
    let done = reply(engine, greedy(engine, "Once upon a time", 8).await).await;
    assert_eq!((done.tokens.len(), done.reason), (8, FinishReason::Length));
    let bytes: Vec<u8> = done.tokens.iter().flat_map(|t| t.bytes.clone()).collect();
    assert_eq!(engine.detokenize(&done.ids()).await.unwrap(), String::from_utf8_lossy(&bytes));
}

async fn a_limit_is_kept(engine: &Arc<dyn Engine>) {
    for limit in [0, 1, 2] {
        let done = reply(engine, greedy(engine, "One two three", limit).await).await;
        assert_eq!((done.tokens.len(), done.reason), (limit as usize, FinishReason::Length));
    }
    // Without a limit, the context is the limit.
    let n_ctx = engine.info().await.unwrap().n_ctx as usize;
    let request = greedy(engine, &"word ".repeat(n_ctx), 0).await;
    let prompt = request.prompt[..n_ctx - 5].to_vec();
    let done = reply(engine, SequenceRequest { prompt, max_tokens: None, ..request }).await;
    assert_eq!((done.tokens.len(), done.reason), (5, FinishReason::Length));
}

async fn the_same_seed_gives_the_same_tokens(engine: &Arc<dyn Engine>) {
    let request = greedy(engine, "The weather today", 12).await;
    let first = reply(engine, request.clone()).await.ids();
    assert_eq!(reply(engine, request.clone()).await.ids(), first);
    let seeded = reply(engine, warm(request.clone(), 5)).await.ids();
    assert_eq!(reply(engine, warm(request.clone(), 5)).await.ids(), seeded);
    let others = [reply(engine, warm(request.clone(), 6)).await.ids(), reply(engine, warm(request, 7)).await.ids()];
    assert!(others.iter().any(|other| *other != seeded), "seeds make a difference");
}

async fn a_resumed_sequence_continues_identically(engine: &Arc<dyn Engine>) {
    let request = greedy(engine, "A story about a fox:", 16).await;
    let penalised = SequenceRequest {
        sampling: Sampling { frequency_penalty: 0.5, repeat_penalty: 1.1, ..warm(request.clone(), 9).sampling },
        ..request.clone()
    };
    for request in [request.clone(), warm(request, 9), penalised] {
        let whole = reply(engine, request.clone()).await.ids();
        for at in [1, 7, 15] {
            let resumed = SequenceRequest { generated: whole[..at].to_vec(), ..request.clone() };
            assert_eq!(reply(engine, resumed).await.ids(), whole[at..], "resumed after {at} tokens");
        }
        let complete = SequenceRequest { generated: whole, ..request };
        assert!(reply(engine, complete).await.ids().is_empty());
    }
}

async fn invalid_requests_are_refused_before_the_stream(engine: &Arc<dyn Engine>) {
    let refusal = async |request: SequenceRequest| match engine.generate(request).await {
        Ok(_) => panic!("accepted"),
        Err(error) => error,
    };
    let info = engine.info().await.unwrap();
    let good = greedy(engine, "fine", 1).await;
    let empty = SequenceRequest { prompt: Vec::new(), ..good.clone() };
    assert!(matches!(refusal(empty).await, EngineError::InvalidRequest { .. }));
    for bad in [info.n_vocab, u32::MAX] {
        let unknown = SequenceRequest { prompt: vec![bad], ..good.clone() };
        assert!(matches!(refusal(unknown).await, EngineError::InvalidRequest { .. }));
        let resumed = SequenceRequest { generated: vec![bad], ..good.clone() };
        assert!(matches!(refusal(resumed).await, EngineError::InvalidRequest { .. }));
    }
    let long = vec![good.prompt[0]; info.n_ctx as usize];
    let overflow = SequenceRequest { prompt: long, ..good };
    assert_eq!(refusal(overflow).await, EngineError::ContextOverflow { n_prompt: info.n_ctx, n_ctx: info.n_ctx });
    until_idle(engine).await;
}

async fn logprobs_are_sorted_and_complete(engine: &Arc<dyn Engine>) {
    for k in [0, 5] {
        // Without `ignore_eos`, which bars the end even where it is the most likely token.
        let request = greedy(engine, "Two and two is", 4).await;
        let request = SequenceRequest { top_logprobs: Some(k), ignore_eos: false, ..request };
        let tokens = reply(engine, request).await.tokens;
        assert!(!tokens.is_empty());
        for token in tokens {
            let logprobs = token.logprobs.expect("log-probabilities were requested");
            assert!(logprobs.chosen <= 0.0 && logprobs.chosen.is_finite());
            assert_eq!(logprobs.top.len(), k as usize);
            assert!(logprobs.top.windows(2).all(|pair| pair[0].logprob >= pair[1].logprob));
            if k > 0 {
                assert_eq!(logprobs.top[0].id, token.id, "greedy takes the most likely token");
            }
        }
    }
}

async fn a_conversation_is_rendered_to_tokens(engine: &Arc<dyn Engine>) {
    let message = Message::new(MessageRole::User, "Hello, wörld 🙂".into());
    let conversation = Conversation { messages: vec![message], ..Conversation::default() };
    let tokens = engine.render(&conversation, Default::default()).await.unwrap();
    let text = engine.detokenize(&tokens).await.unwrap();
    assert!(text.contains("Hello, wörld 🙂") && text.contains("user") && text.contains("assistant"), "{text}");
}

/// A scope that no other check uses, also on an engine that is checked twice.
fn new_scope() -> CacheScope {
    static USED: AtomicU64 = AtomicU64::new(0);
    CacheScope(USED.fetch_add(1, Ordering::Relaxed) + 1_000)
}

async fn a_cached_prefix_is_reported_and_kept_within_its_scope(engine: &Arc<dyn Engine>) {
    let request = greedy(engine, &"The cache remembers this sentence well. ".repeat(4), 2).await;
    let in_scope = |cache_scope| SequenceRequest { cache_scope, ..request.clone() };
    let n_prompt = request.prompt.len() as u32;
    let scope = new_scope();
    assert_eq!(reply(engine, in_scope(scope)).await.n_cached, 0);
    assert_eq!(reply(engine, in_scope(scope)).await.n_cached, n_prompt - 1);
    assert_eq!(reply(engine, in_scope(new_scope())).await.n_cached, 0, "another scope shares no cache");
}

async fn what_is_held_is_told_by_hashes_of_its_scope(engine: &Arc<dyn Engine>) {
    let request = greedy(engine, &"A node says what it holds. ".repeat(8), 2).await;
    let before = engine.load().await.unwrap().held;
    let cache_scope = new_scope();
    let reply = reply(engine, SequenceRequest { cache_scope, ..request.clone() }).await;
    let key = HeldKey([9; 32]);
    let tokens = [request.prompt, reply.ids()].concat();
    // The longest beginning that is told to be held.
    let told = async |key: &HeldKey, scope| {
        let digest = engine.held(key).await.unwrap();
        let mut hasher = HeldHasher::new(&HeldKey([9; 32]), scope);
        let mut longest = 0;
        for (n, token) in (1..).zip(&tokens) {
            hasher.extend(&[*token]);
            let hash = hasher.hash();
            let is_told = |tier: &HeldTier| tier.blocks.contains(&hash) || tier.ends.contains(&(n, hash));
            longest = if digest.tiers.iter().any(is_told) { n } else { longest };
        }
        longest as usize
    };
    assert!(told(&key, cache_scope).await >= tokens.len() - 2, "all but the last token, which is not computed");
    assert_eq!(told(&key, new_scope()).await, 0, "another scope finds nothing");
    assert_eq!(told(&HeldKey([8; 32]), cache_scope).await, 0, "and neither does another endpoint");
    let after = engine.load().await.unwrap();
    assert!(before != after.held && after.held != 0, "the load says that there is more: {before} {after:?}");
    assert_eq!(after.queued, 0, "questions take no place in the queue");
}

async fn the_prompt_of_a_group_is_computed_once(engine: &Arc<dyn Engine>) {
    if engine.info().await.unwrap().engine == "sim" {
        // The simulator does not share a group's prompt.
        return;
    }
    let request = greedy(engine, &"Choices share one long prompt. ".repeat(20), 4).await;
    let request = SequenceRequest { cache_scope: new_scope(), ..request };
    let n_prompt = request.prompt.len() as u32;
    let group = Some(Group { id: 77, size: N_SLOTS as u32 });
    let choices = (0..N_SLOTS as u64).map(|seed| {
        let engine = Arc::clone(engine);
        let request = SequenceRequest { group, ..warm(request.clone(), seed) };
        tokio::spawn(async move { reply(&engine, request).await.n_cached })
    });
    let mut n_cached = Vec::new();
    for choice in choices.collect::<Vec<_>>() {
        n_cached.push(choice.await.unwrap());
    }
    n_cached.sort_unstable();
    // Where layers keep a state, choices begin at one of a few tokens before the prompt's end.
    let kv = engine.info().await.unwrap().kv;
    let n_own = if kv.is_some_and(|kv| !kv.layout.states.is_empty()) { 8 } else { 1 };
    assert_eq!(n_cached[0], 0);
    assert!(n_cached[1..].iter().all(|n| (n_prompt - n_own..n_prompt).contains(n)), "{n_cached:?} of {n_prompt}");
    // If the other choice never comes, this one starts all the same.
    let alone = SequenceRequest { group: Some(Group { id: 78, size: 2 }), ..request };
    assert_eq!(reply(engine, alone).await.tokens.len(), 4);
}

async fn more_sequences_than_slots_all_complete(engine: &Arc<dyn Engine>) {
    let mut streams = Vec::new();
    for i in 0..MAX_QUEUED {
        let request = greedy(engine, &format!("Sequence number {i} says"), 6).await;
        let engine = Arc::clone(engine);
        streams.push(tokio::spawn(async move { reply(&engine, request).await.tokens.len() }));
    }
    for stream in streams {
        assert_eq!(stream.await.unwrap(), 6);
    }
    until_idle(engine).await;
}

async fn the_queue_is_bounded(engine: &Arc<dyn Engine>) {
    let request = greedy(engine, "Going on and on", 1_000).await;
    let mut accepted = Vec::new();
    let full = loop {
        assert!(accepted.len() <= N_SLOTS + MAX_QUEUED, "{} were accepted", accepted.len());
        match engine.generate(request.clone()).await {
            Ok(mut stream) => {
                // A sequence with a slot sends `Started`; the others wait.
                if accepted.len() < N_SLOTS {
                    stream.next().await.unwrap().unwrap();
                }
                accepted.push(stream);
            }
            Err(error) => break error,
        }
    };
    assert_eq!(full, EngineError::QueueFull { limit: MAX_QUEUED as u32 });
    assert_eq!(accepted.len(), N_SLOTS + MAX_QUEUED);
    drop(accepted);
    until_idle(engine).await;
    assert_eq!(reply(engine, SequenceRequest { max_tokens: Some(1), ..request }).await.tokens.len(), 1);
}

async fn a_dropped_stream_frees_its_slot(engine: &Arc<dyn Engine>) {
    // Dropped in the queue, before the first event, and after some tokens.
    let long = greedy(engine, &"A long prompt goes on. ".repeat(80), 1_000).await;
    for n_deltas in [0, 1, 2, 5] {
        let mut streams = Vec::new();
        for _ in 0..N_SLOTS + 2 {
            streams.push(engine.generate(long.clone()).await.unwrap());
        }
        for _ in 0..n_deltas {
            streams[0].next().await.unwrap().unwrap();
        }
        drop(streams);
        until_idle(engine).await;
    }
}

async fn vectors(engine: &Arc<dyn Engine>, inputs: Vec<Vec<Token>>) -> Vec<Vec<f32>> {
    let mut events = engine.embed(EmbedSequences { inputs, reports_begin: true }).await.unwrap();
    assert_eq!(events.next().await, Some(Ok(EmbedEvent::Begun)), "it says so because it is asked to");
    let mut vectors = Vec::new();
    loop {
        match events.next().await.expect("a stream ends with Finished").unwrap() {
            EmbedEvent::Begun => panic!("the texts begin once"),
            EmbedEvent::Vector(vector) => vectors.push(vector),
            EmbedEvent::Finished { .. } => {
                assert!(events.next().await.is_none(), "nothing follows Finished");
                return vectors;
            }
        }
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

async fn each_text_gets_its_own_vector(engine: &Arc<dyn Engine>) {
    let facts = engine.info().await.unwrap().embedding.expect("an engine of this suite gives vectors");
    let mut inputs = Vec::new();
    // More texts than fit into one step; the longest is longer than one batch.
    for (i, n_words) in [1, 3, 700, 20].into_iter().cycle().take(12).enumerate() {
        let mut input = tokens(engine, &format!("text {i}{}", " fox".repeat(n_words))).await;
        input.truncate(700);
        inputs.push(input);
    }
    let together = vectors(engine, inputs.clone()).await;
    assert_eq!(together.len(), inputs.len());
    for vector in &together {
        assert_eq!(vector.len(), facts.n_embd as usize);
        assert!((cosine(vector, vector) - 1.0).abs() < 1e-4);
    }
    for (i, input) in inputs.iter().enumerate().step_by(5) {
        let alone = vectors(engine, vec![input.clone()]).await;
        assert!(cosine(&alone[0], &together[i]) > 0.99, "text {i} depends on its neighbours");
    }
    assert!(cosine(&together[0], &together[1]) < 0.999, "texts make a difference");
}

async fn invalid_texts_are_refused_before_the_stream(engine: &Arc<dyn Engine>) {
    let info = engine.info().await.unwrap();
    let n_ctx = info.embedding.unwrap().n_ctx;
    let refusal =
        async |inputs: Vec<Vec<Token>>| match engine.embed(EmbedSequences { inputs, ..Default::default() }).await {
            Ok(_) => panic!("accepted"),
            Err(error) => error,
        };
    let token = tokens(engine, "x").await[0];
    for wrong in [vec![], vec![vec![]], vec![vec![token], vec![info.n_vocab]]] {
        assert!(matches!(refusal(wrong).await, EngineError::InvalidRequest { .. }));
    }
    let long = vec![vec![token; n_ctx as usize + 1]];
    assert_eq!(refusal(long).await, EngineError::ContextOverflow { n_prompt: n_ctx + 1, n_ctx });
    until_idle(engine).await;
}

async fn dropped_vectors_free_their_place(engine: &Arc<dyn Engine>) {
    let word = tokens(engine, "word").await[0];
    let inputs = vec![vec![word; 300]; 400];
    let mut held = Vec::new();
    for _ in 0..MAX_QUEUED {
        held.push(engine.embed(EmbedSequences { inputs: inputs.clone(), ..Default::default() }).await.unwrap());
    }
    let refused = engine.embed(EmbedSequences { inputs: inputs.clone(), ..Default::default() }).await.err();
    assert_eq!(refused, Some(EngineError::QueueFull { limit: MAX_QUEUED as u32 }));
    assert!(matches!(held[0].next().await, Some(Ok(EmbedEvent::Vector(_)))));
    // Meanwhile a sequence runs to its end.
    held.truncate(1);
    while engine.load().await.unwrap().queued > 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(reply(engine, greedy(engine, "Meanwhile", 3).await).await.tokens.len(), 3);
    drop(held);
    until_idle(engine).await;
}
