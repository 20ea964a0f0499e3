//! Request fields that an upstream may or may not take.

/// A field of a request that is sent only to upstreams that take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum UpstreamField {
    Temperature,
    TopP,
    TopK,
    MinP,
    FrequencyPenalty,
    PresencePenalty,
    RepeatPenalty,
    RepetitionPenalty,
    RepeatLastN,
    Seed,
    LogitBias,
    Logprobs,
    IgnoreEos,
    Tools,
    ParallelToolCalls,
    ResponseFormat,
    ReasoningEffort,
    ReasoningContent,
    ChatTemplateKwargs,
    MaxCompletionTokens,
    StreamOptions,
}

impl UpstreamField {
    /// The field's name in configurations and in OpenAI's dialect.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
