//! Machines that sleep: they are woken by a magic packet when a request needs them, and sent to sleep when none does.

use std::net::UdpSocket;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use harness::lab::{Lab, Membership, OWNER, ip, with_namespaces, within};
use harness::{
    Answer, BatonNode, CLUSTER_KEY, Process, ReloadableServer, TempConfigFile, eventually, eventually_async,
    free_address, long_prompt, said,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

const MAC: &str = "a4:83:e7:12:34:56";

/// Set in the process that hears what reaches a machine in a network: the file that gets it.
const HEARS: &str = "BATON_TEST_HEARS";

fn magic_packet() -> Vec<u8> {
    [vec![0xff; 6], [0xa4, 0x83, 0xe7, 0x12, 0x34, 0x56].repeat(16)].concat()
}

/// The network card of a machine: it hears magic packets, also while the machine sleeps.
struct NetworkCard {
    address: String,
    n_heard: Arc<AtomicUsize>,
}

impl NetworkCard {
    fn start() -> NetworkCard {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let card = NetworkCard { address: socket.local_addr().unwrap().to_string(), n_heard: Arc::default() };
        let n_heard = Arc::clone(&card.n_heard);
        std::thread::spawn(move || {
            let mut packet = [0; 256];
            while let Ok(n) = socket.recv(&mut packet) {
                assert_eq!(&packet[..n], &magic_packet()[..], "a card wakes only on this");
                n_heard.fetch_add(1, Ordering::SeqCst);
            }
        });
        card
    }

    fn n_heard(&self) -> usize {
        self.n_heard.load(Ordering::SeqCst)
    }
}

/// A machine with one node, which has the same address whenever it is awake.
struct Machine {
    card: NetworkCard,
    address: String,
}

impl Machine {
    fn new() -> Machine {
        Machine { card: NetworkCard::start(), address: free_address() }
    }

    /// It is awake until the node is dropped.
    fn awake(&self, more: &[&str]) -> BatonNode {
        BatonNode::with(&[&["--engine", "sim", "--listen", &self.address], more].concat())
    }

    fn wake_table(&self, max_wait_seconds: f64) -> String {
        format!(
            "[[wake]]\nnode = \"{}\"\nmac = \"{MAC}\"\nbroadcast = \"{}\"\nmax_wait_seconds = {max_wait_seconds}\n",
            self.address, self.card.address
        )
    }
}

/// An endpoint for these machines, of which the first can be woken.
fn endpoint(state: &TempDir, machines: &[&Machine], max_wait_seconds: f64) -> ReloadableServer {
    let decode: Vec<&str> = machines.iter().map(|machine| &*machine.address).collect();
    ReloadableServer::start(&format!(
        "state_folder = {:?}\n[model]\nname = \"m\"\ndecode = {decode:?}\ncalibrate = false\n{}",
        state.path(),
        machines[0].wake_table(max_wait_seconds)
    ))
}

async fn node(server: &ReloadableServer, name: &str) -> Value {
    let state = server.get("/baton/state").await;
    let nodes = state["models"][0]["nodes"].as_array().unwrap().clone();
    nodes.into_iter().find(|node| node["name"] == name).unwrap()
}

async fn is_in(server: &ReloadableServer, name: &str, life: &str) {
    eventually_async(life, || async { node(server, name).await["life"] == life }).await;
}

/// A node's load, with its rates, can come after its description.
async fn reports_load(server: &ReloadableServer, name: &str) {
    eventually_async("its load", || async { node(server, name).await["kv_cells"].as_u64() > Some(0) }).await;
}

/// How often the node went from one state to another.
async fn n_changes(server: &ReloadableServer, from: &str, to: &str) -> u64 {
    let node = node(server, "decode-1").await;
    let changes = node["transitions"].as_array().unwrap().iter().filter(|c| c["from"] == from && c["to"] == to);
    changes.map(|change| change["count"].as_u64().unwrap()).sum()
}

fn short() -> Value {
    said("hi", json!({ "max_tokens": 4 }))
}

async fn chat(server: &ReloadableServer, body: &Value) -> Answer {
    server.post("/v1/chat/completions", body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_nothing_can_replace_is_woken_once_for_all_requests() {
    let (machine, state) = (Machine::new(), tempfile::tempdir().unwrap());
    let awake = machine.awake(&[]);
    let server = Arc::new(endpoint(&state, &[&machine], 60.0));
    let before = chat(&server, &short()).await;
    assert_eq!((before.status, before.route.contains("woken")), (200, false), "{before:?}");
    drop(awake);
    is_in(&server, "decode-1", "asleep").await;
    let health = server.get("/health").await;
    assert_eq!(health["status"], "ok", "a request would be answered: {health}");
    assert_eq!(machine.card.n_heard(), 0, "nobody needs it");
    let ask = || {
        let server = Arc::clone(&server);
        tokio::spawn(async move { chat(&server, &short()).await })
    };
    let waiting: Vec<_> = (0..5).map(|_| ask()).collect();
    let leaves = ask();
    let n_open =
        async |n: usize| server.get("/baton/state").await["open"].as_array().is_some_and(|open| open.len() == n);
    eventually_async("six requests", || n_open(6)).await;
    eventually_async("a magic packet", || async { machine.card.n_heard() > 0 }).await;
    is_in(&server, "decode-1", "waking").await;
    leaves.abort();
    eventually_async("the end of one", || n_open(5)).await;
    assert!(waiting.iter().all(|request| !request.is_finished()), "the machine still sleeps");
    let awake = machine.awake(&[]);
    for request in waiting {
        let answer = request.await.unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.route.ends_with("; woken=decode-1"), "{answer:?}");
    }
    assert_eq!(n_changes(&server, "asleep", "waking").await, 1);
    let n_heard = machine.card.n_heard();
    let after = chat(&server, &short()).await;
    assert_eq!((after.status, after.route.contains("woken")), (200, false), "{after:?}");
    let file = state.path().join("wake-times.json");
    let times = eventually("the measured time", || std::fs::read_to_string(&file).ok());
    let times: Value = serde_json::from_str(&times).unwrap();
    assert_eq!(times[MAC].as_array().unwrap().len(), 1, "{times}");
    // Nobody sends further packets to a machine that is awake.
    drop(awake);
    is_in(&server, "decode-1", "asleep").await;
    assert_eq!(machine.card.n_heard(), n_heard);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_never_wakes_costs_one_wait_and_is_left_alone() {
    let (machine, state) = (Machine::new(), tempfile::tempdir().unwrap());
    let awake = machine.awake(&[]);
    let server = endpoint(&state, &[&machine], 2.0);
    assert_eq!(chat(&server, &short()).await.status, 200);
    drop(awake);
    is_in(&server, "decode-1", "asleep").await;
    for _ in 0..2 {
        let refused = chat(&server, &short()).await;
        let seconds: u64 = refused.retry_after.as_ref().unwrap().parse().unwrap();
        assert!(refused.status == 503 && (2..=30).contains(&seconds), "when it may be woken again: {refused:?}");
        assert!(refused.text.contains("woken in vain"), "{refused:?}");
    }
    assert_eq!(n_changes(&server, "asleep", "waking").await, 1, "the second request was refused at once");
    assert!(machine.card.n_heard() > 1, "a packet may be lost");
    let now = node(&server, "decode-1").await;
    assert_eq!((&now["life"], &now["reason"]), (&json!("asleep"), &json!("its machine was woken in vain")));
    let metrics = server.server.get_text("/metrics").await;
    assert!(metrics.contains("reason=\"not_woken\"} 1\n"), "{metrics}");
    let health = reqwest::get(format!("{}/health", server.server.base)).await.unwrap();
    assert_eq!(health.status(), 503, "a request would fail");
    // Somebody switches it on.
    let awake = machine.awake(&[]);
    is_in(&server, "decode-1", "ready").await;
    assert_eq!(chat(&server, &short()).await.status, 200);
    reports_load(&server, "decode-1").await;
    drop(awake);
    is_in(&server, "decode-1", "asleep").await;
    let n_heard = machine.card.n_heard();
    assert_eq!(chat(&server, &short()).await.status, 503);
    assert!(machine.card.n_heard() > n_heard, "it has answered since, so it is woken again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_woken_beside_a_slower_one_only_for_what_takes_it_long() {
    let [fast, slow] = [Machine::new(), Machine::new()];
    let state = tempfile::tempdir().unwrap();
    std::fs::write(state.path().join("wake-times.json"), format!("{{\"{MAC}\":[2.0,2.0,2.0,2.0,2.0]}}")).unwrap();
    let quick = ["--sim-prefill-tps", "20000", "--sim-decode-tps", "200"];
    let awake = fast.awake(&quick);
    let _slow = slow.awake(&["--sim-prefill-tps", "1000", "--sim-decode-tps", "200"]);
    let server = endpoint(&state, &[&fast, &slow], 60.0);
    for name in ["decode-1", "decode-2"] {
        is_in(&server, name, "ready").await;
        reports_load(&server, name).await;
    }
    // A shorter reply does not teach how fast a node generates.
    let long = |tag: &str| said(&long_prompt(tag, 1_500), json!({ "max_tokens": 40, "ignore_eos": true }));
    let first = chat(&server, &long("teaches the fast one's rates")).await;
    assert!(first.route.contains("decode=decode-1"), "{first:?}");
    let is_measured = |rates: &Value| !rates.as_array().unwrap().is_empty();
    eventually_async("measured rates", || async {
        let node = node(&server, "decode-1").await;
        is_measured(&node["prefill_rates"]) && is_measured(&node["decode_rates"])
    })
    .await;
    drop(awake);
    is_in(&server, "decode-1", "asleep").await;
    let answer = chat(&server, &short()).await;
    assert!(answer.route.contains("decode=decode-2") && answer.status == 200, "{answer:?}");
    assert_eq!(fast.card.n_heard(), 0, "the slow one is done before the other is awake");
    // It does not wake, so the slow one answers after all.
    let answer = chat(&server, &long("nobody hears it")).await;
    assert!(answer.route.contains("decode=decode-2") && answer.status == 200, "{answer:?}");
    assert!(fast.card.n_heard() > 0, "waking pays");
    let metrics = server.server.get_text("/metrics").await;
    assert!(metrics.contains("reason=\"not_woken\"} 1\n"), "{metrics}");
    // It wakes late, and then the next one is for it.
    let awake = fast.awake(&quick);
    is_in(&server, "decode-1", "ready").await;
    let answer = chat(&server, &long("it is awake")).await;
    assert!(answer.route.contains("decode=decode-1") && !answer.route.contains("woken"), "{answer:?}");
    drop(awake);
    is_in(&server, "decode-1", "asleep").await;
    let plan = server.post("/baton/plan", &long("what would happen")).await.json();
    let routes = plan["routes"].as_array().unwrap();
    let chosen = routes.iter().find(|route| route["chosen"] == true).unwrap();
    assert_eq!(chosen["decode"], "decode-1", "{plan}");
    assert!(chosen["prediction"]["wake_ms"].as_f64().unwrap() > 0.0, "{plan}");
    let plan = server.post("/baton/plan", &short()).await.json();
    let route = plan["routes"].as_array().unwrap().iter().find(|route| route["decode"] == "decode-1").unwrap().clone();
    assert_eq!((&route["chosen"], &route["unused_reason"]), (&json!(false), &json!("asleep")), "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_node_sends_its_machine_to_sleep_although_the_endpoint_watches_it() {
    let (machine, state) = (Machine::new(), tempfile::tempdir().unwrap());
    // A machine that falls asleep stops like this one, as far as others can tell.
    let mut awake = machine.awake(&["--sleep-after", "8s", "--sleep-command", "kill -KILL $PPID"]);
    let server = endpoint(&state, &[&machine], 60.0);
    eventually("sleep", || (!awake.is_running()).then_some(()));
    is_in(&server, "decode-1", "asleep").await;
    let body = short();
    let (answer, awake) = tokio::join!(chat(&server, &body), async {
        eventually_async("a magic packet", || async { machine.card.n_heard() > 0 }).await;
        machine.awake(&["--sleep-after", "8s", "--sleep-command", "kill -KILL $PPID"])
    });
    assert!(answer.status == 200 && answer.route.ends_with("; woken=decode-1"), "{answer:?}");
    let mut awake = awake;
    eventually("sleep after the request", || (!awake.is_running()).then_some(()));
}

#[test]
fn a_node_sleeps_only_with_a_time_and_a_command() {
    let sim = |args: &[&'static str]| [&["--engine", "sim"], args].concat();
    for (args, problem) in [
        (sim(&["--sleep-after", "30m"]), "--sleep-command"),
        (sim(&["--sleep-command", "true"]), "--sleep-after"),
        (sim(&["--sleep-after", "0s", "--sleep-command", "true"]), "from 1s to 168h"),
        (sim(&["--sleep-after", "30m", "--sleep-command", " "]), "--sleep-command must not be empty"),
        (vec!["--role", "worker", "--sleep-after", "30m", "--sleep-command", "true"], "a worker has no engine"),
    ] {
        let mut node = std::process::Command::new(&*harness::BATON);
        let output = node.arg("node").args(&args).env("BATON_CLUSTER_KEY", CLUSTER_KEY).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && told.contains(problem), "{args:?}: {told}");
    }
}

#[test]
fn a_found_machine_is_woken_over_its_network_and_comes_back_in_another_address() {
    with_namespaces("sleep::a_found_machine_is_woken_over_its_network_and_comes_back_in_another_address", || {
        let lab = Lab::new(&[1, 1]);
        // As the node announces itself: all these machines have one host name.
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let host: String = host.split('.').next().unwrap().chars().take(26).collect();
        let name = host.to_ascii_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let name = name.trim_matches('-');
        let config = TempConfigFile::new(&format!("discover = true\n[[wake]]\nnode = \"{name}\"\nmac = \"{MAC}\"\n"));
        let path = config.path();
        let key = Membership::Key(CLUSTER_KEY);
        let serve = ["serve", "--config", path.to_str().unwrap(), "--listen", "127.0.0.1:8080", "--api-key", OWNER];
        let _endpoint = lab.baton(0, key, &serve);
        let node = || {
            let args = ["node", "--engine", "sim", "--sim-prefill-tps", "100000", "--listen", "[::]:9000"];
            lab.baton(1, key, &args)
        };
        let awake = node();
        let life = || lab.state()["models"][0]["nodes"][0]["life"].clone();
        within(Duration::from_secs(20), "it is used", || lab.states() == ["used"] && life() == "ready");
        let (route, _) = lab.reply("awake");
        assert!(route.contains(&format!("decode={name};")), "{route}");
        awake.signal(Signal::KILL);
        drop(awake);
        within(Duration::from_secs(30), "it is asleep, and not forgotten", || life() == "asleep");
        ip(&format!("-n {} addr flush dev eth0 scope global", lab.name(1)));
        ip(&format!("-n {} addr add 10.77.0.99/24 brd + dev eth0", lab.name(1)));
        let folder = tempfile::tempdir().unwrap();
        let heard = folder.path().join("heard");
        let mut card = lab.on(1, &std::env::current_exe().unwrap());
        card.args(["--exact", "sleep::what_reaches_a_machine_in_a_network", "--nocapture"]).env(HEARS, &heard);
        let _card = Process(card.stdout(Stdio::null()).spawn().unwrap());
        within(Duration::from_secs(20), "the card listens", || heard.exists());
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| lab.reply("asleep"));
            let is_packet = |bytes: Vec<u8>| bytes.starts_with(&magic_packet());
            within(Duration::from_secs(20), "a magic packet", || std::fs::read(&heard).is_ok_and(is_packet));
            let _awake = node();
            let (route, _) = asked.join().unwrap();
            assert!(route.ends_with(&format!("; woken={name}")), "{route}");
            let has_moved = || lab.found().iter().any(|(_, proven)| proven.contains("10.77.0.99:9000"));
            within(Duration::from_secs(20), "another address", has_moved);
            let nodes = lab.state()["models"][0]["nodes"].as_array().unwrap().len();
            // With both tasks.
            assert_eq!((nodes, life()), (2, json!("ready")), "it is the node that it was");
        });
    });
}

/// Not a test by itself: the process that hears on a machine in a network.
#[test]
fn what_reaches_a_machine_in_a_network() {
    let Some(file) = std::env::var_os(HEARS) else { return };
    let socket = UdpSocket::bind("0.0.0.0:9").unwrap();
    std::fs::write(Path::new(&file), b"").unwrap();
    let mut packet = [0; 256];
    let mut heard = Vec::new();
    while let Ok(n) = socket.recv(&mut packet) {
        heard.extend_from_slice(&packet[..n]);
        std::fs::write(Path::new(&file), &heard).unwrap();
    }
}
