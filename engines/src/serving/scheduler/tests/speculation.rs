//! Replies of real contexts with drafts that are right, partly right and wrong, beside those without speculation.
//!
//! A step with drafts is another batch, and llama.cpp rounds differently for it. So each token is drawn again here, from its
//! row's logits by a sampler of its own: if that gives the same token in both replies, they part because of the
//! logits, and by how much these differ is measured.

use std::sync::Arc;
use std::time::Duration;

use baton_model::gguf::Gguf;
use baton_model::options::Speculation;
use baton_schemas::sequence::{DraftCounts, DraftTotals, GeneratedToken, SequenceEvent};
use baton_schemas::{SequenceRequest, Token};
use llama_cpp_2::model::LlamaModel;
use tiny_gguf::Architecture;

use super::rounding::{BatchShapes, Rounding};
use super::{Events, N_ROLLBACK, Scheduler, loaded, loaded_with, request, scheduler_of, submit, turn};
use crate::engine_options::EngineOptions;
use crate::llama::draft::LoadedDraft;
use crate::llama::head::{HiddenRows, LlamaHead};
use crate::llama::load;
use crate::serving::drafting::batch_drafter::BatchDrafter;
use crate::serving::scheduler::Speculating;
use crate::serving::scheduler::speculation_tests::played_nodes::{PlayedNodes, PlayedSequence, drafted_for};

pub(super) const N_CELLS: u32 = 2_048;
const N_NEW: u32 = 40;

/// Log-probabilities of a row that are compared: those of the whole vocabulary, since the divergence is a sum over all tokens.
const N_TOP: u32 = 512;

/// The replies to requests, of which `n_together` run at the same time, and the guesses that were verified for them.
pub(super) fn replies(
    scheduler: &mut Scheduler<'_>,
    requests: &[SequenceRequest],
    n_together: usize,
) -> (Vec<Vec<GeneratedToken>>, DraftTotals) {
    replies_beside(scheduler, requests, n_together, || {})
}

