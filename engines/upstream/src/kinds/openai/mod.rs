//! Any server that speaks OpenAI's dialect: LM Studio, mlx_lm.server, llama-cpp-python, a second Baton, a hosted API.

pub(crate) mod chunks;
pub(crate) mod dialect;
pub(crate) mod strict_mode;

use std::borrow::Cow;

use self::dialect::OpenAiQuirks;
use crate::UpstreamField;
use crate::kinds::protocol::Protocol;

/// A server of OpenAI's dialect without a kind of its own.
#[derive(Debug)]
pub(crate) struct OpenAi;

impl Protocol for OpenAi {
    fn default_fields(&self) -> &'static [UpstreamField] {
        &[
            UpstreamField::Temperature,
            UpstreamField::TopP,
            UpstreamField::FrequencyPenalty,
            UpstreamField::PresencePenalty,
            UpstreamField::Seed,
            UpstreamField::LogitBias,
            UpstreamField::Logprobs,
            UpstreamField::Tools,
            UpstreamField::ParallelToolCalls,
            UpstreamField::ResponseFormat,
            UpstreamField::ReasoningEffort,
            UpstreamField::StreamOptions,
        ]
    }

    fn quirks(&self) -> OpenAiQuirks {
        // Servers with the dialect's older schema take no null (llama-cpp-python); OpenAI's own takes both.
        // OpenAI's own server holds strict schemas alone, and what another one holds is not known.
        OpenAiQuirks {
            takes_suffix: true,
            takes_null_content: false,
            schema_needs_strict: true,
            // OpenAI's own server refuses them there.
            takes_tool_images: false,
            ..OpenAiQuirks::default()
        }
    }

    /// llama-cpp-python breaks off a reply when it gets another request.
    fn may_break_off_replies(&self) -> bool {
        true
    }

    /// Some servers refuse an id that is no UUID (llama-cpp-python), so all are sent one that is derived from ours.
    fn request_id<'a>(&self, id: &'a str) -> Cow<'a, str> {
        let upstream_request_id = uuid(id);
        // The log must connect both ids: the upstream's log has only the derived one.
        tracing::debug!(request_id = id, upstream_request_id, "the upstream gets a derived request id");
        upstream_request_id.into()
    }
}

/// A UUID of version 4 (RFC 9562, section 5.4) whose random bits are the id's hash.
fn uuid(id: &str) -> String {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&blake3::hash(id.as_bytes()).as_bytes()[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
}

#[cfg(test)]
pub(crate) mod tests;
