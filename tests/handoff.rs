//! A prompt computed by one process and decoded by another, through the same endpoint as ever.

mod harness;

use harness::{Node, Server, chat, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

async fn ask(server: &Server, body: &Value) -> (String, Value) {
    let url = format!("{}/v1/chat/completions", server.base);
    let response = reqwest::Client::new().post(url).json(body).send().await.unwrap();
    let route = response.headers().get("x-baton-route").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    (route, response.json().await.unwrap())
}

fn text(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{reply}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_reply_with_the_prompt_computed_elsewhere() {
    let node = Node::start(&["--role", "prefill"]);
    let alone = Server::start(&[]);
    let server = Server::start(&["--prefill", &node.url, "--policy", "always_handoff"]);
    let body = chat(&long_prompt("handoff", 600), json!({ "max_tokens": 24 }));
    let (direct_route, expected) = ask(&alone, &body).await;
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
    for time in ["prefill_ms", "transfer_ms", "hidden_ms", "unhidden_ms", "import_ms"] {
        assert!(handoff[time].as_f64().unwrap() >= 0.0, "{time}");
    }

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

    // Another policy for one request, and a name that is none.
    let url = format!("{}/v1/chat/completions", server.base);
    let ask_for =
        |policy: &'static str| reqwest::Client::new().post(&url).header("x-baton-policy", policy).json(&body).send();
    let direct = ask_for("direct").await.unwrap();
    assert!(direct.headers()["x-baton-route"].to_str().unwrap().starts_with("direct; decode=local; policy=direct"));
    assert_eq!(ask_for("quickest").await.unwrap().status(), 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_that_dies_or_freezes_costs_no_reply() {
    let alone = Server::start(&[]);
    let body = |tag: &str| chat(&long_prompt(tag, 600), json!({ "max_tokens": 8 }));
    for (signal, tag, failures) in [
        (Signal::KILL, "killed", ["prefill_lost", "prefill_down"]),
        (Signal::STOP, "frozen", ["prefill_stalled", "prefill_stalled"]),
    ] {
        let node = Node::start(&["--role", "prefill", "--ubatch", "64"]);
        let server = Server::start(&["--prefill", &node.url, "--policy", "always_handoff"]);
        let (_, expected) = ask(&alone, &body(tag)).await;
        let request = body(tag);
        let reply = tokio::join!(ask(&server, &request), async {
            // Some chunks into a prefill that takes seconds.
            tokio::time::sleep(std::time::Duration::from_millis(1_500)).await;
            node.signal(signal);
        });
        let (_, reply) = reply.0;
        assert_eq!(text(&reply), text(&expected), "{tag}");
        let handoff = &reply["timings"]["handoff"];
        println!("{tag}: {handoff}");
        assert!(failures.contains(&handoff["failure"].as_str().unwrap()), "{handoff}");
        node.signal(Signal::CONT);
    }
}
