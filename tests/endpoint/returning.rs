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

/// The body of the next turn.
fn next_turn(body: &Value, reply: &Value) -> Value {
    let mut next = body.clone();
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(reply["choices"][0]["message"].clone());
    messages.push(json!({ "role": "user", "content": "And then?" }));
    next
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_computes_nothing_of_a_turn_that_was_generated_elsewhere() {
    let node =
        |role| BatonNode::with(&["--engine", "sim", "--name", "sim", "--role", role, "--sim-prefill-tps", "500"]);
    let [prefill, decode] = ["prefill", "decode"].map(node);
    let server = BatonServer::with(&["--prefill", &prefill.url, "--decode", &decode.url]);
    let handoff = async |body: &Value| -> Value {
        let plan = post(&server, "/baton/plan", "always_handoff", body).await.json::<Value>().await.unwrap();
        plan["routes"].as_array().unwrap().iter().find(|route| !route["prefill"].is_null()).cloned().unwrap_or_default()
    };
    let mut first = body(0);
    first["max_tokens"] = json!(40);
    eventually_async("measured rates", async || !handoff(&first).await["prediction"].is_null()).await;
    let ask = async |body: &Value| -> Value {
        let reply = post(&server, "/v1/chat/completions", "always_handoff", body).await.json::<Value>().await.unwrap();
        assert!(reply["timings"]["handoff"]["failure"].is_null(), "{reply}");
        reply
    };
    let reply = ask(&first).await;
    let n_turn = reply["usage"]["total_tokens"].as_u64().unwrap();
    let second = next_turn(&first, &reply);
    eventually_async("the reply's KV", async || {
        // The last token was never computed, and hashes are those of 8 tokens.
        handoff(&second).await["cached_on_prefill"].as_u64() >= Some(n_turn - 8)
    })
    .await;
    let reply = ask(&second).await;
    let n_prompt = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    let report = &reply["timings"]["handoff"];
    let (n_old, n_new) = (n_turn - 1, n_prompt - n_turn);
    assert_eq!([&report["n_cached"], &report["n_computed"]], [n_old, n_new], "{report}");
}
