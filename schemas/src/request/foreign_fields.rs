//! The fields of other APIs' request types, by what becomes of them where a body does not declare them.
//!
//! The types are those of OpenAI, Anthropic, Ollama, llama-server, vLLM, SGLang and LM Studio, in the versions of the table
//! in docs/compatibility.md, and some of front ends for KoboldCpp, TabbyAPI and text-generation-webui. A field that changes
//! the reply, and that neither list has, is missing from them.

use super::demand::Off;
use super::refused_field::RefusedField;

/// Fields that do not change what a reply says: they name the caller, place and price the work, tune speed, or only matter
/// beside a field that is refused.
pub(crate) const WITHOUT_EFFECT: &[&str] = &[
    // Who asks, and how the service keeps and prices it.
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
    "billing_policy",
    "inference_geo",
    "user_profile_id",
    "workspace_id",
    "betas",
    "fallback_credit_token",
    "fallbacks",
    "diagnostics",
    "speed",
    "access_programs",
    "custom_labels",
    "cache_control",
    // Names of the request, and where another server would run it.
    "request_id",
    "rid",
    "session_id",
    "priority",
    "extra_key",
    "cache_salt",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "id_slot",
    // Speed and memory.
    "cache_prompt",
    "n_cache_reuse",
    "backend_sampling",
    "stream_interval",
    "sse_ping_interval",
    "draft_model",
    "ttl",
    "keep_alive",
    "n_keep",
    "n_discard",
    "speculative.n_max",
    "speculative.n_min",
    "speculative.p_min",
    "speculative.type",
    // What this server's replies have anyway, or what only changes the report of the work.
    "timings_per_token",
    "verbose",
    "return_progress",
    "return_weight_versions",
    "reasoning_control",
    "routed_experts_prompt_start",
    "routed_experts_start_len",
    "mm_payload",
    "stream_options",
    "usage",
    // Of no effect without a sampler that is refused.
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dry_range",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
    "dynatemp_exponent",
    "adaptive_decay",
    "length_penalty",
    "early_stopping",
    "truncation_side",
    "reasoning_budget_start_tag",
    "reasoning_budget_end_tag",
    "reasoning_budget_end_tags",
    "reasoning_budget_message",
    "grammar_type",
    "max_tool_calls",
    "parallel_tool_calls",
    "background_options",
    "sampling_logprobs_mode",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "images_config",
    "video_config",
    "use_audio_in_video",
];

/// The verbosity that a model has anyway.
pub(crate) const VERBOSITY: Off = Off { words: &["medium"], ..Off::ZERO };

/// Wishes that no route holds, and whose loss changes no word that a client could rely on. They are ignored, and named unless
/// they are switched off.
pub(crate) const NAMED: &[(&str, Off)] = &[("verbosity", VERBOSITY)];

const SAMPLERS: &str = "sample with 'temperature', 'top_p', 'top_k', 'min_p' and the penalties";
const NO_ADAPTERS: &str = "the operator serves an adapter as a model of its own, so choose it by 'model'";
const LENGTH: &str = "send 'max_tokens'";
const EFFORT: &str = "limit the reply with 'max_tokens', or send 'reasoning_effort'";
const TEXT: &str = "the reply's text is what the model wrote, without control tokens";
const OWN_TOKENS: &str = "use /tokenize";
/// `prefix` of a message, in Mistral's and DeepSeek's words.
pub(crate) const CONTINUED: &str = "Beginning the reply for the model ('prefix')";
pub(crate) const LAST_MESSAGE: &str = "send it as the prompt of /v1/completions, rendered by /apply-template";
const REASONING_APART: &str = "reasoning is always apart from the answer; 'reasoning_effort' can turn it off";

const fn field(field: &'static str, off: Off, feature: &'static str, instead: &'static str) -> RefusedField {
    RefusedField::new(field, off, feature, instead)
}

/// A sampler that this server does not have.
const fn sampler(name: &'static str, off: Off, feature: &'static str) -> RefusedField {
    RefusedField::new(name, off, feature, SAMPLERS)
}

