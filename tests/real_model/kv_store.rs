//! KV on disk: found again after a restart, refused if it is damaged, bounded, and nobody else's.

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;

use harness::{
    BATON, BatonServer, CLUSTER_KEY, Capability, ReloadableServer, SseReply, chat, eventually, eventually_async,
    long_prompt, model, not_possible_here,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tiny_gguf::Architecture;

/// Positions of a block.
const BLOCK: u64 = 256;

/// A folder for a store.
struct Store(TempDir);

impl Store {
    fn new() -> Store {
        Store(tempfile::tempdir().unwrap())
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join("kv")
    }

    /// The value of `--kv-store`.
    fn option(&self, more: &str) -> String {
        format!("disk={}{more}", self.folder().display())
    }

    /// An endpoint that keeps KV here.
    fn serve(&self, more: &str) -> BatonServer {
        BatonServer::start(&["--ctx-size", "2048", "--kv-store", &self.option(more)])
    }

    /// `baton cache` with `--json`.
    fn cache(&self, args: &[&str]) -> Value {
        let output = Command::new(&*BATON)
            .arg("cache")
            .args(args)
            .args(["--json", "--folder", self.folder().to_str().unwrap()])
            .env("BATON_CLUSTER_KEY", CLUSTER_KEY)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// What each scope has.
    fn scopes(&self) -> Vec<Value> {
        let list = self.cache(&["list"]);
        let models = list["models"].as_array().unwrap();
        models.iter().flat_map(|model| model["scopes"].as_array().unwrap().clone()).collect()
    }

    /// Waits until the folder has so many tokens.
    fn await_tokens(&self, n: u64) {
        eventually("KV on disk", || {
            let is_there = self.folder().join("baton-kv-store").exists();
            let n_tokens = || self.scopes().iter().map(|scope| scope["n_tokens"].as_u64().unwrap()).sum::<u64>();
            (is_there && n_tokens() >= n).then_some(())
        });
    }

    /// The files of blocks, in the order of their sizes and names.
    fn blocks(&self) -> Vec<PathBuf> {
        self.files().into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "kv")).collect()
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = |folder: &Path| {
            let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            entries.collect::<Vec<_>>()
        };
        let models = entries(&self.folder()).into_iter().filter(|path| path.is_dir());
        models.flat_map(|model| entries(&model)).collect()
    }

    fn n_bytes(&self) -> u64 {
        // A file may be removed meanwhile.
        self.files().iter().filter_map(|path| path.metadata().ok()).map(|facts| facts.len()).sum()
    }
}

async fn ask(server: &BatonServer, prompt: &str, key: Option<&str>) -> Reply {
    let request = call(server, prompt, json!({}));
    answer(match key {
        Some(key) => request.bearer_auth(key),
        None => request,
    })
    .await
}

fn call(server: &BatonServer, prompt: &str, more: Value) -> reqwest::RequestBuilder {
    let mut body = chat(prompt, json!({ "max_tokens": 4 }));
    body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
    reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body)
}

async fn answer(request: reqwest::RequestBuilder) -> Reply {
    let response = request.send().await.unwrap();
    let status = response.status();
    let headers = response.headers().clone();
    let header = |name: &str| headers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    let reply: Value = response.json().await.unwrap();
    assert!(status.is_success(), "{reply}");
    Reply {
        route: header("x-baton-route"),
        warning: header("x-baton-warning"),
        text: reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned(),
        n_prompt: reply["usage"]["prompt_tokens"].as_u64().unwrap(),
        n_cached: reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
    }
}

struct Reply {
    /// `x-baton-route`.
    route: String,
    /// `x-baton-warning`.
    warning: String,
    text: String,
    n_prompt: u64,
    n_cached: u64,
}

