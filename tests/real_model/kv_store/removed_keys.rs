//! A key that is removed takes its KV with it.

use std::fs;

use harness::{BatonServer, ReloadableServer, eventually, eventually_async, long_prompt, model};

use super::{Store, ask};

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
