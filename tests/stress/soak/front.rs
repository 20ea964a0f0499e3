//! An endpoint in front of upstreams, one of which hangs at random, with two models in memory for one, whose log is not read
//! for seconds. A second Baton, to which nothing happens, is behind all upstreams, so that every reply is known.
//!
//! | model | who serves it | a reply is right |
//! |---|---|---|
//! | `one`, `two` | engines that are loaded on demand | always |
//! | `well` | an upstream that answers | always |
//! | `shared` | that, one that answers nothing at times, and one at a closed port | always |
//! | `hung` | an upstream that answers nothing at times, and stops in the middle of replies | or it hung meanwhile |
//! | `closed` | an upstream at a closed port | never: 503 |

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::join_all;
use harness::relay::{FaultyRelay, LinkFault};
use harness::{BatonServer, TempConfigFile, eventually_async, free_address, upstream};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::unread_log::UnreadLog;
use super::{Counts, Level, reloads};
use crate::chaos::clients::{self, Outcome, Reply};
use crate::chaos::n_files;
use crate::chaos::service::{Failure, Service, WhenFull};

/// Different chats.
const N_CHATS: usize = 16;

/// Two models, and memory for none: the one that was not used last is unloaded. One that has just been loaded is not measured
/// yet, so both can be there for two seconds.
const MODELS: &str = "[loading]\nmemory_budget = 1\n\
    [[models]]\nname = \"one\"\nsource = \"sim\"\nkeep_alive = \"3s\"\n\
    [models.engine]\nengine = \"sim\"\nsim_prefill_tps = 5000.0\nsim_decode_tps = 200.0\n\
    [[models]]\nname = \"two\"\nsource = \"sim\"\nkeep_alive = \"3s\"\n\
    [models.engine]\nengine = \"sim\"\nsim_prefill_tps = 5000.0\nsim_decode_tps = 200.0\n";

/// How long an upstream may say nothing.
const PATIENCE: &str = "first_seconds = 2.0\nidle_seconds = 2.0\n";

/// For how long clients stay with one model, ms. Longer than the time after which its memory is measured.
const WITH_ONE_MODEL: Range<u64> = 4_000..8_000;

/// The time before a fault, and how long an upstream hangs and a log is not read, ms.
const BEFORE: Range<u64> = 500..6_000;
const HANGS: Range<u64> = 1_000..8_000;
const UNREAD: Range<u64> = 5_000..20_000;

/// Clients of the upstream that hangs. So it often stops in the middle of a reply.
const N_WITH_HUNG: usize = 3;

/// Time between two chats of the models that may fail.
const PAUSE: Duration = Duration::from_millis(300);

pub(super) struct Front {
    server: BatonServer,
    service: Service,
    config: TempConfigFile,
    config_text: String,
    /// Behind all upstreams.
    behind: BatonServer,
    silent: Upstream,
    hung: Upstream,
    log: Arc<UnreadLog>,
    bodies: Vec<Value>,
    expected: Vec<Reply>,
}

/// The link to an upstream, and the changes of its fault: odd while it has one.
struct Upstream {
    relay: FaultyRelay,
    n_changes: AtomicU64,
}

impl Upstream {
    async fn start(url: &str) -> Upstream {
        Upstream { relay: FaultyRelay::start(url).await, n_changes: AtomicU64::new(0) }
    }

    /// Hangs for a while, again and again, until it is dropped.
    async fn hang(&self, faults: &[LinkFault], seed: u64, count: impl Fn(LinkFault)) {
        let mut rng = StdRng::seed_from_u64(seed);
        for fault in faults.iter().cycle() {
            pause(&mut rng, BEFORE).await;
            count(*fault);
            self.n_changes.fetch_add(1, Ordering::SeqCst);
            self.relay.set(*fault);
            pause(&mut rng, HANGS).await;
            self.mend();
        }
    }

    fn mend(&self) {
        self.relay.set(LinkFault::None);
        let n = self.n_changes.load(Ordering::SeqCst);
        self.n_changes.store(n.next_multiple_of(2), Ordering::SeqCst);
    }
}

async fn pause(rng: &mut StdRng, millis: Range<u64>) {
    tokio::time::sleep(Duration::from_millis(rng.random_range(millis))).await;
}

/// The same chats with another model.
fn of_model(bodies: &[Value], model: &str) -> Vec<Value> {
    let mut bodies = bodies.to_vec();
    bodies.iter_mut().for_each(|body| body["model"] = json!(model));
    bodies
}

