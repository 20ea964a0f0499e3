//! A worker that computes only the first layers of prompts: an engine of the endpoint computes the others, and the endpoint's own
//! engine generates alone.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

use baton_link::handoff::canary::distance_of_chunks;
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_link::transport::Transport;
use baton_tryout::capture::{CaptureSource, Captured, capture};
use harness::{BATON, BatonNode, BatonServer, CLUSTER_KEY, children_of, eventually, eventually_async, is_alive, model};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::workers::{ask_by, at, lender_of, show, text, worker};

/// Options of an endpoint that hands over whatever it can.
const ALWAYS: [&str; 5] = ["--ctx-size", "2048", "--no-calibration", "--policy", "always_handoff"];

/// Words of a prompt: some steps of prefill, in which a machine can be lost.
const N_WORDS: usize = 700;

/// By how much a division of the layers may move a layer's rows, relative to them: the kernels see other batches.
const MAX_DISTANCE: f64 = 0.02;

/// The longest wait for what follows from measurements.
const MEASURED_WITHIN: Duration = Duration::from_secs(240);

/// An endpoint that lends layers.
struct LendingServer {
    server: BatonServer,
}

impl LendingServer {
    /// Starts it, and waits until its second engine is ready. `layers`: the number, or `auto`.
    async fn start(worker: &BatonNode, layers: &str) -> LendingServer {
        let lend = ["--workers", at(worker), "--lend-layers", layers];
        let server = LendingServer { server: BatonServer::start(&[&ALWAYS[..], &lend].concat()) };
        server.until_ready().await;
        server
    }

    async fn node(&self, name: &str) -> Value {
        let state = self.server.state().await;
        let nodes = state["models"][0]["nodes"].as_array().unwrap();
        nodes.iter().find(|node| node["name"] == name).cloned().unwrap_or_default()
    }

    /// Waits until its second engine is ready.
    async fn until_ready(&self) {
        eventually_async("the engine that lends", async || self.node("lending").await["life"] == "ready").await;
    }

    /// Waits until the second engine's state has this reason.
    async fn until_it_says(&self, reason: &str) {
        eventually_async(reason, async || self.node("lending").await["reason"] == reason).await;
    }

    /// The numbers of layers that each side of the second engine computes, the worker's first.
    async fn layers(&self) -> Vec<u64> {
        let workers = self.node("lending").await["workers"].as_array().cloned().unwrap_or_default();
        workers.iter().filter_map(|worker| worker["layers"].as_u64()).collect()
    }

    async fn ask(&self, tag: &str) -> (String, Value) {
        ask_by(&self.server, tag, "always_handoff", N_WORDS).await
    }

    /// Asks until a prompt is handed over.
    async fn until_handed_over(&self, tag: &str) {
        let mut n = 0;
        eventually_async("a handoff", || {
            n += 1;
            let tag = format!("{tag} {n}");
            async move {
                let (_, reply) = self.ask(&tag).await;
                text(&reply);
                let handoff = &reply["timings"]["handoff"];
                handoff.is_object() && handoff["failure"].is_null()
            }
        })
        .await;
    }

