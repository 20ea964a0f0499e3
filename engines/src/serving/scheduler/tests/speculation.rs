//! Replies of real contexts with drafts that are right, partly right and wrong, beside those without speculation.
//!
//! A step with drafts is another batch, and llama.cpp rounds differently for it. So each token is drawn again here, from its
//! row's log-probabilities by a sampler of its own: if that gives the same token in both replies, they part because of the
//! logits, and by how much these differ is measured.

use baton_model::gguf::Gguf;
use baton_model::options::Speculation;
use baton_schemas::sequence::{Alternative, DraftCounts, DraftTotals, GeneratedToken, SequenceEvent};
use baton_schemas::{SequenceRequest, Token};
use tiny_gguf::Architecture;

use super::{Events, N_ROLLBACK, Scheduler, loaded, loaded_with, request, scheduler_of, submit, turn};
use crate::engine_options::EngineOptions;
use crate::llama::draft::LoadedDraft;
use crate::llama::head::{HiddenRows, LlamaHead};
use crate::serving::drafting::batch_drafter::BatchDrafter;
use crate::serving::sampler::{Sampler, peak};
use crate::serving::scheduler::Speculating;

const N_CELLS: u32 = 2_048;
const N_NEW: u32 = 40;

/// Log-probabilities of a row that are compared: more than any draw can take.
const N_TOP: u32 = 64;

/// How two rows of the same tokens differ.
#[derive(Debug, Default)]
struct Rounding {
    n_replies: usize,
    n_rows: usize,
    /// The largest divergence of two rows before replies part, nats.
    max_kl: f64,
    /// Where replies part.
    partings: Vec<Parting>,
    /// The guesses.
    drafts: DraftTotals,
}

/// The first token in which two replies differ.
#[derive(Debug)]
#[allow(dead_code, reason = "they are printed")]
struct Parting {
    prompt: usize,
    n_draft: usize,
    at: usize,
    kl: f64,
    /// The largest difference of a likely token's log-probability.
    difference: f64,
    /// By how much the two drawn tokens' log-probabilities differ without speculation, but for penalties on repeated tokens.
    margin: f64,
}

/// The replies to requests, of which `n_together` run at the same time, and the guesses that were verified for them.
fn replies(
    scheduler: &mut Scheduler<'_>,
    requests: &[SequenceRequest],
    n_together: usize,
) -> (Vec<Vec<GeneratedToken>>, DraftTotals) {
    let (mut all, mut drafts) = (Vec::new(), DraftTotals::default());
    for some in requests.chunks(n_together) {
        let mut events: Vec<Events> = some.iter().map(|request| submit(scheduler, request.clone())).collect();
        let mut replies = vec![Vec::new(); some.len()];
        let mut n_turns = 0;
        while !scheduler.waiting.is_empty() || scheduler.running.iter().any(Option::is_some) {
            turn(scheduler);
            for (reply, events) in replies.iter_mut().zip(&mut events) {
                while let Ok(event) = events.try_recv() {
                    match event.unwrap() {
                        SequenceEvent::Token(token) => reply.push(token),
                        SequenceEvent::Finished { timings, .. } => drafts = drafts.plus(timings.drafts),
                        _ => {}
                    }
                }
            }
            n_turns += 1;
            assert!(n_turns < 1_000, "the replies do not end");
        }
        all.extend(replies);
    }
    (all, drafts)
}

