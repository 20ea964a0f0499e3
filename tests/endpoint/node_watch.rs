//! `baton serve --decode` waits for a node that is late, and says once when the node is lost and when it returns.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use harness::{BATON, Process, eventually_async, free_address, read_all};
use serde_json::{Value, json};

fn baton(key: &str, args: &[&str]) -> Command {
    let mut command = Command::new(&*BATON);
    command.args(args).env("BATON_CLUSTER_KEY", key).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn node(key: &str, address: &str) -> Process {
    let args = ["node", "--engine", "sim", "--listen", address];
    let mut process = Process(baton(key, &args).stdout(Stdio::null()).spawn().unwrap());
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("ready"));
    process
}

/// The lines of a process's output.
fn lines(output: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(output).lines();
        lines.map_while(Result::ok).for_each(|line| drop(sender.send(line)));
    });
    lines
}

#[track_caller]
fn next_line(lines: &mpsc::Receiver<String>, expected: &str) {
    let line = lines.recv_timeout(Duration::from_secs(30)).expect(expected);
    assert!(line.contains(expected), "{expected:?} is not in {line:?}");
}

async fn get(address: &str, path: &str) -> Option<(u16, Value)> {
    let response = reqwest::get(format!("http://{address}{path}")).await.ok()?;
    Some((response.status().as_u16(), response.json().await.unwrap()))
}

#[test]
fn a_refused_key_ends_the_start_with_one_line() {
    let address = free_address();
    let _node = node("the right cluster key", &address);
    let url = format!("http://{address}");
    let mut process =
        baton("the wrong cluster key", &["serve", "--listen", "127.0.0.1:0", "--decode", &url]).spawn().unwrap();
    let stderr = read_all(process.stderr.take());
    assert_eq!(process.wait().unwrap().code(), Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains(&url) && stderr.contains("BATON_CLUSTER_KEY"), "{stderr}");
    let mut stdout = String::new();
    process.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    assert_eq!(stdout, "", "nothing was ready");
}

// The stub answers while the test blocks on a line.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_node_is_waited_for_and_each_change_is_logged_once() {
    // A stub closes every connection and counts them.
    let stub = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let node_address = stub.local_addr().unwrap().to_string();
    let address = free_address();
    let (attempted, mut attempts) = tokio::sync::mpsc::unbounded_channel();
    let stub = tokio::spawn(async move {
        while stub.accept().await.is_ok() {
            let _ = attempted.send(());
        }
    });
    let url = format!("http://{node_address}");
    let args = ["serve", "--listen", &address, "--decode", &url];
    let mut serve = Process(baton("the tests' cluster key", &args).spawn().unwrap());
    let out = lines(serve.stdout.take().unwrap());
    let log = lines(serve.stderr.take().unwrap());

    next_line(&log, &format!("the node at {url} cannot be used: "));
    let (status, health) = get(&address, "/health").await.unwrap();
    assert_eq!(status, 503, "{health}");
    assert!(!health.to_string().contains(&node_address), "no address is shown to a client: {health}");
    // An attempt begins after the outcome of the previous one is known.
    for _ in 0..4 {
        tokio::time::timeout(Duration::from_secs(30), attempts.recv()).await.expect("further attempts");
    }
    assert!(out.try_recv().is_err(), "no ready message before the node has answered");
    assert!(log.try_recv().is_err(), "one line for all attempts");
    stub.abort();
    assert!(stub.await.unwrap_err().is_cancelled(), "the address is free");

    let running = node("the tests' cluster key", &node_address);
    next_line(&log, &format!("the node at {url} answers"));
    next_line(&out, "");
    next_line(&out, "Baton serves sim at");
    next_line(&out, "with a context of ");
    let (status, models) = get(&address, "/v1/models").await.unwrap();
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("sim")));

    drop(running);
    next_line(&log, "may be lost");
    // An idle connection is reset; a new one is refused.
    next_line(&log, "cannot be used: ");
    let _again = node("the tests' cluster key", &node_address);
    next_line(&log, "answers");
    eventually_async("a healthy server", || async { get(&address, "/health").await.unwrap().0 == 200 }).await;
}

// The page is served while the test blocks on a line.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_no_node_is_reported_as_such() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await;
            let page = "HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>";
            let _ = stream.write_all(page.as_bytes()).await;
        }
    });
    let mut serve = Process(
        baton("the tests' cluster key", &["serve", "--listen", "127.0.0.1:0", "--decode", &url]).spawn().unwrap(),
    );
    next_line(&lines(serve.stderr.take().unwrap()), "what answers there is not a Baton node (HTTP 404)");
}
