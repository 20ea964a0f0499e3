//! Faults, drawn from a seed: at most one at a time on the decode nodes and one on the prefill nodes, so that one engine can
//! always answer.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use harness::occupy::occupy;
use harness::relay::LinkFault;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use super::cluster::{ChaosCluster, ChaosNode};

/// A fault of a node or its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scenario {
    /// SIGKILL, and a new process later.
    Kill,
    /// SIGSTOP, and SIGCONT later.
    Freeze,
    /// SIGTERM, and a new process.
    Restart,
    /// The link is slow for a while.
    SlowLink,
    /// Connections are reset.
    Reset,
    /// Connections end in the middle of a reply.
    Truncation,
    /// Bits of KV flip.
    BitFlip,
    /// Other clients take the node's slots and queue.
    FullQueue,
}

use Scenario::{BitFlip, Freeze, FullQueue, Kill, Reset, Restart, SlowLink, Truncation};

/// Faults of a decode node. Bits flip only in KV: see [`LinkFault::Flip`].
const FOR_DECODE: [Scenario; 7] = [Kill, Freeze, Restart, SlowLink, Reset, Truncation, FullQueue];
const FOR_PREFILL: [Scenario; 8] = [Kill, Freeze, Restart, SlowLink, Reset, Truncation, BitFlip, FullQueue];

/// How often each scenario took place, by task and name.
#[derive(Debug, Default)]
pub(crate) struct Tally(pub Mutex<BTreeMap<(Scenario, &'static str), u64>>);

impl Tally {
    fn count(&self, scenario: Scenario, task: &'static str) {
        *self.0.lock().unwrap().entry((scenario, task)).or_default() += 1;
    }
}

/// The nodes whose processes end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mortal {
    All,
    /// The second of each task. The processes of the first ones live as long as the cluster.
    Second,
}

/// Causes one fault after another on the nodes of each task, until it is dropped. Each round has all scenarios in another
/// order, so that a short run meets most of them.
pub(crate) async fn happen(cluster: &ChaosCluster, mortal: Mortal, seed: u64, tally: &Tally) {
    let decode = Victims { task: "decode", nodes: &cluster.decode, scenarios: &FOR_DECODE, mortal };
    let prefill = Victims { task: "prefill", nodes: &cluster.prefill, scenarios: &FOR_PREFILL, mortal };
    let last_kill = tokio::sync::Mutex::new(LastKill { n_met: 0 });
    tokio::join!(
        rounds(cluster, decode, seed, tally, &last_kill),
        rounds(cluster, prefill, seed ^ 1, tally, &last_kill)
    );
}

/// The kill before the next one, of any node. If two processes are killed under one request, nothing distinguishes it from a
/// request that kills its engines (docs/reliability.md): it ends with `poison_request`. So the next kill waits until the
/// requests that met this one have ended, however slow the machine is.
struct LastKill {
    /// The requests that had begun when its node was ready again.
    n_met: u64,
}

/// The nodes of one task, and what happens to them.
struct Victims<'a> {
    task: &'static str,
    nodes: &'a [tokio::sync::Mutex<ChaosNode>; 2],
    scenarios: &'a [Scenario],
    mortal: Mortal,
}

async fn rounds(
    cluster: &ChaosCluster,
    victims: Victims<'_>,
    seed: u64,
    tally: &Tally,
    last_kill: &tokio::sync::Mutex<LastKill>,
) {
    let Victims { task, nodes, scenarios, mortal } = victims;
    let mut rng = StdRng::seed_from_u64(seed);
    loop {
        let mut order = scenarios.to_vec();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.random_range(0..=i));
        }
        for scenario in order {
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..600))).await;
            let victim = match mortal {
                Mortal::Second if matches!(scenario, Kill | Restart) => 1,
                _ => rng.random_range(0..2),
            };
            let mut kill = match scenario {
                Kill => Some(last_kill.lock().await),
                _ => None,
            };
            if let Some(last) = &kill {
                cluster.service.underway.ended(last.n_met).await;
            }
            tally.count(scenario, task);
            befall(&mut *nodes[victim].lock().await, scenario, &mut rng).await;
            // The other node is next only once the endpoint reports this one as ready.
            cluster.all_ready().await;
            if let Some(last) = &mut kill {
                last.n_met = cluster.service.underway.n_begun();
            }
        }
    }
}

async fn befall(victim: &mut ChaosNode, scenario: Scenario, rng: &mut StdRng) {
    println!("{scenario:?} {}", victim.name);
    let mut pause = async |millis: std::ops::Range<u64>| {
        tokio::time::sleep(Duration::from_millis(rng.random_range(millis))).await;
    };
    match scenario {
        Kill => {
            victim.kill();
            pause(0..1_500).await;
            victim.start_process().await;
        }
        Freeze => {
            victim.signal(Signal::STOP);
            // Below and above the time that counts as silence.
            pause(500..9_000).await;
            victim.signal(Signal::CONT);
        }
        Restart => {
            victim.stop_process().await;
            victim.start_process().await;
        }
        FullQueue => {
            let url = victim.url();
            let crowd = futures::future::join_all((0..24).map(|i| occupy(url.clone(), i)));
            let _ = tokio::time::timeout(Duration::from_millis(1_500), crowd).await;
        }
        SlowLink | Reset | Truncation | BitFlip => {
            let (fault, millis) = match scenario {
                SlowLink => (LinkFault::Slow(100_000.0), 500..2_500),
                Reset => (LinkFault::Reset, 20..200),
                Truncation => (LinkFault::Truncate, 20..200),
                _ => (LinkFault::Flip, 200..1_500),
            };
            victim.relay.set(fault);
            pause(millis).await;
            victim.relay.set(LinkFault::None);
        }
    }
}
