//! Models with states: what is computed again, and that nothing is ever continued without the state of its prefix. The context
//! panics at that ([`strict`]).

mod handoffs;
mod pulls;
mod random;
mod restoring;
mod storing;
mod strict;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_model::vocabulary::{TokenFacts, Vocabulary};
use baton_schemas::handoff::HandoffReport;
use baton_schemas::kv::KvLayout;
use baton_schemas::sequence::{CachedTokens, Group, SequenceEvent};
use baton_schemas::{CacheScope, EngineError, SequenceRequest, Token};
use tokio::sync::{mpsc, watch};

use self::pulls::ScriptedPeer;
use self::strict::{CONTROL, N_VOCAB, StrictSlots, layout, reply};
use super::super::described::KvForm;
use super::super::jobs::{EmbedJob, EngineLoad, Job, SchedulerMessage};
use super::super::kv_flow::Export;
use super::super::slots::{self, CacheSlot};
use super::super::step_budget::PrefillBudget;
use super::super::vectors::Vectors;
use super::agent_trace::AgentTrace;
use super::{Handoffs, SchedulerLimits};

/// The bytes of a checkpoint.
const STATE: usize = 1_000;

pub(super) struct NoVectors;

impl Vectors for NoVectors {
    fn push(&mut self, _: EmbedJob) {}

    fn is_idle(&self) -> bool {
        true
    }

    fn backlog(&self) -> usize {
        0
    }

    fn step(&mut self, _: Option<usize>) {}
}

/// A scheduler over the strict context.
struct Rig {
    scheduler: super::Scheduler<StrictSlots, NoVectors>,
    peer: Arc<ScriptedPeer>,
    host_bytes: usize,
}

/// What a sequence sent.
#[derive(Debug, Default, PartialEq)]
struct Received {
    cached: CachedTokens,
    tokens: Vec<Token>,
    report: Option<HandoffReport>,
    n_computed: u32,
    error: Option<EngineError>,
    is_finished: bool,
}

type Events = mpsc::Receiver<Result<SequenceEvent, EngineError>>;

impl Received {
    fn take(&mut self, events: &mut Events) {
        while let Ok(event) = events.try_recv() {
            match event {
                Ok(SequenceEvent::Started(cached)) => self.cached = cached,
                Ok(SequenceEvent::Token(token)) => self.tokens.push(token.id),
                Ok(SequenceEvent::PrefillBegun) => {}
                Ok(SequenceEvent::Handoff(report)) => self.report = Some(report),
                Ok(SequenceEvent::Finished { timings, .. }) => {
                    self.n_computed = timings.prompt_n;
                    self.is_finished = true;
                }
                Err(error) => self.error = Some(error),
            }
        }
    }

    fn is_over(&self) -> bool {
        self.is_finished || self.error.is_some()
    }
}

impl Rig {
    fn new(n_slots: usize, n_cells: usize) -> Rig {
        Rig::with_memory(n_slots, n_cells, usize::MAX / 4)
    }

    /// With so many bytes for checkpoints, and as many for the store.
    fn with_memory(n_slots: usize, n_cells: usize, host_bytes: usize) -> Rig {
        let shared =
            Arc::new(EngineLoad { n_queued: AtomicUsize::new(0), load: watch::Sender::new(Default::default()) });
        let limits = SchedulerLimits {
            n_slots,
            n_ctx: n_cells,
            n_cells,
            budget: PrefillBudget::new(64, false, None),
            sliding_window: None,
            has_states: true,
        };
        let token = |id: Token| TokenFacts {
            piece: id.to_string().into_bytes(),
            is_control: id >= CONTROL,
            is_end_of_generation: false,
        };
        let peer = Arc::new(ScriptedPeer::default());
        let KvForm { layout, placement, buffers } = KvForm::rows(layout());
        let puller: Option<Arc<dyn baton_link::handoff::KvPuller>> = Some(Arc::clone(&peer) as Arc<_>);
        let handoffs = Handoffs { layout, placement, buffers, puller, wake: Arc::new(|| {}) };
        let context = StrictSlots::new(n_slots, STATE);
        let vocabulary = Arc::new(Vocabulary::new((0..N_VOCAB).map(token)));
        let scheduler = super::Scheduler::new(context, NoVectors, vocabulary, limits, shared)
            .with_handoffs(Some(handoffs))
            .with_checkpoints(host_bytes as u64);
        Rig { scheduler, peer, host_bytes }
    }

    fn submit(&mut self, request: SequenceRequest) -> Events {
        self.submit_with(request, None)
    }

