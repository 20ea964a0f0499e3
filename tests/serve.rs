//! `baton serve` with the real model, real sockets and real processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test that cannot go on panics")]

mod harness;

use std::process::{Command, Stdio};
use std::time::Duration;

use harness::{BATON, Server, chat, eventually, eventually_async, is_alive, long_prompt, model, read_all};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

async fn post(server: &Server, body: &Value) -> (u16, Value) {
    post_as(server, body, None).await
}

async fn post_as(server: &Server, body: &Value, key: Option<&str>) -> (u16, Value) {
    let mut request = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(body);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn health(server: &Server) -> (u16, Value) {
    let response = reqwest::get(format!("{}/health", server.base)).await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("no content in {reply}"))
}

fn cached_tokens(reply: &Value) -> u64 {
    reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{reply}"))
}

#[tokio::test]
async fn a_killed_engine_is_replaced_and_the_next_request_works() {
    let server = Server::start(&[]);
    let body = chat("What is the capital of France?", json!({}));
    let (_, before) = post(&server, &body).await;
    for _ in 0..3 {
        let killed = server.engine();
        kill_process(killed, Signal::KILL).unwrap();
        let (status, after) = post(&server, &body).await;
        assert_eq!((status, content(&after)), (200, content(&before)));
        assert_ne!(server.engine(), killed);
    }
}

#[tokio::test]
async fn a_stream_goes_on_when_its_engine_is_killed_or_freezes() {
    let server = Server::start(&[]);
    let body = chat("Count from one to one hundred in words.", json!({ "max_tokens": 96, "ignore_eos": true }));
    let (_, undisturbed) = post(&server, &body).await;
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({ "include_usage": true });
    for signal in [Signal::KILL, Signal::STOP] {
        let engine = server.engine();
        let client = reqwest::Client::new();
        let call = client.post(format!("{}/v1/chat/completions", server.base)).json(&streamed);
        let mut stream = call.send().await.unwrap();
        let mut text = String::new();
        let whole = async {
            while let Some(chunk) = stream.chunk().await.unwrap() {
                text.push_str(&String::from_utf8_lossy(&chunk));
                if text.matches("content").count() > 60 && is_alive(engine) {
                    // Again and again is the same as once.
                    kill_process(engine, signal).unwrap();
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), whole).await.expect("the stream to end");
        assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("error"), "{text}");
        assert!(!is_alive(engine));
        let chunks = text.lines().filter_map(|line| line.strip_prefix("data: {"));
        let chunks: Vec<Value> = chunks.map(|json| serde_json::from_str(&format!("{{{json}")).unwrap()).collect();
        let said: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(said, content(&undisturbed), "{signal:?}");
        assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 96);
        assert_eq!(health(&server).await.0, 200);
    }
}

#[tokio::test]
async fn an_engine_that_cannot_start_says_why_and_recovers_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("model.gguf");
    std::fs::copy(model(), &copy).unwrap();
    let server = Server::with(&["--model", copy.to_str().unwrap(), "--name", "smollm2", "--threads", "1"]);
    assert_eq!(health(&server).await, (200, json!({ "status": "ok" })));

    let hidden = folder.path().join("elsewhere");
    std::fs::rename(&copy, &hidden).unwrap();
    kill_process(server.engine(), Signal::KILL).unwrap();
    eventually_async("an unhealthy server", || async { health(&server).await.1.to_string().contains("missing") }).await;
    let (status, report) = health(&server).await;
    assert_eq!(status, 503, "{report}");
    let (status, error) = post(&server, &chat("hello", json!({}))).await;
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(status, 503);
    assert!(message.contains("the model file is missing"), "{message}");
    assert!(!message.contains(folder.path().to_str().unwrap()), "no path is shown to a client: {message}");

    std::fs::rename(&hidden, &copy).unwrap();
    eventually_async("a healthy server", || async { health(&server).await.0 == 200 }).await;
    assert_eq!(post(&server, &chat("hello", json!({}))).await.0, 200);
}

