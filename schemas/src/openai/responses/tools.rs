//! `tools`, `tool_choice` and `parallel_tool_calls` of a response.

use serde_json::{Value, json};

use super::client_tools::{ClientTool, ClientToolKind, ClientTools};
use super::custom_tool::{CustomFormat, CustomTool};
use crate::grammar::WriteBudget;
use crate::request::InvalidRequest;
use crate::request::echoed::Echoed;
use crate::request::field::{Field, Items, Required, join, object};
use crate::request::invalid::quoted;
use crate::request::schema::Variant;
use crate::request::tool_choice::{ALLOWED, AllowedMode, CHOICE, ToolChoiceBody, wrong_choice};
use crate::request::tools::{
    Allowed, ChatTool, DefinedTools, Definition, Function, ToolFields, ToolName, check_defined, keep_allowed,
};
use crate::request::values::Word;
use crate::tools::{HostedTool, MAX_TOOLS, Strictness, Tool, ToolChoice, ToolNames, ToolUse, ToolsError, is_name};

object! {
    /// The tools of a response.
    pub(crate) struct ResponseToolsBody {
        /// The tools that the model may call.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Field<Items<ResponseTool>>,
        /// Which of the tools the model must call.
        tool_choice: Field<Echoed<ToolChoiceBody<ResponseChosenTools>>>,
        /// Allows several calls in one reply.
        parallel_tool_calls: Field<bool>,
    }
}

object! {
    /// A tool of `/v1/responses`. Tools that run on OpenAI's servers are skipped.
    pub(crate) struct ResponseTool {
        /// `function`, `custom`, `namespace`, or the type of a tool that is skipped.
        r#type: Field<String>,
        /// The tool that the client runs.
        #[schemars(flatten)]
        own: OwnTool,
        /// The tools of the namespace.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Field<Items<NamespaceTool>>,
        #[schemars(skip)]
        execution: Field<String>,
    }
    by "type" {
        Variant {
        words: &["function"], is_default: true, needs: &["name"],
        may_have: &["description", "parameters", "strict"], ..Variant::NEW
        },
        Variant { words: &["custom"], needs: &["name"], may_have: &["description", "format"], ..Variant::NEW },
        Variant { words: &["namespace"], needs: &["name", "tools"], may_have: &["description"], ..Variant::NEW },
        Variant {
        words: &[
            "web_search", "web_search_preview", "file_search", "code_interpreter", "mcp", "image_generation",
            "computer_use_preview", "tool_search",
        ],
        ..Variant::NEW
        },
    }
    skipped by ResponseTool::is_hosted
}

impl ResponseTool {
    fn is_hosted(&self) -> bool {
        self.r#type.peek().is_some_and(|kind| HostedTool::of_openai(kind).is_some())
    }
}

object! {
    /// A tool of a namespace.
    pub(crate) struct NamespaceTool {
        /// `function` or `custom`.
        r#type: Field<String>,
        /// The tool.
        #[schemars(flatten)]
        own: OwnTool,
    }
    by "type" {
        Variant {
        words: &["function"], is_default: true, needs: &["name"],
        may_have: &["description", "parameters", "strict"], ..Variant::NEW
        },
        Variant { words: &["custom"], needs: &["name"], may_have: &["description", "format"], ..Variant::NEW },
    }
}

object! {
    /// A tool that the client runs.
    pub(crate) struct OwnTool {
        /// The function, or the name and the description of another tool.
        #[schemars(flatten)]
        function: Function,
        /// The form of the text that the model gives a custom tool.
        format: Field<Echoed<CustomFormat>>,
    }
}

object! {
    /// Requires a call of one tool in `tools`, or allows only some of them.
    pub(crate) struct ResponseChosenTools {
        /// The kind of choice.
        r#type: Field<String>,
        /// The tool to call.
        name: Field<ToolName>,
        /// The namespace of the tool to call.
        namespace: Field<ToolName>,
        /// With `allowed_tools`, `required`: the reply must call one of them.
        mode: Field<Word<AllowedMode>>,
        /// The allowed tools.
        #[schemars(length(min = 1))]
        tools: Field<Items<ResponseToolNamed>>,
    }
    by "type" {
        Variant { words: &["function", "custom"], needs: &["name"], ..Variant::NEW },
        Variant { words: &["allowed_tools"], needs: &["tools"], may_have: &["mode"], ..Variant::NEW },
    }
}

object! {
    /// Names a tool.
    pub(crate) struct ResponseToolNamed {
        /// Its name.
        name: Required<ToolName>,
        /// Its namespace.
        #[schemars(skip)]
        namespace: Field<ToolName>,
    }
}

