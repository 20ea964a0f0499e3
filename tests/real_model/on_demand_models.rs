//! Models of the endpoint that are loaded on demand: loading, unloading, memory limits and reloads.

use std::path::PathBuf;
use std::process::Command;

use futures::StreamExt;
use futures::future::join_all;
use harness::{BATON, BatonServer, TempConfigFile, chat, eventually_async, is_alive, model, sliding_window_model};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

/// Small enough for two models in the test machine's memory. With 256 MiB of compute buffers they take about 400 and 520 MiB.
const ENGINE: &str = "slots = 2\nctx_size = 1024\nkv_cells = 2048\nthreads = 1\n";

fn entry(name: &str, source: &PathBuf, more: &str) -> String {
    format!("[[models]]\nname = {name:?}\nsource = {source:?}\n{more}\n[models.engine]\n{ENGINE}")
}

/// A model's state, and how often it was loaded.
async fn residency(server: &BatonServer, name: &str) -> Value {
    let state = server.state().await;
    let found = state["models"].as_array().unwrap().iter().find(|model| model["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {state}"))["residency"].clone()
}

async fn is_in_state(server: &BatonServer, name: &str, life: &str) -> bool {
    residency(server, name).await["life"] == life
}

/// A completion, which needs no chat template.
fn complete(name: &str) -> Value {
    json!({ "model": name, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0 })
}

/// Starts a stream of this many tokens in the background. Returns its text, or `Err` if it did not end correctly.
fn long_stream(server: &BatonServer, name: &str, n_tokens: u32) -> tokio::task::JoinHandle<Result<String, String>> {
    let more = json!({ "model": name, "max_tokens": n_tokens, "ignore_eos": true, "stream": true });
    let request = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base));
    let request = request.json(&chat("Count from one to one hundred in words.", more));
    tokio::spawn(async move {
        let mut bytes = request.send().await.map_err(|e| e.to_string())?.bytes_stream();
        let mut text = String::new();
        while let Some(chunk) = bytes.next().await {
            text += &String::from_utf8_lossy(&chunk.map_err(|e| e.to_string())?);
        }
        if text.ends_with("data: [DONE]\n\n") { Ok(text) } else { Err(text) }
    })
}

