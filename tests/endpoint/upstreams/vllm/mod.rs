//! vLLM's prefill and decode servers are joined by the handshake of its NixlConnector. Whatever fails there, the client gets
//! its reply.

mod context;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harness::mock::{Mock, MockRequest, Step, event, head, says, text, whole};
use harness::{ReloadableServer, eventually_async, upstream};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Where Baton tests whether a prefill server computes.
const PROBE: &str = "/v1/completions";

/// The KV parameters that a prefill server with a NixlConnector returns.
fn kept() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "engine-1", "remote_host": "10.0.0.5", "remote_port": 5600, "tp_size": 1,
        "remote_request_id": "chatcmpl-1",
    })
}

/// A prefill server, which keeps KV only for requests in vLLM's form.
fn prefill(asked: &MockRequest) -> Vec<Step> {
    let body = &asked.body;
    let params = &body["kv_transfer_params"];
    let is_right = params["do_remote_decode"] == true
        && params["do_remote_prefill"] == false
        && ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
            .iter()
            .all(|name| params[name].is_null())
        && body["max_tokens"] == 1
        && body["stream"] == false
        && body.get("stream_options").is_none();
    if !is_right {
        return whole(400, "", &json!({ "object": "error", "message": "not a prefill request", "code": 400 }));
    }
    whole(
        200,
        "",
        &json!({ "object": "chat.completion", "choices": [], "usage": { "prompt_tokens": 1_049 },
        "kv_transfer_params": kept() }),
    )
}

/// An endpoint in front of a pair.
fn pair(prefiller: &Mock, decoder: &Mock, more: &str) -> ReloadableServer {
    let more = format!("prefill = [\"{}\"]\n{more}", prefiller.url);
    ReloadableServer::start(&upstream("pd", "vllm", &decoder.url, &more))
}