/// The checked tools of a response.
pub(super) struct ResponseTools {
    pub(super) tools: ToolUse,
    /// The client's names of the tools.
    pub(super) client: ClientTools,
    /// `tool_choice` as the client wrote it.
    pub(super) choice: Value,
}

/// The fields of this dialect.
const FORM: ToolFields = ChatTool::FORM;

impl ResponseToolsBody {
    /// Checks the tools and the choice among them. Errors: a tool runs at the client in a form that cannot be offered.
    pub(super) fn check(self) -> Result<ResponseTools, InvalidRequest> {
        let parallel = self.parallel_tool_calls.get("")?.unwrap_or(true);
        let mut read = ReadTools::default();
        for tool in self.tools.get("")?.unwrap_or_default().each(FORM.list) {
            let (at, tool) = tool?;
            read.add(&at, tool)?;
        }
        let ReadTools { mut defined, mut client, .. } = read;
        client.name_in(&mut defined.tools);
        let mut allowed = None;
        let (choice, written) = match self.tool_choice.get("")? {
            None => (ToolChoice::Auto, "auto".into()),
            Some(Echoed { read: ToolChoiceBody::Word(choice), written }) => (choice, written),
            Some(Echoed { read: ToolChoiceBody::Object(chosen), written }) => {
                match chosen.r#type.get(CHOICE)?.as_deref() {
                    Some("function" | "custom") => {
                        let name = chosen.name.get(CHOICE)?.ok_or_else(wrong_choice)?;
                        let namespace = chosen.namespace.get(CHOICE)?;
                        (ToolChoice::Named(client.chosen(&name.0, namespace.as_ref().map(|name| &*name.0))), written)
                    }
                    Some(ALLOWED) => {
                        let choice = chosen.mode.get(CHOICE)?.map_or(ToolChoice::Auto, |mode| mode.0.into());
                        let named = chosen.tools.get(CHOICE)?.unwrap_or_default().sound().filter_map(|named| {
                            Some((named.name.sound()?.0, named.namespace.sound().map(|namespace| namespace.0)))
                        });
                        let names = named.map(|(name, space)| client.chosen(&name, space.as_deref())).collect();
                        allowed = Some(Allowed { choice, names, field: join(CHOICE, "tools") });
                        (ToolChoice::Auto, written)
                    }
                    Some("namespace") => {
                        let problem = "a choice names a tool of a namespace: {\"type\": \"function\", \"name\": …, \"namespace\": …}";
                        return Err(InvalidRequest::at(CHOICE, problem));
                    }
                    Some(other) => {
                        let what =
                            format!("Choosing a tool of type {}, which runs on OpenAI's servers,", quoted(other));
                        return Err(InvalidRequest::unsupported(CHOICE, what));
                    }
                    None => return Err(wrong_choice()),
                }
            }
        };
        let mut tools = check_defined(defined, FORM, choice, parallel)?;
        if let Some(allowed) = allowed {
            tools = keep_allowed(tools, allowed)?;
        }
        Ok(ResponseTools { tools, client, choice: written })
    }
}

/// The tools that are read so far.
#[derive(Default)]
struct ReadTools {
    defined: DefinedTools,
    /// The client's form of each tool, in the same order.
    client: ClientTools,
    /// What the grammars of custom tools may be written as.
    budget: WriteBudget,
}

impl ReadTools {
    fn add(&mut self, at: &str, tool: ResponseTool) -> Result<(), InvalidRequest> {
        let kind = tool.r#type.get(at)?;
        match kind.as_deref() {
            None | Some("function") => self.function(at, tool.own.function, None),
            Some("custom") => self.custom(at, tool.own, None),
            Some("namespace") => {
                let OwnTool { function, .. } = tool.own;
                let namespace = function.tool(at, Strictness::Loose)?;
                if !is_name(&namespace.name) {
                    return Err(InvalidRequest::at(
                        join(at, "name"),
                        ToolsError::Name { index: 0, names: ToolNames::Plain },
                    ));
                }
                self.namespace(at, &namespace, tool.tools.required("tools", at)?)
            }
            // The client would search tools that it did not send.
            Some("tool_search") if tool.execution.get(at)?.as_deref() == Some("client") => {
                Err(InvalidRequest::unsupported(join(at, "execution"), "A search for tools that runs at the client"))
            }
            Some(kind) => self.defined.skip(kind, HostedTool::of_openai(kind), at),
        }
    }

