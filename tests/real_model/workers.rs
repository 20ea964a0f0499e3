//! One model on several workers: the same replies, and a worker that fails costs a restart of its engine and no reply.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use harness::{
    BATON, BatonNode, BatonServer, CLUSTER_KEY, Process, chat, children_of, eventually, eventually_async, free_address,
    is_alive, long_prompt, model, read_all,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The version of the workers' protocol that no release will have.
const OTHER_VERSION: u16 = u16::MAX;

/// The longest start of a node that computes with a worker and with its own processor.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// Tokens of a reply.
const N_NEW: u32 = 12;

pub(crate) fn worker() -> BatonNode {
    BatonNode::with(&["--role", "worker", "--threads", "1"])
}

pub(crate) fn at(node: &BatonNode) -> &str {
    node.url.trim_start_matches("http://")
}

/// An endpoint that hands prompts over from this node whenever it can.
fn endpoint(prefill: &str) -> BatonServer {
    BatonServer::start(&["--prefill", prefill, "--no-calibration", "--policy", "always_handoff"])
}

/// Words of a prompt.
const N_WORDS: usize = 250;

async fn ask(server: &BatonServer, tag: &str) -> (String, Value) {
    ask_by(server, tag, "always_handoff", N_WORDS).await
}

pub(crate) async fn ask_by(server: &BatonServer, tag: &str, policy: &str, n_words: usize) -> (String, Value) {
    let body = chat(&long_prompt(tag, n_words), json!({ "max_tokens": N_NEW }));
    let url = format!("{}/v1/chat/completions", server.base);
    let call = reqwest::Client::new().post(url).header("x-baton-policy", policy).json(&body);
    let response = call.send().await.unwrap();
    let route = response.headers().get("x-baton-route").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    (route, response.json().await.unwrap())
}

pub(crate) fn text(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("no reply: {reply}"))
}