    fn submit_with(&mut self, request: SequenceRequest, export: Option<Export>) -> Events {
        let (events, receiver) = mpsc::channel(super::EVENT_WINDOW);
        let images = Vec::new();
        let job = Job { request, events, accepted: Instant::now(), export, constrained: None, images, room: None };
        self.scheduler.shared.n_queued.fetch_add(1, Ordering::AcqRel);
        self.scheduler.take(SchedulerMessage::Job(Box::new(job)));
        receiver
    }

    /// Makes a turn, and checks that all that is noted about the slots is so, and that no idle conversation in the cache was cut.
    fn turn(&mut self) {
        self.scheduler.complete_groups();
        let idle = |state: &CacheSlot| (!state.busy).then_some((state.last_used, state.kv.len()));
        let before: Vec<Option<(u64, usize)>> = self.scheduler.slots.iter().map(idle).collect();
        self.scheduler.turn();
        for (state, before) in self.scheduler.slots.iter().zip(before) {
            let is_same = |(last_used, _): &(u64, usize)| !state.busy && state.last_used == *last_used;
            let n_before = before.filter(is_same).map_or(0, |(_, n)| n);
            // One whose cells others need loses all of them.
            assert!(
                state.kv.is_empty() || state.kv.len() >= n_before,
                "{n_before} tokens were cut to {}",
                state.kv.len()
            );
        }
        self.check();
    }

    fn check(&mut self) {
        let scheduler = &mut self.scheduler;
        for (slot, state) in scheduler.slots.iter().enumerate() {
            assert_eq!(scheduler.context.rows(slot), state.kv, "slot {slot}");
            let last = state.checkpoints.nearest(usize::MAX);
            assert!(last <= state.kv.len(), "slot {slot}");
            if let Some(sequence) = &scheduler.running[slot] {
                assert!(sequence.tokens.starts_with(&state.kv), "slot {slot}");
            }
        }
        let (_, n_bytes) = scheduler.checkpoint_totals();
        let n_stored = scheduler.storing.as_ref().map_or(0, |storing| storing.store().report().memory_bytes as usize);
        assert!(n_bytes.max(n_stored) <= self.host_bytes, "{n_bytes} of checkpoints, {n_stored} in the store");
    }

