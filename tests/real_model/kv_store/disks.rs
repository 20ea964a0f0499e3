//! Disks that are full, read-only, slow or shared cost no request.

use std::fs;
use std::pin::pin;
use std::process::Command;

use harness::{
    BatonServer, Capability, SseReply, chat, eventually, eventually_async, long_prompt, model, not_possible_here,
};
use serde_json::json;

use super::{Store, answer, ask, call};

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
async fn two_endpoints_keep_one_budget_in_one_folder() {
    const BUDGET: u64 = 40 << 20;
    // SmolLM2 has 30 layers with 3 heads of 64 values, K and V, 2 bytes each.
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
