//! LM Studio's REST API, as far as it is about models: the list, and what loads and unloads one.
//!
//! Shapes and names are those of its documentation, version 1 (`/api/v1`). One instance of a model can be loaded here, and its id
//! is the model's name.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::node::NodeInfo;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, object};
use crate::request::read::read;
use crate::request::values::ModelName;

object! {
    /// A model to load.
    #[schemars(rename = "LmStudioLoadRequest", example = json!({ "model": "smollm2" }))]
    pub struct LmStudioLoadBody {
        /// The model's name.
        model: Required<ModelName>,
        /// Add `load_config` to the reply.
        echo_load_config: Field<bool>,
    }
}

object! {
    /// A model to unload.
    #[schemars(rename = "LmStudioUnloadRequest", example = json!({ "instance_id": "smollm2" }))]
    pub struct LmStudioUnloadBody {
        /// The model's name.
        instance_id: Required<ModelName>,
    }
}

/// A checked [`LmStudioLoadBody`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LmStudioLoadRequest {
    /// The model's name.
    pub model: String,
    /// The reply has the context's size.
    pub echoes_config: bool,
}

impl LmStudioLoadRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let LmStudioLoadBody { model, echo_load_config } = read(body)?;
        Ok(LmStudioLoadRequest { model: model.get("")?.0, echoes_config: echo_load_config.get("")?.unwrap_or(false) })
    }
}

/// Reads a body of the call that unloads. Returns the model's name.
pub fn parse_unload(body: &[u8]) -> Result<String, InvalidRequest> {
    let LmStudioUnloadBody { instance_id } = read(body)?;
    Ok(instance_id.get("")?.0)
}

/// The purpose of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LmStudioModelType {
    /// To generate text.
    Llm,
    /// To compute vectors.
    Embedding,
}

impl LmStudioModelType {
    fn of(info: Option<&NodeInfo>) -> LmStudioModelType {
        let embeds = info.is_some_and(|info| info.embedding.is_some_and(|embedding| embedding.is_trained));
        if embeds { LmStudioModelType::Embedding } else { LmStudioModelType::Llm }
    }
}

/// The settings of a loaded model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LmStudioLoadConfig {
    /// Tokens that one request may hold.
    pub context_length: u32,
}

/// The reply to a load.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LmStudioLoadReply {
    /// The purpose of the model.
    #[serde(rename = "type")]
    pub kind: LmStudioModelType,
    /// The model's name.
    pub instance_id: String,
    /// The time that it took.
    pub load_time_seconds: f64,
    /// Always `loaded`: failures have an error.
    pub status: &'static str,
    /// If the request asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_config: Option<LmStudioLoadConfig>,
}

impl LmStudioLoadReply {
    /// A model that is loaded now.
    pub fn new(name: String, info: Option<&NodeInfo>, seconds: f64, echoes_config: bool) -> LmStudioLoadReply {
        let load_config = info.filter(|_| echoes_config).map(LmStudioLoadConfig::of);
        let kind = LmStudioModelType::of(info);
        LmStudioLoadReply { kind, instance_id: name, load_time_seconds: seconds, status: "loaded", load_config }
    }
}

impl LmStudioLoadConfig {
    fn of(info: &NodeInfo) -> LmStudioLoadConfig {
        LmStudioLoadConfig { context_length: info.n_ctx }
    }
}

/// The reply to an unload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LmStudioUnloadReply {
    /// The model's name.
    pub instance_id: String,
}

/// The reply to `GET /api/v1/models`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LmStudioModelList {
    /// The models.
    pub models: Vec<LmStudioModel>,
}

/// A model in the list.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LmStudioModel {
    /// The purpose of the model.
    #[serde(rename = "type")]
    pub kind: LmStudioModelType,
    /// Always empty.
    pub publisher: &'static str,
    /// The model's name.
    pub key: String,
    /// The same.
    pub display_name: String,
    /// llama.cpp's name of the architecture; missing until it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// Missing until it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<LmStudioQuantization>,
    /// Bytes of its file; 0 until they are known.
    pub size_bytes: u64,
    /// Its instance, if it is loaded.
    pub loaded_instances: Vec<LmStudioInstance>,
    /// Tokens that it was trained for; 0 until they are known.
    pub max_context_length: u32,
    /// Missing until they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<LmStudioCapabilities>,
}

/// The format of the weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LmStudioQuantization {
    /// E.g. `Q4_K_M`.
    pub name: String,
}

/// A loaded model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LmStudioInstance {
    /// The model's name.
    pub id: String,
    /// Its settings.
    pub config: LmStudioLoadConfig,
}

/// The capabilities of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LmStudioCapabilities {
    /// It sees images.
    pub vision: bool,
    /// It may call tools. Here each model may that chats.
    pub trained_for_tool_use: bool,
}

impl LmStudioModel {
    /// Describes a model. `info` is `None` until a node has reported it.
    pub fn new(name: &str, info: Option<&NodeInfo>, is_loaded: bool) -> LmStudioModel {
        let instance = |info| LmStudioInstance { id: name.to_owned(), config: LmStudioLoadConfig::of(info) };
        LmStudioModel {
            kind: LmStudioModelType::of(info),
            publisher: "",
            key: name.to_owned(),
            display_name: name.to_owned(),
            architecture: info.map(|info| info.architecture.clone()),
            quantization: info.map(|info| LmStudioQuantization { name: info.facts.quantization.clone() }),
            size_bytes: info.map_or(0, |info| info.facts.file_bytes),
            loaded_instances: info.filter(|_| is_loaded).map(instance).into_iter().collect(),
            max_context_length: info.map_or(0, |info| info.n_ctx_train),
            capabilities: info.map(|info| LmStudioCapabilities {
                vision: info.projector.is_some(),
                trained_for_tool_use: info.generates && info.has_chat_template,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_name_a_model() {
        let load = LmStudioLoadRequest::parse(br#"{"model": "m", "echo_load_config": true}"#).unwrap();
        assert_eq!(load, LmStudioLoadRequest { model: "m".into(), echoes_config: true });
        assert_eq!(parse_unload(br#"{"instance_id": "m"}"#).unwrap(), "m");
        for wrong in [r#"{"model": ""}"#, r#"{"model": "m", "echo_load_config": 1}"#, "{}", "[]"] {
            assert!(LmStudioLoadRequest::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
        assert!(parse_unload(br#"{"model": "m"}"#).is_err());
    }

    #[test]
    fn a_model_that_no_node_has_described_is_listed_without_facts() {
        let listed = serde_json::to_value(LmStudioModel::new("m", None, false)).unwrap();
        let expected = json!({ "type": "llm", "publisher": "", "key": "m", "display_name": "m", "size_bytes": 0,
            "loaded_instances": [], "max_context_length": 0 });
        assert_eq!(listed, expected);
    }
}
