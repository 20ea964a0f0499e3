//! OpenAI's and other servers' fields that are not supported yet.

use serde_json::Value;

use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, object};
use crate::request::unsupported::{RefusedField, RefusedFields, Unsupported};

/// A field that is refused with every value.
const fn never(field: &'static str, feature: &'static str) -> RefusedField {
    RefusedField { field, feature, off: None }
}

/// A field that is refused unless it is switched off. The number `off` switches it off, too.
const fn unless(off: f64, field: &'static str, feature: &'static str) -> RefusedField {
    RefusedField { field, feature, off: Some(off) }
}

/// Fields of both chats and completions.
#[derive(Debug)]
pub(crate) struct NotYet;

impl RefusedFields for NotYet {
    const FIELDS: &'static [RefusedField] = &[
        // vLLM's oldest form.
        never("guided_decoding", "'guided_decoding', for which 'structured_outputs' serves,"),
        // Fields of other servers that change which tokens are generated.
        unless(1.0, "best_of", "Choosing among several drafts"),
        unless(0.0, "use_beam_search", "Beam search"),
        unless(0.0, "min_tokens", "A least number of tokens"),
        unless(0.0, "stop_token_ids", "Stopping at tokens"),
        unless(0.0, "allowed_token_ids", "Limiting the vocabulary"),
        unless(0.0, "bad_words", "Forbidding words"),
        unless(0.0, "logits_processors", "A processor of logits"),
        unless(1.0, "typical_p", "Typical sampling"),
        unless(1.0, "tfs_z", "Tail-free sampling"),
        unless(0.0, "mirostat", "Mirostat"),
        unless(0.0, "dry_multiplier", "DRY sampling"),
        unless(0.0, "xtc_probability", "XTC sampling"),
        unless(0.0, "dynatemp_range", "Dynamic temperature"),
        unless(-1.0, "top_n_sigma", "Top-n-sigma sampling"),
        unless(0.0, "continue_final_message", "Continuing the last message"),
    ];
}

/// Fields of chats alone.
#[derive(Debug)]
pub(crate) struct NotYetInChats;

impl RefusedFields for NotYetInChats {
    const FIELDS: &'static [RefusedField] = &[
        unless(0.0, "echo", "Echoing the prompt"),
        never("prompt_logprobs", "Computing log-probabilities of a chat's prompt"),
    ];
}

/// Output other than text. Checked after `modalities`, which clients that want audio also send.
#[derive(Debug)]
pub(crate) struct OtherOutput;

impl RefusedFields for OtherOutput {
    const FIELDS: &'static [RefusedField] =
        &[never("audio", "Audio output"), never("web_search_options", "Web search")];
}

object! {
    /// The unsupported fields of chats and completions.
    pub(crate) struct NotYetBody {
        #[schemars(skip)]
        fields: Unsupported<NotYet>,
        #[schemars(skip)]
        add_generation_prompt: Field<bool>,
    }
}

impl NotYetBody {
    /// Refuses fields that ask for something. Values that ask for nothing, such as `tools: []`, pass.
    pub(crate) fn check(self) -> Result<(), InvalidRequest> {
        self.fields.check("")?;
        match self.add_generation_prompt.get("")? {
            Some(false) => {
                Err(InvalidRequest::unsupported("add_generation_prompt", "A prompt without the reply's opening"))
            }
            Some(true) | None => Ok(()),
        }
    }
}

object! {
    /// The unsupported fields of chats alone.
    pub(crate) struct MediaBody {
        #[schemars(skip)]
        fields: Unsupported<NotYetInChats>,
        /// The kinds of output: only `text` is supported.
        #[schemars(extend("items" = {"type": "string", "const": "text"}))]
        modalities: Field<Items<Value>>,
        #[schemars(skip)]
        output: Unsupported<OtherOutput>,
    }
}

impl MediaBody {
    pub(crate) fn check(self) -> Result<(), InvalidRequest> {
        self.fields.check("")?;
        if self.modalities.get("")?.unwrap_or_default().sound().any(|modality| modality != "text") {
            return Err(InvalidRequest::unsupported("modalities", "Output other than text"));
        }
        self.output.check("")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::ErrorCode;
    use crate::request::read::read;

    /// `expected` is the field that is refused.
    fn check(body: Value, expected: Option<&str>) {
        let bytes = body.to_string();
        let refused = read(bytes.as_bytes()).and_then(NotYetBody::check).err();
        let refused = refused.or_else(|| read(bytes.as_bytes()).and_then(MediaBody::check).err());
        assert_eq!(refused.as_ref().and_then(|error| error.param.as_deref()), expected, "{body}");
        if let Some(error) = refused {
            assert_eq!(error.code, Some(ErrorCode::UnsupportedParameter), "{body}");
        }
    }

    #[test]
    fn only_what_is_asked_for_in_earnest_is_refused() {
        check(json!({}), None);
        check(json!({"response_format": {"type": "text"}, "modalities": ["text"]}), None);
        check(json!({"guided_decoding": {"json": {}}}), Some("guided_decoding"));
        check(json!({"guided_decoding": null}), None);
        check(json!({"best_of": 1, "use_beam_search": false, "min_tokens": 0, "stop_token_ids": []}), None);
        check(json!({"typical_p": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "bad_words": [], "echo": false}), None);
        check(json!({"best_of": 2}), Some("best_of"));
        check(json!({"use_beam_search": true}), Some("use_beam_search"));
        check(json!({"min_tokens": 5}), Some("min_tokens"));
        check(json!({"allowed_token_ids": [1]}), Some("allowed_token_ids"));
        check(json!({"mirostat": 2}), Some("mirostat"));
        check(json!({"add_generation_prompt": true}), None);
        check(json!({"add_generation_prompt": false}), Some("add_generation_prompt"));
        check(json!({"cache_prompt": true, "store": true, "made_up": {"x": 1}}), None);
        check(json!({"modalities": ["text", "audio"]}), Some("modalities"));
        check(json!({"audio": {"voice": "x"}}), Some("audio"));
        check(json!({"audio": {"voice": "x"}, "modalities": ["text", "audio"]}), Some("modalities"));
        check(json!({"web_search_options": {}}), Some("web_search_options"));
    }
}