#[test]
fn no_engine_outlives_its_server() {
    for (frozen, signal) in [(false, Signal::KILL), (true, Signal::KILL), (false, Signal::TERM), (false, Signal::INT)] {
        // Only Linux can end a child that is stopped; elsewhere it ends when it is continued.
        if frozen && cfg!(not(target_os = "linux")) {
            println!("skipped: a frozen child ends with its parent on Linux only");
            continue;
        }
        let mut server = Server::start(&[]);
        let engine = server.engine();
        if frozen {
            kill_process(engine, Signal::STOP).unwrap();
        }
        server.signal(signal);
        server.wait();
        eventually("the engine's end", || (!is_alive(engine)).then_some(()));
    }
}

#[tokio::test]
async fn cached_tokens_tell_the_truth_and_never_cross_keys() {
    let server = Server::start(&[]);
    let body = chat(&long_prompt("one", 150), json!({ "max_tokens": 4 }));
    let (_, first) = post_as(&server, &body, Some("alice")).await;
    assert_eq!(cached_tokens(&first), 0);
    let n_prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let (_, again) = post_as(&server, &body, Some("alice")).await;
    assert_eq!(cached_tokens(&again), n_prompt - 1, "all but the last token, which is decoded");
    assert_eq!(content(&again), content(&first));
    let (_, other) = post_as(&server, &body, Some("bob")).await;
    assert_eq!(cached_tokens(&other), 0, "bob must not learn what alice asked");
    assert_eq!(content(&other), content(&first));

    // The second turn of the same chat computes only what is new.
    let turn = json!([
        { "role": "user", "content": long_prompt("one", 150) },
        { "role": "assistant", "content": content(&first) },
        { "role": "user", "content": "And then?" },
    ]);
    let (_, second) = post_as(&server, &chat("", json!({ "messages": turn })), Some("alice")).await;
    assert!(cached_tokens(&second) >= n_prompt - 1, "{second}");
}

#[tokio::test]
async fn callers_may_share_the_cache_if_configured() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("baton.toml");
    std::fs::write(&config, "share_prefix_cache = true\n").unwrap();
    let server = Server::start(&["--config", config.to_str().unwrap()]);
    let body = chat(&long_prompt("shared", 60), json!({ "max_tokens": 1 }));
    post_as(&server, &body, Some("alice")).await;
    let (_, other) = post_as(&server, &body, Some("bob")).await;
    assert!(cached_tokens(&other) > 50, "{other}");
}

