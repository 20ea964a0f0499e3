//! `baton-bench serve` measures running servers, and finds what is wrong with their replies.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

use harness::mock::{Mock, Step, head};
use harness::{BATON_BENCH, BatonServer, Process, ReloadableServer};
use rustix::process::Signal;
use serde_json::Value;

use super::details;

/// The output of a run.
struct BenchRun {
    is_success: bool,
    table: String,
    figures: Value,
    chart: String,
}

impl BenchRun {
    /// The figures of a server's rounds.
    fn rounds(&self, server: usize) -> &Vec<Value> {
        self.figures["servers"][server]["rounds"].as_array().unwrap()
    }
}

async fn bench(args: &[&str]) -> BenchRun {
    let folder = tempfile::tempdir().unwrap();
    let (json, charts) = (folder.path().join("figures.json"), folder.path().join("charts"));
    let mut command = Command::new(&*BATON_BENCH);
    command.args(["serve", "--timeout", "60"]).args(args);
    if !args.contains(&"--warm-up") {
        command.args(["--warm-up", "0.1"]);
    }
    command.arg("--json").arg(&json).arg("--svg").arg(&charts).stderr(Stdio::inherit());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    println!("{table}");
    let read = |path| std::fs::read_to_string(path).unwrap();
    let figures = details(&json);
    let chart = std::fs::read_dir(charts).unwrap().map(|entry| read(entry.unwrap().path())).collect();
    BenchRun { is_success: output.status.success(), table, figures, chart }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_endpoint_is_measured_and_its_replies_are_correct() {
    let server = BatonServer::with(&["--engine", "sim", "--sim-decode-tps", "2000", "--api-key", "sk-1"]);
    let urls = [format!("a={}/v1", server.base), format!("b={}", server.base)];
    let pid = format!("a={}", server.pid());
    let common = ["--url", &urls[0], "--url", &urls[1], "--pid", &pid, "--api-key", "sk-1", "--rounds", "2"];
    let load = ["--requests", "30", "--concurrency", "4", "--output-tokens", "12", "--ignore-eos"];
    let greedy = ["--prompts", "3", "--same-replies", "--prefix-words", "20"];
    let run = bench(&[&common[..], &load, &greedy].concat()).await;
    assert!(run.is_success, "{}", run.table);
    for server in [0, 1] {
        for round in run.rounds(server) {
            // Requests of the warm-up may end in the measured time, too.
            assert!((30..=34).contains(&round["n_replies"].as_u64().unwrap()), "{round}");
            assert_eq!(round["mean_output_tokens"], 12.0);
            assert_eq!(round["latencies"]["ttft"]["n"], 30, "{round}");
            assert!(round["latencies"]["itl"]["n"].as_u64().unwrap() > 30, "{round}");
            assert!(round["latencies"]["delay"].is_null(), "{round}");
            let times = round["latencies"]["end_to_end"]["percentiles_ms"].as_array().unwrap();
            assert!(times.is_sorted_by_key(|ms| ms.as_f64().unwrap()), "{round}");
            assert!(round["n_connections"].as_u64().unwrap() <= 4, "{round}");
            let has_memory = round["resident_mib"].as_f64().is_some_and(|mib| mib > 1.0);
            assert_eq!(has_memory, server == 0, "{round}");
        }
    }
    assert!(run.table.contains("TTFT p50, ms") && run.table.contains("in parentheses"), "{}", run.table);
    assert!(run.chart.contains("polyline"), "{}", run.chart);

    let open = ["--reply", "json", "--api", "completions", "--request-rate", "100", "--requests", "40"];
    let run = bench(&[&common[..], &open, &["--output-tokens", "4"]].concat()).await;
    assert!(run.is_success, "{}", run.table);
    for round in run.rounds(1) {
        let latencies = &round["latencies"];
        assert!(latencies["end_to_end"]["n"] == 40 && latencies["ttft"].is_null(), "{round}");
    }

    let run = bench(&["--url", &urls[0], "--model", "sim", "--requests", "3", "--rounds", "1"]).await;
    assert!(!run.is_success && run.rounds(0)[0]["failures"]["http_401"].as_u64().unwrap() >= 3, "{}", run.table);
}

const ROLE: &str = r#"data: {"id":"a","choices":[{"delta":{"role":"assistant"}}]}"#;
const TEXT: &str = r#"data: {"id":"a","choices":[{"delta":{"content":"x"}}]}"#;
const STOP: &str = r#"data: {"id":"a","choices":[{"delta":{},"finish_reason":"stop"}]}"#;
const USAGE: &str = r#"data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}"#;
const DONE: &str = "data: [DONE]";

#[tokio::test(flavor = "multi_thread")]
async fn the_faults_of_a_faulty_server_are_counted_and_fail_the_run() {
    let streams: [&[&str]; 6] = [
        &[ROLE, TEXT, STOP, USAGE, DONE],
        &[TEXT, ROLE, STOP, USAGE, DONE],
        &[ROLE, TEXT, STOP, DONE, USAGE],
        &[ROLE, TEXT, STOP, USAGE],
        &[ROLE, TEXT, TEXT, STOP, USAGE, DONE],
        &[ROLE, TEXT, "data: {", STOP, USAGE, DONE],
    ];
    let mock = Mock::listing(&["m"], move |n, _| match streams.get(n) {
        Some(lines) => [vec![head()], lines.iter().map(|line| Step::Send(format!("{line}\n\n"))).collect()].concat(),
        None => harness::mock::whole(500, "", &serde_json::json!({ "error": "broken" })),
    })
    .await;
    let load = ["--requests", "7", "--concurrency", "1", "--rounds", "1", "--warm-up", "0", "--token-per-chunk"];
    let run = bench(&[&["--url", &mock.url][..], &load].concat()).await;
    assert!(!run.is_success, "{}", run.table);
    let server = &run.figures["servers"][0];
    let expected = serde_json::json!({
        "no_role": 1, "event_after_done": 1, "no_done": 1, "usage_is_not_chunks": 1, "invalid_json": 1,
    });
    assert_eq!(server["faults"], expected, "{}", run.table);
    assert_eq!(server["failures"], serde_json::json!({ "http_500": 1 }), "{}", run.table);
    assert!(run.table.contains("fault: no_role") && run.table.contains("broken"), "{}", run.table);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tokens_of_a_failed_reply_are_no_throughput() {
    const ERROR: &str = r#"data: {"error":{"message":"broken"}}"#;
    let streams: [&[&str]; 2] = [&[ROLE, TEXT, STOP, USAGE, DONE], &[ROLE, TEXT, TEXT, ERROR]];
    let mock = Mock::listing(&["m"], move |n, _| {
        [vec![head()], streams[n % 2].iter().map(|line| Step::Send(format!("{line}\n\n"))).collect()].concat()
    })
    .await;
    let load = ["--requests", "2", "--concurrency", "1", "--rounds", "1", "--warm-up", "0"];
    let run = bench(&[&["--url", &mock.url][..], &load].concat()).await;
    let round = &run.rounds(0)[0];
    assert_eq!((&round["n_tokens"], &round["n_failed_chunks"]), (&1.0.into(), &2.into()), "{round}");
    assert!(run.table.contains("chunks of failed replies"), "{}", run.table);
}

/// The mock and an endpoint in front of it, side by side: no token is lost on the way.
#[tokio::test(flavor = "multi_thread")]
async fn every_token_of_the_mock_passes_an_endpoint() {
    let mut mock = Command::new(&*BATON_BENCH);
    let mock = mock.args(["mock", "--interval-ms", "1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut mock = Process(mock);
    let mut line = String::new();
    BufReader::new(mock.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().rsplit(' ').next().unwrap().to_owned();
    let config = format!("[[upstream]]\nname = \"mock\"\nkind = \"openai\"\nurl = \"{url}\"\n");
    let endpoint = ReloadableServer::start(&config);
    let urls = [format!("direct={url}"), format!("baton={}", endpoint.server.base)];
    let load = ["--model", "mock", "--requests", "20", "--rounds", "1", "--output-tokens", "40", "--stamps"];
    for reply in ["stream", "json"] {
        let run = bench(&[&["--url", &urls[0], "--url", &urls[1]][..], &load, &["--reply", reply]].concat()).await;
        assert!(run.is_success, "{}", run.table);
        for server in [0, 1] {
            assert_eq!(run.rounds(server)[0]["mean_output_tokens"], 40.0);
            assert_eq!(run.rounds(server)[0]["latencies"]["delay"].is_null(), reply == "json");
        }
    }
    let counts = reqwest::get(format!("{url}/mock/counts")).await.unwrap().text().await.unwrap();
    let counts: Value = serde_json::from_str(&counts).unwrap();
    assert!(counts["requests"].as_u64().unwrap() >= 80, "{counts}");
}

/// A run that measured less than it was told to must not look like a success.
#[tokio::test(flavor = "multi_thread")]
async fn arrivals_that_were_never_sent_and_rounds_without_a_reply_fail_the_run() {
    let slow = Mock::listing(&["m"], |_, _| {
        let lines = [ROLE, TEXT, STOP, USAGE, DONE].map(|line| Step::Send(format!("{line}\n\n")));
        [vec![head(), Step::Wait(Duration::from_secs(2))], lines.to_vec()].concat()
    })
    .await;
    let common = ["--url", &slow.url, "--concurrency", "1", "--rounds", "1", "--warm-up", "0"];
    let run = bench(&[&common[..], &["--duration", "3", "--request-rate", "20"]].concat()).await;
    assert!(!run.is_success, "{}", run.table);
    let server = &run.figures["servers"][0];
    assert!(server["failures"]["not_sent"].as_u64().unwrap() > 10, "{}", run.table);
    assert_eq!(server["failures"].as_object().unwrap().len(), 1, "{}", run.table);
    assert_eq!(server["faults"], serde_json::json!({}), "{}", run.table);

    let run = bench(&[&common[..], &["--duration", "0.5"]].concat()).await;
    assert!(!run.is_success && run.rounds(0)[0]["n_replies"] == 0, "{}", run.table);
    let server = &run.figures["servers"][0];
    assert_eq!(
        (&server["failures"], &server["faults"]),
        (&serde_json::json!({}), &serde_json::json!({})),
        "{}",
        run.table
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_run_shows_its_whole_rounds() {
    let server = BatonServer::with(&["--engine", "sim", "--sim-decode-tps", "2000"]);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let mut command = Command::new(&*BATON_BENCH);
    command.args(["serve", "--url", &server.base, "--rounds", "50", "--duration", "0.5", "--warm-up", "0"]);
    command.args(["--output-tokens", "4", "--concurrency", "1", "--json"]).arg(&json);
    let mut run = Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut progress = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(progress.any(|line| line.starts_with("round 2: ")));
    run.signal(Signal::INT);
    let rest: Vec<String> = progress.collect();
    let mut table = String::new();
    run.stdout.take().unwrap().read_to_string(&mut table).unwrap();
    assert!(run.wait().unwrap().success(), "{rest:?}");
    assert!(table.contains("interrupted") && table.contains("requests/s"), "{table}");
    let figures = details(&json);
    assert_eq!(figures["interrupted"], true);
    let n_rounds = figures["servers"][0]["rounds"].as_array().unwrap().len();
    assert!((2..50).contains(&n_rounds), "{n_rounds}");
}
