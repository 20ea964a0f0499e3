//! Sequences under a constraint: nobody waits for another one's mask, and what is drawn does not depend on when masks are
//! known.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use baton_model::vocabulary::{TokenFacts, Vocabulary};
use baton_schemas::constraint::{Constraint, Rule};
use baton_schemas::sequence::{FinishReason, SequenceEvent};
use baton_schemas::{EngineError, KeyTag, SequenceRequest, Token};
use tokio::sync::{Mutex, mpsc, watch};

use super::super::constrain::{Compiler, Masks};
use super::super::jobs::{EngineLoad, Job, SchedulerMessage};
use super::super::step_budget::PrefillBudget;
use super::super::stub_engine::StubContext;
use super::checkpoint_tests::NoVectors;
use super::{EVENT_WINDOW, Ordering, Scheduler, SchedulerLimits};

/// The letters from a on, and the token that ends a reply.
const N_LETTERS: Token = 26;

/// The letters of a text that the constraint allows.
const N_TEXT: usize = 12;

struct Rig {
    scheduler: Scheduler<StubContext, NoVectors>,
    compiler: Arc<Compiler>,
    /// While it is locked, no mask of a sequence that is held up is computed. Such masks count as expensive.
    gate: Arc<Mutex<()>>,
}

#[derive(Debug, Default, PartialEq)]
struct Reply {
    tokens: Vec<Token>,
    end: Option<Result<FinishReason, EngineError>>,
}

struct Reader {
    events: mpsc::Receiver<Result<SequenceEvent, EngineError>>,
    reply: Reply,
}

impl Reader {
    fn read(&mut self) -> &Reply {
        while let Ok(event) = self.events.try_recv() {
            match event {
                Ok(SequenceEvent::Token(token)) => self.reply.tokens.push(token.id),
                Ok(SequenceEvent::Finished { reason, .. }) => self.reply.end = Some(Ok(reason)),
                Ok(_) => {}
                Err(error) => self.reply.end = Some(Err(error)),
            }
        }
        &self.reply
    }
}

impl Rig {
    fn new() -> Rig {
        let shared =
            Arc::new(EngineLoad { n_queued: AtomicUsize::new(0), load: watch::Sender::new(Default::default()) });
        let budget = PrefillBudget::new(64, false, None);
        let limits =
            SchedulerLimits { n_slots: 4, n_ctx: 512, n_cells: 2_048, budget, sliding_window: None, has_states: false };
        let token = |id: Token| TokenFacts {
            piece: if id < N_LETTERS { vec![b'a' + id as u8] } else { b"<end>".to_vec() },
            is_control: id == N_LETTERS,
            is_end_of_generation: id == N_LETTERS,
        };
        let vocabulary = Arc::new(Vocabulary::new((0..=N_LETTERS).map(token)));
        let context = StubContext::new(4, N_LETTERS as usize + 1);
        let compiler = Arc::new(Compiler::new(Arc::clone(&vocabulary)));
        let scheduler = Scheduler::new(context, NoVectors, vocabulary, limits, shared);
        Rig { scheduler, compiler, gate: Arc::default() }
    }

    fn submit(&mut self, request: SequenceRequest, constrained: Option<Masks>) -> Reader {
        let (events, receiver) = mpsc::channel(EVENT_WINDOW);
        let images = Vec::new();
        let job = Job { request, events, accepted: Instant::now(), export: None, constrained, images, room: None };
        self.scheduler.shared.n_queued.fetch_add(1, Ordering::AcqRel);
        self.scheduler.take(SchedulerMessage::Job(Box::new(job)));
        Reader { events: receiver, reply: Reply::default() }
    }

    /// A sequence of `n` tokens that nothing constrains.
    fn free(&mut self, n: u32) -> Reader {
        self.submit(SequenceRequest { ignore_eos: true, ..request(n) }, None)
    }

    /// A sequence whose text has `N_TEXT` letters from f to m. `is_held_up`: its masks wait for the gate.
    async fn constrained(&mut self, n: u32, is_held_up: bool) -> Reader {
        let rule = Rule::Pattern(format!("[f-m]{{{N_TEXT}}}"));
        let constraint = Constraint::Grammar { rule, field: "f".to_owned() };
        let mut constrained = self.compiler.constrained(&constraint, &[], KeyTag::NONE).await.unwrap();
        constrained.gate = is_held_up.then(|| Arc::clone(&self.gate));
        self.submit(request(n), Some(Masks::new(constrained, Arc::new(|| {}))))
    }