#[tokio::test]
async fn an_overlong_prompt_is_refused_before_the_stream_starts() {
    let server = Server::start(&["--ctx-size", "256"]);
    for stream in [false, true] {
        let body = chat(&long_prompt("long", 600), json!({ "stream": stream }));
        let (status, error) = post(&server, &body).await;
        let error = &error["error"];
        assert_eq!((status, error["code"].as_str().unwrap()), (400, "context_length_exceeded"), "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("maximum context length is 256 tokens"), "{message}");
        assert!(message.contains("exceeds the available context size"), "{message}");
        assert_eq!(error["n_ctx"], 256);
        assert!(error["n_prompt_tokens"].as_u64().unwrap() > 600);
    }
    // At the end of the context generation stops, and says so.
    let (_, full) = post(&server, &chat("Count for ever.", json!({ "max_tokens": null, "ignore_eos": true }))).await;
    assert_eq!(full["choices"][0]["finish_reason"], "length");
    assert_eq!(full["usage"]["total_tokens"], 256, "{full}");
}

#[tokio::test]
async fn the_prompt_of_several_choices_is_computed_once() {
    let server = Server::start(&[]);
    let body = chat(&long_prompt("choices", 100), json!({ "n": 4, "temperature": 1.0, "seed": 7, "max_tokens": 8 }));
    let (_, reply) = post(&server, &body).await;
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    let texts: std::collections::HashSet<&str> =
        choices.iter().map(|c| c["message"]["content"].as_str().unwrap()).collect();
    assert!(texts.len() > 1, "choices draw with seeds of their own: {texts:?}");
    // Computed by one choice, shared by the others: prompt tokens are counted and computed once.
    let n_prompt = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(cached_tokens(&reply), 0);
    assert!(n_prompt > 100);
    let (_, again) = post(&server, &body).await;
    assert_eq!(again["choices"], reply["choices"], "the same seed gives the same output");
}

#[tokio::test]
async fn stop_strings_and_limits_end_a_reply_exactly() {
    let server = Server::start(&[]);
    let (_, whole) = post(&server, &chat("Count from one to twenty.", json!({ "max_tokens": 40 }))).await;
    let text = content(&whole).to_owned();
    // A stop string that starts and ends inside tokens.
    let middle: String = text.chars().skip(text.chars().count() / 2).take(5).collect();
    let at = text.find(&middle).unwrap();
    let body = chat("Count from one to twenty.", json!({ "max_tokens": 40, "stop": [middle] }));
    let (_, cut) = post(&server, &body).await;
    assert_eq!(content(&cut), &text[..at]);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    let (_, none) = post(&server, &chat("Count.", json!({ "max_tokens": 0 }))).await;
    assert_eq!((content(&none), &none["choices"][0]["finish_reason"]), ("", &json!("length")));
    assert_eq!(none["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn an_operators_template_replaces_the_models() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("t.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ raise_exception('no ' + m.role + ' here') }}{% endfor %}")
        .unwrap();
    let server = Server::start(&["--chat-template-file", template.to_str().unwrap()]);
    let (status, error) = post(&server, &chat("hi", json!({}))).await;
    assert_eq!(status, 400);
    assert!(error["error"]["message"].as_str().unwrap().contains("no user here"), "{error}");
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_slot_also_during_prefill() {
    let server = Server::start(&["--slots", "1"]);
    let slow = chat(&long_prompt("leaving", 7_000), json!({ "max_tokens": 1 }));
    for stream in [true, false] {
        let mut body = slow.clone();
        body["stream"] = json!(stream);
        let client = reqwest::Client::builder().timeout(Duration::from_millis(700)).build().unwrap();
        let left = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await;
        assert!(left.is_err() || stream, "the client was to leave during prefill");
        drop(left);
        // With one slot the next request can only be answered once that one is free.
        let began = std::time::Instant::now();
        let (status, _) = post(&server, &chat("hi", json!({ "max_tokens": 1 }))).await;
        assert_eq!(status, 200);
        println!("stream={stream}: the next request was answered after {:?}", began.elapsed());
        // Not a measure of speed: the whole prefill takes several times this on any machine this runs on.
        assert!(began.elapsed() < Duration::from_secs(8), "the prefill of a client that left went on");
    }
}

#[tokio::test]
async fn the_endpoint_is_small_and_starts_quickly() {
    let began = std::time::Instant::now();
    let server = Server::start(&[]);
    println!("ready after {:?}", began.elapsed());
    for i in 0..20 {
        post(&server, &chat(&format!("Number {i}"), json!({ "max_tokens": 2 }))).await;
    }
    let kib = server.resident_kib();
    println!("resident memory of the endpoint's process: {kib} KiB");
    assert!(kib < 30 * 1024, "{kib} KiB");
}

#[tokio::test]
async fn ctrl_c_in_a_terminal_lets_a_running_stream_end() {
    let mut server = Server::start(&[]);
    let body = chat("Tell me a story.", json!({ "max_tokens": 60, "stream": true }));
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    // A terminal signals everybody in its group; the engine must stay until the stream has ended.
    kill_process(server.engine(), Signal::INT).unwrap();
    kill_process(server.engine(), Signal::TERM).unwrap();
    server.signal(Signal::INT);
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(!text.contains("error"), "{text}");
    drop(client);
    assert!(server.wait().success());
}

#[test]
fn mistakes_at_start_up_are_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("text.gguf"), "this is not a model").unwrap();
    let whole = std::fs::read(model()).unwrap();
    std::fs::write(path("cut.gguf"), &whole[..whole.len() / 2]).unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let good = model().to_str().unwrap().to_owned();
    let free = "127.0.0.1:0";

    let check = |args: &[&str], cache: Option<&str>, expected: &str| {
        let mut command = Command::new(BATON);
        command.arg("serve").args(args).stdout(Stdio::null()).stderr(Stdio::piped());
        if let Some(cache) = cache {
            command.env("BATON_CACHE", cache);
        }
        let mut process = command.spawn().unwrap();
        let stderr = read_all(process.stderr.take());
        let status = process.wait().unwrap();
        assert!(!status.success() && status.code().is_some(), "{args:?}: {status}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
        assert!(!stderr.contains("panicked") && !stderr.contains("backtrace"), "{stderr}");
        println!("{}", stderr.trim());
        let processes = Command::new("ps").args(["-A", "-o", "args="]).output().unwrap();
        let processes = String::from_utf8_lossy(&processes.stdout).into_owned();
        let left = processes.lines().find(|line| line.contains(folder.path().to_str().unwrap()));
        assert_eq!(left, None, "{args:?} left a process behind");
    };
    check(&["--listen", free, "--model", &path("none.gguf")], None, "none.gguf");
    check(&["--listen", free, "--model", &path("text.gguf")], None, "not a GGUF");
    check(&["--listen", free, "--model", &path("cut.gguf")], None, "cut.gguf");
    check(&["--listen", free, "--model", "smolm2"], None, "smollm2");
    check(&["--listen", &taken, "--model", &good], None, "in use");
    check(&["--listen", free, "--model", &good, "--ctx-size", "2000000000"], None, "too little memory");
    check(&["--listen", free, "--model", &good, "--slots", "0"], None, "--slots");
    check(&["--listen", free, "--model", "smollm2"], Some(&path("text.gguf")), "text.gguf");
    check(&["--listen", "nonsense"], None, "HOST:PORT");
    check(&["--config", &path("none.toml")], None, "none.toml");
    std::fs::write(path("wrong.toml"), "[model]\n\n[model.engine]\nslots = 0\n").unwrap();
    check(&["--config", &path("wrong.toml")], None, "wrong.toml: line 4: model.engine.slots");
    check(&["--engine", "sim", "--sim-decode-tps=-1"], None, "--sim-decode-tps");
    check(&["--decode", "http://127.0.0.1:1", "--slots", "2"], None, "--slots is for an engine here");
    check(
        &["--decode", "127.0.0.1:1", "--decode", "http://127.0.0.1:1/"],
        None,
        "--decode names http://127.0.0.1:1 twice",
    );
    check(&["--model", "../../no/such/file"], None, "../../no/such/file");
    let serve = ["serve", "--engine", "sim", "--listen", free];
    for (variable, value, expected) in
        [("BATON_API_KEY", "", "BATON_API_KEY is set but empty"), ("TMPDIR", "/nowhere", "/nowhere: ")]
    {
        let output = Command::new(BATON).args(serve).env(variable, value).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.lines().count() == 1 && stderr.contains(expected) && stderr.contains(variable), "{stderr}");
    }
}