#[tokio::test]
async fn a_restart_finds_the_kv_of_before_and_computes_only_the_rest_for_its_key_alone() {
    let store = Store::new();
    let prompt = long_prompt("restart", 400);
    let first = {
        let server = store.serve("");
        let first = ask(&server, &prompt, Some("alice")).await;
        assert_eq!(first.n_cached, 0);
        store.await_tokens(first.n_prompt);
        first
    };
    let server = store.serve("");
    let again = ask(&server, &prompt, Some("alice")).await;
    assert_eq!((again.n_cached, &again.text), (again.n_prompt - 1, &first.text), "all but the token that is decoded");
    let other = ask(&server, &prompt, Some("bob")).await;
    assert_eq!((other.n_cached, &other.text), (0, &first.text), "another scope computes every token");
    let longer = ask(&server, &format!("{prompt} and then?"), Some("alice")).await;
    assert!(longer.n_cached >= again.n_prompt - 16, "{} of {}", longer.n_cached, longer.n_prompt);
    // The node says so when it publishes its next load.
    let restored = |state: &Value| state["models"][0]["nodes"][0]["kv_store"]["disk_tokens"].as_u64();
    eventually_async("the store's figures", async || {
        let state = server.state().await;
        restored(&state).is_some_and(|n| n >= again.n_cached)
            && state["models"][0]["nodes"][0]["kv_store"]["disk_bytes"] != 0
    })
    .await;
    let metrics = server.get_text("/metrics").await;
    assert!(metrics.contains("baton_node_kv_store_restored_tokens_total{"), "{metrics}");
    let hits: u64 = store.scopes().iter().map(|scope| scope["n_hits"].as_u64().unwrap()).sum();
    assert_eq!(hits, again.n_prompt.div_ceil(BLOCK), "each block was read once");
}

#[tokio::test]
async fn a_block_with_a_flipped_bit_is_refused_and_the_reply_stays_right() {
    let store = Store::new();
    let prompt = long_prompt("flipped", 500);
    let first = {
        let server = store.serve("");
        let first = ask(&server, &prompt, None).await;
        store.await_tokens(first.n_prompt);
        first
    };
    let whole: Vec<(PathBuf, Vec<u8>)> =
        store.blocks().into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    assert!(whole.len() >= 3, "{whole:?}", whole = whole.len());
    let mut found = Vec::new();
    for (damaged, bytes) in &whole {
        for (path, bytes) in &whole {
            fs::write(path, bytes).unwrap();
        }
        let mut changed = bytes.clone();
        let at = rand::random::<u32>() as usize % changed.len();
        changed[at] ^= 1 << (at % 8);
        fs::write(damaged, changed).unwrap();
        let server = store.serve("");
        let reply = ask(&server, &prompt, None).await;
        assert_eq!(reply.text, first.text, "byte {at} of {}", damaged.display());
        assert!(reply.n_cached.is_multiple_of(BLOCK) && reply.n_cached < reply.n_prompt, "{}", reply.n_cached);
        found.push(reply.n_cached);
    }
    found.sort_unstable();
    let expected: Vec<u64> = (0..whole.len() as u64).map(|n| n * BLOCK).collect();
    assert_eq!(found, expected, "the blocks before the damaged one are used");
}

#[tokio::test]
async fn an_engine_that_is_killed_while_it_writes_costs_no_reply() {
    let store = Store::new();
    let prompt = long_prompt("killed", 300);
    let mut text = None;
    for _ in 0..3 {
        // The system kills a process that writes beyond this byte of a file.
        let at = 10_000 + rand::random::<u32>() % 5_000_000;
        let server = BatonServer::under(
            &["prlimit", "--core=0", &format!("--fsize={at}")],
            &[
                "--model",
                model().to_str().unwrap(),
                "--name",
                "smollm2",
                "--threads",
                "1",
                "--kv-store",
                &store.option(""),
            ],
        );
        let engine = server.engine();
        let reply = ask(&server, &prompt, None).await;
        eventually("the engine's end", || (!harness::is_alive(engine)).then_some(()));
        assert_eq!(text.get_or_insert(reply.text.clone()), &reply.text);
        let unfinished = store.files().into_iter().filter(|path| path.extension().is_none());
        let lengths: Vec<u64> = unfinished.map(|path| path.metadata().unwrap().len()).collect();
        assert!(lengths.contains(&at.into()), "killed at byte {at}: {lengths:?}");
    }
    let server = store.serve("");
    let reply = ask(&server, &prompt, None).await;
    assert_eq!(Some(reply.text), text);
    store.await_tokens(reply.n_prompt);
    let is_block = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "kv");
    let others: Vec<_> = store.files().into_iter().filter(|path| !is_block(path)).collect();
    let is_unfinished = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(".new-");
    assert!(!others.iter().any(is_unfinished), "what was left unfinished is gone: {others:?}");
}