/// The lines that `baton` prints of an endpoint.
pub(crate) fn show(server: &BatonServer, command: &[&str], input: &str) -> String {
    let mut child = Command::new(&*BATON);
    let child = child.args(command).arg(&server.base).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = child.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

/// Waits until prompts are handed over, and returns the last reply.
async fn until_handed_over(server: &BatonServer, tag: &str) {
    let mut n = 0;
    for _ in 0..60 {
        n += 1;
        let (_, reply) = ask(server, &format!("{tag} {n}")).await;
        text(&reply);
        let handoff = &reply["timings"]["handoff"];
        if handoff.is_object() && handoff["failure"].is_null() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    panic!("{tag}: no prompt is handed over any more");
}

/// The process that lends a worker's devices.
pub(crate) fn lender_of(worker: &BatonNode) -> Pid {
    eventually("a session's process", || children_of(worker.pid()).first().copied())
}

/// The process of a node that another one keeps alive.
fn kept(node: &BatonNode) -> Pid {
    eventually("the kept process", || children_of(node.pid()).first().copied())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_on_two_workers_hands_over_and_gives_the_same_reply() {
    // Its tokens are more likely than others by a quarter of a nat at least: devices round differently.
    const TAG: &str = "two";
    let workers = [worker(), worker()];
    let addresses = workers.each_ref().map(at).join(",");
    let node = BatonNode::start(&["--role", "prefill", "--workers", &addresses]);
    let [alone, server] = [1, 2].map(|_| endpoint(&node.url));
    let (_, expected) = ask_by(&alone, TAG, "direct", N_WORDS).await;
    let (route, reply) = ask(&server, TAG).await;
    assert!(route.starts_with("handoff; prefill=prefill-1"), "{route}");
    assert_eq!(text(&reply), text(&expected));
    assert_eq!(reply["timings"]["handoff"]["failure"], Value::Null, "{reply}");

    // The state, the status and the plan show the workers and their layers: 30 and the output.
    let state = server.state().await;
    let nodes = state["models"][0]["nodes"].as_array().unwrap();
    let shares = nodes.iter().find(|node| node["task"] == "prefill").unwrap()["workers"].as_array().unwrap();
    let layers: Vec<u64> = shares.iter().map(|worker| worker["layers"].as_u64().unwrap()).collect();
    assert_eq!((layers.len(), layers.iter().sum::<u64>()), (2, 31), "{shares:?}");
    assert!(layers.iter().all(|n| (14..=17).contains(n)), "{layers:?}");
    assert_eq!(shares[1]["name"], "worker-2");
    assert_eq!(shares[1]["address"], Value::Null, "addresses are for operators");
    let status = show(&server, &["status"], "");
    assert!(status.contains("WORKER") && status.contains("worker-2"), "{status}");
    let plan = show(&server, &["plan", "-"], &chat(&long_prompt("plan", 50), json!({})).to_string());
    assert!(plan.contains("prefill-1 computes with worker-1 1"), "{plan}");

    // Told shares.
    drop(node);
    let node = BatonNode::start(&["--role", "prefill", "--workers", &addresses, "--tensor-split", "3,1"]);
    let server = endpoint(&node.url);
    let state = server.state().await;
    let nodes = state["models"][0]["nodes"].as_array().unwrap();
    let shares = &nodes.iter().find(|node| node["task"] == "prefill").unwrap()["workers"];
    assert_eq!([&shares[0]["layers"], &shares[1]["layers"]], [24, 7], "{shares}");
    let (_, reply) = ask(&server, TAG).await;
    assert_eq!(text(&reply), text(&expected));
    // Nothing is left over once the node is gone.
    let lenders = workers.each_ref().map(lender_of);
    drop(node);
    eventually("the end of both sessions", || lenders.iter().all(|pid| !is_alive(*pid)).then_some(()));
}

#[test]
fn a_node_computes_with_a_worker_and_its_own_processor() {
    // The process that lends this machine's processor must not keep the connection to the other worker open: the node waited for
    // its end for ever.
    let worker = worker();
    let (node, url, lines) = waiting_node(&format!("{},local", at(&worker)));
    let ready = std::iter::from_fn(|| lines.recv_timeout(START_DEADLINE).ok()).any(|line| line.contains("is ready on"));
    assert!(ready, "the node at {url} does not start");
    drop(node);
}

/// A fault's name, the process that suffers it, and its signal.
type Fault = (&'static str, fn(&BatonNode) -> Pid, Signal);

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_or_freezes_costs_no_reply() {
    let worker = worker();
    let node = BatonNode::start(&["--role", "prefill", "--workers", at(&worker)]);
    let server = endpoint(&node.url);
    // The process that lends, and the worker's node around it.
    let faults: [Fault; 3] = [
        ("killed", lender_of, Signal::KILL),
        ("frozen", lender_of, Signal::STOP),
        ("asleep", |worker| Pid::from_raw(worker.pid().cast_signed()).unwrap(), Signal::STOP),
    ];
    for (tag, process, signal) in faults {
        until_handed_over(&server, &format!("before {tag}")).await;
        let engine = kept(&node);
        let hit = process(&worker);
        kill_process(hit, signal).unwrap();
        let (route, reply) = ask(&server, tag).await;
        assert!(!text(&reply).is_empty(), "{tag}");
        assert_eq!(reply["usage"]["completion_tokens"], N_NEW, "{tag}: {reply}");
        println!("{tag}: {route}; {}", reply["timings"]["handoff"]);
        assert!(route.contains("failure=prefill_") || route.contains("reason=prefill_"), "{tag}: {route}");
        eventually("a new process of the engine", || (!is_alive(engine)).then_some(()));
        if tag == "asleep" {
            kill_process(hit, Signal::CONT).unwrap();
        }
        until_handed_over(&server, &format!("after {tag}")).await;
        assert_ne!(kept(&node), engine, "{tag}");
    }
}

/// A node that waits for its worker, and the lines that it writes.
fn waiting_node(worker: &str) -> (Process, String, mpsc::Receiver<String>) {
    let model = model();
    let address = free_address();
    let node = Command::new(&*BATON)
        .args(["node", "--role", "prefill", "--threads", "1", "--listen", &address, "--workers", worker, "--model"])
        .arg(model)
        .env("BATON_CLUSTER_KEY", CLUSTER_KEY)
        .stderr(Stdio::piped())
        .spawn();
    let mut node = Process(node.unwrap());
    let lines = BufReader::new(node.stderr.take().unwrap()).lines();
    let (said, heard) = mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| said.send(line).ok()));
    (node, format!("http://{address}"), heard)
}

#[test]
fn a_signal_between_two_starts_ends_the_node() {
    // Nothing listens there, so the node's process waits, and never becomes ready.
    let (mut node, _, _lines) = waiting_node(&free_address());
    // Each failed start doubles the pause: after the fifth it is 4 s.
    for _ in 0..5 {
        let pid = node.id();
        let kept = eventually("the kept process", || children_of(pid).first().copied());
        kill_process(kept, Signal::KILL).unwrap();
        eventually("its end", || children_of(pid).is_empty().then_some(()));
    }
    node.signal(Signal::HUP);
    let status = eventually("the end of the node", || node.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

#[test]
fn a_node_is_not_its_own_worker() {
    let address = free_address();
    let started = |worker: &str| {
        let mut node = Command::new(&*BATON);
        node.args(["node", "--listen", &address, "--workers", worker, "--model"]).arg(model());
        let mut node = Process(node.env("BATON_CLUSTER_KEY", CLUSTER_KEY).stderr(Stdio::piped()).spawn().unwrap());
        let status = eventually("its end", || node.try_wait().unwrap());
        (status.code(), read_all(node.stderr.take()))
    };
    let (code, said) = started(&address);
    assert!(code == Some(1) && said.contains("where this node itself listens"), "{said}");
    let (code, said) = started("127.0.0.1:0");
    assert!(code == Some(1) && said.contains("--workers has"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_worker_that_refuses_memory_is_asked_again() {
    let worker = worker();
    // The worker's processes may take less than it says: the weights fit, the KV does not.
    let limit = |bytes| {
        let pid = Pid::from_raw(worker.pid().cast_signed());
        prlimit(pid, Resource::Data, Rlimit { current: bytes, maximum: None }).unwrap();
    };
    limit(Some(600 << 20));
    let mut node = Command::new(&*BATON);
    let address = free_address();
    node.args(["node", "--listen", &address, "--workers", at(&worker), "--kv-cells", "65536", "--model"]).arg(model());
    let mut node = Process(node.env("BATON_CLUSTER_KEY", CLUSTER_KEY).stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(node.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut said = |words: &str| lines.find(|line| line.contains(words)).unwrap_or_else(|| panic!("no {words}"));
    let refusal = said("refuses memory");
    assert!(refusal.contains(at(&worker)), "{refusal}");
    said("started again");
    limit(None);
    said("is ready on");
}

/// Answers every connection with this body.
fn fake_worker(body: String) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_another_key_or_version_is_named_and_costs_no_reply() {
    let foreign = BatonNode::with_key("another cluster key", &["--role", "worker", "--threads", "1"]);
    let other = fake_worker(json!({ "version": OTHER_VERSION, "shape": "of the future" }).to_string());
    let no_worker = BatonNode::with(&["--engine", "sim"]);
    let expected = [
        (at(&foreign), "refuses the cluster key"),
        (&other, "has version 65535 of the workers' protocol"),
        (at(&no_worker), "is no worker"),
    ];
    for (address, reason) in expected {
        let (_node, url, lines) = waiting_node(address);
        let line = lines.iter().find(|line| line.contains("waits for the worker")).unwrap();
        assert!(line.contains(address) && line.contains(reason), "{line}");
        let server = endpoint(&url);
        let (route, reply) = ask(&server, reason).await;
        assert!(!text(&reply).is_empty());
        println!("{reason}: {route}");
        assert!(route.starts_with("direct; decode=local") && route.ends_with("reason=starting"), "{route}");
    }
}

/// Listening TCP ports of a process.
fn ports_of(pid: Pid) -> Vec<u16> {
    let folder = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let links = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let links = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[3] == "0A" && sockets.contains(&format!("socket:[{}]", row[9])))
        .map(|row| u16::from_str_radix(row[1].rsplit_once(':').unwrap().1, 16).unwrap())
        .collect()
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_on_a_port_gets_nothing_and_disturbs_nobody() {
    let worker = worker();
    let node = BatonNode::start(&["--role", "prefill", "--workers", at(&worker)]);
    let server = endpoint(&node.url);
    until_handed_over(&server, "before").await;
    let session = reqwest::Client::new().get(format!("{}/node/v1/worker/session", worker.url));
    let upgrade = |key: &str, version: u16| {
        let call = session.try_clone().unwrap().bearer_auth(key).header("connection", "upgrade");
        call.header("upgrade", "baton-worker").header("baton-worker-version", version).send()
    };
    // Without the key, with another version, and while another node uses the worker.
    assert_eq!(upgrade("no key", 1).await.unwrap().status(), 401);
    assert_eq!(upgrade(CLUSTER_KEY, OTHER_VERSION).await.unwrap().status(), 426);
    let busy = upgrade(CLUSTER_KEY, 1).await.unwrap();
    assert_eq!((busy.status().as_u16(), busy.headers()["retry-after"].to_str().unwrap()), (503, "10"));

    // The other ports of both processes are in use, so a later caller waits and gets no answer.
    let lender = lender_of(&worker);
    let engine = kept(&node);
    let of_node: u16 = at(&node).rsplit_once(':').unwrap().1.parse().unwrap();
    let ports: Vec<u16> = [ports_of(engine), ports_of(lender)].concat().into_iter().filter(|p| *p != of_node).collect();
    assert_eq!(ports.len(), 2, "the link's port and the server's: {ports:?}");
    for port in ports {
        let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stranger.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let _ = stranger.write_all(&greeting());
        let answer = stranger.read(&mut [0; 64]);
        assert!(matches!(answer, Ok(0) | Err(_)), "port {port} answers a stranger: {answer:?}");
    }
    until_handed_over(&server, "after").await;
    assert_eq!((lender_of(&worker), kept(&node)), (lender, engine));
}

/// ggml's greeting.
fn greeting() -> Vec<u8> {
    [&[14u8][..], &24u64.to_le_bytes(), &[0; 24]].concat()
}

#[cfg(target_os = "linux")]
#[test]
fn a_lender_calls_its_parent_and_serves_nobody_else() {
    let parent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Command::new(&*BATON);
    let child = child.args(["lend", "--threads", "1", "--device", "cpu"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Process(child.spawn().unwrap());
    child.stdin.as_mut().unwrap().write_all(format!("{}\n", parent.local_addr().unwrap()).as_bytes()).unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let ready: Value = serde_json::from_str(&lines.find(|line| line.contains("ready")).unwrap()).unwrap();
    let (mut session, caller) = parent.accept().unwrap();
    assert_eq!(ready["address"], caller.to_string());
    let ports = ports_of(Pid::from_raw(child.id().cast_signed()).unwrap());
    let mut stranger = TcpStream::connect(("127.0.0.1", ports[0])).unwrap();
    stranger.write_all(&greeting()).unwrap();
    session.write_all(&greeting()).unwrap();
    assert!(session.read(&mut [0; 64]).unwrap() > 0, "the parent is answered");
    stranger.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    assert!(matches!(stranger.read(&mut [0; 64]), Ok(0) | Err(_)), "a stranger is answered");
    drop(session);
    eventually("its end", || child.try_wait().unwrap());
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_that_connects_again_and_again_ends_no_session() {
    let worker = worker();
    let (url, pid) = (format!("{}/node/v1/worker/session", worker.url), worker.pid());
    // The connections of the stranger, and whether it goes on.
    let (n_held, goes_on) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
    let (n_its, it_goes_on) = (Arc::clone(&n_held), Arc::clone(&goes_on));
    // Connects to the server of each session's process as soon as it listens.
    let stranger = std::thread::spawn(move || {
        let mut held = Vec::new();
        while it_goes_on.load(Ordering::Relaxed) {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
            let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
            for child in children.collect::<String>().split_whitespace() {
                let ports = ports_of(Pid::from_raw(child.parse().unwrap()).unwrap());
                let addresses = ports.into_iter().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
                held.extend(
                    addresses.filter_map(|at| TcpStream::connect_timeout(&at, Duration::from_millis(100)).ok()),
                );
            }
            n_its.store(held.len(), Ordering::Relaxed);
        }
    });
    for n in 0..5 {
        let call = reqwest::Client::new().get(&url).bearer_auth(CLUSTER_KEY).header("connection", "upgrade");
        let call = call.header("upgrade", "baton-worker").header("baton-worker-version", 1);
        let session = call.send().await.unwrap();
        assert_eq!(session.status(), 101, "session {n}");
        let mut session = session.upgrade().await.unwrap();
        session.write_all(&greeting()).await.unwrap();
        assert!(session.read(&mut [0; 64]).await.unwrap() > 0, "session {n} is answered");
        eventually_async("the stranger", async || n_held.load(Ordering::Relaxed) > n).await;
    }
    goes_on.store(false, Ordering::Relaxed);
    stranger.join().unwrap();
}

#[test]
fn a_model_runs_on_two_workers_that_is_too_large_for_one() {
    let model = model();
    // Three quarters of the weights each.
    let lent = (std::fs::metadata(&model).unwrap().len() * 3 / 4 / (1 << 20)).to_string();
    let [first, second] =
        [1, 2].map(|_| BatonNode::with(&["--role", "worker", "--threads", "1", "--lend-memory", &lent]));
    let node = |workers: &str| {
        let mut node = Command::new(&*BATON);
        node.args([
            "node",
            "--listen",
            &free_address(),
            "--slots",
            "1",
            "--ctx-size",
            "512",
            "--kv-cells",
            "512",
            "--workers",
            workers,
            "--model",
        ]);
        let node = node.arg(&model).env("BATON_CLUSTER_KEY", CLUSTER_KEY).stderr(Stdio::piped()).spawn();
        Process(node.unwrap())
    };
    let said = |node: &mut Process, words: &[&str]| {
        let mut lines = BufReader::new(node.stderr.take().unwrap()).lines().map_while(Result::ok);
        lines.find(|line| words.iter().any(|words| line.contains(words))).unwrap_or_default()
    };
    let mut alone = node(at(&first));
    let refused = said(&mut alone, &["is ready on", "MiB"]);
    assert!(refused.contains("are available"), "{refused}");
    let status = eventually("its end", || alone.try_wait().unwrap());
    assert_eq!(status.code(), Some(1), "a mistake of the operator ends the node");
    let mut pair = node(&format!("{},{}", at(&first), at(&second)));
    assert!(said(&mut pair, &["is ready on", "baton:"]).contains("is ready on"));
}
