//! Follows a node's load through its load stream, or by polling if there is none.
//!
//! A stream reports a change within a tenth of a second, repeats the load twice a second, and ends with its node. So it is
//! also the first sign of a lost node. The node's supervisor or watcher then checks the node. If a stream never reports
//! a load (the node refuses it: there are too many), the node is polled instead, and a stream is tried again later.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_link::{Engine, awake};
use baton_schemas::EngineError;
use baton_schemas::node::NodeLoad;
use futures::StreamExt;
use tokio::time::Instant;

use super::health::Health;
use super::node_state::NodeState;
use super::probe::jittered;
use super::state_change::{StateChange, StateReason};

/// The interval between two polls of a node that gives no stream.
pub(super) const LOAD_INTERVAL: Duration = Duration::from_millis(250);

/// The longest wait for an answer, and for a line of a stream.
const LOAD_DEADLINE: Duration = Duration::from_secs(2);

/// How long a node is polled before a stream is tried again. Doubles each time there is none.
const FIRST_POLLS: Duration = Duration::from_secs(1);
const MAX_POLLS: Duration = Duration::from_secs(300);

/// A node whose load is followed.
pub(super) trait Followed: Send + Sync {
    fn engine(&self) -> &Arc<dyn Engine>;

    fn health(&self) -> &Health;

    /// The node reported this load in answer to a probe that was sent at `asked`.
    fn set_load(&self, load: NodeLoad, asked: Instant);

    /// The node could not be asked, so its silence says nothing.
    fn note_not_asked(&self);

    /// The node's process is not running, so it has no load and no cache.
    fn clear_load(&self);
}

/// Follows a node until it is dropped.
pub(super) async fn follow<N: Followed>(node: Weak<N>) {
    let mut polls_for = FIRST_POLLS;
    while let Some(is_running) = check_running(&node) {
        if !is_running {
            tokio::time::sleep(jittered(LOAD_INTERVAL)).await;
            continue;
        }
        match read_stream(&node).await {
            Some(why) => {
                polls_for = FIRST_POLLS;
                if let Some(node) = node.upgrade() {
                    node.health().note_silence(&why);
                }
                tokio::time::sleep(jittered(LOAD_INTERVAL)).await;
            }
            None => {
                poll(&node, polls_for).await;
                polls_for = (2 * polls_for).min(MAX_POLLS);
            }
        }
    }
}

/// Returns true if the node is running; `None` if it was dropped.
fn check_running<N: Followed>(node: &Weak<N>) -> Option<bool> {
    let node = node.upgrade()?;
    let is_running = node.health().is_running();
    if !is_running {
        node.clear_load();
    }
    Some(is_running)
}

/// Reads the load stream until it ends, and returns the reason. `None` if the stream never reported a load, which is no
/// sign of a lost node.
async fn read_stream<N: Followed>(node: &Weak<N>) -> Option<StateChange> {
    let engine = Arc::clone(node.upgrade()?.engine());
    let mut loads = awake::timeout(LOAD_DEADLINE, engine.loads()).await.ok()?.ok()?;
    let mut has_reported = false;
    loop {
        let asked = Instant::now();
        let load = awake::timeout(LOAD_DEADLINE, loads.next()).await;
        let node = node.upgrade()?;
        let ended = match load {
            Ok(Some(Ok(load))) => {
                node.set_load(load, asked);
                has_reported = true;
                continue;
            }
            Ok(None) if node.health().state() == NodeState::Draining => {
                StateChange::new(StateReason::Stopped, "the node was stopped")
            }
            Ok(None) => StateChange::new(StateReason::StreamEnded, "the node's load stream has ended"),
            Ok(Some(Err(error))) => StateChange { reason: StateReason::StreamLost, ..StateChange::from(&error) },
            Err(_) => silent(),
        };
        return has_reported.then_some(ended);
    }
}

/// Polls a node's load for this long, or until the node stops running.
async fn poll<N: Followed>(node: &Weak<N>, polls_for: Duration) {
    let began = Instant::now();
    while began.elapsed() < polls_for && check_running(node) == Some(true) {
        let Some(engine) = node.upgrade().map(|node| Arc::clone(node.engine())) else { return };
        let asked = Instant::now();
        let load = awake::timeout(LOAD_DEADLINE, engine.load()).await;
        let Some(node) = node.upgrade() else { return };
        match load {
            Ok(Ok(load)) => node.set_load(load, asked),
            Ok(Err(EngineError::NoResources { .. })) => node.note_not_asked(),
            Ok(Err(error)) => node.health().note_silence(&StateChange::from(&error)),
            Err(_) => node.health().note_silence(&silent()),
        }
        drop(node);
        tokio::time::sleep(jittered(LOAD_INTERVAL)).await;
    }
}

