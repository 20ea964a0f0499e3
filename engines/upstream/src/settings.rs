//! An upstream's checked configuration.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_schemas::GenerateRequest;

use crate::{ModelCapability, UpstreamField, UpstreamKind};

/// How long an upstream may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpstreamDeadlines {
    /// To open a connection.
    pub connect: Duration,
    /// From the request to the first piece of the reply.
    pub first: Duration,
    /// Between two signs of life after that. Comments count.
    pub idle: Duration,
}

/// A model under the name that clients use and the name that the upstream uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelAlias {
    /// The name that clients use.
    pub ours: String,
    /// The upstream's name for it.
    pub theirs: String,
}

/// An upstream's checked configuration.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// The name in `x-baton-route`, logs and metrics.
    pub name: String,
    /// The server that it runs.
    pub kind: UpstreamKind,
    /// `http://host:port`, or with the path that its API lies under.
    pub url: String,
    /// The key, sent as `Authorization: Bearer`.
    pub key: Option<String>,
    /// Headers of every request. Names and values were checked.
    pub headers: Vec<(String, String)>,
    /// The models that it serves. Empty: all that it lists, under its own names.
    pub models: Vec<ModelAlias>,
    /// More names for models that it serves.
    pub aliases: Vec<ModelAlias>,
    /// It was found, and no configuration names it.
    pub is_adopted: bool,
    /// Names that mean other models here, although it may serve or list models of these names.
    pub hidden: Vec<String>,
    /// Fields that may be sent.
    pub fields: BTreeSet<UpstreamField>,
    /// The capabilities of all its models. `None`: what its list says.
    pub capabilities: Option<BTreeSet<ModelCapability>>,
    /// Its configured models are the same models as those of the endpoint's own nodes under these names.
    pub same_models: bool,
    /// Choices that it generates at once.
    pub max_concurrent: usize,
    /// Tokens of context to ask for (Ollama).
    pub num_ctx: Option<u32>,
    /// The limit of new tokens where the client sets none, for servers whose own default is too small.
    pub default_max_tokens: Option<u32>,
    /// True if its models see images, false if they get none. `None`: as it says of each model.
    pub images: Option<bool>,
    /// True if it may fetch images for clients. Otherwise no URL of an image is passed on.
    pub image_urls: bool,
    /// True if the server tolerates a connection that closes in the middle of a reply. Otherwise replies are read to
    /// their end.
    pub abort: bool,
    /// vLLM servers that compute prompts for this one.
    pub prefill: Vec<String>,
    /// How long it may take.
    pub deadlines: UpstreamDeadlines,
}

impl UpstreamSettings {
    /// The limit of new tokens that a request gets here.
    pub fn max_tokens(&self, request: &GenerateRequest) -> Option<u32> {
        request.max_tokens.or(self.default_max_tokens)
    }

    pub(super) fn takes(&self, field: UpstreamField) -> bool {
        self.fields.contains(&field)
    }
}

/// Leaves out secrets.
impl std::fmt::Debug for UpstreamSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamSettings").field("name", &self.name).field("kind", &self.kind).finish_non_exhaustive()
    }
}
