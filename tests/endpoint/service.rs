//! An endpoint as a service: systemd, shell completions, and output that nobody reads.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use harness::{BATON, CLUSTER_KEY, Process, eventually, eventually_async, free_address, skip};
use rustix::process::Signal;

/// The socket that systemd gives a service of `Type=notify`.
struct Manager {
    socket: UnixDatagram,
    folder: tempfile::TempDir,
}

impl Manager {
    fn new() -> Manager {
        let folder = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Manager { socket, folder }
    }

    fn start(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&*BATON);
        command.args(args).env("BATON_CLUSTER_KEY", CLUSTER_KEY);
        command.env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        command
    }

    fn message(&self) -> String {
        let mut message = [0; 512];
        let n = self.socket.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..n]).trim().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_manager_learns_when_health_is_ok_and_when_the_stop_begins() {
    let manager = Manager::new();
    let listen = free_address();
    // The endpoint waits for a node that has not started yet.
    let node_at = free_address();
    let mut command = manager.start(&["serve", "--listen", &listen, "--decode", &node_at]);
    let mut server = Process(command.stdout(Stdio::null()).spawn().unwrap());
    let health = async || reqwest::get(format!("http://{listen}/health")).await.map(|r| r.status().as_u16()).ok();
    eventually_async("an answer", || async { health().await == Some(503) }).await;
    manager.socket.set_nonblocking(true).unwrap();
    assert!(manager.socket.recv(&mut [0; 64]).is_err(), "it is not ready");
    manager.socket.set_nonblocking(false).unwrap();

    let node_manager = Manager::new();
    let mut node = node_manager.start(&["node", "--engine", "sim", "--listen", &node_at]);
    let _node = Process(node.stderr(Stdio::null()).spawn().unwrap());
    assert_eq!(node_manager.message(), "READY=1");
    assert_eq!(manager.message(), "READY=1");
    assert_eq!(health().await, Some(200));
    server.signal(Signal::TERM);
    assert_eq!(manager.message(), "STOPPING=1");
    let status = eventually("the end", || server.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

#[test]
fn a_server_keeps_serving_when_nobody_reads_its_output() {
    let listen = free_address();
    let mut command = Command::new(&*BATON);
    command.args(["serve", "--engine", "sim", "--listen", &listen]).env("RUST_LOG", "debug");
    let mut server = Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    // Both pipes are broken from here on.
    drop((server.stdout.take(), server.stderr.take()));
    let address = format!("http://{listen}");
    let status = |address: &str| Command::new(&*BATON).args(["status", address]).output().unwrap().status.success();
    eventually("an answer", || status(&address).then_some(()));
    // The engine is ready, so the banner was written to the broken pipe.
    let ask = || {
        let body = r#"{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}"#;
        let url = format!("{address}/v1/chat/completions");
        Command::new("curl").args(["-fsS", "--max-time", "20", &url, "-d", body]).output().unwrap()
    };
    // Each request writes several lines to the other broken pipe.
    for _ in 0..10 {
        let reply = ask();
        assert!(reply.status.success(), "{reply:?}");
    }
    assert!(server.try_wait().unwrap().is_none(), "the server has ended");
}

#[test]
fn shells_complete_every_command() {
    let help = String::from_utf8(Command::new(&*BATON).arg("help").output().unwrap().stdout).unwrap();
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   ")))
        .collect();
    assert!(commands.contains(&"serve") && commands.contains(&"completions"), "{commands:?}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = Command::new(&*BATON).args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success());
        for command in &commands {
            assert!(script.contains(command), "{shell} does not complete {command}");
        }
        assert!(script.contains("ollama-listen"), "{shell} does not complete options");
    }
    // A shell accepts the script.
    let script = "source <(\"$0\" completions bash) && complete -p baton";
    let bash = Command::new("bash").args(["-c", script]).arg(&*BATON).output().unwrap();
    assert!(bash.status.success() && String::from_utf8_lossy(&bash.stdout).contains("_baton"), "{bash:?}");
}

/// systemd itself verifies the units, with the binary under test as their program.
#[test]
fn systemd_accepts_the_units() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return skip("there is no systemd-analyze: the units were not verified");
    }
    let units = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/systemd");
    let folder = tempfile::tempdir().unwrap();
    for name in ["baton.service", "baton-node.service"] {
        let text = std::fs::read_to_string(format!("{units}/{name}")).unwrap();
        assert!(text.contains("/usr/local/bin/baton ") && text.contains("Type=notify"), "{name}");
        let path = folder.path().join(name);
        std::fs::write(&path, text.replace("/usr/local/bin/baton ", &format!("{} ", BATON.display()))).unwrap();
        let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
        let complaints = BufReader::new(&output.stderr[..]).lines().map_while(Result::ok);
        let ours: Vec<String> = complaints.filter(|line| line.contains(name)).collect();
        assert!(ours.is_empty(), "{ours:#?}");
    }
}

#[test]
fn a_node_without_a_model_runs_the_default_model_as_the_endpoint_does() {
    let cache = tempfile::tempdir().unwrap();
    let errors = [&["serve"][..], &["node"]].map(|command| {
        let mut command = std::process::Command::new(&*BATON)
            .args(command)
            .args(["--listen", "127.0.0.1:0"])
            .env("BATON_CLUSTER_KEY", CLUSTER_KEY)
            .env("BATON_CACHE", cache.path())
            // Without pip, the model cannot be fetched, and the error names it.
            .env("PATH", cache.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let error = harness::read_all(command.stderr.take());
        assert!(!command.wait().unwrap().success());
        error
    });
    assert!(errors[0].contains("cannot run python3 to ask pip for"), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
}
