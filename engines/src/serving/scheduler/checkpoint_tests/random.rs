//! Random conversations, with everything that may happen to them. The context panics if a token is computed after another state
//! than that of its prefix, and every reply must be that of an engine alone.

use baton_schemas::handoff::KvSource;
use baton_schemas::{CacheScope, SequenceRequest, Token};
use proptest::collection::vec;
use proptest::prelude::*;

use super::pulls::Script;
use super::strict::reply;
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
        2 => (0..8usize).prop_map(|request| Act::Leave { request }),
        10 => (1..60usize).prop_map(Act::Turns),
        1 => Just(Act::Overwrite),
        1 => Just(Act::PreemptAll),
        1 => prop::option::of(150..190u32).prop_map(Act::Refuse),
    ]
}

struct Submitted {
    request: SequenceRequest,
    events: Events,
    outcome: Received,
}

fn run(n_slots: usize, n_cells: usize, host_bytes: usize, parks: bool, acts: Vec<Act>) {
    let mut rig = Rig::with_memory(n_slots, n_cells, host_bytes);
    if parks {
        rig = rig.parking();
    }
    let mut conversations: Vec<Vec<Token>> = vec![text(1, 150); 4];
    let mut asked: Vec<Submitted> = Vec::new();
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
                    *rig.peer.script.lock().unwrap() =
                        Script { breaks_after, states_first, lacks_states, lacks_checkpoints, crosses_checkpoints };
                }
                let request = SequenceRequest { kv_source, cache_scope, ..request(known, n_reply) };
                known.extend(reply(known, n_reply));
                let events = rig.submit(request.clone());
                asked.push(Submitted { request, events, outcome: Received::default() });
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
        }
        asked.iter_mut().for_each(|asked| asked.outcome.take(&mut asked.events));
    }
    for _ in 0..20_000 {
        if asked.iter().all(|asked| asked.outcome.is_over()) {
            break;
        }
        rig.turn();
        asked.iter_mut().for_each(|asked| asked.outcome.take(&mut asked.events));
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
        run(n_slots, n_cells, n_states * STATE, parks, acts);
    }
}