    fn turns(&mut self, n: usize) {
        (0..n).for_each(|_| self.scheduler.turn());
    }

    fn until_the_end(&mut self, reader: &mut Reader) -> Reply {
        let deadline = Instant::now() + Duration::from_secs(60);
        while reader.read().end.is_none() && Instant::now() < deadline {
            self.scheduler.turn();
            std::thread::yield_now();
        }
        std::mem::take(&mut reader.reply)
    }
}

fn request(n: u32) -> SequenceRequest {
    let mut request = SequenceRequest { prompt: vec![1, 2, 3], max_tokens: Some(n), ..Default::default() };
    request.sampling.temperature = 0.0;
    request
}

/// The reply of a sequence alone, whose masks are cheap.
async fn expected(n: u32) -> Reply {
    let mut rig = Rig::new();
    let mut alone = rig.constrained(n, false).await;
    rig.until_the_end(&mut alone)
}

#[tokio::test]
async fn a_sequence_whose_mask_is_not_known_sits_out_steps_and_the_others_go_on() {
    let mut rig = Rig::new();
    let gate = Arc::clone(&rig.gate);
    let held_up = gate.lock().await;
    let mut slow = [rig.constrained(40, true).await, rig.constrained(40, true).await];
    let mut free = rig.free(40);
    // A step computes the prompts, and each further one a token.
    rig.turns(41);
    assert_eq!((free.read().tokens.len(), &free.reply.end), (40, &Some(Ok(FinishReason::Length))));
    let mut cheap = rig.constrained(40, false).await;
    let cheap = rig.until_the_end(&mut cheap);
    let expected = expected(40).await;
    assert_eq!((cheap.tokens.len(), &cheap), (N_TEXT, &expected), "cheap masks do not queue behind expensive ones");
    for slow in &mut slow {
        assert_eq!(slow.read(), &Reply::default());
    }
    drop(held_up);
    for slow in &mut slow {
        assert_eq!(rig.until_the_end(slow), expected);
    }
    assert!(rig.scheduler.running.iter().all(Option::is_none));
}

#[tokio::test]
async fn a_text_that_its_constraint_completes_ends_there_however_late_that_is_known() {
    for (n, n_tokens, reason) in [
        (40, N_TEXT, FinishReason::Stop),
        (N_TEXT as u32, N_TEXT, FinishReason::Stop),
        (N_TEXT as u32 - 1, N_TEXT - 1, FinishReason::Length),
    ] {
        let expected = expected(n).await;
        assert_eq!((expected.tokens.len(), &expected.end), (n_tokens, &Some(Ok(reason))));
        let mut rig = Rig::new();
        let mut late = rig.constrained(n, true).await;
        assert_eq!(rig.until_the_end(&mut late), expected, "at most {n} tokens");
    }
}

#[tokio::test]
async fn a_sequence_that_starts_again_while_its_mask_is_computed_draws_the_same() {
    let mut rig = Rig::new();
    let gate = Arc::clone(&rig.gate);
    let mut slow = rig.constrained(40, true).await;
    let deadline = Instant::now() + Duration::from_secs(60);
    while slow.read().tokens.len() < 3 && Instant::now() < deadline {
        rig.turns(1);
        std::thread::yield_now();
    }
    let held_up = gate.lock().await;
    rig.turns(20);
    assert!(rig.scheduler.running[0].as_ref().unwrap().held.is_some(), "its next token waits for the mask");
    rig.scheduler.preempt_all();
    rig.turns(20);
    drop(held_up);
    assert_eq!(rig.until_the_end(&mut slow), expected(40).await);
}

#[tokio::test]
async fn a_reader_that_leaves_while_a_mask_is_computed_frees_its_slot() {
    let mut rig = Rig::new();
    let gate = Arc::clone(&rig.gate);
    let _held_up = gate.lock().await;
    let slow = rig.constrained(40, true).await;
    rig.turns(5);
    assert!(rig.scheduler.running[0].is_some());
    drop(slow);
    rig.turns(1);
    assert!(rig.scheduler.running.iter().all(Option::is_none));
}
