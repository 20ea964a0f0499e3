//! A log that nobody reads: it stops no process, and says later how many lines are missing.

use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write, pipe};
use std::process::{Command, Stdio};
use std::time::Duration;

use harness::{BATON, CLUSTER_KEY, Process, eventually, eventually_async, free_address};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::Signal;
use serde_json::json;

/// A pipe that takes no more bytes.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = pipe().unwrap();
    fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    for line in [[b'\n'; 4096].as_slice(), b"\n"] {
        while writer.write(line).is_ok() {}
    }
    fcntl_setfl(&writer, OFlags::empty()).unwrap();
    (reader, writer)
}

/// A command whose standard output and standard error nobody reads, and which has much to say.
fn unread(args: &[&str]) -> (Process, PipeReader) {
    let (reader, writer) = full_pipe();
    let mut command = Command::new(&*BATON);
    command.args(args).env("BATON_CLUSTER_KEY", CLUSTER_KEY).env("RUST_LOG", "trace");
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    (Process(command.spawn().unwrap()), reader)
}

/// Has the endpoint chat. Returns false if it is not ready yet.
async fn chat(listen: &str) -> bool {
    let body = json!({ "model": "sim", "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] });
    let call = reqwest::Client::new().post(format!("http://{listen}/v1/chat/completions")).json(&body);
    let reply = call.timeout(Duration::from_secs(60)).send().await;
    reply.is_ok_and(|reply| reply.status() == 200)
}

/// The lines of its log that the endpoint has dropped.
async fn n_dropped(listen: &str) -> u64 {
    let text = reqwest::get(format!("http://{listen}/metrics")).await.unwrap().text().await.unwrap();
    let count = text.lines().find_map(|line| line.strip_prefix("baton_log_lines_dropped_total "));
    count.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
}

/// Reads until a line has these words.
fn read_until(reader: PipeReader, words: &str) {
    let mut lines = BufReader::new(reader).lines();
    assert!(lines.any(|line| line.unwrap().contains(words)), "the processes have ended and said nothing of {words:?}");
    // Whoever writes there must find a reader until the test ends.
    std::thread::spawn(move || lines.for_each(drop));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_reads_stops_no_endpoint_no_node_and_no_child() {
    let [node_at, in_front, alone] = [free_address(), free_address(), free_address()];
    let (_node, node_log) = unread(&["node", "--engine", "sim", "--listen", &node_at]);
    let (_in_front, in_front_log) = unread(&["serve", "--listen", &in_front, "--decode", &node_at]);
    let (_alone, alone_log) = unread(&["serve", "--listen", &alone, "--engine", "sim"]);
    for listen in [&in_front, &alone] {
        eventually_async("the endpoint to be ready", || chat(listen)).await;
        while n_dropped(listen).await == 0 {
            assert!(chat(listen).await, "the log is full");
        }
        assert!(chat(listen).await, "lines are dropped");
        let health = reqwest::get(format!("http://{listen}/health")).await.unwrap();
        assert_eq!(health.status(), 200);
    }
    read_until(node_log, "baton node is ready on ");
    for log in [in_front_log, alone_log] {
        read_until(log, " ERROR the log dropped ");
    }
    for listen in [&in_front, &alone] {
        assert!(chat(listen).await, "the log is read again");
    }
}

#[test]
fn commands_end_although_nobody_reads_their_last_lines() {
    let (mut failing, _log) = unread(&["serve", "--config", "/does/not/exist"]);
    let status = eventually("the end of a command that fails", || failing.try_wait().unwrap());
    assert_eq!(status.code(), Some(1));

    let listen = free_address();
    let (mut server, _log) = unread(&["serve", "--engine", "sim", "--listen", &listen]);
    let address = format!("http://{listen}");
    let is_ready =
        || Command::new(&*BATON).args(["status", &address]).stdout(Stdio::null()).status().unwrap().success();
    eventually("the endpoint to be ready", || is_ready().then_some(()));
    server.signal(Signal::TERM);
    let status = eventually("the end of an endpoint that is stopped", || server.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}
