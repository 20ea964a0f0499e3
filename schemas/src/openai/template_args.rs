//! Extra variables for the model's own chat template: the only thing a client may say to it, never a template.

use serde_json::{Map, Value};

use crate::request::InvalidRequest;
use crate::request::fields::Fields;

/// Variables the server sets; a client that could set them would rewrite the conversation past our checks.
pub(crate) const RESERVED: [&str; 6] =
    ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "chat_template"];

/// Reads `chat_template_kwargs` (llama-server's and vLLM's name), `enable_thinking` and `reasoning_effort`, which
/// templates of reasoning models read under these names. No effort at all is no thinking, for templates that know that
/// switch alone.
pub(super) fn parse(root: Fields<'_>) -> Result<Map<String, Value>, InvalidRequest> {
    if root.get("chat_template").is_some() {
        return Err(InvalidRequest::at("chat_template", "a chat template is never taken from a client"));
    }
    let mut args = root.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    if let Some(name) = RESERVED.into_iter().find(|name| args.contains_key(*name)) {
        return Err(InvalidRequest::at(format!("chat_template_kwargs.{name}"), "is set by the server"));
    }
    if let Some(thinking) = root.boolean("enable_thinking")? {
        args.insert("enable_thinking".to_owned(), thinking.into());
    }
    if let Some(effort) = effort(root, "reasoning_effort")? {
        set_effort(&mut args, effort);
    }
    Ok(args)
}

/// Tells the template how hard to think, under the names that templates read.
pub(super) fn set_effort(args: &mut Map<String, Value>, effort: &str) {
    args.insert("reasoning_effort".to_owned(), effort.into());
    if effort == "none" {
        args.entry("enable_thinking").or_insert(false.into());
    }
}

/// How hard a model is to think, under this name.
pub(super) fn effort<'a>(fields: Fields<'a>, name: &str) -> Result<Option<&'a str>, InvalidRequest> {
    match fields.string(name)? {
        None => Ok(None),
        Some(effort @ ("none" | "minimal" | "low" | "medium" | "high" | "xhigh" | "max")) => Ok(Some(effort)),
        Some(_) => {
            let problem = "must be none, minimal, low, medium, high, xhigh or max";
            Err(InvalidRequest::at(fields.name(name), problem))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(body: Value, expected: Result<Value, &str>) {
        match (parse(Fields::root(body.as_object().unwrap())), expected) {
            (Ok(args), Ok(expected)) => assert_eq!(Value::Object(args), expected, "{body}"),
            (Err(error), Err(param)) => assert_eq!(error.param.as_deref(), Some(param), "{body}"),
            (got, expected) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn variables_pass_and_templates_do_not() {
        check(json!({}), Ok(json!({})));
        check(json!({"chat_template_kwargs": {"enable_thinking": false}}), Ok(json!({"enable_thinking": false})));
        check(json!({"reasoning_effort": "low"}), Ok(json!({"reasoning_effort": "low"})));
        check(json!({"enable_thinking": true}), Ok(json!({"enable_thinking": true})));
        let none = json!({"reasoning_effort": "none", "enable_thinking": false});
        check(json!({"reasoning_effort": "none"}), Ok(none));
        check(json!({"reasoning_effort": "huge"}), Err("reasoning_effort"));
        check(json!({"chat_template": "{{ x }}"}), Err("chat_template"));
        check(json!({"chat_template_kwargs": {"messages": []}}), Err("chat_template_kwargs.messages"));
        check(json!({"chat_template_kwargs": 1}), Err("chat_template_kwargs"));
    }
}
