//! Extra variables for the model's chat template. A client may set variables, never the template.

use schemars::JsonSchema;
use serde::de::MapAccess;
use serde_json::{Map, Value};

use crate::reasoning_effort::ReasoningEffort;
use crate::request::InvalidRequest;
use crate::request::field::{Field, object};
use crate::request::read::{Read, Reading};
use crate::request::unsupported::Demand;

/// Variables that the server sets. A client that could set them could bypass the checks of the conversation.
const RESERVED: [&str; 6] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "chat_template"];

object! {
    /// Variables for the chat template.
    pub(crate) struct TemplateBody {
        /// How hard the model should think.
        reasoning_effort: Field<ReasoningEffort>,
        /// Turns thinking on or off, in templates that have this switch.
        enable_thinking: Field<bool>,
        /// Other variables for the chat template.
        chat_template_kwargs: Field<TemplateArgs>,
        #[schemars(skip)]
        chat_template: Field<Demand>,
    }
}

/// Variables for the chat template. Those in [`RESERVED`] are refused.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("propertyNames" = {"not": {"enum": RESERVED}}))]
pub(crate) struct TemplateArgs(Map<String, Value>);

impl Read for TemplateArgs {
    const EXPECTED: &'static str = "an object";

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Map::object(fields)?.map(TemplateArgs))
    }
}

impl TemplateBody {
    /// Returns the variables, with the names that templates of reasoning models use.
    pub(crate) fn check(self) -> Result<Map<String, Value>, InvalidRequest> {
        if self.chat_template.is_given() {
            return Err(InvalidRequest::at("chat_template", "a chat template is never taken from a client"));
        }
        let mut args = self.chat_template_kwargs.get("")?.map(|args| args.0).unwrap_or_default();
        if let Some(name) = RESERVED.into_iter().find(|name| args.contains_key(*name)) {
            return Err(InvalidRequest::at(format!("chat_template_kwargs.{name}"), "is set by the server"));
        }
        if let Some(thinking) = self.enable_thinking.get("")? {
            args.insert("enable_thinking".to_owned(), thinking.into());
        }
        if let Some(effort) = self.reasoning_effort.get("")? {
            effort.set(&mut args);
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::read::read;

    fn check(body: Value, expected: Result<Value, &str>) {
        match (read(body.to_string().as_bytes()).and_then(TemplateBody::check), expected) {
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
