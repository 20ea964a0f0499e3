//! Speculation: replies are the same with and without, and what is verified stays within its bounds. The logits are made up.

#[path = "draft_model_tests.rs"]
mod draft_model;
#[path = "draft_node_tests.rs"]
mod draft_node;
#[path = "played_nodes.rs"]
pub(super) mod played_nodes;
#[path = "prediction_head_tests.rs"]
mod prediction_head;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use baton_model::vocabulary::{TokenFacts, Vocabulary};
use baton_schemas::constraint::{Constraint, Rule};
use baton_schemas::draft::{DraftReport, DraftTotals};
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
    /// The fate of guesses, with the index of the token that said so.
    reports: Vec<(usize, DraftReport)>,
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
                    self.reply.reports.extend(token.drafts.map(|report| (self.reply.tokens.len(), report)));
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
        (ignore_eos, reports_end, ephemeral, reports_drafts) in any::<(bool, bool, bool, bool)>(),
    ) -> SequenceRequest {
        let max_tokens = Some(max_tokens + generated.len() as u32);
        let mut request = SequenceRequest {
            prompt, generated, predicted, max_tokens, top_logprobs, ignore_eos, reports_end, ephemeral,
            reports_drafts,
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

/// The tokens of a reply say what its last event says of guesses, but for those of a last step that drew no token to be reported.
fn check_reports(request: &SequenceRequest, reply: &Reply) -> Result<(), TestCaseError> {
    let mut reported = DraftTotals::default();
    for (at, report) in &reply.reports {
        prop_assert!(report.loss.is_none(), "no draft node");
        let (drafter, counts) = report.verified.expect("what was verified");
        let of_all = reported.of_mut(drafter);
        *of_all = of_all.plus(counts);
        // The right ones are the tokens from this one on.
        prop_assert!(counts.n > 0 && at + counts.n_accepted as usize <= reply.tokens.len(), "{:?}", reply);
    }
    let (told, all) = (reported.all(), reply.timings.drafts.all());
    match (request.reports_drafts, &reply.end) {
        (false, _) => prop_assert!(reply.reports.is_empty()),
        (true, Some(Ok(FinishReason::Length))) => prop_assert_eq!(reported, reply.timings.drafts),
        (true, _) => prop_assert!(told.n <= all.n && told.n_accepted == all.n_accepted, "{:?}", reply),
    }
    Ok(())
}

#[test]
fn a_reply_is_the_same_with_and_without_speculation_whatever_was_right() {
    let cases = (proptest::collection::vec(request(), 1..6), 1usize..40);
    let n_accepted = accepted_in_cases(&cases, |(requests, n_draft)| {
        // Neither cells nor slots suffice for all.
        let expected = replies(&mut scheduler(None, 160), &requests);
        let replies = replies(&mut scheduler(Some(n_draft), 160), &requests);
        prop_assert_eq!(texts(&replies), texts(&expected));
        for (request, reply) in requests.iter().zip(&replies) {
            let Timings { drafts, predicted_n, .. } = reply.timings;
            let all = drafts.all();
            prop_assert!(all.n_accepted <= all.n && all.n_accepted <= predicted_n, "{:?}", reply.timings);
            check_reports(request, reply)?;
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
fn a_batch_that_is_refused_with_drafts_is_computed_without_and_after_some_nothing_is_guessed() {
    let expected = replies(&mut scheduler(None, N_CELLS), &[repeating(30), repeating(25)]);
    let mut subject = scheduler(Some(8), N_CELLS);
    subject.context.refuses_beyond = Some(4);
    let replies = replies(&mut subject, &[repeating(30), repeating(25)]);
    assert_eq!(texts(&replies), texts(&expected));
    // Three for each sequence.
    let n_refused = subject.context.n_refused;
    assert!((1..=6).contains(&n_refused), "{n_refused} batches were refused");
    assert!(replies.iter().all(|reply| reply.timings.drafts.all().n == 0), "none was verified: {replies:?}");
}

#[test]
fn a_refused_draft_that_stays_costs_one_prefill_and_no_token() {
    let request = || SequenceRequest { predicted: vec![0; 60], ..repeating(30) };
    let expected = replies(&mut scheduler(None, N_CELLS), &[request()]);
    let mut subject = scheduler(Some(8), N_CELLS);
    subject.context.keeps_drafts = true;
    let replies = replies(&mut subject, &[request()]);
    assert_eq!(texts(&replies), texts(&expected));
    let drafts = replies[0].timings.drafts.all();
    assert!(drafts.n_accepted < drafts.n && drafts.n <= 8, "{drafts:?}");
}

/// A reply under a constraint. `is_awaited`: all steps have their masks. Else a mask may be late, and then a draft is verified in vain.
async fn constrained(n_draft: Option<usize>, is_awaited: bool) -> Reply {
    let compiler = Arc::new(Compiler::new(vocabulary()));
    let constraint = Constraint::Grammar { rule: Rule::Pattern("(abc){10}a?".into()), field: "f".into() };
    let mut subject = scheduler(n_draft, N_CELLS);
    let masks = Masks::new(compiler.constrained(&constraint, &[], KeyTag::NONE).await.unwrap(), Arc::new(|| {}));
    let masks = if is_awaited { masks.awaited() } else { masks };
    let mut reader = submit(&mut subject, SequenceRequest { ignore_eos: false, ..repeating(60) }, Some(masks));
    let deadline = Instant::now() + std::time::Duration::from_secs(300);
    while reader.reply.end.is_none() {
        assert!(Instant::now() < deadline, "the reply does not end");
        subject.turn();
        check_slots(&subject);
        reader.read();
        std::thread::yield_now();
    }
    reader.reply
}

#[tokio::test]
async fn a_constrained_reply_is_the_same_with_drafts() {
    let expected = constrained(None, true).await;
    assert!(expected.tokens.len() >= 30, "{expected:?}");
    for (n_draft, is_awaited) in [(None, false), (Some(6), false), (Some(6), true)] {
        let found = constrained(n_draft, is_awaited).await;
        assert_eq!(texts(std::slice::from_ref(&found)), texts(std::slice::from_ref(&expected)), "{n_draft:?}");
        let n_accepted = found.timings.drafts.lookup.n_accepted;
        assert!(n_draft.is_none() || !is_awaited || n_accepted > 5, "{:?}", found.timings);
    }
}
