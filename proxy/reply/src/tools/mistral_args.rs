//! The format of Mistral's newer models: `[TOOL_CALLS]name[ARGS]{…}`, once for each call.

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::generate::Conversation;
use baton_schemas::tools::{Tool, ToolUse};

use super::mistral::{ARGUMENTS, CALLS, Mistral, text_or};
use super::{CallParser, Calls, ToolFormat};

#[derive(Debug)]
pub(super) struct MistralArgs;

impl ToolFormat for MistralArgs {
    fn name(&self) -> &'static str {
        "mistral-args"
    }

    fn is_of(&self, template: &str) -> bool {
        template.contains(CALLS) && template.contains(ARGUMENTS)
    }

    fn markers(&self) -> &'static [&'static str] {
        Mistral.markers()
    }

    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, template: &str) {
        Mistral.present(conversation, tools, template);
    }

    fn calls(&self, calls: &Calls<'_>) -> Rule {
        let call = calls.one_of(|name, arguments| {
            Rule::Sequence(vec![Rule::literal(format!("{CALLS}{name}{ARGUMENTS}")), arguments.clone()])
        });
        Rule::Repeat { rule: Box::new(call), min: 1, max: Some(calls.max) }
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        text_or(self.calls(calls), text)
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Mistral.parser(tools)
    }
}
