//! What an operator sees and changes while an endpoint serves: status, logs, keys and limits.

use std::process::{Command, Output, Stdio};

use harness::{BATON, BatonServer, NewKey, eventually_async};
use rustix::process::Signal;
use serde_json::{Value, json};

const SIM: [&str; 4] = ["--engine", "sim", "--sim-decode-tps", "50"];

fn baton(args: &[&str]) -> Output {
    Command::new(&*BATON).args(args).env_remove("BATON_API_KEY").output().unwrap()
}

fn address(server: &BatonServer) -> &str {
    server.base.trim_start_matches("http://")
}

fn ask(server: &BatonServer, key: &str, n_tokens: u32) -> reqwest::RequestBuilder {
    let body = json!({
        "model": "sim", "stream": true, "max_tokens": n_tokens, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "a secret prompt" }],
    });
    reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).bearer_auth(key).json(&body)
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_a_running_endpoint_and_fails_without_one() {
    let server = BatonServer::with(&SIM);
    let reply = ask(&server, "none", 5).send().await.unwrap().text().await.unwrap();
    assert!(reply.contains("[DONE]"), "{reply}");
    let table = baton(&["status", address(&server)]);
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(table.status.success() && text.contains("MODEL sim") && text.contains("only route"), "{text}");
    let state: Value = serde_json::from_slice(&baton(&["status", "--json", address(&server)]).stdout).unwrap();
    assert_eq!(state["routes"][0]["n_completion"], 5);
    assert!(!state.to_string().contains("secret"), "{state}");

    // A script must not take an empty file for success.
    if let Ok(full) = std::fs::File::create("/dev/full") {
        let unwritten = Command::new(&*BATON).args(["status", address(&server)]).stdout(full).output().unwrap();
        let error = String::from_utf8(unwritten.stderr).unwrap();
        assert!(!unwritten.status.success() && error.contains("No space left"), "{error}");
    }

    let absent = baton(&["status", "127.0.0.1:1"]);
    let error = String::from_utf8(absent.stderr).unwrap();
    assert!(!absent.status.success() && error.contains("no endpoint answers"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_change_while_streams_run_and_a_wrong_file_changes_nothing() {
    let (old, new) = (NewKey::of("old", ""), NewKey::of("new", ""));
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    std::fs::write(&path, &old.lines).unwrap();
    let checked = baton(&["check-config", &path]);
    assert!(checked.status.success(), "{checked:?}");

    let log = tempfile::NamedTempFile::new().unwrap();
    let server = BatonServer::logging_to(log.reopen().unwrap(), &[&SIM[..], &["--config", &path]].concat());
    let status = async |key: &str| ask(&server, key, 1).send().await.unwrap().status().as_u16();
    assert_eq!((status(&old.secret).await, status(&new.secret).await), (200, 401));
    let running = ask(&server, &old.secret, 200).send().await.unwrap();

    std::fs::write(&path, "max_request = 3\nlisten = 4\n").unwrap();
    let checked = baton(&["check-config", &path]);
    let mistakes = String::from_utf8(checked.stderr).unwrap();
    assert!(!checked.status.success() && mistakes.contains("line 1: ") && mistakes.contains("line 2: "), "{mistakes}");
    server.signal(Signal::HUP);
    let logged = || std::fs::read_to_string(log.path()).unwrap();
    eventually_async("the refusal", || async { logged().contains("stays as it was") }).await;
    assert_eq!(status(&old.secret).await, 200);

    // The endpoint watches the file: it needs no signal.
    std::fs::write(&path, &new.lines).unwrap();
    eventually_async("the new key", || async { status(&new.secret).await == 200 }).await;
    assert_eq!(status(&old.secret).await, 401);
    let text = running.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "a running stream was dropped: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_win_over_the_environment_and_that_over_the_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "listen = \"8080\"\napi_keys = [\"file\"]\n[model.engine]\nengine = \"sim\"\n")
        .unwrap();
    let path = file.path().to_str().unwrap();
    let check = async |args: &[&str], variables: &[(&str, &str)], expected: [u16; 3]| {
        // The flag replaces the file's wrong address, which is then no mistake.
        let server = BatonServer::started(Stdio::inherit(), &[&["--config", path], args].concat(), variables);
        for (key, expected) in ["flag", "environment", "file"].into_iter().zip(expected) {
            assert_eq!(ask(&server, key, 1).send().await.unwrap().status(), expected, "{key} {args:?} {variables:?}");
        }
    };
    check(&[], &[], [401, 401, 200]).await;
    check(&[], &[("BATON_SERVE_API_KEY", "environment")], [401, 200, 401]).await;
    check(&["--api-key", "flag"], &[("BATON_SERVE_API_KEY", "environment")], [200, 401, 401]).await;
    // The key for other endpoints, which commands present.
    check(&[], &[("BATON_API_KEY", "environment")], [401, 401, 200]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_that_commands_present_neither_locks_an_endpoint_nor_lets_one_stand_open() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let variables = [("BATON_API_KEY", "of another endpoint")];
    let server = BatonServer::started(log.reopen().unwrap(), &SIM, &variables);
    assert_eq!(ask(&server, "none", 1).send().await.unwrap().status(), 200);
    let said = std::fs::read_to_string(log.path()).unwrap();
    assert!(
        said.contains("BATON_SERVE_API_KEY") && said.contains("needs no key") && !said.contains("of another"),
        "{said}"
    );
    let open =
        Command::new(&*BATON).args(["serve", "--listen", "0.0.0.0:0"]).args(SIM).envs(variables).output().unwrap();
    let said = String::from_utf8(open.stderr).unwrap();
    assert_eq!(open.status.code(), Some(1), "{said}");
    assert!(said.contains("BATON_SERVE_API_KEY") && said.contains("other machines can reach it"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_is_shown_while_the_endpoint_waits_for_its_last_streams() {
    let server = BatonServer::with(&SIM);
    let running = ask(&server, "none", 150).send().await.unwrap();
    server.signal(Signal::TERM);
    let status = || String::from_utf8(baton(&["status", address(&server)]).stdout).unwrap();
    eventually_async("the stop", || async { status().contains("1 of") && status().contains("stopping") }).await;
    assert!(running.text().await.unwrap().ends_with("data: [DONE]\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_is_json_and_says_how_a_request_went_but_not_what_it_said() {
    let log = tempfile::NamedTempFile::new().unwrap();
    // As in a container, where one reader has both.
    let output = log.reopen().unwrap();
    let mut process = Command::new(&*BATON)
        .args(["--log-format", "json", "serve", "--listen", "127.0.0.1:0"])
        .args(SIM)
        .env("RUST_LOG", "baton_proxy=debug")
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap();
    let logged = || std::fs::read_to_string(log.path()).unwrap();
    let ready = |text: &str| {
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.into_iter().find(|line| line["message"] == "the endpoint is ready")
    };
    eventually_async("the endpoint", || async { ready(&logged()).is_some() }).await;
    let ready = ready(&logged()).unwrap();
    assert_eq!((&ready["models"], &ready["needs_key"]), (&json!("sim"), &json!(false)), "{ready}");
    let base = format!("http://{}/v1", ready["addresses"].as_str().unwrap());
    let body = json!({
        "model": "sim", "max_tokens": 3, "messages": [{ "role": "user", "content": "a secret prompt" }],
    });
    let client = reqwest::Client::new();
    let sent = client.post(format!("{base}/chat/completions")).header("x-request-id", "mine").json(&body).send().await;
    assert_eq!(sent.unwrap().status(), 200);
    eventually_async("the line of the request", || async { logged().contains("request ended") }).await;
    process.kill().unwrap();
    process.wait().unwrap();
    let text = logged();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ended = lines.iter().find(|line| line["message"] == "request ended").unwrap();
    assert_eq!(
        (&ended["request_id"], &ended["key"], &ended["decode"], &ended["outcome"]),
        (&json!("mine"), &json!("anyone"), &json!("local"), &json!("done"))
    );
    assert!(!text.contains("secret"), "{text}");
}

/// Posts with a key. Returns the status, `x-ratelimit-remaining-requests`, and the JSON.
async fn post(server: &BatonServer, path: &str, key: &str, body: Value) -> (u16, String, Value) {
    let request = reqwest::Client::new().post(format!("{}{path}", server.base)).bearer_auth(key).json(&body);
    let reply = request.send().await.unwrap();
    let left = reply.headers().get("x-ratelimit-remaining-requests").map(|left| left.to_str().unwrap().to_owned());
    (reply.status().as_u16(), left.unwrap_or_default(), reply.json().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keys_limits_hold_on_every_dialect() {
    let (few, other) = (NewKey::of("few", "requests_per_minute = 4"), NewKey::of("other", "models = [\"another\"]"));
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), few.lines + &other.lines).unwrap();
    let server = BatonServer::with(&[&SIM[..], &["--config", file.path().to_str().unwrap()]].concat());

    let messages = json!([{ "role": "user", "content": "hi" }]);
    let chat = json!({ "model": "sim", "messages": messages, "max_tokens": 2, "stream": false });
    let ollama = json!({ "model": "sim", "messages": messages, "stream": false, "options": { "num_predict": 2 } });
    let text = json!({ "model": "sim", "prompt": "hi", "max_tokens": 2 });
    let content = json!({ "model": "sim", "content": "hi" });
    let all =
        [("/v1/chat/completions", chat), ("/api/chat", ollama), ("/v1/completions", text), ("/tokenize", content)];

    for (path, body) in &all {
        let (status, _, error) = post(&server, path, &other.secret, body.clone()).await;
        assert_eq!(status, 403, "{path}: {error}");
    }
    let tags = reqwest::Client::new().get(format!("{}/api/tags", server.base)).bearer_auth(&other.secret);
    assert_eq!(tags.send().await.unwrap().json::<Value>().await.unwrap(), json!({ "models": [] }));

    for (left, (path, body)) in (0..4).rev().zip(&all) {
        let (status, remaining, reply) = post(&server, path, &few.secret, body.clone()).await;
        assert_eq!((status, remaining), (200, left.to_string()), "{path}: {reply}");
    }
    for (path, body) in &all {
        let (status, remaining, error) = post(&server, path, &few.secret, body.clone()).await;
        assert_eq!((status, remaining.as_str()), (429, "0"), "{path}: {error}");
        assert_eq!(error["error"].is_string(), *path == "/api/chat", "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_and_loads_count_and_changed_limits_keep_debts() {
    let NewKey { secret: key, lines } = NewKey::of("few", "");
    let file = tempfile::NamedTempFile::new().unwrap();
    let configure =
        |limit: u32| std::fs::write(file.path(), format!("{lines}requests_per_minute = {limit}\n")).unwrap();
    configure(4);
    let log = tempfile::NamedTempFile::new().unwrap();
    let args = [&SIM[..], &["--config", file.path().to_str().unwrap()]].concat();
    let server = BatonServer::logging_to(log.reopen().unwrap(), &args);
    let get = async |path: &str| {
        let call = reqwest::Client::new().get(format!("{}{path}", server.base)).bearer_auth(&key);
        call.send().await.unwrap().status().as_u16()
    };
    assert_eq!(get("/props").await, 200);
    assert_eq!(get("/slots").await, 200);
    let (status, left, _) = post(&server, "/api/show", &key, json!({ "model": "sim" })).await;
    assert_eq!((status, left.as_str()), (200, "1"));
    let (status, left, reply) = post(&server, "/api/generate", &key, json!({ "model": "sim" })).await;
    assert_eq!((status, left.as_str()), (200, "0"), "{reply}");
    assert_eq!(get("/props").await, 429);

    configure(5);
    server.signal(Signal::HUP);
    let logged = || std::fs::read_to_string(log.path()).unwrap();
    eventually_async("the reload", || async { logged().contains("was reloaded") }).await;
    assert_eq!(get("/props").await, 200, "one more than before");
    assert_eq!(get("/props").await, 429);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_state_shows_the_options_of_own_engines_and_files_only_to_operators() {
    let operator = NewKey::of("operator", "operator = true");
    let template = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(template.path(), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let path = template.path().to_str().unwrap();
    let engine = format!(
        "[model.engine]\nengine = \"sim\"\nslots = 3\nkv_codecs = [\"none\"]\nchat_template_file = {path:?}\n\
         [[models]]\nname = \"other\"\nsource = \"x\"\n[models.engine]\nengine = \"sim\"\nsim_decode_tps = 7.5\n"
    );
    let options = async |keys: &str, key: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("{keys}\n{engine}")).unwrap();
        let server = BatonServer::with(&["--config", file.path().to_str().unwrap()]);
        let url = format!("{}/baton/state", server.base);
        let state = reqwest::Client::new().get(url).bearer_auth(key).send().await.unwrap();
        let state: Value = state.json().await.unwrap();
        let models = state["models"].as_array().unwrap().clone();
        models.into_iter().map(|model| model["nodes"][0]["options"].clone()).collect::<Vec<_>>()
    };
    let other = json!({ "engine": "sim", "sim_decode_tps": 7.5 });
    let all = json!({ "engine": "sim", "slots": 3, "kv_codecs": ["none"], "chat_template_file": path });
    assert_eq!(options(&operator.lines, &operator.secret).await, [all, other.clone()]);
    let shown = json!({ "engine": "sim", "slots": 3, "kv_codecs": ["none"] });
    assert_eq!(options("", "").await, [shown, other]);
}
