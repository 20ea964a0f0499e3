//! What an upstream is, as it was configured and checked.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Protocol, llama_server, ollama, openai, vllm};

/// Which server an upstream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Ollama, by its own API.
    Ollama,
    /// Any server that speaks OpenAI's dialect.
    OpenAi,
    /// llama.cpp's server.
    LlamaServer,
    /// vLLM.
    Vllm,
}

/// All of them, by the names they are configured under.
pub const KINDS: [(&str, Kind); 4] =
    [("ollama", Kind::Ollama), ("openai", Kind::OpenAi), ("llama-server", Kind::LlamaServer), ("vllm", Kind::Vllm)];

impl Kind {
    /// As it is configured and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Ollama => "ollama",
            Kind::OpenAi => "openai",
            Kind::LlamaServer => "llama-server",
            Kind::Vllm => "vllm",
        }
    }

    /// Fields that are sent to it unless the configuration says otherwise.
    pub fn default_fields(self) -> &'static [&'static str] {
        match self {
            Kind::Ollama => &ollama::FIELDS,
            Kind::OpenAi => &openai::FIELDS,
            Kind::LlamaServer => &llama_server::FIELDS,
            Kind::Vllm => &vllm::FIELDS,
        }
    }

    /// Fields that could be sent to it.
    pub fn known_fields(self) -> &'static [&'static str] {
        match self {
            Kind::Ollama => &ollama::KNOWN_FIELDS,
            Kind::OpenAi | Kind::LlamaServer | Kind::Vllm => &openai::KNOWN_FIELDS,
        }
    }

    /// The address of its API, where none of its paths is part of the configured URL.
    pub(super) fn base(self, url: &str) -> String {
        let url = url.trim_end_matches('/');
        let is_bare = reqwest::Url::parse(url).is_ok_and(|url| url.path() == "/");
        if is_bare && self != Kind::Ollama { format!("{url}/v1") } else { url.to_owned() }
    }

    pub(super) fn protocol(self) -> Box<dyn Protocol> {
        match self {
            Kind::Ollama => Box::new(ollama::Ollama),
            Kind::OpenAi | Kind::LlamaServer | Kind::Vllm => Box::new(openai::OpenAi),
        }
    }
}

/// How long an upstream may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// For a connection.
    pub connect: Duration,
    /// From the request to the first piece of the reply.
    pub first: Duration,
    /// Between two signs of life after that. Comments count.
    pub idle: Duration,
}

/// An upstream, checked.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// As in `x-baton-route`.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// `http://host:port`, or with the path that its API lies under.
    pub url: String,
    /// Sent as `Authorization: Bearer`.
    pub key: Option<String>,
    /// Sent with each request. Names and values were checked.
    pub headers: Vec<(String, String)>,
    /// Our names for its models, and its own. Empty: all that it lists, under its own names.
    pub models: Vec<(String, String)>,
    /// Fields that may be sent.
    pub fields: BTreeSet<String>,
    /// Choices that it generates at once.
    pub max_concurrent: usize,
    /// Tokens of context that it is asked for (Ollama).
    pub num_ctx: Option<u32>,
    /// New tokens at most where the client names no limit, for servers whose own default is too small.
    pub default_max_tokens: Option<u32>,
    /// Whether closing a connection in the middle of a reply does it no harm. Otherwise replies are read to their end.
    pub abort: bool,
    /// Where vLLM computes prompts for this one, if elsewhere.
    pub prefill: Vec<String>,
    /// How long it may take.
    pub deadlines: Deadlines,
}

impl UpstreamSettings {
    /// Whether this field may be sent.
    pub(super) fn takes(&self, field: &str) -> bool {
        self.fields.contains(field)
    }
}

/// Without what is secret.
impl std::fmt::Debug for UpstreamSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamSettings").field("name", &self.name).field("kind", &self.kind).finish_non_exhaustive()
    }
}
