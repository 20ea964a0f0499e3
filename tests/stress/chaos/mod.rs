//! Under load, nodes are killed, frozen and restarted, and links become slow, break and corrupt bytes, at random times. No
//! reply is lost or changed, nothing hangs, and nothing is left behind.
//!
//! `make test` runs a few requests; `make chaos` sets `CHAOS_REQUESTS` and `CHAOS_PAGE`, which makes many more and writes
//! their figures to docs/results/reliability.md. `CHAOS_SEED` repeats a run.

pub(crate) mod clients;
pub(crate) mod cluster;
pub(crate) mod faults;
pub(crate) mod page;
pub(crate) mod rounding;
pub(crate) mod service;

use std::time::Instant;

use clients::CONCURRENCY;
use cluster::ChaosCluster;
use faults::Tally;
use harness::BatonServer;
use page::Figures;
use service::WhenFull;

/// Simulated requests of a run without `CHAOS_REQUESTS`.
const N_REQUESTS: usize = 60;

/// The growth of the endpoint's resident memory that faults may cause, KiB. The record of prompts grows during a run, which
/// does not reach its bound of 65,536 blocks a node.
const MEMORY_GROWTH_KIB: u64 = 24 << 10;

/// File descriptors that the endpoint may have more after a run than before: idle connections.
const MORE_FILES: usize = 16;

pub(crate) fn setting<T: std::str::FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Open files of a process; 0 where the system has no `/proc`.
pub(crate) fn n_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_reply_is_lost_or_changed_whatever_breaks() {
    let _alone = crate::machine().await;
    let n_requests = setting("CHAOS_REQUESTS", N_REQUESTS);
    let seed = setting("CHAOS_SEED", rand::random::<u64>() % 1_000_000);
    println!("seed {seed}, {n_requests} simulated requests (CHAOS_SEED, CHAOS_REQUESTS)");
    let simulated = simulated(seed, n_requests).await;
    assert!(simulated.outcome.differing.is_empty(), "seed {seed}: {:#?}", simulated.outcome.differing);
    // Far fewer, one at a time: while other streams run, such as those that fill a queue, llama.cpp rounds differently, and
    // a near tie can go the other way.
    let real = real(seed, n_requests / 10).await;
    let differing = &real.outcome.differing;
    assert!(differing.len() <= 1 + real.outcome.n_requests / 10, "seed {seed}: {differing:#?}");
    if let Ok(page) = std::env::var("CHAOS_PAGE") {
        page::write(page.as_ref(), seed, &[("simulated engines", &simulated), ("SmolLM2-135M", &real)]);
    }
}

/// Many requests at simulated engines.
async fn simulated(seed: u64, n_requests: usize) -> Figures {
    let bodies: Vec<_> = (0..n_requests).map(|i| clients::request(seed, i)).collect();
    let instant = ["--engine", "sim", "--sim-prefill-tps", "1e9", "--sim-decode-tps", "1e6"];
    let expected = clients::undisturbed(&BatonServer::with(&instant).base, &bodies).await;
    let speeds = ["--sim-prefill-tps", "5000", "--sim-decode-tps", "100", "--slots", "8", "--max-queued", "8"];
    let cluster = ChaosCluster::start(false, &[&["--engine", "sim"][..], &speeds].concat(), WhenFull::Fail).await;
    disturbed(&cluster, seed, &bodies, &expected, CONCURRENCY).await
}

/// A few requests at the real model.
async fn real(seed: u64, n_requests: usize) -> Figures {
    let bodies: Vec<_> = (0..n_requests).map(clients::real_request).collect();
    let expected = clients::undisturbed(&rounding::undisturbed_server(&[]).base, &bodies).await;
    let cluster = ChaosCluster::start(true, &["--name", "smollm2", "--max-queued", "8"], WhenFull::Fail).await;
    let figures = disturbed(&cluster, seed, &bodies, &expected, 1).await;
    let wrong = rounding::unexplained(&figures.outcome.differing).await;
    assert!(wrong.is_empty(), "seed {seed}: {wrong:#?}");
    figures
}

async fn disturbed(
    cluster: &ChaosCluster,
    seed: u64,
    bodies: &[serde_json::Value],
    expected: &[clients::Reply],
    concurrency: usize,
) -> Figures {
    // The first requests allocate what stays; the comparison begins after them.
    let n_warm = bodies.len().min(2 * concurrency);
    let warm = clients::run(&cluster.service, &bodies[..n_warm], &expected[..n_warm], concurrency).await;
    assert_eq!(warm.wrong, Vec::<String>::new(), "before anything was broken");
    cluster.all_idle().await;
    let pid = cluster.server.pid();
    let before = (cluster.server.resident_kib(), n_files(pid));

    let tally = Tally::default();
    let began = Instant::now();
    let outcome = tokio::select! {
        outcome = clients::run(&cluster.service, bodies, expected, concurrency) => outcome,
        () = faults::happen(cluster, faults::Mortal::All, seed, &tally) => unreachable!("faults have no end"),
    };
    let took = began.elapsed();
    cluster.heal().await;
    cluster.all_ready().await;
    cluster.all_idle().await;
    let after = (cluster.server.resident_kib(), n_files(pid));
    let figures = Figures {
        outcome,
        took,
        tally,
        memory_kib: (before.0, after.0),
        files: (before.1, after.1),
        state: cluster.state().await,
    };
    println!("{}", figures.table());
    assert_eq!(figures.outcome.wrong, Vec::<String>::new(), "seed {seed}");
    assert!(after.0 <= before.0 + MEMORY_GROWTH_KIB, "memory grew from {} to {} KiB", before.0, after.0);
    assert!(after.1 <= before.1 + MORE_FILES, "open files grew from {} to {}", before.1, after.1);
    // The cluster still works.
    let last = clients::run(&cluster.service, &bodies[..n_warm], &expected[..n_warm], concurrency).await;
    assert_eq!(last.wrong, Vec::<String>::new(), "after everything was mended");
    figures
}
