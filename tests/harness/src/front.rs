//! An endpoint in front of upstreams.

use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::{BatonServer, TempConfigFile};

/// A running endpoint with a configuration file that can be changed.
pub struct ReloadableServer {
    pub server: BatonServer,
    /// Its configuration file.
    pub config: PathBuf,
    _file: TempConfigFile,
}

impl ReloadableServer {
    /// Serves with this configuration.
    pub fn start(config: &str) -> ReloadableServer {
        ReloadableServer::with(config, &[])
    }

    /// The same with further arguments.
    pub fn with(config: &str, args: &[&str]) -> ReloadableServer {
        ReloadableServer::logging_to(Stdio::inherit(), config, args)
    }

    /// The same with this standard error.
    pub fn logging_to(log: impl Into<Stdio>, config: &str, args: &[&str]) -> ReloadableServer {
        ReloadableServer::started(log, config, args, &[])
    }

    /// The same, with these variables in its environment.
    pub fn started(log: impl Into<Stdio>, config: &str, args: &[&str], variables: &[(&str, &str)]) -> ReloadableServer {
        let file = TempConfigFile::new(config);
        let config = file.path();
        let args = [&["--config", config.to_str().unwrap()], args].concat();
        ReloadableServer { server: BatonServer::started(log, &args, variables), config, _file: file }
    }

    /// Posts JSON and returns the whole reply.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        let request = reqwest::Client::new().post(format!("{}{path}", self.server.base)).json(body);
        let response = request.send().await.unwrap();
        let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        let status = response.status().as_u16();
        let route = header("x-baton-route");
        let retry_after = header("retry-after");
        let warning = header("x-baton-warning").unwrap_or_default();
        Answer { status, route: route.unwrap_or_default(), retry_after, warning, text: response.text().await.unwrap() }
    }

    /// A chat with the model `m`, with further fields.
    pub async fn chat(&self, more: Value) -> Answer {
        self.post("/v1/chat/completions", &said("hi", more)).await
    }

    /// The JSON at a path.
    pub async fn get(&self, path: &str) -> Value {
        self.server.get(path).await
    }
}

/// A reply of any kind.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// `x-baton-route`; empty without one.
    pub route: String,
    /// `retry-after`.
    pub retry_after: Option<String>,
    /// `x-baton-warning`; empty without one.
    pub warning: String,
    pub text: String,
}

impl Answer {
    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The text of a whole chat completion.
    #[track_caller]
    pub fn content(&self) -> String {
        let json = self.json();
        json["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{self:?}")).to_owned()
    }
}

/// A chat request for the model `m`, with further fields.
pub fn said(prompt: &str, more: Value) -> Value {
    let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": prompt }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// An `[[upstream]]` of a configuration, in which our model `m` is its `theirs`.
pub fn upstream(name: &str, kind: &str, url: &str, more: &str) -> String {
    let models = if more.contains("models") { "" } else { "models = { m = \"theirs\" }\n" };
    format!("[[upstream]]\nname = \"{name}\"\nkind = \"{kind}\"\nurl = \"{url}\"\n{models}{more}\n")
}
