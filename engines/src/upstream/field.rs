//! Request fields that an upstream may or may not take.

/// A field of a request that is sent only to upstreams that take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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
        match self {
            UpstreamField::Temperature => "temperature",
            UpstreamField::TopP => "top_p",
            UpstreamField::TopK => "top_k",
            UpstreamField::MinP => "min_p",
            UpstreamField::FrequencyPenalty => "frequency_penalty",
            UpstreamField::PresencePenalty => "presence_penalty",
            UpstreamField::RepeatPenalty => "repeat_penalty",
            UpstreamField::RepetitionPenalty => "repetition_penalty",
            UpstreamField::RepeatLastN => "repeat_last_n",
            UpstreamField::Seed => "seed",
            UpstreamField::LogitBias => "logit_bias",
            UpstreamField::Logprobs => "logprobs",
            UpstreamField::IgnoreEos => "ignore_eos",
            UpstreamField::Tools => "tools",
            UpstreamField::ParallelToolCalls => "parallel_tool_calls",
            UpstreamField::ResponseFormat => "response_format",
            UpstreamField::ReasoningEffort => "reasoning_effort",
            UpstreamField::ReasoningContent => "reasoning_content",
            UpstreamField::ChatTemplateKwargs => "chat_template_kwargs",
            UpstreamField::MaxCompletionTokens => "max_completion_tokens",
            UpstreamField::StreamOptions => "stream_options",
        }
    }
}
