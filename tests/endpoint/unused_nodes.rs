//! What the state, `baton status`, the log and the metrics say of nodes that are not used, and of nodes that are lost.

use std::process::Command;

use harness::{BATON, BatonNode, BatonServer, SseReply, chat, eventually_async};
use rustix::process::Signal;
use serde_json::{Value, json};

const SIM: [&str; 2] = ["--engine", "sim"];

fn status(server: &BatonServer) -> String {
    let output = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// A row of a table of `baton status`: the one that starts with these cells.
fn row(status: &str, cells: &[&str]) -> String {
    let is_it = |line: &&str| line.split_whitespace().zip(cells).filter(|(a, b)| a == *b).count() == cells.len();
    status.lines().find(is_it).unwrap_or_else(|| panic!("no {cells:?} in {status}")).to_owned()
}

/// The report of a node's task.
fn node(state: &Value, name: &str, task: &str) -> Value {
    let nodes = state["models"][0]["nodes"].as_array().unwrap();
    let is_it = |node: &&Value| node["name"] == name && node["task"] == task;
    nodes.iter().find(is_it).unwrap_or_else(|| panic!("no {name} in {state}")).clone()
}

fn other_model() -> BatonNode {
    let machine = json!({
        "name": "machine", "prefill_tps": 1e4, "decode_tps": 1e3, "decode_sharing_cost": 0.0, "kv_bytes_per_token": 512,
        "link_bytes_per_second": 1e9, "link_round_trip_ms": 0.0,
    });
    let machine = machine.to_string();
    BatonNode::with(&["--engine", "sim", "--name", "other", "--role", "prefill", "--sim-machine", &machine])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_that_cannot_work_says_so_at_once_in_the_log_and_in_status_with_what_to_do() {
    let (other, prefills) = (other_model(), BatonNode::with(&["--engine", "sim", "--role", "prefill"]));
    let weights = BatonNode::with(&["--engine", "sim", "--name", "quantized", "--role", "prefill"]);
    let own: &[&str] = &["--engine", "sim", "--policy", "always_handoff"];
    // Another model, a node that only computes prompts and is to generate (alone, and beside an engine), other weights.
    let cases: [(&[&str], &[&str], &str, &str); 5] = [
        (own, &["--prefill", &other.url], "no node generates with that model", "it runs another model"),
        (own, &["--decode", &prefills.url], "Name it with --prefill", "its role excludes this task"),
        (&[], &["--decode", &prefills.url], "Name it with --prefill", "its role excludes this task"),
        (own, &["--prefill", &weights.url], "Start it with the same file", "it runs other weights"),
        // The second node, which does not generate, takes no KV.
        (
            own,
            &["--prefill", &weights.url, "--decode", &prefills.url],
            "Start it with the same file",
            "it runs other weights",
        ),
    ];
    for (model, nodes, warning, in_row) in cases {
        let log = tempfile::NamedTempFile::new().unwrap();
        let args = [model, nodes, &["--no-calibration"]].concat();
        let server = BatonServer::logging_to(log.reopen().unwrap(), &args);
        let is_said = async || {
            let text = status(&server);
            let is_warned = text.lines().any(|line| line.starts_with("WARNING") && line.contains(warning));
            let state = server.state().await;
            let mut nodes =
                state["models"].as_array().unwrap().iter().flat_map(|model| model["nodes"].as_array().unwrap());
            let is_on_card = nodes.any(|node| node["unused"].as_str().is_some_and(|why| why.contains(warning)));
            let is_logged = std::fs::read_to_string(log.path()).unwrap().contains(warning);
            is_warned && is_on_card && is_logged && text.contains(in_row)
        };
        eventually_async(warning, is_said).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_machine_keeps_its_own_model_and_one_that_never_answered_has_none() {
    let other = other_model();
    let nodes = ["--prefill", &other.url, "--prefill", "http://127.0.0.1:9"];
    let server = BatonServer::with(&[&SIM[..], &nodes, &["--no-calibration"]].concat());
    let report = async |name: &str, life: &str| {
        let is_it = async || node(&server.state().await, name, "prefill")["life"] == life;
        eventually_async(&format!("{name} is {life}"), is_it).await;
        node(&server.state().await, name, "prefill")
    };
    let before = report("prefill-1", "ready").await;
    assert!(before["slots"].as_u64().unwrap() > 0, "{before}");
    other.signal(Signal::KILL);
    let lost = report("prefill-1", "down").await;
    for fact in ["model", "engine", "simulated", "devices", "n_ctx", "has_answered", "unused_reason"] {
        assert_eq!(lost[fact], before[fact], "{fact}");
    }
    assert_eq!(
        (&lost["model"], &lost["unused_reason"], &lost["slots"]),
        (&json!("other"), &json!("other_model"), &json!(0))
    );
    let unknown = report("prefill-2", "down").await;
    assert_eq!((&unknown["model"], &unknown["has_answered"]), (&json!(""), &json!(false)), "{unknown}");
    // The links agree with the cards.
    let links = server.state().await["models"][0]["links"].clone();
    assert_eq!(
        (&links[0]["unused_reason"], &links[1]["unused_reason"]),
        (&json!("other_model"), &Value::Null),
        "{links}"
    );
    let text = status(&server);
    assert!(row(&text, &["prefill-1", "prefill"]).contains("lost: "), "{text}");
    assert!(row(&text, &["prefill-2", "prefill"]).contains("no answer yet: "), "{text}");
    assert!(row(&text, &["prefill-1", ">", "local"]).contains("not used: it runs another model"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_stopped_is_called_that_as_long_as_it_is_away() {
    let stopped = BatonNode::with(&[&SIM[..], &["--role", "prefill"]].concat());
    let log = tempfile::NamedTempFile::new().unwrap();
    let args = [&SIM[..], &["--prefill", &stopped.url, "--no-calibration"]].concat();
    let server = BatonServer::logging_to(log.reopen().unwrap(), &args);
    let said = || row(&status(&server), &["prefill-1", "prefill"]);
    eventually_async("the node", async || said().contains(" ready ")).await;
    stopped.signal(Signal::TERM);
    eventually_async("its end", async || said().contains("lost: ")).await;
    // Questions that it does not answer say less.
    for _ in 0..3 {
        assert!(said().contains("lost: the node was stopped"), "{}", said());
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
    let logged = std::fs::read_to_string(log.path()).unwrap();
    assert!(logged.contains("cannot be used: the node was stopped"), "{logged}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_another_cluster_key_says_everywhere_what_to_do() {
    let other = BatonNode::with_key("another cluster key", &[&SIM[..], &["--role", "prefill"]].concat());
    let log = tempfile::NamedTempFile::new().unwrap();
    let args = [&SIM[..], &["--prefill", &other.url, "--no-calibration"]].concat();
    let server = BatonServer::logging_to(log.reopen().unwrap(), &args);
    let what_to_do = "with the same BATON_CLUSTER_KEY";
    let is_said = async || {
        let (text, state) = (status(&server), server.state().await);
        let card = node(&state, "prefill-1", "prefill");
        let link = &state["models"][0]["links"][0]["unused_reason"];
        text.lines().any(|line| line.starts_with("WARNING prefill-1") && line.contains(what_to_do))
            && row(&text, &["prefill-1", "prefill"]).contains(what_to_do)
            && row(&text, &["prefill-1", ">", "local"]).contains(what_to_do)
            && card["unused"].as_str().is_some_and(|why| why.contains(what_to_do))
            && (&card["unused_reason"], link) == (&json!("key_refused"), &json!("key_refused"))
            && std::fs::read_to_string(log.path()).unwrap().contains(what_to_do)
    };
    eventually_async("what to do", is_said).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_cannot_generate_is_not_up_and_its_model_says_why() {
    let prefills = BatonNode::with(&[&SIM[..], &["--role", "prefill"]].concat());
    let server = BatonServer::with(&["--decode", &prefills.url, "--prefill", &prefills.url, "--no-calibration"]);
    let reasons = async || {
        let state = server.state().await;
        ["decode", "prefill"].map(|task| node(&state, "decode-1", task)["unused_reason"].clone())
    };
    let expected = [json!("wrong_role"), json!("no_decode_node")];
    eventually_async("the node's answer", async || reasons().await == expected).await;
    let (code, reply) = server.post("/v1/chat/completions", &chat("hello", json!({ "model": "sim" }))).await;
    assert_eq!(code, 503, "{reply}");
    assert!(reply.to_string().contains("only compute prompts (--role prefill)"), "{reply}");
    let metrics = server.get_text("/metrics").await;
    let is_up = metrics.lines().filter(|line| line.starts_with("baton_node_up{"));
    assert_eq!(is_up.filter(|line| line.ends_with(" 0.0")).count(), 2, "{metrics}");
    // It hands nothing over to itself.
    assert_eq!(server.state().await["models"][0]["links"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_moved_says_where() {
    let slow = [&SIM[..], &["--sim-decode-tps", "50"]].concat();
    let nodes = [BatonNode::with(&slow), BatonNode::with(&slow)];
    let server = BatonServer::with(&["--decode", &nodes[0].url, "--decode", &nodes[1].url, "--no-calibration"]);
    let mut reply =
        SseReply::open(&server, &chat("hello", json!({ "model": "sim", "max_tokens": 100, "ignore_eos": true }))).await;
    reply.read_pieces(20).await;
    let began = server.state().await["open"][0]["decode"].as_str().unwrap().to_owned();
    let (lost, other) = if began == "decode-1" { (&nodes[0], "decode-2") } else { (&nodes[1], "decode-1") };
    lost.signal(Signal::KILL);
    assert_eq!(reply.whole().await.n_completion, 100);
    eventually_async("the record", async || server.state().await["routes"][0].is_object()).await;
    let route = server.state().await["routes"][0].clone();
    assert_eq!((&route["decode"], &route["moved_to"]), (&json!(began), &json!(other)), "{route}");
    assert!(status(&server).contains(&format!("done, moved to {other}")), "{}", status(&server));
}