/// Switches of samplers: 0 or 1 is off.
const NO_SIGMA: Off = Off { numbers: &[-1.0, 0.0], ..Off::ZERO };
const NO_ORDER: Off = Off { empty: true, words: &["auto", "deepseek", "openai"], ..Off::NEVER };

/// Fields that would change the reply or its form.
pub(crate) const REFUSED: &[RefusedField] = &[
    // Samplers.
    sampler("typical_p", Off::ONE, "Typical sampling"),
    sampler("typical", Off::ONE, "Typical sampling"),
    sampler("tfs_z", Off::ONE, "Tail-free sampling"),
    sampler("tfs", Off::ONE, "Tail-free sampling"),
    sampler("top_a", Off::ZERO, "Top-a sampling"),
    sampler("top_n_sigma", NO_SIGMA, "Top-n-sigma sampling"),
    sampler("nsigma", NO_SIGMA, "Top-n-sigma sampling"),
    sampler("mirostat", Off::ZERO, "Mirostat"),
    sampler("mirostat_mode", Off::ZERO, "Mirostat"),
    sampler("dry_multiplier", Off::ZERO, "DRY sampling"),
    sampler("xtc_probability", Off::ZERO, "XTC sampling"),
    sampler("dynatemp_range", Off::ZERO, "Dynamic temperature"),
    sampler("dynamic_temperature", Off::ZERO, "Dynamic temperature"),
    sampler("smoothing_factor", Off::ZERO, "Quadratic sampling"),
    sampler("adaptive_target", NO_SIGMA, "Adaptive sampling"),
    sampler("epsilon_cutoff", Off::ZERO, "Epsilon sampling"),
    sampler("eta_cutoff", Off::ZERO, "Eta sampling"),
    sampler("skew", Off::ZERO, "Skewed sampling"),
    sampler("penalty_alpha", Off::ZERO, "Contrastive search"),
    sampler("no_repeat_ngram_size", Off::ZERO, "Forbidding repeated n-grams"),
    sampler("encoder_repetition_penalty", Off::ONE, "A penalty for tokens that the prompt lacks"),
    sampler("repetition_detection", Off::ZERO, "Ending a reply that repeats itself"),
    sampler("min_keep", Off::ZERO, "A least number of candidates"),
    sampler("temperature_last", Off::ZERO, "Another order of the samplers"),
    sampler("sampler_priority", NO_ORDER, "Another order of the samplers"),
    sampler("sampler_order", NO_ORDER, "Another order of the samplers"),
    field("use_beam_search", Off::ZERO, "Beam search", SAMPLERS),
    field("num_beams", Off::ONE, "Beam search", SAMPLERS),
    field("best_of", Off { numbers: &[0.0, 1.0], ..Off::ONE }, "Choosing among several drafts", "send 'n' and choose"),
    field("guidance_scale", Off { numbers: &[0.0, 1.0], ..Off::ONE }, "Guidance by a negative prompt", ""),
    field("negative_prompt", Off::ZERO, "Guidance by a negative prompt", ""),
    field("custom_logit_processor", Off::ZERO, "A processor of logits", "send 'logit_bias'"),
    field("logits_processors", Off::ZERO, "A processor of logits", "send 'logit_bias'"),
    field("custom_params", Off::ZERO, "A processor of logits", "send 'logit_bias'"),
    field("vllm_xargs", Off::ZERO, "An argument of a server's extension", ""),
    field("watermark", Off::ZERO, "A watermark", ""),
    field("watermarking", Off::ZERO, "A watermark", ""),
    // Which tokens a reply may have, and where it ends.
    field("min_tokens", Off::ZERO, "A least number of tokens", "'ignore_eos' with 'max_tokens' gives an exact number"),
    field("allowed_token_ids", Off::ZERO, "Limiting the vocabulary", "send 'logit_bias', or a 'regex'"),
    field("bad_words", Off::ZERO, "Forbidding words", "send 'logit_bias' of -100 for their tokens"),
    field("banned_strings", Off::ZERO, "Forbidding texts", "send 'logit_bias' of -100 for their tokens"),
    field("banned_tokens", Off::ZERO, "Forbidding tokens by their texts", "send 'logit_bias' of -100 for them"),
    field("custom_token_bans", Off::ZERO, "Forbidding tokens by their texts", "send 'logit_bias' of -100 for them"),
    field("stop_token_ids", Off::ZERO, "Stopping at tokens", "send their texts in 'stop'"),
    field("stop_regex", Off::ZERO, "Stopping at a pattern", "send texts in 'stop', or the whole form as 'regex'"),
    field("include_stop_str_in_output", Off::ZERO, "A stop string in the reply", "append it to the text"),
    field("no_stop_trim", Off::ZERO, "A stop string in the reply", "append it to the text"),
    field("stop_sequences", Off::ZERO, "'stop_sequences'", "send 'stop'"),
    field("stop_sequence", Off::ZERO, "'stop_sequence'", "send 'stop'"),
    field("stop_strings", Off::ZERO, "'stop_strings'", "send 'stop'"),
    field("stopping_strings", Off::ZERO, "'stopping_strings'", "send 'stop'"),
    field("n_indent", Off::ZERO, "A least indentation", "send a 'grammar'"),
    field("t_max_predict_ms", Off::UNLIMITED, "A limit on the time of a reply", LENGTH),
    field("max_output_tokens", Off::NEVER, "'max_output_tokens'", LENGTH),
    field("max_completion_tokens", Off::NEVER, "'max_completion_tokens'", LENGTH),
    field("max_tokens", Off::NEVER, "'max_tokens'", LENGTH),
    field("n_predict", Off::NEVER, "'n_predict'", LENGTH),
    field("max_new_tokens", Off::NEVER, "'max_new_tokens'", LENGTH),
    field("num_predict", Off::NEVER, "'num_predict'", LENGTH),
    field("max_length", Off::NEVER, "'max_length'", LENGTH),
    field("continue_final_message", Off::ZERO, "Continuing the last message", LAST_MESSAGE),
    field("prefill", Off::ZERO, "Beginning the reply for the model", LAST_MESSAGE),
    field("response_prefix", Off::ZERO, "Beginning the reply for the model", LAST_MESSAGE),
    field("generation_prompt", Off::ZERO, "Beginning the reply for the model", LAST_MESSAGE),
    field("add_generation_prompt", Off::TRUE, "A prompt without the reply's opening", LAST_MESSAGE),
    // The input of another route.
    field("messages", Off::ZERO, "'messages'", "send the input of this route, or use /v1/chat/completions"),
    field("suffix", Off::ZERO, "'suffix'", "use /v1/completions"),
    field("instructions", Off::ZERO, "'instructions'", "send them as a message of the system"),
    field("system", Off::ZERO, "'system'", "send it as a message of the system"),
    field("system_prompt", Off::ZERO, "'system_prompt'", "send it as a message of the system"),
    field("raw", Off::ZERO, "A prompt without a template", "use /v1/completions"),
    field("images", Off::ZERO, "'images'", "send them in a message"),
    field("context", Off::ZERO, "The tokens of an earlier reply", "send the conversation"),
    field("previous_response_id", Off::ZERO, "A stored conversation", "send the whole conversation"),
    field("previous_input_messages", Off::ZERO, "A stored conversation", "send the whole conversation"),
    field("conversation", Off::ZERO, "A stored conversation", "send the whole conversation"),
    field("background", Off::ZERO, "A reply that nobody reads", "stream it"),
    field("truncation", Off { words: &["disabled"], ..Off::ZERO }, "Cutting a prompt", "send a prompt that fits"),
    field("container", Off::ZERO, "A container for code", "run code at the client, by a tool"),
    field("context_management", Off::ZERO, "Shortening a conversation", "shorten it at the client"),
    field("text", Off::ZERO, "'text'", "send 'response_format'"),
    field("format", Off::ZERO, "'format'", "send 'response_format'"),
    field("template", Off::ZERO, "A template of a client", "templates are the model's or the operator's"),
    field("chat_template", Off::ZERO, "A template of a client", "templates are the model's or the operator's"),
    field("tools", Off::ZERO, "Tools beside a plain prompt", "use /v1/chat/completions"),
    field("tool_choice", Off { words: &["auto", "none"], ..Off::ZERO }, "'tool_choice'", "use /v1/chat/completions"),
    field("functions", Off::ZERO, "'functions'", "send 'tools'"),
    field("function_call", Off { words: &["auto", "none"], ..Off::ZERO }, "'function_call'", "send 'tool_choice'"),
    // What is read besides the prompt.
    field("documents", Off::ZERO, "Documents beside a conversation", "put them into a message"),
    field("input_ids", Off::ZERO, "A conversation of tokens", "send them as the 'prompt' of /v1/completions"),
    field("image_data", Off::ZERO, "An image beside a plain prompt", "send it in a message"),
    field("multimodal_data", Off::ZERO, "An image beside a plain prompt", "send it in a message"),
    field("media_io_kwargs", Off::ZERO, "Options of a projector", ""),
    field("max_dynamic_patch", Off::NEVER, "Options of a projector", ""),
    field("min_dynamic_patch", Off::NEVER, "Options of a projector", ""),
    field("session_params", Off::ZERO, "A session of another server", "send the whole conversation"),
    field("thread", Off::ZERO, "A stored conversation", "send the whole conversation"),
    field(
        "kv_transfer_params",
        Off::ZERO,
        "Another server's handoff of KV",
        "nodes of this server hand KV over themselves",
    ),
    field("ec_transfer_params", Off::ZERO, "Another server's handoff of encodings", ""),
    // Reasoning and calls.
    field("thinking_token_budget", Off::BUDGET, "A budget for reasoning", EFFORT),
    field("thinking_budget", Off::BUDGET, "A budget for reasoning", EFFORT),
    field("reasoning_budget", Off::BUDGET, "A budget for reasoning", EFFORT),
    field("reasoning_budget_tokens", Off::BUDGET, "A budget for reasoning", EFFORT),
    field("reasoning_format", NO_ORDER, "Reasoning inside the answer", REASONING_APART),
    field("separate_reasoning", Off::TRUE, "Reasoning inside the answer", REASONING_APART),
    field("stream_reasoning", Off::TRUE, "A stream that holds reasoning back", REASONING_APART),
    field("include_reasoning", Off::TRUE, "A reply that hides its reasoning", REASONING_APART),
    field("parse_tool_calls", Off::TRUE, "A reply whose calls are not read", "leave 'tools' out"),
    field("chat_format", Off::NEVER, "Another format of calls", "the model's chat template decides"),
    field("chat_parser", Off::ZERO, "Another format of calls", "the model's chat template decides"),
    field("grammar_lazy", Off::ZERO, "A grammar that applies after a trigger", "send 'tools'"),
    field("grammar_triggers", Off::ZERO, "A grammar that applies after a trigger", "send 'tools'"),
    field("preserved_tokens", Off::ZERO, "Control tokens in the reply's text", TEXT),
    field("guided_decoding", Off::NEVER, "'guided_decoding'", "send 'structured_outputs'"),
    field("mcp_servers", Off::ZERO, "Calling MCP servers", "connect them at the client, and send their tools"),
    field("integrations", Off::ZERO, "Calling MCP servers", "connect them at the client, and send their tools"),
    field("web_search_options", Off::NEVER, "Web search", "search at the client, by a tool"),
    field("moderation", Off::ZERO, "Moderation", ""),
    field("compaction", Off::ZERO, "Shortening a conversation", "shorten it at the client"),
    // What a reply has besides its text.
    field("skip_special_tokens", Off::TRUE, "Control tokens in the reply's text", TEXT),
    field("spaces_between_special_tokens", Off::TRUE, "Control tokens in the reply's text", TEXT),
    field("echo", Off::ZERO, "Repeating the prompt", ""),
    field("audio", Off::NEVER, "Audio output", ""),
    field("image", Off::ZERO, "Making images", ""),
    field("width", Off::ZERO, "Making images", ""),
    field("height", Off::ZERO, "Making images", ""),
    field("steps", Off::ZERO, "Making images", ""),
    field("n", Off::ONE, "Several replies to one request", "send it several times, or to /v1/chat/completions"),
    field("n_cmpl", Off::ONE, "Several replies to one prompt", "send the prompt several times"),
    field("num_return_sequences", Off::ONE, "Several replies to one request", "send 'n'"),
    field("logprobs", Off::ZERO, "Log-probabilities in this form", "use /v1/chat/completions"),
    field("n_probs", Off::ZERO, "Log-probabilities in this form", "send 'logprobs' and 'top_logprobs'"),
    field("top_logprobs", Off::ZERO, "Log-probabilities in this form", "use /v1/chat/completions"),
    field("prompt_logprobs", Off::NEVER, "Log-probabilities of this prompt", "use /v1/completions"),
    field("logprob_token_ids", Off::ZERO, "Log-probabilities of chosen tokens", "send 'top_logprobs'"),
    field("post_sampling_probs", Off::ZERO, "Probabilities after sampling", ""),
    field("return_tokens_as_token_ids", Off::ZERO, "Tokens instead of their texts", OWN_TOKENS),
    field("return_token_ids", Off::ZERO, "The reply's tokens", OWN_TOKENS),
    field("return_tokens", Off::ZERO, "The reply's tokens", OWN_TOKENS),
    field("return_token_offsets", Off::ZERO, "The places of tokens in the text", OWN_TOKENS),
    field("return_token_strs", Off::ZERO, "Tokens with their texts", "send 'with_pieces'"),
    field("return_prompt_token_ids", Off::ZERO, "The prompt's tokens", OWN_TOKENS),
    field("return_input_ids_in_sglext", Off::ZERO, "The prompt's tokens", OWN_TOKENS),
    field("return_output_ids_in_sglext", Off::ZERO, "The reply's tokens", OWN_TOKENS),
    field("return_prompt_text", Off::ZERO, "The prompt's text", "use /apply-template"),
    field("return_meta_info", Off::ZERO, "Another server's report of a request", "read 'usage' and 'timings'"),
    field("return_cached_tokens_details", Off::ZERO, "Another server's report of a request", "read 'usage'"),
    field("return_spec_tokens_details", Off::ZERO, "Another server's report of a request", "read 'usage'"),
    field("return_sampling_mask", Off::ZERO, "The tokens that could be drawn", "send 'top_logprobs'"),
    field("return_hidden_states", Off::ZERO, "Hidden states", "use /v1/embeddings"),
    field("return_routed_experts", Off::ZERO, "The experts that computed a token", ""),
    field("return_mm_kwargs", Off::ZERO, "A projector's values", ""),
    field("enable_response_messages", Off::ZERO, "The prompt's messages in the reply", "use /apply-template"),
];

