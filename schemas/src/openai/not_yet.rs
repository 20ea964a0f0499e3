//! What a client may ask for and this server cannot honour yet: refused by name, because a request that is answered as
//! if it had not asked is a wrong answer. Each check leaves here when its feature arrives.

use serde_json::Value;

use super::error::InvalidRequest;
use super::fields::Fields;

/// Refuses what is asked for in earnest; values that ask for nothing (`tools: []`, `response_format: text`) pass.
pub(super) fn refuse(root: Fields<'_>) -> Result<(), InvalidRequest> {
    refuse_tools(root)?;
    refuse_formats(root)?;
    refuse_media(root)
}

/// Tool calling: `tools` go into `Conversation::tools`, calls come out of the text stream.
fn refuse_tools(root: Fields<'_>) -> Result<(), InvalidRequest> {
    for field in ["tools", "functions"] {
        if root.array(field)?.is_some_and(|tools| !tools.is_empty()) {
            return Err(InvalidRequest::unsupported(field, "Tool calling"));
        }
    }
    for field in ["tool_choice", "function_call"] {
        match root.get(field) {
            None => {}
            // Without tools both mean what happens anyway.
            Some(Value::String(choice)) if choice == "none" || choice == "auto" => {}
            Some(_) => return Err(InvalidRequest::unsupported(field, "Tool choice")),
        }
    }
    Ok(())
}

/// Structured output: a grammar or schema for the engine's sampler.
fn refuse_formats(root: Fields<'_>) -> Result<(), InvalidRequest> {
    if let Some(format) = root.get("response_format") {
        let kind = Fields::at(format, "response_format")?.string("type")?;
        if kind != Some("text") {
            return Err(InvalidRequest::unsupported("response_format", "A response format other than 'text'"));
        }
    }
    for field in ["grammar", "json_schema"] {
        if root.get(field).is_some() {
            return Err(InvalidRequest::unsupported(field, "Structured output"));
        }
    }
    Ok(())
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
    use serde_json::json;

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
        check(json!({"tools": [], "tool_choice": "auto", "parallel_tool_calls": true}), None);
        check(json!({"tools": null, "tool_choice": "none", "functions": [], "function_call": "auto"}), None);
        check(json!({"response_format": {"type": "text"}, "modalities": ["text"]}), None);
        check(json!({"tools": [{"type": "function"}]}), Some("tools"));
        check(json!({"functions": [{}]}), Some("functions"));
        check(json!({"tool_choice": "required"}), Some("tool_choice"));
        check(json!({"tool_choice": {"type": "function"}}), Some("tool_choice"));
        check(json!({"response_format": {"type": "json_object"}}), Some("response_format"));
        check(json!({"response_format": {}}), Some("response_format"));
        check(json!({"grammar": "root ::= x"}), Some("grammar"));
        check(json!({"json_schema": {}}), Some("json_schema"));
        check(json!({"modalities": ["text", "audio"]}), Some("modalities"));
        check(json!({"audio": {"voice": "x"}}), Some("audio"));
        check(json!({"web_search_options": {}}), Some("web_search_options"));
    }
}