/// The same, and `act` acts before each turn.
fn replies_beside(
    scheduler: &mut Scheduler<'_>,
    requests: &[SequenceRequest],
    n_together: usize,
    mut act: impl FnMut(),
) -> (Vec<Vec<GeneratedToken>>, DraftTotals) {
    let (mut all, mut drafts) = (Vec::new(), DraftTotals::default());
    for some in requests.chunks(n_together) {
        let mut events: Vec<Events> = some.iter().map(|request| submit(scheduler, request.clone())).collect();
        let mut replies = vec![Vec::new(); some.len()];
        let mut n_turns = 0;
        while !scheduler.waiting.is_empty() || scheduler.running.iter().any(Option::is_some) {
            act();
            turn(scheduler);
            let mut is_quiet = true;
            for (reply, events) in replies.iter_mut().zip(&mut events) {
                while let Ok(event) = events.try_recv() {
                    is_quiet = false;
                    match event.unwrap() {
                        SequenceEvent::Token(token) => reply.push(token),
                        SequenceEvent::Finished { timings, .. } => drafts = drafts.plus(timings.drafts),
                        _ => {}
                    }
                }
            }
            n_turns += 1;
            assert!(n_turns < 1_000, "the replies do not end");
            if is_quiet {
                // An image may be prepared on another thread.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        all.extend(replies);
    }
    (all, drafts)
}

/// Prompts that go far beyond the window of those that have one. Half of the replies are drawn at random.
pub(super) fn requests(n: u32) -> Vec<SequenceRequest> {
    let requests = (0..n).map(|i| {
        let prompt = (0..20 + 7 * i).map(|j| 100 + (j * (i + 3) * 7) % 90).collect();
        let mut request = SequenceRequest { max_tokens: Some(N_NEW), top_logprobs: Some(N_TOP), ..request(prompt) };
        request.sampling.temperature = if i % 2 == 0 { 0.0 } else { 0.8 };
        request.sampling.frequency_penalty = if i % 4 == 3 { 0.3 } else { 0.0 };
        request.sampling.seed = u64::from(i);
        request
    });
    requests.collect()
}

/// The same requests, which predict their replies with errors, one of them out of the vocabulary, at many distances.
pub(super) fn predicted(requests: &[SequenceRequest], replies: &[Vec<GeneratedToken>]) -> Vec<SequenceRequest> {
    let predict = |(i, (request, reply)): (usize, (&SequenceRequest, &Vec<GeneratedToken>))| {
        let mut predicted: Vec<Token> = reply.iter().map(|token| token.id).collect();
        for at in (3 + i % 11..reply.len()).step_by(2 + i % 11) {
            predicted[at] = if at % 3 == 0 { Token::MAX } else { 101 };
        }
        SequenceRequest { predicted, ..request.clone() }
    };
    requests.iter().zip(replies).enumerate().map(predict).collect()
}

/// Replies without and with drafts of several lengths.
struct Compared {
    requests: Vec<SequenceRequest>,
    without: Vec<Vec<GeneratedToken>>,
    rounding: Rounding,
}

fn with_model<T>(architecture: Architecture, measure: impl FnOnce(&Arc<LlamaModel>, EngineOptions) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    tiny_gguf::write(&file, architecture, 1);
    let (model, options) = loaded(&file);
    measure(&model, EngineOptions { n_ubatch: Some(64), n_slots: Some(3), ..options })
}

/// Compares replies with drafts of several lengths to those without, of `n_prompts` prompts, `n_together` at the same time.
fn compared(model: &Arc<LlamaModel>, options: &EngineOptions, n_prompts: u32, n_together: usize) -> Compared {
    let requests = requests(n_prompts);
    let (without, _) = replies(&mut scheduler_of(model, options.clone(), N_CELLS), &requests, n_together);
    let predicted = predicted(&requests, &without);
    let mut rounding = Rounding::default();
    let options = EngineOptions { speculation: Some(Speculation::Auto), ..options.clone() };
    for n_draft in [3, 24] {
        let scheduler = scheduler_of(model, options.clone(), N_CELLS);
        let mut scheduler = scheduler.with_speculation(Some(Speculating::fixed(n_draft)));
        let (with, drafts) = replies(&mut scheduler, &predicted, n_together);
        rounding.drafts = rounding.drafts.plus(drafts);
        for (prompt, request) in requests.iter().enumerate() {
            rounding.compare((prompt, request), [&without[prompt], &with[prompt]], n_draft);
        }
    }
    // Predictions are right at first, and wrong later.
    let DraftCounts { n, n_accepted } = rounding.drafts.prediction;
    assert!(n > n_accepted && n_accepted as usize >= rounding.n_replies, "{n_accepted} of {n}");
    Compared { requests, without, rounding }
}

fn measured(architecture: Architecture, n_prompts: u32, n_together: usize) -> Rounding {
    with_model(architecture, |model, options| {
        let Compared { rounding, .. } = compared(model, &options, n_prompts, n_together);
        println!("{architecture:?}, {n_together} together, {} part: {rounding:?}", rounding.partings.len());
        rounding
    })
}

/// A draft node sends what comes next in one of these texts, with a wrong token now and then.
fn send_next(followed: &mut PlayedSequence, texts: &[Vec<Token>]) {
    followed.hear();
    let Some(text) = texts.iter().find(|text| text.starts_with(&followed.tokens)) else { return };
    let end = followed.from + followed.chain.len();
    let next = text.iter().enumerate().skip(end).take(6);
    let next: Vec<Token> = next.map(|(at, token)| if at % 7 == 3 { 101 } else { *token }).collect();
    followed.send(&next);
}

/// The same with a draft node.
fn drafted(architecture: Architecture, n_prompts: u32, n_together: usize) -> Rounding {
    with_model(architecture, |model, options| {
        let requests = requests(n_prompts);
        let (without, _) = replies(&mut scheduler_of(model, options.clone(), N_CELLS), &requests, n_together);
        let text = |(request, reply): (&SequenceRequest, &Vec<GeneratedToken>)| -> Vec<Token> {
            request.prompt.iter().copied().chain(reply.iter().map(|token| token.id)).collect()
        };
        let texts: Vec<Vec<Token>> = requests.iter().zip(&without).map(text).collect();
        let options = EngineOptions { speculation: Some(Speculation::Auto), ..options };
        let scheduler = scheduler_of(model, options, N_CELLS);
        let nodes = Arc::new(PlayedNodes::default());
        let draft_nodes = nodes.draft_nodes(scheduler.vocabulary.n_tokens() as u32);
        let speculating = Speculating::fixed(4).with_draft_nodes(Some(draft_nodes));
        let mut scheduler = scheduler.with_speculation(Some(speculating));
        let asked: Vec<SequenceRequest> = requests.iter().map(drafted_for).collect();
        let (with, drafts) = replies_beside(&mut scheduler, &asked, n_together, || {
            nodes.followed.lock().unwrap().iter_mut().for_each(|followed| send_next(followed, &texts));
        });
        let mut rounding = Rounding { drafts, ..Rounding::default() };
        for (prompt, request) in requests.iter().enumerate() {
            rounding.compare((prompt, request), [&without[prompt], &with[prompt]], 4);
        }
        println!("{architecture:?} with a draft node, {n_together} together: {rounding:?}");
        rounding
    })
}

/// The same with drafts of a model.
fn guessed(architecture: Architecture, (of_draft, seed): (Architecture, u64), n_prompts: u32) -> Rounding {
    let folder = tempfile::tempdir().unwrap();
    let [file, draft] = ["model.gguf", "draft.gguf"].map(|name| folder.path().join(name));
    tiny_gguf::write(&file, architecture, 1);
    tiny_gguf::write(&draft, of_draft, seed);
    let (model, options) = loaded(&file);
    let options = EngineOptions { n_ubatch: Some(64), n_slots: Some(3), draft: Some(draft), ..options };
    let requests = requests(n_prompts);
    let (without, _) = replies(&mut scheduler_of(&model, options.clone(), N_CELLS), &requests, 3);
    let draft = LoadedDraft::load(&options, &Gguf::open(&file).unwrap(), N_ROLLBACK).unwrap().unwrap();
    let scheduler = scheduler_of(&model, options, N_CELLS);
    let guesses = draft.guesses(&scheduler.limits, model.size()).unwrap();
    let mut scheduler = scheduler.with_speculation(Some(Speculating::fixed_by(4, BatchDrafter::Model(guesses))));
    let (with, drafts) = replies(&mut scheduler, &requests, 3);
    let mut rounding = Rounding { drafts, ..Rounding::default() };
    for (prompt, request) in requests.iter().enumerate() {
        rounding.compare((prompt, request), [&without[prompt], &with[prompt]], 4);
    }
    println!("{architecture:?} with {of_draft:?} {seed}: {rounding:?}");
    rounding
}

#[test]
fn replies_are_the_same_with_speculation_whatever_was_guessed() {
    for architecture in [Architecture::Llama, Architecture::Gemma3] {
        for n_together in [1, 3] {
            measured(architecture, 40, n_together).check(80);
        }
    }
}

#[test]
fn replies_of_hybrid_models_are_the_same_with_speculation() {
    for architecture in [Architecture::Qwen35, Architecture::NemotronH, Architecture::Lfm2] {
        for n_together in [1, 3] {
            measured(architecture, 40, n_together).check(80);
        }
    }
    measured(Architecture::Qwen35Moe, 12, 2).check(24);
    measured(Architecture::Lfm2Windowed, 12, 2).check(24);
}

#[test]
fn replies_of_other_caches_are_the_same_with_speculation() {
    measured(Architecture::GptOss, 40, 3).check_mixture(80);
    for architecture in [Architecture::Qwen3Moe, Architecture::DeepSeek2] {
        measured(architecture, 12, 2).check(24);
    }
}

#[test]
fn replies_are_the_same_with_a_draft_model() {
    for (architecture, draft) in [
        (Architecture::Llama, (Architecture::Llama, 1)),
        (Architecture::Llama, (Architecture::Qwen3, 2)),
        (Architecture::Gemma3, (Architecture::Gemma3, 1)),
        (Architecture::Qwen35, (Architecture::Llama, 1)),
    ] {
        let rounding = guessed(architecture, draft, 12);
        rounding.check(12);
        // The same model guesses nearly every token, also those that are drawn at random.
        let DraftCounts { n, n_accepted } = rounding.drafts.model;
        let is_same = draft == (architecture, 1);
        assert!(n > 200 && (n_accepted * 10 > n * 7) == is_same, "{architecture:?}, {draft:?}: {n_accepted} of {n}");
    }
}

#[test]
fn replies_are_the_same_with_a_draft_node() {
    for architecture in [Architecture::Llama, Architecture::Gemma3, Architecture::Qwen35, Architecture::NemotronH] {
        for n_together in [1, 3] {
            let rounding = drafted(architecture, 12, n_together);
            rounding.check(12);
            let DraftCounts { n, n_accepted } = rounding.drafts.remote;
            assert!(n > n_accepted && n_accepted > 60, "{architecture:?}: {n_accepted} of {n}");
        }
    }
}

/// Differences of rows are larger by this factor if they are not rounding.
const BEYOND_NOISE: f64 = 4.0;

/// The rows where replies part differ no more than in batches of other shapes without guesses. Wrong KV would change them by far more.
#[test]
fn replies_part_by_no_more_than_other_batches_change_without_guesses() {
    for architecture in [Architecture::Llama, Architecture::Gemma3] {
        with_model(architecture, |model, options| {
            let Compared { requests, without, rounding } = compared(model, &options, 20, 3);
            let mut shapes = BatchShapes::new(model, &options, N_CELLS);
            let mut worst = (0.0f64, f64::INFINITY);
            for parting in &rounding.partings {
                let (request, reply) = (&requests[parting.prompt], &without[parting.prompt]);
                let noise = shapes.noise(request, reply, parting.at);
                assert!(noise > 0.0, "other shapes round differently");
                let wrong = shapes.of_wrong_token(request, reply, parting.at);
                println!("{architecture:?}: noise {noise:.5}, a wrong token {wrong:.5}, {parting:?}");
                worst = (worst.0.max(parting.distance.difference / noise), worst.1.min(wrong / noise));
            }
            let (drafts, wrong) = worst;
            assert!(rounding.partings.len() >= 3, "there is something to compare");
            println!(
                "{architecture:?}: {} part, at most {drafts:.2} of the noise; a wrong token at least {wrong:.1}",
                rounding.partings.len()
            );
            assert!(drafts <= BEYOND_NOISE && wrong > BEYOND_NOISE, "{drafts} and {wrong} times the noise");
        });
    }
}

/// A head of random weights seldom guesses right. What it guesses for a sequence does not depend on those beside it.
#[test]
fn replies_are_the_same_with_the_models_own_head() {
    replies_with_head(Architecture::Qwen35, 1, &requests(40), Rounding::check);
    let short = |n_prompt: usize| -> Vec<SequenceRequest> {
        let requests = requests(6).into_iter();
        let cut = |request: SequenceRequest| request.prompt.iter().copied().take(n_prompt).collect();
        requests.map(|request| SequenceRequest { prompt: cut(request.clone()), ..request }).collect()
    };
    for (architecture, n_heads) in [
        (Architecture::Qwen35Moe, 1),
        (Architecture::NemotronHMoe, 1),
        (Architecture::BailingMoe3, 1),
        (Architecture::DeepSeek2, 1),
        (Architecture::Glm4Moe, 1),
        (Architecture::HyV3, 2),
        (Architecture::Cohere2Moe, 1),
        (Architecture::Mimo2, 2),
        (Architecture::Step35, 2),
    ] {
        replies_with_head(architecture, n_heads, &short(usize::MAX), Rounding::check_few);
    }
    // An indexer chooses 64 positions. Where two are nearly equally good, rounding exchanges them, as it does experts.
    for architecture in [Architecture::DeepSeek32, Architecture::GlmDsa] {
        replies_with_head(architecture, 1, &short(20), Rounding::check_few);
    }
}

fn replies_with_head(
    architecture: Architecture,
    n_heads: u32,
    requests: &[SequenceRequest],
    check: fn(&Rounding, usize),
) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    tiny_gguf::write_with_heads(&file, architecture, 1, n_heads);
    let options = EngineOptions { speculation: Some(Speculation::Auto), ..EngineOptions::of(&file) };
    let head = load::head(&options, &Gguf::open(&file).unwrap()).unwrap();
    let (model, _) = loaded_with(options);
    let options =
        EngineOptions { n_ubatch: Some(64), n_slots: Some(3), n_threads: Some(1), ..EngineOptions::of(&file) };
    let (without, _) = replies(&mut scheduler_of(&model, options.clone(), N_CELLS), requests, 3);
    let options = EngineOptions { speculation: Some(Speculation::Auto), ..options };
    for n_together in [1, 3] {
        let mut scheduler = scheduler_of(&model, options.clone(), N_CELLS);
        let head = LlamaHead::create(&model, &options, N_CELLS, head).unwrap().unwrap();
        let drafts = head.drafts(&scheduler.limits, model.n_layer(), 64);
        let rows = HiddenRows::of_all(&scheduler.context.context).unwrap();
        scheduler.context = scheduler.context.with_hidden_rows(rows);
        let nodes = Arc::new(PlayedNodes::default());
        let draft_nodes = nodes.draft_nodes(scheduler.vocabulary.n_tokens() as u32);
        let speculating = Speculating::fixed_by(4, BatchDrafter::Head(drafts)).with_draft_nodes(Some(draft_nodes));
        let mut scheduler = scheduler.with_speculation(Some(speculating));
        let asked: Vec<SequenceRequest> = requests.iter().map(drafted_for).collect();
        let (with, drafts) = replies(&mut scheduler, &asked, n_together);
        assert!(nodes.followed.lock().unwrap().is_empty(), "a model with a head needs no draft node");
        let mut rounding = Rounding { drafts, ..Rounding::default() };
        for (prompt, request) in requests.iter().enumerate() {
            rounding.compare((prompt, request), [&without[prompt], &with[prompt]], 4);
        }
        println!("{architecture:?}, {n_together} together: {rounding:?}");
        check(&rounding, requests.len());
        assert!(rounding.drafts.mtp.n as usize > 50 * requests.len(), "{architecture:?}: {:?}", rounding.drafts);
    }
}

#[test]
fn without_speculation_company_rounds_as_much() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    tiny_gguf::write(&file, Architecture::Llama, 1);
    let (model, options) = loaded(&file);
    let options = EngineOptions { n_ubatch: Some(64), n_slots: Some(3), ..options };
    let requests = requests(40);
    let mut scheduler = scheduler_of(&model, options.clone(), N_CELLS);
    let (alone, _) = replies(&mut scheduler, &requests, 1);
    let (beside, _) = replies(&mut scheduler_of(&model, options, N_CELLS), &requests, 3);
    let mut rounding = Rounding::default();
    for (prompt, request) in requests.iter().enumerate() {
        rounding.compare((prompt, request), [&alone[prompt], &beside[prompt]], 0);
    }
    println!("{} of {} replies part: {rounding:?}", rounding.partings.len(), rounding.n_replies);
    rounding.check(40);
}
