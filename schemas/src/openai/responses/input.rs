//! `input` and `instructions` → the messages of a conversation.

use schemars::{JsonSchema, Schema};
use serde::de::SeqAccess;
use serde_json::json;

use super::client_tools::ClientTools;
use super::custom_tool::INPUT;
use crate::generate::Message;
use crate::message_role::MessageRole;
use crate::openai::messages::{Arguments, ChatContent, openai_role};
use crate::request::InvalidRequest;
use crate::request::demand::Demand;
use crate::request::field::{Field, Items, join, object};
use crate::request::history::{template_call, with_joined_system_messages};
use crate::request::images::{Images, refuse_beside};
use crate::request::invalid::quoted;
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::Variant;
use crate::request::values::NonEmpty;

/// The conversation so far: a text, or items.
#[derive(Debug, JsonSchema)]
#[schemars(rename = "ResponsesInput")]
#[serde(untagged)]
pub(crate) enum ResponsesInput {
    /// One message of the user.
    Text(String),
    /// Messages, calls and their results, oldest first.
    Items(#[schemars(length(min = 1))] Items<InputItem>),
}

impl Read for ResponsesInput {
    const EXPECTED: &'static str = "a string or an array of items";

    fn string(text: &str) -> Reading<Self> {
        Ok(ResponsesInput::Text(text.to_owned()))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Items::array(items)?.and_then(|items: Items<InputItem>| match items.is_empty() {
            true => Err(ValueProblem::value("must not be empty")),
            false => Ok(ResponsesInput::Items(items)),
        }))
    }
}

/// The types of calls and their results that become messages.
const READ_ITEMS: [&str; 4] = ["function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output"];

/// Describes `content` of an item of reasoning: an array of its texts.
fn describe_reasoning(schema: &mut Schema) {
    schema.ensure_object()["anyOf"][4]["properties"]["content"] = serde_json::json!({ "type": ["array", "null"] });
}

object! {
    /// An item of the conversation. References to items are a 400. Items of ignored tools are ignored, too.
    #[schemars(transform = describe_reasoning)]
    pub(crate) struct InputItem {
        /// The kind of item.
        r#type: Field<String>,
        /// Who speaks.
        #[schemars(extend("enum" = ["system", "developer", "user", "assistant"]))]
        role: Field<String>,
        /// The text.
        content: Field<ChatContent>,
        /// The id of the call, or of the call whose output this is.
        call_id: Field<NonEmpty>,
        /// The tool's name.
        name: Field<NonEmpty>,
        /// The tool's namespace.
        namespace: Field<String>,
        /// The function's arguments.
        arguments: Field<Arguments>,
        /// The text that the model gave a custom tool.
        input: Field<String>,
        /// The tool's result.
        output: Field<ChatContent>,
        #[schemars(skip)]
        images: Field<Demand>,
    }
    by "type" {
        Variant { words: &["message"], is_default: true, needs: &["role", "content"], ..Variant::NEW },
        Variant {
        words: &["function_call"], needs: &["call_id", "name"], may_have: &["arguments", "namespace"], ..Variant::NEW
        },
        Variant {
        words: &["custom_tool_call"], needs: &["call_id", "name"], may_have: &["input", "namespace"], ..Variant::NEW
        },
        Variant {
        words: &["function_call_output", "custom_tool_call_output"], needs: &["call_id"], may_have: &["output"],
        ..Variant::NEW
        },
        Variant { words: &["reasoning"], ..Variant::NEW },
    }
    skipped by InputItem::is_of_skipped_tool
}

impl InputItem {
    fn is_of_skipped_tool(&self) -> bool {
        self.r#type.peek().is_some_and(|kind| is_of_other_tool(kind))
    }
}

impl ResponsesInput {
    /// Returns the messages as templates read them, and adds their images to `images`. `instructions` become the first
    /// system message. `tools` has the names under which the model knows the tools of earlier calls.
    pub(super) fn check(
        self,
        instructions: Option<&str>,
        tools: &ClientTools,
        images: &mut Images,
    ) -> Result<Vec<Message>, InvalidRequest> {
        let mut history = ResponseTurns { messages: Vec::new(), reasoning: None, has_skipped: false, tools, images };
        if let Some(instructions) = instructions.filter(|text| !text.is_empty()) {
            history.push(MessageRole::System, instructions.to_owned());
        }
        match self {
            ResponsesInput::Text(text) => history.push(MessageRole::User, text),
            ResponsesInput::Items(items) => {
                for item in items.each("input") {
                    let (at, item) = item?;
                    history.add(&at, item)?;
                }
            }
        }
        if history.messages.is_empty() && history.has_skipped {
            return Err(InvalidRequest::at("input", "holds nothing that a model could read"));
        }
        Ok(with_joined_system_messages(history.messages))
    }
}