/// Fields that change vectors and scores. No other list of refused fields holds where those are computed.
pub(crate) const OF_VECTORS: &[RefusedField] = &[
    field("add_special_tokens", Off::ZERO, "Further control tokens before a prompt", "send them in the prompt"),
    field("lora", Off::ZERO, "Choosing adapters in a request", NO_ADAPTERS),
    field("lora_path", Off::ZERO, "Choosing adapters in a request", NO_ADAPTERS),
    field("mm_processor_kwargs", Off::ZERO, "Options of a projector", ""),
    field("truncate_prompt_tokens", Off::NEVER, "Cutting a prompt", "send a prompt that fits the context"),
    field("prompt_embeds", Off::ZERO, "A prompt of vectors", "send its text or tokens"),
    field("embed_dtype", Off { words: &["float32", "float"], ..Off::NEVER }, "Vectors of other numbers", ""),
    field("endianness", Off { words: &["native", "little"], ..Off::NEVER }, "Vectors in another order of bytes", ""),
    field("use_activation", Off::TRUE, "Scores without the model's own activation", ""),
    field("normalize", Off::TRUE, "Vectors of other lengths than 1", ""),
    field("padding", Off::ZERO, "Padding of texts", ""),
    field("embed_override_token_id", Off::NEVER, "A prompt of vectors", "send its text or tokens"),
    field("embed_overrides", Off::ZERO, "A prompt of vectors", "send its text or tokens"),
    field("instruct", Off::ZERO, "An instruction beside the query", "put it into the query"),
];
