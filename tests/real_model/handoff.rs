//! One process computes a prompt, another decodes it, and the reply is the same.

use harness::relay::FaultyRelay;
use harness::{BatonNode, BatonServer, chat, eventually_async, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The route and the reply.
async fn ask(server: &BatonServer, body: &Value) -> (String, Value) {
    ask_with(server, body, "always_handoff").await
}

async fn ask_with(server: &BatonServer, body: &Value, policy: &str) -> (String, Value) {
    let url = format!("{}/v1/chat/completions", server.base);
    let call = reqwest::Client::new().post(url).header("x-baton-policy", policy).json(body);
    let response = call.send().await.unwrap();
    let route = response.headers().get("x-baton-route").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    (route, response.json().await.unwrap())
}

fn text(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{reply}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_computed_elsewhere_gives_the_same_reply() {
    let node = BatonNode::start(&["--role", "prefill"]);
    let [alone, server] = [1, 2].map(|_| BatonServer::start(&["--prefill", &node.url, "--no-calibration"]));
    let body = chat(&long_prompt("handoff", 300), json!({ "max_tokens": 24 }));
    let (direct_route, expected) = ask_with(&alone, &body, "direct").await;
    assert!(direct_route.starts_with("direct; decode=local"), "{direct_route}");
    let (route, reply) = ask(&server, &body).await;
    assert!(route.starts_with("handoff; prefill=prefill-1; decode=local"), "{route}");
    assert_eq!(text(&reply), text(&expected));
    assert_eq!(reply["usage"], expected["usage"]);
    let handoff = &reply["timings"]["handoff"];
    println!("{handoff}");
    let n_prompt = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(handoff["n_tokens"], n_prompt - 1);
    assert_eq!(handoff["failure"], Value::Null);
    assert!(handoff["n_bytes"].as_u64().unwrap() > (n_prompt - 1) * 23_040);
    for work in ["prefill_ms", "export_ms", "transfer_ms", "import_ms"] {
        assert!(handoff[work].as_f64().unwrap() > 0.0, "{work} was done and took time: {handoff}");
    }
    let [hidden, unhidden] = ["during_prefill_ms", "after_prefill_ms"].map(|part| handoff[part].as_f64().unwrap());
    assert!(hidden + unhidden > 0.0, "the transfer is one or the other: {handoff}");

    // The prompt is cached now: nothing is moved or reported as moved.
    let (route, again) = ask(&server, &body).await;
    assert!(route.starts_with("direct; decode=local; policy=always_handoff; reason=cached"), "{route}");
    assert_eq!((text(&again), &again["timings"]["handoff"]), (text(&expected), &Value::Null));
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let url = format!("{}/v1/chat/completions", server.base);
    let call = reqwest::Client::new().post(&url).header("x-baton-policy", "always_handoff").json(&streamed);
    let response = call.send().await.unwrap();
    assert!(response.headers()["x-baton-route"].to_str().unwrap().starts_with("direct; decode=local"));
    response.bytes().await.unwrap();
    let state: Value = reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap();
    println!("{}", state["routes"]);
    let last = state["routes"].as_array().unwrap().iter().map(|r| (&r["reason"], &r["prefill"])).collect::<Vec<_>>();
    assert_eq!(last.iter().filter(|r| **r == (&json!("cached"), &Value::Null)).count(), 2, "{last:?}");

    // A second turn moves only what is new.
    let mut second = body.clone();
    let messages = second["messages"].as_array_mut().unwrap();
    messages.push(json!({ "role": "assistant", "content": text(&reply) }));
    messages.push(json!({ "role": "user", "content": long_prompt("And then", 100) }));
    let (_, reply) = ask(&server, &second).await;
    let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let moved = reply["timings"]["handoff"]["n_tokens"].as_u64().unwrap();
    assert!(cached >= n_prompt - 1, "{reply}");
    assert_eq!(cached + moved + 1, reply["usage"]["prompt_tokens"].as_u64().unwrap());

    // An unknown policy.
    let url = format!("{}/v1/chat/completions", server.base);
    let call = reqwest::Client::new().post(url).header("x-baton-policy", "quickest").json(&body);
    assert_eq!(call.send().await.unwrap().status(), 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_a_seed_or_for_lossless_kv_gets_it_although_the_operator_names_a_lossy_codec() {
    /// SmolLM2's, in f16.
    const BYTES_PER_TOKEN: u64 = 23_040;
    let node = BatonNode::start(&["--role", "prefill"]);
    let server = BatonServer::start(&["--prefill", &node.url, "--no-calibration", "--kv-codecs", "kvq"]);
    let body = |tag: &str, more: Value| chat(&long_prompt(tag, 300), more);
    let ask = async |body: &Value, kv: Option<&str>| {
        let url = format!("{}/v1/chat/completions", server.base);
        let call = reqwest::Client::new().post(url).header("x-baton-policy", "always_handoff").json(body);
        let call = match kv {
            Some(kv) => call.header("x-baton-kv", kv),
            None => call,
        };
        let reply: Value = call.send().await.unwrap().json().await.unwrap();
        let handoff = &reply["timings"]["handoff"];
        assert_eq!(handoff["failure"], Value::Null, "{reply}");
        let [n_tokens, n_bytes] = ["n_tokens", "n_bytes"].map(|field| handoff[field].as_u64().unwrap_or(0));
        (n_tokens, n_bytes)
    };
    let plain = body("plain", json!({}));
    let (n_tokens, n_bytes) = ask(&plain, None).await;
    assert!(n_tokens > 300 && n_bytes * 2 < n_tokens * BYTES_PER_TOKEN, "{n_bytes} bytes of {n_tokens} tokens");
    let seeded = body("seeded", json!({ "seed": 1 }));
    // The last one's slot has what went through the codec.
    for (asked, kv) in [(&seeded, None), (&body("lossless", json!({})), Some("lossless")), (&plain, Some("lossless"))] {
        let (n_tokens, n_bytes) = ask(asked, kv).await;
        assert!(n_tokens > 300 && n_bytes > n_tokens * BYTES_PER_TOKEN, "{n_bytes} bytes of {n_tokens} tokens, {kv:?}");
    }
    assert_eq!(ask(&plain, Some("lossless")).await, (0, 0), "what it has now is exact");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_that_dies_or_freezes_costs_no_reply() {
    let body = |tag: &str| chat(&long_prompt(tag, 600), json!({ "max_tokens": 8 }));
    for (signal, tag, failure) in
        [(Signal::KILL, "killed", "prefill_lost"), (Signal::STOP, "frozen", "prefill_stalled")]
    {
        let node = BatonNode::start(&["--role", "prefill", "--ubatch", "64"]);
        let relay = FaultyRelay::start(&node.url).await;
        let arguments = ["--prefill", &relay.url, "--no-calibration", "--ubatch", "64"];
        let [alone, server] = [1, 2].map(|_| BatonServer::start(&arguments));
        let (_, expected) = ask_with(&alone, &body(tag), "direct").await;
        let request = body(tag);
        let reply = tokio::join!(ask(&server, &request), async {
            eventually_async("KV on the link", async || relay.has_carried_kv()).await;
            node.signal(signal);
        });
        let (route, reply) = reply.0;
        assert_eq!(text(&reply), text(&expected), "{tag}");
        let handoff = &reply["timings"]["handoff"];
        println!("{tag}: {handoff}");
        assert_eq!(handoff["failure"], failure, "{handoff}");
        assert!(route.ends_with(&format!("; failure={failure}")), "{route}");
        node.signal(Signal::CONT);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_computes_nothing_of_a_turn_that_another_node_has_generated() {
    let named = |role| BatonNode::start(&["--role", role, "--name", "smollm2"]);
    let [prefill, decode] = ["prefill", "decode"].map(named);
    let policy = ["--policy", "always_handoff"];
    let server = BatonServer::with(&[&["--prefill", &prefill.url, "--decode", &decode.url], &policy[..]].concat());
    let handoff = async |body: &Value| -> Value {
        let call = reqwest::Client::new().post(format!("{}/baton/plan", server.base)).json(body);
        let plan: Value = call.send().await.unwrap().json().await.unwrap();
        // Until the prefill node has answered, there is no such route.
        let routes = plan["routes"].as_array().into_iter().flatten();
        routes.into_iter().find(|route| !route["prefill"].is_null()).cloned().unwrap_or_default()
    };
    let first = chat(&long_prompt("both ways", 300), json!({ "max_tokens": 24 }));
    // What returns need to know: the node's rate, and the link's.
    eventually_async("measured rates", async || !handoff(&first).await["prediction"].is_null()).await;
    let (route, reply) = ask(&server, &first).await;
    assert!(route.starts_with("handoff"), "{route}");
    let n_turn = reply["usage"]["total_tokens"].as_u64().unwrap();
    let mut second = first.clone();
    let messages = second["messages"].as_array_mut().unwrap();
    messages.push(json!({ "role": "assistant", "content": text(&reply) }));
    messages.push(json!({ "role": "user", "content": "And then?" }));
    eventually_async("the reply's KV", async || {
        handoff(&second).await["cached_on_prefill"].as_u64() >= Some(n_turn - 8)
    })
    .await;
    let (_, reply) = ask(&server, &second).await;
    let (report, n_prompt) = (&reply["timings"]["handoff"], reply["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!(report["failure"], Value::Null, "{report}");
    // The last token of the reply was never computed.
    assert_eq!([&report["n_cached"], &report["n_computed"]], [n_turn - 1, n_prompt - n_turn], "{report}");
}