    fn namespace(&mut self, at: &str, space: &Tool, tools: Items<NamespaceTool>) -> Result<(), InvalidRequest> {
        let first = self.defined.tools.len();
        for tool in tools.each(&join(at, "tools")) {
            let (at, tool) = tool?;
            match tool.r#type.get(&at)?.as_deref() {
                None | Some("function") => self.function(&at, tool.own.function, Some(&space.name))?,
                Some("custom") => self.custom(&at, tool.own, Some(&space.name))?,
                Some(kind) => {
                    let what = format_args!("A tool of type {} in a namespace", quoted(kind)).to_string();
                    return Err(InvalidRequest::unsupported(join(&at, "type"), what));
                }
            }
        }
        let about = space.description.as_deref().filter(|about| !about.trim().is_empty());
        self.client.describe(&space.name, about.unwrap_or_default());
        // Templates describe single functions, so the first one of a namespace describes it, too.
        if let (Some(about), Some(tool)) = (about, self.defined.tools.get_mut(first)) {
            let own = tool.description.take().unwrap_or_default();
            tool.description = Some(format!("{own}\n\n{}: {about}", space.name).trim().to_owned());
        }
        Ok(())
    }

    /// In this dialect, functions are strict by default.
    fn function(&mut self, at: &str, function: Function, namespace: Option<&str>) -> Result<(), InvalidRequest> {
        let tool = function.tool(at, Strictness::IfKnown)?;
        let shown = shown_function(&tool);
        self.push(at, tool, ClientTool::new(namespace, ClientToolKind::Function, shown))
    }

    fn custom(&mut self, at: &str, own: OwnTool, namespace: Option<&str>) -> Result<(), InvalidRequest> {
        let OwnTool { function, format } = own;
        let function = function.tool(at, Strictness::Loose)?;
        let (format, written) = match format.get(at)? {
            Some(Echoed { read, written }) => (Some(read), written),
            None => (None, json!({ "type": "text" })),
        };
        let shown = json!({
            "type": "custom", "name": function.name, "description": function.description, "format": written,
        });
        let form = CustomTool::check(&join(at, "format"), format, &mut self.budget)?;
        let tool = form.tool(function.name, function.description);
        self.push(at, tool, ClientTool::new(namespace, ClientToolKind::Custom, shown))
    }

    fn push(&mut self, at: &str, tool: Tool, client: ClientTool) -> Result<(), InvalidRequest> {
        let wrong = |error: ToolsError| Err(InvalidRequest::at(join(at, "name"), error));
        if !is_name(&tool.name) {
            return wrong(ToolsError::Name { index: 0, names: ToolNames::Plain });
        }
        if self.defined.tools.len() == MAX_TOOLS {
            return Err(InvalidRequest::at(FORM.list, ToolsError::TooMany { n: MAX_TOOLS + 1 }));
        }
        if !self.client.push(ClientTool { name: tool.name.clone(), ..client }) {
            return wrong(ToolsError::Duplicate { index: 0 });
        }
        self.defined.push(tool, at);
        Ok(())
    }
}

