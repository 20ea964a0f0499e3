//! What a client may ask for and this server cannot honour yet: refused by name, because a request that is answered as
//! if it had not asked is a wrong answer. Each check leaves here when its feature arrives.

use crate::request::fields::Fields;
use crate::request::{InvalidRequest, off};

/// Refuses what is asked for in earnest; values that ask for nothing (`tools: []`) pass.
pub(super) fn refuse(root: Fields<'_>) -> Result<(), InvalidRequest> {
    refuse_formats(root)?;
    refuse_constraints(root)?;
    off::refuse(root, &[("echo", "Echoing the prompt", 0.0)])?;
    refuse_media(root)
}

/// The same for a completion, which has no conversation to ask tools or media for.
pub(super) fn refuse_in_completion(root: Fields<'_>) -> Result<(), InvalidRequest> {
    refuse_formats(root)?;
    refuse_constraints(root)
}

/// Structured output in other servers' words; OpenAI's is `response_format`.
fn refuse_formats(root: Fields<'_>) -> Result<(), InvalidRequest> {
    for field in ["grammar", "json_schema", "structured_outputs", "regex", "ebnf"].into_iter().chain(GUIDED) {
        if root.get(field).is_some() {
            return Err(InvalidRequest::unsupported(field, "Structured output"));
        }
    }
    Ok(())
}

/// vLLM's older names for structured output.
const GUIDED: [&str; 5] = ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"];

/// Fields of other servers that change which tokens may come.
const CONSTRAINTS: [off::Constraint; 15] = [
    ("best_of", "Choosing among several drafts", 1.0),
    ("use_beam_search", "Beam search", 0.0),
    ("min_tokens", "A least number of tokens", 0.0),
    ("stop_token_ids", "Stopping at tokens", 0.0),
    ("allowed_token_ids", "Limiting the vocabulary", 0.0),
    ("bad_words", "Forbidding words", 0.0),
    ("logits_processors", "A processor of logits", 0.0),
    ("typical_p", "Typical sampling", 1.0),
    ("tfs_z", "Tail-free sampling", 1.0),
    ("mirostat", "Mirostat", 0.0),
    ("dry_multiplier", "DRY sampling", 0.0),
    ("xtc_probability", "XTC sampling", 0.0),
    ("dynatemp_range", "Dynamic temperature", 0.0),
    ("top_n_sigma", "Top-n-sigma sampling", -1.0),
    ("continue_final_message", "Continuing the last message", 0.0),
];

fn refuse_constraints(root: Fields<'_>) -> Result<(), InvalidRequest> {
    off::refuse(root, &CONSTRAINTS)?;
    match root.boolean("add_generation_prompt")? {
        Some(false) => {
            Err(InvalidRequest::unsupported("add_generation_prompt", "A prompt without the reply's opening"))
        }
        Some(true) | None => Ok(()),
    }
}

/// Output other than text, and the web.
fn refuse_media(root: Fields<'_>) -> Result<(), InvalidRequest> {
    let modalities = root.array("modalities")?.unwrap_or_default();
    if modalities.iter().any(|modality| modality != "text") {
        return Err(InvalidRequest::unsupported("modalities", "Output other than text"));
    }
    for (field, what) in [("audio", "Audio output"), ("web_search_options", "Web search")] {
        if root.get(field).is_some() {
            return Err(InvalidRequest::unsupported(field, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// `expected` is the field that is refused.
    fn check(body: Value, expected: Option<&str>) {
        let refused = refuse(Fields::root(body.as_object().unwrap())).err();
        assert_eq!(refused.as_ref().and_then(|error| error.param.as_deref()), expected, "{body}");
        if let Some(error) = refused {
            assert_eq!(error.code, Some("unsupported_parameter"), "{body}");
        }
    }

    #[test]
    fn only_what_is_asked_for_in_earnest_is_refused() {
        check(json!({}), None);
        check(json!({"response_format": {"type": "text"}, "modalities": ["text"]}), None);
        check(json!({"grammar": "root ::= x"}), Some("grammar"));
        check(json!({"json_schema": {}}), Some("json_schema"));
        for field in ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex"] {
            check(json!({ field: "x" }), Some(field));
            check(json!({ field: null }), None);
        }
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
        check(json!({"web_search_options": {}}), Some("web_search_options"));
    }
}
