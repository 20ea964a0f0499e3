//! Own models that come and go with their requests: real models, real processes.

use std::path::PathBuf;
use std::process::Command;

use futures::StreamExt;
use futures::future::join_all;
use harness::{BATON, Server, chat, eventually_async, is_alive, model};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

/// Small enough for two of them in the tests' machine. With 256 MiB of compute buffers each takes about 400 and 520 MiB.
const ENGINE: &str = "slots = 2\nctx_size = 1024\nkv_cells = 2048\nthreads = 1\n";

/// The second model, where the tests have one.
fn gemma() -> Option<PathBuf> {
    let path = std::env::var_os("BATON_TEST_SWA_MODEL").map(PathBuf::from);
    if path.is_none() {
        println!("BATON_TEST_SWA_MODEL is not set: this test was skipped");
    }
    path
}

/// A configuration file that is written anew.
struct Config {
    folder: tempfile::TempDir,
}

impl Config {
    fn of(text: &str) -> Config {
        let config = Config { folder: tempfile::tempdir().unwrap() };
        config.write(text);
        config
    }

    fn write(&self, text: &str) {
        // At once, as an editor does it: half a file would be reloaded as one.
        let new = self.folder.path().join("new.toml");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.path()).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("baton.toml")
    }

    fn serve(&self) -> Server {
        Server::with(&["--config", self.path().to_str().unwrap()])
    }
}

fn entry(name: &str, source: &PathBuf, more: &str) -> String {
    format!("[[models]]\nname = {name:?}\nsource = {source:?}\n{more}\n[models.engine]\n{ENGINE}")
}

