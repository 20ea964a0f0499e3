//! The kinds of upstreams and their names. Which file speaks to which kind is known in [`registry`](super::registry).

/// The server that an upstream runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum UpstreamKind {
    /// Ollama, by its own API.
    Ollama,
    /// Any server that speaks OpenAI's dialect.
    OpenAi,
    #[strum(serialize = "llama-server")]
    LlamaServer,
    Vllm,
}

impl UpstreamKind {
    pub const ALL: [UpstreamKind; 4] =
        [UpstreamKind::Ollama, UpstreamKind::OpenAi, UpstreamKind::LlamaServer, UpstreamKind::Vllm];

    /// The kind's name in configurations, reports and error messages.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    pub fn parse(name: &str) -> Option<UpstreamKind> {
        UpstreamKind::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}