#[tokio::test]
async fn a_full_disk_costs_the_store_and_no_request() {
    let store = Store::new();
    fs::create_dir(store.folder()).unwrap();
    let folder = store.folder();
    let mount = "mount -t tmpfs -o size=7m,mode=700 tmpfs \"$0\" && exec \"$@\"";
    let unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, folder.to_str().unwrap()];
    if !Command::new(unshare[0]).args(&unshare[1..]).arg("true").status().is_ok_and(|status| status.success()) {
        return not_possible_here(Capability::Namespaces, "no small disk can be mounted here");
    }
    let model = model();
    let args = ["--model", model.to_str().unwrap(), "--name", "smollm2", "--threads", "1", "--slots", "1"];
    let server = BatonServer::under(&unshare, &[&args[..], &["--kv-store", &store.option("")]].concat());
    let engine = server.engine();
    let prompts = ["a", "b", "c"].map(|tag| long_prompt(tag, 400));
    let mut first = Vec::new();
    for prompt in &prompts {
        first.push(ask(&server, prompt, None).await);
    }
    for (prompt, first) in prompts.iter().zip(&first) {
        let again = ask(&server, prompt, None).await;
        assert_eq!(again.text, first.text);
    }
    assert_eq!(server.engine(), engine, "the engine's process goes on");
    // The disk was full: a block could not be written.
    eventually_async("a write that failed", async || {
        let metrics = server.get_text("/metrics").await;
        let mut failed = metrics.lines().filter(|line| line.starts_with("baton_node_kv_store_failed_writes_total{"));
        failed.any(|line| !line.ends_with(" 0"))
    })
    .await;
}

#[tokio::test]
async fn a_lossy_codec_that_is_named_makes_the_files_smaller_and_they_come_back() {
    let prompt = long_prompt("smaller", 500);
    let mut n_bytes = Vec::new();
    for codec in ["none", "planes_zstd", "kvq"] {
        let store = Store::new();
        let option = format!(",codec={codec}");
        let first = {
            let server = store.serve(&option);
            let first = ask(&server, &prompt, None).await;
            store.await_tokens(first.n_prompt);
            first
        };
        n_bytes.push(store.n_bytes());
        let server = store.serve(&option);
        let again = ask(&server, &prompt, None).await;
        assert_eq!(again.n_cached, again.n_prompt - 1, "{codec}");
        assert!(codec == "kvq" || again.text == first.text, "{codec}: {} and {}", first.text, again.text);
        assert_eq!(store.cache(&["verify"])["removed"], json!([]), "{codec}");
    }
    let [none, lossless, lossy] = n_bytes[..] else { unreachable!() };
    // `kvq` is about 3.3 times smaller without a profile.
    assert!(lossless < none && lossy * 5 / 2 < none, "{n_bytes:?}");
}

