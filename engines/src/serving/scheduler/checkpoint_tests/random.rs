//! Random conversations, with everything that may happen to them. The context panics if a token is computed after another state
//! than that of its prefix, and every reply must be that of an engine alone.

use baton_schemas::handoff::KvSource;
use baton_schemas::{CacheScope, SequenceRequest, Token};
use proptest::collection::vec;
use proptest::prelude::*;
use tokio::sync::mpsc;

use super::super::super::kv_flow::{Export, Exported, ExportedKv};
use super::super::Speculating;
use super::pulls::Script;
use super::strict::{N_VOCAB, chunk, part, reply};
use super::{Events, Received, Rig, STATE, request, said, text};

/// What happens next.
#[derive(Debug, Clone)]
enum Act {
    /// A conversation goes on: after `cut` per mille of its tokens, with its reply or another one.
    Ask {
        conversation: usize,
        cut: usize,
        seed: u32,
        n_said: usize,
        n_reply: usize,
        pull: Option<PullScript>,
        scope: u64,
    },
    /// Another node prefills: all of a conversation, of which its reader has a part.
    Prefill {
        conversation: usize,
        has: usize,
    },
    /// A reader leaves.
    Leave {
        request: usize,
    },
    Turns(usize),
    /// The KV of all slots is overwritten, as after NaN.
    Overwrite,
    PreemptAll,
    /// Batches with this token are refused from now on.
    Refuse(Option<Token>),
    /// KV can be copied no more, or again.
    RefuseCopies(bool),
}

type PullScript = (Option<u32>, bool, bool, bool, bool);

fn act() -> impl Strategy<Value = Act> {
    let rarely = || prop::bool::weighted(0.1);
    let pull = prop::option::weighted(
        0.3,
        (prop::option::weighted(0.3, 0..6u32), any::<bool>(), rarely(), rarely(), rarely()),
    );
    let cut = prop_oneof![3 => Just(1_000usize), 2 => 0..1_000usize];
    let ask = (0..4usize, cut, 0..40u32, 1..150usize, 0..30usize, pull, 0..2u64).prop_map(
        |(conversation, cut, seed, n_said, n_reply, pull, scope)| Act::Ask {
            conversation,
            cut,
            seed,
            n_said,
            n_reply,
            pull,
            scope,
        },
    );
    prop_oneof![
        10 => ask,
        3 => (0..4usize, 0..1_000usize).prop_map(|(conversation, has)| Act::Prefill { conversation, has }),
        2 => (0..8usize).prop_map(|request| Act::Leave { request }),
        10 => (1..60usize).prop_map(Act::Turns),
        1 => Just(Act::Overwrite),
        1 => Just(Act::PreemptAll),
        1 => prop::option::of(150..190u32).prop_map(Act::Refuse),
        1 => any::<bool>().prop_map(Act::RefuseCopies),
    ]
}

struct Submitted {
    request: SequenceRequest,
    events: Events,
    outcome: Received,
}

/// A prompt that is exported.
struct Exporting {
    prompt: Vec<Token>,
    exported: mpsc::Receiver<Exported>,
    events: Events,
    outcome: Received,
    /// The end of the rows that have come.
    end: u32,
    n_states: usize,
}

impl Exporting {
    fn begin(rig: &mut Rig, prompt: &[Token], start: u32) -> Exporting {
        let (export, exported) = Export::new(start, prompt.len() as u32, 1, &[]);
        let events = rig.submit_with(request(&[prompt, &[0]].concat(), 0), Some(export));
        let outcome = Received::default();
        Exporting { prompt: prompt.to_vec(), exported, events, outcome, end: start, n_states: 0 }
    }

    /// What comes is that of the prompt, each once and in order.
    fn take(&mut self) {
        self.outcome.take(&mut self.events);
        while let Ok(Exported { kv, .. }) = self.exported.try_recv() {
            match kv {
                ExportedKv::Chunk(rows) => {
                    assert_eq!((rows.p0, &rows), (self.end, &chunk(&self.prompt, rows.p0..rows.p1)));
                    self.end = rows.p1;
                }
                ExportedKv::State(state) => {
                    assert_eq!(state, part(&self.prompt));
                    self.n_states += 1;
                }
            }
        }
    }
}

/// A reply as a client may predict it: with errors, at distances that depend on the seed.
fn predicted(reply: &[Token], seed: u32) -> Vec<Token> {
    let distance = 1 + seed as usize % 9;
    let changed =
        |(i, token): (usize, &Token)| if i % distance == distance - 1 { (token + 1) % N_VOCAB } else { *token };
    reply.iter().enumerate().map(changed).collect()
}

