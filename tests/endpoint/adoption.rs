//! Servers that are found are used as upstreams, under their names; equal models under a common one; and never in a circle.

use std::process::Command;

use harness::mock::{Mock, Step, says, whole};
use harness::{BATON, BatonNode, BatonServer, TempConfigFile, eventually_async, free_address, said, upstream};
use serde_json::{Value, json};

/// A reply of Ollama.
fn ollama_says(asked: &Value) -> Vec<Step> {
    let said = json!({ "role": "assistant", "content": "by ollama" });
    let end = json!({ "model": asked["model"], "message": said, "done": true, "done_reason": "stop" });
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n";
    vec![Step::Send(format!("{head}{end}\n"))]
}

/// A scripted server answers every `GET` with one body, so this one has what each of the calls looks for.
async fn ollama(models: &[&str]) -> Mock {
    let mock = Mock::start(|_, asked| match asked.path.as_str() {
        "/api/show" => whole(200, "", &json!({ "capabilities": ["completion", "tools", "a new word"] })),
        _ => ollama_says(&asked.body),
    })
    .await;
    let data: Vec<Value> = models.iter().map(|id| json!({ "id": id, "owned_by": "library" })).collect();
    let tags: Vec<Value> = models.iter().map(|name| json!({ "name": name, "model": name })).collect();
    mock.list_as(json!({ "object": "list", "data": data, "version": "0.14.2", "models": tags }));
    mock
}

async fn other(words: &'static str, entry: Value) -> Mock {
    let mock = Mock::start(move |_, _| says(words)).await;
    mock.list_as(json!({ "object": "list", "data": [entry] }));
    mock
}

fn place(mock: &Mock) -> &str {
    mock.url.trim_start_matches("http://")
}

async fn models(server: &BatonServer) -> Vec<(String, String)> {
    let list = server.get("/v1/models").await;
    let text = |card: &Value, key: &str| card[key].as_str().unwrap().to_owned();
    list["data"].as_array().unwrap().iter().map(|card| (text(card, "id"), text(card, "owned_by"))).collect()
}

async fn names(server: &BatonServer) -> Vec<String> {
    models(server).await.into_iter().map(|(name, _)| name).collect()
}