impl Front {
    pub(super) async fn start(seed: u64) -> Front {
        let bodies: Vec<_> = (0..N_CHATS).map(|i| clients::request(seed, i)).collect();
        let speeds = ["--sim-prefill-tps", "5000", "--sim-decode-tps", "200", "--slots", "32"];
        let behind = BatonServer::with(&[&["--engine", "sim"][..], &speeds].concat());
        let instant = ["--engine", "sim", "--sim-prefill-tps", "1e9", "--sim-decode-tps", "1e6"];
        let expected = clients::undisturbed(&BatonServer::with(&instant).base, &bodies).await;
        let (silent, hung) = (Upstream::start(&behind.base).await, Upstream::start(&behind.base).await);
        let own = |name: &str, url: &str, models: &str| {
            upstream(name, "llama-server", url, &format!("models = {{ {models} }}\n{PATIENCE}"))
        };
        let config_text = [
            MODELS.to_owned(),
            own("well", &behind.base, "well = \"sim\", shared = \"sim\""),
            own("silent", &silent.relay.url, "shared = \"sim\""),
            own("hung", &hung.relay.url, "hung = \"sim\""),
            own("closed", &format!("http://{}", free_address()), "closed = \"sim\", shared = \"sim\""),
        ]
        .concat();
        let config = TempConfigFile::new(&config_text);
        let (log, writer) = UnreadLog::start();
        let serve = move || (config.serve_logging_to(writer, &[("RUST_LOG", "trace")]), config);
        let (server, config) = tokio::task::spawn_blocking(serve).await.unwrap();
        let service = Service::new(&server.base, WhenFull::AskAgain);
        Front { server, service, config, config_text, behind, silent, hung, log, bodies, expected }
    }

    pub(super) async fn run(&self, seed: u64, due: Instant) -> Counts {
        let (ends, faults) = (Mutex::default(), Mutex::default());
        let work = async {
            let (one, two, well, shared, wrong, unserved, n_reloads) = tokio::join!(
                self.swap(seed ^ 4, due),
                self.swap(seed ^ 4, due),
                self.chat("well", due),
                self.chat("shared", due),
                join_all((0..N_WITH_HUNG).map(|i| self.ask_hung(i, &ends, due))),
                self.ask_closed(&ends, due),
                reloads(|n| self.reload(n), due)
            );
            let mut chats = Outcome { wrong: [wrong.concat(), unserved].concat(), ..Outcome::default() };
            [one, two, well, shared].into_iter().for_each(|outcome| chats.add(outcome));
            (chats, n_reloads)
        };
        let (chats, n_reloads) = tokio::select! {
            work = work => work,
            () = self.faults(seed, &faults) => unreachable!("faults have no end"),
        };
        self.silent.mend();
        self.hung.mend();
        self.log.go_on();
        self.all_idle().await;
        let (faults, ends) = (faults.into_inner().unwrap(), ends.into_inner().unwrap());
        Counts { chats, n_reloads, faults, ends, ..Counts::default() }
    }

    /// All faults, until this is dropped.
    async fn faults(&self, seed: u64, tally: &Mutex<BTreeMap<String, u64>>) {
        let stall = async {
            let mut rng = StdRng::seed_from_u64(seed ^ 6);
            loop {
                pause(&mut rng, BEFORE).await;
                count(tally, "unread log");
                self.log.stall();
                pause(&mut rng, UNREAD).await;
                self.log.go_on();
            }
        };
        let of = |upstream: &'static str| move |fault| count(tally, &format!("{fault:?} ({upstream} upstream)"));
        tokio::join!(
            self.silent.hang(&[LinkFault::Silence], seed ^ 7, of("silent")),
            self.hung.hang(&[LinkFault::Hang, LinkFault::Silence], seed ^ 8, of("hung")),
            stall
        );
    }

    /// Chats with one model for a while, then with the other one. Clients with the same seed change at the same time, so that one
    /// asks for the next model while the other one's last chats still run.
    async fn swap(&self, seed: u64, due: Instant) -> Outcome {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut all = Outcome::default();
        let mut until = Instant::now();
        for model in ["one", "two"].into_iter().cycle() {
            if Instant::now() >= due {
                break;
            }
            until += Duration::from_millis(rng.random_range(WITH_ONE_MODEL));
            all.add(self.chat(model, until.min(due)).await);
        }
        all
    }

    /// Chats with a model, two at a time, until `due`.
    async fn chat(&self, model: &str, due: Instant) -> Outcome {
        let bodies = of_model(&self.bodies, model);
        let mut all = Outcome::default();
        for (bodies, expected) in bodies.chunks(2).zip(self.expected.chunks(2)).cycle() {
            if Instant::now() >= due {
                break;
            }
            all.add(clients::run(&self.service, bodies, expected, 2).await);
        }
        all
    }

