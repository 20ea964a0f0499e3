//! Network namespaces that stand for machines, with two networks between them.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{BATON, Capability, Process, long_prompt, not_possible_here};

/// The endpoint's key.
pub const OWNER: &str = "owner";

/// Set in the process that runs in namespaces of its own.
const INSIDE: &str = "BATON_TEST_NAMESPACES";

/// Namespaces of one name exist once, so these tests run one after another.
static NAMESPACES: Mutex<()> = Mutex::new(());

/// Runs the test with this path where it may make namespaces: in this process for root, or in one of a user namespace. Where none
/// can be made, it says so and returns.
pub fn with_namespaces(test: &str, run: impl FnOnce()) {
    let _alone = NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let works = |program: &str, args: &[&str]| {
        Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
    };
    if std::env::var_os(INSIDE).is_some() || rustix::process::geteuid().is_root() {
        if works("ip", &["netns", "add", "baton-probe"]) && works("ip", &["netns", "delete", "baton-probe"]) {
            return run();
        }
        let reason = "ip netns does not work here, so machines in a network were not tested";
        return not_possible_here(Capability::Namespaces, reason);
    }
    if !works("unshare", &["--user", "--map-root-user", "--net", "--mount", "true"]) {
        let reason = "no network namespaces can be made here, so machines in a network were not tested";
        return not_possible_here(Capability::Namespaces, reason);
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

/// Runs `ip`.
pub fn ip(args: &str) {
    let Output { status, stderr, .. } = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(status.success(), "ip {args}: {}", String::from_utf8_lossy(&stderr));
}

/// Waits for a condition, and returns how long it took.
pub fn within(time: Duration, what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < time, "{what}: not within {time:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("{what}: after {:.1} s", began.elapsed().as_secs_f64());
    began.elapsed()
}

/// What makes a node or an endpoint one of a cluster.
#[derive(Clone, Copy)]
pub enum Membership<'a> {
    /// A key in its environment, and plain HTTP.
    Key(&'a str),
    /// The key and certificates that `baton pair` has written on its machine.
    Paired,
}

/// Machines, each a namespace, on network 0 and perhaps on network 1. Dropping it removes them.
pub struct Lab {
    names: Vec<String>,
    /// Holds a folder for each machine.
    folders: TempDir,
}

impl Lab {
    /// The machines and on how many networks each is. Machine i has 10.77.N.(i+1) and fd77:N::(i+1) on network N, and a link-local
    /// IPv6 address.
    pub fn new(n_networks: &[usize]) -> Lab {
        let tag = format!("baton{}", std::process::id());
        let mut lab = Lab { names: Vec::new(), folders: tempfile::tempdir().unwrap() };
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
                ip(&format!("-n {name} addr add fd77:{network}::{:x}/64 dev eth{network} nodad", i + 1));
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

    /// The namespace of machine i.
    pub fn name(&self, i: usize) -> &str {
        &self.names[i + 1]
    }

    /// Where machine i keeps its pairing.
    fn folder(&self, i: usize) -> PathBuf {
        self.folders.path().join(format!("machine-{i}"))
    }

    /// Pairs machine 0 with these ones.
    pub fn pair(&self, others: &[usize]) {
        let n = others.len().to_string();
        let mut first = self.on(0, &BATON);
        first.args(["pair", "--name", "machine-0", "--expect", &n]).stdout(Stdio::piped());
        let mut first = Process(first.spawn().unwrap());
        let mut lines = BufReader::new(first.stdout.take().unwrap()).lines().map(Result::unwrap);
        let code = lines.find_map(|line| line.trim().strip_prefix("baton pair ").map(str::to_owned)).expect("a code");
        for &i in others {
            let paired = self.on(i, &BATON).args(["pair", &code, "--name", &format!("machine-{i}")]).status();
            assert!(paired.unwrap().success(), "machine {i} was not paired");
        }
        // It writes until it ends.
        lines.for_each(drop);
        assert!(first.wait().unwrap().success());
    }

    /// A command on machine i.
    pub fn on(&self, i: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(i)]).arg(program);
        command.env("BATON_CLUSTER_FOLDER", self.folder(i)).env_remove("BATON_CLUSTER_KEY");
        command
    }

    /// Runs `baton` on machine i with these arguments.
    pub fn baton(&self, i: usize, membership: Membership, args: &[&str]) -> Process {
        let mut command = self.on(i, &BATON);
        command.args(args).stdout(Stdio::null());
        if let Membership::Key(key) = membership {
            command.arg("--allow-plain-http").env("BATON_CLUSTER_KEY", key);
        }
        Process(command.spawn().unwrap())
    }

    /// A prefill node on machine i.
    pub fn node(&self, i: usize, membership: Membership, more: &[&str]) -> Process {
        let args = ["node", "--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "100000"];
        self.baton(i, membership, &[&args[..], &["--listen", "[::]:9000"], more].concat())
    }

    /// An endpoint on machine 0 that searches for nodes and hands over whatever it can.
    pub fn endpoint(&self, membership: Membership, more: &[&str]) -> Process {
        let args = ["serve", "--engine", "sim", "--sim-prefill-tps", "3000", "--policy", "always_handoff"];
        // Addresses are shown to an operator's key.
        let found = ["--discover", "--listen", "127.0.0.1:8080", "--api-key", OWNER];
        self.baton(0, membership, &[&args[..], &found, more].concat())
    }

    /// Bytes that machine i has sent on a network.
    pub fn sent(&self, i: usize, network: usize) -> u64 {
        let file = format!("/sys/class/net/eth{network}/statistics/tx_bytes");
        let output = self.on(i, Path::new("cat")).arg(file).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    /// `/baton/state` of the endpoint; null while it does not answer.
    pub fn state(&self) -> Value {
        let output =
            self.on(0, &BATON).args(["status", "--json", "--api-key", OWNER]).stderr(Stdio::null()).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// The state of each node that the endpoint has found, and those of its addresses that have proven the key.
    pub fn found(&self) -> Vec<(String, BTreeSet<String>)> {
        let state = self.state();
        let found = state["discovery"]["found"].as_array().cloned().unwrap_or_default();
        let proven = |found: &Value| {
            let all = found["addresses"].as_array().cloned().unwrap_or_default();
            let proven = all.iter().filter(|address| address["state"] == "proven");
            proven.map(|address| address["address"].as_str().unwrap().to_owned()).collect()
        };
        found.iter().map(|found| (found["state"].as_str().unwrap().to_owned(), proven(found))).collect()
    }

    /// The states of what the endpoint has found.
    pub fn states(&self) -> Vec<String> {
        let mut states: Vec<_> = self.found().into_iter().map(|(state, _)| state).collect();
        states.sort();
        states
    }

    /// Asks for a reply, which must come. Returns its route as the header says it, and the reply.
    pub fn reply(&self, topic: &str) -> (String, Value) {
        let messages = json!([{ "role": "user", "content": long_prompt(topic, 600) }]);
        let body = json!({ "model": "sim", "max_tokens": 4, "messages": messages });
        let url = "http://127.0.0.1:8080/v1/chat/completions";
        let key = format!("Authorization: Bearer {OWNER}");
        let args = ["-s", "-D", "/dev/stderr", "-m", "20", "-H", &key, url, "-d", &body.to_string()];
        let output = self.on(0, Path::new("curl")).args(args).output().unwrap();
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        assert!(reply["choices"][0]["message"]["content"].is_string(), "{topic}: {reply}");
        let head = String::from_utf8_lossy(&output.stderr).into_owned();
        let route = head.lines().find_map(|line| line.strip_prefix("x-baton-route: "));
        (route.unwrap_or_default().trim().to_owned(), reply)
    }

    /// Waits until a prompt is handed over without a failure, and returns its route. Every request must be answered.
    pub fn hands_over(&self, topic: &str) -> String {
        // The KV of a prompt that was sent before is here.
        static N_PROMPTS: AtomicU32 = AtomicU32::new(0);
        let mut route = String::new();
        within(Duration::from_secs(20), topic, || {
            let n = N_PROMPTS.fetch_add(1, Ordering::Relaxed);
            let (taken, reply) = self.reply(&format!("{topic} {n}"));
            route = taken;
            let handoff = &reply["timings"]["handoff"];
            handoff.is_object() && handoff["failure"].is_null()
        });
        route
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}