/// The messages so far. One turn of the assistant is several items in the input and one message here.
struct ResponseTurns<'i> {
    messages: Vec<Message>,
    /// The reasoning for the assistant's next item.
    reasoning: Option<String>,
    /// An item of an ignored tool was skipped.
    has_skipped: bool,
    tools: &'i ClientTools,
    images: &'i mut Images,
}

impl ResponseTurns<'_> {
    fn push(&mut self, role: MessageRole, content: String) {
        self.messages.push(Message::new(role, content));
    }

    fn add(&mut self, at: &str, mut item: InputItem) -> Result<(), InvalidRequest> {
        match item.r#type.take().get(at)?.as_deref() {
            None | Some("message") => self.message(at, item),
            Some("function_call") => {
                let arguments = item.arguments.take().get(at)?.unwrap_or_default();
                self.call(at, item, arguments)
            }
            Some("custom_tool_call") => {
                let input = item.input.take().get(at)?.unwrap_or_default();
                self.call(at, item, Arguments(json!({ INPUT: input })))
            }
            Some("function_call_output" | "custom_tool_call_output") => self.output(at, item),
            Some("reasoning") => self.reason(at, item),
            Some(kind) if is_of_other_tool(kind) => {
                self.has_skipped = true;
                Ok(())
            }
            Some("item_reference") => {
                Err(InvalidRequest::at(join(at, "type"), "nothing is stored here that an item could refer to"))
            }
            Some(other) => {
                Err(InvalidRequest::unsupported(join(at, "type"), format!("An item of type {}", quoted(other))))
            }
        }
    }

    fn message(&mut self, at: &str, item: InputItem) -> Result<(), InvalidRequest> {
        let role = item.role.get(at)?.as_deref().and_then(openai_role).filter(|role| *role != MessageRole::Tool);
        let role =
            role.ok_or_else(|| InvalidRequest::at(join(at, "role"), "must be system, developer, user or assistant"))?;
        refuse_beside(&item.images, role, at, "send them as parts of type 'input_image' in 'content'")?;
        let content = item.content.required("content", at)?.check(&join(at, "content"), self.images)?;
        if role == MessageRole::Assistant {
            let message = self.turn();
            // A turn has one text. A second text in a row begins another turn.
            if message.content.is_empty() && message.tool_calls.is_empty() {
                message.content = content;
                return Ok(());
            }
        }
        self.push(role, content);
        Ok(())
    }

    fn call(&mut self, at: &str, item: InputItem, arguments: Arguments) -> Result<(), InvalidRequest> {
        let name = item.name.required("name", at)?;
        let namespace = item.namespace.get(at)?.filter(|namespace| !namespace.is_empty());
        let name = self.tools.name_of(&name.0, namespace.as_deref());
        let call_id = item.call_id.required("call_id", at)?.0;
        self.turn().tool_calls.push(template_call(Some(call_id), &name, arguments.0));
        Ok(())
    }

    fn output(&mut self, at: &str, item: InputItem) -> Result<(), InvalidRequest> {
        let tool_call_id = Some(item.call_id.required("call_id", at)?.0);
        let output = item.output.get(at)?.map(|output| output.check(&join(at, "output"), self.images));
        let content = output.transpose()?.unwrap_or_default();
        self.messages.push(Message { tool_call_id, ..Message::new(MessageRole::Tool, content) });
        Ok(())
    }

    /// Keeps the reasoning if it is readable. Summaries are for people, and encrypted reasoning is from another server.
    fn reason(&mut self, at: &str, item: InputItem) -> Result<(), InvalidRequest> {
        let parts = match item.content.expecting("an array").get(at)? {
            None => return Ok(()),
            Some(ChatContent::Text(_)) => {
                return Err(InvalidRequest::at(join(at, "content"), "must be an array, but is a string"));
            }
            Some(ChatContent::Parts(parts)) => parts,
        };
        let texts: Vec<String> = parts.sound().filter_map(|part| part.text.sound()).collect();
        if !texts.is_empty() {
            self.reasoning = Some(texts.join("\n"));
        }
        Ok(())
    }

    /// Returns the assistant's current turn: the last message if the assistant wrote it, else a new one.
    fn turn(&mut self) -> &mut Message {
        if self.reasoning.is_some() || self.messages.last().is_none_or(|last| last.role != MessageRole::Assistant) {
            self.push(MessageRole::Assistant, String::new());
        }
        let at = self.messages.len() - 1;
        let message = &mut self.messages[at];
        if let Some(reasoning) = self.reasoning.take() {
            message.reasoning_content = Some(reasoning);
        }
        message
    }
}