async fn is_running(server: &BatonServer, name: &str) {
    eventually_async("a running stream", || async { residency(server, name).await["active"] == 1 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_once_for_all_waiting_requests_and_unloaded_when_idle() {
    let config =
        TempConfigFile::new(&entry("smol", &model(), "aliases = [\"small\"]\n[models.sampling]\ntemperature = 0.0\n"));
    let server = config.serve();
    assert!(server.children().is_empty());
    assert_eq!(server.get("/health").await["status"], "ok");
    let listed = server.get("/api/tags").await;
    // `make test` has the default model in Q8_0.
    let quantization = if model().to_str().unwrap().ends_with(".q8_0.gguf") { "Q8_0" } else { "Q4_1" };
    assert_eq!(listed["models"][0]["details"]["quantization_level"], quantization, "{listed}");
    assert_eq!(listed["models"][0]["details"]["parameter_size"], "134.52M", "{listed}");
    assert_eq!(server.get("/api/ps").await["models"], json!([]));
    assert_eq!(server.get("/v1/models").await["data"][0]["status"]["value"], "unloaded");
    let props = server.get("/props").await;
    assert_eq!((&props["is_sleeping"], &props["total_slots"]), (&json!(true), &json!(2)));
    assert_eq!(props["default_generation_settings"]["params"]["temperature"], 0.0);
    let (_, shown) = server.post("/api/show", &json!({ "model": "small" })).await;
    assert!(shown["template"].as_str().unwrap().contains("<|im_start|>"), "{shown}");
    assert!(server.children().is_empty(), "a query does not load the model");

    let body = json!({ "model": "small", "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 8 });
    let replies = join_all((0..6).map(|_| server.post("/v1/chat/completions", &body))).await;
    for (status, reply) in &replies {
        assert_eq!(*status, 200, "{reply}");
        assert_eq!(reply["choices"], replies[0].1["choices"], "without a seed: the model's own temperature is 0");
    }
    assert_eq!(server.children().len(), 1);
    let asked = json!({ "model": "small", "input": "Hello", "max_output_tokens": 2 });
    let (_, response) = server.post("/v1/responses", &asked).await;
    assert_eq!(response["temperature"], 0.0, "as tokens were drawn: {response}");
    let resident = residency(&server, "smol").await;
    assert_eq!((&resident["loads"], &resident["life"]), (&json!(1), &json!("loaded")));
    assert!(resident["load_seconds"].as_f64().unwrap() > 0.0);
    let running = server.get("/api/ps").await;
    let expires_at: jiff::Timestamp = running["models"][0]["expires_at"].as_str().unwrap().parse().unwrap();
    assert_eq!(running["models"][0]["size"], resident["bytes"], "one account of what it takes");
    let left = expires_at.duration_since(jiff::Timestamp::now()).as_secs();
    assert!((200..=300).contains(&left), "{left} s of the default five minutes are left");

    // A request sets how long the model stays loaded.
    let ask = |keep_alive: Value| json!({ "model": "smol", "keep_alive": keep_alive, "stream": false });
    let (_, forever) = server.post("/api/generate", &ask(json!(-1))).await;
    assert_eq!(forever["done_reason"], "load");
    assert_eq!(residency(&server, "smol").await["expires_at_ms"], Value::Null);
    let (_, unloaded) = server.post("/api/chat", &ask(json!(0))).await;
    assert_eq!(unloaded["done_reason"], "unload");
    eventually_async("its end", || async { server.children().is_empty() }).await;
    let (_, loaded) = server.post("/api/generate", &ask(json!("1500ms"))).await;
    assert_eq!((&loaded["done_reason"], server.children().len()), (&json!("load"), 1));
    eventually_async("its end", || async { server.children().is_empty() }).await;
    eventually_async("the unload to be reported", || async { is_in_state(&server, "smol", "unloaded").await }).await;
    let resident = residency(&server, "smol").await;
    assert_eq!((&resident["loads"], &resident["unloads"]), (&json!(2), &json!({ "asked": 1, "idle": 1 })));
    let (status, bad) = server.post("/api/generate", &ask(json!("soon"))).await;
    assert_eq!(status, 400, "{bad}");
    let metrics = reqwest::get(format!("{}/metrics", server.base)).await.unwrap().text().await.unwrap();
    for line in [
        "baton_model_loads_total{model=\"smol\"} 2",
        "baton_model_unloads_total{model=\"smol\",reason=\"idle\"} 1",
        "baton_model_loaded{model=\"smol\"} 0.0",
        "baton_model_load_seconds_total{model=\"smol\"}",
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_model_makes_room_and_a_streaming_one_keeps_its_memory() {
    let Some(gemma) = sliding_window_model() else { return };
    let text = |max_wait: u32, alias: &str| {
        let smol = entry("smol", &model(), &format!("aliases = [{alias:?}]\n"));
        let limits = format!("[loading]\nmemory_budget = \"700MiB\"\nmax_wait_seconds = {max_wait}\n");
        [smol, entry("gemma", &gemma, ""), limits].concat()
    };
    let config = TempConfigFile::new(&text(60, "first"));
    let server = config.serve();
    assert_eq!(server.post("/v1/completions", &complete("smol")).await.0, 200);
    let first = server.engine();
    let (status, reply) = server.post("/v1/completions", &complete("gemma")).await;
    assert_eq!(status, 200, "{reply}");
    assert!(!is_alive(first) && server.children().len() == 1);
    assert_eq!(residency(&server, "smol").await["unloads"], json!({ "memory": 1 }));
    let gemma_alone = reply["choices"][0]["text"].clone();
    assert_eq!(server.post("/v1/completions", &complete("smol")).await.0, 200);

    // A streaming model keeps its memory. A request that waits too long for it gets 503 with `retry-after`.
    let is_in_force = async |max_wait: u32, alias: &str| {
        config.write(&text(max_wait, alias));
        server.signal(Signal::HUP);
        let listed = async || server.get("/v1/models").await["data"][0]["aliases"][0] == alias;
        eventually_async("the new limit", listed).await;
    };
    is_in_force(1, "second").await;
    let stream = long_stream(&server, "smol", 600);
    is_running(&server, "smol").await;
    let request = reqwest::Client::new().post(format!("{}/v1/completions", server.base));
    let refused = request.json(&complete("gemma")).send().await.unwrap();
    assert_eq!(refused.status().as_u16(), 503);
    assert!(refused.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    assert!(refused.text().await.unwrap().contains("busy in the memory"));
    assert!(stream.await.unwrap().is_ok());

    // With a longer wait the request is answered.
    is_in_force(60, "third").await;
    let stream = long_stream(&server, "smol", 300);
    is_running(&server, "smol").await;
    let (status, reply) = server.post("/v1/completions", &complete("gemma")).await;
    assert_eq!((status, &reply["choices"][0]["text"]), (200, &gemma_alone));
    assert!(stream.await.unwrap().is_ok());
    assert_eq!(server.children().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_adds_changes_and_removes_models_while_they_stream() {
    let smol = model();
    let config = TempConfigFile::new(&[entry("one", &smol, ""), entry("two", &smol, "")].concat());
    let log = tempfile::NamedTempFile::new().unwrap();
    let server = config.serve_logging_to(log.reopen().unwrap(), &[]);
    let whole = long_stream(&server, "one", 300).await.unwrap().unwrap();
    let n_deltas = |text: &str| text.matches("\"content\"").count();
    let removed = long_stream(&server, "one", 300);
    let changed = long_stream(&server, "two", 300);
    is_running(&server, "one").await;
    is_running(&server, "two").await;
    let before = server.children();
    assert_eq!(before.len(), 2);

    let larger = entry("two", &smol, "").replace("slots = 2", "slots = 3");
    config.write(&[larger, entry("three", &smol, "")].concat());
    server.signal(Signal::HUP);
    eventually_async("the new model", || async { server.get("/v1/models").await["data"][1]["id"] == "three" }).await;
    assert_eq!(server.post("/v1/completions", &complete("one")).await.0, 404);
    assert_eq!(server.post("/v1/completions", &complete("two")).await.0, 200);
    assert_eq!(server.get("/props?model=two").await["total_slots"], 3);
    assert!(before.iter().all(|pid| is_alive(*pid)), "streams run on the old processes");
    for stream in [removed, changed] {
        let text = stream.await.unwrap().unwrap();
        assert!(n_deltas(&text) > 100 && n_deltas(&text).abs_diff(n_deltas(&whole)) < 30, "{text}");
    }
    eventually_async("the end of the old processes", || async { !before.iter().any(|pid| is_alive(*pid)) }).await;
    assert_eq!(server.children().len(), 1);

    // A file that cannot be served changes nothing.
    config.write(&entry("two", &PathBuf::from("/nowhere.gguf"), ""));
    server.signal(Signal::HUP);
    let logged = || std::fs::read_to_string(log.path()).unwrap();
    eventually_async("the refusal", || async { logged().contains("stays as it was") }).await;
    assert_eq!(server.post("/v1/completions", &complete("two")).await.0, 200);
    assert_eq!(server.get("/v1/models").await["data"][1]["id"], "three");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_one_models_engine_does_not_touch_another() {
    let Some(gemma) = sliding_window_model() else { return };
    let copy = tempfile::tempdir().unwrap();
    let fragile = copy.path().join("gemma.gguf");
    std::fs::copy(gemma, &fragile).unwrap();
    let config = TempConfigFile::new(&[entry("smol", &model(), ""), entry("gemma", &fragile, "")].concat());
    let server = config.serve();
    assert_eq!(server.post("/v1/completions", &complete("gemma")).await.0, 200);
    let killed = server.engine();
    let stream = long_stream(&server, "smol", 200);
    is_running(&server, "smol").await;
    kill_process(killed, Signal::KILL).unwrap();
    let (status, reply) = server.post("/v1/completions", &complete("gemma")).await;
    assert_eq!(status, 200, "{reply}");
    assert!(stream.await.unwrap().is_ok());

    // A model that cannot be loaded is reported, and the endpoint serves the others.
    let (_, unloaded) = server.post("/api/generate", &json!({ "model": "gemma", "keep_alive": 0 })).await;
    assert_eq!(unloaded["done_reason"], "unload");
    eventually_async("its end", || async { is_in_state(&server, "gemma", "unloaded").await }).await;
    std::fs::remove_file(&fragile).unwrap();
    let (status, reply) = server.post("/v1/completions", &complete("gemma")).await;
    assert_eq!(status, 503, "{reply}");
    assert!(reply.to_string().contains("the model file is missing"), "{reply}");
    let health = server.get("/health").await;
    assert_eq!(health["warnings"][0], "own models that could not be loaded: 1");
    assert_eq!(health["status"], "ok");
    assert!(!health.to_string().contains("gemma"), "anybody may ask: {health}");
    assert_eq!(server.post("/v1/completions", &complete("smol")).await.0, 200);
}

#[test]
fn unusable_files_are_reported_with_every_other_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let no_model = folder.path().join("notes.gguf");
    std::fs::write(&no_model, "these are notes").unwrap();
    let draft = folder.path().join("draft.gguf");
    tiny_gguf::write(&draft, tiny_gguf::Architecture::Llama, 1);
    let text = format!(
        "max_requests = 0\n[model]\nsource = \"/nowhere.gguf\"\n[model.engine]\nmmproj = {no_model:?}\n\
         [[models]]\nsource = {no_model:?}\n[[models]]\nsource = {:?}\n[models.engine]\n\
         chat_template_file = \"/nowhere.jinja\"\n[[models]]\nsource = {:?}\n\
         [models.engine]\ndraft = {draft:?}\n",
        model(),
        model()
    );
    let config = TempConfigFile::new(&text);
    for command in [&["check-config"][..], &["serve", "--listen", "127.0.0.1:0", "--config"]] {
        let output = Command::new(&*BATON).args(command).arg(config.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let expected = [
            "line 1: max_requests must be between",
            "line 3: model.source cannot be used: there is no model file at /nowhere.gguf",
            "line 5: model.engine.mmproj cannot be used: ",
            "line 7: models[0].source cannot be used: ",
            "line 11: models[1].engine.chat_template_file cannot be used: /nowhere.jinja",
            "line 13: models[2].source is called ",
            "line 15: models[2].engine.draft cannot be used: its vocabulary is not the model's",
            "has 7 mistakes",
        ];
        assert_eq!(said.lines().count(), expected.len(), "{said}");
        for (line, expected) in said.lines().zip(expected) {
            assert!(line.contains(expected), "{said}");
        }
        assert!(!output.status.success());
    }
}

#[test]
fn a_model_that_can_never_fit_is_refused_before_anything_starts() {
    let text = entry("smol", &model(), "") + "[loading]\nmemory_budget = \"300MiB\"\n";
    let config = TempConfigFile::new(&text);
    for command in [&["check-config"][..], &["serve", "--listen", "127.0.0.1:0", "--config"]] {
        let output = Command::new(&*BATON).args(command).arg(config.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("line 3: models[0].source is refused"), "{said}");
        assert!(said.contains("can never be loaded"), "{said}");
    }
    config.write(&text.replace("300MiB", "1GiB"));
    assert!(Command::new(&*BATON).arg("check-config").arg(config.path()).output().unwrap().status.success());
}
