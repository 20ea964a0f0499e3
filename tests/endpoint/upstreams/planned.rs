//! Upstreams are planned by what requests have shown of them: their speed, and the conversations that they have.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Duration;

use harness::mock::{Mock, MockRequest, Step, event, head, says, text, whole};
use harness::{Answer, BatonNode, ReloadableServer, said, upstream};
use serde_json::{Value, json};

/// The first token of the slower upstream. Long beside what a busy machine adds.
const SLOW: Duration = Duration::from_millis(1_500);

/// Each upstream is measured by its second reply: the first one may have loaded the model.
const N_MEASURING: usize = 4;

async fn slow_and_fast() -> (Mock, Mock) {
    let slow = Mock::start(|_, _| [&[head(), Step::Wait(SLOW)][..], &says("slow")[1..]].concat()).await;
    (slow, Mock::start(|_, _| says("fast")).await)
}

async fn plan(front: &ReloadableServer) -> Value {
    let answer = front.post("/baton/plan", &said("hi", json!({}))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_faster_upstream_gets_the_requests_and_the_plan_says_why() {
    let (slow, fast) = slow_and_fast().await;
    let config = upstream("slow", "openai", &slow.url, "") + &upstream("fast", "openai", &fast.url, "");
    let front = ReloadableServer::start(&config);
    let before = plan(&front).await;
    assert_eq!(
        (&before["reason"], before["routes"].as_array().unwrap().len()),
        (&json!("rates_unknown"), 2),
        "{before}"
    );
    for _ in 0..N_MEASURING {
        let answer = front.chat(json!({})).await;
        assert!(answer.route.contains("reason=rates_unknown"), "{answer:?}");
    }
    assert_eq!((slow.n_asked(), fast.n_asked()), (2, 2), "one request at a time tries what is not measured");
    for _ in 0..6 {
        let answer = front.chat(json!({})).await;
        assert!(answer.route.starts_with("upstream; upstream=fast; reason=least_time; ttft_ms="), "{answer:?}");
    }
    let plan = plan(&front).await;
    let [slower, faster] = [&plan["routes"][0], &plan["routes"][1]];
    assert_eq!(
        (&plan["reason"], &faster["chosen"], &slower["chosen"]),
        (&json!("least_time"), &json!(true), &json!(false))
    );
    assert_eq!((&faster["kind"], &faster["decode"]), (&json!("upstream"), &json!("fast")), "{plan}");
    let ttft = |route: &Value| route["prediction"]["ttft_ms"].as_f64().unwrap();
    assert!(ttft(slower) > ttft(faster), "{plan}");
    let state = front.get("/baton/state").await;
    let measured = |i: usize| state["upstreams"][i]["measured"][0].clone();
    assert_eq!((&measured(0)["replies"], &measured(1)["replies"]), (&json!(2), &json!(8)), "{state}");
    let constant_ms = |i: usize| measured(i)["constant_ms"].as_f64().unwrap();
    assert!(constant_ms(0) >= SLOW.as_millis() as f64 && constant_ms(1) > 0.0, "{state}");
    let metrics = front.server.get_text("/metrics").await;
    for name in ["slow", "fast"] {
        let series = format!("baton_upstream_constant_seconds{{upstream=\"{name}\",model=\"m\"}} ");
        assert!(metrics.contains(&series), "{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_is_busy_or_lost_is_left_out_and_the_plan_names_it() {
    let busy = Mock::start(|_, _| whole(429, "retry-after: 60\r\n", &json!({}))).await;
    let well = Mock::start(|_, _| says("well")).await;
    let config = upstream("busy", "openai", &busy.url, "") + &upstream("well", "openai", &well.url, "");
    let front = ReloadableServer::start(&config);
    for _ in 0..4 {
        assert_eq!(front.chat(json!({})).await.content(), "well");
    }
    assert_eq!(busy.n_asked(), 1, "and not before its minute is over");
    let plan = plan(&front).await;
    assert_eq!(
        (&plan["reason"], &plan["routes"][0]["unused_reason"]),
        (&json!("only_route"), &json!("busy")),
        "{plan}"
    );
}

/// A server that computes a prompt that it has not seen for as long as the slow one, and reports what it had cached.
async fn caching() -> Mock {
    let seen: Mutex<HashSet<String>> = Mutex::default();
    let script = move |_: usize, asked: &MockRequest| {
        let first = asked.body["messages"][0]["content"].as_str().unwrap_or_default().to_owned();
        let is_known = !seen.lock().unwrap().insert(first);
        let usage = json!({
            "prompt_tokens": 2_000, "completion_tokens": 1,
            "prompt_tokens_details": { "cached_tokens": if is_known { 1_950 } else { 0 } },
        });
        let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }], "usage": usage });
        let wait = if is_known { Duration::ZERO } else { SLOW };
        vec![head(), Step::Wait(wait), text("so"), event(&end), Step::Send("data: [DONE]\n\n".into())]
    };
    Mock::start(script).await
}

