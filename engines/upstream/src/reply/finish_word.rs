//! The words by which servers say why a reply ended.

use baton_schemas::FinishReason;

use crate::{UpstreamError, UpstreamFailure};

/// The longest word that is kept for the log.
const MAX_WORD_CHARS: usize = 64;

/// How a reply ended.
enum Ended {
    By(FinishReason),
    /// The server gave up.
    Failed,
}

/// The words that are known, in any case: of OpenAI, Anthropic, Mistral, DeepSeek, Gemini, Cohere, Zhipu, Bedrock, vLLM,
/// SGLang, TGI and Ollama, whose `load` and `unload` end replies to requests without a prompt.
const KNOWN: [(Ended, &[&str]); 5] = [
    (
        Ended::By(FinishReason::Stop),
        &["stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed", "load", "unload"],
    ),
    (
        Ended::By(FinishReason::Length),
        &[
            "length",
            "max_tokens",
            "max_output_tokens",
            "max_completion_tokens",
            "model_length",
            "context_length",
            "context_length_exceeded",
            "model_context_window_exceeded",
            "incomplete",
            "insufficient_system_resource",
        ],
    ),
    (Ended::By(FinishReason::ToolCalls), &["tool_calls", "tool_call", "tool_use", "function_call", "function_calls"]),
    (
        Ended::By(FinishReason::ContentFilter),
        &[
            "content_filter",
            "content_filtered",
            "refusal",
            "safety",
            "sensitive",
            "recitation",
            "blocklist",
            "prohibited_content",
            "spii",
            "guardrail_intervened",
            "error_toxic",
        ],
    ),
    (
        Ended::Failed,
        &["abort", "aborted", "error", "failed", "cancelled", "canceled", "network_error", "malformed_function_call"],
    ),
];

/// Why a reply ended, as a server says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FinishWord {
    pub(crate) reason: FinishReason,
    /// A word that is not known.
    pub(crate) unknown: Option<String>,
}

impl FinishWord {
    /// Reads a word that is not empty. A word that is not known ends the reply as a limit would: a cut reply must not pass as
    /// a whole one. Errors: the server says that it failed.
    pub(crate) fn read(word: &str) -> Result<FinishWord, UpstreamError> {
        let known = KNOWN.iter().find(|(_, words)| words.iter().any(|known| word.eq_ignore_ascii_case(known)));
        let reason = match known {
            Some((Ended::By(reason), _)) => *reason,
            Some((Ended::Failed, _)) => {
                let failed = format_args!("the reply ended by {word:?}");
                return Err(UpstreamError::failed(UpstreamFailure::ServerError, failed));
            }
            None => {
                let word = word.chars().filter(|c| !c.is_control()).take(MAX_WORD_CHARS).collect();
                return Ok(FinishWord { reason: FinishReason::Length, unknown: Some(word) });
            }
        };
        Ok(FinishWord { reason, unknown: None })
    }

    /// The word that counts if a server gives several: the one that says most about what the reply lacks, and the first of
    /// equals.
    pub(crate) fn after(self, earlier: Option<FinishWord>) -> FinishWord {
        match earlier {
            Some(earlier) if lack(earlier.reason) >= lack(self.reason) => earlier,
            _ => self,
        }
    }
}

/// How much a reply lacks that ended for this reason.
fn lack(reason: FinishReason) -> u8 {
    match reason {
        FinishReason::Stop => 0,
        FinishReason::ToolCalls => 1,
        FinishReason::Length => 2,
        FinishReason::ContentFilter | FinishReason::Refusal => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_reply_never_passes_as_a_whole_one() {
        let read = |word: &str| FinishWord::read(word).unwrap();
        let known = |word: &str, reason| assert_eq!(read(word), FinishWord { reason, unknown: None }, "{word}");
        known("stop", FinishReason::Stop);
        known("STOP", FinishReason::Stop);
        known("model_length", FinishReason::Length);
        known("MAX_TOKENS", FinishReason::Length);
        known("insufficient_system_resource", FinishReason::Length);
        known("tool_use", FinishReason::ToolCalls);
        known("content_filter", FinishReason::ContentFilter);
        known("SAFETY", FinishReason::ContentFilter);
        known("refusal", FinishReason::ContentFilter);
        let long = format!("why\n{}", "x".repeat(100));
        for (word, kept) in [("repetition", "repetition".to_owned()), (&long, format!("why{}", "x".repeat(61)))] {
            assert_eq!(read(word), FinishWord { reason: FinishReason::Length, unknown: Some(kept) });
        }
        let both = |first: &str, second: &str| read(second).after(Some(read(first))).reason;
        assert_eq!(both("content_filter", "stop"), FinishReason::ContentFilter);
        assert_eq!(both("length", "stop"), FinishReason::Length);
        assert_eq!(both("stop", "length"), FinishReason::Length);
        assert_eq!(both("tool_calls", "stop"), FinishReason::ToolCalls);
        assert_eq!(read("stop").after(None).reason, FinishReason::Stop);
        for failed in ["abort", "error", "network_error", "MALFORMED_FUNCTION_CALL"] {
            assert!(FinishWord::read(failed).is_err(), "{failed}");
        }
    }
}