    /// The process of the second engine.
    fn process(&self) -> Pid {
        let is_second = |pid: &Pid| {
            let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            String::from_utf8_lossy(&command).contains("lend_layers")
        };
        eventually("the second engine", || self.server.children().into_iter().find(is_second))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_the_first_layers_changes_no_reply_and_is_shown() {
    let alone = BatonServer::start(&["--ctx-size", "2048"]);
    let (_, expected) = ask_by(&alone, "lend", "direct", N_WORDS).await;
    drop(alone);
    let worker = worker();
    let lending = LendingServer::start(&worker, "12").await;
    assert_eq!(
        lending.layers().await,
        [12, 19],
        "30 layers and the output; without a GPU a process here computes the rest"
    );
    let node = lending.node("lending").await;
    let names: Vec<_> = node["workers"].as_array().unwrap().iter().map(|worker| &worker["name"]).collect();
    assert_eq!(names, ["worker-1", "local"], "{node}");
    let own = lending.node("local").await;
    assert_eq!(own["workers"], Value::Null, "it generates alone: {own}");
    let (route, reply) = lending.ask("lend").await;
    assert!(route.starts_with("handoff; prefill=lending; decode=local"), "{route}");
    let handoff = &reply["timings"]["handoff"];
    let n_prompt = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((&handoff["failure"], &handoff["n_tokens"]), (&Value::Null, &json!(n_prompt - 1)), "{reply}");
    assert_eq!(text(&reply), text(&expected));

    let status = show(&lending.server, &["status"], "");
    assert!(status.contains("lending") && status.contains("worker-1"), "{status}");
    let body = harness::chat(&harness::long_prompt("plan", 50), json!({})).to_string();
    let plan = show(&lending.server, &["plan", "-"], &body);
    assert!(plan.contains("lending computes with worker-1 12 layers, local 19 layers"), "{plan}");
}

/// The KV that a node has of these tokens.
async fn kv(node: &BatonNode, tokens: &[u32]) -> Captured {
    let engine = RemoteEngine::new(&NodeAddress::Url(node.url.clone()), CLUSTER_KEY).unwrap();
    let transport = Transport::default();
    let (url, engine) = (&*node.url, &engine);
    let source = CaptureSource { url, engine, key: CLUSTER_KEY, transport: &transport, ephemeral: true };
    capture(source, tokens.to_vec()).await.unwrap_or_else(|failure| panic!("{}", failure.0))
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_of_a_divided_model_arrives_as_it_was_computed_and_is_near_that_of_one_machine() {
    let worker = worker();
    let options = ["--ctx-size", "2048", "--name", "smollm2"];
    let lend = ["--role", "prefill", "--workers", at(&worker), "--lend-layers", "12"];
    let lends = BatonNode::start(&[&options[..], &lend].concat());
    let [takes, alone] = [1, 2].map(|_| BatonNode::start(&options));
    let nodes = ["--prefill", &lends.url, "--decode", &takes.url, "--no-calibration", "--policy", "always_handoff"];
    let server = BatonServer::with(&nodes);
    let (_, counted) =
        server.post("/tokenize", &json!({ "model": "smollm2", "content": harness::long_prompt("kv", 700) })).await;
    let tokens: Vec<u32> = serde_json::from_value(counted["tokens"].clone()).unwrap();
    assert!(tokens.len() > 600, "{counted}");
    let mut handed = (Value::Null, Vec::new());
    for first in 1..=60 {
        // A cached prompt is not handed over, so each has its own first token.
        let tokens: Vec<u32> = std::iter::once(first).chain(tokens[1..].iter().copied()).collect();
        let body = json!({ "model": "smollm2", "prompt": tokens, "max_tokens": 1, "temperature": 0 });
        let (status, reply) = server.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{reply}");
        if reply["timings"]["handoff"].is_object() {
            handed = (reply["timings"]["handoff"].clone(), tokens);
            break;
        }
        // The nodes have not been asked yet what they run.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let (handoff, tokens) = handed;
    assert!(handoff.is_object() && handoff["failure"].is_null(), "{handoff}");

    // The last token is computed where the reply is generated.
    let moved = &tokens[..tokens.len() - 1];
    let [sent, taken, own] = [kv(&lends, moved).await, kv(&takes, moved).await, kv(&alone, moved).await];
    let distance = |other: &Captured| distance_of_chunks(&sent.handoff.layout, &sent.chunks, &other.chunks);
    assert_eq!(distance(&taken), 0.0);
    println!("the distance to one machine: {}", distance(&own));
    assert!(distance(&own) < MAX_DISTANCE, "{}", distance(&own));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_worker_or_second_engine_costs_no_reply() {
    let worker = worker();
    let lending = LendingServer::start(&worker, "12").await;
    lending.until_handed_over("at first").await;

    // While a prompt is computed.
    let session = lender_of(&worker);
    let works = async || lending.node("lending").await["active_slots"].as_u64() > Some(0);
    let ((route, reply), ()) = tokio::join!(lending.ask("during"), async {
        eventually_async("the prefill", works).await;
        kill_process(session, Signal::KILL).unwrap();
    });
    assert!(!text(&reply).is_empty());
    assert!(route.contains("failure=prefill_"), "{route}: {reply}");
    lending.until_handed_over("after it").await;

    // Between two prompts.
    let before = lending.process();
    kill_process(lender_of(&worker), Signal::KILL).unwrap();
    eventually("the end of the second engine", || (!is_alive(before)).then_some(()));
    let (_, reply) = lending.ask("between").await;
    assert!(!text(&reply).is_empty());
    lending.until_handed_over("after that").await;
    let second = lending.process();
    assert_ne!(second, before);

    // The second engine, and not that of the replies.
    let own: Vec<Pid> = lending.server.children().into_iter().filter(|pid| *pid != second).collect();
    kill_process(second, Signal::KILL).unwrap();
    let (_, reply) = lending.ask("the second engine").await;
    assert!(!text(&reply).is_empty());
    lending.until_handed_over("at last").await;
    assert!(own.iter().all(|pid| is_alive(*pid)), "{own:?}");

    // For good.
    drop(worker);
    eventually_async("the end of handoffs", async || {
        let (route, reply) = lending.ask("without a worker").await;
        assert!(!text(&reply).is_empty());
        route.starts_with("direct")
    })
    .await;
    lending.until_it_says("it waits for a worker: it cannot be reached").await;
    assert!(own.iter().all(|pid| is_alive(*pid)), "{own:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_too_small_is_named_and_costs_no_reply() {
    let small = BatonNode::with(&["--role", "worker", "--threads", "1", "--lend-memory", "40"]);
    let log = tempfile::NamedTempFile::new().unwrap();
    let lend = ["--workers", at(&small), "--lend-layers", "30"];
    let server = BatonServer::logging_to(
        File::create(log.path()).unwrap(),
        &[&["--model", model().to_str().unwrap(), "--name", "smollm2", "--threads", "1"], &ALWAYS[..], &lend].concat(),
    );
    let said = || std::fs::read_to_string(log.path()).unwrap();
    eventually("the reason", || {
        said().contains("lends 40 MiB, too few for the first 30 layers, which need ").then_some(())
    });
    let (route, reply) = ask_by(&server, "small", "always_handoff", N_WORDS).await;
    assert!(route.starts_with("direct") && !text(&reply).is_empty(), "{route}");
    assert!(children_of(small.pid()).is_empty(), "nothing was sent to it");
    let server = LendingServer { server };
    server.until_it_says("the worker lends too little memory for the layers").await;

    // With `auto`, as many as it holds: a layer takes 2 to 4 MiB, and its KV of 2,048 tokens 1.5 MiB.
    drop(server);
    let lending = LendingServer::start(&small, "auto").await;
    let layers = lending.layers().await;
    assert!((4..=11).contains(&layers[0]) && layers.iter().sum::<u64>() == 31, "{layers:?}");
    lending.until_handed_over("auto").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_layers_start_no_second_engine_and_too_many_are_refused() {
    let worker = worker();
    let server = BatonServer::start(&[&ALWAYS[..], &["--workers", at(&worker), "--lend-layers", "0"]].concat());
    let server = LendingServer { server };
    assert_eq!(server.node("lending").await, Value::Null);
    let (route, reply) = server.ask("none").await;
    assert!(route.starts_with("direct") && !text(&reply).is_empty(), "{route}");
    assert_eq!(server.server.children().len(), 1);

    let started = |args: &[&str]| {
        let mut baton = Command::new(&*BATON);
        let baton = baton.args(args).args(["--listen", "127.0.0.1:0", "--workers", at(&worker), "--lend-layers", "31"]);
        let baton = baton.arg("--model").arg(model()).env("BATON_CLUSTER_KEY", CLUSTER_KEY).stderr(Stdio::piped());
        let output = baton.spawn().unwrap().wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for args in [&["serve"][..], &["node", "--role", "prefill"]] {
        let (code, said) = started(args);
        assert!(
            code == Some(1) && said.contains("--lend-layers 31 is more than the model's 30 layers"),
            "{args:?}: {said}"
        );
    }
    let (code, said) = started(&["node"]);
    assert!(code == Some(1) && said.contains("--lend-layers is for --role prefill"), "{said}");
}

/// Polls until a measurement has shown something. It may be repeated, and takes longer where more runs.
async fn patiently<F: Future<Output = bool>>(what: &str, holds: impl Fn() -> F) {
    let shown = tokio::time::timeout(MEASURED_WITHIN, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    });
    shown.await.unwrap_or_else(|_| panic!("waited {MEASURED_WITHIN:?} for {what}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn measured_rates_move_layers_to_the_machine_that_waits() {
    let worker = worker();
    let lend = ["--workers", at(&worker), "--lend-layers", "auto"];
    let lending = LendingServer { server: BatonServer::start(&[&["--ctx-size", "1024"][..], &lend].concat()) };
    lending.until_ready().await;
    assert_eq!(lending.layers().await.first(), Some(&30), "its memory holds all layers");
    for name in ["local", "lending"] {
        let is_measured =
            async || lending.node(name).await["prefill_rates"].as_array().is_some_and(|rates| !rates.is_empty());
        patiently("a rate", is_measured).await;
    }
    // Both machines are this one, so about half is best, but what else runs here decides how much exactly.
    let is_second = async || lending.layers().await.first().is_some_and(|n| (1..30).contains(n));
    patiently("the second division", is_second).await;
    let body = harness::chat(&harness::long_prompt("planned", 300), json!({}));
    let (status, reply) = lending.server.post("/v1/chat/completions", &body).await;
    assert!(status == 200 && !text(&reply).is_empty(), "{reply}");
}