#[tokio::test]
async fn a_model_without_a_chat_template_says_so_at_once_and_to_clients() {
    // The default model, whose template goes by a name that nobody looks for.
    let mut bytes = std::fs::read(model()).unwrap();
    let key = b"tokenizer.chat_template";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    bytes[at + key.len() - 1] = b'X';
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("base.gguf");
    std::fs::write(&model, bytes).unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let args = ["--model", model.to_str().unwrap(), "--threads", "1", "--ctx-size", "256"];
    let server = Server::logging_to(log.reopen().unwrap(), &args);
    let warning = std::fs::read_to_string(log.path()).unwrap();
    assert!(warning.contains("no chat template") && warning.contains("--chat-template-file"), "{warning}");
    let (status, error) = post(&server, &chat("hi", json!({ "model": "base" }))).await;
    assert_eq!((status, &error["error"]["type"]), (501, &json!("not_supported_error")));
    assert!(error["error"]["message"].as_str().unwrap().contains("has no chat template"), "{error}");
}

#[tokio::test]
async fn more_choices_than_can_ever_wait_are_refused_at_once() {
    // They begin together, and so wait together, also while slots are free.
    let server = Server::start(&["--max-queued", "2"]);
    let (status, error) = post(&server, &chat("hi", json!({ "n": 3 }))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("n")), "{error}");
    // The places of those that were refused are free again within a step.
    let two = chat("hi", json!({ "n": 2 }));
    eventually_async("two choices", || async { post(&server, &two).await.0 == 200 }).await;
}