/// Returns true if items of this type belong to tools that are not offered: calls, results and lists of tools that run on
/// OpenAI's servers, and of a client's shell.
fn is_of_other_tool(kind: &str) -> bool {
    let is_known = READ_ITEMS.contains(&kind);
    let is_of_tool = kind.ends_with("_call") || kind.ends_with("_call_output") || kind.starts_with("mcp_");
    is_of_tool && !is_known
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::request::field::Required;
    use crate::request::read::read;

    object! {
        /// Has a history.
        struct ItemsBody {
            input: Required<ResponsesInput>,
            instructions: Field<String>,
        }
    }

    fn parsed(body: &Value) -> Result<Vec<Message>, InvalidRequest> {
        let body: ItemsBody = read(body.to_string().as_bytes())?;
        let instructions = body.instructions.get("")?;
        body.input.get("")?.check(instructions.as_deref(), &ClientTools::default(), &mut Images::default())
    }

    fn check(body: Value, expected: Value) {
        assert_eq!(serde_json::to_value(parsed(&body).unwrap()).unwrap(), expected, "{body}");
    }

    fn refused(input: Value, param: &str) {
        let body = json!({ "input": input });
        assert_eq!(parsed(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
    }

    #[test]
    fn texts_and_messages_become_what_templates_read() {
        let hi = json!([{"role": "user", "content": "hi"}]);
        check(json!({"input": "hi"}), hi.clone());
        check(json!({"input": [{"role": "user", "content": "hi"}], "instructions": null}), hi.clone());
        check(
            json!({"instructions": "be brief", "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "and kind"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": "c", "annotations": []}]},
                {"role": "user", "content": "d"}]}),
            json!([{"role": "system", "content": "be brief\n\nand kind"}, {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]),
        );
    }

    #[test]
    fn the_items_of_a_turn_are_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{\"a\":1}"});
        let becomes =
            |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        check(
            json!({"input": [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": "let me see"}, call("c1"), call("c2"),
                {"type": "function_call_output", "call_id": "c1", "output": "4"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
                {"type": "reasoning", "summary": [], "encrypted_content": "xxx"},
                {"role": "assistant", "content": "nine"}]}),
            json!([{"role": "user", "content": "hi"},
                {"role": "assistant", "content": "let me see", "reasoning_content": "hm",
                    "tool_calls": [becomes("c1"), becomes("c2")]},
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
                {"role": "tool", "content": "5", "tool_call_id": "c2"},
                {"role": "assistant", "content": "nine"}]),
        );
    }

    #[test]
    fn calls_of_custom_tools_and_of_namespaces_are_calls_too() {
        let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        check(
            json!({"input": [
                {"role": "user", "content": "hi"},
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x\n", "status": "completed"},
                {"type": "function_call", "call_id": "d", "name": "read", "namespace": "mcp__a", "arguments": "{}"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
                {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "z"}]}]}),
            json!([{"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [
                    call("c", "patch", json!({"input": "x\n"})), call("d", "mcp__a__read", json!({}))]},
                {"role": "tool", "content": "y", "tool_call_id": "c"},
                {"role": "tool", "content": "z", "tool_call_id": "d"}]),
        );
    }

    #[test]
    fn items_of_skipped_tools_are_skipped() {
        check(
            json!({"input": [
                {"role": "user", "content": "hi"},
                {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
                {"type": "local_shell_call", "call_id": "d", "action": {}},
                {"type": "local_shell_call_output", "call_id": "d", "output": "z"},
                {"type": "mcp_list_tools", "server_label": "s", "tools": []},
                {"role": "assistant", "content": "hello"}]}),
            json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]),
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!(null), "input");
        refused(json!(7), "input");
        refused(json!([]), "input");
        refused(json!(["hi"]), "input[0]");
        refused(json!([{"role": "robot", "content": "x"}]), "input[0].role");
        refused(json!([{"role": "user"}]), "input[0].content");
        refused(json!([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0].image_url");
        refused(json!([{"type": "item_reference", "id": "msg_1"}]), "input[0].type");
        refused(json!([{"type": "robot_dance"}]), "input[0].type");
        refused(json!([{"type": "web_search_call"}]), "input");
        refused(json!([{"type": "function_call", "name": "f"}]), "input[0].call_id");
        refused(json!([{"type": "custom_tool_call", "call_id": "c"}]), "input[0].name");
        refused(json!([{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 7}]), "input[0].input");
        refused(json!([{"type": "function_call_output", "output": "x"}]), "input[0].call_id");
    }
}
