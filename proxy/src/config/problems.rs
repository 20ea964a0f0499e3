//! Checks that no type or range can express: forms of addresses, duplicate names, keys that exclude each other.

use baton_engines::engine_options::WrittenOptions;
use baton_link::transport::Transport;
use baton_planner::policy::PolicyName;

use super::defaults::{DEFAULT_LISTEN, OLLAMA_LISTEN};
use super::engine_options::{self, flag};
use super::error::ConfigProblem;
use super::node_address::is_node_address;
use super::raw::RawConfig;
use super::transport_args::TransportArgs;
use super::wake::{self, KnownNodes};
use super::{adoption, keys, on_demand_models, upstream};
use crate::http::access::{allowed_hosts, allowed_origins};

impl RawConfig {
    /// Every value that cannot be used.
    pub(super) fn problems(&self) -> Vec<ConfigProblem> {
        let is_empty = |text: &Option<String>| text.as_ref().is_some_and(|text| text.trim().is_empty());
        let is_address = |listen: &str| {
            listen.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        let mut found = Vec::new();
        let reached = self.transport();
        let transport = reached.transport().unwrap_or_else(|error| {
            found.push(ConfigProblem {
                key: "tls_ca".to_owned(),
                flag: "--tls-ca".to_owned(),
                message: format!("cannot be used: {error}"),
            });
            Transport::default()
        });
        let mut problem = |key: &str, flag: &str, message: String| {
            found.push(ConfigProblem { key: key.to_owned(), flag: flag.to_owned(), message });
        };
        if let Some(listen) = self.listen.as_ref().filter(|listen| !is_address(listen)) {
            problem("listen", "--listen", format!("must be HOST:PORT, e.g. {DEFAULT_LISTEN}, not {listen:?}"));
        }
        if let Some(listen) = self.ollama_listen.as_ref().filter(|listen| !is_address(listen)) {
            let message = format!("must be HOST:PORT, e.g. {OLLAMA_LISTEN}, not {listen:?}");
            problem("ollama_listen", "--ollama-listen", message);
        }
        let listen = self.listen.as_deref().unwrap_or(DEFAULT_LISTEN);
        if self.ollama_listen.as_ref().is_some_and(|ollama| is_one_address(listen, ollama)) {
            let message = format!("must not be the same as listen, which is {listen}");
            problem("ollama_listen", "--ollama-listen", message);
        }
        if self.api_keys.iter().any(|key| key.trim().is_empty()) {
            let message = "must not be empty: a request without a key would be accepted";
            problem("api_keys", "--api-key", message.into());
        }
        if let Some(message) =
            self.allowed_origins.iter().find_map(|origin| allowed_origins::check_configured(origin).err())
        {
            problem("allowed_origins", "allowed_origins", format!("has a wrong entry: {message}"));
        }
        if let Some(message) = self.allowed_hosts.iter().find_map(|name| allowed_hosts::check_configured(name).err()) {
            problem("allowed_hosts", "allowed_hosts", format!("has a wrong entry: {message}"));
        }
        let deadlines = self.deadlines.typed();
        if deadlines.floor > deadlines.max {
            let key = "deadlines.floor_ms";
            problem(key, key, format!("must be at most deadlines.max_ms, which is {}", deadlines.max.as_millis()));
        }
        if is_empty(&self.model.source) {
            problem("model.source", "--model", "must not be empty".into());
        }
        if is_empty(&self.model.name) {
            problem("model.name", "--name", "must not be empty".into());
        }
        if self.model.aliases.iter().any(|alias| alias.trim().is_empty()) {
            problem("model.aliases", "aliases", "must not have an empty name".into());
        }
        if let Some(name) = self.model.policy.as_ref().filter(|name| PolicyName::parse(name).is_none()) {
            let names = PolicyName::ALL.map(PolicyName::as_str).join(", ");
            problem("model.policy", "--policy", format!("must be one of {names}, not {name:?}"));
        }
        for (key, flag, addresses) in
            [("model.prefill", "--prefill", &self.model.prefill), ("model.decode", "--decode", &self.model.decode)]
        {
            for address in addresses.iter().filter(|address| !is_node_address(address)) {
                // Do not repeat a password.
                let wrong = if address.contains(['@', '?']) { String::new() } else { format!(", not {address:?}") };
                let form = "must be HOST:PORT or a URL like http://spark.local:9000, without a user or a password";
                problem(key, flag, format!("{form}{wrong}"));
            }
            for address in addresses.iter().filter(|address| is_node_address(address)) {
                if let Err(error) = transport.check(&reached.node_url(address)) {
                    problem(key, flag, format!("is refused: {error}"));
                }
            }
            let mut urls: Vec<String> = addresses.iter().map(|address| reached.node_url(address)).collect();
            urls.sort();
            if let Some(twice) = urls.windows(2).find(|pair| pair[0] == pair[1]) {
                problem(key, flag, format!("names {} twice", twice[0]));
            }
        }
        for option in self.model.engine.set().filter(|_| !self.has_own_engine()) {
            let message = "is for an engine here, and there is none: nodes run the models they were started with. Name a \
                           model here to generate here, too (--model, or source in [model])";
            problem(&format!("model.engine.{}", option.key), &option.flag(), message.into());
        }
        for (key, message) in engine_options::problems(&self.model.engine) {
            problem(&format!("model.engine.{key}"), &flag(key), message);
        }
        for (key, message) in self.model.sampling.problems() {
            let key = format!("model.sampling.{key}");
            problem(&key, &key, message);
        }
        if self.tracing.otlp_endpoint.as_ref().is_some_and(|endpoint| !is_collector(endpoint)) {
            // Do not repeat it: it may hold a password.
            let message = "must be a URL like http://127.0.0.1:4318, without a user or a password".to_owned();
            found.push(ConfigProblem {
                key: "tracing.otlp_endpoint".into(),
                flag: "tracing.otlp_endpoint".into(),
                message,
            });
        }
        found.extend(keys::problems(&self.keys).into_iter().chain(self.wake_problems(&reached)));
        found.extend(upstream::problems(&self.upstream, &transport));
        let upstreams: Vec<&str> = self.upstream.iter().map(|upstream| &*upstream.name).collect();
        found.extend(adoption::problems(&self.adopt_hosts, &self.aliases, &upstreams, &transport, self.adopts()));
        let taken: Vec<&String> = self.model.name.iter().chain(&self.model.aliases).collect();
        found.extend(on_demand_models::problems(&self.models, &self.loading, &taken));
        found
    }
}

impl RawConfig {
    /// Keys that others make useless, with dots, and messages that complete `KEY …`.
    pub(super) fn remarks(&self) -> Vec<(String, &'static str)> {
        let models = self.models.iter().enumerate().map(|(i, model)| (format!("models[{i}]"), &model.engine));
        let own: &WrittenOptions = &self.model.engine;
        let tables = std::iter::once(("model".to_owned(), own)).chain(models);
        let of_table = |(table, engine): (String, _)| {
            engine_options::remarks(engine).map(move |(key, message)| (format!("{table}.engine.{key}"), message))
        };
        tables.flat_map(of_table).collect()
    }