/// Prompts that go far beyond the window of those that have one. Half of the replies are drawn at random.
fn requests(n: u32) -> Vec<SequenceRequest> {
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
fn predicted(requests: &[SequenceRequest], replies: &[Vec<GeneratedToken>]) -> Vec<SequenceRequest> {
    let predict = |(i, (request, reply)): (usize, (&SequenceRequest, &Vec<GeneratedToken>))| {
        let mut predicted: Vec<Token> = reply.iter().map(|token| token.id).collect();
        for at in (3 + i % 11..reply.len()).step_by(2 + i % 11) {
            predicted[at] = if at % 3 == 0 { Token::MAX } else { 101 };
        }
        SequenceRequest { predicted, ..request.clone() }
    };
    requests.iter().zip(replies).enumerate().map(predict).collect()
}

fn top(token: &GeneratedToken) -> &[Alternative] {
    &token.logprobs.as_ref().unwrap().top
}

fn logprob(of: &[Alternative], id: Token) -> f64 {
    of.iter().find(|other| other.id == id).map_or(f64::NEG_INFINITY, |other| f64::from(other.logprob))
}

/// The token that a sampler draws from a row after the first `n` tokens of a reply.
fn drawn_again(request: &SequenceRequest, reply: &[GeneratedToken], n: usize, scheduler: &Scheduler<'_>) -> Token {
    let mut logits = vec![f32::NEG_INFINITY; scheduler.vocabulary.n_tokens()];
    for Alternative { id, logprob, .. } in top(&reply[n]) {
        logits[*id as usize] = *logprob;
    }
    let banned = scheduler.vocabulary.end_of_generation();
    let said: Vec<Token> = reply[..n].iter().map(|token| token.id).collect();
    let mut sampler = Sampler::new(&request.sampling, banned, &request.prompt, &said);
    sampler.sample(&logits, peak(&logits).unwrap(), request.prompt.len() + n).unwrap()
}

/// Bounds of what rounding does to two rows of these models: their divergence, and the difference of a token's log-probability. The
/// two tokens of a draw may be further apart: its random number may lie between any two.
const MOST_KL: f64 = 1e-2;
const MOST_DIFFERENCE: f64 = 0.05;

impl Rounding {
    /// Replies are equal, but for a few draws between tokens that rounding may exchange.
    fn check(&self, n_replies: usize) {
        let is_rounding = |parting: &Parting| parting.kl < MOST_KL && parting.difference < MOST_DIFFERENCE;
        assert!(self.n_replies == n_replies && self.max_kl < MOST_KL, "{self:?}");
        assert!(self.partings.len() * 2 <= n_replies && self.partings.iter().all(is_rounding), "{self:?}");
    }

    fn compare(
        &mut self,
        (prompt, request): (usize, &SequenceRequest),
        [without, with]: [&[GeneratedToken]; 2],
        n_draft: usize,
        scheduler: &Scheduler<'_>,
    ) {
        self.n_replies += 1;
        assert_eq!((without.len(), with.len()), (N_NEW as usize, N_NEW as usize));
        for at in 0..without.len() {
            let rows = [top(&without[at]), top(&with[at])];
            let of_both = |one: &&Alternative| rows[1].iter().any(|other| other.id == one.id);
            let likely = rows[0].iter().filter(of_both);
            let differences = likely.map(|one| (f64::from(one.logprob), logprob(rows[1], one.id)));
            let kl = differences.clone().map(|(p, q)| p.exp() * (p - q)).sum::<f64>().abs();
            for reply in [without, with] {
                let again = drawn_again(request, reply, at, scheduler);
                assert_eq!(reply[at].id, again, "prompt {prompt}, drafts of {n_draft}, token {at}");
            }
            self.n_rows += 1;
            self.max_kl = self.max_kl.max(kl);
            if without[at].id != with[at].id {
                let margin = logprob(rows[0], without[at].id) - logprob(rows[0], with[at].id);
                let penalty = f64::from(request.sampling.frequency_penalty);
                let margin = if penalty > 0.0 { margin - (margin / penalty).round() * penalty } else { margin };
                let difference = differences.map(|(p, q)| (p - q).abs()).fold(0.0, f64::max);
                return self.partings.push(Parting { prompt, n_draft, at, kl, difference, margin });
            }
        }
    }
}

/// Compares replies with drafts of several lengths to those without, of `n_prompts` prompts, `n_together` at the same time.
fn measured(architecture: Architecture, n_prompts: u32, n_together: usize) -> Rounding {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    tiny_gguf::write(&file, architecture, 1);
    let (model, options) = loaded(&file);
    let options = EngineOptions { n_ubatch: Some(64), n_slots: Some(3), ..options };
    let requests = requests(n_prompts);
    let (without, _) = replies(&mut scheduler_of(&model, options.clone(), N_CELLS), &requests, n_together);
    let predicted = predicted(&requests, &without);
    let mut rounding = Rounding::default();
    let options = EngineOptions { speculation: Some(Speculation::Auto), ..options };
    for n_draft in [3, 24] {
        let scheduler = scheduler_of(&model, options.clone(), N_CELLS);
        let mut scheduler = scheduler.with_speculation(Some(Speculating::fixed(n_draft)));
        let (with, drafts) = replies(&mut scheduler, &predicted, n_together);
        rounding.drafts = rounding.drafts.plus(drafts);
        for (prompt, request) in requests.iter().enumerate() {
            rounding.compare((prompt, request), [&without[prompt], &with[prompt]], n_draft, &scheduler);
        }
    }
    println!("{architecture:?}, {n_together} together, {} part: {rounding:?}", rounding.partings.len());
    // Predictions are right at first, and wrong later.
    let DraftCounts { n, n_accepted } = rounding.drafts.prediction;
    assert!(n > n_accepted && n_accepted as usize >= rounding.n_replies, "{n_accepted} of {n}");
    rounding
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
        rounding.compare((prompt, request), [&without[prompt], &with[prompt]], 4, &scheduler);
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
    for architecture in [Architecture::Qwen35Moe, Architecture::Lfm2Windowed] {
        measured(architecture, 12, 2).check(24);
    }
}

#[test]
fn replies_of_other_caches_are_the_same_with_speculation() {
    for architecture in [Architecture::GptOss, Architecture::Qwen3Moe, Architecture::DeepSeek2] {
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

/// A head of random weights seldom guesses right. What it guesses for a sequence does not depend on those beside it.
#[test]
fn replies_are_the_same_with_the_models_own_head() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    tiny_gguf::write(&file, Architecture::Qwen35WithHead, 1);
    let options = EngineOptions { speculation: Some(Speculation::Auto), ..EngineOptions::of(&file) };
    let (model, _) = loaded_with(options);
    let options =
        EngineOptions { n_ubatch: Some(64), n_slots: Some(3), n_threads: Some(1), ..EngineOptions::of(&file) };
    let requests = requests(40);
    let (without, _) = replies(&mut scheduler_of(&model, options.clone(), N_CELLS), &requests, 3);
    let options = EngineOptions { speculation: Some(Speculation::Auto), ..options };
    for n_together in [1, 3] {
        let mut scheduler = scheduler_of(&model, options.clone(), N_CELLS);
        let head = LlamaHead::create(&model, &options, N_CELLS).unwrap().unwrap();
        let drafts = head.drafts(&scheduler.limits, model.n_layer(), 64);
        let rows = HiddenRows::of_all(&scheduler.context.context).unwrap();
        scheduler.context = scheduler.context.with_hidden_rows(rows);
        let mut scheduler = scheduler.with_speculation(Some(Speculating::fixed_by(4, BatchDrafter::Head(drafts))));
        let (with, drafts) = replies(&mut scheduler, &requests, n_together);
        let mut rounding = Rounding { drafts, ..Rounding::default() };
        for (prompt, request) in requests.iter().enumerate() {
            rounding.compare((prompt, request), [&without[prompt], &with[prompt]], 4, &scheduler);
        }
        println!("{n_together} together: {rounding:?}");
        rounding.check(40);
        assert!(rounding.drafts.mtp.n > 2_000, "{:?}", rounding.drafts);
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
        rounding.compare((prompt, request), [&alone[prompt], &beside[prompt]], 0, &scheduler);
    }
    println!("{} of {} replies part: {rounding:?}", rounding.partings.len(), rounding.n_replies);
    rounding.check(40);
}
