//! A cluster of the chaos test, with more kinds of clients.

use std::time::Instant;

use serde_json::Value;
use tiny_gguf::projector::{self, TinyProjector};

use super::mixed::Mixed;
use super::unruly::{self, Misconduct};
use super::{Counts, Level, reloads};
use crate::chaos::clients::{self, CONCURRENCY, Outcome, Reply};
use crate::chaos::cluster::ChaosCluster;
use crate::chaos::faults::{self, Mortal, Tally};
use crate::chaos::service::WhenFull;
use crate::chaos::{n_files, rounding};

/// Different requests, which are repeated. So the record of prompts reaches its size during the warm-up.
const N_SIMULATED: usize = 48;
const N_REAL: usize = 8;

/// A cluster with the replies that its clients expect.
pub(super) struct ClusterStand {
    pub(super) name: &'static str,
    cluster: ChaosCluster,
    bodies: Vec<Value>,
    expected: Vec<Reply>,
    concurrency: usize,
    mixed: Mixed,
    misconduct: &'static [Misconduct],
    /// Files that its nodes read when they start.
    _files: Option<tempfile::TempDir>,
}

impl ClusterStand {
    pub(super) async fn simulated(seed: u64) -> ClusterStand {
        let bodies: Vec<_> = (0..N_SIMULATED).map(|i| clients::request(seed, i)).collect();
        let instant = ["--engine", "sim", "--sim-prefill-tps", "1e9", "--sim-decode-tps", "1e6"];
        let undisturbed = harness::BatonServer::with(&instant);
        let expected = clients::undisturbed(&undisturbed.base, &bodies).await;
        let mixed = Mixed::undisturbed(&undisturbed.base, "sim").await;
        let speeds = ["--sim-prefill-tps", "5000", "--sim-decode-tps", "100", "--slots", "12", "--max-queued", "12"];
        let args = [&["--engine", "sim"][..], &speeds].concat();
        let cluster = ChaosCluster::start(false, &args, WhenFull::AskAgain).await;
        let (name, misconduct) = ("simulated engines", &Misconduct::ALL);
        ClusterStand { name, cluster, bodies, expected, concurrency: CONCURRENCY, mixed, misconduct, _files: None }
    }

    pub(super) async fn real() -> ClusterStand {
        let bodies: Vec<_> = (0..N_REAL).map(clients::real_request).collect();
        let files = tempfile::tempdir().unwrap();
        let projector = files.path().join("mmproj.gguf");
        // SmolLM2's rows have 576 values.
        projector::write(&projector, TinyProjector::Mlp, 576, 1);
        let sees = ["--mmproj", projector.to_str().unwrap()];
        let undisturbed = rounding::undisturbed_server(&sees);
        let expected = clients::undisturbed(&undisturbed.base, &bodies).await;
        let mixed = Mixed::undisturbed(&undisturbed.base, "smollm2").await.of_form_only();
        // A store that is full before memory is compared.
        let limits = ["--name", "smollm2", "--max-queued", "8", "--kv-store", "memory=64MiB"];
        let cluster = ChaosCluster::start(true, &[&limits[..], &sees].concat(), WhenFull::AskAgain).await;
        // Not those that hold a slot for long: two cores have few tokens to give.
        let misconduct = &[Misconduct::Leaving, Misconduct::Reset, Misconduct::Bomb];
        let name = "SmolLM2-135M";
        ClusterStand { name, cluster, bodies, expected, concurrency: 1, mixed, misconduct, _files: Some(files) }
    }

    pub(super) async fn run(&self, seed: u64, due: Instant) -> Counts {
        let service = &self.cluster.service;
        let chats = async {
            let mut all = Outcome::default();
            // A few at a time, so that little is left to do when the time is over.
            let n = 2 * self.concurrency;
            for (bodies, expected) in self.bodies.chunks(n).zip(self.expected.chunks(n)).cycle() {
                if Instant::now() >= due {
                    break;
                }
                all.add(clients::run(service, bodies, expected, self.concurrency).await);
            }
            all
        };
        let work = async {
            tokio::join!(
                chats,
                self.mixed.run(service, due),
                unruly::run(&service.base, self.mixed.model(), self.misconduct, due),
                reloads(|n| self.cluster.reload(n), due)
            )
        };
        let tally = Tally::default();
        let (chats, mixed, misconduct, n_reloads) = tokio::select! {
            work = work => work,
            () = faults::happen(&self.cluster, Mortal::Second, seed, &tally) => unreachable!("faults have no end"),
        };
        self.cluster.heal().await;
        self.cluster.all_ready().await;
        self.cluster.all_idle().await;
        let tally = tally.0.into_inner().unwrap();
        let faults = tally.into_iter().map(|((scenario, task), n)| (format!("{scenario:?} ({task})"), n)).collect();
        Counts { chats, mixed, misconduct, n_reloads, faults, ..Counts::default() }
    }

    pub(super) async fn level(&self) -> Level {
        let nodes = self.cluster.first_nodes_pids().await;
        let server = &self.cluster.server;
        Level {
            endpoint_kib: server.resident_kib(),
            endpoint_files: n_files(server.pid()),
            others_kib: nodes.iter().map(|&pid| harness::resident_kib(pid)).sum(),
            others_files: nodes.iter().map(|&pid| n_files(pid)).sum(),
        }
    }

    pub(super) async fn own_rows(&self) -> Vec<(&'static str, String)> {
        let state = self.cluster.state().await;
        let fallbacks = state["models"][0]["fallbacks"].as_object().cloned().unwrap_or_default();
        let fallbacks = fallbacks.iter().map(|(reason, fallback)| format!("`{reason}` {}", fallback["count"]));
        vec![
            ("refused for a full queue and asked again", self.cluster.service.n_asked_again().to_string()),
            ("fallbacks", fallbacks.collect::<Vec<_>>().join(", ")),
        ]
    }
}
