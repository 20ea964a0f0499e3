//! `baton pair` makes machines share a key and certificates: then nodes and endpoints work over TLS without any option.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use harness::{BATON, BatonNode, BatonServer, Process, eventually, eventually_async, long_prompt, read_all};
use serde_json::{Value, json};

/// The folders of several machines.
struct Machines(tempfile::TempDir);

impl Machines {
    fn new() -> Machines {
        Machines(tempfile::tempdir().unwrap())
    }

    fn folder(&self, machine: &str) -> PathBuf {
        self.0.path().join(machine).join("cluster")
    }

    /// `baton pair` on a machine.
    fn pair(&self, machine: &str, args: &[&str]) -> Command {
        let mut command = Command::new(&*BATON);
        command.args(["pair", "--name", machine]).args(args);
        command.env("BATON_CLUSTER_FOLDER", self.folder(machine)).env_remove("BATON_CLUSTER_KEY");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `baton pair` on a machine. Returns whether it succeeded, and what it printed.
    fn paired(&self, machine: &str, args: &[&str]) -> (bool, String) {
        let Output { status, stdout, stderr } = self.pair(machine, args).output().unwrap();
        (status.success(), String::from_utf8([stdout, stderr].concat()).unwrap())
    }

    /// Variables of a node or an endpoint on a machine: no key but the pairing's.
    fn variables<'a>(&self, folder: &'a str) -> [(&'static str, &'a str); 2] {
        [("BATON_CLUSTER_KEY", ""), ("BATON_CLUSTER_FOLDER", folder)]
    }
}

/// A first machine that shows a code.
struct Showing {
    process: Process,
    output: BufReader<std::process::ChildStdout>,
    code: String,
    at: String,
}

impl Showing {
    fn start(machines: &Machines, machine: &str, args: &[&str]) -> Showing {
        let args = [&["--listen", "127.0.0.1:0"], args].concat();
        Showing::of(machines.pair(machine, &args))
    }

