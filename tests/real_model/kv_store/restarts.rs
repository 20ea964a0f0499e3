//! KV on disk is found again after a restart or a crash, and never if it is not that of the prompt.

use std::fs;
use std::path::PathBuf;

use harness::{BatonNode, BatonServer, eventually, eventually_async, long_prompt, model};
use rustix::process::Signal;
use serde_json::Value;

use super::{BLOCK, Store, ask};

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
async fn a_stop_right_after_a_reply_loses_nothing_of_it_and_says_nothing() {
    let store = Store::new();
    let prompt = long_prompt("stopped", 100);
    let log = tempfile::NamedTempFile::new().unwrap();
    let model = model();
    let args = ["--model", model.to_str().unwrap(), "--name", "smollm2", "--threads", "1", "--ctx-size", "2048"];
    let option = store.option("");
    let args = [&args[..], &["--kv-store", &option]].concat();
    let mut server = BatonServer::logging_to(log.reopen().unwrap(), &args);
    let first = ask(&server, &prompt, None).await;
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    assert_eq!(fs::read_to_string(log.path()).unwrap(), "", "nobody takes the engine's end for a loss");
    let server = store.serve("");
    let again = ask(&server, &prompt, None).await;
    assert_eq!((again.n_cached, &again.text), (again.n_prompt - 1, &first.text));
    assert!(again.route.contains("; disk="), "{}", again.route);
}

#[tokio::test]
async fn a_node_that_is_stopped_right_after_a_reply_loses_nothing_of_it() {
    let store = Store::new();
    let prompt = long_prompt("stopped node", 100);
    let start = || {
        let node = BatonNode::start(&[
            "--name",
            "smollm2",
            "--role",
            "decode",
            "--ctx-size",
            "2048",
            "--kv-store",
            &store.option(""),
        ]);
        let server = BatonServer::with(&["--decode", &node.url]);
        (node, server)
    };
    let first = {
        let (mut node, server) = start();
        let first = ask(&server, &prompt, None).await;
        node.signal(Signal::TERM);
        eventually("the node's end", || (!node.is_running()).then_some(()));
        first
    };
    let (_node, server) = start();
    let again = ask(&server, &prompt, None).await;
    assert_eq!((again.n_cached, again.text), (again.n_prompt - 1, first.text));
}

#[tokio::test]
async fn a_killed_endpoint_takes_its_engine_with_it() {
    let store = Store::new();
    let mut server = store.serve("");
    ask(&server, &long_prompt("killed endpoint", 400), None).await;
    let engine = server.engine();
    server.signal(Signal::KILL);
    server.wait();
    eventually("the engine's end", || (!harness::is_alive(engine)).then_some(()));
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
