//! Baton in front of other servers: a second Baton with the real model, and a scriptable one for faults.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test that cannot go on panics")]

#[path = "../harness/mod.rs"]
mod harness;

mod dialects;
mod fallback;
mod faults;
mod images;
mod mock;
mod ollama;
mod prefill_only;
mod seeing;
mod told;
mod vllm;

use std::path::PathBuf;
use std::process::Stdio;

use harness::Server;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A running endpoint with this configuration, and the file that it can be changed in.
pub(crate) struct Front {
    pub(crate) server: Server,
    pub(crate) config: PathBuf,
    _folder: TempDir,
}

impl Front {
    pub(crate) fn start(config: &str) -> Front {
        Front::with(config, &[])
    }

    pub(crate) fn with(config: &str, args: &[&str]) -> Front {
        Front::logging_to(Stdio::inherit(), config, args)
    }

    pub(crate) fn logging_to(log: impl Into<Stdio>, config: &str, args: &[&str]) -> Front {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("baton.toml");
        std::fs::write(&path, config).unwrap();
        let args = [&["--config", path.to_str().unwrap()], args].concat();
        Front { server: Server::logging_to(log, &args), config: path, _folder: folder }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        let request = reqwest::Client::new().post(format!("{}{path}", self.server.base)).json(body);
        let response = request.send().await.unwrap();
        let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        let (status, route, retry_after) = (response.status().as_u16(), header("x-baton-route"), header("retry-after"));
        Answer { status, route: route.unwrap_or_default(), retry_after, text: response.text().await.unwrap() }
    }

    pub(crate) async fn chat(&self, more: Value) -> Answer {
        self.post("/v1/chat/completions", &said("hi", more)).await
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        reqwest::get(format!("{}{path}", self.server.base)).await.unwrap().json().await.unwrap()
    }
}

/// A reply, whatever it is.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) route: String,
    pub(crate) retry_after: Option<String>,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// What a whole chat completion says.
    #[track_caller]
    pub(crate) fn content(&self) -> String {
        let json = self.json();
        json["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{self:?}")).to_owned()
    }
}

/// A chat with the model `m`.
pub(crate) fn said(prompt: &str, more: Value) -> Value {
    let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": prompt }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// An upstream in a configuration, that has our model `m` as `theirs`.
pub(crate) fn upstream(name: &str, kind: &str, url: &str, more: &str) -> String {
    let models = if more.contains("models") { "" } else { "models = { m = \"theirs\" }\n" };
    format!("[[upstream]]\nname = \"{name}\"\nkind = \"{kind}\"\nurl = \"{url}\"\n{models}{more}\n")
}
