//! Dry runs: `POST /baton/plan` and `baton plan`, with the simulated engine.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use harness::{BATON, BatonNode, BatonServer, eventually_async};
use serde_json::{Value, json};

fn server(node: &BatonNode) -> BatonServer {
    let args = ["--engine", "sim", "--sim-prefill-tps", "1000", "--prefill", &node.url, "--api-key", "k"];
    BatonServer::with(&args)
}

fn request(n_words: usize) -> Value {
    let content = vec!["word"; n_words].join(" ");
    json!({ "model": "sim", "messages": [{ "role": "user", "content": content }], "max_tokens": 16 })
}

async fn post(server: &BatonServer, path: &str, policy: &str, body: &Value) -> reqwest::Response {
    let call = reqwest::Client::new().post(format!("{}{path}", server.base)).bearer_auth("k");
    call.header("x-baton-policy", policy).json(body).send().await.unwrap()
}

async fn plan(server: &BatonServer, policy: &str, n_words: usize) -> Value {
    post(server, "/baton/plan", policy, &request(n_words)).await.json().await.unwrap()
}

fn cli(server: &BatonServer, args: &[&str], input: &str) -> Output {
    let mut command = Command::new(&*BATON);
    command.args(["plan", "-", &server.base]).args(args).env("BATON_API_KEY", "k");
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    process.wait_with_output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_predicts_what_the_request_does() {
    let node = BatonNode::with(&["--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "20000"]);
    let server = server(&node);
    let is_known = async || plan(&server, "fastest", 1_500).await["routes"][1]["prediction"].is_object();
    eventually_async("calibration", is_known).await;
    let long = plan(&server, "fastest", 1_500).await;
    assert_eq!(
        (&long["model"], &long["policy"], &long["reason"]),
        (&json!("sim"), &json!("fastest"), &json!("faster"))
    );
    let [direct, handoff] = [0, 1].map(|i| long["routes"][i].clone());
    assert_eq!(
        (&direct["decode"], &direct["prefill"], &direct["chosen"]),
        (&json!("local"), &json!(null), &json!(false))
    );
    assert_eq!((&handoff["prefill"], &handoff["chosen"]), (&json!("prefill-1"), &json!(true)));
    let time = |route: &Value, part: &str| route["prediction"][part].as_f64().unwrap();
    assert!(time(&direct, "ttft_ms") > time(&handoff, "ttft_ms"), "{long}");
    assert!(time(&handoff, "wire_ms") > 0.0 && long["n_prompt"].as_u64().unwrap() > 7_000, "{long}");

    // The request itself takes the route of the dry run, and its prompt is cached.
    let reply = post(&server, "/v1/chat/completions", "fastest", &request(1_500)).await;
    let route = reply.headers()["x-baton-route"].to_str().unwrap().to_owned();
    assert!(route.starts_with("handoff; prefill=prefill-1; decode=local"), "{route}");
    reply.text().await.unwrap();
    let again = plan(&server, "fastest", 1_500).await;
    assert!(again["routes"][0]["cached_on_decode"].as_u64().unwrap() > 7_000, "{again}");
    assert_eq!(again["reason"], "not_worth_it");
    assert_eq!(plan(&server, "always_handoff", 1_500).await["reason"], "cached");

    // The same as a table, for a longer prompt.
    let input = request(2_500).to_string();
    let table = cli(&server, &["--policy", "always_handoff"], &input);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("* prefill-1 → local") && table.contains("  local"), "{table}");
    let json = cli(&server, &["--json"], &input);
    assert_eq!(serde_json::from_slice::<Value>(&json.stdout).unwrap()["policy"], "fastest");
}

/// A part of `x-baton-route`.
fn part<'a>(route: &'a str, name: &str) -> Option<&'a str> {
    route.split("; ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_says_what_then_happens_with_every_policy_and_cache() {
    let node = |role, tps| BatonNode::with(&["--engine", "sim", "--role", role, "--sim-prefill-tps", tps]);
    let [prefill, first, second] = [node("prefill", "20000"), node("decode", "1000"), node("decode", "1000")];
    let nodes = ["--prefill", &prefill.url, "--decode", &first.url, "--decode", &second.url, "--api-key", "k"];
    let server = BatonServer::with(&nodes);
    let is_known = async || {
        let plan = plan(&server, "fastest", 1_500).await;
        plan["routes"].as_array().is_some_and(|routes| routes.iter().all(|route| route["prediction"].is_object()))
    };
    eventually_async("calibration", is_known).await;
    for policy in ["fastest", "always_handoff", "direct", "round_robin", "least_loaded"] {
        // A node that the machine's other work holds up between the two questions is not a wrong plan, so one
        // whole series may differ. A wrong plan differs again, with a prompt that is as new as the first.
        if let Err(first) = plan_then_ask(&server, policy, "first").await {
            plan_then_ask(&server, policy, "second").await.unwrap_or_else(|second| panic!("{first}\nthen {second}"));
        }
    }
}

/// Asks how each of eight requests would be served, then sends it. `Err` names the first that was served otherwise.
async fn plan_then_ask(server: &BatonServer, policy: &str, series: &str) -> Result<(), String> {
    let beginning = format!("{series} {}", vec![policy; 200].join(" "));
    // Nothing is cached, the whole prompt, its beginning, a longer prompt; and short ones.
    let longer = format!("{beginning} {}", "and more ".repeat(60));
    for (content, n_times) in [(beginning, 3), (longer, 3), (format!("{series} {policy}?"), 2)] {
        for time in 0..n_times {
            let is_idle = async || {
                let state = reqwest::Client::new().get(format!("{}/baton/state", server.base)).bearer_auth("k");
                let state: Value = state.send().await.unwrap().json().await.unwrap();
                let nodes = state["models"][0]["nodes"].as_array().unwrap();
                nodes.iter().all(|node| node["active_slots"] == 0 && node["life"] == "ready")
            };
            eventually_async("idle nodes", is_idle).await;
            let body = json!({
                "model": "sim", "messages": [{ "role": "user", "content": content }], "max_tokens": 8
            });
            let plan: Value = post(server, "/baton/plan", policy, &body).await.json().await.unwrap();
            let routes = plan["routes"].as_array().unwrap();
            let chosen = routes.iter().find(|route| route["chosen"] == true).unwrap();
            let planned = (chosen["decode"].as_str(), chosen["prefill"].as_str(), plan["reason"].as_str());
            let reply = post(server, "/v1/chat/completions", policy, &body).await;
            let route = reply.headers()["x-baton-route"].to_str().unwrap().to_owned();
            reply.text().await.unwrap();
            if (part(&route, "decode"), part(&route, "prefill"), part(&route, "reason")) != planned {
                return Err(format!("{policy}, {} bytes, time {time}: {route} after {plan}", content.len()));
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_is_refused_like_the_request() {
    let node = BatonNode::with(&["--engine", "sim", "--role", "prefill"]);
    let server = server(&node);
    let keyless = reqwest::Client::new().post(format!("{}/baton/plan", server.base)).json(&request(1));
    assert_eq!(keyless.send().await.unwrap().status(), 401);
    for (body, status) in [
        (json!({ "model": "nobody", "messages": [{ "role": "user", "content": "hi" }] }), 404),
        (json!({ "model": "sim" }), 400),
        (request(20_000), 400),
    ] {
        let reply = post(&server, "/baton/plan", "fastest", &body).await;
        assert_eq!(reply.status(), status);
        let error = reply.json::<Value>().await.unwrap();
        assert!(error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
    }
    let failed = cli(&server, &[], "{}");
    let message = String::from_utf8(failed.stderr).unwrap();
    assert!(!failed.status.success() && message.contains("400") && message.lines().count() == 1, "{message}");
}

#[test]
fn a_dry_run_that_fails_prints_one_clear_line() {
    let check = |endpoint: &str, expected: &str| {
        let output = Command::new(&*BATON).args(["plan", "/dev/null", endpoint]).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains(expected), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    };
    check("127.0.0.1:1", "no endpoint answers at 127.0.0.1:1: ");
    check("here and there", "an endpoint is HOST:PORT");
    let server = BatonServer::with(&["--engine", "sim", "--api-key", "k"]);
    check(&server.base, "needs a key: give one with --api-key or BATON_API_KEY");
}
