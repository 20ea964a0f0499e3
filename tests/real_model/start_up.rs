//! `baton serve` starts quickly, stays small, and names a mistake in one line.

use std::process::{Command, Stdio};

use harness::{BATON, BatonServer, chat, eventually_async, model, read_all};
use serde_json::{Value, json};

async fn post(server: &BatonServer, body: &Value) -> (u16, Value) {
    post_as(server, body, None).await
}

async fn post_as(server: &BatonServer, body: &Value, key: Option<&str>) -> (u16, Value) {
    let mut request = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(body);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[test]
fn a_mistake_at_start_up_is_one_clear_line() {
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
        let mut command = Command::new(&*BATON);
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
    let sim = ["--engine", "sim", "--listen", free];
    let with = |args: &[&'static str]| [&sim[..], args].concat();
    check(&with(&["--flash-attn", "off"]), None, "--flash-attn cannot be off");
    check(&with(&["--tensor-split", "3,1"]), None, "--tensor-split is not an option of the engine sim");
    check(&with(&["--rope-scale", "0"]), None, "--rope-scale must be between");
    check(&["--listen", free, "--model", &good, "--lora", &good], None, "cannot be used as a LoRA adapter");
    check(&["--listen", free, "--model", &good, "--override-tensor", "blk.999=CPU"], None, "no tensor of this model");
    check(&["--decode", "http://127.0.0.1:1", "--slots", "2"], None, "--slots is for an engine here");
    check(
        &["--decode", "127.0.0.1:1", "--decode", "http://127.0.0.1:1/"],
        None,
        "--decode names http://127.0.0.1:1 twice",
    );
    check(&["--model", "../../no/such/file"], None, "../../no/such/file");
    let serve = ["serve", "--engine", "sim", "--listen", free];
    for (variable, value, expected) in [
        ("BATON_SERVE_API_KEY", "", "BATON_SERVE_API_KEY is set but empty"),
        ("BATON_CLUSTER_KEY", "abc", "has 3 characters"),
        ("TMPDIR", "/nowhere", "/nowhere: "),
    ] {
        let output = Command::new(&*BATON).args(serve).env(variable, value).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.lines().count() == 1 && stderr.contains(expected) && stderr.contains(variable), "{stderr}");
    }
}

#[tokio::test]
async fn a_model_without_a_chat_template_says_so_at_once_and_to_clients() {
    // The default model with its template under an unknown key.
    let mut bytes = std::fs::read(model()).unwrap();
    let key = b"tokenizer.chat_template";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    bytes[at + key.len() - 1] = b'X';
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("base.gguf");
    std::fs::write(&model, bytes).unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let args = ["--model", model.to_str().unwrap(), "--threads", "1", "--ctx-size", "256"];
    let server = BatonServer::logging_to(log.reopen().unwrap(), &args);
    // A thread of its own writes the log.
    eventually_async("the warning", async || {
        let log = std::fs::read_to_string(log.path()).unwrap();
        log.contains("no chat template") && log.contains("--chat-template-file")
    })
    .await;
    let (status, error) = post(&server, &chat("hi", json!({ "model": "base" }))).await;
    assert_eq!((status, &error["error"]["type"]), (501, &json!("not_supported_error")));
    assert!(error["error"]["message"].as_str().unwrap().contains("has no chat template"), "{error}");
}

#[tokio::test]
async fn the_endpoint_is_small_and_starts_quickly() {
    let began = std::time::Instant::now();
    let server = BatonServer::start(&[]);
    println!("ready after {:?}", began.elapsed());
    for i in 0..20 {
        post(&server, &chat(&format!("Number {i}"), json!({ "max_tokens": 2 }))).await;
    }
    let (all, own) = (server.resident_kib(), server.anonymous_kib());
    println!("the endpoint's process: {all} KiB resident, of them {own:?} KiB not of files");
    // Unoptimised, as `make test` builds it, the program's file alone has 40 MiB in memory; optimised, 25 to 29.
    let is_unoptimised = std::env::var("CARGO_PROFILE_RELEASE_OPT_LEVEL").is_ok_and(|level| level == "0");
    let limit = if is_unoptimised { 64 * 1024 } else { 40 * 1024 };
    assert!(all < limit && own.is_none_or(|own| own < 8 * 1024), "{all} KiB, {own:?} KiB");
}
