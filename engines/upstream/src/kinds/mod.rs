//! How each kind of server is spoken to, and the one place that knows which file does it.
//!
//! [`protocol`] is what a kind must say. `openai` has the dialect that most of them share, [`tokens`] their routes for tokens.

mod llama_server;
mod ollama;
pub(crate) mod openai;
pub(crate) mod protocol;
pub(crate) mod tokens;
mod vllm;

use baton_schemas::GenerateRequest;

use self::llama_server::LlamaServer;
use self::ollama::Ollama;
use self::openai::{OpenAi, strict_mode};
use self::protocol::Protocol;
use self::vllm::Vllm;
use crate::{UpstreamField, UpstreamKind};

impl UpstreamKind {
    pub(crate) fn protocol(self) -> &'static dyn Protocol {
        match self {
            UpstreamKind::Ollama => &Ollama,
            UpstreamKind::OpenAi => &OpenAi,
            UpstreamKind::LlamaServer => &LlamaServer,
            UpstreamKind::Vllm => &Vllm,
        }
    }

    /// Fields that are sent unless the configuration says otherwise.
    pub fn default_fields(self) -> &'static [UpstreamField] {
        self.protocol().default_fields()
    }

    /// Fields that can be configured.
    pub fn known_fields(self) -> &'static [UpstreamField] {
        self.protocol().known_fields()
    }

    /// Returns true if other servers can compute prompts for this one.
    pub fn takes_prefill_servers(self) -> bool {
        self.protocol().prefill_steps().is_some()
    }

    /// Returns true if a server of this kind may only hold a reply to its schema if that is strict, though the client's
    /// dialect promises it without that word.
    pub fn needs_strict(self, request: &GenerateRequest) -> bool {
        self.protocol().quirks().schema_needs_strict && strict_mode::has_promise(request)
    }

    /// Returns true if requests can set the size of the context.
    pub fn takes_num_ctx(self) -> bool {
        self.protocol().takes_num_ctx()
    }

    /// Returns true if a server of this kind fetches images by their URLs.
    pub fn fetches_images(self) -> bool {
        self.protocol().fetches_images()
    }

    /// Returns true for a server that may break off a reply when it gets another request.
    pub fn may_break_off_replies(self) -> bool {
        self.protocol().may_break_off_replies()
    }
}
