//! What is sent to an upstream: the request for one choice, and the calls that it becomes.

use baton_schemas::GenerateRequest;
use serde_json::Value;

use crate::StrictGap;
use crate::request::fields::Fields;

/// The request for one choice of a reply.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceRequest<'a> {
    pub request: &'a GenerateRequest,
    /// The choice's index, from 0. Each choice draws with its own seed.
    pub choice: u32,
    /// The upstream's own name for the model.
    pub model: &'a str,
    /// The most tokens that the model's context has room for after the prompt. `None`: enough, or nobody knows.
    pub n_left: Option<u32>,
    /// Why a promised schema is sent without `strict`: [`StrictGap::of`] the request, or as the upstream has answered.
    pub gap: Option<StrictGap>,
}

/// The most tokens of a reply that is requested in one piece. A server may not notice that its client left, or died
/// meanwhile, until such a reply is complete.
const MAX_WHOLE_TOKENS: u32 = 256;

impl ChoiceRequest<'_> {
    /// Returns true if the reply may come in one piece: it is short, its client waits for its end anyway, and nothing in
    /// it can end it early.
    pub(crate) fn may_come_whole(&self) -> bool {
        let GenerateRequest { is_streamed, max_tokens, stop, tools, .. } = self.request;
        let is_short = max_tokens.is_some_and(|n| n <= MAX_WHOLE_TOKENS);
        is_short && !is_streamed && stop.is_empty() && (tools.parallel || tools.offered().is_empty())
    }
}

/// The call for one choice, which its upstream takes.
pub struct PreparedChoice(pub(crate) ApiCall);

impl PreparedChoice {
    /// Returns true if the reply is requested in one piece.
    pub fn comes_whole(&self) -> bool {
        self.0.form == ReplyDelivery::Whole
    }
}

/// A path of an upstream's HTTP API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApiPath {
    /// Below the API's address, which ends with the version in OpenAI's dialect.
    Api(&'static str),
    /// Below the server's root, outside of OpenAI's `/v1`.
    Root(&'static str),
}

impl ApiPath {
    /// The path alone.
    pub(crate) fn route(self) -> &'static str {
        match self {
            ApiPath::Api(route) | ApiPath::Root(route) => route,
        }
    }
}

/// How a reply is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplyDelivery {
    /// In one piece.
    Whole,
    /// In events, while it is generated.
    Streamed,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiCall {
    pub(crate) path: ApiPath,
    pub(crate) form: ReplyDelivery,
    pub(crate) body: Fields,
}

impl ApiCall {
    /// A call whose reply comes in one piece.
    pub(crate) fn new<const N: usize>(path: ApiPath, fields: [(&'static str, Value); N]) -> ApiCall {
        let mut body = Fields::default();
        fields.into_iter().for_each(|(name, value)| body.set(name, value));
        ApiCall { path, form: ReplyDelivery::Whole, body }
    }
}

/// How a model's description is requested.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ModelInfoCall<'a> {
    /// A GET request without parameters.
    Get(ApiPath),
    /// A GET request with the model's name as the parameter `model`.
    GetModel(ApiPath, &'a str),
    Post(ApiCall),
}
