//! What an upstream tells of one of its models: Ollama in `/api/show`, llama-server in `/props`, vLLM in its list.
//!
//! It goes on to clients, so that only fields known here do, words that are words, and numbers that could be true.

use baton_schemas::ollama::model::Details;
use baton_schemas::ollama::told::ToldModel;
use serde_json::Value;

use super::Kind;

/// Larger numbers are mistaken.
const MAX_CTX: u64 = 100_000_000;
const MAX_PARAMS: u64 = 1_000_000_000_000_000;
const MAX_EMBD: u64 = 1_000_000;

/// Bytes of a family's or a quantization's name.
const MAX_WORD_BYTES: usize = 64;

/// Families of one model: some have a second one for their projector.
const MAX_FAMILIES: usize = 8;

/// What of a model's abilities is passed on. Upstreams are sent no images, so whether it sees is not.
const CAPABILITIES: [&str; 5] = ["completion", "tools", "insert", "thinking", "embedding"];

/// Reads the reply of an upstream of this kind. `model` is its own name for the model.
pub(super) fn read(kind: Kind, model: &str, reply: &Value) -> ToldModel {
    match kind {
        Kind::Ollama => of_show(reply),
        Kind::LlamaServer => of_context(reply.pointer("/default_generation_settings/n_ctx")),
        Kind::Vllm => {
            let mut listed = reply.get("data").and_then(Value::as_array).into_iter().flatten();
            let entry = listed.find(|entry| entry.get("id").and_then(Value::as_str) == Some(model));
            of_context(entry.and_then(|entry| entry.get("max_model_len")))
        }
        Kind::OpenAi => ToldModel::default(),
    }
}

fn of_context(n_ctx: Option<&Value>) -> ToldModel {
    ToldModel { n_ctx: small(n_ctx, MAX_CTX), ..ToldModel::default() }
}

fn of_show(reply: &Value) -> ToldModel {
    let info = |key: &str| reply.get("model_info").and_then(|info| info.get(key));
    let architecture = word(info("general.architecture"));
    let of_architecture = |key: &str| info(&format!("{}.{key}", architecture.as_deref()?));
    let told = reply.get("capabilities").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    ToldModel {
        capabilities: CAPABILITIES.into_iter().filter(|known| told.iter().any(|told| told == known)).collect(),
        details: reply.get("details").map(details).unwrap_or_default(),
        n_params: number(info("general.parameter_count"), MAX_PARAMS),
        n_ctx_train: small(of_architecture("context_length"), MAX_CTX),
        n_embd: small(of_architecture("embedding_length"), MAX_EMBD),
        // What it may hold there is a setting and not told.
        n_ctx: None,
        architecture,
    }
}

fn details(told: &Value) -> Details {
    let text = |name: &str| word(told.get(name)).unwrap_or_default();
    let families = told.get("families").and_then(Value::as_array).into_iter().flatten();
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

    #[test]
    fn of_ollamas_reply_what_is_known_goes_on() {
        let told = read(
            Kind::Ollama,
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
        assert_eq!(told.capabilities, ["completion", "tools", "thinking"]);
        assert_eq!((told.architecture.as_deref(), told.n_params), (Some("qwen3"), Some(8_190_735_360)));
        assert_eq!((told.n_ctx_train, told.n_embd, told.n_ctx), (Some(40_960), Some(4_096), None));
        let details = told.details;
        assert_eq!((details.parent_model, details.format, details.families), ("", "gguf", vec!["qwen3".to_owned()]));
        assert_eq!((details.parameter_size.as_str(), details.quantization_level.as_str()), ("8.2B", "Q4_K_M"));
    }

    #[test]
    fn what_cannot_be_true_is_missing() {
        let show =
            |info: Value| read(Kind::Ollama, "m", &json!({ "model_info": info, "details": 1, "capabilities": "x" }));
        for n in [json!(0), json!(-1), json!(1.5), json!("4096"), json!(1_u64 << 40), Value::Null] {
            let told = show(json!({ "general.architecture": "llama", "llama.context_length": n }));
            assert_eq!(told.n_ctx_train, None, "{n}");
            let props = json!({ "default_generation_settings": { "n_ctx": n } });
            assert_eq!(read(Kind::LlamaServer, "m", &props), ToldModel::default(), "{n}");
        }
        for architecture in [json!("a\nb"), json!("x".repeat(65)), json!(""), json!(1)] {
            let told = show(json!({ "general.architecture": architecture, "llama.context_length": 5 }));
            assert_eq!(told, ToldModel::default(), "{architecture}");
        }
    }

    #[test]
    fn other_kinds_tell_the_context_or_nothing() {
        let props = json!({ "default_generation_settings": { "n_ctx": 8192 } });
        assert_eq!(read(Kind::LlamaServer, "m", &props).n_ctx, Some(8192));
        let list = json!({ "data": [{ "id": "other", "max_model_len": 1 }, { "id": "m", "max_model_len": 32_768 }] });
        assert_eq!(read(Kind::Vllm, "m", &list).n_ctx, Some(32_768));
        assert_eq!(read(Kind::Vllm, "n", &list).n_ctx, None);
        assert_eq!(read(Kind::OpenAi, "m", &list), ToldModel::default());
    }
}
