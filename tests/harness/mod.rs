//! What the cross-process tests share: the real model, and a running `baton serve`.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod occupy;
pub mod relay;

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::Value;

/// The `baton` binary under test.
pub const BATON: &str = env!("CARGO_BIN_EXE_baton");

/// The default model, from the cache or pulled once.
pub fn model() -> PathBuf {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    MODEL
        .get_or_init(|| {
            let pull = Command::new(BATON).args(["pull", "smollm2"]).stderr(Stdio::inherit()).output().unwrap();
            assert!(pull.status.success(), "`baton pull smollm2` failed");
            PathBuf::from(String::from_utf8(pull.stdout).unwrap().trim())
        })
        .clone()
}

/// A running `baton serve`. Dropping it kills it.
pub struct Server {
    /// `http://127.0.0.1:PORT`
    pub base: String,
    process: Child,
}

/// How long a server may take to be ready on a busy machine.
const READY_DEADLINE: Duration = Duration::from_secs(60);

impl Server {
    /// Serves the default model with one compute thread and these further arguments.
    pub fn start(args: &[&str]) -> Server {
        let model = model();
        let model = model.to_str().unwrap();
        Server::with(&[&["--model", model, "--name", "smollm2", "--threads", "1"], args].concat())
    }

    /// Serves with exactly these arguments, on a free port.
    pub fn with(args: &[&str]) -> Server {
        Server::logging_to(Stdio::inherit(), args)
    }

    /// Serves with these arguments, on a free port unless they say otherwise, with its standard error going elsewhere.
    pub fn logging_to(log: impl Into<Stdio>, args: &[&str]) -> Server {
        Server::started(log, args, &[])
    }

    /// The same, with these variables in its environment.
    pub fn started(log: impl Into<Stdio>, args: &[&str], variables: &[(&str, &str)]) -> Server {
        let listen = if args.contains(&"--listen") { &[][..] } else { &["--listen", "127.0.0.1:0"] };
        let mut process = Command::new(BATON)
            .arg("serve")
            .args(listen)
            .args(args)
            .env("BATON_CLUSTER_KEY", CLUSTER_KEY)
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let banner = lines.find_map(|line| line.unwrap().split_once(" at ").map(|(_, url)| url.to_owned()));
        let base = banner.expect("the server ended before it was ready").trim_end_matches("/v1").to_owned();
        // Kept reading, so that the server never blocks on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Server { base, process }
    }

    /// The process ids of the server's children: its engine.
    pub fn children(&self) -> Vec<Pid> {
        children_of(self.process.id())
    }

    /// The only child, waited for.
    pub fn engine(&self) -> Pid {
        eventually("an engine process", || self.children().first().copied())
    }

