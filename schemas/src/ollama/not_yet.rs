//! What a client may ask for and this server cannot honour yet: refused by name. Each check leaves here when its
//! feature arrives.

use serde_json::Value;

use crate::request::InvalidRequest;
use crate::request::fields::Fields;

/// Refuses what is asked for in earnest; values that ask for nothing (`tools: []`) pass.
pub(super) fn refuse(root: Fields<'_>, model: &str) -> Result<(), InvalidRequest> {
    if root.array("tools")?.is_some_and(|tools| !tools.is_empty()) {
        return Err(InvalidRequest::unsupported("tools", "Tool calling"));
    }
    match root.get("think") {
        None | Some(Value::Bool(false)) => {}
        // Ollama's own words, which clients look for to ask again without it.
        Some(_) => return Err(does_not_support(model, "think", "thinking")),
    }
    images(root, "images")
}

/// Refuses pictures under this name of the body or of a message.
pub(super) fn images(fields: Fields<'_>, name: &str) -> Result<(), InvalidRequest> {
    match fields.array(name)? {
        Some([_, ..]) => Err(InvalidRequest::unsupported(fields.name(name), "Image input")),
        _ => Ok(()),
    }
}

/// A capability that the model lacks, in Ollama's words.
pub(super) fn does_not_support(model: &str, param: &str, capability: &str) -> InvalidRequest {
    let message = format!("\"{}\" does not support {capability}", model.escape_debug());
    InvalidRequest { message, param: Some(param.to_owned()), code: Some("unsupported_parameter") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(body: Value, expected: Option<&str>) {
        let refused = refuse(Fields::root(body.as_object().unwrap()), "m").err();
        assert_eq!(refused.and_then(|error| error.param).as_deref(), expected, "{body}");
    }

    #[test]
    fn only_what_is_asked_for_in_earnest_is_refused() {
        check(json!({}), None);
        check(json!({"tools": [], "format": "", "think": false, "images": []}), None);
        check(json!({"tools": null, "format": null, "think": null, "images": null}), None);
        check(json!({"tools": [{"type": "function"}]}), Some("tools"));
        check(json!({"think": true}), Some("think"));
        check(json!({"think": "high"}), Some("think"));
        check(json!({"images": ["aGk="]}), Some("images"));
    }
}
