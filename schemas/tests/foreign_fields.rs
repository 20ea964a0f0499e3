//! Every field of the published request types is known: held, refused by its name, or without effect. The types are those of
//! the table in docs/compatibility.md; a newer version adds its fields here first.
#![cfg(test)]

use std::collections::BTreeSet;

use baton_schemas::constraint::Constraint;
use baton_schemas::openai::InvalidRequest;
use baton_schemas::request::{BodyNotes, MeasuredParse, measured};
use baton_schemas::tools::{ToolChoice, ToolUse};
use baton_schemas::written_number::AsWritten;
use baton_schemas::{anthropic, llama_server, ollama, openai};
use serde_json::{Value, json};

const CHATS: &str = "\
    add_generation_prompt add_special_tokens allowed_token_ids audio bad_words bootstrap_host bootstrap_port \
    bootstrap_room cache_prompt cache_salt chat_template chat_template_kwargs continue_final_message \
    custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank documents draft_model \
    dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent \
    dynatemp_range ebnf ec_transfer_params echo extra_key frequency_penalty function_call functions \
    generation_prompt grammar id_slot ignore_eos images_config include_reasoning include_stop_str_in_output \
    input_ids json_schema kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs lora lora_path \
    max_completion_tokens max_dynamic_patch max_tokens media_io_kwargs messages metadata min_dynamic_patch min_keep \
    min_p min_tokens mirostat mirostat_eta mirostat_tau mm_payload mm_processor_kwargs modalities model moderation n \
    n_cache_reuse n_cmpl n_indent n_keep n_predict n_probs no_stop_trim parallel_tool_calls parse_tool_calls \
    post_sampling_probs prediction presence_penalty priority prompt_cache_key prompt_cache_options \
    prompt_cache_retention prompt_logprobs reasoning_control reasoning_effort reasoning_format regex repeat_last_n \
    repeat_penalty repetition_detection repetition_penalty request_id response_fields response_format \
    return_cached_tokens_details return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 \
    return_hidden_states return_input_ids_in_sglext return_meta_info return_mm_kwargs return_output_ids_in_sglext \
    return_progress return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask \
    return_spec_tokens_details return_token_ids return_token_offsets return_tokens return_tokens_as_token_ids \
    return_weight_versions rid routed_dp_rank routed_experts_prompt_start routed_experts_start_len safety_identifier \
    samplers sampling_logprobs_mode seed separate_reasoning service_tier session_id session_params \
    skip_special_tokens spaces_between_special_tokens sse_ping_interval stop stop_regex stop_token_ids store stream \
    stream_interval stream_options stream_reasoning structured_outputs t_max_predict_ms task temperature thinking \
    thinking_token_budget timings_per_token tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens \
    truncation_side ttl typical_p use_audio_in_video use_beam_search user verbosity video_config vllm_xargs \
    watermark watermarking web_search_options xtc_probability xtc_threshold";
const COMPLETIONS: &str = "\
    add_special_tokens allowed_token_ids bad_words best_of bootstrap_host bootstrap_port bootstrap_room cache_salt \
    custom_labels custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf \
    ec_transfer_params echo extra_key frequency_penalty ignore_eos images_config include_stop_str_in_output \
    json_schema kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs lora_path max_tokens min_p \
    min_tokens mm_payload mm_processor_kwargs model n no_stop_trim presence_penalty priority prompt prompt_embeds \
    prompt_logprobs regex repetition_detection repetition_penalty request_id response_format \
    return_cached_tokens_details return_hidden_states return_mm_kwargs return_routed_experts \
    return_spec_tokens_details return_token_ids return_token_offsets return_tokens_as_token_ids \
    return_weight_versions rid routed_dp_rank routed_experts_prompt_start routed_experts_start_len seed session_id \
    session_params skip_special_tokens spaces_between_special_tokens stop stop_regex stop_token_ids stream \
    stream_interval stream_options structured_outputs suffix temperature thinking_token_budget top_k top_p \
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermark watermarking";
const RESPONSES: &str = "\
    access_programs background background_options cache_salt chat_template_kwargs context_management conversation \
    data_parallel_rank ec_transfer_params enable_response_messages extra_key frequency_penalty ignore_eos image \
    include include_reasoning include_stop_str_in_output input instructions kv_transfer_params logit_bias \
    max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload mm_processor_kwargs model moderation \
    parallel_tool_calls presence_penalty previous_input_messages previous_response_id priority prompt \
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning repetition_penalty request_id \
    return_mm_kwargs safety_identifier seed service_tier session_id skip_special_tokens \
    spaces_between_special_tokens stop stop_token_ids store stream stream_options structured_outputs temperature \
    text tool_choice tools top_k top_logprobs top_p truncation user vllm_xargs watermarking";
const MESSAGES: &str = "\
    betas billing_policy cache_control cache_salt chat_template_kwargs compaction container context_management \
    diagnostics ec_transfer_params fallback_credit_token fallbacks inference_geo kv_transfer_params max_tokens \
    mcp_servers messages metadata mm_payload model output_config return_mm_kwargs service_tier speed stop_sequences \
    stream system temperature thinking thread tool_choice tools top_k top_p user_profile_id vllm_xargs watermarking \
    workspace_id";
