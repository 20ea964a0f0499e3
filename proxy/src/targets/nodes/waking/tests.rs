use std::net::{SocketAddr, UdpSocket};

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_planner::reason::FailureReason;
use tokio::time::Instant;

use super::*;
use crate::targets::nodes::{Health, StateChange, StateReason};

/// A node whose machine sleeps, and the socket that hears what would wake it.
async fn asleep(longest: Duration) -> (Arc<Node>, UdpSocket) {
    let card = UdpSocket::bind("127.0.0.1:0").unwrap();
    card.set_nonblocking(true).unwrap();
    let SocketAddr::V4(to) = card.local_addr().unwrap() else { panic!("IPv4") };
    let engine = Arc::new(SimEngine::new(SimConfig::default()));
    let health = Health::new("it");
    health.note_answer(Arc::new(engine.info().await.unwrap()));
    let node = Node::new("mac".into(), Some("http://mac:1".into()), engine, health);
    let mac = "a4:83:e7:12:34:56".parse().unwrap();
    node.set_waker(Some(WakeSettings { mac, to: Some(to), longest }), &Arc::default());
    falls_asleep(&node);
    (node, card)
}

fn falls_asleep(node: &Node) {
    let gone = StateChange::new(StateReason::Unreachable, "it cannot be reached");
    (0..2).for_each(|_| node.health.note_missed_answer(&gone, Duration::ZERO));
    assert_eq!(node.health.state(), NodeState::Asleep);
}

fn n_heard(card: &UdpSocket) -> usize {
    std::iter::from_fn(|| card.recv(&mut [0; 256]).ok()).count()
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_does_not_wake_rests_for_longer_each_time() {
    let longest = Duration::from_secs(20);
    let (node, card) = asleep(longest).await;
    assert_eq!(node.time_to_wake(), Some(Ok(longest)), "a minute is expected, and given up before");
    let mut rests = Vec::new();
    for _ in 0..9 {
        assert!(!node.wake(longest + Duration::from_secs(1)).await);
        assert_eq!(node.time_to_wake(), Some(Err(BarReason::Failure(FailureReason::NotWoken))));
        assert_eq!(node.health.status().words, "its machine was woken in vain");
        let rest = node.health.status().retry_in;
        let before = Instant::now();
        assert!(!node.wake(longest).await && before.elapsed() == Duration::ZERO, "it is left alone");
        rests.push(rest.as_secs_f64().round() as u64);
        tokio::time::advance(rest).await;
        assert!(node.time_to_wake().is_some_and(|time| time.is_ok()), "it may be tried again");
    }
    assert_eq!(rests, [30, 60, 120, 240, 480, 960, 1_920, 3_600, 3_600]);
    assert!(n_heard(&card) >= 9 * 4, "a packet may be lost");
}

#[tokio::test(start_paused = true)]
async fn the_waking_goes_on_without_those_who_wait_no_longer() {
    let (node, _card) = asleep(Duration::from_secs(90)).await;
    assert!(!node.wake(Duration::from_secs(10)).await, "it takes longer");
    assert_eq!(node.health.state(), NodeState::Waking);
    let expected = node.time_to_wake().unwrap().unwrap();
    assert!((Duration::from_secs(45)..Duration::from_secs(51)).contains(&expected), "10 s less: {expected:?}");
    let waits = tokio::spawn({
        let node = Arc::clone(&node);
        async move { node.wake(Duration::from_secs(60)).await }
    });
    tokio::time::sleep(Duration::from_secs(10)).await;
    node.health.note_answer(node.last_info().unwrap());
    assert!(waits.await.unwrap());
    assert_eq!((node.is_asleep(), node.time_to_wake()), (false, None));
    // The measured time counts from now on.
    tokio::time::sleep(Duration::from_secs(1)).await;
    falls_asleep(&node);
    let expected = node.time_to_wake().unwrap().unwrap();
    assert!((Duration::from_secs(20)..Duration::from_secs(25)).contains(&expected), "{expected:?}");
}

#[tokio::test]
async fn a_node_without_settings_is_lost_and_not_asleep() {
    let (node, card) = asleep(Duration::from_secs(1)).await;
    node.set_waker(None, &Arc::default());
    assert_eq!((node.health.state(), node.time_to_wake()), (NodeState::Down, None));
    assert!(!node.wake(Duration::from_secs(1)).await);
    assert_eq!((node.health.state(), n_heard(&card)), (NodeState::Down, 0));
}
