//! Conversations return to the machine that holds their KV, also through an endpoint that did not begin them.

use harness::{BatonNode, BatonServer, chat, eventually_async, long_prompt};
use serde_json::{Value, json};

fn body(i: usize) -> Value {
    chat(&long_prompt(&format!("conversation {i}"), 300), json!({ "model": "sim", "max_tokens": 4 }))
}

async fn post(server: &BatonServer, path: &str, policy: &str, body: &Value) -> reqwest::Response {
    let call = reqwest::Client::new().post(format!("{}{path}", server.base)).header("x-baton-policy", policy);
    call.json(body).send().await.unwrap()
}

/// The node that generated a reply.
async fn decode_node(server: &BatonServer, policy: &str, i: usize) -> String {
    let reply = post(server, "/v1/chat/completions", policy, &body(i)).await;
    let route = reply.headers()["x-baton-route"].to_str().unwrap().to_owned();
    reply.text().await.unwrap();
    route.split("; ").find_map(|part| part.strip_prefix("decode=")).unwrap_or_else(|| panic!("{route}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_returns_to_the_node_that_holds_it_through_an_endpoint_that_did_not_begin_it() {
    let node = || BatonNode::with(&["--engine", "sim", "--name", "sim", "--sim-prefill-tps", "5000", "--slots", "8"]);
    let [one, two] = [node(), node()];
    let endpoint = || BatonServer::with(&["--decode", &one.url, "--decode", &two.url, "--no-calibration"]);
    let first = endpoint();
    let mut holders = Vec::new();
    for i in 0..6 {
        holders.push(decode_node(&first, "round_robin", i).await);
    }
    assert!(holders.iter().any(|name| *name != holders[0]), "both nodes hold some: {holders:?}");
    drop(first);

    let second = endpoint();
    for (i, holder) in holders.iter().enumerate() {
        eventually_async("the list of what the nodes hold", || async {
            let plan = post(&second, "/baton/plan", "fastest", &body(i)).await.json::<Value>().await.unwrap();
            let n_prompt = plan["n_prompt"].as_u64().unwrap();
            let is_known = |route: &Value| route["cached_on_decode"].as_u64().unwrap() >= n_prompt - 8;
            plan["routes"].as_array().unwrap().iter().any(is_known)
        })
        .await;
        assert_eq!(decode_node(&second, "fastest", i).await, *holder, "conversation {i}");
    }
}