    fn wake_problems(&self, reached: &TransportArgs) -> Vec<ConfigProblem> {
        let nodes = self.model.decode.iter().chain(&self.model.prefill).filter(|address| is_node_address(address));
        let urls = nodes.map(|address| reached.node_url(address)).collect();
        wake::problems(&self.wake, &KnownNodes { urls, are_found: self.discover.unwrap_or(false), reached })
    }
}

/// Returns true if two listeners cannot have these two addresses.
fn is_one_address(one: &str, other: &str) -> bool {
    let parts = |address: &str| {
        let (host, port) = address.rsplit_once(':')?;
        let host = if host == "localhost" { "127.0.0.1" } else { host.trim_matches(['[', ']']) };
        // For port 0 the system picks two different ports.
        Some((host.to_owned(), port.parse::<u16>().ok().filter(|port| *port != 0)?))
    };
    let (Some((host, port)), Some((other_host, other_port))) = (parts(one), parts(other)) else { return false };
    let is_any = |host: &str| host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_unspecified());
    port == other_port && (host == other_host || is_any(&host) || is_any(&other_host))
}

fn is_collector(endpoint: &str) -> bool {
    reqwest::Url::parse(endpoint).is_ok_and(|url| {
        let is_plain = url.username().is_empty() && url.password().is_none();
        matches!(url.scheme(), "http" | "https") && url.has_host() && is_plain
    })
}
