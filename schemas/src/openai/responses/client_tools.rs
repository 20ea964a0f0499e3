//! The tools of a response as the client knows them. The model sees one list of functions with unique names; the client
//! has functions and custom tools, some of them in namespaces.

use serde_json::{Value, json};

use crate::tools::{MAX_NAME_CHARS, Tool};

/// The client's name for a tool.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ClientTool {
    pub(super) name: String,
    pub(super) namespace: Option<String>,
    pub(super) kind: ClientToolKind,
    /// The definition that replies repeat, until [`ClientTools::take_shown`] takes it.
    pub(super) shown: Value,
}

impl ClientTool {
    /// A tool whose name is not checked yet.
    pub(super) fn new(namespace: Option<&str>, kind: ClientToolKind, shown: Value) -> Self {
        ClientTool { name: String::new(), namespace: namespace.map(str::to_owned), kind, shown }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientToolKind {
    Function,
    Custom,
}

/// The client's tools, and the name of each in the model's list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClientTools {
    tools: Vec<ClientTool>,
    /// The names in the model's list, in the same order.
    names: Vec<String>,
    /// The namespaces and what they are for.
    namespaces: Vec<(String, String)>,
}

impl ClientTools {
    /// Adds a tool. Returns false if its namespace has one of this name.
    pub(super) fn push(&mut self, tool: ClientTool) -> bool {
        let is_new = self.find(&tool.name, tool.namespace.as_deref()).is_none();
        if is_new {
            self.tools.push(tool);
        }
        is_new
    }

    /// Adds a namespace.
    pub(super) fn describe(&mut self, namespace: &str, about: &str) {
        if !self.namespaces.iter().any(|(name, _)| name == namespace) {
            self.namespaces.push((namespace.to_owned(), about.to_owned()));
        }
    }

    /// Gives each tool a unique name in the model's list, which has the tools in the same order. A tool without a namespace
    /// keeps its name.
    pub(super) fn name_in(&mut self, tools: &mut [Tool]) {
        let mut taken: Vec<String> =
            self.tools.iter().filter(|tool| tool.namespace.is_none()).map(|tool| tool.name.clone()).collect();
        for (client, tool) in self.tools.iter().zip(tools) {
            if let Some(namespace) = &client.namespace {
                tool.name = unique(&joined(namespace, &client.name), &taken);
                taken.push(tool.name.clone());
            }
            self.names.push(tool.name.clone());
        }
    }

    /// Returns the name in the model's list of a tool that the history names. A tool that is no longer offered gets the
    /// name that it would have.
    pub(super) fn name_of(&self, name: &str, namespace: Option<&str>) -> String {
        match (self.find(name, namespace).and_then(|at| self.names.get(at)), namespace) {
            (Some(known), _) => known.clone(),
            (None, Some(namespace)) => joined(namespace, name),
            (None, None) => name.to_owned(),
        }
    }

    /// Returns the name in the model's list of a tool that a choice names. Choices of some clients leave out the
    /// namespace.
    pub(super) fn chosen(&self, name: &str, namespace: Option<&str>) -> String {
        let only_by_name = || {
            let mut of_name = (0..self.tools.len()).filter(|at| self.tools[*at].name == name);
            of_name.next().filter(|_| namespace.is_none() && of_name.next().is_none())
        };
        let found = self.find(name, namespace).or_else(only_by_name).and_then(|at| self.names.get(at));
        found.cloned().unwrap_or_else(|| name.to_owned())
    }

    /// Returns the client's tool with this name in the model's list.
    pub(super) fn get(&self, name: &str) -> Option<&ClientTool> {
        self.position(name).and_then(|at| self.tools.get(at))
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|known| known == name).filter(|at| *at < self.tools.len())
    }

    /// Takes the definitions out, and returns those of these tools as replies repeat them. Those of a namespace stand where its
    /// first one does.
    pub(super) fn take_shown(&mut self, tools: &[Tool]) -> Vec<Value> {
        let mut definitions: Vec<Value> = self.tools.iter_mut().map(|tool| tool.shown.take()).collect();
        let mut all: Vec<Value> = Vec::new();
        for at in tools.iter().filter_map(|tool| self.position(&tool.name)) {
            let shown = definitions[at].take();
            let Some(namespace) = &self.tools[at].namespace else {
                all.push(shown);
                continue;
            };
            let is_it = |one: &&mut Value| one["type"] == "namespace" && one["name"] == **namespace;
            match all.iter_mut().find(is_it).and_then(|one| one["tools"].as_array_mut()) {
                Some(tools) => tools.push(shown),
                None => {
                    let about = self.namespaces.iter().find(|(name, _)| name == namespace).map(|(_, about)| about);
                    all.push(json!({ "type": "namespace", "name": namespace, "description": about, "tools": [shown] }));
                }
            }
        }
        all
    }

    fn find(&self, name: &str, namespace: Option<&str>) -> Option<usize> {
        self.tools.iter().position(|tool| tool.name == name && tool.namespace.as_deref() == namespace)
    }
}

/// The name that models know from the clients of MCP servers: `mcp__server__tool`.
fn joined(namespace: &str, name: &str) -> String {
    let by = if namespace.ends_with("__") { "" } else { "__" };
    format!("{namespace}{by}{name}")
}

/// Returns the name, shortened and numbered so that it is not taken.
fn unique(name: &str, taken: &[String]) -> String {
    let numbered = (2..).map(|n| {
        let number = format!("_{n}");
        format!("{}{number}", &name[..name.len().min(MAX_NAME_CHARS - number.len())])
    });
    let first = name[..name.len().min(MAX_NAME_CHARS)].to_owned();
    std::iter::once(first).chain(numbered).find(|name| !taken.contains(name)).unwrap_or_default()
}