const EMBEDDINGS: &str = "\
    add_special_tokens cache_salt dimensions embed_dtype embed_override_token_id embed_overrides encoding_format \
    endianness input lora_path mm_processor_kwargs model padding priority request_id rid truncate_prompt_tokens \
    truncation_side use_activation user";
const OLLAMA_CHAT: &str = "\
    format keep_alive logprobs messages model options stream think tools top_logprobs";
const OLLAMA_GENERATE: &str = "\
    context format height images keep_alive logprobs model options prompt raw steps stream suffix system template \
    think top_logprobs width";
const OLLAMA_OPTIONS: &str = "\
    embedding_only f16_kv frequency_penalty logits_all low_vram main_gpu mirostat mirostat_eta mirostat_tau \
    num_batch num_ctx num_gpu num_keep num_predict num_thread numa penalize_newline presence_penalty repeat_last_n \
    repeat_penalty seed stop temperature tfs_z top_k top_p typical_p use_mlock use_mmap vocab_only";
const LLAMA: &str = "\
    adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser continue_final_message \
    dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent \
    dynatemp_range echo frequency_penalty generation_prompt grammar grammar_lazy grammar_triggers id_slot ignore_eos \
    json_schema logit_bias logprobs lora max_completion_tokens max_tokens min_keep min_p mirostat mirostat_eta \
    mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls \
    post_sampling_probs presence_penalty preserved_tokens prompt reasoning_budget_end_tag reasoning_budget_end_tags \
    reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control reasoning_format \
    repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers seed sse_ping_interval stop \
    stream stream_options t_max_predict_ms temperature timings_per_token top_k top_n_sigma top_p typical_p verbose \
    xtc_probability xtc_threshold";

/// Fields that no route holds, and whose loss changes no word that a client could rely on: they are ignored, and named in the
/// header.
const TOLD: &str = "verbosity task response_fields options include";

type Parse = fn(&[u8]) -> Result<(), InvalidRequest>;

const CHAT: Parse = |body| openai::ChatRequest::parse(body, 0).map(drop);
const COMPLETION: Parse = |body| openai::CompletionRequest::parse(body, 0).map(drop);
const RESPONSE: Parse = |body| openai::ResponsesRequest::parse(body, 0).map(drop);
const EMBEDDING: Parse = |body| openai::EmbeddingsRequest::parse(body).map(drop);
const MESSAGE: Parse = |body| anthropic::MessagesRequest::parse(body, 0).map(drop);
const OLLAMAS_CHAT: Parse = |body| ollama::OllamaChatRequest::parse(body, 0).map(drop);
const OLLAMAS_GENERATE: Parse = |body| ollama::OllamaGenerateRequest::parse(body, 0).map(drop);
const LLAMAS_COMPLETION: Parse = |body| llama_server::generate::LlamaGenerate::parse_completion(body, 0).map(drop);

