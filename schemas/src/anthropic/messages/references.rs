//! Tools that are loaded in mid-conversation: a client's own search returns `tool_reference` blocks, as Claude Code's does
//! for the tools of MCP servers.

use std::collections::HashMap;

use crate::tools::{Described, HostedTool, Tool, ToolChoice, ToolUse};
use crate::written_number::AsWritten;

/// The tools of a request, to which results of calls may refer.
pub(in crate::anthropic) struct ToolReferences {
    tools: ToolUse,
    /// The index of each tool by its name.
    places: HashMap<String, usize>,
    is_loaded: Vec<bool>,
}

impl ToolReferences {
    pub(in crate::anthropic) fn new(mut tools: ToolUse) -> Self {
        // Nobody here runs Anthropic's own search, so its tools could never be loaded.
        if tools.skipped.contains(&HostedTool::ToolSearch) {
            let in_list = |tool: &Tool| Tool { described: Described::InList, ..tool.clone() };
            tools.tools = tools.tools.iter().map(in_list).collect();
        }
        let places = tools.tools.iter().enumerate().map(|(idx, tool)| (tool.name.clone(), idx)).collect();
        let is_loaded = vec![false; tools.tools.len()];
        ToolReferences { tools, places, is_loaded }
    }

    /// Loads a tool and returns its description, in the words of Claude Code's search. Only the first reference to a tool
    /// describes it, so the prompt is no larger than the request.
    pub(super) fn load(&mut self, name: &str) -> String {
        let Some(&idx) = self.places.get(name) else { return format!("There is no tool {name}.") };
        if std::mem::replace(&mut self.is_loaded[idx], true) {
            return format!("{name} is loaded already.");
        }
        format!("<function>{}</function>", AsWritten(&self.tools.tools[idx].definition()["function"]))
    }

    /// Returns the tools that the model may call: those in the list, and those that a reference has loaded. A tool that the
    /// choice names is added to the list. Without any other tool, all are loaded.
    pub(in crate::anthropic) fn into_tools(self) -> ToolUse {
        let ToolReferences { mut tools, is_loaded, .. } = self;
        if tools.tools.iter().all(|tool| tool.described == Described::InHistory) {
            return tools;
        }
        let named = match &tools.choice {
            ToolChoice::Named(name) => Some(name.clone()),
            _ => None,
        };
        let mut is_loaded = is_loaded.into_iter();
        let offered = tools.tools.iter().filter_map(|tool| {
            let is_loaded = is_loaded.next().unwrap_or(false);
            let is_added = !is_loaded && named.as_ref() == Some(&tool.name);
            let described = if is_added { Described::InList } else { tool.described };
            (is_loaded || described == Described::InList).then(|| Tool { described, ..tool.clone() })
        });
        tools.tools = offered.collect();
        tools
    }
}
