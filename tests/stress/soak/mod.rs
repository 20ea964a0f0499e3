//! Half an hour of everything at once: clients of all dialects whose replies are compared, clients that misbehave, faults of
//! nodes and links, and reloads. Every reply is right, nothing hangs, and neither memory nor open files grow.
//!
//! `make soak` sets `SOAK_MINUTES` and `SOAK_PAGE`, and writes the figures to docs/results/reliability.md. Without them the test
//! takes seconds, only so that it keeps working. The parts are those of `chaos`.

mod mixed;
mod unruly;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use harness::MAX_MARGIN;
use mixed::Mixed;
use serde_json::Value;
use tiny_gguf::projector::{self, TinyProjector};
use unruly::Misconduct;

use crate::chaos::clients::{self, CONCURRENCY, Outcome, Reply};
use crate::chaos::cluster::ChaosCluster;
use crate::chaos::faults::{self, Mortal, Tally};
use crate::chaos::{n_files, page, setting};

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

/// Different requests, which are repeated. So the record of prompts reaches its size during the warm-up.
const N_SIMULATED: usize = 48;
const N_REAL: usize = 8;

/// Time between two reloads.
const RELOAD_EVERY: Duration = Duration::from_secs(7);

const BEGIN: &str = "<!-- written by `make soak`: begin -->\n";

/// What a cluster holds when nothing runs.
#[derive(Debug, Clone, Copy)]
struct Level {
    endpoint_kib: u64,
    endpoint_files: usize,
    /// The memory and files of the two nodes that live from the start.
    nodes_kib: u64,
    nodes_files: usize,
}

/// The counts of one cluster's run.
#[derive(Debug, Default)]
struct Counts {
    chats: Outcome,
    mixed: mixed::Counts,
    misconduct: unruly::Counts,
    n_reloads: u64,
    tally: Tally,
}