    fn of(mut command: Command) -> Showing {
        let mut process = Process(command.spawn().unwrap());
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let words = loop {
            let mut line = String::new();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "no code was shown");
            if let Some((_, words)) = line.split_once("baton pair ").filter(|(_, words)| words.contains("--at")) {
                break words.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            }
        };
        Showing { process, output, code: words[0].clone(), at: words[2].clone() }
    }

    /// A code of the same room that is wrong.
    fn wrong_code(&self) -> String {
        let last = if self.code.ends_with('0') { "1" } else { "0" };
        format!("{}{last}", &self.code[..self.code.len() - 1])
    }

    /// Waits for the end. Returns whether it succeeded, and what it printed since the code.
    fn end(mut self) -> (bool, String) {
        let status = eventually("the end of `baton pair`", || self.process.try_wait().unwrap());
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        (status.success(), text + &read_all(self.process.stderr.take()))
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test(flavor = "multi_thread")]
async fn three_paired_machines_hand_kv_over_by_tls_with_nothing_else() {
    let machines = Machines::new();
    let first = Showing::start(&machines, "first", &["--expect", "2"]);
    // Strangers at the port: one talks, one is silent.
    let _silent = TcpStream::connect(&first.at).unwrap();
    let mut stranger = TcpStream::connect(&first.at).unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: first\r\n\r\n").unwrap();
    assert!(matches!(stranger.read(&mut [0; 64]), Ok(0) | Err(_)), "a stranger is not answered");
    // A wrong code is told, and leaves nothing behind but the empty folder in which a pairing would be.
    let (succeeded, text) = machines.paired("second", &[&first.wrong_code(), "--at", &first.at]);
    assert!(!succeeded && text.contains("the code is wrong"), "{text}");
    let around = machines.folder("second").parent().unwrap().to_owned();
    assert_eq!(std::fs::read_dir(around).unwrap().count(), 0);
    for machine in ["second", "third"] {
        let (succeeded, text) = machines.paired(machine, &[&first.code, "--at", &first.at]);
        assert!(succeeded && text.contains("of first"), "{text}");
    }
    let (succeeded, text) = first.end();
    assert!(succeeded && text.contains("second joined") && text.contains("2 machines joined"), "{text}");
    assert!(text.contains("4 attempts left"), "{text}");
    for (machine, n_files) in [("first", 6), ("second", 5), ("third", 5)] {
        let folder = machines.folder(machine);
        let files: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!((mode(&folder), files.len()), (0o700, n_files), "{machine}");
        assert!(files.iter().all(|file| mode(file) == 0o600), "{machine}");
    }

    // Neither is the first machine, and the node listens where other machines could reach it.
    let third = machines.folder("third").display().to_string();
    let sim = ["--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "100000", "--listen", "0.0.0.0:0"];
    let node = BatonNode::with_variables(&sim, &machines.variables(&third));
    let port = node.url.rsplit_once(':').unwrap().1;
    let plain = reqwest::get(format!("http://127.0.0.1:{port}/node/v1/info")).await.unwrap();
    assert_eq!(plain.status(), 400, "plain HTTP is told to use https://");
    let second = machines.folder("second").display().to_string();
    let address = format!("127.0.0.1:{port}");
    let args = ["--engine", "sim", "--sim-prefill-tps", "500", "--policy", "always_handoff", "--no-calibration"];
    let args = [&args[..], &["--prefill", &address]].concat();
    let server = BatonServer::started(Stdio::inherit(), &args, &machines.variables(&second));
    let body = json!({
        "model": "sim", "max_tokens": 4,
        "messages": [{ "role": "user", "content": long_prompt("paired", 600) }],
    });
    eventually_async("a handoff", || async {
        let (_, reply) = server.post("/v1/chat/completions", &body).await;
        let handoff = &reply["timings"]["handoff"];
        !handoff.is_null() && {
            assert_eq!(handoff["failure"], Value::Null, "{reply}");
            handoff["n_tokens"].as_u64().is_some_and(|n| n > 1_000)
        }
    })
    .await;
}

#[test]
fn a_pairing_is_told_without_secrets_kept_unless_told_and_forgotten() {
    let machines = Machines::new();
    let (succeeded, text) = machines.paired("second", &["--status"]);
    assert!(succeeded && text.contains("in no cluster"), "{text}");
    for cluster in ["first", "other"] {
        let showing = Showing::start(&machines, cluster, &["--expect", "1"]);
        if cluster == "other" {
            let (succeeded, text) = machines.paired("second", &[&showing.code, "--at", &showing.at]);
            assert!(!succeeded && text.contains("already is in cluster") && text.contains("--replace"), "{text}");
        }
        let (succeeded, text) = machines.paired("second", &[&showing.code, "--at", &showing.at, "--replace"]);
        assert!(succeeded && text.contains(&format!("of {cluster}")), "{text}");
        assert!(showing.end().0);
    }
    let (succeeded, status) = machines.paired("second", &["--status"]);
    assert!(succeeded && status.contains("joined other"), "{status}");
    let folder = machines.folder("second");
    let secrets = ["cluster.key", "machine.key"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
    assert!(secrets.iter().flat_map(|secret| secret.lines()).all(|line| !status.contains(line)), "{status}");
    // Only the first machine admits others.
    let (succeeded, text) = machines.paired("second", &["--listen", "127.0.0.1:0"]);
    assert!(!succeeded && text.contains("joined the cluster of other"), "{text}");
    let (succeeded, text) = machines.paired("second", &["--forget"]);
    assert!(succeeded && text.contains("has left cluster") && !folder.exists(), "{text}");
}

#[test]
fn five_wrong_codes_end_the_code_on_both_sides() {
    let machines = Machines::new();
    let first = Showing::start(&machines, "first", &[]);
    let wrong = first.wrong_code();
    for _ in 0..5 {
        let (succeeded, text) = machines.paired("second", &[&wrong, "--at", &first.at]);
        assert!(!succeeded && text.contains("the code is wrong"), "{text}");
    }
    let (succeeded, text) = machines.paired("second", &[&first.code, "--at", &first.at]);
    assert!(!succeeded && (text.contains("void") || text.contains("no machine that shows a code")), "{text}");
    let (succeeded, text) = first.end();
    assert!(!succeeded && text.contains("5 attempts failed") && text.contains("void"), "{text}");
    assert!(!machines.folder("first").exists() && !machines.folder("second").exists());
}

/// Two network namespaces with a cable between them, as two machines.
struct Cable([String; 2]);

impl Cable {
    /// `None` where namespaces cannot be made: it needs root, and `ip`.
    fn new() -> Option<Cable> {
        let id = std::process::id();
        let cable = Cable(["a", "b"].map(|end| format!("pair-{id}-{end}")));
        let [a, b] = &cable.0;
        let ip = |args: &str| {
            let output = Command::new("ip").args(args.split_whitespace()).output();
            output.is_ok_and(|output| output.status.success())
        };
        let wire = format!("link add veth0 netns {a} type veth peer name veth0 netns {b}");
        let made = ip(&format!("netns add {a}")) && ip(&format!("netns add {b}")) && ip(&wire);
        let is_up = |end: &str, address: &str| {
            ip(&format!("-n {end} addr add {address}/24 dev veth0"))
                && ip(&format!("-n {end} link set lo up"))
                && ip(&format!("-n {end} link set veth0 up"))
        };
        (made && is_up(a, "10.77.0.1") && is_up(b, "10.77.0.2")).then_some(cable)
    }

    /// The same command on the machine at this end.
    fn at(&self, end: usize, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.0[end]]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.stdout(Stdio::piped()).stderr(Stdio::piped());
        inside
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for end in &self.0 {
            // One that was not made cannot be removed.
            let _ = Command::new("ip").args(["netns", "del", end]).output();
        }
    }
}

#[test]
fn the_code_alone_finds_the_first_machine_in_the_network() {
    let Some(cable) = Cable::new() else {
        harness::not_possible_here("network namespaces cannot be made here (root and `ip` make them)");
        return;
    };
    let machines = Machines::new();
    let first = Showing::of(cable.at(0, &machines.pair("first", &["--expect", "1"])));
    let Output { status, stdout, stderr } = cable.at(1, &machines.pair("second", &[&first.code])).output().unwrap();
    let text = String::from_utf8([stdout, stderr].concat()).unwrap();
    assert!(status.success() && text.contains("asking first code") && text.contains("of first"), "{text}");
    let (succeeded, text) = first.end();
    assert!(succeeded && text.contains("second joined, from 10.77.0.2"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_another_cluster_is_not_trusted() {
    let machines = Machines::new();
    for (first, second) in [("first", "second"), ("other", "stranger")] {
        let showing = Showing::start(&machines, first, &["--expect", "1"]);
        assert!(machines.paired(second, &[&showing.code, "--at", &showing.at]).0);
        assert!(showing.end().0);
    }
    let stranger = machines.folder("stranger").display().to_string();
    let node = BatonNode::with_variables(&["--engine", "sim"], &machines.variables(&stranger));
    let address = node.url.trim_start_matches("http://");
    let first = machines.folder("first").display().to_string();
    let mut process = Command::new(&*BATON);
    process.args(["serve", "--listen", "127.0.0.1:0", "--decode", address]).envs(machines.variables(&first));
    let mut process = Process(process.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    // It waits for the node, and says why.
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.find(|line| line.contains("TLS")).expect("a line about TLS");
    assert!(line.contains("baton pair --status"), "{line}");
}
