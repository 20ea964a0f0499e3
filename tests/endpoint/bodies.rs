//! Request bodies that try to use up the endpoint's memory or its threads.

use std::time::{Duration, Instant};

use futures::future::join_all;
use harness::mock::{Mock, Step, head, text};
use harness::{BatonServer, ReloadableServer, eventually_async, said, upstream};
use tokio::time::timeout;

const MIB: u64 = 1 << 20;

/// An array of `unit`s with about this many bytes.
fn array(unit: &str, n_bytes: u64) -> String {
    let n = n_bytes as usize / (unit.len() + 1);
    format!("[{unit}{}]", format!(",{unit}").repeat(n - 1))
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_hostile_bodies_at_once_cost_little_memory_and_hold_nobody_up() {
    let server = BatonServer::with(&["--engine", "sim"]);
    let before = server.peak_mib();
    let mut waits = Vec::new();
    let client = reqwest::Client::new();
    let message = r#""model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":1"#;
    for values in [array("0", 4 * MIB), array(r#"{"a":0}"#, 4 * MIB), array("[[[[]]]]", 4 * MIB)] {
        let bodies = [
            ("/v1/chat/completions", format!("{{{message},\"unknown\":{values}}}")),
            ("/v1/chat/completions", format!("{{{message},\"chat_template_kwargs\":{{\"a\":{values}}}}}")),
            ("/v1/responses", format!("{{\"model\":\"sim\",\"input\":\"hi\",\"metadata\":{{\"a\":{values}}}}}")),
            ("/api/chat", format!("{{{message},\"format\":{{\"enum\":{values}}}}}")),
        ];
        let posts = bodies.iter().cycle().take(16).map(|(path, body)| {
            let post = client.post(format!("{}{path}", server.base)).body(body.clone());
            async move { post.send().await.unwrap().status().as_u16() }
        });
        let mut posts = std::pin::pin!(join_all(posts));
        let statuses = loop {
            // A request in between is answered while bodies are parsed, however slow the machine is.
            if let Ok(statuses) = timeout(Duration::from_millis(50), &mut posts).await {
                break statuses;
            }
            let asked = Instant::now();
            assert!(server.get_text("/health").await.contains("ok"));
            waits.push(asked.elapsed());
        };
        assert!(statuses.iter().all(|status| [200, 400, 503].contains(status)), "{statuses:?}");
        assert!(statuses.contains(&200), "unknown fields are ignored: {statuses:?}");
    }
    waits.sort();
    // On a quiet machine, 99 of 100 take less than 100 ms. Bodies that are parsed on the runtime hold up each for 8 s.
    let slow = waits.get(waits.len() * 9 / 10).copied().unwrap_or_default();
    assert!(slow < Duration::from_secs(2), "/health is held up: {waits:?}");
    let grown = server.peak_mib().saturating_sub(before);
    assert!(grown <= 256, "the endpoint grew by {grown} MiB");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_text_is_too_long_and_its_engine_stays_ready() {
    let server = BatonServer::with(&["--engine", "sim", "--no-calibration"]);
    let text = "a".repeat((32 * MIB - 1024) as usize);
    let messages = serde_json::json!([{ "role": "user", "content": text }]);
    let (status, error) =
        server.post("/v1/chat/completions", &serde_json::json!({ "model": "sim", "messages": messages })).await;
    assert_eq!((status, error["error"]["code"].as_str()), (400, Some("context_length_exceeded")), "{error}");
    let state = server.state().await;
    assert_eq!(state["models"][0]["nodes"][0]["life"], "ready", "{state}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_choice_that_waits_for_its_place_on_an_upstream_keeps_the_memory_of_its_body() {
    let mock = Mock::start(|_, _| vec![head(), text("begun"), Step::Hang]).await;
    let front = ReloadableServer::start(&("max_requests = 1\n".to_owned() + &upstream("one", "openai", &mock.url, "")));
    let client = reqwest::Client::new();
    let long = "a".repeat(31 << 20);
    let post = |n: u32| {
        let body = said(&long, serde_json::json!({ "n": n, "stream": true }));
        client.post(format!("{}/v1/chat/completions", front.server.base)).json(&body).send()
    };
    let running = post(2).await.unwrap();
    assert_eq!(running.status(), 200, "the first choice has the only place");
    let waiting = tokio::spawn(post(1));
    let waits = || async { front.get("/baton/state").await["requests"]["waiting"] == 1 };
    eventually_async("it waits", waits).await;
    assert_eq!(post(1).await.unwrap().status(), 503, "two bodies fill the memory for large ones");
    waiting.abort();
}
