//! Speculation: replies are the same with and without, and what is verified stays within its bounds. The logits are made up.

#[path = "draft_model_tests.rs"]
mod draft_model;
#[path = "prediction_head_tests.rs"]
mod prediction_head;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use baton_model::vocabulary::{TokenFacts, Vocabulary};
use baton_schemas::constraint::{Constraint, Rule};
use baton_schemas::sequence::{FinishReason, SequenceEvent, Timings};
use baton_schemas::{EngineError, KeyTag, SequenceRequest, Token};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tokio::sync::{mpsc, watch};

use super::super::constrain::{Compiler, Masks};
use super::super::jobs::{EngineLoad, Job, SchedulerMessage};
use super::super::step_budget::PrefillBudget;
use super::super::stub_engine::StubContext;
use super::checkpoint_tests::NoVectors;
use super::{EVENT_WINDOW, Ordering, Scheduler, SchedulerLimits, Speculating};

/// Tokens of the vocabulary. With so few, guesses from the text are often right by chance.
const N_VOCAB: u32 = 4;

/// The token that ends a reply.
const END: Token = N_VOCAB - 1;

const N_CELLS: usize = 256;

type Subject = Scheduler<StubContext, NoVectors>;

/// A token of a reply, with the bits of its log-probability.
type Drawn = (Token, Option<u32>);

#[derive(Debug, Clone, Default, PartialEq)]
struct Reply {
    tokens: Vec<Drawn>,
    end: Option<Result<FinishReason, EngineError>>,
    timings: Timings,
}

struct Reader {
    events: mpsc::Receiver<Result<SequenceEvent, EngineError>>,
    reply: Reply,
}

impl Reader {
    fn read(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            match event {
                Ok(SequenceEvent::Token(token)) => {
                    self.reply.tokens.push((token.id, token.logprobs.map(|logprobs| logprobs.chosen.to_bits())));
                }
                Ok(SequenceEvent::Finished { reason, timings }) => {
                    (self.reply.end, self.reply.timings) = (Some(Ok(reason)), timings);
                }
                Ok(_) => {}
                Err(error) => self.reply.end = Some(Err(error)),
            }
        }
    }
}

fn vocabulary() -> Arc<Vocabulary> {
    let token =
        |id: Token| TokenFacts { piece: vec![b'a' + id as u8], is_control: id == END, is_end_of_generation: id == END };
    Arc::new(Vocabulary::new((0..N_VOCAB).map(token)))
}

/// `n_draft`: every draft that there is is verified up to so many tokens. `None`: without speculation.
fn scheduler(n_draft: Option<usize>, n_cells: usize) -> Subject {
    let shared = Arc::new(EngineLoad { n_queued: AtomicUsize::new(0), load: watch::Sender::new(Default::default()) });
    let budget = PrefillBudget::new(32, false, None);
    let limits = SchedulerLimits { n_slots: 3, n_ctx: 128, n_cells, budget, sliding_window: None, has_states: false };
    let context = StubContext::new(3, N_VOCAB as usize);
    let speculating = n_draft.map(Speculating::fixed);
    Scheduler::new(context, NoVectors, vocabulary(), limits, shared).with_speculation(speculating)
}

fn submit(scheduler: &mut Subject, request: SequenceRequest, constrained: Option<Masks>) -> Reader {
    let (events, receiver) = mpsc::channel(EVENT_WINDOW);
    let job =
        Job { request, events, accepted: Instant::now(), export: None, constrained, images: Vec::new(), room: None };
    scheduler.shared.n_queued.fetch_add(1, Ordering::AcqRel);
    scheduler.take(SchedulerMessage::Job(Box::new(job)));
    Reader { events: receiver, reply: Reply::default() }
}

/// What the slots are said to have is what the context has, and nothing is left of refused drafts.
fn check_slots(scheduler: &Subject) {
    for (slot, state) in scheduler.slots.iter().enumerate() {
        assert_eq!(scheduler.context.tokens(slot), state.kv, "slot {slot}");
        if let Some(sequence) = &scheduler.running[slot] {
            assert!(sequence.tokens.starts_with(&state.kv), "slot {slot}");
        }
    }
}

