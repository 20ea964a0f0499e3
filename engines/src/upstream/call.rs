//! What is sent to an upstream: the request for one choice, and the calls that it becomes.

use baton_schemas::GenerateRequest;
use serde_json::{Map, Value};

/// The request for one choice of a reply.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceRequest<'a> {
    pub request: &'a GenerateRequest,
    /// The choice's index, from 0. Each choice draws with its own seed.
    pub choice: u32,
    /// The upstream's own name for the model.
    pub model: &'a str,
}

/// The call for one choice, which its upstream takes.
pub struct PreparedChoice(pub(super) ApiCall);

/// A path of an upstream's HTTP API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ApiPath {
    /// Below the API's address, which ends with the version in OpenAI's dialect.
    Api(&'static str),
    /// Below the server's root, outside of OpenAI's `/v1`.
    Root(&'static str),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApiCall {
    pub(super) path: ApiPath,
    pub(super) body: Map<String, Value>,
}

impl ApiCall {
    pub(super) fn new<const N: usize>(path: ApiPath, fields: [(&str, Value); N]) -> ApiCall {
        ApiCall { path, body: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
    }
}

/// How a model's description is requested.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ModelInfoCall<'a> {
    /// A GET request without parameters.
    Get(ApiPath),
    /// A GET request with the model's name as the parameter `model`.
    GetModel(ApiPath, &'a str),
    Post(ApiCall),
}