/// Runs random conversations. `n_draft`: every draft is verified up to so many tokens. Returns how many tokens were taken
/// back.
fn run(
    (n_slots, n_cells, host_bytes): (usize, usize, usize),
    parks: bool,
    n_draft: Option<usize>,
    acts: Vec<Act>,
) -> usize {
    let mut rig = Rig::with_memory(n_slots, n_cells, host_bytes);
    rig.scheduler.context.n_rollback = 5;
    rig.scheduler = rig.scheduler.with_speculation(n_draft.map(Speculating::fixed));
    if parks {
        rig = rig.storing();
    }
    let mut conversations: Vec<Vec<Token>> = vec![text(1, 150); 4];
    let (mut asked, mut exporting): (Vec<Submitted>, Vec<Exporting>) = (Vec::new(), Vec::new());
    let mut may_fail = false;
    for act in acts {
        match act {
            Act::Ask { conversation, cut, seed, n_said, n_reply, pull, scope } => {
                let known = &mut conversations[conversation];
                known.truncate((known.len() * cut).div_ceil(1_000));
                known.extend(said(seed, n_said));
                if known.len() + n_reply >= n_cells {
                    *known = said(seed, n_said);
                }
                let kv_source = pull.map(|_| KvSource::at("http://prefill"));
                let cache_scope = CacheScope(scope);
                if let Some((breaks_after, states_first, lacks_states, lacks_checkpoints, crosses_checkpoints)) = pull {
                    *rig.peer.script.lock().unwrap() = Script {
                        breaks_after,
                        states_first,
                        lacks_states,
                        lacks_checkpoints,
                        crosses_checkpoints,
                        ..Script::default()
                    };
                }
                let reply = reply(known, n_reply);
                let predicted = predicted(&reply, seed);
                let request = SequenceRequest { kv_source, cache_scope, predicted, ..request(known, n_reply) };
                known.extend(reply);
                let events = rig.submit(request.clone());
                asked.push(Submitted { request, events, outcome: Received::default() });
            }
            Act::Prefill { conversation, has } => {
                let prompt = &conversations[conversation];
                let start = (prompt.len() * has / 1_000).min(prompt.len() - 1);
                exporting.push(Exporting::begin(&mut rig, prompt, start as u32));
            }
            Act::Leave { request } if request < asked.len() => drop(asked.swap_remove(request)),
            Act::Leave { .. } => {}
            Act::Turns(n) => (0..n).for_each(|_| rig.turn()),
            Act::Overwrite => {
                rig.scheduler.nan_since.get_or_insert_with(std::time::Instant::now);
                rig.scheduler.preempt_all();
            }
            Act::PreemptAll => rig.scheduler.preempt_all(),
            Act::Refuse(token) => {
                rig.scheduler.fails_at = token;
                may_fail |= token.is_some();
            }
            Act::RefuseCopies(refuses) => {
                rig.scheduler.context.refuses_copies = refuses;
                may_fail |= refuses;
            }
        }
        asked.iter_mut().for_each(|asked| asked.outcome.take(&mut asked.events));
        exporting.iter_mut().for_each(Exporting::take);
    }
    for _ in 0..20_000 {
        let exported = exporting.iter().all(|exporting| exporting.outcome.is_over());
        if exported && asked.iter().all(|asked| asked.outcome.is_over()) {
            break;
        }
        rig.turn();
        asked.iter_mut().for_each(|asked| asked.outcome.take(&mut asked.events));
        exporting.iter_mut().for_each(Exporting::take);
    }
    check_outcomes(exporting, asked, may_fail);
    rig.scheduler.context.n_taken_back
}

/// Every reply is that of an engine alone, and all that was asked for was exported.
fn check_outcomes(exporting: Vec<Exporting>, asked: Vec<Submitted>, may_fail: bool) {
    for Exporting { prompt, outcome, end, n_states, .. } in exporting {
        assert!(outcome.is_finished || (may_fail && outcome.error.is_some()), "{outcome:?}");
        assert!(!outcome.is_finished || (end as usize, n_states) == (prompt.len(), 1), "{end}, {n_states} states");
    }
    for Submitted { request, outcome, .. } in asked {
        let expected = reply(&request.prompt, request.max_tokens.unwrap() as usize);
        assert!(outcome.is_finished || (may_fail && outcome.error.is_some()), "{outcome:?}");
        assert!(expected.starts_with(&outcome.tokens) && (!outcome.is_finished || outcome.tokens == expected));
    }
}

proptest! {
    #[test]
    fn every_token_is_computed_after_the_state_of_its_prefix(
        n_slots in 1..5usize,
        n_cells in 600..3_000usize,
        n_states in 0..12usize,
        parks: bool,
        acts in vec(act(), 1..40),
    ) {
        run((n_slots, n_cells, n_states * STATE), parks, None, acts);
    }

    #[test]
    fn guesses_are_taken_back_to_the_state_of_what_was_right(
        n_slots in 1..5usize,
        n_cells in 600..3_000usize,
        parks: bool,
        n_draft in 1..12usize,
        acts in vec(act(), 1..40),
    ) {
        run((n_slots, n_cells, 6 * STATE), parks, Some(n_draft), acts);
    }
}

#[test]
fn one_conversation_takes_back_what_was_predicted_wrongly() {
    let ask = |n_said| Act::Ask { conversation: 0, cut: 1_000, seed: 3, n_said, n_reply: 29, pull: None, scope: 0 };
    let n_taken_back = run((2, 2_000, usize::MAX / 4), false, Some(4), vec![ask(40), Act::Turns(60), ask(20)]);
    assert!(n_taken_back >= 10, "{n_taken_back}");
}
