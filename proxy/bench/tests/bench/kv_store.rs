//! `baton-bench kv-store` finds every prompt in every place, and the same reply.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use harness::{BATON_BENCH, model};
use serde_json::Value;
use tiny_gguf::Architecture;

use super::{details, succeed};

#[test]
fn the_store_benchmark_finds_each_prompt_in_each_place_and_the_computed_reply() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let page = folder.path().join("page.md");
    fs::write(&page, "<!-- written by `baton-bench kv-store`: begin -->\n<!-- end -->\n").unwrap();
    succeed(
        Command::new(&*BATON_BENCH)
            .args(["kv-store", "--quick", "--lengths", "100,300", "--threads", "1", "--models"])
            .arg(model())
            .arg("--disk")
            .arg(folder.path())
            .args(["--json".as_ref(), json.as_os_str(), "--page".as_ref(), page.as_os_str()]),
    );
    let figures = details(&json);
    let expected = ["computed", "slot", "memory", "other_node", "warm_disk", "cold_disk"];
    for n_tokens in ["100", "300"] {
        assert_eq!(places(&figures["models"][0]["samples"][n_tokens]), expected);
    }
    assert!(fs::read_to_string(page).unwrap().contains("| 300 tokens | disk, page cache cold |"));
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "the store's folder is gone: {left:?}");
    // A report is as fast as itself.
    let same = Command::new(&*BATON_BENCH).arg("compare").args([&json, &json]).output().unwrap();
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stderr));
}

/// Keeps prompts as llama-server does: in its slot, in memory, and in the files that a client asks for.
const LLAMA_SERVER: &str = r#"#!/usr/bin/env python3
import http.server, json, os, sys

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

slot, cache = [], []

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, "{}")

    def do_POST(self):
        global slot
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/completion":
            return self.answer(200, self.completion(body))
        file = os.path.join(option("--slot-save-path"), body["filename"])
        if self.path == "/slots/0?action=save":
            json.dump(slot, open(file, "w"))
        elif self.path == "/slots/0?action=restore":
            slot = json.load(open(file))
        else:
            return self.answer(404, "no such action")
        self.answer(200, "{}")

    def completion(self, body):
        global slot
        prompt = body["prompt"]
        if common(slot, prompt) < len(slot) / 2:
            if option("--cache-ram") != "0":
                cache.append(slot)
            slot = max(cache, key=lambda kept: common(kept, prompt), default=[])
        n_cached = min(common(slot, prompt), len(prompt) - 1) if body["cache_prompt"] else 0
        reply = [(sum(prompt) + i) % 100 for i in range(body["n_predict"])]
        slot = prompt + reply
        events = [{"content": "x", "tokens": [token], "stop": False} for token in reply]
        events.append({"content": "", "tokens": [], "stop": True, "timings": {"cache_n": n_cached}})
        return "".join("data: " + json.dumps(event) + "\n\n" for event in events)

http.server.HTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"#;

/// The places of a prompt in the figures, each of which gave all of it and the computed reply.
fn places(samples: &Value) -> Vec<&str> {
    let samples = samples.as_array().unwrap();
    for sample in samples {
        assert_eq!((&sample["is_whole"], &sample["is_equal"]), (&true.into(), &true.into()), "{sample}");
        assert!(sample["ttft_ms"].as_f64().unwrap() > 0.0, "{sample}");
    }
    samples.iter().map(|sample| sample["from"].as_str().unwrap()).collect()
}

fn written(path: &Path, content: &str) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_hybrid_comes_back_with_its_states_and_llama_server_is_asked_for_the_same_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let [json, tiny, server] = ["figures.json", "hybrid.gguf", "server.py"].map(|name| folder.path().join(name));
    tiny_gguf::write(&tiny, Architecture::Qwen35, 1);
    written(&server, LLAMA_SERVER);
    let table = succeed(
        Command::new(&*BATON_BENCH)
            .args(["kv-store", "--lengths", "100,300", "--rounds", "2", "--threads", "1"])
            .args(["--models".as_ref(), tiny.as_os_str(), "--disk".as_ref(), folder.path().as_os_str()])
            .args(["--peer".as_ref(), server.as_os_str(), "--json".as_ref(), json.as_os_str()]),
    );
    let figures = &details(&json)["models"][0];
    for n_tokens in ["100", "300"] {
        let samples = figures["samples"][n_tokens].as_array().unwrap();
        // A pull leaves the decode node the last tokens of a prompt.
        let own: Value = samples.iter().filter(|sample| sample["from"] != "other_node").cloned().collect();
        let first_life = ["computed", "slot", "memory"].repeat(2);
        let [warm, cold] = ["warm_disk", "cold_disk"].map(|from| [from; 2]);
        let expected = [&first_life[..], &warm, &cold].concat();
        assert_eq!(places(&own), expected);
        assert_eq!(places(&figures["peer"][n_tokens]), expected);
    }
    assert!(table.contains("llama-server with the same file of hybrid:"), "{table}");
    // A program that ends at once is no server.
    written(&server, "#!/bin/sh\nexit 3\n");
    let refused = Command::new(&*BATON_BENCH)
        .args(["kv-store", "--quick", "--threads", "1", "--models"])
        .args([tiny.as_os_str(), "--peer".as_ref(), server.as_os_str()])
        .output()
        .unwrap();
    let why = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && why.contains("llama-server has ended"), "{why}");
}

#[test]
fn traces_count_what_a_node_and_llama_server_compute_of_the_same_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let [json, tiny, server] = ["figures.json", "tiny.gguf", "server.py"].map(|name| folder.path().join(name));
    tiny_gguf::write(&tiny, Architecture::Llama, 1);
    written(&server, LLAMA_SERVER);
    let table = succeed(
        Command::new(&*BATON_BENCH).args(["kv-store", "--traces", "--threads", "1", "--models"]).arg(&tiny).args([
            "--peer".as_ref(),
            server.as_os_str(),
            "--json".as_ref(),
            json.as_os_str(),
        ]),
    );
    let rows = details(&json)["rows"].as_array().unwrap().clone();
    let traces: Vec<_> =
        rows.iter().map(|row| [&row["trace"], &row["server"]].map(|name| name.as_str().unwrap())).collect();
    let names = ["an agent", "30 chats", "60 submissions"];
    assert_eq!(traces, names.map(|name| [[name, "baton"], [name, "llama_server"]]).as_flattened());
    for row in rows.chunks(2) {
        let [ours, theirs] = [0, 1].map(|i| ["n_prompt", "n_cached"].map(|key| row[i][key].as_u64().unwrap()));
        assert_eq!(ours[0], theirs[0], "both get prompts of the same lengths: {row:?}");
        assert!(ours[1] < ours[0] && theirs[1] < theirs[0], "{row:?}");
    }
    // Each message once, with the token before it that is decoded, and the shared beginning; replies are there.
    let agent = &rows[0];
    let n_computed = agent["n_prompt"].as_u64().unwrap() - agent["n_cached"].as_u64().unwrap();
    assert!((60 * 40..=800 + 60 * (40 + 2)).contains(&n_computed), "{agent}");
    assert!(table.contains("llama-server"), "{table}");
}
