//! `baton serve` and `baton node` as processes.

use std::io::{BufRead, BufReader, Read};
use std::ops::{Deref, DerefMut};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{BATON, CLUSTER_KEY, eventually, model};

/// A process. Dropping it kills it, so that a failed test leaves nothing behind.
pub struct Process(pub Child);

impl Process {
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running `baton serve`. Dropping it kills it.
pub struct BatonServer {
    /// `http://127.0.0.1:PORT`
    pub base: String,
    process: Process,
}

impl BatonServer {
    /// Serves the default model with one compute thread and these further arguments.
    pub fn start(args: &[&str]) -> BatonServer {
        let model = model();
        let model = model.to_str().unwrap();
        BatonServer::with(&[&["--model", model, "--name", "smollm2", "--threads", "1"], args].concat())
    }

    /// Serves with exactly these arguments, on a free port.
    pub fn with(args: &[&str]) -> BatonServer {
        BatonServer::logging_to(Stdio::inherit(), args)
    }

    /// Serves with these arguments, on a free port unless they name one, with this standard error.
    pub fn logging_to(log: impl Into<Stdio>, args: &[&str]) -> BatonServer {
        BatonServer::started(log, args, &[])
    }

    /// The same, with these variables in its environment.
    pub fn started(log: impl Into<Stdio>, args: &[&str], variables: &[(&str, &str)]) -> BatonServer {
        BatonServer::run_by(Command::new(&*BATON), log, args, variables)
    }

    /// Serves with these arguments, started by a program that runs what follows its own arguments in its place.
    pub fn under(program: &[&str], args: &[&str]) -> BatonServer {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(&*BATON);
        BatonServer::run_by(command, Stdio::inherit(), args, &[])
    }

    fn run_by(mut baton: Command, log: impl Into<Stdio>, args: &[&str], variables: &[(&str, &str)]) -> BatonServer {
        let listen = if args.contains(&"--listen") { &[][..] } else { &["--listen", "127.0.0.1:0"] };
        let process = baton
            .arg("serve")
            .args(listen)
            .args(args)
            .env("BATON_CLUSTER_KEY", CLUSTER_KEY)
            // Not the user's own folder of states, which one endpoint has at a time.
            .env("XDG_STATE_HOME", "/nowhere")
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn();
        let mut process = Process(process.unwrap());
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let banner = lines.find_map(|line| line.unwrap().split_once(" at ").map(|(_, url)| url.to_owned()));
        let base = banner.expect("the server ended before it was ready").trim_end_matches("/v1").to_owned();
        // Keeps reading, so the server never blocks on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        BatonServer { base, process }
    }

    /// The process ids of the server's children: its engine.
    pub fn children(&self) -> Vec<Pid> {
        children_of(self.process.id())
    }

    /// Waits for the first child and returns its process id.
    pub fn engine(&self) -> Pid {
        eventually("an engine process", || self.children().first().copied())
    }

    /// Resident memory of the server's own process, without its engine.
    pub fn resident_kib(&self) -> u64 {
        resident_kib(self.process.id())
    }

    /// The most memory that the server's own process has had. Without Linux's `/proc`: what it has now.
    pub fn peak_mib(&self) -> u64 {
        peak_mib(self.pid())
    }

    pub fn anonymous_kib(&self) -> Option<u64> {
        anonymous_kib(self.process.id())
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends the server a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits for the server's end.
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the server's end", || self.process.try_wait().unwrap())
    }

    /// Posts JSON, and returns the status and the reply's JSON.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = reqwest::Client::new().post(format!("{}{path}", self.base)).json(body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    pub async fn get_text(&self, path: &str) -> String {
        reqwest::get(format!("{}{path}", self.base)).await.unwrap().text().await.unwrap()
    }

    /// The JSON at a path.
    pub async fn get(&self, path: &str) -> Value {
        let text = self.get_text(path).await;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}: {text}"))
    }

    /// `/baton/state`.
    pub async fn state(&self) -> Value {
        self.get("/baton/state").await
    }
}

/// A running `baton node`. Dropping it kills it.
pub struct BatonNode {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    process: Process,
}

impl BatonNode {
    /// A node with the default model, one compute thread and these further arguments, on a free port.
    pub fn start(args: &[&str]) -> BatonNode {
        let model = model();
        BatonNode::with(&[&["--model", model.to_str().unwrap(), "--threads", "1"], args].concat())
    }

    /// A node with exactly these arguments, on a free port of loopback if they name no address.
    pub fn with(args: &[&str]) -> BatonNode {
        BatonNode::with_key(CLUSTER_KEY, args)
    }

    /// The same with another cluster key.
    pub fn with_key(key: &str, args: &[&str]) -> BatonNode {
        BatonNode::started(key, args, &[])
    }

    /// A node with these arguments and these variables in its environment.
    pub fn with_variables(args: &[&str], variables: &[(&str, &str)]) -> BatonNode {
        BatonNode::started(CLUSTER_KEY, args, variables)
    }

    fn started(key: &str, args: &[&str], variables: &[(&str, &str)]) -> BatonNode {
        let listen: &[&str] = if args.contains(&"--listen") { &[] } else { &["--listen", "127.0.0.1:0"] };
        let process = Command::new(&*BATON)
            .arg("node")
            .args(listen)
            .args(args)
            .env("BATON_CLUSTER_KEY", key)
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .spawn();
        let mut process = Process(process.unwrap());
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let ready = lines.find_map(|line| line.unwrap().split_once("is ready on ").map(|(_, at)| at.to_owned()));
        let url = format!("http://{}", ready.expect("the node ended before it was ready"));
        std::thread::spawn(move || lines.for_each(|line| eprintln!("node: {}", line.unwrap_or_default())));
        BatonNode { url, process }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns true if the process has not ended.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Sends the node a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }
}

/// Resident memory of a process that no file backs: what the process itself has filled. Its code and its libraries are not in
/// it, because the kernel decides how much of a file it keeps in memory. `None`: the system does not tell the two apart (macOS).
fn anonymous_kib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    anonymous.map(|kib| kib.parse().unwrap())
}

/// The most memory that a process has had. Without Linux's `/proc`: what it has now.
pub fn peak_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    peak.map_or_else(|| resident_kib(pid), |kib| kib.parse().unwrap()) / 1024
}

/// Resident memory of a process.
pub fn resident_kib(pid: u32) -> u64 {
    let output = Command::new("ps").args(["-o", "rss=", "-p", &pid.to_string()]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// An address of loopback that nothing listens on.
pub fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Processes whose parent is `pid`, without zombies.
pub fn children_of(pid: u32) -> Vec<Pid> {
    let output = Command::new("ps").args(["-A", "-o", "pid=,ppid=,stat="]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[1] == pid.to_string() && !row[2].starts_with('Z'))
        .filter_map(|row| Pid::from_raw(row[0].parse().unwrap()))
        .collect()
}

/// Returns true if a process exists and is no zombie.
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
