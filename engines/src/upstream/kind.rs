//! The kinds of upstreams and their names. Which file speaks to which kind is known in [`registry`](super::registry).

/// The server that an upstream runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamKind {
    /// Ollama, by its own API.
    Ollama,
    /// Any server that speaks OpenAI's dialect.
    OpenAi,
    LlamaServer,
    Vllm,
}

impl UpstreamKind {
    pub const ALL: [UpstreamKind; 4] =
        [UpstreamKind::Ollama, UpstreamKind::OpenAi, UpstreamKind::LlamaServer, UpstreamKind::Vllm];

    /// The kind's name in configurations, reports and error messages.
    pub fn as_str(self) -> &'static str {
        match self {
            UpstreamKind::Ollama => "ollama",
            UpstreamKind::OpenAi => "openai",
            UpstreamKind::LlamaServer => "llama-server",
            UpstreamKind::Vllm => "vllm",
        }
    }

    pub fn parse(name: &str) -> Option<UpstreamKind> {
        UpstreamKind::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}