    /// The outcomes of some sequences, once they are over.
    fn outcomes(&mut self, events: &mut [Events]) -> Vec<Received> {
        let mut outcomes: Vec<Received> = events.iter().map(|_| Received::default()).collect();
        for _ in 0..10_000 {
            self.turn();
            outcomes.iter_mut().zip(&mut *events).for_each(|(outcome, events)| outcome.take(events));
            if outcomes.iter().all(Received::is_over) {
                return outcomes;
            }
            // A disk is not as fast as turns are.
            if self.scheduler.running.iter().flatten().any(|sequence| sequence.restoring.is_some()) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        panic!("the sequences do not end: {outcomes:?}");
    }

    /// Asks for a reply, which must be right. Returns the cached tokens.
    fn ask(&mut self, prompt: &[Token], n_reply: usize) -> usize {
        self.ask_as(CacheScope::SHARED, prompt, n_reply).cached.n_cached as usize
    }

    /// The same for a caller.
    fn ask_as(&mut self, cache_scope: CacheScope, prompt: &[Token], n_reply: usize) -> Received {
        let mut events = [self.submit(SequenceRequest { cache_scope, ..request(prompt, n_reply) })];
        let outcome = self.outcomes(&mut events).remove(0);
        assert_eq!((&outcome.error, &outcome.tokens), (&None, &reply(prompt, n_reply)));
        outcome
    }
}

/// A request for greedy tokens.
fn request(prompt: &[Token], n_reply: usize) -> SequenceRequest {
    let max_tokens = Some(n_reply as u32);
    let mut request = SequenceRequest { prompt: prompt.to_vec(), max_tokens, ignore_eos: true, ..Default::default() };
    request.sampling.temperature = 0.0;
    request
}

const AGENT: AgentTrace = AgentTrace {
    n_system: 1_500,
    n_instruction: 80,
    n_tool_result: 300,
    n_reasoning: 60,
    n_call: 40,
    n_text: CONTROL,
    control: [CONTROL, CONTROL + 1],
};

/// `n` tokens of text, other ones for each seed.
fn text(seed: u32, n: usize) -> Vec<Token> {
    AGENT.text(seed, n)
}

/// A message of the user, and the head of the reply.
fn said(seed: u32, n: usize) -> Vec<Token> {
    AGENT.said(seed, n)
}

#[test]
fn the_same_prompt_asked_again_computes_one_token() {
    let mut rig = Rig::new(2, 4_096);
    let prompt = text(1, 803);
    assert_eq!(rig.ask(&prompt, 8), 0);
    let before = rig.scheduler.context.n_computed;
    assert_eq!(rig.ask(&prompt, 8), 802);
    assert_eq!(rig.scheduler.context.n_computed - before, 8, "the last token of the prompt, and 7 of the reply");
}

#[test]
fn a_branch_is_computed_from_where_it_leaves_when_it_comes_a_second_time() {
    let mut rig = Rig::new(4, 8_192);
    let branch = |seed| [text(1, 700), text(seed, 103)].concat();
    assert_eq!([1, 2, 3, 4].map(|seed| rig.ask(&branch(seed), 8)), [0, 0, 700, 700]);
    // Each of the slots has it now.
    assert_eq!(rig.ask(&branch(1), 8), 802);
}

#[test]
fn a_second_turn_computes_what_follows_its_last_checkpoint() {
    let first = [text(1, 900), said(2, 60)].concat();
    let a = AgentTrace::n_before_reply(&first);
    let answer = reply(&first, 40);
    let ask = |second: Vec<Token>| {
        let mut rig = Rig::new(2, 8_192);
        assert_eq!(rig.ask(&first, 40), 0);
        rig.ask(&second, 8)
    };
    // As it was generated; the last token of the reply was never computed.
    assert_eq!(ask([&first[..], &answer, &said(3, 30)].concat()), first.len() + 39);
    // The reply's third token is another one.
    let mut retokenized = answer.clone();
    retokenized[2] = (retokenized[2] + 1) % CONTROL;
    assert_eq!(ask([&first[..], &retokenized, &said(3, 30)].concat()), first.len() - 1);
    // The template drops the reasoning.
    assert_eq!(ask([&first[..a], &[CONTROL, 4], &answer[30..], &said(3, 30)].concat()), a);
}

#[test]
fn conversations_with_one_system_prompt_compute_it_once() {
    let mut rig = Rig::new(4, 8_192);
    let ask = |rig: &mut Rig, seed| rig.ask(&[text(1, 500), said(seed, 40)].concat(), 8);
    assert_eq!([2, 3, 4, 5].map(|seed| ask(&mut rig, seed)), [0, 500, 500, 500]);
}

#[test]
fn requests_that_come_together_compute_a_common_beginning_once() {
    let mut rig = Rig::new(4, 8_192);
    let prompts: Vec<Vec<Token>> = (2..5).map(|seed| [text(1, 500), said(seed, 40)].concat()).collect();
    let mut events: Vec<Events> = prompts.iter().map(|prompt| rig.submit(request(prompt, 8))).collect();
    let outcomes = rig.outcomes(&mut events);
    for (prompt, outcome) in prompts.iter().zip(&outcomes) {
        assert_eq!(outcome.tokens, reply(prompt, 8));
    }
    assert_eq!(outcomes.iter().map(|outcome| outcome.cached.n_cached).collect::<Vec<_>>(), [0, 500, 500]);
}

#[test]
fn prompts_that_share_a_few_tokens_do_not_wait_for_each_other() {
    for (n_shared, n_running) in [(3, 2), (31, 2), (32, 1)] {
        let mut rig = Rig::new(4, 8_192);
        let events = [2, 3].map(|seed| rig.submit(request(&[text(1, n_shared), text(seed, 300)].concat(), 8)));
        rig.turn();
        assert_eq!(rig.scheduler.running.iter().flatten().count(), n_running, "{n_shared} shared tokens");
        drop(events);
    }
}

#[test]
fn the_choices_of_a_request_compute_its_prompt_once() {
    let mut rig = Rig::new(4, 8_192);
    let prompt = text(1, 300);
    let group = Some(Group { id: 7, size: 4 });
    let choice = SequenceRequest { group, ..request(&prompt, 20) };
    let mut events: Vec<Events> = (0..4).map(|_| rig.submit(choice.clone())).collect();
    let outcomes = rig.outcomes(&mut events);
    assert!(outcomes.iter().all(|outcome| outcome.tokens == reply(&prompt, 20)));
    // The others start before the last 4 tokens of the prompt, which they compute in one step.
    assert_eq!(rig.scheduler.context.n_computed, 295 + 4 * (4 + 20));
    assert_eq!(rig.scheduler.checkpoint_totals().0, 1 + 4, "they share the first checkpoint");
    // Asked again, each of them finds it.
    let mut events: Vec<Events> = (0..4).map(|_| rig.submit(choice.clone())).collect();
    assert!(rig.outcomes(&mut events).iter().all(|outcome| outcome.cached.n_cached == 299));
}

#[test]
fn a_sequence_whose_shared_batch_was_refused_goes_on_from_its_checkpoint() {
    const WRONG: Token = CONTROL - 1;
    let mut rig = Rig::new(2, 8_192);
    rig.scheduler.fails_at = Some(WRONG);
    let text = |seed, n| text(seed, n).into_iter().map(|token| token % WRONG).collect::<Vec<_>>();
    let (good, bad) = (text(1, 300), [text(2, 200), vec![WRONG]].concat());
    let n = (0..40).find(|&n| reply(&good, n).contains(&WRONG)).unwrap_or(40).min(20);
    let mut events = [rig.submit(request(&good, n)), rig.submit(request(&bad, 20))];
    let outcomes = rig.outcomes(&mut events);
    assert_eq!(outcomes[0].tokens, reply(&good, n));
    assert!(outcomes[1].error.is_some());
    assert!(rig.scheduler.context.n_returned > 0);
    let n_computed = rig.scheduler.context.n_computed;
    assert!(n_computed < 299 + 200 + 60, "{n_computed} tokens, and not the prompt again");
}

#[test]
fn two_faulty_sequences_do_not_refuse_each_others_batches_for_ever() {
    const WRONG: Token = CONTROL - 1;
    // Without checkpoints, each refusal costs all that both have computed.
    let mut rig = Rig::with_memory(2, 8_192, 0);
    rig.scheduler.fails_at = Some(WRONG);
    let prompt = |seed| {
        let mut tokens: Vec<Token> = text(seed, 300).into_iter().map(|token| token % WRONG).collect();
        tokens[210] = WRONG;
        request(&tokens, 8)
    };
    let first = rig.submit(prompt(1));
    rig.turn();
    let mut events = [first, rig.submit(prompt(2))];
    assert!(rig.outcomes(&mut events).iter().all(|received| received.error.is_some()));
}

#[test]
fn a_preempted_sequence_starts_again_and_its_reply_is_the_same() {
    let mut rig = Rig::new(3, 700);
    let prompts = [text(1, 250), text(2, 250)];
    let mut events: Vec<Events> = prompts.iter().map(|prompt| rig.submit(request(prompt, 120))).collect();
    let outcomes = rig.outcomes(&mut events);
    for (prompt, outcome) in prompts.iter().zip(&outcomes) {
        assert_eq!((&outcome.error, &outcome.tokens), (&None, &reply(prompt, 120)));
    }
    assert!(rig.scheduler.context.n_computed > 2 * (250 + 119), "one was preempted");
}

#[test]
fn checkpoints_keep_to_their_memory_and_the_ones_that_save_most_stay() {
    let mut rig = Rig::with_memory(8, 65_536, 6 * STATE);
    let ask = |rig: &mut Rig, seed| rig.ask(&[text(1, 2_000), said(seed, 40)].concat(), 8);
    for seed in 2..30 {
        ask(&mut rig, seed);
    }
    // `Rig::check` has counted their bytes.
    assert!(rig.scheduler.context.n_taken > 30);
    assert_eq!(ask(&mut rig, 40), 2_000, "the end of the system prompt");
}

#[test]
fn forty_turns_of_an_agent_compute_what_is_new_and_once_more_what_lost_its_reasoning() {
    let mut rig = Rig::new(4, 65_536);
    let (n_new, n_whole) = AGENT.run(40, |prompt, n_reply| {
        rig.ask(prompt, n_reply);
        reply(prompt, n_reply)
    });
    let n_computed = rig.scheduler.context.n_computed - 40 * (AGENT.n_reasoning + AGENT.n_call - 1);
    println!("40 turns of an agent: {n_computed} of {n_whole} prompt tokens computed, {n_new} of them are new");
    let again = 3 * 10 * (AGENT.n_tool_result + AGENT.n_call + 9);
    assert!(n_computed <= n_new + again, "{n_computed} tokens, {n_new} new ones, and {again}");
}

/// The layout's sizes are those that the scheduler counts.
#[test]
fn cells_are_counted_as_before() {
    let mut rig = Rig::new(2, 4_096);
    rig.ask(&text(1, 100), 8);
    assert_eq!(slots::cells_in_use(&rig.scheduler.slots), 107);
    let layout: KvLayout = layout();
    assert_eq!((layout.bytes_per_position(), layout.state_bytes()), (4, 12));
}