/// A smallest body of each route.
fn bodies() -> [(&'static str, Parse, Value); 8] {
    let user = json!([{"role": "user", "content": "hi"}]);
    [
        ("chat", CHAT, json!({"model": "m", "messages": user})),
        ("completion", COMPLETION, json!({"model": "m", "prompt": "hi"})),
        ("response", RESPONSE, json!({"model": "m", "input": "hi"})),
        ("message", MESSAGE, json!({"model": "m", "messages": user, "max_tokens": 9})),
        ("embedding", EMBEDDING, json!({"model": "m", "input": "hi"})),
        ("ollama chat", OLLAMAS_CHAT, json!({"model": "m", "messages": user})),
        ("ollama generate", OLLAMAS_GENERATE, json!({"model": "m", "prompt": "hi"})),
        ("llama completion", LLAMAS_COMPLETION, json!({"prompt": "hi"})),
    ]
}

fn route(name: &str) -> (Parse, Value) {
    let found = bodies().into_iter().find(|(known, ..)| *known == name);
    found.map(|(_, parse, body)| (parse, body)).unwrap()
}

/// The route's answer to a body with this field: the field that it refuses, and its notes.
fn outcome(name: &str, field: &str, value: Value) -> (Option<String>, BodyNotes) {
    let (parse, mut body) = route(name);
    body[field] = value;
    let MeasuredParse { value, notes, .. } = measured(|| parse(body.to_string().as_bytes()));
    (value.err().map(|error| error.param.unwrap_or_default()), notes)
}

fn refused(routes: &[&str], field: &str, value: Value) {
    for route in routes {
        assert_eq!(outcome(route, field, value.clone()).0.as_deref(), Some(field), "{route}: {value}");
    }
}

fn accepted(routes: &[&str], field: &str, value: Value) {
    for route in routes {
        let (error, notes) = outcome(route, field, value.clone());
        assert_eq!((error, notes), (None, BodyNotes::default()), "{route}: {field}: {value}");
    }
}

const GENERATING: [&str; 7] =
    ["chat", "completion", "response", "message", "ollama chat", "ollama generate", "llama completion"];

#[test]
fn every_published_field_is_known() {
    for (name, fields) in [
        ("chat", CHATS),
        ("completion", COMPLETIONS),
        ("response", RESPONSES),
        ("message", MESSAGES),
        ("embedding", EMBEDDINGS),
        ("ollama chat", OLLAMA_CHAT),
        ("ollama generate", OLLAMA_GENERATE),
        ("llama completion", LLAMA),
    ] {
        let told: Vec<&str> = TOLD.split(' ').collect();
        let unknown = fields.split(' ').filter(|field| !told.contains(field));
        let unknown = unknown
            .filter(|field| outcome(name, field, json!({"x": 1})).1.ignored.iter().any(|ignored| ignored == field));
        assert_eq!(unknown.collect::<Vec<_>>(), [""; 0], "{name}");
    }
    for option in OLLAMA_OPTIONS.split(' ') {
        let (_, notes) = outcome("ollama chat", "options", json!({ option: {"x": 1} }));
        assert_eq!(notes, BodyNotes::default(), "{option}");
    }
}

#[test]
fn what_would_change_a_reply_is_refused_by_name_on_every_route() {
    for (field, value) in [
        ("thinking_token_budget", json!(5)),
        ("stop_regex", json!("a+")),
        ("include_stop_str_in_output", json!(true)),
        ("skip_special_tokens", json!(false)),
        ("truncate_prompt_tokens", json!(100)),
        ("documents", json!([{"text": "x"}])),
        ("reasoning_format", json!("none")),
        ("parse_tool_calls", json!(false)),
        ("prefill", json!("Sure")),
        ("lora", json!([{"id": 0, "scale": 0.5}])),
        ("top_a", json!(0.2)),
        ("mirostat_mode", json!(2)),
        ("banned_strings", json!(["x"])),
        ("t_max_predict_ms", json!(500)),
        ("best_of", json!(2)),
        ("min_tokens", json!(5)),
        // No reasoning at all.
        ("thinking_token_budget", json!(0)),
        ("thinking_budget", json!(0)),
        ("reasoning_budget", json!(0)),
        ("reasoning_budget_tokens", json!(0.0)),
    ] {
        refused(&GENERATING, field, value);
    }
    for field in ["stop_sequences", "stop_sequence", "stop_strings", "stopping_strings"] {
        refused(&["ollama chat", "ollama generate"], field, json!(["x"]));
    }
    for field in ["stop", "stop_sequence", "stop_strings", "stopping_strings"] {
        refused(&["message"], field, json!(["x"]));
    }
    refused(&["response", "message", "ollama chat", "ollama generate", "llama completion"], "n", json!(2));
}

#[test]
fn stops_are_held_under_every_name_and_beside_each_other() {
    let stops = |name: &str, fields: &Value| {
        let (_, mut body) = route(name);
        fields.as_object().unwrap().iter().for_each(|(field, value)| body[field] = value.clone());
        let body = body.to_string();
        let MeasuredParse { value, notes, .. } = measured(|| match name {
            "chat" => openai::ChatRequest::parse(body.as_bytes(), 0).map(|chat| chat.generate),
            "completion" => openai::CompletionRequest::parse(body.as_bytes(), 0).map(|c| c.prompts[0].clone()),
            "response" => openai::ResponsesRequest::parse(body.as_bytes(), 0).map(|response| response.generate),
            _ => llama_server::generate::LlamaGenerate::parse_completion(body.as_bytes(), 0).map(|c| c.0[0].clone()),
        });
        assert_eq!(notes, BodyNotes::default(), "{name}: {fields}");
        value.map(|generate| generate.stop.to_vec()).map_err(|error| error.param.unwrap_or_default())
    };
    let texts = |range: std::ops::Range<u32>| range.map(|i| format!("s{i}")).collect::<Vec<_>>();
    for name in ["chat", "completion", "response", "llama completion"] {
        for field in ["stop", "stop_sequences", "stop_sequence", "stop_strings", "stopping_strings"] {
            assert_eq!(stops(name, &json!({ field: ["a", "b"] })), Ok(vec!["a".into(), "b".into()]), "{name}: {field}");
            assert_eq!(stops(name, &json!({ field: "a" })), Ok(vec!["a".into()]), "{name}: {field}");
            for off in [json!([]), json!(null)] {
                assert_eq!(stops(name, &json!({ field: off })), Ok(vec![]), "{name}: {field}");
            }
            // Other servers' names may be sent switched off.
            for off in [json!(""), json!(false)] {
                let expected = if field == "stop" { Err(field.to_owned()) } else { Ok(vec!["a".to_owned()]) };
                let mut fields = json!({ "stop": "a" });
                fields[field] = off;
                assert_eq!(stops(name, &fields), expected, "{name}: {field}");
            }
            // Each text counts once, in one field as across them.
            let twice = [texts(0..8), texts(0..8)].concat();
            assert_eq!(stops(name, &json!({ field: twice })), Ok(texts(0..8)), "{name}: {field}");
            for wrong in [json!([""]), json!(3), json!(true), json!(["x".repeat(1025)]), json!(texts(0..17))] {
                assert_eq!(stops(name, &json!({ field: wrong })), Err(field.to_owned()), "{name}: {field}");
            }
        }
        // As SillyTavern sends them.
        let same = json!({ "stop": ["a", "b"], "stopping_strings": ["a", "b"] });
        assert_eq!(stops(name, &same), Ok(vec!["a".into(), "b".into()]), "{name}");
        let all = json!({ "stopping_strings": ["d"], "stop_strings": "c", "stop_sequences": ["b", "a"], "stop": "a" });
        assert_eq!(stops(name, &all), Ok(vec!["a".into(), "b".into(), "c".into(), "d".into()]), "{name}");
        assert_eq!(
            stops(name, &json!({ "stop": texts(0..9), "stop_strings": texts(7..16) })),
            Ok(texts(0..16)),
            "{name}"
        );
        let many = json!({ "stop": texts(0..9), "stop_strings": texts(9..17) });
        assert_eq!(stops(name, &many), Err("stop_strings".to_owned()), "{name}");
    }
}

#[test]
fn what_is_switched_off_asks_for_nothing() {
    for (field, value) in [
        ("thinking_token_budget", json!(null)),
        ("thinking_token_budget", json!(-1)),
        ("stop_regex", json!("")),
        ("include_stop_str_in_output", json!(false)),
        ("skip_special_tokens", json!(true)),
        ("documents", json!([])),
        ("reasoning_format", json!("auto")),
        ("parse_tool_calls", json!(true)),
        ("lora", json!([])),
        ("top_a", json!(0)),
        ("mirostat_mode", json!(0.0)),
        ("banned_strings", json!([])),
        ("t_max_predict_ms", json!(-1)),
        ("best_of", json!(1)),
        ("typical_p", json!(1)),
        ("user", json!("u")),
        ("priority", json!(3)),
        ("cache_prompt", json!(true)),
    ] {
        accepted(&GENERATING, field, value);
    }
}

#[test]
fn a_field_of_another_dialect_names_what_serves_instead() {
    let message = |name: &str, field: &str, value: Value| {
        let (parse, mut body) = route(name);
        body[field] = value;
        parse(body.to_string().as_bytes()).unwrap_err().message
    };
    for (name, field, value, instead) in [
        ("response", "max_tokens", json!(5), "max_output_tokens"),
        ("response", "max_completion_tokens", json!(5), "max_output_tokens"),
        ("response", "messages", json!([{"role": "user", "content": "hi"}]), "'input'"),
        ("response", "logprobs", json!(true), "include"),
        ("message", "stop", json!(["x"]), "stop_sequences"),
        ("message", "mcp_servers", json!([{"url": "x"}]), "at the client"),
        ("message", "container", json!("c"), "at the client"),
        ("message", "max_completion_tokens", json!(5), "'max_tokens'"),
        ("message", "stopping_strings", json!(["x"]), "'stop_sequences'"),
        ("ollama chat", "stop_sequences", json!(["x"]), "'options.stop'"),
        ("chat", "thinking_budget", json!(0), "'reasoning_effort'"),
        ("chat", "max_output_tokens", json!(5), "'max_tokens'"),
        ("chat", "format", json!("json"), "response_format"),
        ("chat", "input", json!("hi"), "message"),
        ("completion", "messages", json!([{}]), "/v1/chat/completions"),
        ("ollama chat", "num_predict", json!(5), "options"),
    ] {
        let message = message(name, field, value);
        assert!(message.contains(instead), "{name}: {field}: {message}");
    }
    let modalities = json!(["text", "audio"]);
    refused(&["chat", "response"], "modalities", modalities);
    accepted(&["chat", "response"], "modalities", json!(["text"]));
}

/// The fields that a route's body declares.
fn declared(name: &str) -> Vec<String> {
    let schema = match name {
        "chat" => schemars::schema_for!(openai::ChatBody),
        "completion" => schemars::schema_for!(openai::CompletionBody),
        "response" => schemars::schema_for!(openai::ResponsesBody),
        "message" => schemars::schema_for!(anthropic::MessagesBody),
        "ollama chat" => schemars::schema_for!(ollama::OllamaChatBody),
        "ollama generate" => schemars::schema_for!(ollama::OllamaGenerateBody),
        _ => schemars::schema_for!(llama_server::generate::LlamaCompletionBody),
    };
    let fields =
        |schema: &Value| schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect();
    let mut all: Vec<String> = fields(schema.as_value());
    let options: Vec<String> = fields(&schema.as_value()["$defs"]["OllamaOptions"]);
    all.extend(options.iter().map(|option| format!("options.{option}")));
    all
}

#[test]
fn an_advice_names_fields_of_its_own_dialect() {
    let published = [CHATS, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, LLAMA];
    let fields: BTreeSet<&str> = published.iter().flat_map(|fields| fields.split(' ')).collect();
    for name in GENERATING {
        let declared = declared(name);
        let is_own = |named: &str| {
            let (object, _) = named.split_once('.').filter(|(object, _)| *object != "options").unwrap_or((named, ""));
            declared.iter().any(|field| field == object)
        };
        let mut n_advised = 0;
        for field in fields.iter().filter(|field| !declared.iter().any(|own| own == *field)) {
            let (parse, mut body) = route(name);
            body[*field] = json!({"x": 1});
            let Err(error) = parse(body.to_string().as_bytes()) else { continue };
            let Some((_, advice)) =
                error.message.split_once("does not support ").and_then(|(_, rest)| rest.split_once(": "))
            else {
                continue;
            };
            // What it names in another route's body, or in a reply, is not looked for.
            if advice.contains(" /") || advice.starts_with("read ") {
                continue;
            }
            for word in advice.split(' ').filter_map(|word| word.strip_prefix('\'')) {
                let named = word.trim_end_matches(|c| ",;:.'".contains(c));
                n_advised += 1;
                let is_value = named == "message.output_text.logprobs";
                assert!(is_value || named == "options" || is_own(named), "{name}: {field}: {}", error.message);
            }
        }
        assert!(n_advised > 20, "{name}: {n_advised}");
    }
    let message = |name: &str, field: &str| {
        let (parse, mut body) = route(name);
        body[field] = json!(5);
        parse(body.to_string().as_bytes()).unwrap_err().message
    };
    for (name, length) in [
        ("chat", "'max_tokens'"),
        ("response", "'max_output_tokens'"),
        ("message", "'max_tokens'"),
        ("ollama chat", "'options.num_predict'"),
        ("llama completion", "'n_predict'"),
    ] {
        let message = message(name, "t_max_predict_ms");
        assert!(message.contains(length), "{name}: {message}");
    }
}

#[test]
fn the_length_of_a_reply_has_every_usual_name() {
    let length = |name: &str, field: &str| {
        let (_, mut body) = route(name);
        body[field] = json!(5);
        let body = body.to_string();
        match name {
            "chat" => openai::ChatRequest::parse(body.as_bytes(), 0).unwrap().generate.max_tokens,
            "ollama chat" => ollama::OllamaChatRequest::parse(body.as_bytes(), 0).unwrap().generate.max_tokens,
            "completion" => openai::CompletionRequest::parse(body.as_bytes(), 0).unwrap().prompts[0].max_tokens,
            _ => llama_server::generate::LlamaGenerate::parse_completion(body.as_bytes(), 0).unwrap().0[0].max_tokens,
        }
    };
    for name in ["chat", "completion", "ollama chat", "llama completion"] {
        for field in ["max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"] {
            assert_eq!(length(name, field), Some(5), "{name}: {field}");
        }
    }
}

#[test]
fn of_several_lengths_the_routes_own_counts_and_the_others_are_named() {
    for (name, own, other) in [
        ("chat", "max_completion_tokens", "max_tokens"),
        ("chat", "max_tokens", "max_new_tokens"),
        ("completion", "max_tokens", "max_completion_tokens"),
        ("llama completion", "n_predict", "max_tokens"),
        ("ollama chat", "options", "max_tokens"),
    ] {
        let (parse, mut body) = route(name);
        body[own] = if own == "options" { json!({"num_predict": 5}) } else { json!(5) };
        body[other] = json!(9);
        let MeasuredParse { value, notes, .. } = measured(|| parse(body.to_string().as_bytes()));
        assert_eq!((value, notes.ignored), (Ok(()), vec![other.to_owned()]), "{name}");
        body[other] = json!(5);
        let notes = measured(|| parse(body.to_string().as_bytes())).notes;
        assert_eq!(notes, BodyNotes::default(), "{name}");
    }
}

/// How a chat uses tools.
fn tool_use(name: &str, body: &Value) -> ToolUse {
    let body = body.to_string();
    match name {
        "chat" => openai::ChatRequest::parse(body.as_bytes(), 0).unwrap().generate,
        "response" => openai::ResponsesRequest::parse(body.as_bytes(), 0).unwrap().generate,
        "message" => anthropic::MessagesRequest::parse(body.as_bytes(), 0).unwrap().generate,
        _ => ollama::OllamaChatRequest::parse(body.as_bytes(), 0).unwrap().generate,
    }
    .tools
}

/// Lists of tools of a route: a tool, only tools that run elsewhere, and none in three ways.
fn lists_of_tools(name: &str) -> Vec<Value> {
    let schema = json!({"type": "object"});
    let (tool, hosted) = match name {
        "message" => (json!({"name": "f", "input_schema": schema}), Some("web_search_20250305")),
        "response" => (json!({"type": "function", "name": "f", "parameters": schema}), Some("web_search")),
        _ => (json!({"type": "function", "function": {"name": "f", "parameters": schema}}), None),
    };
    let mut lists = vec![json!([tool]), json!([]), json!(null)];
    lists.extend(hosted.map(|kind| json!([{"type": kind, "name": "web_search"}])));
    lists
}

#[test]
fn one_call_at_most_is_held_in_every_dialect_with_tools() {
    for name in ["chat", "response", "message", "ollama chat"] {
        for tools in lists_of_tools(name) {
            let parallel = |value: Value| {
                let (_, mut body) = route(name);
                (body["tools"], body["parallel_tool_calls"]) = (tools.clone(), value);
                tool_use(name, &body).parallel
            };
            assert!(!parallel(json!(false)), "{name}: {tools}");
            assert!(parallel(json!(true)) && parallel(json!(null)), "{name}: {tools}");
        }
    }
}

#[test]
fn calls_stay_forbidden_without_tools() {
    for (name, field, none) in [
        ("chat", "tool_choice", json!("none")),
        ("chat", "function_call", json!("none")),
        ("response", "tool_choice", json!("none")),
        ("message", "tool_choice", json!({"type": "none"})),
    ] {
        for tools in lists_of_tools(name) {
            let (_, mut body) = route(name);
            (body["tools"], body[field]) = (tools.clone(), none.clone());
            assert_eq!(tool_use(name, &body).choice, ToolChoice::None, "{name}: {field}: {tools}");
        }
    }
}

#[test]
fn what_changes_no_word_here_is_named_in_the_header() {
    let noted = |name: &str, field: &str, value: Value| outcome(name, field, value).1.ignored.join(" ");
    assert_eq!(noted("chat", "verbosity", json!("low")), "verbosity");
    assert_eq!(noted("response", "text", json!({"verbosity": "low"})), "text.verbosity");
    assert_eq!(noted("response", "text", json!({"verbosity": null})), "");
    assert_eq!(noted("chat", "verbosity", json!("medium")), "");
    assert_eq!(noted("response", "text", json!({"verbosity": "medium"})), "");
    for (field, value) in [
        ("reasoning_effort", json!("none")),
        ("reasoning", json!({"effort": "high"})),
        ("enable_thinking", json!(false)),
        ("thinking", json!({"type": "enabled"})),
        ("think", json!(true)),
    ] {
        for name in ["completion", "llama completion"] {
            assert_eq!(noted(name, field, value.clone()), field, "{name}");
        }
    }
}

#[test]
fn a_message_that_begins_the_reply_is_refused_by_name() {
    let message = |prefix: Value| {
        let last = json!({"role": "assistant", "content": "Sure", "prefix": prefix});
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}, last]});
        openai::ChatRequest::parse(body.to_string().as_bytes(), 0).map(drop)
    };
    let error = message(json!(true)).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("messages[1].prefix"));
    assert!(error.message.contains("/v1/completions"), "{}", error.message);
    assert!([json!(false), json!(null)].into_iter().all(|off| message(off).is_ok()));
}