#[tokio::test]
async fn a_bias_on_a_token_that_does_not_exist_names_the_field() {
    let server = Server::with(&["--engine", "sim"]);
    let (status, error) = post(&server, &chat("hi", json!({ "model": "sim", "logit_bias": { "999": 1 } }))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("logit_bias")), "{error}");
}

#[test]
fn an_open_server_in_the_network_is_warned_about_once() {
    for (args, n_warnings) in
        [(&["--listen", "0.0.0.0:0"][..], 1), (&["--listen", "0.0.0.0:0", "--api-key", "k"], 0), (&[], 0)]
    {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut server = Server::logging_to(log.reopen().unwrap(), &[&["--engine", "sim"], args].concat());
        server.signal(Signal::TERM);
        server.wait();
        let log = std::fs::read_to_string(log.path()).unwrap();
        assert_eq!(
            (log.lines().count(), log.contains("asks for no key")),
            (n_warnings, n_warnings == 1),
            "{args:?}: {log}"
        );
    }
}

#[tokio::test]
async fn a_load_balancer_sees_that_the_server_stops_while_streams_finish() {
    let mut server = Server::with(&["--engine", "sim", "--sim-decode-tps", "10"]);
    let body = chat("hi", json!({ "model": "sim", "max_tokens": 10_000, "stream": true, "ignore_eos": true }));
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    assert_eq!(reqwest::get(format!("{}/health", server.base)).await.unwrap().status(), 200);
    server.signal(Signal::TERM);
    // Each from a connection of its own.
    let health = async || reqwest::get(format!("{}/health", server.base)).await.unwrap();
    eventually_async("a word of the stop", || async { health().await.status() == 503 }).await;
    let said = health().await;
    assert_eq!(said.headers()["connection"], "close");
    assert!(said.text().await.unwrap().contains("stopping"));
    assert_eq!(post(&server, &chat("hi", json!({ "model": "sim" }))).await.0, 503);
    assert!(stream.chunk().await.unwrap().is_some(), "the stream goes on");
    drop((stream, client));
    assert!(server.wait().success(), "nothing runs any more");
}

#[tokio::test]
async fn a_second_signal_ends_running_streams_with_an_error() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut server = Server::logging_to(log.reopen().unwrap(), &["--engine", "sim", "--sim-decode-tps", "10"]);
    let body = chat("hi", json!({ "model": "sim", "max_tokens": 10_000, "stream": true, "ignore_eos": true }));
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    server.signal(Signal::INT);
    eventually("a word about the stream", || {
        std::fs::read_to_string(log.path()).unwrap().contains("finishing 1 request").then_some(())
    });
    server.signal(Signal::INT);
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.contains(r#"data: {"error":"#) && text.contains("stopping") && !text.contains("[DONE]"), "{text}");
    assert!(server.wait().success());
}