#[tokio::test]
async fn a_request_with_a_seed_or_for_lossless_kv_computes_what_only_lossy_files_have() {
    /// Tokens that the template begins with.
    const TEMPLATE: u64 = 64;
    let store = Store::new();
    let prompts = ["asked plainly", "with a seed", "losslessly", "with both"].map(|tag| long_prompt(tag, 300));
    let mut first = Vec::new();
    {
        let server = store.serve(",codec=kvq");
        for prompt in &prompts {
            first.push(ask(&server, prompt, None).await);
        }
        store.await_tokens(first.iter().map(|reply| reply.n_prompt - TEMPLATE).sum());
    }
    let server = store.serve(",codec=kvq");
    let lossy = ask(&server, &prompts[0], None).await;
    assert_eq!(lossy.n_cached, lossy.n_prompt - 1, "the operator has named the codec");
    let seed = json!({ "seed": 7 });
    let asked = [
        call(&server, &prompts[1], seed.clone()),
        call(&server, &prompts[2], json!({})).header("x-baton-kv", "lossless"),
        call(&server, &prompts[3], seed).header("x-baton-kv", "lossy"),
        // Its slot has what came from the file.
        call(&server, &prompts[0], json!({})).header("x-baton-kv", "lossless"),
    ];
    let mut warnings = Vec::new();
    for request in asked {
        let reply = answer(request).await;
        assert!(reply.n_cached <= TEMPLATE, "{} of {} tokens were cached", reply.n_cached, reply.n_prompt);
        warnings.push(reply.warning);
    }
    assert_eq!(warnings, ["", "", "a request with a seed gets lossless KV", ""]);
    // Its slot has what was computed last.
    let again = answer(call(&server, &prompts[0], json!({ "seed": 8 }))).await;
    assert_eq!(again.n_cached, again.n_prompt - 1, "what was computed is exact");
    let unknown = call(&server, &prompts[1], json!({})).header("x-baton-kv", "kvq").send().await.unwrap();
    let (status, error) = (unknown.status(), unknown.text().await.unwrap());
    assert!(status == 400 && error.contains("x-baton-kv must be one of: lossless, lossy."), "{error}");
}

