//! Reads an upstream's description of a model. It goes on to clients, so only known fields are read, and only plausible
//! values: short names without spaces, and numbers within bounds.

use baton_schemas::ollama::OllamaCapability;
use baton_schemas::ollama::model::Details;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use serde_json::Value;

/// Larger numbers are mistakes.
const MAX_CTX: u64 = 100_000_000;
const MAX_PARAMS: u64 = 1_000_000_000_000_000;
const MAX_EMBD: u64 = 1_000_000;

/// Bytes of a family's or a quantization's name.
const MAX_WORD_BYTES: usize = 64;

/// Families of one model: some have a second one for their projector.
const MAX_FAMILIES: usize = 8;

/// The description of a model if only the size of its context is known.
pub(crate) fn of_context(n_ctx: Option<&Value>) -> UpstreamModelInfo {
    UpstreamModelInfo { n_ctx: small(n_ctx, MAX_CTX), ..UpstreamModelInfo::default() }
}

/// llama-server's reply to `/props`.
pub(crate) fn of_props(reply: &Value) -> UpstreamModelInfo {
    let sees_images = reply.pointer("/modalities/vision").and_then(Value::as_bool);
    UpstreamModelInfo { sees_images, ..of_context(reply.pointer("/default_generation_settings/n_ctx")) }
}

/// Returns whether a model sees images, as its entry in a list of models says: in the words of OpenRouter
/// (`architecture.input_modalities`), Mistral (`capabilities.vision`), or llama-server and Ollama (`capabilities`).
pub(crate) fn listed_sight(entry: &Value) -> Option<bool> {
    let has = |list: Option<&Value>, words: &[&str]| -> Option<bool> {
        Some(list?.as_array()?.iter().filter_map(Value::as_str).any(|word| words.contains(&word)))
    };
    has(entry.pointer("/architecture/input_modalities"), &["image"])
        .or_else(|| entry.pointer("/capabilities/vision").and_then(Value::as_bool))
        .or_else(|| has(entry.get("capabilities"), &["vision", "multimodal"]))
}

/// Ollama's reply to `/api/show`.
pub(crate) fn of_show(reply: &Value) -> UpstreamModelInfo {
    let info = |key: &str| reply.get("model_info").and_then(|info| info.get(key));
    let architecture = word(info("general.architecture"));
    let of_architecture = |key: &str| info(&format!("{}.{key}", architecture.as_deref()?));
    let listed = reply.get("capabilities").and_then(Value::as_array).into_iter().flatten();
    let mut capabilities = OllamaCapability::listed(listed);
    // The configuration may say otherwise.
    capabilities.retain(|capability| *capability != OllamaCapability::Vision);
    UpstreamModelInfo {
        capabilities,
        details: reply.get("details").map(details).unwrap_or_default(),
        n_params: number(info("general.parameter_count"), MAX_PARAMS),
        n_ctx_train: small(of_architecture("context_length"), MAX_CTX),
        n_embd: small(of_architecture("embedding_length"), MAX_EMBD),
        // Ollama does not report the context that it runs the model with.
        n_ctx: None,
        sees_images: listed_sight(reply),
        architecture,
    }
}

fn details(reported: &Value) -> Details {
    let text = |name: &str| word(reported.get(name)).unwrap_or_default();
    let families = reported.get("families").and_then(Value::as_array).into_iter().flatten();
    Details {
        parent_model: "",
        format: if text("format") == "gguf" { "gguf" } else { "" },
        family: text("family"),
        families: families.filter_map(|family| word(Some(family))).take(MAX_FAMILIES).collect(),
        parameter_size: text("parameter_size"),
        quantization_level: text("quantization_level"),
    }
}

fn number(value: Option<&Value>, max: u64) -> Option<u64> {
    value?.as_u64().filter(|n| (1..=max).contains(n))
}

fn small(value: Option<&Value>, max: u64) -> Option<u32> {
    number(value, max).and_then(|n| u32::try_from(n).ok())
}