/// The status, the route and the reply's text.
async fn chat(server: &BatonServer, model: &str) -> (u16, String, String) {
    let body = said("hi", json!({ "model": model, "max_tokens": 4 }));
    let reply =
        reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    let (status, route) = (reply.status().as_u16(), reply.headers().get("x-baton-route").cloned());
    let text = reply.json::<Value>().await.unwrap()["choices"][0]["message"]["content"].as_str().map(str::to_owned);
    (status, route.map(|route| route.to_str().unwrap().to_owned()).unwrap_or_default(), text.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_server_is_recognised_and_its_models_are_served() {
    let ollama = ollama(&["qwen3-coder:30b", "nomic-embed:latest"]).await;
    let lm_studio = other("by lm studio", json!({ "id": "qwen/qwen3", "type": "vlm", "object": "model" })).await;
    let llama = other("by llama-server", json!({ "id": "gemma", "owned_by": "llamacpp" })).await;
    let vllm = other("by vllm", json!({ "id": "llama-70b", "owned_by": "vllm" })).await;
    let mlx = other("by mlx", json!({ "id": "mlx-community/small" })).await;
    let python = other("broken off", json!({ "id": "one-at-a-time", "owned_by": "me" })).await;
    let locked = Mock::start(|_, _| says("no")).await;
    locked.list_as(json!({ "error": "not a list" }));
    let all = [&ollama, &lm_studio, &llama, &vllm, &mlx, &python, &locked];
    let hosts: Vec<&str> = all.iter().flat_map(|mock| ["--adopt-host", place(mock)]).collect();
    let server = BatonServer::with(&[&hosts[..], &["--no-calibration"]].concat());

    let state = server.state().await;
    let upstreams = state["upstreams"].as_array().unwrap();
    let mut found: Vec<(&str, &str)> =
        upstreams.iter().map(|one| (one["name"].as_str().unwrap(), one["kind"].as_str().unwrap())).collect();
    found.sort_unstable();
    let expected = [
        ("llama-server", "llama-server"),
        ("lm-studio", "openai"),
        ("ollama", "ollama"),
        ("openai", "openai"),
        ("vllm", "vllm"),
    ];
    assert_eq!(found, expected, "{state}");
    assert!(upstreams.iter().all(|one| one["adopted"] == true), "{state}");
    let mut served = names(&server).await;
    served.sort_unstable();
    let mut listed =
        ["gemma", "llama-70b", "mlx-community/small", "nomic-embed:latest", "qwen/qwen3", "qwen3-coder:30b"];
    listed.sort_unstable();
    assert_eq!(served, listed);
    for (model, upstream, words) in [
        ("qwen3-coder:30b", "ollama", "by ollama"),
        ("qwen/qwen3", "lm-studio", "by lm studio"),
        ("gemma", "llama-server", "by llama-server"),
        ("llama-70b", "vllm", "by vllm"),
        ("mlx-community/small", "openai", "by mlx"),
    ] {
        let (status, route, text) = chat(&server, model).await;
        assert_eq!((status, text.as_str()), (200, words), "{model}: {route}");
        assert!(route.starts_with(&format!("upstream; upstream={upstream}; ")), "{model}: {route}");
    }
    assert_eq!(chat(&server, "one-at-a-time").await.0, 404);
    assert_eq!(python.n_asked() + locked.n_asked(), 0, "what is not adopted gets no request");
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_models_have_a_common_name_and_a_configured_server_is_not_found_twice() {
    let first = ollama(&["qwen3-coder:30b", "other"]).await;
    let second = other("by the second", json!({ "id": "qwen/coder", "owned_by": "vllm" })).await;
    let config = |alias: &str| {
        format!(
            "adopt_hosts = [\"{}\", \"{}\"]\n[aliases]\n{alias}\n[[upstream]]\nname = \"mine\"\nkind = \"vllm\"\nurl = \"{}\"\n",
            place(&first),
            place(&second),
            second.url
        )
    };
    let both = "coder = [\"ollama/qwen3-coder:30b\", \"mine/qwen/coder\", \"ollama/missing\", \"nobody/m\"]";
    let file = TempConfigFile::new(&config(both));
    let server = file.serve();
    let state = server.state().await;
    let upstreams: Vec<(&str, bool)> = state["upstreams"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["name"].as_str().unwrap(), one["adopted"] == true))
        .collect();
    assert_eq!(upstreams, [("mine", false), ("ollama", true)], "{state}");
    let mut routes = Vec::new();
    for _ in 0..8 {
        let (status, route, text) = chat(&server, "coder").await;
        assert_eq!(status, 200, "{route} {text}");
        routes.push(route.contains("upstream=ollama"));
    }
    assert!(routes.contains(&true) && routes.contains(&false), "equals take turns: {routes:?}");
    let asked = first.asked(0);
    assert_eq!((asked.path.as_str(), &asked.body["model"]), ("/api/chat", &json!("qwen3-coder:30b")));
    assert!(names(&server).await.contains(&"coder".to_owned()));

    file.reload(&server, &config("reviewer = [\"ollama/other\"]"));
    eventually_async("the new name", async || names(&server).await.contains(&"reviewer".to_owned())).await;
    assert_eq!(chat(&server, "reviewer").await.2, "by ollama");
    eventually_async("the end of the old name", async || chat(&server, "coder").await.0 == 404).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_found_server_takes_no_name_that_the_configuration_gives() {
    let first = ollama(&["qwen3-coder:30b"]).await;
    let mine = Mock::start(|_, _| says("mine")).await;
    let greedy = Mock::start(|_, _| says("taken")).await;
    let entries: Vec<Value> =
        ["coder", "Coder:latest", "gpt", "own"].iter().map(|id| json!({ "id": id, "owned_by": "vllm" })).collect();
    greedy.list_as(json!({ "object": "list", "data": entries }));
    let config = format!(
        "adopt_hosts = [\"{}\", \"{}\"]\n[aliases]\ncoder = [\"ollama/qwen3-coder:30b\"]\n{}",
        place(&greedy),
        place(&first),
        upstream("mine", "openai", &mine.url, "models = { gpt = \"theirs\" }\n"),
    );
    let server = TempConfigFile::new(&config).serve();
    for _ in 0..4 {
        assert_eq!(chat(&server, "coder").await.2, "by ollama");
        assert_eq!(chat(&server, "gpt").await.2, "mine");
    }
    assert_eq!(greedy.n_asked(), 0, "listing a name takes no requests from whom the operator gave it");
    assert_eq!(chat(&server, "own").await.2, "taken", "its other models are served");
    let mut names = names(&server).await;
    names.sort_unstable();
    assert_eq!(names, ["coder", "gpt", "own", "qwen3-coder:30b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_found_server_is_no_last_resort_also_under_an_alias() {
    let found = other("by vllm", json!({ "id": "x", "owned_by": "vllm" })).await;
    let own = BatonNode::with(&["--engine", "sim"]);
    let config = format!(
        "max_wait_seconds = 1\nadopt_hosts = [\"{}\"]\n[aliases]\nm = [\"vllm/x\"]\n[model]\nname = \"m\"\ndecode = [\"{}\"]\n",
        place(&found),
        own.url
    );
    let server = TempConfigFile::new(&config).serve();
    eventually_async("its own node", async || chat(&server, "m").await.1.starts_with("direct; ")).await;
    assert_eq!(chat(&server, "x").await.2, "by vllm", "it was found");
    drop(own);
    for _ in 0..2 {
        assert_ne!(chat(&server, "m").await.0, 200);
    }
    assert_eq!(found.n_asked(), 1, "another Baton would send it back");
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_that_find_each_other_and_themselves_send_no_request_in_a_circle() {
    let (a, b) = (free_address(), free_address());
    let started = |own: &str, name: &str| {
        let hosts = ["--adopt-host", &a, "--adopt-host", &b];
        BatonServer::with(
            &[&["--listen", own, "--engine", "sim", "--name", name, "--no-calibration"], &hosts[..]].concat(),
        )
    };
    let one = started(&a, "of-a");
    let two = started(&b, "of-b");
    assert_eq!(names(&two).await, ["of-b", "of-a"], "it finds the first at its start");
    eventually_async("the second", async || names(&one).await == ["of-a", "of-b"]).await;
    let owner = |models: Vec<(String, String)>| models.into_iter().map(|(_, owner)| owner).collect::<Vec<_>>();
    assert_eq!(owner(models(&one).await), ["baton", "upstream"]);
    let (status, route, _) = chat(&one, "of-b").await;
    assert!(status == 200 && route.starts_with("upstream; upstream=baton; "), "{status} {route}");
    assert!(chat(&one, "of-a").await.1.starts_with("direct; "), "its own engine comes first");
    assert_eq!((chat(&one, "of-nobody").await.0, chat(&two, "of-nobody").await.0), (404, 404));
    let state = one.state().await;
    assert_eq!(state["upstreams"].as_array().unwrap().len(), 1, "not itself: {state}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_upstreams_of_another_endpoint_are_not_found_through_it() {
    let behind = ollama(&["qwen3-coder:30b"]).await;
    let one = BatonServer::with(&["--adopt-host", place(&behind)]);
    assert_eq!(names(&one).await, ["qwen3-coder:30b"]);
    let two = BatonServer::with(&["--adopt-host", one.base.trim_start_matches("http://")]);
    assert_eq!(two.state().await["upstreams"], json!([]), "the first runs no model itself");
    assert!(names(&two).await.is_empty());
    assert_eq!(chat(&two, "qwen3-coder:30b").await.0, 404, "it might send the request back");
    assert_eq!((chat(&one, "qwen3-coder:30b").await.2.as_str(), behind.n_asked()), ("by ollama", 1));
}

#[test]
fn a_look_lists_servers_with_what_their_models_can_do() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (ollama, lm_studio) = runtime.block_on(async {
        let vision = json!({ "id": "pixtral", "type": "vlm", "object": "model" });
        (ollama(&["qwen3-coder:30b"]).await, other("", vision).await)
    });
    let output = Command::new(&*BATON)
        .args(["discover", "--servers", "--host", place(&ollama), "--host", place(&lm_studio)])
        .output()
        .unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    let line =
        |model: &str| text.lines().find(|line| line.contains(model)).unwrap_or_else(|| panic!("{text}")).to_owned();
    assert!(
        line("qwen3-coder:30b").contains("ollama") && line("qwen3-coder:30b").contains("completion, tools"),
        "{text}"
    );
    assert!(line("pixtral").contains("lm-studio") && line("pixtral").contains("completion, vision"), "{text}");
    assert!(line("pixtral").contains(place(&lm_studio)), "{text}");
    let refused = Command::new(&*BATON).args(["discover", "--servers", "--host", "192.0.2.1:1234"]).output().unwrap();
    assert!(!refused.status.success(), "prompts are not sent unencrypted to another machine unless that is allowed");
}