fn silent() -> StateChange {
    let cause = format!("no answer within {} s", LOAD_DEADLINE.as_secs());
    StateChange { reason: StateReason::Silent, words: "the node cannot be reached".to_owned(), cause }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use async_trait::async_trait;
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::wrapper::{EngineWrapper, UnusedEngine};
    use baton_link::{Engine, LoadStream};
    use baton_schemas::EngineError;
    use baton_schemas::node::{NodeInfo, NodeLoad, Phase};

    use super::*;
    use crate::targets::nodes::{Health, Node};

    /// How a stream of loads goes on after its lines.
    #[derive(Clone, Copy)]
    enum Then {
        Ends,
        IsSilent,
        Breaks,
    }

    /// Asked for its load it says 7; its streams say what a test wants, and then there are none.
    struct Scripted {
        streams: Mutex<VecDeque<(Vec<NodeLoad>, Then)>>,
        is_frozen: bool,
    }

    #[async_trait]
    impl EngineWrapper for Scripted {
        fn inner(&self) -> &dyn Engine {
            &UnusedEngine
        }

        async fn load(&self) -> Result<NodeLoad, EngineError> {
            if self.is_frozen { std::future::pending().await } else { Ok(active(7)) }
        }

        async fn loads(&self) -> Result<LoadStream, EngineError> {
            let next = self.streams.lock().unwrap().pop_front();
            let Some((lines, then)) = next else { return Err(EngineError::lost("no more of them")) };
            let stream = async_stream::stream! {
                for line in lines {
                    yield Ok(line);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                match then {
                    Then::Ends => {}
                    Then::IsSilent => std::future::pending().await,
                    Then::Breaks => yield Err(EngineError::lost("cut")),
                }
            };
            Ok(stream.boxed())
        }

        async fn info(&self) -> Result<NodeInfo, EngineError> {
            SimEngine::new(SimConfig::default()).info().await
        }
    }

    fn active(active_slots: u32) -> NodeLoad {
        NodeLoad { active_slots, ..NodeLoad::default() }
    }

    /// Follows a ready node with these streams for a while: its changes, and the slots that it was heard to use last.
    async fn follows(streams: &[(Vec<NodeLoad>, Then)], is_frozen: bool, secs: f32) -> (Vec<&'static str>, u32) {
        let engine = Scripted { streams: Mutex::new(streams.iter().cloned().collect()), is_frozen };
        let health = Health::new("it");
        health.note_answer(Arc::new(Engine::info(&engine).await.unwrap()));
        let node = Node::new("it".into(), None, Arc::new(engine), Arc::clone(&health));
        let mut changes = health.subscribe();
        let mut seen = Vec::new();
        let watched = async {
            loop {
                seen.push(changes.borrow_and_update().state().as_str());
                changes.changed().await.unwrap();
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs_f32(secs), watched).await;
        (seen, node.load().active_slots)
    }

    #[tokio::test(start_paused = true)]
    async fn a_load_on_the_stream_is_known_at_once() {
        let streams = [(vec![active(1), active(2)], Then::IsSilent)];
        assert_eq!(follows(&streams, false, 1.0).await, (vec!["ready"], 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_says_nothing_is_no_reason_for_suspicion_and_the_node_is_asked_instead() {
        for then in [Then::IsSilent, Then::Ends, Then::Breaks] {
            assert_eq!(follows(&[(Vec::new(), then)], false, 5.0).await, (vec!["ready"], 7));
        }
        assert_eq!(follows(&[], false, 1.0).await, (vec!["ready"], 7), "an engine without streams");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_ends_makes_a_node_suspect_until_it_answers() {
        for then in [Then::IsSilent, Then::Ends, Then::Breaks] {
            let (seen, n_active) = follows(&[(vec![active(1)], then)], false, 5.0).await;
            assert_eq!((seen, n_active), (vec!["ready", "suspect", "ready"], 7));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_falls_silent_is_suspect_and_then_down() {
        let (seen, n_active) = follows(&[(vec![active(1)], Then::IsSilent)], true, 10.0).await;
        assert_eq!((seen, n_active), (vec!["ready", "suspect", "down"], 0), "and runs nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_stops_is_drained_and_down_at_the_end() {
        let stops = NodeLoad { phase: Phase::Stopping, ..active(1) };
        let (seen, _) = follows(&[(vec![active(1), stops], Then::Ends)], false, 5.0).await;
        assert_eq!(seen, ["ready", "draining", "down"]);
    }
}
