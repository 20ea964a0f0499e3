//! Two machines that prefill and two that decode, under load, with one model and with two. Every machine works, prompts
//! are computed while replies are generated, and neither model waits for the other's.

use std::collections::BTreeMap;
use std::pin::pin;

use futures::future::join_all;
use harness::{BatonNode, BatonServer, chat, eventually_async, long_prompt};
use serde_json::{Value, json};

/// Tokens of a reply, which take more than half a second.
const N_TOKENS: u32 = 30;

/// Requests of each model that run at once.
const N_REQUESTS: usize = 12;

/// Loads of which one must be spread over all machines.
const N_LOADS: usize = 4;

/// A node that prefills eight times as fast as the decode nodes.
fn prefill(model: &str) -> BatonNode {
    machine(model, ["--role", "prefill", "--sim-prefill-tps", "4000"])
}

fn decode(model: &str) -> BatonNode {
    machine(model, ["--role", "decode", "--sim-prefill-tps", "500"])
}

fn machine(model: &str, args: [&str; 4]) -> BatonNode {
    BatonNode::with(
        &[&["--engine", "sim", "--name", model, "--slots", "8", "--sim-decode-tps", "50"], &args[..]].concat(),
    )
}

/// An endpoint for these nodes that has measured each node and each link.
async fn endpoint(prefill: &[BatonNode; 2], decode: &[BatonNode; 2], models: &[&str]) -> BatonServer {
    let nodes = ["--prefill", &prefill[0].url, "--prefill", &prefill[1].url];
    let server = BatonServer::with(&[&nodes[..], &["--decode", &decode[0].url, "--decode", &decode[1].url]].concat());
    for model in models {
        eventually_async("predictions of every route", || async {
            let plan = reqwest::Client::new().post(format!("{}/baton/plan", server.base)).json(&body(model, "plan"));
            let plan: Value = plan.send().await.unwrap().json().await.unwrap();
            let routes = plan["routes"].as_array().cloned().unwrap_or_default();
            let is_known = |route: &Value| route["prediction"].is_object() || route["unused_reason"].is_string();
            // One route for each pair, and the direct ones.
            routes.len() > 1 && routes.iter().all(is_known) && routes.iter().any(|route| route["prefill"].is_string())
        })
        .await;
    }
    server
}

fn body(model: &str, tag: &str) -> Value {
    let prompt = long_prompt(&format!("{model} {tag}"), 300);
    chat(&prompt, json!({ "model": model, "max_tokens": N_TOKENS, "ignore_eos": true }))
}

/// Sends all requests of all models at once, with prompts that no other load has. Returns the model and the route of each
/// reply.
async fn load(server: &BatonServer, models: &[&str], tag: &str) -> Vec<(String, BTreeMap<String, String>)> {
    let request = |i, model| (model, body(model, &format!("{tag} {i}")));
    let bodies = (0..N_REQUESTS).flat_map(|i| models.iter().map(move |model| request(i, *model)));
    let one = async |(model, body): (&str, Value)| {
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        let response = call.send().await.unwrap();
        let route = response.headers()["x-baton-route"].to_str().unwrap().to_owned();
        let reply: Value = response.json().await.unwrap();
        assert_eq!(reply["usage"]["completion_tokens"], N_TOKENS, "{reply}");
        let parts = route.split("; ").filter_map(|part| part.split_once('='));
        (model.to_owned(), parts.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    };
    join_all(bodies.map(one)).await
}

/// Counts replies by the value of one part of their route.
fn count(replies: &[(String, BTreeMap<String, String>)], part: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for (_, route) in replies {
        *counts.entry(route.get(part).cloned().unwrap_or_default()).or_default() += 1;
    }
    counts
}

/// Returns once a prompt is computed while a reply is generated.
async fn overlap(server: &BatonServer) {
    eventually_async("a prompt to be computed while a reply is generated", || async {
        let state = server.state().await;
        let nodes = state["models"][0]["nodes"].as_array().cloned().unwrap_or_default();
        let is_busy = |kind: &str| {
            nodes.iter().any(|node| node["name"].as_str().unwrap().starts_with(kind) && node["active_slots"] != 0)
        };
        is_busy("prefill") && is_busy("decode")
    })
    .await;
}

/// Runs a load, and returns its replies and whether a prompt was computed while a reply was generated.
async fn watched_load(server: &BatonServer, tag: &str) -> (Vec<(String, BTreeMap<String, String>)>, bool) {
    let mut load = pin!(load(server, &["sim"], tag));
    tokio::select! {
        replies = &mut load => (replies, false),
        () = overlap(server) => (load.await, true),
    }
}

/// The machines of a load that got less than a quarter of its requests, and what each got.
fn idle_machines(replies: &[(String, BTreeMap<String, String>)]) -> Vec<String> {
    let mut idle = Vec::new();
    for (part, names) in [("prefill", ["prefill-1", "prefill-2"]), ("decode", ["decode-1", "decode-2"])] {
        let counts = count(replies, part);
        let is_idle = |name: &&str| counts.get(*name).is_none_or(|n| *n < N_REQUESTS / 4);
        idle.extend(names.into_iter().filter(is_idle).map(|name| format!("{name}: {counts:?}")));
    }
    idle
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_and_replies_of_one_model_are_spread_over_two_machines_each() {
    let prefill = [prefill("sim"), prefill("sim")];
    let decode = [decode("sim"), decode("sim")];
    let server = endpoint(&prefill, &decode, &["sim"]).await;
    // A node that was slow for a moment, because this machine is busy, gets less until its rate is measured anew.
    let mut seen = Vec::new();
    for i in 0..N_LOADS {
        let (replies, overlapped) = watched_load(&server, &format!("load {i}")).await;
        let idle = idle_machines(&replies);
        if overlapped && idle.is_empty() {
            return;
        }
        seen.push((overlapped, idle));
    }
    panic!("in no load were prompts computed beside replies, with every machine at work: {seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_models_are_served_side_by_side_each_by_its_own_machines() {
    let prefill = [prefill("one"), prefill("two")];
    let decode = [decode("one"), decode("two")];
    let server = endpoint(&prefill, &decode, &["one", "two"]).await;
    let replies = load(&server, &["one", "two"], "load").await;
    for (model, machine) in [("one", "1"), ("two", "2")] {
        let of_model: Vec<_> = replies.iter().filter(|(of, _)| of == model).cloned().collect();
        assert_eq!(of_model.len(), N_REQUESTS);
        let decode = count(&of_model, "decode");
        assert_eq!(decode.get(&format!("decode-{machine}")), Some(&N_REQUESTS), "{model}: {decode:?}");
        // So many prompts wait for one prefill node that a few may complete sooner elsewhere.
        let prefill = count(&of_model, "prefill");
        let n_handed_over = prefill.get(&format!("prefill-{machine}")).copied().unwrap_or_default();
        assert!(n_handed_over > N_REQUESTS / 2, "{model}: {prefill:?}");
    }
}
