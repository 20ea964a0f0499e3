//! A request that kills engines costs two of them at most, and costs nobody else anything.

use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::join_all;
use harness::{BatonNode, BatonServer, SseReply, chat, long_prompt};
use serde_json::{Value, json};

/// The text on which the nodes abort.
const POISON: &str = "POISON";

/// Simulated nodes that abort during this work on the poison.
fn nodes(n: usize, work: &str, args: &[&str]) -> Vec<BatonNode> {
    let fault = format!("{work}:{POISON}");
    let args = [&["--engine", "sim", "--sim-prefill-tps", "20000", "--sim-decode-tps", "100", "--slots", "16"], args];
    let args = args.concat();
    (0..n).map(|_| BatonNode::with_variables(&args, &[("BATON_SIM_ABORT", &fault)])).collect()
}

fn serve(decode: &[BatonNode], more: &[&str]) -> BatonServer {
    let decode = decode.iter().flat_map(|node| ["--decode", &node.url]);
    let args: Vec<&str> = decode.chain(more.iter().copied()).chain(["--no-calibration"]).collect();
    BatonServer::with(&args)
}

fn n_running(nodes: &mut [BatonNode]) -> usize {
    nodes.iter_mut().filter_map(|node| node.is_running().then_some(())).count()
}

fn innocent(i: usize) -> Value {
    chat(&long_prompt(&format!("innocent {i}"), 20), json!({ "model": "sim", "max_tokens": 200, "ignore_eos": true }))
}

fn poison() -> Value {
    chat(POISON, json!({ "model": "sim", "max_tokens": 20, "ignore_eos": true }))
}

fn code(reply: &(u16, Value)) -> (u16, &str) {
    (reply.0, reply.1["error"]["code"].as_str().unwrap_or_default())
}

async fn n_poisoned(server: &BatonServer) -> Value {
    server.state().await["models"][0]["fallbacks"]["poison"]["count"].clone()
}

/// One poison request among eight streams on four nodes.
async fn check_among_streams(work: &str) {
    let mut nodes = nodes(4, work, &[]);
    let server = serve(&nodes, &["--policy", "round_robin"]);
    let undisturbed = join_all((0..8).map(async |i| server.post("/v1/chat/completions", &innocent(i)).await.1)).await;
    let streams = join_all((0..8).map(async |i| {
        let mut reply = SseReply::open(&server, &innocent(i)).await;
        reply.read_pieces(20).await;
        reply
    }));
    let streams = streams.await;
    let rest = join_all(streams.into_iter().map(|stream| stream.whole()));
    let body = poison();
    let (rest, reply) = tokio::join!(rest, server.post("/v1/chat/completions", &body));
    assert_eq!(code(&reply), (500, "poison_request"), "{work}: {reply:?}");
    for (i, reply) in rest.iter().enumerate() {
        let expected = undisturbed[i]["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!((reply.content.as_str(), reply.n_completion), (expected, 200), "{work} {i}");
    }
    assert_eq!((n_running(&mut nodes), n_poisoned(&server).await), (2, json!(1)), "{work}");
    assert_eq!(server.post("/v1/chat/completions", &innocent(9)).await.0, 200, "{work}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poison_request_costs_two_nodes_and_no_stream() {
    check_among_streams("tokenize").await;
    check_among_streams("prefill").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_loop_poison_cost_innocent_requests_nothing() {
    for work in ["prefill", "decode"] {
        let mut nodes = nodes(8, work, &[]);
        let server = serve(&nodes, &[]);
        let is_over = AtomicBool::new(false);
        let loops = async {
            for _ in 0..3 {
                let reply = server.post("/v1/chat/completions", &poison()).await;
                assert_eq!(code(&reply), (500, "poison_request"), "{work}: {reply:?}");
            }
            is_over.store(true, Ordering::Release);
        };
        let innocents = join_all((0..6).map(async |i| {
            while !is_over.load(Ordering::Acquire) {
                let body =
                    chat(&format!("innocent {i}"), json!({ "model": "sim", "max_tokens": 40, "ignore_eos": true }));
                let reply = server.post("/v1/chat/completions", &body).await;
                assert_eq!(reply.0, 200, "{work}: {reply:?}");
            }
        }));
        tokio::join!(loops, innocents);
        assert_eq!((n_running(&mut nodes), n_poisoned(&server).await), (2, json!(3)), "{work}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_kills_its_engine_while_it_generates_costs_two_nodes_and_no_stream() {
    let mut nodes = nodes(4, "decode", &[]);
    let server = serve(&nodes, &[]);
    let stream = SseReply::open(&server, &poison()).await;
    let body = innocent(0);
    let (reply, other) = tokio::join!(stream.rest(), server.post("/v1/chat/completions", &body));
    assert!(reply.contains("poison_request") && !reply.contains("[DONE]"), "{reply}");
    assert_eq!(other.0, 200, "{other:?}");
    assert_eq!((n_running(&mut nodes), n_poisoned(&server).await), (2, json!(1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_that_kill_nodes_while_they_are_counted_or_embedded_cost_two() {
    let embed = json!({ "model": "sim", "input": ["one", POISON, "three"] });
    let calls = [
        ("tokenize", "/tokenize", json!({ "content": POISON })),
        ("tokenize", "/v1/messages/count_tokens", poison()),
        ("tokenize", "/apply-template", poison()),
        ("tokenize", "/baton/plan", poison()),
        ("tokenize", "/v1/embeddings", embed.clone()),
        ("embed", "/v1/embeddings", embed),
    ];
    for (work, path, body) in calls {
        let mut nodes = nodes(3, work, &[]);
        let server = serve(&nodes, &[]);
        let (status, reply) = server.post(path, &body).await;
        assert_eq!(status, 500, "{path}: {reply}");
        assert!(reply.to_string().contains("2 engine processes ended"), "{path}: {reply}");
        assert_eq!((n_running(&mut nodes), n_poisoned(&server).await), (1, json!(1)), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_that_dies_of_a_prompt_counts() {
    let mut prefill = nodes(2, "prefill", &["--role", "prefill"]);
    let mut decode = nodes(2, "prefill", &["--role", "decode"]);
    let more = ["--prefill", &prefill[0].url, "--prefill", &prefill[1].url, "--policy", "always_handoff"];
    let server = serve(&decode, &more);
    let reply = server.post("/v1/chat/completions", &poison()).await;
    assert_eq!(code(&reply), (500, "poison_request"), "{reply:?}");
    assert_eq!((n_running(&mut prefill), n_running(&mut decode)), (1, 1));
    assert_eq!(server.post("/v1/chat/completions", &innocent(0)).await.0, 200);
}