async fn post(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let response = reqwest::Client::new().post(format!("{}{path}", server.base)).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn get(server: &Server, path: &str) -> Value {
    reqwest::get(format!("{}{path}", server.base)).await.unwrap().json().await.unwrap()
}

/// What is known of how a model comes and goes.
async fn residency(server: &Server, name: &str) -> Value {
    let state = get(server, "/baton/state").await;
    let found = state["models"].as_array().unwrap().iter().find(|model| model["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {state}"))["residency"].clone()
}

async fn is_in_life(server: &Server, name: &str, life: &str) -> bool {
    residency(server, name).await["life"] == life
}

/// Text without a chat template.
fn complete(name: &str) -> Value {
    json!({ "model": name, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0 })
}

/// A stream of so many tokens that runs beside the test; all of its text, if it ended as it should.
fn long_stream(server: &Server, name: &str, n_tokens: u32) -> tokio::task::JoinHandle<Result<String, String>> {
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

async fn is_running(server: &Server, name: &str) {
    eventually_async("a running stream", || async { residency(server, name).await["active"] == 1 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_once_for_all_who_wait_and_goes_when_nobody_needs_it() {
    let config = Config::of(&entry("smol", &model(), "aliases = [\"small\"]\n[models.sampling]\ntemperature = 0.0\n"));
    let server = config.serve();
    assert!(server.children().is_empty());
    assert_eq!(get(&server, "/health").await["status"], "ok");
    let listed = get(&server, "/api/tags").await;
    assert_eq!(listed["models"][0]["details"]["quantization_level"], "Q4_1", "{listed}");
    assert_eq!(listed["models"][0]["details"]["parameter_size"], "134.52M", "{listed}");
    assert_eq!(get(&server, "/api/ps").await["models"], json!([]));
    assert_eq!(get(&server, "/v1/models").await["data"][1]["status"]["value"], "unloaded");
    let props = get(&server, "/props").await;
    assert_eq!((&props["is_sleeping"], &props["total_slots"]), (&json!(true), &json!(2)));
    assert_eq!(props["default_generation_settings"]["params"]["temperature"], 0.0);
    let (_, shown) = post(&server, "/api/show", &json!({ "model": "small" })).await;
    assert!(shown["template"].as_str().unwrap().contains("<|im_start|>"), "{shown}");
    assert!(server.children().is_empty(), "to be asked about is no use");

    let body = json!({ "model": "small", "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 8 });
    let replies = join_all((0..6).map(|_| post(&server, "/v1/chat/completions", &body))).await;
    for (status, reply) in &replies {
        assert_eq!(*status, 200, "{reply}");
        assert_eq!(reply["choices"], replies[0].1["choices"], "without a seed: the model's own temperature is 0");
    }
    assert_eq!(server.children().len(), 1);
    let asked = json!({ "model": "small", "input": "Hello", "max_output_tokens": 2 });
    let (_, response) = post(&server, "/v1/responses", &asked).await;
    assert_eq!(response["temperature"], 0.0, "as tokens were drawn: {response}");
    let resident = residency(&server, "smol").await;
    assert_eq!((&resident["loads"], &resident["life"]), (&json!(1), &json!("loaded")));
    assert!(resident["load_seconds"].as_f64().unwrap() > 0.0);
    let running = get(&server, "/api/ps").await;
    let expires_at: jiff::Timestamp = running["models"][0]["expires_at"].as_str().unwrap().parse().unwrap();
    assert_eq!(running["models"][0]["size"], resident["bytes"], "one account of what it takes");
    let left = expires_at.duration_since(jiff::Timestamp::now()).as_secs();
    assert!((200..=300).contains(&left), "{left} s of the default five minutes are left");

    // A request says how long it stays.
    let ask = |keep_alive: Value| json!({ "model": "smol", "keep_alive": keep_alive, "stream": false });
    let (_, forever) = post(&server, "/api/generate", &ask(json!(-1))).await;
    assert_eq!(forever["done_reason"], "load");
    assert_eq!(residency(&server, "smol").await["expires_at_ms"], Value::Null);
    let (_, unloaded) = post(&server, "/api/chat", &ask(json!(0))).await;
    assert_eq!(unloaded["done_reason"], "unload");
    eventually_async("its end", || async { server.children().is_empty() }).await;
    let (_, loaded) = post(&server, "/api/generate", &ask(json!("1500ms"))).await;
    assert_eq!((&loaded["done_reason"], server.children().len()), (&json!("load"), 1));
    eventually_async("its end", || async { server.children().is_empty() }).await;
    eventually_async("an account of it", || async { is_in_life(&server, "smol", "unloaded").await }).await;
    let resident = residency(&server, "smol").await;
    assert_eq!((&resident["loads"], &resident["unloads"]), (&json!(2), &json!({ "asked": 1, "idle": 1 })));
    let (status, bad) = post(&server, "/api/generate", &ask(json!("soon"))).await;
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
async fn what_is_idle_makes_room_and_what_streams_is_waited_for() {
    let Some(gemma) = gemma() else { return };
    let text = |max_wait: u32, alias: &str| {
        let smol = entry("smol", &model(), &format!("aliases = [{alias:?}]\n"));
        let limits = format!("[loading]\nmemory_budget = \"700MiB\"\nmax_wait_seconds = {max_wait}\n");
        [smol, entry("gemma", &gemma, ""), limits].concat()
    };
    let config = Config::of(&text(60, "first"));
    let server = config.serve();
    assert_eq!(post(&server, "/v1/completions", &complete("smol")).await.0, 200);
    let first = server.engine();
    let (status, reply) = post(&server, "/v1/completions", &complete("gemma")).await;
    assert_eq!(status, 200, "{reply}");
    assert!(!is_alive(first) && server.children().len() == 1);
    assert_eq!(residency(&server, "smol").await["unloads"], json!({ "memory": 1 }));
    let gemma_alone = reply["choices"][0]["text"].clone();
    assert_eq!(post(&server, "/v1/completions", &complete("smol")).await.0, 200);

    // While it streams nothing takes its memory, and who waits too long is told when to come back.
    let is_in_force = async |max_wait: u32, alias: &str| {
        config.write(&text(max_wait, alias));
        server.signal(Signal::HUP);
        eventually_async("the new limit", || async { get(&server, "/v1/models").await["data"][1]["id"] == alias })
            .await;
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

    // With more patience it is waited for.
    is_in_force(60, "third").await;
    let stream = long_stream(&server, "smol", 300);
    is_running(&server, "smol").await;
    let (status, reply) = post(&server, "/v1/completions", &complete("gemma")).await;
    assert_eq!((status, &reply["choices"][0]["text"]), (200, &gemma_alone));
    assert!(stream.await.unwrap().is_ok());
    assert_eq!(server.children().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_adds_changes_and_removes_models_while_they_stream() {
    let smol = model();
    let config = Config::of(&[entry("one", &smol, ""), entry("two", &smol, "")].concat());
    let server = config.serve();
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
    eventually_async("the new model", || async { get(&server, "/v1/models").await["data"][1]["id"] == "three" }).await;
    assert_eq!(post(&server, "/v1/completions", &complete("one")).await.0, 404);
    assert_eq!(post(&server, "/v1/completions", &complete("two")).await.0, 200);
    assert_eq!(get(&server, "/props?model=two").await["total_slots"], 3);
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
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    assert_eq!(post(&server, "/v1/completions", &complete("two")).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_one_models_process_is_nothing_to_another() {
    let Some(gemma) = gemma() else { return };
    let copy = tempfile::tempdir().unwrap();
    let fragile = copy.path().join("gemma.gguf");
    std::fs::copy(gemma, &fragile).unwrap();
    let config = Config::of(&[entry("smol", &model(), ""), entry("gemma", &fragile, "")].concat());
    let server = config.serve();
    assert_eq!(post(&server, "/v1/completions", &complete("gemma")).await.0, 200);
    let killed = server.engine();
    let stream = long_stream(&server, "smol", 200);
    is_running(&server, "smol").await;
    kill_process(killed, Signal::KILL).unwrap();
    let (status, reply) = post(&server, "/v1/completions", &complete("gemma")).await;
    assert_eq!(status, 200, "{reply}");
    assert!(stream.await.unwrap().is_ok());

    // One that cannot be loaded is told of, and the endpoint serves on.
    let (_, unloaded) = post(&server, "/api/generate", &json!({ "model": "gemma", "keep_alive": 0 })).await;
    assert_eq!(unloaded["done_reason"], "unload");
    eventually_async("its end", || async { is_in_life(&server, "gemma", "unloaded").await }).await;
    std::fs::remove_file(&fragile).unwrap();
    let (status, reply) = post(&server, "/v1/completions", &complete("gemma")).await;
    assert_eq!(status, 503, "{reply}");
    assert!(reply.to_string().contains("the model file is missing"), "{reply}");
    let health = get(&server, "/health").await;
    assert_eq!(health["status"], "ok");
    assert_eq!(health["warnings"][0], "own models that could not be loaded: 1");
    assert!(!health.to_string().contains("gemma"), "anybody may ask: {health}");
    assert_eq!(post(&server, "/v1/completions", &complete("smol")).await.0, 200);
}

#[test]
fn files_that_cannot_be_used_are_told_of_beside_every_other_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let no_model = folder.path().join("notes.gguf");
    std::fs::write(&no_model, "these are notes").unwrap();
    let text = format!(
        "max_requests = 0\n[model]\nsource = \"/nowhere.gguf\"\n[model.engine]\nmmproj = {no_model:?}\n\
         [[models]]\nsource = {no_model:?}\n[[models]]\nsource = {:?}\n[models.engine]\n\
         chat_template_file = \"/nowhere.jinja\"\n[[models]]\nsource = {:?}\n",
        model(),
        model()
    );
    let config = Config::of(&text);
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
            "has 6 mistakes",
        ];
        assert_eq!(said.lines().count(), expected.len(), "{said}");
        for (line, expected) in said.lines().zip(expected) {
            assert!(line.contains(expected), "{said}");
        }
        assert!(!output.status.success());
    }
}

#[test]
fn what_can_never_fit_is_refused_before_anything_starts() {
    let text = entry("smol", &model(), "") + "[loading]\nmemory_budget = \"300MiB\"\n";
    let config = Config::of(&text);
    for command in [&["check-config"][..], &["serve", "--listen", "127.0.0.1:0", "--config"]] {
        let output = Command::new(&*BATON).args(command).arg(config.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("line 3: models[0].source is refused"), "{said}");
        assert!(said.contains("can never be loaded"), "{said}");
    }
    config.write(&text.replace("300MiB", "1GiB"));
    assert!(Command::new(&*BATON).arg("check-config").arg(config.path()).output().unwrap().status.success());
}