/// The replies to requests that come one turn after another.
fn replies(scheduler: &mut Subject, requests: &[SequenceRequest]) -> Vec<Reply> {
    let mut readers: Vec<Reader> = Vec::new();
    let mut requests = requests.iter();
    for _ in 0..2_000 {
        readers.extend(requests.next().map(|request| submit(scheduler, request.clone(), None)));
        scheduler.turn();
        check_slots(scheduler);
        readers.iter_mut().for_each(Reader::read);
        if requests.len() == 0 && readers.iter().all(|reader| reader.reply.end.is_some()) {
            return readers.into_iter().map(|reader| reader.reply).collect();
        }
    }
    panic!("the replies do not end: {:?}", readers.iter().map(|reader| &reader.reply).collect::<Vec<_>>());
}

/// What was drawn, and how it ended.
type Text<'r> = (&'r [Drawn], &'r Option<Result<FinishReason, EngineError>>);

fn texts(replies: &[Reply]) -> Vec<Text<'_>> {
    replies.iter().map(|reply| (&reply.tokens[..], &reply.end)).collect()
}

prop_compose! {
    fn request()(
        prompt in proptest::collection::vec(0..N_VOCAB, 1..40),
        generated in proptest::collection::vec(0..END, 0..4),
        predicted in proptest::collection::vec(0..N_VOCAB + 2, 0..20),
        max_tokens in 1u32..60,
        temperature in prop_oneof![Just(0.0f32), Just(1.0)],
        seed in any::<u64>(),
        frequency_penalty in prop_oneof![Just(0.0f32), Just(0.7)],
        top_logprobs in proptest::option::of(Just(1u32)),
        (ignore_eos, reports_end, ephemeral) in any::<(bool, bool, bool)>(),
    ) -> SequenceRequest {
        let max_tokens = Some(max_tokens + generated.len() as u32);
        let mut request = SequenceRequest {
            prompt, generated, predicted, max_tokens, top_logprobs, ignore_eos, reports_end, ephemeral,
            ..Default::default()
        };
        request.sampling.temperature = temperature;
        request.sampling.seed = seed;
        request.sampling.frequency_penalty = frequency_penalty;
        request
    }
}

/// Runs as many random cases as `proptest!` would. Returns how many guesses were right in all of them.
fn accepted_in_cases<S: Strategy>(cases: &S, case: impl Fn(S::Value) -> Result<u32, TestCaseError>) -> u32 {
    let n_accepted = Cell::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_source_file(file!()));
    let result = runner.run(cases, |values| {
        n_accepted.set(n_accepted.get() + case(values)?);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}\n{runner}"));
    n_accepted.get()
}

#[test]
fn a_reply_is_the_same_with_and_without_speculation_whatever_was_right() {
    let cases = (proptest::collection::vec(request(), 1..6), 1usize..40);
    let n_accepted = accepted_in_cases(&cases, |(requests, n_draft)| {
        // Neither cells nor slots suffice for all.
        let expected = replies(&mut scheduler(None, 160), &requests);
        let replies = replies(&mut scheduler(Some(n_draft), 160), &requests);
        prop_assert_eq!(texts(&replies), texts(&expected));
        for reply in &replies {
            let Timings { drafts, predicted_n, .. } = reply.timings;
            let all = drafts.all();
            prop_assert!(all.n_accepted <= all.n && all.n_accepted <= predicted_n, "{:?}", reply.timings);
        }
        Ok(replies.iter().map(|reply| reply.timings.drafts.all().n_accepted).sum())
    });
    assert!(n_accepted > 0, "nothing was accepted");
}

fn repeating(max_tokens: u32) -> SequenceRequest {
    let mut request = SequenceRequest {
        prompt: [0, 1, 2, 0, 1].repeat(6),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..Default::default()
    };
    request.sampling.temperature = 0.0;
    request
}

