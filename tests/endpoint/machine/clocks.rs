//! The time of day jumps, as NTP makes it on a machine whose clock was wrong: no wait depends on it.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use futures::future::join_all;
use harness::{BatonNode, BatonServer, Capability, SseReply, TempConfigFile, eventually_async, not_possible_here};
use serde_json::json;

use super::{ENGINE, SIM, request, status};

const HOUR: i64 = 3_600;
const DAY: i64 = 24 * HOUR;

/// A clock that a test sets, by libfaketime. The monotonic clock is the machine's.
struct Clock {
    library: PathBuf,
    file: tempfile::NamedTempFile,
}

impl Clock {
    /// `None`: libfaketime is not installed.
    fn new() -> Option<Clock> {
        let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
        let folders = folders.chain(["/usr/lib".into(), "/usr/lib64".into()]);
        let found = folders.map(|folder| folder.join("faketime/libfaketimeMT.so.1")).find(|path| path.is_file());
        let Some(library) = found else {
            not_possible_here(
                Capability::ClockJumps,
                "libfaketime is not installed, so jumps of the clock were not tested",
            );
            return None;
        };
        let clock = Clock { library, file: tempfile::NamedTempFile::new().unwrap() };
        clock.jump_to(0);
        Some(clock)
    }

    /// Sets the clock so many seconds after the machine's. A process reads half a file as the machine's time.
    fn jump_to(&self, seconds: i64) {
        std::fs::write(self.file.path(), format!("{seconds:+}\n")).unwrap();
    }

    fn variables(&self) -> [(&str, &str); 4] {
        [
            ("LD_PRELOAD", self.library.to_str().unwrap()),
            ("FAKETIME_TIMESTAMP_FILE", self.file.path().to_str().unwrap()),
            ("FAKETIME_NO_CACHE", "1"),
            ("DONT_FAKE_MONOTONIC", "1"),
        ]
    }
}

/// By how many hours the endpoint's clock differs from the machine's.
async fn hours_off(server: &BatonServer) -> i64 {
    let created =
        server.post("/v1/chat/completions", &request("what time is it", 1)).await.1["created"].as_i64().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    (created - now + HOUR / 2).div_euclid(HOUR)
}

/// Streams run while the clock jumps by an hour and by a day in both directions. They are as if it had not.
async fn streams_survive(server: &BatonServer, clock: &Clock, jumps: impl AsyncFn(i64)) {
    let undisturbed = join_all((0..4).map(async |i| {
        let body = request(&format!("stream {i}"), 300);
        server.post("/v1/chat/completions", &body).await.1["choices"][0]["message"]["content"].clone()
    }));
    let undisturbed = undisturbed.await;
    let mut streams = join_all((0..4).map(|i| {
        let body = request(&format!("stream {i}"), 300);
        async move { SseReply::open(server, &body).await }
    }));
    let mut streams = (&mut streams).await;
    for seconds in [HOUR, -HOUR, DAY, -DAY, 0] {
        clock.jump_to(seconds);
        jumps(seconds).await;
        join_all(streams.iter_mut().map(|stream| stream.read_pieces(20))).await;
    }
    for (stream, undisturbed) in streams.into_iter().zip(&undisturbed) {
        assert_eq!(stream.whole().await.content, undisturbed.as_str().unwrap());
    }
    let model = server.state().await["models"][0].take();
    assert_eq!(model["fallbacks"], json!({}), "{model}");
    assert!(model["nodes"].as_array().unwrap().iter().all(|node| node["life"] == "ready"), "{model}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_whose_clock_jumps_loses_no_stream_and_no_engine() {
    let Some(clock) = Clock::new() else { return };
    let server = BatonServer::started(Stdio::inherit(), &SIM, &clock.variables());
    let engine = server.engine();
    streams_survive(&server, &clock, async |seconds| assert_eq!(hours_off(&server).await, seconds / HOUR)).await;
    assert_eq!(server.engine(), engine, "no other process");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_clock_jumps_stays_in_use() {
    let Some(clock) = Clock::new() else { return };
    let node = BatonNode::with_variables(&ENGINE, &clock.variables());
    let server = BatonServer::with(&["--decode", &node.url, "--no-calibration"]);
    eventually_async("the node", async || status(&reqwest::Client::new(), &server, "sim").await == 200).await;
    streams_survive(&server, &clock, async |_| ()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_stays_as_long_as_it_should_although_the_clock_jumps_by_a_day() {
    let Some(clock) = Clock::new() else { return };
    let config =
        "[[models]]\nname = \"one\"\nsource = \"smollm2\"\nkeep_alive = 600\n[models.engine]\nengine = \"sim\"\n";
    let file = TempConfigFile::new(config);
    let server = file.serve_logging_to(Stdio::inherit(), &clock.variables());
    let client = reqwest::Client::new();
    assert_eq!(status(&client, &server, "one").await, 200);
    for seconds in [HOUR, -HOUR, DAY, -DAY, 0] {
        clock.jump_to(seconds);
        assert_eq!(status(&client, &server, "one").await, 200);
    }
    let residency = server.state().await["models"][0]["residency"].clone();
    assert_eq!((&residency["life"], &residency["loads"]), (&json!("loaded"), &json!(1)), "{residency}");
}
