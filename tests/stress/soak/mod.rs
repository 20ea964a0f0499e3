//! Half an hour of everything at once: clients of all dialects whose replies are compared, clients that misbehave, faults of
//! nodes and links, upstreams that hang, a log that nobody reads, models that take each other's memory, and reloads. Every
//! reply is right, nothing hangs, and neither memory nor open files grow.
//!
//! `make soak` sets `SOAK_MINUTES` and `SOAK_PAGE`, and writes the figures to docs/results/reliability.md. Without them the test
//! takes seconds, only so that it keeps working. The parts are those of `chaos`.

mod cluster_stand;
mod front;
mod mixed;
mod table;
mod unread_log;
mod unruly;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cluster_stand::ClusterStand;
use front::Front;
use futures::future::join_all;

use crate::chaos::clients::Outcome;
use crate::chaos::{page, rounding, setting};

/// Minutes of a run without `SOAK_MINUTES`.
const DEFAULT_MINUTES: f64 = 0.3;

/// From this length on, memory and files are compared: before, what is kept for later still grows.
const MIN_COMPARED_MINUTES: f64 = 10.0;

/// The part of the time after which memory and files are measured for the first time.
const WARM_UP: f64 = 0.2;

/// The most growth of memory and open files after the warm-up.
const MAX_GROWTH: f64 = 1.10;

/// Open files that may come and go: connections between a node and an endpoint that asks it just now.
const PASSING_FILES: u64 = 4;

/// The part of the time, and the most time, in which idle connections are closed before something is measured.
const SETTLING: f64 = 0.06;
const MAX_SETTLING: Duration = Duration::from_secs(100);

/// Time between two reloads.
const RELOAD_EVERY: Duration = Duration::from_secs(7);

const BEGIN: &str = "<!-- written by `make soak`: begin -->\n";

/// What the processes of a stand hold when nothing runs.
#[derive(Debug, Clone, Copy)]
struct Level {
    endpoint_kib: u64,
    endpoint_files: usize,
    /// The memory and files of the other processes that live from the start.
    others_kib: u64,
    others_files: usize,
}

/// The counts of one stand's run.
#[derive(Debug, Default)]
struct Counts {
    chats: Outcome,
    mixed: mixed::Counts,
    misconduct: unruly::Counts,
    n_reloads: u64,
    faults: BTreeMap<String, u64>,
    /// Requests to upstreams that may fail, by upstream and how each ended.
    ends: BTreeMap<String, u64>,
}

/// An endpoint with what it depends on, and its clients.
enum Stand {
    Cluster(Box<ClusterStand>),
    Front(Box<Front>),
}

impl Stand {
    fn name(&self) -> &'static str {
        match self {
            Stand::Cluster(stand) => stand.name,
            Stand::Front(_) => "upstreams that hang, a log that nobody reads, and two models in memory for one",
        }
    }

    /// Runs everything until `due`, then until the last reply has come, and mends what faults have left.
    async fn run(&self, seed: u64, due: Instant) -> Counts {
        match self {
            Stand::Cluster(stand) => stand.run(seed, due).await,
            Stand::Front(stand) => stand.run(seed, due).await,
        }
    }

    async fn level(&self) -> Level {
        match self {
            Stand::Cluster(stand) => stand.level().await,
            Stand::Front(stand) => stand.level(),
        }
    }

    /// The rows of the table that only this kind of stand has.
    async fn own_rows(&self) -> Vec<(&'static str, String)> {
        match self {
            Stand::Cluster(stand) => stand.own_rows().await,
            Stand::Front(stand) => stand.own_rows().await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_goes_wrong_or_grows_in_a_long_run() {
    let _alone = crate::machine().await;
    let minutes = setting("SOAK_MINUTES", DEFAULT_MINUTES);
    let seed = setting("CHAOS_SEED", rand::random::<u64>() % 1_000_000);
    println!("seed {seed}, {minutes} minutes (CHAOS_SEED, SOAK_MINUTES)");
    let time = Duration::from_secs_f64(minutes * 60.0);
    let stands = [
        Stand::Cluster(Box::new(ClusterStand::simulated(seed).await)),
        Stand::Cluster(Box::new(ClusterStand::real().await)),
        Stand::Front(Box::new(Front::start(seed).await)),
    ];
    let run = async |share: f64| {
        let due = Instant::now() + time.mul_f64(share);
        join_all(stands.iter().zip(0..).map(|(stand, i)| stand.run(seed ^ (2 * i), due))).await
    };
    let levels = async || {
        tokio::time::sleep(time.mul_f64(SETTLING).min(MAX_SETTLING)).await;
        join_all(stands.iter().map(Stand::level)).await
    };
    let warm = run(WARM_UP).await;
    let before = levels().await;
    let main = run(1.0 - WARM_UP).await;
    let after = levels().await;

    let mut tables = String::new();
    let mut failed = Vec::new();
    for (i, stand) in stands.iter().enumerate() {
        let (counts, levels) = ([&warm[i], &main[i]], [before[i], after[i]]);
        let table = table::table(counts, levels, stand.own_rows().await);
        println!("{}:\n{table}", stand.name());
        tables += &format!("\nWith {}:\n\n{table}", stand.name());
        for Counts { chats, mixed, misconduct, .. } in counts {
            failed.extend(chats.wrong.iter().chain(&mixed.wrong).chain(&misconduct.wrong).cloned());
            let unexplained = rounding::unexplained(&chats.differing).await;
            failed.extend(unexplained.iter().map(|divergence| format!("differs: {divergence}")));
        }
        if minutes >= MIN_COMPARED_MINUTES {
            failed.extend(grown(stand.name(), before[i], after[i]));
        }
    }
    if let Ok(page) = std::env::var("SOAK_PAGE") {
        page::replace(
            page.as_ref(),
            BEGIN,
            &format!("\n`CHAOS_SEED={seed} SOAK_MINUTES={minutes} make soak`\n{tables}\n"),
        );
    }
    assert!(failed.is_empty(), "seed {seed}: {failed:#?}");
}

/// What has grown too much.
fn grown(name: &str, before: Level, after: Level) -> Vec<String> {
    let pairs = [
        ("the endpoint's memory", before.endpoint_kib, after.endpoint_kib),
        ("the endpoint's files", before.endpoint_files as u64 + PASSING_FILES, after.endpoint_files as u64),
        ("the others' memory", before.others_kib, after.others_kib),
        ("the others' files", before.others_files as u64 + PASSING_FILES, after.others_files as u64),
    ];
    let grown = pairs.into_iter().filter(|(_, before, after)| *after as f64 > *before as f64 * MAX_GROWTH);
    grown.map(|(what, before, after)| format!("{name}: {what} grew from {before} to {after}")).collect()
}

/// Reloads again and again until `due`. Returns how often.
async fn reloads(reload: impl Fn(u64), due: Instant) -> u64 {
    let mut n_reloads = 0;
    loop {
        tokio::time::sleep(RELOAD_EVERY).await;
        n_reloads += 1;
        reload(n_reloads);
        if Instant::now() >= due {
            return n_reloads;
        }
    }
}
