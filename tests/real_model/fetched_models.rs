//! A model that an operator has fetched is served, without a line in the configuration, until it is deleted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use harness::{BATON, BatonServer, TempConfigFile, eventually_async, hub};
use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use tiny_gguf::Architecture;

const FILE: &str = "tiny-Q4_0.gguf";
const PULLED: &str = "hf.co/nobody/tiny:Q4_0";

/// A hub with a tiny model, and an empty models folder.
struct Shop {
    hub: String,
    folder: TempDir,
}

impl Shop {
    fn open() -> Shop {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join(FILE);
        tiny_gguf::write_with_template(&made, Architecture::Llama, 1);
        let bytes = fs::read(&made).unwrap();
        fs::remove_file(&made).unwrap();
        let twice = [bytes.clone(), bytes.clone()].concat();
        Shop { hub: hub(vec![("tiny-F16.gguf".to_owned(), twice), (FILE.to_owned(), bytes)]), folder }
    }

    fn cache(&self) -> &Path {
        self.folder.path()
    }

    fn file(&self) -> PathBuf {
        self.cache().join("hub/nobody/tiny").join(FILE)
    }

    fn serve(&self, args: &[&str]) -> BatonServer {
        let variables = [("BATON_CACHE", self.cache().to_str().unwrap()), ("HF_ENDPOINT", &self.hub)];
        BatonServer::started(Stdio::inherit(), args, &variables)
    }
}

const MANAGED: [&str; 3] = ["--engine", "sim", "--allow-model-management"];

async fn ask(server: &BatonServer, method: Method, path: &str, body: Value) -> (u16, String) {
    let call = reqwest::Client::new().request(method, format!("{}{path}", server.base)).json(&body);
    let reply = call.send().await.unwrap();
    (reply.status().as_u16(), reply.text().await.unwrap())
}