#[test]
fn reasoning_is_turned_off_in_every_dialect_of_chats() {
    let args = |name: &str, field: &str, value: Value| {
        let (_, mut body) = route(name);
        body[field] = value;
        let body = body.to_string();
        let generate = match name {
            "chat" => openai::ChatRequest::parse(body.as_bytes(), 0).unwrap().generate,
            "response" => openai::ResponsesRequest::parse(body.as_bytes(), 0).unwrap().generate,
            "message" => anthropic::MessagesRequest::parse(body.as_bytes(), 0).unwrap().generate,
            "ollama chat" => ollama::OllamaChatRequest::parse(body.as_bytes(), 0).unwrap().generate,
            _ => ollama::OllamaGenerateRequest::parse(body.as_bytes(), 0).unwrap().generate,
        };
        let baton_schemas::generate::Input::Chat(conversation) = generate.input else { panic!("not a chat") };
        conversation.template_args
    };
    for name in ["chat", "response", "message", "ollama chat", "ollama generate"] {
        for (field, value) in [
            ("reasoning", json!({"enabled": false})),
            ("reasoning", json!({"effort": "none"})),
            ("reasoning", json!("off")),
            ("reasoning_effort", json!("none")),
            ("thinking", json!({"type": "disabled"})),
            ("think", json!(false)),
            ("enable_thinking", json!(false)),
            ("chat_template_kwargs", json!({"enable_thinking": false})),
        ] {
            assert_eq!(args(name, field, value.clone())["enable_thinking"], false, "{name}: {field}: {value}");
        }
    }
}