    /// Resident memory of the server's own process, without its engine.
    pub fn resident_kib(&self) -> u64 {
        let pid = self.process.id().to_string();
        let output = Command::new("ps").args(["-o", "rss=", "-p", &pid]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends the server a signal.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Waits for the server's end.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        eventually("the server's end", || self.process.try_wait().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The secret of all nodes that the tests start.
pub const CLUSTER_KEY: &str = "the tests' cluster key";

/// A running `baton node`. Dropping it kills it.
pub struct Node {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    process: Child,
}

impl Node {
    /// A node with the default model, one compute thread and these further arguments, on a free port.
    pub fn start(args: &[&str]) -> Node {
        let model = model();
        Node::with(&[&["--model", model.to_str().unwrap(), "--threads", "1"], args].concat())
    }

    /// A node with exactly these arguments, on a free port of loopback if they name no address.
    pub fn with(args: &[&str]) -> Node {
        Node::with_key(CLUSTER_KEY, args)
    }

    /// The same with another secret.
    pub fn with_key(key: &str, args: &[&str]) -> Node {
        let listen: &[&str] = if args.contains(&"--listen") { &[] } else { &["--listen", "127.0.0.1:0"] };
        let mut process = Command::new(BATON)
            .arg("node")
            .args(listen)
            .args(args)
            .env("BATON_CLUSTER_KEY", key)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let ready = lines.find_map(|line| line.unwrap().split_once("is ready on ").map(|(_, at)| at.to_owned()));
        let url = format!("http://{}", ready.expect("the node ended before it was ready"));
        std::thread::spawn(move || lines.for_each(|line| eprintln!("node: {}", line.unwrap_or_default())));
        Node { url, process }
    }

    /// Sends the node a signal.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// How far apart two tokens may be, in nats, for rounding to exchange them. Rounding of a 4-bit model moves a token's
/// log-probability by about a tenth (`tests/exact.rs` and `tests/chaos` print by how much); this is several times that,
/// and a wrong cache moves it by whole nats.
pub const MAX_MARGIN: f32 = 0.6;

/// Polls until there is a value.
pub fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + READY_DEADLINE;
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {READY_DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Polls an async condition until it holds.
pub async fn eventually_async<F: Future<Output = bool>>(what: &str, mut poll: impl FnMut() -> F) {
    let deadline = Instant::now() + READY_DEADLINE;
    while !poll().await {
        assert!(Instant::now() < deadline, "waited {READY_DEADLINE:?} for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Processes whose parent is `pid`, zombies left out.
pub fn children_of(pid: u32) -> Vec<Pid> {
    let output = Command::new("ps").args(["-A", "-o", "pid=,ppid=,stat="]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[1] == pid.to_string() && !row[2].starts_with('Z'))
        .filter_map(|row| Pid::from_raw(row[0].parse().unwrap()))
        .collect()
}

/// Whether a process is there and no zombie.
pub fn is_alive(pid: Pid) -> bool {
    let output = Command::new("ps").args(["-o", "stat=", "-p", &pid.as_raw_nonzero().to_string()]).output().unwrap();
    let stat = String::from_utf8(output.stdout).unwrap();
    !stat.trim().is_empty() && !stat.trim().starts_with('Z')
}

/// Everything a process writes to its standard error until it ends.
pub fn read_all(stderr: Option<ChildStderr>) -> String {
    let mut text = String::new();
    stderr.unwrap().read_to_string(&mut text).unwrap();
    text
}

/// A chat request for the default model with one user message and further fields.
pub fn chat(prompt: &str, more: Value) -> Value {
    let mut body = serde_json::json!({
        "model": "smollm2", "messages": [{ "role": "user", "content": prompt }], "temperature": 0, "max_tokens": 16,
    });
    body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    body
}

/// A prompt of about this many words that nothing else shares a prefix with.
pub fn long_prompt(tag: &str, n_words: usize) -> String {
    let words = ["river", "stone", "cloud", "green", "seven", "under", "light", "paper", "north", "quiet"];
    let text: Vec<&str> = (0..n_words).map(|i| words[(i * 7 + i / 10) % 10]).collect();
    format!("{tag}: {}", text.join(" "))
}

/// Prompts of different kinds and lengths.
pub const PROMPTS: [&str; 20] = [
    "Why is the sky blue?",
    "Write a haiku about autumn.",
    "What is 17 times 23?",
    "Name the planets of the solar system in order.",
    "Explain recursion to a child.",
    "Translate 'good morning' into French, German and Spanish.",
    "List three uses for a brick.",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "What does HTTP stand for?",
    "Write a Python function that reverses a string.",
    "Why do cats purr?",
    "Tell me a joke about programmers.",
    "What is the capital of Australia?",
    "How do vaccines work? Answer in plain words, for somebody who never studied biology, and in one paragraph.",
    "Continue: Once upon a time, in a village at the edge of a dark forest, there lived a clockmaker who",
    "Compare TCP and UDP.",
    "日本の首都はどこですか？",
    "Describe the colour red to someone who cannot see, using sounds, smells, temperatures and textures only. 🙂",
];