    /// Chats with the upstream that hangs, from the `first`-th chat on. A reply may fail only if it hung meanwhile. Returns what is wrong.
    async fn ask_hung(&self, first: usize, ends: &Mutex<BTreeMap<String, u64>>, due: Instant) -> Vec<String> {
        let mut wrong = Vec::new();
        for (body, expected) in of_model(&self.bodies, "hung").iter().zip(&self.expected).cycle().skip(first) {
            if Instant::now() >= due {
                break;
            }
            let n_before = self.hung.n_changes.load(Ordering::SeqCst);
            let reply = self.ask(body).await;
            let has_hung = !n_before.is_multiple_of(2) || self.hung.n_changes.load(Ordering::SeqCst) != n_before;
            let end = match &reply {
                Ok(reply) if reply.is_same(expected) => Ok("right".to_owned()),
                Err(Failure::Refused(status @ (503 | 504), _)) if has_hung => Ok(format!("HTTP {status}")),
                Err(Failure::ErrorEvent(_)) if has_hung => Ok("error event".to_owned()),
                reply => Err(format!("hung: {reply:?}")),
            };
            wrong.extend(note(ends, "hung", end));
            tokio::time::sleep(PAUSE).await;
        }
        wrong
    }

    /// Chats with the upstream at a closed port, each of which gets 503. Returns what is wrong.
    async fn ask_closed(&self, ends: &Mutex<BTreeMap<String, u64>>, due: Instant) -> Vec<String> {
        let mut wrong = Vec::new();
        for body in of_model(&self.bodies, "closed").iter().cycle() {
            if Instant::now() >= due {
                break;
            }
            let end = match self.ask(body).await {
                Err(Failure::Refused(503, _)) => Ok("HTTP 503".to_owned()),
                reply => Err(format!("closed: {reply:?}")),
            };
            wrong.extend(note(ends, "closed", end));
            tokio::time::sleep(PAUSE).await;
        }
        wrong
    }

    async fn ask(&self, body: &Value) -> Result<Reply, Failure> {
        let call = clients::chat(&reqwest::Client::new(), &self.service.base, body);
        let is_stream = body["stream"] == true;
        self.service.ask(call, |answer| clients::read(answer, is_stream)).await
    }

    /// Has the endpoint read its configuration again, each time with another limit that nobody reaches.
    fn reload(&self, n: u64) {
        self.config.reload(&self.server, &format!("max_requests = {}\n{}", 1_000 + n % 2, self.config_text));
    }

    /// Waits until no request is held, and the log has told of every missing line.
    async fn all_idle(&self) {
        eventually_async("everything to be given back", || async {
            let state = self.server.state().await;
            let upstreams = state["upstreams"].as_array().unwrap();
            let is_idle = |upstream: &Value| upstream["running"] == 0 && upstream["waiting"] == 0;
            state["requests"]["running"] == 0 && state["requests"]["waiting"] == 0 && upstreams.iter().all(is_idle)
        })
        .await;
        let n_dropped = self.n_dropped().await;
        eventually_async("the log to tell of the missing lines", || async {
            self.server.state().await;
            self.log.n_told() >= n_dropped
        })
        .await;
    }

    /// The lines of its log that the endpoint has dropped.
    async fn n_dropped(&self) -> u64 {
        let metrics = self.server.get_text("/metrics").await;
        let count = metrics.lines().find_map(|line| line.strip_prefix("baton_log_lines_dropped_total "));
        count.unwrap().parse().unwrap()
    }

    pub(super) fn level(&self) -> Level {
        Level {
            endpoint_kib: self.server.resident_kib(),
            endpoint_files: n_files(self.server.pid()),
            others_kib: self.behind.resident_kib(),
            others_files: n_files(self.behind.pid()),
        }
    }

    pub(super) async fn own_rows(&self) -> Vec<(&'static str, String)> {
        let state = self.server.state().await;
        let models = state["models"].as_array().unwrap().iter();
        let residency = models.map(|model| &model["residency"]).filter(|residency| residency.is_object());
        let (mut n_loads, mut unloads) = (0, BTreeMap::<String, u64>::new());
        for residency in residency {
            n_loads += residency["loads"].as_u64().unwrap();
            for (reason, n) in residency["unloads"].as_object().unwrap() {
                *unloads.entry(reason.clone()).or_default() += n.as_u64().unwrap();
            }
        }
        let unloads: Vec<_> = unloads.iter().map(|(reason, n)| format!("{reason} {n}")).collect();
        vec![
            ("models loaded; unloaded, by reason", format!("{n_loads}; {}", unloads.join(", "))),
            (
                "lines that the endpoint's log dropped; that it told of, with its engines",
                format!("{}; {}", self.n_dropped().await, self.log.n_told()),
            ),
            ("refused for a full queue and asked again", self.service.n_asked_again().to_string()),
        ]
    }
}

/// Counts how a request to this upstream has ended. Returns what is wrong.
fn note(ends: &Mutex<BTreeMap<String, u64>>, upstream: &str, end: Result<String, String>) -> Option<String> {
    match end {
        Ok(end) => {
            count(ends, &format!("{upstream}: {end}"));
            None
        }
        Err(wrong) => {
            println!("WRONG {wrong}");
            Some(wrong)
        }
    }
}

fn count(tally: &Mutex<BTreeMap<String, u64>>, name: &str) {
    *tally.lock().unwrap().entry(name.to_owned()).or_default() += 1;
}