#[test]
fn a_field_that_no_list_knows_is_ignored_and_noted() {
    for (name, ..) in bodies() {
        let (error, notes) = outcome(name, "made_up", json!({"x": [1]}));
        assert_eq!((error, notes.ignored), (None, vec!["made_up".to_owned()]), "{name}");
        accepted(&[name], "made_up", json!(null));
    }
    let (_, notes) = outcome("ollama chat", "options", json!({"made_up": 1, "num_gpu": 3}));
    assert_eq!(notes.ignored, ["options.made_up"]);
    let (parse, mut body) = route("chat");
    for i in 0..20 {
        body[format!("odd\n, {i}{}", "x".repeat(100))] = json!(1);
    }
    let notes = measured(|| parse(body.to_string().as_bytes())).notes;
    assert_eq!((notes.ignored.len(), notes.n_more_ignored), (8, 12));
    assert!(notes.ignored.iter().all(|name| name.len() == 64 && name.starts_with("odd???")), "{notes:?}");
}

#[test]
fn a_field_within_an_object_that_no_list_knows_is_ignored_and_noted_once() {
    let of_all = |name: &str, field: &str, value: Value| outcome(name, field, value).1.ignored.join(" ");
    let schema = json!({"type": "object"});
    let function = json!({"name": "f", "parameters": schema, "strct": true});
    let tools = json!([{"type": "function", "function": function, "strict": true}]);
    let call = json!({"id": "c", "function": {"name": "f", "arguments": "{}", "zz": 1}, "zz": 1});
    let parts = json!([{"type": "text", "text": "hi", "zz": 1}, {"type": "text", "text": "ho", "zz": 2}]);
    let turn = json!({"role": "user", "content": parts, "zz": 1});
    let called = json!({"role": "assistant", "tool_calls": [call], "zz": 1});
    let form = json!({"type": "json_schema", "json_schema": {"schema": schema, "strct": true}, "zz": 1});
    let tool = json!([{"type": "function", "name": "f", "parameters": schema, "zz": 1}]);
    let space = json!([{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "zz": 1}]}]);
    let choice =
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", "zz": 1}]});
    for (name, field, value, noted) in [
        ("chat", "stream_options", json!({"includ_usage": true}), "stream_options.includ_usage"),
        ("completion", "stream_options", json!({"includ_usage": true}), "stream_options.includ_usage"),
        ("chat", "tools", tools, "tools[].function.strct tools[].strict"),
        ("chat", "functions", json!([function]), "functions[].strct"),
        ("chat", "messages", json!([turn, turn]), "messages[].content[].zz messages[].zz"),
        (
            "chat",
            "messages",
            json!([{"role": "user", "content": "hi"}, called]),
            "messages[].tool_calls[].function.zz messages[].tool_calls[].zz messages[].zz",
        ),
        ("chat", "response_format", form, "response_format.json_schema.strct response_format.zz"),
        ("chat", "structured_outputs", json!({"regex": "a", "zz": 1}), "structured_outputs.zz"),
        ("chat", "prediction", json!({"type": "content", "content": "x", "zz": 1}), "prediction.zz"),
        ("response", "text", json!({"formt": schema}), "text.formt"),
        ("response", "text", json!({"format": {"type": "text", "zz": 1}}), "text.format.zz"),
        ("response", "input", json!([{"role": "user", "content": "hi", "zz": 1}]), "input[].zz"),
        ("response", "tools", tool, "tools[].zz"),
        ("response", "tools", space, "tools[].tools[].zz"),
        ("message", "context_management", json!({"edit": []}), "context_management.edit"),
        ("message", "output_config", json!({"formt": schema}), "output_config.formt"),
        ("message", "messages", json!([turn]), "messages[].content[].zz messages[].zz"),
        ("message", "tools", json!([{"name": "f", "input_schema": schema, "zz": 1}]), "tools[].zz"),
        ("message", "tool_choice", json!({"type": "auto", "zz": 1}), "tool_choice.zz"),
        ("ollama chat", "messages", json!([{"role": "user", "content": "hi", "zz": 1}]), "messages[].zz"),
    ] {
        assert_eq!(of_all(name, field, value.clone()), noted, "{name}: {value}");
    }
    let (parse, mut body) = route("response");
    body["tools"] = json!([{"type": "function", "name": "f"}]);
    body["tool_choice"] = choice;
    let notes = measured(|| parse(body.to_string().as_bytes())).notes;
    assert_eq!(notes.ignored, ["tool_choice.tools[].zz"]);
}

