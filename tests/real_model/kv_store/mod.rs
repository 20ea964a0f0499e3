//! KV on disk: found again after a restart, refused if it is damaged, bounded, and nobody else's.

mod commands;
mod disks;
mod lossy;
mod options;
mod removed_keys;
mod restarts;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use harness::{BATON, BatonServer, CLUSTER_KEY, chat, eventually};
use serde_json::{Value, json};
use tempfile::TempDir;

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
