//! `--log-file`: everything of an endpoint and its engine goes to the file, which stays bounded.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use harness::{BATON, BatonServer, eventually};
use serde_json::json;

const BOUND: usize = 8 << 20;

/// Lines that exceed the bound.
fn too_much(word: &str) -> String {
    format!("{word}\n").repeat(BOUND / (word.len() + 1) + 1)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_file_stays_bounded_and_takes_the_lines_of_every_process() {
    let folder = tempfile::tempdir().unwrap();
    let (log, older) = (folder.path().join("baton.log"), folder.path().join("baton.log.1"));
    // An earlier run has left this.
    fs::write(&log, too_much("yesterday")).unwrap();
    let stderr = tempfile::NamedTempFile::new().unwrap();
    let args = ["--engine", "sim", "--no-calibration", "--log-file", log.to_str().unwrap()];
    let server = BatonServer::started(stderr.reopen().unwrap(), &args, &[("RUST_LOG", "info")]);
    eventually("a log that was emptied", || read(&log).contains("the log was full").then_some(()));
    // Lines of the start may have come before it was copied.
    assert!(read(&older).starts_with("yesterday\n") && !read(&log).contains("yesterday"));

    let body = json!({ "model": "sim", "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] });
    assert_eq!(server.post("/v1/chat/completions", &body).await.0, 200);
    eventually("the request's line", || read(&log).contains("request ended").then_some(()));
    if cfg!(target_os = "linux") {
        let engine = format!("/proc/{}/fd/2", server.engine().as_raw_nonzero());
        assert_eq!(fs::read_link(engine).unwrap(), log.canonicalize().unwrap(), "the engine writes to the same file");
    }

    // Another process with the file grows it.
    let mut other = OpenOptions::new().append(true).open(&log).unwrap();
    other.write_all(too_much("another").as_bytes()).unwrap();
    let is_emptied = |text: &str| !text.contains("another") && text.contains("the log was full");
    eventually("a log that was emptied again", || is_emptied(&read(&log)).then_some(()));
    let kept = read(&older);
    assert!(kept.contains("request ended") && kept.contains("another\n") && !kept.contains("yesterday"));
    other.write_all(b"a late line\n").unwrap();
    assert_eq!(server.post("/v1/chat/completions", &body).await.0, 200);
    eventually("the next request's line", || read(&log).contains("request ended").then_some(()));
    let text = read(&log);
    assert!(text.contains("a late line\n") && !text.contains('\0'), "no hole where the earlier lines were: {text}");
    assert_eq!(read(stderr.path()), "", "nothing goes elsewhere");
}

#[test]
fn a_log_file_that_cannot_be_written_is_refused() {
    let mut baton = Command::new(&*BATON);
    let output = baton.args(["--log-file", "/", "key", "new", "--name", "anna"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "baton: the log cannot be written to /: it is no regular file\n"
    );
    assert!(output.stdout.is_empty(), "the command has not run");
}