async fn n_fallbacks(front: &ReloadableServer, reason: &str) -> u64 {
    let state = front.get("/baton/state").await;
    state["upstreams"][0]["fallbacks"][reason]["count"].as_u64().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_decode_server_learns_where_the_kv_is() {
    let prefiller = Mock::start(|_, asked| prefill(asked)).await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front = pair(&prefiller, &decoder, "");
    for stream in [false, true] {
        let answer = front.chat(json!({ "stream": stream, "max_completion_tokens": 7 })).await;
        assert!(answer.status == 200 && answer.text.contains("well"), "{answer:?}");
    }
    let first = prefiller.asked(0);
    let second = decoder.asked(0);
    assert_eq!(second.body["kv_transfer_params"], kept());
    // Only a stream shows early that the KV has come.
    assert_eq!((&second.body["max_tokens"], &second.body["stream"]), (&json!(7), &json!(true)));
    assert_eq!(first.body["messages"], second.body["messages"]);
    let id =
        |asked: &MockRequest| asked.head.lines().find(|line| line.starts_with("x-request-id: ")).unwrap().to_owned();
    assert_eq!(id(&first), id(&second));
    let answer = front.post("/v1/completions", &json!({ "model": "m", "prompt": "hi" })).await;
    assert_eq!((answer.status, prefiller.asked(2).path.as_str()), (200, "/v1/completions"), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_prefill_server_the_decode_server_computes_the_prompt() {
    let nothing = Mock::start(|_, _| whole(200, "", &json!({ "choices": [] }))).await;
    let broken = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    for (server, reason) in [(&nothing, "no_kv_transfer_params"), (&broken, "prefill_server_error")] {
        let decoder = Mock::start(|_, _| says("well")).await;
        let front = pair(server, &decoder, "");
        assert_eq!(front.chat(json!({})).await.content(), "well");
        assert_eq!(decoder.asked(0).body.get("kv_transfer_params"), None);
        assert_eq!(n_fallbacks(&front, reason).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_prefill_server_costs_one_request_its_time_until_it_computes_again() {
    let hangs = Arc::new(AtomicBool::new(true));
    let is_hung = Arc::clone(&hangs);
    // Its list of models answers all the time.
    let prefiller = Mock::start(move |_, asked| match (is_hung.load(Ordering::SeqCst), asked.path.as_str()) {
        (true, _) => vec![Step::Hang],
        (false, PROBE) => whole(200, "", &json!({ "choices": [] })),
        (false, _) => prefill(asked),
    })
    .await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front = pair(&prefiller, &decoder, "first_seconds = 4");
    for _ in 0..5 {
        assert_eq!(front.chat(json!({})).await.content(), "well");
    }
    assert_eq!(prefiller.n_asked_at(CHAT), 1, "only the first request waits for it");
    assert_eq!(
        (n_fallbacks(&front, "prefill_timed_out").await, n_fallbacks(&front, "prefill_kept_away").await),
        (1, 4)
    );
    let state = front.get("/baton/state").await;
    let upstream = &state["upstreams"][0];
    assert_eq!(upstream["prefill"][0]["breaker"]["failures"], json!({ "prefill_timed_out": 1 }), "{state}");
    assert_eq!(upstream["breaker"]["is_open"], false, "the decode server is well: {state}");

    eventually_async("a probe", async || prefiller.n_asked_at(PROBE) > 0).await;
    assert_eq!(front.chat(json!({})).await.content(), "well");
    assert_eq!(prefiller.n_asked_at(CHAT), 1, "it does not answer the probe");

    hangs.store(false, Ordering::SeqCst);
    eventually_async("the prefill server", async || {
        assert_eq!(front.chat(json!({})).await.content(), "well");
        front.get("/baton/state").await["upstreams"][0]["prefill"][0]["prompts"] == 1
    })
    .await;
    assert_eq!(front.get("/baton/state").await["upstreams"][0]["prefill"][0]["breaker"]["is_open"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_waits_for_a_hung_prefill_server_leaves_with_the_first() {
    let hung = Mock::start(|_, _| vec![Step::Hang]).await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front = pair(&hung, &decoder, "first_seconds = 16");
    let later = async {
        tokio::time::sleep(Duration::from_secs(4)).await;
        // By itself it would wait 8 s.
        tokio::time::timeout(Duration::from_secs(7), front.chat(json!({}))).await.expect("it leaves with the first")
    };
    let (first, later) = tokio::join!(front.chat(json!({})), later);
    assert_eq!((first.content(), later.content()), ("well".to_owned(), "well".to_owned()));
    assert_eq!(hung.n_asked_at(CHAT), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_prefill_server_takes_the_turns_of_a_hung_one() {
    let hung = Mock::start(|_, _| vec![Step::Hang]).await;
    let good = Mock::start(|_, asked| prefill(asked)).await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let more = format!("prefill = [\"{}\", \"{}\"]\nfirst_seconds = 4", hung.url, good.url);
    let front = ReloadableServer::start(&upstream("pd", "vllm", &decoder.url, &more));
    for _ in 0..4 {
        assert_eq!(front.chat(json!({})).await.content(), "well");
    }
    assert_eq!((hung.n_asked_at(CHAT), good.n_asked_at(CHAT)), (1, 3));
    assert_eq!(n_fallbacks(&front, "prefill_kept_away").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_kv_costs_the_client_no_reply_and_the_decode_server_no_trust() {
    let error = json!({ "error": { "message": "Internal server error", "type": "InternalServerError", "code": 500 } });
    let ended = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "error" }] });
    let in_stream = vec![head(), event(&error), Step::Send("data: [DONE]\n\n".into())];
    for lost in [in_stream, vec![head(), event(&ended)], whole(500, "", &error)] {
        let shown = format!("{lost:?}");
        // It answers no probe, so the pair stays barred.
        let prefiller = Mock::start(|_, asked| match asked.path.as_str() {
            PROBE => vec![Step::Hang],
            _ => prefill(asked),
        })
        .await;
        let decoder = Mock::start(move |_, asked| match asked.body.get("kv_transfer_params") {
            Some(_) => lost.clone(),
            None => says("well"),
        })
        .await;
        let front = pair(&prefiller, &decoder, "");
        for _ in 0..2 {
            let answer = front.chat(json!({ "stream": true })).await;
            assert!(answer.status == 200 && answer.text.contains("well"), "{shown}: {answer:?}");
        }
        assert_eq!((prefiller.n_asked_at(CHAT), decoder.n_asked()), (1, 3), "{shown}: the pair is barred");
        let [with, without, _] = [0, 1, 2].map(|i| decoder.asked(i));
        assert_eq!(
            (with.body["messages"].clone(), with.body["seed"].clone()),
            (without.body["messages"].clone(), without.body["seed"].clone())
        );
        assert_eq!((n_fallbacks(&front, "kv_lost").await, n_fallbacks(&front, "prefill_kept_away").await), (1, 1));
        let state = front.get("/baton/state").await;
        let upstream = &state["upstreams"][0];
        assert_eq!(upstream["breaker"]["failures"], json!({}), "{shown}: {state}");
        let of_prefill = &upstream["prefill"][0];
        assert_eq!(of_prefill["breaker"]["last_reason"], "kv_lost", "{shown}: {state}");
        assert_eq!((&of_prefill["prompts"], &of_prefill["transferred_tokens"]), (&json!(1), &json!(0)), "{state}");
        let route = &state["routes"][0];
        assert_eq!((&route["prefill"], &route["outcome"]), (&Value::Null, &json!("done")), "{state}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_that_lost_kv_is_tried_again() {
    let prefiller = Mock::start(|_, asked| match asked.path.as_str() {
        PROBE => whole(200, "", &json!({ "choices": [] })),
        _ => prefill(asked),
    })
    .await;
    let has_failed = AtomicBool::new(false);
    let decoder = Mock::start(move |_, asked| {
        let has_kv = asked.body.get("kv_transfer_params").is_some();
        if has_kv && !has_failed.swap(true, Ordering::SeqCst) { whole(500, "", &json!({})) } else { says("well") }
    })
    .await;
    let front = pair(&prefiller, &decoder, "");
    eventually_async("a second prefill", async || {
        assert_eq!(front.chat(json!({})).await.content(), "well");
        front.get("/baton/state").await["upstreams"][0]["prefill"][0]["prompts"] == 2
    })
    .await;
    assert_eq!(n_fallbacks(&front, "kv_lost").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_server_that_waits_in_vain_for_kv_does_so_once() {
    let prefiller = Mock::start(|_, asked| match asked.path.as_str() {
        PROBE => vec![Step::Hang],
        _ => prefill(asked),
    })
    .await;
    let decoder = Mock::start(|_, asked| match asked.body.get("kv_transfer_params") {
        Some(_) => vec![Step::Hang],
        None => says("well"),
    })
    .await;
    let front = pair(&prefiller, &decoder, "first_seconds = 4");
    for _ in 0..2 {
        assert_eq!(front.chat(json!({})).await.content(), "well");
    }
    assert_eq!((prefiller.n_asked_at(CHAT), decoder.n_asked()), (1, 3));
    assert_eq!((n_fallbacks(&front, "kv_timed_out").await, n_fallbacks(&front, "prefill_kept_away").await), (1, 1));
    let state = front.get("/baton/state").await;
    assert_eq!(state["upstreams"][0]["breaker"]["failures"], json!({}), "{state}");
    assert_eq!(state["upstreams"][0]["prefill"][0]["breaker"]["last_reason"], "kv_timed_out", "{state}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_deadline_spans_the_prefill_and_both_attempts() {
    let prefiller = Mock::start(|_, asked| {
        let late = Step::Wait(Duration::from_secs(7));
        std::iter::once(late).chain(prefill(asked)).collect()
    })
    .await;
    let decoder = Mock::start(|_, _| vec![Step::Hang]).await;
    let front = pair(&prefiller, &decoder, "first_seconds = 16");
    let asked = std::time::Instant::now();
    assert_eq!(front.chat(json!({})).await.status, 503);
    let seconds = asked.elapsed().as_secs_f64();
    assert!((15.0..20.0).contains(&seconds), "{seconds}");
    assert_eq!(decoder.n_asked(), 2, "once with the KV and once without");
    let state = front.get("/baton/state").await;
    let upstream = &state["upstreams"][0];
    assert_eq!(upstream["breaker"]["failures"], json!({ "timed_out": 1 }), "{state}");
    // Perhaps the KV left too little time to compute the prompt: the next request does not wait for it.
    assert_eq!((&upstream["fallbacks"], &upstream["prefill"][0]["breaker"]["is_open"]), (&json!({}), &json!(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_a_gateway_proves_no_lost_kv() {
    for status in [408, 502, 504] {
        let prefiller = Mock::start(|_, asked| prefill(asked)).await;
        let decoder = Mock::start(move |_, asked| match asked.body.get("kv_transfer_params") {
            Some(_) => whole(status, "", &json!({})),
            None => says("well"),
        })
        .await;
        let front = pair(&prefiller, &decoder, "");
        for _ in 0..2 {
            assert_eq!(front.chat(json!({})).await.content(), "well");
        }
        assert_eq!((prefiller.n_asked_at(CHAT), decoder.n_asked()), (2, 4), "{status}: the pair stays in use");
        assert_eq!(n_fallbacks(&front, "gateway_error").await, 2, "{status}");
        let state = front.get("/baton/state").await;
        let upstream = &state["upstreams"][0];
        assert_eq!(upstream["breaker"]["failures"], json!({}), "{status}: {state}");
        assert_eq!(upstream["prefill"][0]["breaker"]["failures"], json!({}), "{status}: {state}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_prefill_server_stays_in_use() {
    for (status, headers) in [(429, ""), (503, "retry-after: 60\r\n")] {
        let prefiller = Mock::start(move |_, _| whole(status, headers, &json!({}))).await;
        let decoder = Mock::start(|_, _| says("well")).await;
        let front = pair(&prefiller, &decoder, "");
        for _ in 0..3 {
            assert_eq!(front.chat(json!({})).await.content(), "well");
        }
        assert_eq!((prefiller.n_asked(), n_fallbacks(&front, "prefill_busy").await), (3, 3), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_a_prefill_server_fails_at_bars_it_if_the_next_one_fails_too() {
    let prefiller = Mock::start(|n, asked| match (asked.path.as_str(), n) {
        (PROBE, _) => vec![Step::Hang],
        (_, 1) => prefill(asked),
        _ => whole(500, "", &json!({})),
    })
    .await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front = pair(&prefiller, &decoder, "");
    for _ in 0..5 {
        assert_eq!(front.chat(json!({})).await.content(), "well");
    }
    assert_eq!(prefiller.n_asked_at(CHAT), 4, "it fails, computes, fails, fails, and is barred");
    assert_eq!(
        (n_fallbacks(&front, "prefill_server_error").await, n_fallbacks(&front, "prefill_kept_away").await),
        (3, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_barred_prefill_server_is_probed_when_a_prompt_has_missed_it() {
    let prefiller = Mock::start(|_, asked| match asked.path.as_str() {
        PROBE => whole(500, "", &json!({})),
        _ => whole(200, "", &json!({ "choices": [] })),
    })
    .await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front = pair(&prefiller, &decoder, "");
    assert_eq!(front.chat(json!({})).await.content(), "well");
    let probed = async |n: usize| eventually_async("a probe", async || prefiller.n_asked_at(PROBE) >= n).await;
    probed(1).await;
    assert_eq!(front.chat(json!({})).await.content(), "well");
    probed(2).await;
    assert_eq!(prefiller.n_asked_at(CHAT), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_prefill_server_has_time_for_its_probe() {
    let has_failed = AtomicBool::new(false);
    let prefiller = Mock::start(move |_, asked| match asked.path.as_str() {
        PROBE => [vec![Step::Wait(Duration::from_secs(6))], whole(200, "", &json!({ "choices": [] }))].concat(),
        _ if has_failed.swap(true, Ordering::SeqCst) => prefill(asked),
        _ => whole(200, "", &json!({ "choices": [] })),
    })
    .await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front = pair(&prefiller, &decoder, "");
    eventually_async("the prefill server", async || {
        assert_eq!(front.chat(json!({})).await.content(), "well");
        tokio::time::sleep(Duration::from_millis(200)).await;
        front.get("/baton/state").await["upstreams"][0]["prefill"][0]["prompts"] == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_success_from_before_a_failure_leaves_the_breaker_open() {
    let decoder = Mock::start(|n, _| match n {
        0 => [vec![Step::Wait(Duration::from_secs(3))], says("well")].concat(),
        _ => whole(500, "", &json!({})),
    })
    .await;
    let front = ReloadableServer::start(&upstream("v", "vllm", &decoder.url, ""));
    let fails = async {
        eventually_async("the first request", async || decoder.n_asked() == 1).await;
        assert_eq!(front.chat(json!({ "stream": true })).await.status, 503);
    };
    let (first, ()) = tokio::join!(front.chat(json!({ "stream": true })), fails);
    assert!(first.text.contains("well"), "{first:?}");
    let state = front.get("/baton/state").await;
    assert_eq!(state["upstreams"][0]["breaker"]["is_open"], true, "{state}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_server_that_fails_without_kv_too_is_not_excused() {
    let prefiller = Mock::start(|_, asked| prefill(asked)).await;
    let decoder = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    let front = pair(&prefiller, &decoder, "");
    assert_eq!(front.chat(json!({})).await.status, 503);
    assert_eq!(decoder.n_asked(), 2, "once with the KV and once without");
    let state = front.get("/baton/state").await;
    let upstream = &state["upstreams"][0];
    assert_eq!(upstream["breaker"]["failures"], json!({ "server_error": 1 }), "{state}");
    assert_eq!((&upstream["fallbacks"], &upstream["prefill"][0]["breaker"]["is_open"]), (&json!({}), &json!(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_a_prefill_server_refuses_does_not_bar_it() {
    let long = json!({ "object": "error", "message": "This model's maximum context length is 8 tokens.", "code": 400 });
    let prefiller = Mock::start(move |n, asked| if n == 0 { whole(400, "", &long) } else { prefill(asked) }).await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front = pair(&prefiller, &decoder, "");
    for _ in 0..2 {
        assert_eq!(front.chat(json!({})).await.content(), "well");
    }
    assert_eq!((prefiller.n_asked(), n_fallbacks(&front, "prompt_refused").await), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_route_shows_the_prefill_servers_of_all_choices() {
    let late = |_, asked: &MockRequest| [vec![Step::Wait(Duration::from_millis(300))], prefill(asked)].concat();
    let [first, second] = [Mock::start(late).await, Mock::start(late).await];
    let decoder = Mock::start(|_, _| says("well")).await;
    let more = format!("prefill = [\"{}\", \"{}\"]", first.url, second.url);
    let front = ReloadableServer::start(&upstream("pd", "vllm", &decoder.url, &more));
    let long = harness::said(&"word ".repeat(1_000), json!({ "n": 3 }));
    assert_eq!(front.post(CHAT, &long).await.status, 200);
    let state = front.get("/baton/state").await;
    let route = &state["routes"][0];
    let mut servers: Vec<&str> = route["prefill"].as_str().unwrap().split(", ").collect();
    servers.sort_unstable();
    assert_eq!(servers, ["prefill-1", "prefill-2"], "{route}");
    let prefill = &route["upstream_prefill"];
    assert_eq!(prefill["n_transferred"], 3 * 1_049, "{route}");
    assert!((300.0..5_000.0).contains(&prefill["prefill_ms"].as_f64().unwrap()), "{route}");
}

#[tokio::test(flavor = "multi_thread")]
async fn state_metrics_and_log_show_which_server_prefilled_and_what_came_by_transfer() {
    let prefiller = Mock::start(|_, asked| prefill(asked)).await;
    // The second reply reports that the decode server computed a part of the prompt itself.
    let decoder = Mock::start(|n, _| match n {
        0 => says("well"),
        _ => {
            let usage = json!({ "prompt_tokens": 1_049, "prompt_tokens_details": { "cached_tokens": 1_000 } });
            let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }], "usage": usage });
            vec![head(), text("well"), event(&end), Step::Send("data: [DONE]\n\n".into())]
        }
    })
    .await;
    let log = tempfile::NamedTempFile::new().unwrap();
    let config = upstream("pd", "vllm", &decoder.url, &format!("prefill = [\"{}\"]", prefiller.url));
    let front = ReloadableServer::started(log.reopen().unwrap(), &config, &[], &[("RUST_LOG", "info")]);
    let long = harness::said(&"word ".repeat(1_000), json!({ "stream": true }));
    for n_transferred in [1_049, 1_000] {
        assert_eq!(front.post(CHAT, &long).await.status, 200);
        let state = front.get("/baton/state").await;
        let route = &state["routes"][0];
        assert_eq!((&route["prefill"], &route["decode"]), (&json!("prefill-1"), &json!("pd")), "{route}");
        assert_eq!(route["upstream_prefill"]["n_transferred"], n_transferred, "{route}");
        assert!(route["upstream_prefill"]["prefill_ms"].as_f64() > Some(0.0), "{route}");
    }
    let state = front.get("/baton/state").await;
    let server = &state["upstreams"][0]["prefill"][0];
    assert_eq!(server["name"], "prefill-1", "{server}");
    assert!(!state.to_string().contains(&prefiller.url), "addresses are for operators: {state}");
    assert_eq!((&server["prompts"], &server["transferred_tokens"]), (&json!(2), &json!(2_049)), "{server}");
    assert!(server["prompt_seconds"].as_f64() > Some(0.0), "{server}");
    let metrics = reqwest::get(format!("{}/metrics", front.server.base)).await.unwrap().text().await.unwrap();
    for line in [
        "baton_upstream_prefill_prompts_total{upstream=\"pd\",prefill=\"prefill-1\"} 2",
        "baton_upstream_transferred_tokens_total{upstream=\"pd\",prefill=\"prefill-1\"} 2049",
        "baton_upstream_prefill_breaker_open{upstream=\"pd\",prefill=\"prefill-1\"} 0",
        "baton_upstream_prefill_seconds_total{upstream=\"pd\",prefill=\"prefill-1\"} ",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    let logged = || std::fs::read_to_string(log.path()).unwrap();
    let has_line = |n_transferred: u32| {
        logged().lines().any(|line| {
            let has = |part: &str| line.contains(part);
            has("request ended")
                && has("prefill-1")
                && has("prefill_ms")
                && has(&format!("n_transferred={n_transferred}"))
        })
    };
    eventually_async("the log", async || has_line(1_049) && has_line(1_000)).await;
}
