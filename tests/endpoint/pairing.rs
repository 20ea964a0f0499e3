//! `baton pair` makes machines share a key and certificates: then nodes and endpoints work over TLS without any option.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use harness::lab::{Lab, Membership, OWNER, with_namespaces, within};
use harness::{BATON, BatonNode, BatonServer, Process, eventually, eventually_async, long_prompt, read_all};
use rustix::process::Signal;
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
        piped(&mut command);
        command
    }

    /// Runs `baton pair` on a machine. Returns whether it succeeded, and what it printed.
    fn paired(&self, machine: &str, args: &[&str]) -> (bool, String) {
        outcome(self.pair(machine, args).output().unwrap())
    }

    /// Variables of a node or an endpoint on a machine: no key but the pairing's.
    fn variables<'a>(&self, folder: &'a str) -> [(&'static str, &'a str); 2] {
        [("BATON_CLUSTER_KEY", ""), ("BATON_CLUSTER_FOLDER", folder)]
    }
}

fn piped(command: &mut Command) -> &mut Command {
    command.stdout(Stdio::piped()).stderr(Stdio::piped())
}

/// Whether a command succeeded, and what it printed.
fn outcome(output: Output) -> (bool, String) {
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
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
        Showing::of(&mut machines.pair(machine, &args))
    }

    fn of(command: &mut Command) -> Showing {
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

#[test]
fn a_node_with_a_mistake_in_its_options_uses_up_no_code() {
    let machines = Machines::new();
    let first = Showing::start(&machines, "first", &["--expect", "1"]);
    let node = |options: &[&str]| {
        let mut node = Command::new(&*BATON);
        node.args(["node", "--pair", &first.code, "--at", &first.at]).args(options);
        node.env("BATON_CLUSTER_FOLDER", machines.folder("second")).env_remove("BATON_CLUSTER_KEY");
        outcome(piped(&mut node).output().unwrap())
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for options in [
        &["--role", "worker", "--model", "m.gguf"][..],
        &["--role", "worker", "--device", "no such device"],
        &["--role", "worker", "--tls-ca", "/no/such/file"],
        &["--engine", "sim", "--lend-memory", "100"],
        &["--engine", "sim", "--tls-cert", "/no/such/file", "--tls-key", "/no/such/file"],
        &["--workers", "127.0.0.1:0"],
        &["--workers", &taken, "--listen", &taken],
    ] {
        let (succeeded, text) = node(options);
        assert!(!succeeded && text.lines().count() == 1, "{options:?}: {text}");
        assert!(!machines.folder("second").exists(), "{options:?}: {text}");
    }
    let (succeeded, text) = machines.paired("second", &[&first.code, "--at", &first.at]);
    assert!(succeeded, "the code is still good: {text}");
    assert!(first.end().0);
}

#[test]
fn the_code_alone_finds_the_first_machine_in_the_network() {
    with_namespaces("pairing::the_code_alone_finds_the_first_machine_in_the_network", || {
        let lab = Lab::new(&[1, 1]);
        let first = Showing::of(piped(lab.on(0, &BATON).args(["pair", "--name", "first", "--expect", "1"])));
        let second = piped(lab.on(1, &BATON).args(["pair", "--name", "second", &first.code])).output();
        let (succeeded, text) = outcome(second.unwrap());
        assert!(succeeded && text.contains("asking first code") && text.contains("of first"), "{text}");
        let (succeeded, text) = first.end();
        assert!(succeeded && text.contains("second joined, from "), "{text}");
    });
}

#[test]
fn one_command_on_each_machine_pairs_starts_and_finds() {
    with_namespaces("pairing::one_command_on_each_machine_pairs_starts_and_finds", || {
        let lab = Lab::new(&[1, 1, 1]);
        let sim = ["--engine", "sim", "--sim-prefill-tps", "3000"];
        let serve = ["serve", "--pair", "--policy", "always_handoff", "--no-calibration", "--api-key", OWNER];
        let serve = [&serve[..], &["--listen", "127.0.0.1:8080"], &sim].concat();
        let node = |i: usize, code: &str| {
            let args = ["node", "--pair", code, "--role", "prefill", "--listen", "0.0.0.0:9000"];
            lab.baton(i, Membership::Paired, &[&args[..], &sim].concat())
        };
        // The endpoint, and the code that it shows.
        let serves = || {
            let mut endpoint = Process(lab.on(0, &BATON).args(&serve).stdout(Stdio::piped()).spawn().unwrap());
            let mut lines = BufReader::new(endpoint.stdout.take().unwrap()).lines().map(Result::unwrap);
            let shown =
                lines.find_map(|line| line.trim().strip_prefix("baton node --pair ").map(str::to_owned)).unwrap();
            std::thread::spawn(move || lines.for_each(drop));
            (endpoint, shown.split(' ').next().unwrap().to_owned())
        };
        let (endpoint, code) = serves();
        let first = node(1, &code);
        within(Duration::from_secs(20), "paired and used", || lab.states() == ["used"]);
        lab.hands_over("paired by one command");
        // The same commands start both again, though the code is no longer good.
        drop((endpoint, first));
        let (mut endpoint, new_code) = serves();
        let _node = node(1, &code);
        within(Duration::from_secs(20), "used again", || lab.states() == ["used"]);
        let _third = node(2, &new_code);
        within(Duration::from_secs(20), "a third machine joins while it serves", || lab.states() == ["used", "used"]);
        // Two signals end it as they do without a pairing: the streams get an error, and nothing is lost.
        let body = json!({
            "model": "sim", "max_tokens": 100_000, "stream": true, "ignore_eos": true,
            "messages": [{ "role": "user", "content": "hi" }],
        });
        let mut curl = lab.on(0, Path::new("curl"));
        curl.args(["-sN", "--max-time", "60", "http://127.0.0.1:8080/v1/chat/completions", "-d", &body.to_string()]);
        curl.args(["-H", "content-type: application/json", "-H", &format!("authorization: Bearer {OWNER}")]);
        let mut client = Process(curl.stdout(Stdio::piped()).spawn().unwrap());
        let mut reply = BufReader::new(client.stdout.take().unwrap());
        let mut first = String::new();
        reply.read_line(&mut first).unwrap();
        assert!(first.starts_with("data: "), "{first}");
        endpoint.signal(Signal::INT);
        std::thread::sleep(Duration::from_millis(500));
        endpoint.signal(Signal::INT);
        // The first alone would end it after 30 s.
        let signalled = Instant::now();
        let mut rest = String::new();
        reply.read_to_string(&mut rest).unwrap();
        assert!(rest.contains(r#"data: {"error":"#) && rest.contains("stopping"), "{rest}");
        let status = eventually("the end of the endpoint", || endpoint.try_wait().unwrap());
        assert!(status.success() && signalled.elapsed() < Duration::from_secs(15), "{status}");
        // A key in the environment would win over the pairing.
        let refused = lab.on(0, &BATON).args(&serve).env("BATON_CLUSTER_KEY", "a key").output().unwrap();
        assert!(!refused.status.success() && outcome(refused).1.contains("BATON_CLUSTER_KEY is set"));
    });
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