#[test]
fn what_published_types_have_within_objects_is_no_surprise() {
    let cached = json!({"type": "ephemeral"});
    let hosted = json!([{"type": "web_search", "user_location": {"city": "x"}, "filters": {}}]);
    let said = json!({"type": "output_text", "text": "hi", "annotations": [], "logprobs": []});
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "x", "status": "completed"},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "phase": "final_answer", "content": [said]},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "x"}},
        {"type": "function_call", "id": "c", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed", "caller": null},
        {"type": "function_call_output", "id": "o", "call_id": "c", "output": "x", "status": "completed"},
    ]);
    let reply = json!({"role": "assistant", "content": null, "refusal": null, "annotations": [], "audio": null,
        "tool_calls": [{"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}]});
    let blocks = json!([
        {"type": "thinking", "thinking": "x", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "x", "citations": null, "cache_control": cached},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}, "zz": 1},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}},
    ]);
    let result = json!({"type": "tool_result", "tool_use_id": "c", "content": "x", "cache_control": cached});
    let own = json!({"name": "f", "input_schema": {}, "cache_control": cached, "eager_input_streaming": true});
    let anthropics = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 5});
    let old_call = json!({"type": "function", "function": {"index": 0, "name": "f", "arguments": {}}});
    for (name, field, value) in [
        ("response", "tools", hosted),
        ("response", "input", items),
        ("chat", "stream_options", json!({"include_usage": true, "include_obfuscation": false})),
        ("chat", "messages", json!([reply, {"role": "tool", "tool_call_id": "c", "content": "x"}])),
        (
            "message",
            "messages",
            json!([{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]),
        ),
        ("message", "tools", json!([own, anthropics])),
        ("ollama chat", "messages", json!([{"role": "assistant", "tool_calls": [old_call], "images": null}])),
    ] {
        accepted(&[name], field, value);
    }
}