/// Returns a function as replies repeat it. `strict` is null if the client did not send it: whether the engine can
/// enforce the schema is known only later.
fn shown_function(tool: &Tool) -> Value {
    json!({
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": match tool.strict {
            Strictness::Loose => Some(false),
            Strictness::IfKnown => None,
            Strictness::Strict => Some(true),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::read::read;

    fn checked(body: &Value) -> Result<ResponseTools, InvalidRequest> {
        read::<ResponseToolsBody>(body.to_string().as_bytes()).and_then(ResponseToolsBody::check)
    }

    fn parsed(body: Value) -> Result<ToolUse, String> {
        checked(&body).map(|tools| tools.tools).map_err(|error| error.param.unwrap_or_default())
    }

    fn tools() -> Value {
        json!([{"type": "web_search"}, {"type": "function", "name": "f", "description": "d", "strict": true,
            "parameters": {"type": "object"}}, {"type": "function", "name": "g"},
            {"type": "function", "name": "h", "strict": false}])
    }

    fn names(tools: &ToolUse) -> Vec<&str> {
        tools.tools.iter().map(|tool| &*tool.name).collect()
    }

    #[test]
    fn functions_stand_flat_and_tools_of_openais_servers_are_skipped() {
        let mut all = checked(&json!({ "tools": tools(), "parallel_tool_calls": false })).unwrap();
        assert_eq!(names(&all.tools), ["f", "g", "h"]);
        assert!(!all.tools.parallel);
        let shown = all.client.take_shown(&all.tools.tools);
        let strict: Vec<_> =
            all.tools.tools.iter().zip(&shown).map(|(tool, shown)| (tool.strict, &shown["strict"])).collect();
        use Strictness::{IfKnown, Loose, Strict};
        assert_eq!(strict, [(Strict, &json!(true)), (IfKnown, &json!(null)), (Loose, &json!(false))]);
        assert_eq!(
            shown[0],
            json!({"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true})
        );
        let hosted = json!([{"type": "web_search_preview_2025_03_11"}, {"type": "mcp"}, {"type": "web_search"},
            {"type": "computer_use_preview"}, {"type": "tool_search"}]);
        let skipped = parsed(json!({ "tools": hosted })).unwrap();
        use HostedTool::{ComputerUse, Mcp, ToolSearch, WebSearch};
        assert_eq!((skipped.tools.len(), skipped.skipped), (0, vec![WebSearch, Mcp, ComputerUse, ToolSearch]));
    }

    #[test]
    fn a_choice_is_a_word_a_function_or_some_of_them() {
        let of = |choice: Value| parsed(json!({ "tools": tools(), "tool_choice": choice }));
        assert_eq!(of(json!("required")).unwrap().choice, ToolChoice::Required);
        assert_eq!(of(json!({"type": "function", "name": "g"})).unwrap().choice, ToolChoice::Named("g".into()));
        let g = json!([{"type": "function", "name": "g"}]);
        let some = of(json!({"type": "allowed_tools", "mode": "required", "tools": g})).unwrap();
        assert_eq!((some.choice, &*some.tools[0].name, some.tools.len()), (ToolChoice::Required, "g", 1));
        assert_eq!(of(json!("always")), Err("tool_choice".into()));
        assert_eq!(of(json!({"type": "function", "name": "i"})), Err("tool_choice".into()));
        assert_eq!(of(json!({"type": "file_search"})), Err("tool_choice".into()));
        assert_eq!(of(json!({"type": "allowed_tools", "tools": []})), Err("tool_choice.tools".into()));
        assert_eq!(
            parsed(json!({ "tools": [{"type": "web_search"}], "tool_choice": "required" })),
            Err("tool_choice".into())
        );
        let second = json!([{"type": "web_search"}, {"type": "function", "name": "a b"}]);
        assert_eq!(parsed(json!({ "tools": second })), Err("tools[1].name".into()));
    }

    fn namespaces() -> Value {
        json!([
            {"type": "namespace", "name": "mcp__a", "description": "Files.", "tools": [
                {"type": "function", "name": "read", "description": "Reads.", "parameters": {"type": "object"}},
                {"type": "custom", "name": "patch"}]},
            {"type": "namespace", "name": "mcp__b__", "description": "", "tools": [{"type": "function", "name": "read"}]},
            {"type": "function", "name": "mcp__b__read"}, {"type": "function", "name": "read"}])
    }

    #[test]
    fn tools_of_namespaces_have_unique_names_and_keep_those_of_the_client() {
        let mut all = checked(&json!({ "tools": namespaces() })).unwrap();
        assert_eq!(names(&all.tools), ["mcp__a__read", "mcp__a__patch", "mcp__b__read_2", "mcp__b__read", "read"]);
        assert_eq!(all.tools.tools[0].description.as_deref(), Some("Reads.\n\nmcp__a: Files."));
        let client = |name: &str| all.client.get(name).map(|tool| (&*tool.name, tool.namespace.as_deref(), tool.kind));
        use ClientToolKind::{Custom, Function};
        assert_eq!(client("mcp__b__read_2"), Some(("read", Some("mcp__b__"), Function)));
        assert_eq!(client("mcp__b__read"), Some(("mcp__b__read", None, Function)));
        assert_eq!(client("mcp__a__patch"), Some(("patch", Some("mcp__a"), Custom)));
        assert_eq!(all.client.name_of("read", Some("mcp__b__")), "mcp__b__read_2");
        assert_eq!(all.client.name_of("gone", Some("mcp__a")), "mcp__a__gone");
        let shown = all.client.take_shown(&all.tools.tools);
        let of = |shown: &Value| (shown["name"].clone(), shown["tools"].as_array().map_or(0, Vec::len));
        let expected = [("mcp__a", 2), ("mcp__b__", 1), ("mcp__b__read", 0), ("read", 0)];
        assert_eq!(shown.iter().map(of).collect::<Vec<_>>(), expected.map(|(name, n)| (json!(name), n)));
        assert_eq!(
            (&shown[0]["description"], &shown[0]["tools"][0]["description"]),
            (&json!("Files."), &json!("Reads."))
        );
        let chosen =
            |choice: Value| parsed(json!({ "tools": namespaces(), "tool_choice": choice })).map(|tools| tools.choice);
        let named = |name: &str| Ok(ToolChoice::Named(name.to_owned()));
        assert_eq!(chosen(json!({"type": "custom", "name": "patch"})), named("mcp__a__patch"));
        let of_b = json!({"type": "function", "name": "read", "namespace": "mcp__b__"});
        assert_eq!(chosen(of_b), named("mcp__b__read_2"));
        assert_eq!(chosen(json!({"type": "function", "name": "read"})), named("read"));
        // A long name is cut, and stays unique.
        let long = |end: &str| {
            json!({"type": "namespace", "name": "n".repeat(120), "tools": [
            {"type": "function", "name": format!("{}{end}", "t".repeat(20))}]})
        };
        let tools = parsed(json!({ "tools": [long("a"), long("b")] })).unwrap();
        assert!(tools.tools.iter().all(|tool| tool.name.len() == 128) && tools.tools[1].name.ends_with("t_2"));
    }

    #[test]
    fn a_custom_tool_is_a_function_of_one_text() {
        let of = |format: Value| {
            let tool = json!({"type": "custom", "name": "patch", "description": "d", "format": format});
            checked(&json!({ "tools": [tool] }))
        };
        let any = of(json!({"type": "text"})).unwrap();
        assert_eq!((any.tools.tools[0].strict, &any.tools.tools[0].held), (Strictness::IfKnown, &None));
        let grammar =
            |syntax: &str, definition: &str| json!({"type": "grammar", "syntax": syntax, "definition": definition});
        let mut held = of(grammar("lark", "start: \"a\"+")).unwrap();
        let tool = &held.tools.tools[0];
        assert_eq!(tool.held()["properties"]["input"]["pattern"], "^(?:(?:(?:a)){1,})$");
        assert_eq!(tool.parameters["properties"]["input"], json!({"type": "string"}));
        assert!(tool.description.as_ref().unwrap().ends_with("follows this Lark grammar:\nstart: \"a\"+"));
        assert_eq!(held.client.take_shown(&held.tools.tools)[0]["format"], grammar("lark", "start: \"a\"+"));
        let regex = of(grammar("regex", "^[a-z]+$")).unwrap();
        assert_eq!(regex.tools.tools[0].held()["properties"]["input"]["pattern"], "^(?:[a-z]+)$");
        let refused = |format: Value| of(format).err().and_then(|error| error.param).unwrap();
        assert_eq!(refused(json!({"type": "xml"})), "tools[0].format.type");
        assert_eq!(refused(json!({"type": "grammar", "syntax": "lark"})), "tools[0].format.definition");
        assert_eq!(refused(grammar("gbnf", "x")), "tools[0].format.syntax");
        assert_eq!(refused(grammar("lark", "start: start")), "tools[0].format.definition");
        // A short grammar may be a long pattern, but all of a request are bounded together.
        let long = grammar("lark", &format!("start: {}\nA: \"{}\"", "A ".repeat(30), "x".repeat(2_000)));
        let all = |n: usize| {
            let tool = |i: usize| json!({"type": "custom", "name": format!("t{i}"), "format": long});
            parsed(json!({ "tools": (0..n).map(tool).collect::<Vec<_>>() })).map(|tools| tools.tools.len())
        };
        assert_eq!((all(8), all(20)), (Ok(8), Err("tools[17].format.definition".to_owned())));
    }

    #[test]
    fn a_tool_that_cannot_be_offered_is_named() {
        let refused = |tool: Value| {
            let error = checked(&json!({ "tools": [tool] })).err().unwrap();
            (error.param.unwrap_or_default(), error.message)
        };
        let (param, message) = refused(json!({"type": "local_shell"}));
        assert_eq!(param, "tools[0].type");
        assert!(message.contains("local_shell"), "{message}");
        assert_eq!(refused(json!({"type": "tool_search", "execution": "client"})).0, "tools[0].execution");
        let space = |tools: Value| json!({"type": "namespace", "name": "n", "tools": tools});
        assert_eq!(refused(space(json!([{"type": "namespace", "name": "m"}]))).0, "tools[0].tools[0].type");
        assert_eq!(refused(space(json!([{"type": "function", "name": "a b"}]))).0, "tools[0].tools[0].name");
        let twice = json!([{"type": "function", "name": "a"}, {"type": "custom", "name": "a"}]);
        assert_eq!(refused(space(twice)).0, "tools[0].tools[1].name");
        assert_eq!(refused(json!({"type": "namespace", "name": "a b", "tools": []})).0, "tools[0].name");
        assert_eq!(refused(json!({"type": "namespace", "name": "a"})).0, "tools[0].tools");
        let many = vec![json!({"type": "function", "name": "a"}); 3];
        assert_eq!(refused(space(json!(many))).0, "tools[0].tools[1].name");
    }
}