#[test]
fn a_predicted_reply_takes_a_step_for_many_tokens() {
    let alone = replies(&mut scheduler(None, N_CELLS), &[repeating(33)]).remove(0);
    let predicted: Vec<Token> = alone.tokens.iter().map(|(token, _)| *token).collect();
    let request = SequenceRequest { predicted, ..repeating(33) };
    let mut subject = scheduler(Some(8), N_CELLS);
    let mut reader = submit(&mut subject, request, None);
    let mut n_turns = 0;
    while reader.reply.end.is_none() && n_turns < 100 {
        subject.turn();
        check_slots(&subject);
        reader.read();
        n_turns += 1;
    }
    assert_eq!(texts(&[reader.reply.clone()]), texts(&[alone]));
    let counts = reader.reply.timings.drafts.prediction;
    assert_eq!((counts.n, counts.n_accepted), (29, 29));
    assert!(n_turns <= 6, "{n_turns} turns");
}

#[test]
fn drafts_take_no_cells_from_others_and_stay_in_a_batch() {
    // The prompts and the replies of three sequences nearly fill the cache: a draft that took cells would preempt one.
    let requests = [repeating(20), repeating(20), repeating(20)];
    let mut subject = scheduler(Some(40), 160);
    let mut readers: Vec<Reader> = requests.iter().map(|request| submit(&mut subject, request.clone(), None)).collect();
    for _ in 0..100 {
        subject.turn();
        assert!(subject.batch.len() <= 32, "{} rows", subject.batch.len());
        assert!(subject.waiting.is_empty() && !subject.short_of_cells);
        readers.iter_mut().for_each(Reader::read);
    }
    assert!(readers.iter().all(|reader| reader.reply.tokens.len() == 20));
    assert!(readers.iter().any(|reader| reader.reply.timings.drafts.all().n_accepted > 0));
}

#[test]
fn a_reader_that_is_behind_gets_no_more_than_it_has_room_for() {
    let request = SequenceRequest { predicted: vec![0; 200], max_tokens: Some(100), ..repeating(100) };
    let mut subject = scheduler(Some(40), N_CELLS);
    let mut reader = submit(&mut subject, request.clone(), None);
    for _ in 0..200 {
        subject.turn();
    }
    assert!(reader.events.len() < EVENT_WINDOW);
    let mut n_turns = 0;
    while reader.reply.end.is_none() && n_turns < 200 {
        reader.read();
        subject.turn();
        n_turns += 1;
    }
    let expected = replies(&mut scheduler(None, N_CELLS), &[request]);
    assert_eq!(texts(&[reader.reply.clone()]), texts(&expected));
    assert!(reader.reply.timings.drafts.all().n_accepted > 0, "{:?}", reader.reply.timings);
}

#[test]
fn a_batch_that_is_refused_with_drafts_is_computed_without() {
    let expected = replies(&mut scheduler(None, N_CELLS), &[repeating(30), repeating(25)]);
    let mut subject = scheduler(Some(8), N_CELLS);
    subject.context.refuses_beyond = Some(4);
    let replies = replies(&mut subject, &[repeating(30), repeating(25)]);
    assert_eq!(texts(&replies), texts(&expected));
    assert!(replies.iter().any(|reply| reply.timings.drafts.all().n > 0), "{replies:?}");
}

#[tokio::test]
async fn a_constrained_reply_is_the_same_with_drafts() {
    let compiler = Arc::new(Compiler::new(vocabulary()));
    let constraint = Constraint::Grammar { rule: Rule::Pattern("(abc){10}a?".into()), field: "f".into() };
    let mut outcomes = Vec::new();
    for n_draft in [None, Some(6)] {
        let mut subject = scheduler(n_draft, N_CELLS);
        let constrained = compiler.constrained(&constraint, &[], KeyTag::NONE).await.unwrap();
        let request = SequenceRequest { ignore_eos: false, ..repeating(60) };
        let mut reader = submit(&mut subject, request, Some(Masks::new(constrained, Arc::new(|| {}))));
        let deadline = Instant::now() + std::time::Duration::from_secs(60);
        while reader.reply.end.is_none() && Instant::now() < deadline {
            subject.turn();
            check_slots(&subject);
            reader.read();
        }
        outcomes.push(reader.reply);
    }
    assert_eq!(texts(&outcomes[..1]), texts(&outcomes[1..]));
    assert!(outcomes[1].tokens.len() >= 30);
    assert!(outcomes[1].timings.drafts.lookup.n_accepted > 5, "{:?}", outcomes[1].timings);
}