#[test]
fn an_image_that_would_be_lost_is_refused_with_its_place() {
    let user = |extra: Value| {
        let mut turn = json!({"role": "user", "content": "hi"});
        turn.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!([turn])
    };
    let images = || user(json!({"images": ["iVBORw0KGgo="]}));
    let uri = "data:image/png;base64,iVBORw0KGgo=";
    let part = user(json!({"content": [{"type": "text", "text": "hi", "image_url": {"url": uri}}]}));
    let block = user(json!({"content": [{"type": "text", "text": "hi", "source": {"type": "base64", "data": "x"}}]}));
    let listed = || user(json!({"content": [{"type": "text", "text": "hi", "images": ["iVBORw0KGgo="]}]}));
    let typed = user(json!({"content": [{"type": "input_text", "text": "hi", "images": ["iVBORw0KGgo="]}]}));
    for (name, field, value, place, instead) in [
        ("chat", "messages", listed(), "messages[0].content[0].images", "'image_url'"),
        ("response", "input", typed, "input[0].content[0].images", "'image_url'"),
        ("message", "messages", listed(), "messages[0].content[0].images", "'image'"),
        ("chat", "messages", images(), "messages[0].images", "'image_url'"),
        ("response", "input", images(), "input[0].images", "'input_image'"),
        ("message", "messages", images(), "messages[0].images", "'image'"),
        ("chat", "messages", part, "messages[0].content[0].image_url", "'image_url'"),
        ("message", "messages", block, "messages[0].content[0].source", "'image'"),
    ] {
        let (parse, mut body) = route(name);
        body[field] = value;
        let error = parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(place), "{name}");
        assert!(error.message.contains(instead), "{name}: {}", error.message);
        let drawn = json!({"role": "assistant", "content": "here", "images": ["iVBORw0KGgo="]});
        for history in [json!([]), json!([{"role": "user", "content": "draw"}, drawn])] {
            let mut turns = history.as_array().unwrap().clone();
            turns.extend(user(json!({"images": []})).as_array().unwrap().clone());
            body[field] = json!(turns);
            assert_eq!(parse(body.to_string().as_bytes()), Ok(()), "{name}");
        }
    }
}