/// A cluster with the replies that its clients expect.
struct Stand {
    name: &'static str,
    cluster: ChaosCluster,
    bodies: Vec<Value>,
    expected: Vec<Reply>,
    concurrency: usize,
    mixed: Mixed,
    misconduct: &'static [Misconduct],
    /// Files that its nodes read when they start.
    _files: Option<tempfile::TempDir>,
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_goes_wrong_or_grows_in_a_long_run() {
    let _alone = crate::machine().await;
    let minutes = setting("SOAK_MINUTES", DEFAULT_MINUTES);
    let seed = setting("CHAOS_SEED", rand::random::<u64>() % 1_000_000);
    println!("seed {seed}, {minutes} minutes (CHAOS_SEED, SOAK_MINUTES)");
    let time = Duration::from_secs_f64(minutes * 60.0);
    let stands = [simulated(seed).await, real().await];
    let [simulated, real] = &stands;
    let run = async |share: f64| {
        let due = Instant::now() + time.mul_f64(share);
        tokio::join!(simulated.run(seed, due), real.run(seed ^ 2, due))
    };
    let warm = run(WARM_UP).await;
    let settling = time.mul_f64(SETTLING).min(MAX_SETTLING);
    tokio::time::sleep(settling).await;
    let before = (simulated.level().await, real.level().await);
    let after_warm_up = run(1.0 - WARM_UP).await;
    tokio::time::sleep(settling).await;
    let after = (simulated.level().await, real.level().await);

    let mut tables = String::new();
    let sides =
        [(simulated, warm.0, after_warm_up.0, before.0, after.0), (real, warm.1, after_warm_up.1, before.1, after.1)];
    let mut failed = Vec::new();
    for (stand, warm, main, before, after) in sides {
        let table = table(&warm, &main, before, after, &stand.cluster.state().await);
        println!("{}:\n{table}", stand.name);
        let _ = write!(tables, "\nWith {}:\n\n{table}", stand.name);
        for counts in [&warm, &main] {
            failed
                .extend(counts.chats.wrong.iter().chain(&counts.mixed.wrong).chain(&counts.misconduct.wrong).cloned());
            // Other streams run beside, so that llama.cpp rounds differently; the simulator does not round.
            let is_wrong = |margin: Option<f32>| margin.is_none_or(|margin| margin >= MAX_MARGIN);
            let wrong = counts.chats.differing.iter().filter(|divergence| is_wrong(divergence.margin));
            failed.extend(wrong.map(|divergence| format!("differs: {divergence:?}")));
        }
        if minutes >= MIN_COMPARED_MINUTES {
            failed.extend(grown(stand.name, before, after));
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

async fn simulated(seed: u64) -> Stand {
    let bodies: Vec<_> = (0..N_SIMULATED).map(|i| clients::request(seed, i)).collect();
    let instant = ["--engine", "sim", "--sim-prefill-tps", "1e9", "--sim-decode-tps", "1e6"];
    let undisturbed = harness::BatonServer::with(&instant);
    let expected = clients::undisturbed(&undisturbed.base, &bodies).await;
    let mixed = Mixed::undisturbed(&undisturbed.base, "sim").await;
    let speeds = ["--sim-prefill-tps", "5000", "--sim-decode-tps", "100", "--slots", "12", "--max-queued", "12"];
    let cluster = ChaosCluster::start(false, &[&["--engine", "sim"][..], &speeds].concat()).await;
    let misconduct = &Misconduct::ALL;
    Stand {
        name: "simulated engines",
        cluster,
        bodies,
        expected,
        concurrency: CONCURRENCY,
        mixed,
        misconduct,
        _files: None,
    }
}

async fn real() -> Stand {
    let bodies: Vec<_> = (0..N_REAL).map(clients::real_request).collect();
    let files = tempfile::tempdir().unwrap();
    let projector = files.path().join("mmproj.gguf");
    // SmolLM2's rows have 576 values.
    projector::write(&projector, TinyProjector::Mlp, 576, 1);
    let sees = ["--mmproj", projector.to_str().unwrap()];
    let args = [&["--prefill", "http://127.0.0.1:1", "--policy", "direct", "--no-calibration"][..], &sees].concat();
    let undisturbed = harness::BatonServer::start(&args);
    let expected = clients::undisturbed(&undisturbed.base, &bodies).await;
    let mixed = Mixed::undisturbed(&undisturbed.base, "smollm2").await.of_form_only();
    // A store that is full before memory is compared.
    let limits = ["--name", "smollm2", "--max-queued", "8", "--kv-store", "memory=64MiB"];
    let cluster = ChaosCluster::start(true, &[&limits[..], &sees].concat()).await;
    // Not those that hold a slot for long: two cores have few tokens to give.
    let misconduct = &[Misconduct::Leaving, Misconduct::Reset, Misconduct::Bomb];
    Stand { name: "SmolLM2-135M", cluster, bodies, expected, concurrency: 1, mixed, misconduct, _files: Some(files) }
}

impl Stand {
    /// Runs everything until `due`, then until the last reply has come, and mends what faults have left.
    async fn run(&self, seed: u64, due: Instant) -> Counts {
        let mut counts = Counts::default();
        let base = &self.cluster.server.base;
        let chats = async {
            let mut all = Outcome::default();
            // A few at a time, so that little is left to do when the time is over.
            let n = 2 * self.concurrency;
            for (bodies, expected) in self.bodies.chunks(n).zip(self.expected.chunks(n)).cycle() {
                if Instant::now() >= due {
                    break;
                }
                all.add(clients::run(base, bodies, expected, self.concurrency).await);
            }
            all
        };
        let reloads = async {
            let mut n_reloads = 0;
            loop {
                tokio::time::sleep(RELOAD_EVERY).await;
                n_reloads += 1;
                self.cluster.reload(n_reloads);
                if Instant::now() >= due {
                    return n_reloads;
                }
            }
        };
        let work = async {
            tokio::join!(
                chats,
                self.mixed.run(base, due),
                unruly::run(base, self.mixed.model(), self.misconduct, due),
                reloads
            )
        };
        (counts.chats, counts.mixed, counts.misconduct, counts.n_reloads) = tokio::select! {
            work = work => work,
            () = faults::happen(&self.cluster, Mortal::Second, seed, &counts.tally) => unreachable!("faults have no end"),
        };
        self.cluster.heal().await;
        self.cluster.all_ready().await;
        self.cluster.all_idle().await;
        counts
    }

    async fn level(&self) -> Level {
        let nodes = self.cluster.first_nodes_pids().await;
        let server = &self.cluster.server;
        Level {
            endpoint_kib: server.resident_kib(),
            endpoint_files: n_files(server.pid()),
            nodes_kib: nodes.iter().map(|&pid| harness::resident_kib(pid)).sum(),
            nodes_files: nodes.iter().map(|&pid| n_files(pid)).sum(),
        }
    }
}

/// What has grown too much.
fn grown(name: &str, before: Level, after: Level) -> Vec<String> {
    let pairs = [
        ("the endpoint's memory", before.endpoint_kib, after.endpoint_kib),
        ("the endpoint's files", before.endpoint_files as u64 + PASSING_FILES, after.endpoint_files as u64),
        ("the nodes' memory", before.nodes_kib, after.nodes_kib),
        ("the nodes' files", before.nodes_files as u64 + PASSING_FILES, after.nodes_files as u64),
    ];
    let grown = pairs.into_iter().filter(|(_, before, after)| *after as f64 > *before as f64 * MAX_GROWTH);
    grown.map(|(what, before, after)| format!("{name}: {what} grew from {before} to {after}")).collect()
}

fn table(warm: &Counts, main: &Counts, before: Level, after: Level, state: &Value) -> String {
    let both = [warm, main];
    let sum = |of: fn(&Counts) -> usize| both.iter().map(|counts| of(counts)).sum::<usize>();
    let wrong: Vec<&String> = both.iter().flat_map(|c| c.chats.wrong.iter().chain(&c.mixed.wrong)).collect();
    let n_hung = wrong.iter().filter(|wrong| wrong.contains("hung")).count();
    let mib = |kib: u64| format!("{:.1}", kib as f64 / 1024.0);
    let mut faults = std::collections::BTreeMap::<String, u64>::new();
    let mut misconduct = std::collections::BTreeMap::<String, u64>::new();
    for counts in both {
        for ((scenario, task), n) in counts.tally.0.lock().unwrap().iter() {
            *faults.entry(format!("{scenario:?} ({task})")).or_default() += n;
        }
        for (kind, n) in &counts.misconduct.n {
            *misconduct.entry(format!("{kind:?}")).or_default() += n;
        }
    }
    let listed = |counts: &std::collections::BTreeMap<String, u64>| {
        counts.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", ")
    };
    let fallbacks = state["models"][0]["fallbacks"].as_object().cloned().unwrap_or_default();
    let fallbacks = fallbacks.iter().map(|(reason, fallback)| format!("`{reason}` {}", fallback["count"]));
    let rows = [
        ("chats, half of them streams", sum(|c| c.chats.n_requests).to_string()),
        ("other requests: tools, images, completions, vectors, other dialects", sum(|c| c.mixed.n).to_string()),
        ("wrong or lost", (wrong.len() - n_hung).to_string()),
        ("hung", n_hung.to_string()),
        ("differ at a near tie", sum(|c| c.chats.differing.len()).to_string()),
        (
            "time of a chat, p50 / p95 / max",
            [0.5, 0.95, 1.0].map(|s| format!("{:.2} s", main.chats.quantile(s).as_secs_f64())).join(" / "),
        ),
        ("misbehaving clients", listed(&misconduct)),
        ("faults", listed(&faults)),
        ("reloads", (warm.n_reloads + main.n_reloads).to_string()),
        ("fallbacks", fallbacks.collect::<Vec<_>>().join(", ")),
        (
            "endpoint's memory after the warm-up and at the end, MiB",
            format!("{} / {}", mib(before.endpoint_kib), mib(after.endpoint_kib)),
        ),
        ("endpoint's open files", format!("{} / {}", before.endpoint_files, after.endpoint_files)),
        (
            "memory of the two nodes that live from the start, MiB",
            format!("{} / {}", mib(before.nodes_kib), mib(after.nodes_kib)),
        ),
        ("their open files", format!("{} / {}", before.nodes_files, after.nodes_files)),
    ];
    let rows: String = rows.iter().map(|(name, value)| format!("| {name} | {value} |\n")).collect();
    format!("| | |\n|---|---|\n{rows}")
}