/// A name without spaces, such as `llama`, `8.0B` and `Q4_K_M`.
fn word(value: Option<&Value>) -> Option<String> {
    let is_word =
        |text: &&str| (1..=MAX_WORD_BYTES).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic());
    value?.as_str().filter(is_word).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::UpstreamKind;

    fn read(kind: UpstreamKind, model: &str, reply: &Value) -> UpstreamModelInfo {
        kind.protocol().read_model_info(model, reply)
    }

    #[test]
    fn only_known_fields_of_ollamas_reply_are_passed_on() {
        use OllamaCapability::{Completion, Thinking, Tools};
        let described = read(
            UpstreamKind::Ollama,
            "m",
            &json!({
                "license": "long", "modelfile": "FROM /home/somebody/model", "template": "{{ .Prompt }}",
                "details": {
                    "parent_model": "/home/somebody", "format": "gguf", "family": "qwen3", "families": ["qwen3", 5],
                    "parameter_size": "8.2B", "quantization_level": "Q4_K_M",
                },
                "model_info": {
                    "general.architecture": "qwen3", "general.parameter_count": 8_190_735_360_u64,
                    "qwen3.context_length": 40_960, "qwen3.embedding_length": 4_096, "general.file_type": 15,
                },
                "capabilities": ["thinking", "completion", "vision", "tools", "flying"],
            }),
        );
        assert_eq!(described.capabilities, [Completion, Tools, Thinking]);
        assert_eq!(described.sees_images, Some(true));
        assert_eq!((described.architecture.as_deref(), described.n_params), (Some("qwen3"), Some(8_190_735_360)));
        assert_eq!((described.n_ctx_train, described.n_embd, described.n_ctx), (Some(40_960), Some(4_096), None));
        let details = described.details;
        assert_eq!((details.parent_model, details.format, details.families), ("", "gguf", vec!["qwen3".to_owned()]));
        assert_eq!((details.parameter_size.as_str(), details.quantization_level.as_str()), ("8.2B", "Q4_K_M"));
    }

    #[test]
    fn implausible_values_are_left_out() {
        let show = |info: Value| {
            read(UpstreamKind::Ollama, "m", &json!({ "model_info": info, "details": 1, "capabilities": "x" }))
        };
        for n in [json!(0), json!(-1), json!(1.5), json!("4096"), json!(1_u64 << 40), Value::Null] {
            let described = show(json!({ "general.architecture": "llama", "llama.context_length": n }));
            assert_eq!(described.n_ctx_train, None, "{n}");
            let props = json!({ "default_generation_settings": { "n_ctx": n } });
            assert_eq!(read(UpstreamKind::LlamaServer, "m", &props), UpstreamModelInfo::default(), "{n}");
        }
        for architecture in [json!("a\nb"), json!("x".repeat(65)), json!(""), json!(1)] {
            let described = show(json!({ "general.architecture": architecture, "llama.context_length": 5 }));
            assert_eq!(described, UpstreamModelInfo::default(), "{architecture}");
        }
    }

    #[test]
    fn what_a_model_sees_is_read_in_every_words() {
        for (entry, expected) in [
            (json!({ "architecture": { "input_modalities": ["text", "image"] } }), Some(true)),
            (json!({ "architecture": { "input_modalities": ["text"] } }), Some(false)),
            (json!({ "capabilities": { "vision": true } }), Some(true)),
            (json!({ "capabilities": { "vision": false } }), Some(false)),
            (json!({ "capabilities": { "vision": "yes" } }), None),
            (json!({ "capabilities": ["completion", "multimodal"] }), Some(true)),
            (json!({ "capabilities": ["completion"] }), Some(false)),
            (json!({ "capabilities": "vision" }), None),
            (json!({ "id": "vision" }), None),
        ] {
            assert_eq!(listed_sight(&entry), expected, "{entry}");
        }
        for (vision, expected) in [(json!(true), Some(true)), (json!(false), Some(false)), (json!(1), None)] {
            let props = json!({ "modalities": { "vision": vision } });
            assert_eq!(read(UpstreamKind::LlamaServer, "m", &props).sees_images, expected, "{props}");
        }
    }

    #[test]
    fn other_kinds_report_the_context_or_nothing() {
        let props = json!({ "default_generation_settings": { "n_ctx": 8192 } });
        assert_eq!(read(UpstreamKind::LlamaServer, "m", &props).n_ctx, Some(8192));
        let list = json!({ "data": [{ "id": "other", "max_model_len": 1 }, { "id": "m", "max_model_len": 32_768 }] });
        assert_eq!(read(UpstreamKind::Vllm, "m", &list).n_ctx, Some(32_768));
        assert_eq!(read(UpstreamKind::Vllm, "n", &list).n_ctx, None);
        assert_eq!(read(UpstreamKind::OpenAi, "m", &list), UpstreamModelInfo::default());
    }
}