#[test]
fn a_constant_that_64_bits_do_not_hold_is_named_and_refused_if_strict() {
    for number in ["12345678901234567890123", "-12345678901234567890123", "1e999", "1e-400", "0.1234567890123456789"] {
        for strict in [false, true] {
            let schema = format!(r#"{{"const": {number}, "default": 1e999}}"#);
            let format =
                format!(r#"{{"type": "json_schema", "json_schema": {{"schema": {schema}, "strict": {strict}}}}}"#);
            let body = format!(
                r#"{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], "response_format": {format}}}"#
            );
            let request = openai::ChatRequest::parse(body.as_bytes(), 0).unwrap().generate;
            let Some(Constraint::JsonSchema { schema: kept, unheld, .. }) = request.constraint.as_deref() else {
                panic!()
            };
            assert_eq!((&unheld.parts[..], unheld.refused.is_some()), (&["const".to_owned()][..], strict), "{number}");
            assert_eq!(AsWritten(kept).to_string(), schema.replace(' ', ""));
        }
    }
}

#[test]
fn a_field_that_needs_a_number_names_one_out_of_range() {
    let body = |field: &str| format!(r#"{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], {field}}}"#);
    let of = |field: &str| openai::ChatRequest::parse(body(field).as_bytes(), 0).map(|chat| chat.generate);
    for field in ["temperature", "max_tokens", "seed", "top_k"] {
        let error = of(&format!(r#""{field}": 1e999"#)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(field), "{}", error.message);
        assert!(error.message.contains("number out of range"), "{}", error.message);
    }
    assert_eq!(of(r#""temperature": 0.12345678901234567890"#).unwrap().sampling.temperature, 0.123_456_79);
    assert_eq!(of(r#""temperature": 1e-400"#).unwrap().sampling.temperature, 0.0);
    let error = of(r#""max_tokens": 12345678901234567890123"#).unwrap_err();
    assert!(error.message.contains("must be an integer from"), "{}", error.message);
    assert!(of(r#""metadata": {"a": 1e999}, "nobody_knows": [1e999]"#).is_ok());
}
