//! llama.cpp's server: OpenAI's dialect with llama.cpp's samplers and template variables.

/// What it takes.
pub(super) const FIELDS: [&str; 18] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "seed",
    "logit_bias",
    "logprobs",
    "ignore_eos",
    "tools",
    "parallel_tool_calls",
    "response_format",
    "reasoning_content",
    "chat_template_kwargs",
    "stream_options",
];
