//! `baton cache`, beside engines and without.

use std::fs;
use std::process::Command;

use harness::{BATON, CLUSTER_KEY, eventually_async, long_prompt};
use serde_json::{Value, json};

use super::{Store, ask};

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
    let unread = model.join("00000000000000000000000000000000.kv");
    std::os::unix::fs::symlink(&unread, &unread).unwrap();
    let output = verify(&["--json"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("1 file cannot be read"), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["unread"], &report["n_right"]), (&json!([unread]), &json!(0)), "{report}");
    assert!(fs::symlink_metadata(&unread).is_ok(), "it is left where it is");
}
