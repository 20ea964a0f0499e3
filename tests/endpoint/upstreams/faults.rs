//! Failures of upstreams, and what clients see of them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use harness::eventually_async;
use harness::mock::{Mock, Step, done, event, head, says, text, whole};
use harness::{ReloadableServer, said, upstream};
use serde_json::{Value, json};

fn one(url: &str, more: &str) -> String {
    upstream("one", "openai", url, more)
}

fn two(first: &Mock, second: &Mock, more: &str) -> String {
    upstream("one", "openai", &first.url, more) + &upstream("two", "openai", &second.url, more)
}

/// Two requests: the upstreams take turns, so one of the two requests meets the first upstream first.
async fn ask_twice(front: &ReloadableServer) {
    for _ in 0..2 {
        let answer = front.chat(json!({})).await;
        assert_eq!((answer.status, answer.content().as_str()), (200, "well"), "{answer:?}");
        assert!(answer.route.contains("upstream=two"), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn comments_and_a_missing_last_mark_do_no_harm() {
    let mock = Mock::start(|_, _| {
        let finish = json!({ "choices": [{ "delta": {}, "finish_reason": "length" }] });
        let comment = || Step::Send(": keep-alive\n\n".into());
        let no_mark = Step::Send(format!("event: x\nid: 1\nretry: 5\ndata:{finish}\r\n"));
        vec![head(), comment(), Step::Wait(Duration::from_millis(50)), comment(), text("fine"), comment(), no_mark]
    })
    .await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    let answer = front.chat(json!({})).await;
    assert_eq!((answer.content().as_str(), answer.status), ("fine", 200));
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
    assert!(answer.route.starts_with("upstream; upstream=one; reason=only_upstream"), "{answer:?}");
    let asked = mock.asked(0);
    assert_eq!((asked.path.as_str(), &asked.body["model"]), ("/v1/chat/completions", &json!("theirs")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_breaks_off_is_never_a_success() {
    for broken in [vec![], vec![Step::Send("data: {nonsense\n\n".into())], vec![event(&json!({ "error": "dead" }))]] {
        let broken = std::sync::Arc::new(broken);
        let mock = Mock::start(move |_, _| [&[head(), text("begun")], &broken[..]].concat()).await;
        let front = ReloadableServer::start(&one(&mock.url, ""));
        let streamed = front.chat(json!({ "stream": true })).await;
        assert!(streamed.text.contains("begun") && streamed.text.contains("\"error\""), "{streamed:?}");
        assert!(!streamed.text.contains("[DONE]") && !streamed.text.contains("finish_reason\":\"stop"), "{streamed:?}");
        assert_eq!(mock.n_asked(), 1, "what was begun is not asked for again");
        let whole = front.chat(json!({})).await;
        assert_eq!(whole.status, 503, "{whole:?}");
    }
}

/// A front end of many workers reports a lost one as an error with the code of a busy server.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_lost_while_it_replies_is_not_told_as_busy() {
    let lost = json!({ "error": { "code": 503, "message": "no instances" } });
    let mock = Mock::start(move |_, _| vec![head(), text("begun"), event(&lost)]).await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    for _ in 0..2 {
        let streamed = front.chat(json!({ "stream": true })).await;
        assert!(streamed.text.contains("begun") && streamed.text.contains("lost what computed"), "{streamed:?}");
    }
    assert_eq!(mock.n_asked(), 2, "the front end and its other workers are well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_that_an_upstream_lacks_is_named() {
    let mock = Mock::start(|_, asked| match asked.path.ends_with("/embeddings") {
        true => whole(404, "", &json!({ "detail": "Not Found" })),
        false => says("well"),
    })
    .await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    let answer = front.post("/v1/embeddings", &json!({ "model": "m", "input": "x" })).await;
    assert!(answer.status == 501 && answer.text.contains("embeddings, since"), "{answer:?}");
    assert_eq!(front.chat(json!({})).await.content(), "well");
}

/// As a front end whose workers are all gone, which then lists nothing.
#[tokio::test(flavor = "multi_thread")]
async fn models_of_an_upstream_that_lists_none_any_more_are_unavailable_and_not_unknown() {
    let mock = Mock::listing(&["theirs"], |_, _| whole(500, "", &json!({}))).await;
    let front = ReloadableServer::start(&one(&mock.url, "models = {}"));
    eventually_async("the list", async || front.get("/v1/models").await["data"][0]["id"] == "theirs").await;
    mock.list(&[]);
    let n_before = mock.log.n_lists.load(Ordering::SeqCst);
    // A failure causes a probe, which finds no models.
    for _ in 0..2 {
        let answer = front.chat(json!({ "model": "theirs" })).await;
        assert_eq!((answer.status, answer.retry_after.is_some()), (503, true), "{answer:?}");
        eventually_async("a probe", async || mock.log.n_lists.load(Ordering::SeqCst) > n_before + 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_upstream_takes_a_request_that_the_first_does_not_begin() {
    let overlong = Step::Send(format!("data: {}\n\n", "x".repeat(2 << 20)));
    let bad: Vec<Vec<Step>> = vec![
        vec![],
        vec![head()],
        vec![head(), Step::Send("data: {nonsense\n\n".into())],
        vec![head(), overlong],
        vec![head(), event(&json!({ "error": { "message": "dead" } }))],
        whole(500, "", &json!({})),
        whole(401, "", &json!({})),
        whole(404, "", &json!({ "error": { "message": "no such model" } })),
        whole(404, "", &json!({ "detail": "Not Found" })),
        whole(302, "location: http://127.0.0.1:1/\r\n", &json!({})),
        whole(429, "retry-after: 30\r\n", &json!({})),
        vec![head(), Step::Hang],
        vec![Step::Hang],
    ];
    for steps in bad {
        let shown = format!("{steps:?}");
        let first = Mock::start(move |_, _| steps.clone()).await;
        let second = Mock::start(|_, _| says("well")).await;
        let front = ReloadableServer::start(&two(&first, &second, "first_seconds = 0.5"));
        ask_twice(&front).await;
        assert!(
            first.n_asked() <= 2 && second.n_asked() == 2,
            "{} {}",
            &shown[..shown.len().min(200)],
            first.n_asked()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_upstream_gets_no_requests_for_its_retry_after() {
    for status in [429, 503] {
        let mock = Mock::start(move |_, _| whole(status, "retry-after: 7\r\n", &json!({ "error": "busy" }))).await;
        let front = ReloadableServer::start(&one(&mock.url, ""));
        for _ in 0..3 {
            let answer = front.chat(json!({})).await;
            assert_eq!((answer.status, answer.retry_after.is_some()), (503, true), "{answer:?}");
            assert!(matches!(answer.retry_after.as_deref(), Some("6" | "7")), "{answer:?}");
        }
        assert_eq!(mock.n_asked(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_of_a_busy_upstream_still_answers() {
    let mock = Mock::start(|_, asked| match asked.body["model"] == "theirs" {
        true => whole(429, "retry-after: 3000\r\n", &json!({ "error": "busy" })),
        false => says("well"),
    })
    .await;
    let front = ReloadableServer::start(&one(&mock.url, "models = { m = \"theirs\", n = \"other\" }"));
    for _ in 0..2 {
        let busy = front.chat(json!({})).await;
        assert_eq!((busy.status, busy.retry_after.is_some()), (503, true), "{busy:?}");
        let well = front.chat(json!({ "model": "n" })).await;
        assert_eq!((well.status, well.content().as_str()), (200, "well"), "{well:?}");
    }
    assert_eq!(mock.n_asked(), 3, "the busy model is asked for once");
    // A `retry-after` counts for 600 s at most.
    let left = front.get("/baton/state").await["upstreams"][0]["busy_ms"].as_u64().unwrap();
    assert!((550_000..=600_000).contains(&left), "{left}");
    let text = async |path: &str| {
        let url = format!("{}{path}", front.server.base);
        reqwest::get(url).await.unwrap().text().await.unwrap()
    };
    let metrics = text("/metrics").await;
    let gauge = metrics.lines().find_map(|line| line.strip_prefix("baton_upstream_busy_seconds{upstream=\"one\"} "));
    assert!((550.0..=600.0).contains(&gauge.unwrap().parse::<f64>().unwrap()), "{gauge:?}");
    eventually_async("a warning of one model", async || text("/health").await.contains("cannot be answered")).await;
    assert_eq!(front.get("/health").await["status"], "ok", "the other model is answered for");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_log_probabilities_are_an_error_and_not_an_empty_list() {
    let mock = Mock::start(|_, _| says("well")).await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    for stream in [false, true] {
        let answer = front.chat(json!({ "logprobs": true, "stream": stream })).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!("logprobs")), "{answer:?}");
        assert_eq!(error["code"], "unsupported_parameter", "{error}");
    }
    assert_eq!(front.chat(json!({})).await.content(), "well", "that is no failure of the upstream");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_goes_to_the_client_and_is_not_retried_elsewhere() {
    let overflow = json!({ "error": { "message": "long", "n_prompt_tokens": 9, "n_ctx": 8 } });
    for (body, code) in
        [(json!({ "error": { "message": "bad thing" } }), json!(null)), (overflow, json!("context_length_exceeded"))]
    {
        let refuse = body.clone();
        let first = Mock::start(move |_, _| whole(400, "", &refuse)).await;
        let second = Mock::start(move |_, _| whole(400, "", &body)).await;
        let front = ReloadableServer::start(&two(&first, &second, ""));
        let answer = front.chat(json!({ "stream": true })).await;
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (400, &code), "{answer:?}");
        assert_eq!(first.n_asked() + second.n_asked(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_upstream_cannot_do_is_refused_before_anything_is_sent() {
    let mock = Mock::start(|_, _| says("well")).await;
    let front = ReloadableServer::start(&one(&mock.url, "max_concurrent = 2"));
    for (field, more) in
        [("top_k", json!({ "top_k": 3 })), ("n", json!({ "n": 3 })), ("ignore_eos", json!({ "ignore_eos": true }))]
    {
        let answer = front.chat(more).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)), "{answer:?}");
    }
    assert_eq!(mock.n_asked(), 0);
    let answer = front.chat(json!({ "n": 2 })).await;
    assert_eq!((answer.status, answer.json()["choices"].as_array().unwrap().len()), (200, 2));
    assert_ne!(mock.asked(0).body["seed"], mock.asked(1).body["seed"], "each choice draws for itself");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_choice_waits_for_a_place_of_its_own() {
    let slow = |_: usize, _: &harness::mock::MockRequest| {
        vec![head(), text("well"), Step::Wait(Duration::from_millis(100)), done()]
    };
    for (n_places, stream) in [(1, false), (2, true)] {
        let mock = Mock::start(slow).await;
        let front = ReloadableServer::start(&(format!("max_requests = {n_places}\n") + &one(&mock.url, "")));
        let answer = front.chat(json!({ "n": 5, "stream": stream })).await;
        assert_eq!((answer.status, answer.text.matches("well").count()), (200, 5), "{answer:?}");
        assert_eq!(mock.n_asked(), 5);
        assert_eq!(mock.log.most_running.load(Ordering::SeqCst), n_places, "no more run than have a place");
        let seeds: std::collections::BTreeSet<u64> =
            (0..5).map(|i| mock.asked(i).body["seed"].as_u64().unwrap()).collect();
        assert_eq!(seeds.len(), 5);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_in_the_middle_of_a_reply_ends_it_with_an_error() {
    let mock = Mock::start(|_, _| vec![head(), text("begun"), Step::Hang]).await;
    let front = ReloadableServer::start(&one(&mock.url, "idle_seconds = 0.5"));
    let answer = front.chat(json!({ "stream": true })).await;
    assert!(answer.text.contains("begun") && answer.text.contains("\"error\""), "{answer:?}");
    eventually_async("a closed connection", async || mock.n_left() == 1).await;
}

/// Reads the first text of a stream, then closes the connection.
async fn leave(front: &ReloadableServer) {
    let url = format!("{}/v1/chat/completions", front.server.base);
    let response = reqwest::Client::new().post(url).json(&said("hi", json!({ "stream": true }))).send().await.unwrap();
    let mut chunks = response.bytes_stream();
    let mut seen = String::new();
    while !seen.contains("begun") {
        seen += &String::from_utf8_lossy(&chunks.next().await.unwrap().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_stops_the_upstream_unless_abort_is_off() {
    let mock = Mock::start(|_, _| vec![head(), text("begun"), Step::Hang]).await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    leave(&front).await;
    eventually_async("a closed connection", async || mock.n_left() == 1).await;

    let patient = Mock::start(|n, _| match n {
        0 => vec![head(), text("begun"), Step::Wait(Duration::from_secs(1)), text("more"), done()],
        _ => says("well"),
    })
    .await;
    let front = ReloadableServer::start(&one(&patient.url, "abort = false\nmax_concurrent = 1"));
    leave(&front).await;
    let answer = front.chat(json!({})).await;
    assert_eq!(answer.content(), "well");
    assert_eq!((patient.n_left(), patient.log.most_running.load(Ordering::SeqCst)), (0, 1), "one after the other");
}

#[tokio::test(flavor = "multi_thread")]
async fn upstreams_share_the_work_within_their_limits() {
    let slow = |_: usize, _: &harness::mock::MockRequest| {
        vec![head(), text("well"), Step::Wait(Duration::from_millis(200)), done()]
    };
    let first = Mock::start(slow).await;
    let second = Mock::start(slow).await;
    let front = ReloadableServer::start(&two(&first, &second, "max_concurrent = 2"));
    let answers = futures::future::join_all((0..12).map(|_| front.chat(json!({})))).await;
    for answer in answers {
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    for mock in [&first, &second] {
        assert_eq!(mock.log.most_running.load(Ordering::SeqCst), 2);
        assert!(mock.n_asked() >= 4, "{}", mock.n_asked());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_upstream_is_avoided_until_it_recovers() {
    let first = Mock::start(|n, _| if n < 2 { whole(500, "", &json!({})) } else { says("back") }).await;
    let second = Mock::start(|_, _| says("well")).await;
    let front = ReloadableServer::start(&two(&first, &second, ""));
    ask_twice(&front).await;
    // The breaker is open: only a probe now and then reaches the upstream.
    eventually_async("the first upstream", async || front.chat(json!({})).await.content() == "back").await;
    assert!(second.n_asked() >= 2);
    let state = front.get("/baton/state").await;
    assert!(state["upstreams"][0]["breaker"]["failures"]["server_error"].as_u64() >= Some(1), "{state}");
}

#[tokio::test(flavor = "multi_thread")]
async fn baton_matches_stop_strings_and_ends_the_upstreams_work() {
    let mock = Mock::start(|_, _| vec![head(), text("one tw"), text("o three"), Step::Hang]).await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    let body = json!({ "model": "m", "max_tokens": 9, "stop_sequences": ["two"], "messages": [{ "role": "user", "content": "hi" }] });
    let answer = front.post("/v1/messages", &body).await.json();
    assert_eq!(
        (&answer["content"][0]["text"], &answer["stop_reason"]),
        (&json!("one "), &json!("stop_sequence")),
        "{answer}"
    );
    eventually_async("a closed connection", async || mock.n_left() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_reasoning_and_usage_come_through() {
    let mock = Mock::start(|_, _| {
        let delta = |delta| event(&json!({ "choices": [{ "delta": delta }] }));
        let call =
            |n: u32, piece| delta(json!({ "tool_calls": [{ "index": n, "id": format!("c{n}"), "function": piece }] }));
        vec![
            head(),
            delta(json!({ "reasoning_content": "hm" })),
            call(0, json!({ "name": "f", "arguments": "{\"a\":" })),
            call(0, json!({ "arguments": "1}" })),
            call(1, json!({ "name": "f", "arguments": "{}" })),
            done(),
        ]
    })
    .await;
    let front = ReloadableServer::start(&one(&mock.url, "key = \"sk-1\"\nheaders = { \"x-title\" = \"t\" }"));
    let tools = json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }]);
    let answer = front.chat(json!({ "tools": tools, "tool_choice": "required" })).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &answer["choices"][0]["finish_reason"]),
        (&json!("hm"), &json!("tool_calls"))
    );
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"a\":1}", "{answer}");
    assert_eq!(message["tool_calls"][1]["id"], "c1");
    assert_eq!((&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]), (&json!(5), &json!(2)));
    let asked = mock.asked(0);
    assert_eq!(asked.body["tool_choice"], "required");
    assert!(asked.head.contains("authorization: bearer sk-1") && asked.head.contains("x-title: t"), "{}", asked.head);
    let one_call = front.chat(json!({ "tools": tools, "parallel_tool_calls": false })).await.json();
    assert_eq!(one_call["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1, "{one_call}");
}

#[tokio::test(flavor = "multi_thread")]
async fn namespaces_and_custom_tools_are_functions_for_an_upstream() {
    let mock = Mock::start(|_, _| {
        let call = |n: u32, name: &str, arguments: &str| {
            let function = json!({ "name": name, "arguments": arguments });
            let calls = json!([{ "index": n, "id": format!("c{n}"), "function": function }]);
            event(&json!({ "choices": [{ "delta": { "tool_calls": calls } }] }))
        };
        vec![
            head(),
            call(0, "mcp__demo__read", "{\"path\": \"a\"}"),
            call(1, "apply_patch", "{\"input\": \"*** Begin Patch\\n\"}"),
            done(),
        ]
    })
    .await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    let grammar = json!({ "type": "grammar", "syntax": "lark", "definition": "start: \"*** Begin Patch\\n\"" });
    let read = json!({ "type": "function", "name": "read", "parameters": { "type": "object" } });
    let tools = json!([
        { "type": "namespace", "name": "mcp__demo", "description": "A demo.", "tools": [read] },
        { "type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar },
        { "type": "web_search" },
    ]);
    let earlier = json!([
        { "role": "user", "content": "Read a." },
        { "type": "function_call", "call_id": "b", "name": "read", "namespace": "mcp__demo", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "b", "output": "x" },
    ]);
    let answer = front.post("/v1/responses", &json!({ "model": "m", "input": earlier, "tools": tools })).await;
    let output = answer.json()["output"].clone();
    let of = |item: &Value| {
        ["type", "name", "namespace", "call_id"].map(|field| item[field].as_str().unwrap_or("").to_owned())
    };
    assert_eq!(of(&output[0]), ["function_call", "read", "mcp__demo", "c0"], "{answer:?}");
    assert_eq!(of(&output[1]), ["custom_tool_call", "apply_patch", "", "c1"], "{answer:?}");
    assert_eq!(
        (&output[0]["arguments"], &output[1]["input"]),
        (&json!("{\"path\": \"a\"}"), &json!("*** Begin Patch\n"))
    );
    let asked = mock.asked(0).body;
    let functions: Vec<&str> =
        asked["tools"].as_array().unwrap().iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
    assert_eq!(functions, ["mcp__demo__read", "apply_patch"], "{asked}");
    let patch = &asked["tools"][1]["function"];
    assert_eq!(patch["parameters"]["properties"], json!({ "input": { "type": "string" } }), "{patch}");
    assert!(patch["description"].as_str().unwrap().contains("Lark grammar:\nstart: "), "{patch}");
    assert_eq!(asked["messages"][1]["tool_calls"][0]["function"]["name"], "mcp__demo__read", "{asked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_that_an_upstream_adds_reach_no_client() {
    let mock = Mock::start(|_, _| {
        let chunk = |choice: serde_json::Value| {
            let mut choice = choice;
            choice["private"] = json!({ "in": "choice" });
            choice["delta"]["private"] = json!("delta");
            event(&json!({
                "id": "private-id", "created": 7, "model": "private-model", "system_fingerprint": "private-build",
                "private": ["chunk"], "object": "chat.completion.chunk", "choices": [choice],
            }))
        };
        let said = chunk(json!({ "index": 0, "delta": { "role": "assistant", "content": "fine \"\u{e9}\"" } }));
        // Nothing but the text differs between these.
        let more = ["a", "b", "c"].map(|text| chunk(json!({ "index": 0, "delta": { "content": text } })));
        let last = chunk(json!({ "index": 0, "delta": {}, "finish_reason": "stop" }));
        let usage = event(&json!({
            "choices": [], "private": 1,
            "usage": { "prompt_tokens": 5, "completion_tokens": 1, "private_tokens": 3 },
        }));
        let [a, b, c] = more;
        vec![head(), said, a, b, c, last, usage, Step::Send("data: [DONE]\n\n".into())]
    })
    .await;
    let front = ReloadableServer::start(&one(&mock.url, ""));
    let whole = front.chat(json!({})).await;
    assert_eq!((whole.status, whole.content().as_str()), (200, "fine \"\u{e9}\"abc"), "{whole:?}");
    let streamed = front.chat(json!({ "stream": true, "stream_options": { "include_usage": true } })).await;
    assert!(streamed.text.contains("\"content\":\"c\""), "{streamed:?}");
    assert!(streamed.text.contains("fine \\\"\u{e9}\\\"") && streamed.text.contains("[DONE]"), "{streamed:?}");
    for answer in [whole, streamed] {
        assert!(!answer.text.contains("private") && !answer.text.contains("\"created\":7,"), "{answer:?}");
        assert!(answer.text.contains("\"prompt_tokens\":5"), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_whole_reply_is_checked_like_a_stream() {
    let reply = |message: serde_json::Value| {
        json!({
            "id": "private-id", "created": 7, "model": "private-model", "private": 1,
            "choices": [{ "index": 0, "message": message, "finish_reason": "length", "private": 2 }],
            "usage": { "prompt_tokens": 5, "completion_tokens": 900, "private": 3 },
        })
    };
    let said = reply(json!({ "role": "assistant", "content": "well", "private": 4 }));
    let good = whole(200, "", &said);
    let bad = [
        // Cut off, not JSON, without a reason, and an error in a success.
        vec![Step::Send(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{\"ch".into(),
        )],
        whole(200, "", &json!("nonsense")),
        whole(200, "", &json!({ "choices": [{ "message": { "content": "x" } }] })),
        whole(200, "", &json!({ "error": { "message": "dead" } })),
    ];
    for steps in bad {
        let first = Mock::start(move |_, _| steps.clone()).await;
        let answer = good.clone();
        let second = Mock::start(move |_, _| answer.clone()).await;
        let front = ReloadableServer::start(&two(&first, &second, ""));
        for _ in 0..2 {
            let answer = front.chat(json!({ "max_tokens": 8 })).await;
            assert_eq!((answer.status, answer.content().as_str()), (200, "well"), "{answer:?}");
            assert!(answer.route.contains("upstream=two") && !answer.text.contains("private"), "{answer:?}");
            let json = answer.json();
            assert_eq!(json["choices"][0]["finish_reason"], "length");
            assert_eq!((&json["usage"]["prompt_tokens"], &json["usage"]["completion_tokens"]), (&json!(5), &json!(8)));
        }
        assert_eq!(second.asked(0).body["stream"], false);
    }
}
