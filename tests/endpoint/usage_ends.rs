//! The usage of requests that do not come to their end: the endpoint stops, the upstream fails, the client leaves.

use harness::mock::{Mock, head, says, text, whole};
use harness::{BatonNode, ReloadableServer, SseReply, TempConfigFile, chunks, eventually_async, said, upstream};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Tokens of a reply that its client has not got when it ends: on their way, or held back because they are half a character.
const ON_THEIR_WAY: u64 = 8;

/// A key of the usage, in the only row.
fn only(report: &Value, field: &str) -> u64 {
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{report}");
    rows[0][field].as_u64().unwrap_or_else(|| panic!("{field} in {report}"))
}

/// The tokens that a client was sent, by their log-probabilities.
fn n_tokens(sse: &str) -> u64 {
    let of_chunk = |chunk: &Value| chunk["choices"][0]["logprobs"]["content"].as_array().map_or(0, Vec::len);
    chunks(sse).iter().map(|chunk| of_chunk(chunk) as u64).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_that_the_endpoints_stop_breaks_off_count_what_was_generated() {
    let engine = "[model]\ncalibrate = false\n[model.engine]\nengine = \"sim\"\nsim_decode_tps = 50.0\n";
    let config = TempConfigFile::new(&format!("state_folder = \"state\"\n{engine}"));
    let mut server = config.serve();
    let body = |more: Value| said("How are you?", more);
    let long = json!({ "model": "sim", "max_tokens": 10_000, "ignore_eos": true, "logprobs": true });
    let mut stream = SseReply::open(&server, &body(long.clone())).await;
    stream.read_pieces(10).await;
    let (base, whole) = (server.base.clone(), body(long));
    let whole = tokio::spawn(async move {
        let reply =
            reqwest::Client::new().post(format!("{base}/v1/chat/completions")).json(&whole).send().await.unwrap();
        (reply.status().as_u16(), reply.text().await.unwrap())
    });
    let n_running = async || server.get("/baton/state").await["requests"]["running"].as_u64();
    eventually_async("both to run", async || n_running().await == Some(2)).await;
    stream.read_pieces(40).await;
    // The first signal lets replies finish, the second one breaks them off.
    server.signal(Signal::TERM);
    eventually_async("a word of the stop", async || {
        reqwest::get(format!("{}/health", server.base)).await.is_ok_and(|reply| reply.status() == 503)
    })
    .await;
    server.signal(Signal::TERM);
    let text = stream.rest().await;
    assert!(text.contains("the server is stopping"), "{text}");
    let (status, error) = whole.await.unwrap();
    assert!(status == 503 && error.contains("the server is stopping"), "{status} {error}");
    assert!(server.wait().success());

    let server = config.serve();
    let report = server.get("/baton/usage").await;
    let sent = n_tokens(&text);
    let generated = only(&report, "generated_tokens");
    // The other reply began later, at the same speed.
    let most = 2 * (sent + ON_THEIR_WAY);
    assert!(sent >= 30 && (sent + 1..most).contains(&generated), "the stream had {sent}: {report}");
    let (status, reply) = server.post("/v1/chat/completions", &body(json!({ "model": "sim", "max_tokens": 1 }))).await;
    assert_eq!(status, 200, "{reply}");
    let prompt = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((only(&report, "requests"), only(&report, "prompt_tokens")), (2, 2 * prompt), "{report}");
    assert!(report["rows"][0]["engine_seconds"].as_f64().unwrap() > 0.3, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_is_charged_what_was_generated_for_it() {
    let config = "[model]\nname = \"m\"\ncalibrate = false\n[model.engine]\nengine = \"sim\"\nsim_decode_tps = 50.0\n";
    let front = ReloadableServer::with(config, &["--state-folder", ""]);
    let endless = json!({ "max_tokens": 10_000, "ignore_eos": true, "logprobs": true });
    let mut stream = SseReply::open(&front.server, &said("How are you?", endless)).await;
    stream.read_pieces(20).await;
    let sent = n_tokens(&stream.received());
    drop(stream);
    let report = async || front.get("/baton/usage").await;
    eventually_async("its end", async || report().await["rows"].as_array().is_some_and(|rows| rows.len() == 1)).await;
    let report = report().await;
    let generated = only(&report, "generated_tokens");
    // It takes a moment until the connection's end is noticed, but no 10,000 tokens.
    assert!((sent..sent + 500).contains(&generated), "{sent} were sent: {report}");
    assert_eq!(only(&report, "requests"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_upstream_counts_only_what_it_has_begun() {
    let mock = Mock::start(|_, asked| match asked.body["messages"][0]["content"].as_str() {
        Some("refuse") => whole(500, "", &json!({})),
        // The connection ends without an end of the reply.
        Some("break") => vec![head(), text("one "), text("two "), text("three ")],
        _ => says("two words"),
    })
    .await;
    let front = ReloadableServer::with(&upstream("u", "openai", &mock.url, ""), &["--state-folder", ""]);
    let chat =
        async |prompt: &str| front.post("/v1/chat/completions", &said(prompt, json!({ "max_tokens": 400 }))).await;
    assert_eq!(chat("refuse").await.status, 503);
    assert_eq!(front.get("/baton/usage").await["rows"], json!([]), "nothing was begun");
    eventually_async("the upstream's pause to end", async || chat("hello").await.status == 200).await;
    let report = front.get("/baton/usage").await;
    let row = |report: &Value| ["requests", "prompt_tokens", "generated_tokens"].map(|field| only(report, field));
    assert_eq!(row(&report), [1, 5, 2], "what the upstream said");
    let broken = chat("break").await;
    assert!(broken.status >= 500, "{broken:?}");
    let report = front.get("/baton/usage").await;
    // Its prompt is an estimate, because the upstream told no number: four bytes a token.
    let [requests, prompt, generated] = row(&report);
    assert!(requests == 2 && (6..30).contains(&prompt) && generated == 2 + 3, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_upstream_is_counted_once_and_so_is_one_beside_own_nodes() {
    let bad = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    let good = Mock::start(|_, _| says("two words")).await;
    let both = upstream("bad", "openai", &bad.url, "") + &upstream("good", "openai", &good.url, "");
    let front = ReloadableServer::with(&both, &["--state-folder", ""]);
    let row = async |front: &ReloadableServer| {
        let report = front.get("/baton/usage").await;
        ["requests", "prompt_tokens", "generated_tokens"].map(|field| only(&report, field))
    };
    for _ in 0..2 {
        assert_eq!(front.chat(json!({ "max_tokens": 4 })).await.status, 200);
    }
    assert!(bad.n_asked() > 0, "it failed at least once");
    assert_eq!(row(&front).await, [2, 10, 4]);

    // An upstream that is planned beside the nodes of its model.
    let node = BatonNode::with(&["--engine", "sim", "--sim-decode-tps", "2"]);
    let peer = upstream("peer", "openai", &good.url, "models = { m = \"theirs\" }\nsame_models = true\n");
    let config = format!("[model]\nname = \"m\"\ndecode = [\"{}\"]\n{peer}", node.url);
    let front = ReloadableServer::with(&config, &["--state-folder", ""]);
    eventually_async("the upstream to be chosen", async || {
        front.chat(json!({ "max_tokens": 4 })).await.route.starts_with("upstream; ")
    })
    .await;
    let before = row(&front).await;
    let answer = front.chat(json!({ "max_tokens": 4 })).await;
    assert!(answer.route.starts_with("upstream; upstream=peer"), "{answer:?}");
    let after = row(&front).await;
    assert_eq!([after[0] - before[0], after[1] - before[1], after[2] - before[2]], [1, 5, 2]);
}