#[tokio::test]
async fn lossy_kv_on_request_is_for_requests_that_ask_for_it() {
    let store = Store::new();
    let config = format!(
        "lossy_kv = \"on_request\"\n[model]\nsource = {:?}\nname = \"smollm2\"\n[model.engine]\nthreads = 1\n\
         ctx_size = 2048\n[model.engine.kv_store]\ndisk = {:?}\ncodec = \"kvq\"\n",
        model(),
        store.folder()
    );
    let prompts = ["silent", "asks"].map(|tag| long_prompt(tag, 300));
    {
        let server = ReloadableServer::start(&config);
        let mut n_tokens = 0;
        for prompt in &prompts {
            n_tokens += ask(&server.server, prompt, None).await.n_prompt;
        }
        store.await_tokens(n_tokens - 64);
    }
    let server = ReloadableServer::start(&config);
    let silent = ask(&server.server, &prompts[0], None).await;
    assert!(silent.n_cached <= 64, "{} of {}", silent.n_cached, silent.n_prompt);
    let asks = answer(call(&server.server, &prompts[1], json!({})).header("x-baton-kv", "lossy")).await;
    assert_eq!(asks.n_cached, asks.n_prompt - 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_go_on_while_a_long_prompt_comes_back_from_disk_and_from_memory() {
    const N_STREAMED: u64 = 500;
    let store = Store::new();
    let serve = || BatonServer::start(&["--ctx-size", "4096", "--kv-store", &store.option("")]);
    let prompt = long_prompt("beside streams", 2_000);
    let first = {
        let server = serve();
        let first = ask(&server, &prompt, None).await;
        store.await_tokens(first.n_prompt);
        first
    };
    let server = serve();
    let open = async |what: &str| {
        let more = json!({ "max_tokens": N_STREAMED, "ignore_eos": true });
        let mut stream = SseReply::open(&server, &chat(&format!("Count {what}."), more)).await;
        stream.read_pieces(1).await;
        stream
    };
    let [mut one, mut other] = [open("sheep").await, open("cows").await];
    let (mut n_one, mut n_other) = (1, 1);
    // Once idle beside two streams, it leaves its slot, and comes back from memory.
    for tier in ["disk", "memory"] {
        let before = (n_one, n_other);
        let reply = loop {
            let mut asking = pin!(answer(call(&server, &prompt, json!({}))));
            let reply = loop {
                tokio::select! {
                    biased;
                    () = one.read_pieces(n_one + 1) => n_one += 1,
                    () = other.read_pieces(n_other + 1) => n_other += 1,
                    reply = &mut asking => break reply,
                }
            };
            // Tokens that it shares with another prompt, such as the template, may be in a slot or in memory already.
            if reply.route.contains(&format!("; {tier}=")) && (tier == "disk" || !reply.route.contains("; disk=")) {
                break reply;
            }
            assert_eq!(tier, "memory", "{}", reply.route);
        };
        assert_eq!(reply.n_cached, reply.n_prompt - 1, "{tier}");
        assert!(n_one > before.0 && n_other > before.1, "both streams went on: {before:?}, {n_one}, {n_other}");
    }
    // The node says so when it publishes its next load.
    eventually_async("the store's figures", async || {
        let report = &server.state().await["models"][0]["nodes"][0]["kv_store"];
        let [n_steps, most] = ["shared_steps", "most_step_tokens"].map(|figure| report[figure].as_u64().unwrap_or(0));
        // Two prompts came back, neither of them as a whole between two steps.
        n_steps >= 4 && (1..first.n_prompt - 1).contains(&most)
    })
    .await;
    for stream in [one, other] {
        assert_eq!(stream.whole().await.n_completion, N_STREAMED);
    }
}

#[tokio::test]
async fn two_endpoints_keep_one_budget_in_one_folder() {
    const BUDGET: u64 = 40 << 20;
    // Of SmolLM2: 30 layers with 3 heads of 64 values, K and V, 2 bytes each.
    const BYTES_PER_TOKEN: u64 = 30 * 3 * 64 * 2 * 2;
    let store = Store::new();
    let servers = [store.serve(",disk_budget=40MiB"), store.serve(",disk_budget=40MiB")];
    let (mut most, mut n_new) = (0, 0);
    for round in 0..4 {
        for (idx, server) in servers.iter().enumerate() {
            let reply = ask(server, &long_prompt(&format!("chat {round} of {idx}"), 400), None).await;
            assert!(reply.n_cached < 64, "only what the template begins with");
            n_new += reply.n_prompt - reply.n_cached;
            most = most.max(store.n_bytes());
        }
    }
    // A beginning that both computed, one of them finds before it writes it. It is shorter than the last block of a chat.
    let least = (n_new - 64) * BYTES_PER_TOKEN;
    eventually("the last blocks", || {
        most = most.max(store.n_bytes());
        (store.cache(&["list"])["written"][0]["n_bytes"].as_u64()? >= least).then_some(())
    });
    // Beside blocks there are a name and counts.
    assert!(most <= BUDGET + 4096 && most > BUDGET / 2, "{most} bytes");
    assert_eq!(store.cache(&["verify"])["removed"], json!([]), "neither has damaged a block");
    drop(servers);
    let server = store.serve(",disk_budget=40MiB");
    let last = ask(&server, &long_prompt("chat 3 of 1", 400), None).await;
    assert_eq!(last.n_cached, last.n_prompt - 1, "what one of them wrote last is found");
}

#[tokio::test]
async fn what_one_endpoint_writes_another_one_finds_while_both_run() {
    let store = Store::new();
    let servers = [store.serve(""), store.serve("")];
    let prompt = long_prompt("beside each other", 300);
    let first = ask(&servers[0], &prompt, Some("alice")).await;
    store.await_tokens(first.n_prompt);
    let n_blocks = store.blocks().len() as u64;
    // The node says so when it publishes its next load.
    eventually_async("the blocks of the other endpoint", async || {
        servers[1].state().await["models"][0]["nodes"][0]["kv_store"]["blocks"].as_u64() == Some(n_blocks)
    })
    .await;
    let again = ask(&servers[1], &prompt, Some("alice")).await;
    assert_eq!((again.n_cached, &again.text), (again.n_prompt - 1, &first.text));
    assert!(again.route.contains("; disk="), "{}", again.route);
    let other = ask(&servers[1], &prompt, Some("bob")).await;
    assert_eq!((other.n_cached, &other.text), (0, &first.text), "another scope computes every token");
}

#[tokio::test]
async fn a_store_on_a_disk_that_is_mounted_read_only_is_read_and_costs_no_request() {
    let store = Store::new();
    let prompts = ["written", "new"].map(|tag| long_prompt(tag, 300));
    let first = {
        let server = store.serve("");
        let first = ask(&server, &prompts[0], None).await;
        store.await_tokens(first.n_prompt);
        first
    };
    let (folder, files) = (store.folder(), store.files());
    let mount = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && exec \"$@\"";
    let unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, folder.to_str().unwrap()];
    if !Command::new(unshare[0]).args(&unshare[1..]).arg("true").status().is_ok_and(|status| status.success()) {
        return not_possible_here(Capability::Namespaces, "no folder can be mounted read-only here");
    }
    let model = model();
    let args = ["--model", model.to_str().unwrap(), "--name", "smollm2", "--threads", "1", "--slots", "1"];
    let server = BatonServer::under(&unshare, &[&args[..], &["--kv-store", &store.option("")]].concat());
    let again = ask(&server, &prompts[0], None).await;
    assert_eq!((again.n_cached, &again.text), (again.n_prompt - 1, &first.text), "what is there comes back");
    // The first one leaves the slot, and its tier in memory has it.
    let new = ask(&server, &prompts[1], None).await;
    assert_eq!(ask(&server, &prompts[0], None).await.text, first.text);
    let from_memory = ask(&server, &prompts[1], None).await;
    assert_eq!((from_memory.n_cached, from_memory.text), (new.n_prompt - 1, new.text));
    eventually_async("a write that failed", async || {
        let report = &server.state().await["models"][0]["nodes"][0]["kv_store"];
        report["failed_writes"].as_u64() > Some(0) && report["written_bytes"].as_u64() == Some(0)
    })
    .await;
    assert_eq!(store.files(), files, "nothing was written or removed");
}

#[tokio::test]
async fn a_windowed_model_and_a_hybrid_answer_losslessly_beside_lossy_files() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in [Architecture::Gemma3, Architecture::Qwen35] {
        let path = folder.path().join(format!("{architecture:?}.gguf"));
        tiny_gguf::write_with_template(&path, architecture, 1);
        let store = Store::new();
        let serve = |option: &str| {
            let args = ["--model", path.to_str().unwrap(), "--name", "m", "--threads", "1", "--slots", "1"];
            BatonServer::with(&[&args[..], &["--ctx-size", "2048", "--kv-store", option]].concat())
        };
        let text = |tag: &str| format!("{tag} {}", "what was said before ".repeat(25));
        let (prompt, other) = (text("one"), text("another"));
        // Its end is another way to go on than that of the first turn.
        let second = format!("{prompt}and then?");
        let exact = async |server: &BatonServer, prompt: &str| {
            let body = json!({ "model": "m", "max_tokens": 24, "ignore_eos": true });
            answer(call(server, prompt, body).header("x-baton-kv", "lossless")).await
        };
        let mut computed = Vec::new();
        for prompt in [&prompt, &second] {
            computed.push(exact(&serve("memory=0"), prompt).await.text);
        }
        let lossy = format!("{},codec=q8_0", store.option(""));
        {
            let server = serve(&lossy);
            let first = answer(call(&server, &prompt, json!({ "model": "m" }))).await;
            store.await_tokens(first.n_prompt);
        }
        let server = serve(&lossy);
        let plain = answer(call(&server, &prompt, json!({ "model": "m" }))).await;
        assert!(plain.n_cached > plain.n_prompt / 2, "{architecture:?}: the operator has named the codec");
        // The slot has what came from the file; then what was computed; then another conversation, and it is computed again.
        for (round, asked, expected) in [(0, &prompt, 0), (1, &second, 1), (2, &prompt, 0), (3, &second, 1)] {
            let reply = exact(&server, asked).await;
            assert_eq!(reply.text, computed[expected], "{architecture:?}, round {round}");
            if round == 0 {
                assert_eq!(reply.n_cached, 0, "{architecture:?}: only lossy KV is there");
            }
            if round == 1 {
                exact(&server, &other).await;
            }
        }
    }
}

