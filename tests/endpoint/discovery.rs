//! Nodes that find each other in the local network. Network namespaces stand for machines, with two networks between them.
//! Where namespaces cannot be made, the test says so and is skipped.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_engines::mdns::{self, Announcement, ServiceType};
use harness::{BATON, CLUSTER_KEY, Process, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The endpoint's key.
const OWNER: &str = "owner";

/// Set in the process that runs in namespaces of its own.
const INSIDE: &str = "BATON_TEST_NAMESPACES";

/// Set in the process that plays the stranger: the file that gets what it hears.
const STRANGER: &str = "BATON_TEST_STRANGER";

/// A node must be gone this soon after it was killed.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Namespaces of one name exist once, so these tests run one after another.
static NAMESPACES: Mutex<()> = Mutex::new(());

/// Runs `test` of this file where it may make namespaces: in this process for root, or in one of a user namespace.
fn with_namespaces(test: &str, run: impl FnOnce()) {
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let works = |program: &str, args: &[&str]| {
        Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
    };
    if std::env::var_os(INSIDE).is_some() || rustix::process::geteuid().is_root() {
        if works("ip", &["netns", "add", "baton-probe"]) && works("ip", &["netns", "delete", "baton-probe"]) {
            return run();
        }
        return harness::not_possible_here("ip netns does not work here, so finding nodes was not tested");
    }
    if !works("unshare", &["--user", "--map-root-user", "--net", "--mount", "true"]) {
        return harness::not_possible_here("no network namespaces can be made here, so finding nodes was not tested");
    }
    // `ip netns` keeps its files in /run.
    let inside = "mount -t tmpfs tmpfs /run && exec \"$0\" --exact \"$1\" --nocapture";
    let status = Command::new("unshare")
        .args(["--user", "--map-root-user", "--net", "--mount", "--kill-child", "--fork", "sh", "-c", inside])
        .arg(std::env::current_exe().unwrap())
        .arg(test)
        .env(INSIDE, "1")
        .status();
    assert!(status.unwrap().success(), "{test} failed in its namespaces");
}

/// Machines, each a namespace, on network 0 and perhaps on network 1. Dropping it removes them.
struct Lab {
    names: Vec<String>,
}

fn ip(args: &str) {
    let Output { status, stderr, .. } = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(status.success(), "ip {args}: {}", String::from_utf8_lossy(&stderr));
}

impl Lab {
    /// The machines and on how many networks each is. Machine i has 10.77.N.(i+1) on network N, and a link-local
    /// IPv6 address.
    fn new(n_networks: &[usize]) -> Lab {
        let tag = format!("baton{}", std::process::id());
        let mut lab = Lab { names: Vec::new() };
        let switch = lab.machine(&format!("{tag}s"));
        for network in 0..2 {
            ip(&format!("-n {switch} link add br{network} type bridge mcast_snooping 0"));
            ip(&format!("-n {switch} link set br{network} up"));
        }
        for (i, &n) in n_networks.iter().enumerate() {
            let name = lab.machine(&format!("{tag}m{i}"));
            for network in 0..n {
                ip(&format!("-n {switch} link add p{i}n{network} type veth peer name eth{network} netns {name}"));
                ip(&format!("-n {switch} link set p{i}n{network} master br{network} up"));
                ip(&format!("-n {name} link set eth{network} up"));
                ip(&format!("-n {name} addr add 10.77.{network}.{}/24 brd + dev eth{network}", i + 1));
            }
        }
        lab
    }

    fn machine(&mut self, name: &str) -> String {
        ip(&format!("netns add {name}"));
        self.names.push(name.to_owned());
        ip(&format!("-n {name} link set lo up"));
        name.to_owned()
    }

    fn name(&self, i: usize) -> &str {
        &self.names[i + 1]
    }

    /// A command on machine i.
    fn on(&self, i: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(i)]).arg(program);
        command
    }

    fn baton(&self, i: usize, key: &str, args: &[&str]) -> Process {
        let mut command = self.on(i, &BATON);
        command.args(args).env("BATON_CLUSTER_KEY", key).stdout(Stdio::null());
        Process(command.spawn().unwrap())
    }

    /// A prefill node on machine i.
    fn node(&self, i: usize, key: &str) -> Process {
        let args = ["node", "--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "100000"];
        self.baton(i, key, &[&args[..], &["--listen", "[::]:9000", "--allow-plain-http"]].concat())
    }

    /// An endpoint on machine 0 that hands over whatever it can.
    fn endpoint(&self, more: &[&str]) -> Process {
        let args = ["serve", "--engine", "sim", "--sim-prefill-tps", "3000", "--policy", "always_handoff"];
        // Addresses are shown to an operator's key.
        let found = ["--discover", "--allow-plain-http", "--listen", "127.0.0.1:8080", "--api-key", OWNER];
        self.baton(0, CLUSTER_KEY, &[&args[..], &found, more].concat())
    }

    /// Bytes that machine i has sent on a network.
    fn sent(&self, i: usize, network: usize) -> u64 {
        let file = format!("/sys/class/net/eth{network}/statistics/tx_bytes");
        let output = self.on(i, Path::new("cat")).arg(file).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    fn state(&self) -> Value {
        let output =
            self.on(0, &BATON).args(["status", "--json", "--api-key", OWNER]).stderr(Stdio::null()).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// What the endpoint has found: the state and the addresses that answer, of each.
    fn found(&self) -> Vec<(String, BTreeSet<String>)> {
        let state = self.state();
        let found = state["discovery"]["found"].as_array().cloned().unwrap_or_default();
        let proven = |found: &Value| {
            let all = found["addresses"].as_array().cloned().unwrap_or_default();
            let proven = all.iter().filter(|address| address["state"] == "proven");
            proven.map(|address| address["address"].as_str().unwrap().to_owned()).collect()
        };
        found.iter().map(|found| (found["state"].as_str().unwrap().to_owned(), proven(found))).collect()
    }

    fn states(&self) -> Vec<String> {
        let mut states: Vec<_> = self.found().into_iter().map(|(state, _)| state).collect();
        states.sort();
        states
    }

    /// Asks for a reply, and returns what its handoff came to; `None`: there was none.
    fn handoff(&self, topic: &str) -> Option<Value> {
        let messages = json!([{ "role": "user", "content": long_prompt(topic, 600) }]);
        let body = json!({ "model": "sim", "max_tokens": 4, "messages": messages });
        let url = "http://127.0.0.1:8080/v1/chat/completions";
        let key = format!("Authorization: Bearer {OWNER}");
        let args = ["-s", "-m", "20", "-H", &key, url, "-d", &body.to_string()];
        let output = self.on(0, Path::new("curl")).args(args).output().unwrap();
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        Some(reply["timings"]["handoff"].clone()).filter(|handoff| !handoff.is_null())
    }

    /// Waits until a prompt is handed over without a failure.
    fn hands_over(&self, topic: &str) {
        let mut n = 0;
        within(Duration::from_secs(20), topic, || {
            n += 1;
            self.handoff(&format!("{topic} {n}"))
                .is_some_and(|handoff| handoff.get("failure").is_none_or(Value::is_null))
        });
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}

/// Waits for a condition, and returns how long it took.
fn within(time: Duration, what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < time, "{what}: not within {time:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("{what}: after {:.1} s", began.elapsed().as_secs_f64());
    began.elapsed()
}

#[test]
fn nodes_with_the_key_are_found_used_lost_and_found_again() {
    with_namespaces("discovery::nodes_with_the_key_are_found_used_lost_and_found_again", || {
        let lab = Lab::new(&[2, 2, 1]);
        let _endpoint = lab.endpoint(&["--no-calibration"]);
        let node = lab.node(1, CLUSTER_KEY);
        let used = |states: &[String]| states == ["used"];
        within(Duration::from_secs(20), "the node is used", || used(&lab.states()));
        within(Duration::from_secs(5), "by both networks, and by IPv6", || {
            let found = lab.found();
            let has = |part: &str| found.iter().any(|(_, proven)| proven.iter().any(|address| address.contains(part)));
            has("10.77.0.2:9000") && has("10.77.1.2:9000") && has("[fe80:")
        });
        lab.hands_over("found");

        let _other = lab.node(2, "another secret");
        within(Duration::from_secs(10), "another key is listed", || lab.states() == ["other_key", "used"]);
        let table = lab.on(0, &BATON).args(["discover", "--api-key", OWNER]).output().unwrap();
        let table = String::from_utf8(table.stdout).unwrap();
        assert!(table.contains("found, other key") && table.contains("(prefill): used"), "{table}");

        ip(&format!("-n {} link set eth0 down", lab.name(1)));
        lab.hands_over("one network is down");
        ip(&format!("-n {} link set eth0 up", lab.name(1)));
        ip(&format!("-n {} addr flush dev eth1 scope global", lab.name(1)));
        ip(&format!("-n {} addr add 10.77.1.99/24 brd + dev eth1", lab.name(1)));
        within(Duration::from_secs(20), "the new address is used, by the same node", || {
            lab.found().iter().any(|(state, proven)| state == "used" && proven.contains("10.77.1.99:9000"))
        });
        lab.hands_over("another address");

        node.signal(Signal::KILL);
        drop(node);
        within(GONE_WITHIN, "a killed node is gone", || lab.states() == ["other_key"]);
        let nodes = lab.state()["models"][0]["nodes"].as_array().unwrap().len();
        assert_eq!(nodes, 1, "only the endpoint's own engine is left");
        let node = lab.node(1, CLUSTER_KEY);
        within(GONE_WITHIN, "one that comes back is used", || lab.states() == ["other_key", "used"]);
        lab.hands_over("back again");
        node.signal(Signal::TERM);
        within(GONE_WITHIN, "one that says goodbye is gone", || lab.states() == ["other_key"]);
    });
}

#[test]
fn kv_takes_the_fastest_measured_network() {
    with_namespaces("discovery::kv_takes_the_fastest_measured_network", || {
        let lab = Lab::new(&[2, 2]);
        let slow =
            format!("netns exec {} tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 200ms", lab.name(1));
        if !Command::new("ip").args(slow.split(' ')).status().is_ok_and(|status| status.success()) {
            return harness::not_possible_here(
                "tc cannot slow a network down here, so the choice of the fastest was not tested",
            );
        }
        let _endpoint = lab.endpoint(&[]);
        let _node = lab.node(1, CLUSTER_KEY);
        within(Duration::from_secs(40), "the link is measured", || {
            lab.state()["models"][0]["links"][0]["bytes_per_second"].as_f64().is_some_and(|rate| rate > 20e6 / 8.0)
        });
        lab.hands_over("both networks are there");
        let before = [lab.sent(1, 0), lab.sent(1, 1)];
        lab.hands_over("measured");
        let sent = [lab.sent(1, 0) - before[0], lab.sent(1, 1) - before[1]];
        eprintln!("sent over the slow network and the fast one: {sent:?} bytes");
        assert!(sent[1] > 10 * sent[0], "{sent:?}");
    });
}

/// A stranger announces itself as a node, and passes what it hears on to a real one and back.
#[test]
fn a_stranger_that_announces_itself_gets_no_key() {
    with_namespaces("discovery::a_stranger_that_announces_itself_gets_no_key", || {
        let lab = Lab::new(&[1, 1, 1]);
        let heard = std::env::temp_dir().join(format!("baton-heard-{}", std::process::id()));
        std::fs::write(&heard, "").unwrap();
        let _node = lab.node(1, CLUSTER_KEY);
        let stranger = lab
            .on(2, &std::env::current_exe().unwrap())
            .args(["--exact", "discovery::plays_the_stranger", "--nocapture"])
            .env(STRANGER, &heard)
            .stdout(Stdio::null())
            .spawn();
        let _stranger = Process(stranger.unwrap());
        let _endpoint = lab.endpoint(&["--no-calibration"]);
        within(Duration::from_secs(20), "the stranger is listed and not used", || {
            lab.states() == ["elsewhere", "used"]
        });
        lab.hands_over("beside a stranger");
        let heard_text = String::from_utf8_lossy(&std::fs::read(&heard).unwrap()).to_lowercase();
        let _ = std::fs::remove_file(&heard);
        assert!(heard_text.contains("get /node/v1/proof"), "it was asked: {heard_text}");
        assert!(
            !heard_text.contains("authorization") && !heard_text.contains(&CLUSTER_KEY.to_lowercase()),
            "{heard_text}"
        );
    });
}

/// Not a test by itself: the process of the stranger.
#[test]
fn plays_the_stranger() {
    let Some(heard) = std::env::var_os(STRANGER) else { return };
    let listener = TcpListener::bind("0.0.0.0:9000").unwrap();
    let name = "spark \u{1b}[2J".to_owned();
    let listening: SocketAddr = "0.0.0.0:9000".parse().unwrap();
    let announcement = Announcement { service: ServiceType::NODE, name, listening, properties: Vec::new() };
    let _announced = mdns::announce(&announcement).unwrap();
    for client in listener.incoming() {
        let (mut client, mut node) = (client.unwrap(), TcpStream::connect("10.77.0.2:9000").unwrap());
        let (mut back_to, mut back_from) = (client.try_clone().unwrap(), node.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        let mut file = std::fs::OpenOptions::new().append(true).open(&heard).unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = client.read(&mut bytes) {
                file.write_all(&bytes[..n]).unwrap();
                node.write_all(&bytes[..n]).unwrap();
            }
        });
    }
}