/// The next turn of a conversation.
async fn turn(front: &ReloadableServer, name: &str, n_before: usize) -> Answer {
    let mut messages = vec![json!({ "role": "user", "content": format!("{name} ").repeat(8_000 / (name.len() + 1)) })];
    for _ in 0..n_before {
        messages
            .extend([json!({ "role": "assistant", "content": "so" }), json!({ "role": "user", "content": "and?" })]);
    }
    front.post("/v1/chat/completions", &json!({ "model": "m", "messages": messages })).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_returns_to_the_upstream_that_has_it() {
    let (one, two) = (caching().await, caching().await);
    let config = upstream("one", "openai", &one.url, "") + &upstream("two", "openai", &two.url, "");
    let front = ReloadableServer::start(&config);
    for i in 0..N_MEASURING {
        turn(&front, &format!("measuring {i}"), 0).await;
    }
    for name in ["first", "second", "third"] {
        let home = |answer: &Answer| answer.route.split("; ").nth(1).unwrap().to_owned();
        let begun = home(&turn(&front, name, 0).await);
        for n_before in 1..4 {
            let answer = turn(&front, name, n_before).await;
            assert_eq!(home(&answer), begun, "{name} {n_before}: {answer:?}");
        }
    }
    assert_eq!(one.n_asked() + two.n_asked(), N_MEASURING + 12, "each request is sent once");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_upstream_that_can_do_what_is_needed_gets_the_request() {
    let (plain, able) = (Mock::start(|_, _| says("plain")).await, Mock::start(|_, _| says("able")).await);
    let list = |words: Value, n_ctx: u32| json!({ "data": [{ "id": "theirs", "capabilities": words, "context_length": n_ctx }] });
    plain.list_as(list(json!({ "function_calling": false }), 1_000));
    able.list_as(list(json!({ "function_calling": true }), 100_000));
    let config = upstream("plain", "openai", &plain.url, "") + &upstream("able", "openai", &able.url, "");
    let front = ReloadableServer::start(&config);
    let tool = json!({ "type": "function", "function": { "name": "look", "parameters": { "type": "object" } } });
    let with_tools = said("hi", json!({ "tools": [tool] }));
    harness::eventually_async("both lists", async || {
        let plan = front.post("/baton/plan", &with_tools).await.json();
        plan["routes"][0]["unused_reason"] == "no_tools" && plan["routes"][1]["unused_reason"].is_null()
    })
    .await;
    for body in [&with_tools, &said(&"word ".repeat(2_000), json!({}))] {
        for _ in 0..3 {
            let answer = front.post("/v1/chat/completions", body).await;
            assert_eq!(answer.content(), "able", "{answer:?}");
        }
    }
    assert_eq!(plain.n_asked(), 0);
    let alone = ReloadableServer::start(&upstream("plain", "openai", &plain.url, "capabilities = [\"embeddings\"]\n"));
    let answer = alone.post("/v1/chat/completions", &with_tools).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("tools")), "{answer:?}");
    let documents = json!({ "model": "m", "query": "q", "documents": ["d"] });
    assert_eq!(alone.post("/v1/rerank", &documents).await.status, 501);
}

/// A node that generates two tokens a second, and an upstream that serves the same model at once.
fn beside_a_node(node: &BatonNode, mock: &Mock, more: &str) -> ReloadableServer {
    let config = format!("[model]\nname = \"m\"\ndecode = [\"{}\"]\n", node.url);
    ReloadableServer::start(&(config + &upstream("peer", "openai", &mock.url, more)))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_serves_the_same_model_is_planned_beside_its_nodes() {
    let node = BatonNode::with(&["--engine", "sim", "--sim-decode-tps", "2"]);
    let mock = Mock::start(|_, _| says("from the peer")).await;
    let front = beside_a_node(&node, &mock, "models = { m = \"theirs\" }\nsame_models = true\n");
    let routes = async || plan(&front).await["routes"].as_array().cloned().unwrap_or_default();
    harness::eventually_async("the node's measured speed", async || {
        let routes = routes().await;
        routes.len() == 2 && routes[0]["prediction"].is_object()
    })
    .await;
    for _ in 0..4 {
        let answer = front.chat(json!({ "max_tokens": 4 })).await;
        assert_eq!(answer.content(), "from the peer", "{answer:?}");
    }
    let answer = front.chat(json!({ "max_tokens": 4 })).await;
    assert!(answer.route.starts_with("upstream; upstream=peer; reason=least_time"), "{answer:?}");
    // Whoever answers, it is usage of the key.
    harness::eventually_async("the usage", async || {
        let metrics = front.server.get_text("/metrics").await;
        metrics.lines().any(|line| line == "baton_key_requests_total{key=\"anyone\",model=\"m\"} 5")
    })
    .await;
    let plan = plan(&front).await;
    assert_eq!((&plan["routes"][0]["kind"], &plan["routes"][1]["chosen"]), (&json!("direct"), &json!(true)), "{plan}");
    // A policy about nodes keeps the request on them.
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", front.server.base));
    let direct =
        call.header("x-baton-policy", "direct").json(&said("hi", json!({ "max_tokens": 1 }))).send().await.unwrap();
    assert!(direct.headers()["x-baton-route"].to_str().unwrap().starts_with("direct; "), "{direct:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_answer_if_an_upstream_of_the_same_model_fails() {
    let node = BatonNode::with(&["--engine", "sim", "--sim-decode-tps", "2"]);
    let mock = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    let front = beside_a_node(&node, &mock, "models = { m = \"theirs\" }\nsame_models = true\n");
    harness::eventually_async("a plan", async || {
        plan(&front).await["routes"].as_array().is_some_and(|all| all.len() == 2)
    })
    .await;
    let answer = front.chat(json!({ "max_tokens": 1 })).await;
    assert!(answer.status == 200 && answer.route.starts_with("direct; decode="), "{answer:?}");
    assert_eq!(mock.n_asked(), 1, "it was tried first");
}