async fn pull(server: &BatonServer, model: &str) -> Value {
    let (status, text) = ask(server, Method::POST, "/api/pull", json!({ "model": model })).await;
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// The names in `/api/tags`, and those in `/v1/models`.
async fn listed(server: &BatonServer) -> [Vec<String>; 2] {
    let names = |list: &Value, key: &str| {
        list.as_array().unwrap().iter().map(|model| model[key].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (tags, models) = (server.get("/api/tags").await, server.get("/v1/models").await);
    [names(&tags["models"], "model"), names(&models["data"], "id")]
}

async fn says_something(server: &BatonServer, model: &str) -> bool {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let body = json!({ "model": model, "messages": messages, "stream": false, "options": { "num_predict": 4, "temperature": 0 } });
    let (status, text) = ask(server, Method::POST, "/api/chat", body).await;
    let reply: Value = serde_json::from_str(&text).unwrap();
    assert!(status == 404 || reply["eval_count"].as_u64().is_some_and(|n| n > 0), "{status} {text}");
    status == 200
}

async fn delete(server: &BatonServer, model: &str) -> (u16, String) {
    ask(server, Method::DELETE, "/api/delete", json!({ "model": model })).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pulled_model_is_served_also_after_a_restart_and_until_it_is_deleted() {
    let shop = Shop::open();
    let server = shop.serve(&MANAGED);
    assert_eq!(pull(&server, PULLED).await, json!({ "status": "success" }));
    assert_eq!(listed(&server).await, [vec!["sim:latest", PULLED], vec!["sim", PULLED]]);
    let (status, shown) = ask(&server, Method::POST, "/api/show", json!({ "model": PULLED })).await;
    assert!(status == 200 && shown.contains("\"family\":\"llama\""), "{shown}");
    assert!(says_something(&server, PULLED).await, "it is loaded on its first use");
    assert!(says_something(&server, "nobody/tiny:tiny-Q4_0.gguf").await, "by the name of its file, too");
    assert!(server.get_text("/api/ps").await.contains(PULLED));

    assert_eq!(
        ask(&server, Method::POST, "/api/copy", json!({ "source": PULLED, "destination": "mine" })).await.0,
        200
    );
    assert!(says_something(&server, "mine").await);
    assert_eq!(listed(&server).await[0], ["sim:latest", PULLED, "mine:latest"]);
    let taken = ask(&server, Method::POST, "/api/copy", json!({ "source": PULLED, "destination": "sim" })).await;
    assert!(taken.0 == 400 && taken.1.contains("another model"), "{taken:?}");
    drop(server);

    let without = shop.serve(&MANAGED[..2]);
    assert_eq!(listed(&without).await[1], ["sim"], "an endpoint that does not manage models serves none of them");
    drop(without);

    let server = shop.serve(&MANAGED);
    assert_eq!(listed(&server).await[0], ["sim:latest", PULLED, "mine:latest"]);
    assert!(says_something(&server, "mine").await);
    assert_eq!(delete(&server, PULLED).await.0, 200, "one of two names");
    assert_eq!(listed(&server).await, [vec!["sim:latest", "mine:latest"], vec!["sim", "mine"]]);
    assert!(shop.file().is_file() && says_something(&server, "mine").await);

    let held = fs::File::open(shop.file()).unwrap();
    held.lock_shared().unwrap();
    let (status, text) = delete(&server, "mine").await;
    assert!(status == 400 && text.contains("in use") && shop.file().is_file(), "{status} {text}");
    assert!(says_something(&server, "mine").await, "a model that is not deleted is served as before");
    drop(held);
    assert_eq!(delete(&server, "mine:latest").await, (200, String::new()));
    assert!(!says_something(&server, "mine").await && !shop.file().exists());
    drop(server);
    assert_eq!(listed(&shop.serve(&MANAGED)).await[1], ["sim"]);
}

/// The model's state as llama-server and LM Studio show it.
async fn is_loaded(server: &BatonServer, model: &str) -> bool {
    let find = |list: &Value, key: &str| list.as_array().unwrap().iter().find(|one| one[key] == model).unwrap().clone();
    let of_llama_server = find(&server.get("/models").await["data"], "id");
    let of_lm_studio = find(&server.get("/api/v1/models").await["models"], "key");
    let instances: Vec<&str> =
        of_lm_studio["loaded_instances"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    let is_loaded = of_llama_server["status"]["value"] == "loaded";
    assert_eq!(instances, if is_loaded { vec![model] } else { Vec::new() }, "{of_lm_studio}");
    is_loaded
}

#[tokio::test(flavor = "multi_thread")]
async fn llama_servers_and_lm_studios_calls_load_and_unload_where_models_are_managed() {
    let shop = Shop::open();
    let server = shop.serve(&MANAGED);
    pull(&server, PULLED).await;
    assert!(!is_loaded(&server, PULLED).await);
    let llama = json!({ "model": PULLED });
    let lm_studio = json!({ "instance_id": PULLED });
    for (load, body, unload) in [
        ("/models/load", &llama, ("/models/unload", &llama)),
        (
            "/api/v1/models/load",
            &json!({ "model": PULLED, "echo_load_config": true }),
            ("/api/v1/models/unload", &lm_studio),
        ),
    ] {
        let (status, reply) = server.post(load, body).await;
        assert_eq!(status, 200, "{load}: {reply}");
        assert!(reply["success"] == true || reply["load_config"]["context_length"].as_u64() > Some(0), "{reply}");
        assert!(is_loaded(&server, PULLED).await);
        let (status, reply) = server.post(unload.0, unload.1).await;
        assert!(status == 200 && (reply["success"] == true || reply["instance_id"] == PULLED), "{reply}");
        eventually_async("the end of its process", async || !is_loaded(&server, PULLED).await).await;
        let (status, reply) = server.post(load, &json!({ "model": "nope" })).await;
        assert!(status == 404 && reply["error"]["message"].is_string(), "{load}: {reply}");
    }
    drop(server);
    let without = shop.serve(&MANAGED[..2]);
    for path in ["/models/load", "/models/unload", "/api/v1/models/load", "/api/v1/models/unload"] {
        let (status, reply) = without.post(path, &json!({ "model": "sim", "instance_id": "sim" })).await;
        assert!(status == 403 && reply.to_string().contains("allow_model_management"), "{path}: {reply}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_names_what_it_pulls_and_a_reload_can_end_its_service() {
    let shop = Shop::open();
    let config = |allowed: bool| format!("allow_model_management = {allowed}\n[model.engine]\nengine = \"sim\"\n");
    let file = TempConfigFile::new(&config(true));
    let server = shop.serve(&["--config", file.path().to_str().unwrap()]);
    let baton = |args: &[&str]| {
        let address = server.base.trim_start_matches("http://");
        let output =
            Command::new(&*BATON).arg("models").args(args).arg(address).env("HF_ENDPOINT", &shop.hub).output().unwrap();
        (
            output.status.success(),
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)),
        )
    };
    let (done, text) = baton(&["pull", "nobody/tiny:Q4_0", "--name", "sim"]);
    assert!(!done && text.contains("another model") && !shop.file().exists(), "{text}");
    let (done, text) = baton(&["pull", "nobody/tiny", "--on", "auto", "--name", "coder"]);
    assert!(!done && text.contains("--yes") && !shop.file().exists(), "{text}");
    let (done, text) = baton(&["pull", "nobody/tiny", "--on", "auto", "--yes", "--name", "coder"]);
    assert!(
        text.contains("nobody/tiny:tiny-Q4_0.gguf to local") && text.contains("of 2 files and 1 machine"),
        "{text}"
    );
    assert!(done && says_something(&server, "coder").await, "{text}");
    assert_eq!(listed(&server).await[1], ["sim", "coder"]);
    file.reload(&server, &config(false));
    eventually_async("the end of its service", async || listed(&server).await[1] == ["sim"]).await;
    file.reload(&server, &config(true));
    eventually_async("its service", async || listed(&server).await[1] == ["sim", "coder"]).await;
    assert!(says_something(&server, "coder").await);
    let (done, text) = baton(&["delete", "nobody/tiny:tiny-Q4_0.gguf", "--on", "local"]);
    assert!(done && !says_something(&server, "coder").await && !shop.file().exists(), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_can_never_fit_is_fetched_and_not_served() {
    let shop = Shop::open();
    let config =
        "allow_model_management = true\n[loading]\nmemory_budget = \"64KiB\"\n[model.engine]\nengine = \"sim\"\n";
    let file = TempConfigFile::new(config);
    let server = shop.serve(&["--config", file.path().to_str().unwrap()]);
    let refused = pull(&server, PULLED).await["error"].as_str().unwrap().to_owned();
    assert!(refused.contains("cannot be served") && refused.contains("memory budget"), "{refused}");
    assert!(shop.file().is_file());
    assert_eq!(listed(&server).await[1], ["sim"]);
    drop(server);
    let server = shop.serve(&MANAGED);
    assert_eq!(listed(&server).await[1], ["sim"], "nor later");
    assert_eq!(pull(&server, PULLED).await, json!({ "status": "success" }), "until it is pulled where it fits");
    assert!(says_something(&server, PULLED).await);
}

/// The text of a reply that does not depend on chance.
async fn reply(server: &BatonServer, model: &str) -> String {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let body = json!({ "model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "seed": 1, "ignore_eos": true });
    let (status, reply) = server.post("/v1/chat/completions", &body).await;
    assert!(status == 200 && reply["usage"]["completion_tokens"] == 8, "{status} {reply}");
    reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_from_which_a_model_runs_is_not_deleted_before_its_end_and_the_model_outlives_its_file() {
    let shop = Shop::open();
    let server = shop.serve(&MANAGED);
    pull(&server, PULLED).await;
    let path = shop.file();
    // A process of another endpoint runs the model from this file.
    let run =
        || shop.serve(&["--model", path.to_str().unwrap(), "--engine", "llama", "--slots", "1", "--ctx-size", "128"]);
    let running = run();
    let model = listed(&running).await[1][0].clone();
    let before = reply(&running, &model).await;

    let (status, text) = delete(&server, PULLED).await;
    assert!(status == 400 && text.contains("in use") && path.is_file(), "{status} {text}");
    let order = json!({ "action": "delete", "model": "nobody/tiny:tiny-Q4_0.gguf", "on": "local" });
    let (status, refused) = server.post("/baton/models", &order).await;
    assert!(status == 400 && refused.to_string().contains("in use") && path.is_file(), "{status} {refused}");
    assert_eq!(reply(&running, &model).await, before);

    // Whoever deletes it by hand takes it from the next start alone.
    let kept = path.with_extension("kept");
    fs::hard_link(&path, &kept).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(reply(&running, &model).await, before, "the running process has it still");
    fs::rename(&kept, &path).unwrap();
    drop(running);

    eventually_async("its deletion", async || delete(&server, PULLED).await.0 == 200).await;
    assert!(!path.exists());
}