#[tokio::test]
async fn a_changed_model_file_finds_nothing_of_the_one_before() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut bytes = fs::read(model()).unwrap();
    fs::write(&path, &bytes).unwrap();
    let serve = || {
        let args = ["--model", path.to_str().unwrap(), "--name", "smollm2", "--threads", "1", "--ctx-size", "2048"];
        BatonServer::with(&[&args[..], &["--kv-store", &store.option("")]].concat())
    };
    let prompt = long_prompt("model", 300);
    {
        let server = serve();
        let first = ask(&server, &prompt, None).await;
        store.await_tokens(first.n_prompt);
    }
    // The last weight.
    let at = bytes.len() - 1;
    bytes[at] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let server = serve();
    let changed = ask(&server, &prompt, None).await;
    assert_eq!(changed.n_cached, 0);
    store.await_tokens(2 * changed.n_prompt);
}

#[tokio::test]
async fn a_removed_key_takes_its_kv_with_it_at_a_reload_and_at_a_start() {
    let store = Store::new();
    let config = |keys: &[&str]| {
        let folder = store.folder();
        let model = model();
        format!(
            "api_keys = {keys:?}\n[model]\nsource = {model:?}\nname = \"smollm2\"\n[model.engine]\nthreads = 1\n\
             ctx_size = 2048\n[model.engine.kv_store]\ndisk = {folder:?}\n"
        )
    };
    let prompt = long_prompt("keys", 300);
    let server = ReloadableServer::start(&config(&["alice", "bob", "carol"]));
    let mut n_prompt = 0;
    for key in ["alice", "bob", "carol"] {
        n_prompt = ask(&server.server, &prompt, Some(key)).await.n_prompt;
    }
    store.await_tokens(3 * n_prompt);
    assert_eq!(store.scopes().len(), 3);
    let scopes = |n: usize| eventually("the end of a scope", || (store.scopes().len() == n).then_some(()));
    fs::write(&server.config, config(&["bob", "carol"])).unwrap();
    scopes(2);
    let kept = ask(&server.server, &prompt, Some("bob")).await;
    assert_eq!(kept.n_cached, n_prompt - 1, "other keys keep theirs");
    // The key comes back, and nothing of it is left: not in a slot, not in memory, and not on disk.
    fs::write(&server.config, config(&["alice", "bob", "carol"])).unwrap();
    eventually_async("the key", async || {
        let request = reqwest::Client::new().get(format!("{}/v1/models", server.server.base)).bearer_auth("alice");
        request.send().await.unwrap().status().is_success()
    })
    .await;
    assert_eq!(ask(&server.server, &prompt, Some("alice")).await.n_cached, 0);
    store.await_tokens(3 * n_prompt);
    // While it is down, the owner removes two keys.
    let file = fs::read_to_string(&server.config).unwrap();
    assert!(file.contains("alice"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("baton.toml");
    let start = |keys: &[&str]| {
        fs::write(&path, config(keys)).unwrap();
        BatonServer::with(&["--config", path.to_str().unwrap()])
    };
    drop(server);
    drop(start(&["alice", "bob", "carol"]));
    assert_eq!(store.scopes().len(), 3);
    let server = start(&["bob"]);
    scopes(1);
    assert_eq!(ask(&server, &prompt, Some("bob")).await.n_cached, n_prompt - 1);
}

#[tokio::test]
async fn baton_cache_clears_what_is_named_while_an_endpoint_runs() {
    let store = Store::new();
    let server = store.serve(",codec=planes_zstd");
    let prompt = long_prompt("clear", 300);
    let first = ask(&server, &prompt, Some("alice")).await;
    ask(&server, &prompt, Some("bob")).await;
    store.await_tokens(2 * first.n_prompt);
    let list = store.cache(&["list"]);
    let name = list["models"][0]["model"].as_str().unwrap();
    let scopes = store.scopes();
    assert!(
        scopes.len() == 2 && scopes.iter().all(|scope| scope["n_tokens"].as_u64() >= Some(first.n_prompt)),
        "{list}"
    );
    assert!(list["n_bytes"].as_u64() <= list["written"][0]["n_bytes"].as_u64(), "{list}");
    let scope = scopes[0]["scope"].as_str().unwrap();
    let cleared = store.cache(&["clear", "--scope", scope]);
    assert_eq!(cleared["n_files"], scopes[0]["n_blocks"]);
    assert_eq!(store.scopes().len(), 1);
    // The node's report follows what the engine has forgotten.
    let holds = async |n_blocks: &Value| {
        eventually_async("the engine to forget it", async || {
            server.state().await["models"][0]["nodes"][0]["kv_store"]["blocks"] == *n_blocks
        })
        .await;
    };
    holds(&scopes[1]["n_blocks"]).await;
    let asked = [ask(&server, &prompt, Some("alice")).await, ask(&server, &prompt, Some("bob")).await];
    let mut n_cached = asked.each_ref().map(|reply| reply.n_cached);
    n_cached.sort_unstable();
    assert_eq!(n_cached, [0, first.n_prompt - 1], "one scope was cleared, in its slot, too");
    store.await_tokens(2 * first.n_prompt);
    assert_eq!(store.cache(&["clear", "--model", "another"])["n_files"], 0);
    assert!(store.cache(&["clear", "--model", name])["n_files"].as_u64() > scopes[1]["n_blocks"].as_u64());
    holds(&json!(0)).await;
    for key in ["alice", "bob"] {
        let again = ask(&server, &prompt, Some(key)).await;
        assert_eq!((again.n_cached, &again.text), (0, &first.text));
    }
}

#[test]
fn baton_cache_says_of_a_folder_without_kv_that_it_has_none_and_names_it_once() {
    let store = Store::new();
    let folder = store.folder().display().to_string();
    let cache =
        Command::new(&*BATON).args(["cache", "--folder", &folder]).env("BATON_CLUSTER_KEY", CLUSTER_KEY).output();
    let cache = cache.unwrap();
    let error = String::from_utf8(cache.stderr).unwrap();
    assert!(!cache.status.success() && error.contains("has no KV"), "{error}");
    assert_eq!(error.matches(&folder).count(), 1, "{error}");
}

#[test]
fn baton_cache_verify_ends_with_an_error_that_counts_the_files_it_cannot_read() {
    let store = Store::new();
    let model = store.folder().join("model");
    fs::create_dir_all(&model).unwrap();
    fs::write(store.folder().join("baton-kv-store"), "").unwrap();
    let verify = |more: &[&str]| {
        let folder = store.folder();
        let mut command = Command::new(&*BATON);
        command.args(["cache", "verify", "--folder", folder.to_str().unwrap()]).args(more);
        command.env("BATON_CLUSTER_KEY", CLUSTER_KEY).output().unwrap()
    };
    assert!(verify(&[]).status.success(), "a folder without blocks is right");
    // A link to itself cannot be opened.
    let unread = model.join("0.kv");
    std::os::unix::fs::symlink(&unread, &unread).unwrap();
    let output = verify(&["--json"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("1 file cannot be read"), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["unread"], &report["n_right"]), (&json!([unread]), &json!(0)), "{report}");
    assert!(fs::symlink_metadata(&unread).is_ok(), "it is left where it is");
}

#[test]
fn a_folder_with_other_files_is_refused_and_nothing_in_it_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("letter.txt");
    fs::write(&path, "dear").unwrap();
    let config = folder.path().join("baton.toml");
    let disk = folder.path();
    fs::write(&config, format!("[model.engine]\nengine = \"sim\"\n[model.engine.kv_store]\ndisk = {disk:?}\n"))
        .unwrap();
    for command in [["check-config"].as_slice(), &["serve", "--listen", "127.0.0.1:0", "--config"]] {
        let output = Command::new(&*BATON).args(command).arg(&config).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && text.contains("line 4: model.engine.kv_store.disk cannot be used"),
            "{text}"
        );
        assert!(text.contains("has other files"), "{text}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}
