//! The items of a response, whole or streamed: reasoning, text, calls of functions and of custom tools.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::Serialize;

use super::client_tools::{ClientToolKind, ClientTools};
use super::custom_tool::InputReader;
use crate::openai::logprobs::TokenLogprob;
use crate::sequence::FinishReason;
use crate::tools::ToolCallDelta;

/// An item of a response.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// The model's reasoning.
    Reasoning {
        /// `rs_…`
        id: String,
        /// Always empty: reasoning is not summarized.
        summary: [(); 0],
        /// Empty, or one part.
        content: Vec<OutputPart>,
        /// Always null.
        encrypted_content: Option<()>,
        /// Whether the item is complete.
        status: OutputStatus,
    },
    /// The model's message.
    Message {
        /// `msg_…`
        id: String,
        /// Whether the item is complete.
        status: OutputStatus,
        /// Empty, or one part.
        content: Vec<OutputPart>,
        /// Always `assistant`.
        role: &'static str,
    },
    /// A call of one of the request's functions.
    FunctionCall {
        /// `fc_…`
        id: String,
        /// The id that the function's output will refer to.
        call_id: String,
        /// The function's name.
        name: String,
        /// The namespace of the function, if it is in one.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The arguments exactly as the model wrote them: JSON in a string.
        arguments: String,
        /// Whether the item is complete.
        status: OutputStatus,
    },
    /// A call of one of the request's custom tools.
    CustomToolCall {
        /// `ctc_…`
        id: String,
        /// The id that the tool's output will refer to.
        call_id: String,
        /// The tool's name.
        name: String,
        /// The namespace of the tool, if it is in one.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The text that the model gives the tool.
        input: String,
        /// Whether the item is complete.
        status: OutputStatus,
    },
}

/// Whether an item is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputStatus {
    /// More may come.
    InProgress,
    /// The item is complete.
    Completed,
    /// A limit cut it off.
    Incomplete,
}

/// A text in an item.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputPart {
    /// The text of a message.
    OutputText {
        /// Always empty.
        annotations: [(); 0],
        /// Log-probabilities of its tokens; empty unless requested.
        logprobs: Vec<TokenLogprob>,
        /// The text so far.
        text: String,
    },
    /// The text of reasoning.
    ReasoningText {
        /// The text so far.
        text: String,
    },
    /// The words with which the model of an upstream refuses to answer.
    Refusal {
        /// The text so far.
        refusal: String,
    },
}

/// The kinds of items that hold text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutputKind {
    Reasoning,
    Message,
    /// A message that is a refusal.
    Refusal,
}

impl OutputKind {
    pub(super) fn empty_part(self) -> OutputPart {
        match self {
            OutputKind::Reasoning => OutputPart::ReasoningText { text: String::new() },
            OutputKind::Refusal => OutputPart::Refusal { refusal: String::new() },
            OutputKind::Message => {
                OutputPart::OutputText { annotations: [], logprobs: Vec::new(), text: String::new() }
            }
        }
    }
}

/// The items so far. The last may be open.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The unique part of each item's id.
    stem: String,
    items: Vec<OutputItem>,
    is_open: bool,
    /// The names by which the client knows the tools.
    tools: ClientTools,
    /// Reads the open call of a custom tool.
    input: InputReader,
}

impl Output {
    /// Creates an empty output. Ids of items end with `stem` and the item's index.
    pub fn new(stem: String, tools: ClientTools) -> Self {
        Output { stem, items: Vec::new(), is_open: false, tools, input: InputReader::default() }
    }

    /// Adds text, with the log-probabilities of its tokens if requested.
    ///
    /// Tokens without text are markup. Their log-probabilities are kept inside a message and dropped between items.
    pub fn text(&mut self, delta: &str, logprobs: &[TokenLogprob]) {
        if !self.is_in(OutputKind::Message) {
            if delta.is_empty() {
                return;
            }
            self.turn_to(OutputKind::Message);
        }
        if let Some(OutputPart::OutputText { text, logprobs: all, .. }) = self.part() {
            text.push_str(delta);
            all.extend_from_slice(logprobs);
        }
    }

    /// Adds to the model's reasoning.
    pub fn reasoning(&mut self, delta: &str) {
        if !self.is_in(OutputKind::Reasoning) {
            self.turn_to(OutputKind::Reasoning);
        }
        if let Some(OutputPart::ReasoningText { text }) = self.part() {
            text.push_str(delta);
        }
    }

    /// Adds to a refusal.
    pub fn refusal(&mut self, delta: &str) {
        if !self.is_in(OutputKind::Refusal) {
            self.turn_to(OutputKind::Refusal);
        }
        if let Some(OutputPart::Refusal { refusal }) = self.part() {
            refusal.push_str(delta);
        }
    }

    /// Adds a step of a call.
    pub fn call(&mut self, step: &ToolCallDelta) {
        self.add_to_call(step);
        if matches!(step, ToolCallDelta::End { .. }) {
            self.close(OutputStatus::Completed);
        }
    }

    /// Adds a step of a call, and leaves its item open. Returns the text that the step adds: arguments of a function, or
    /// input of a custom tool.
    pub(super) fn add_to_call<'s>(&mut self, step: &'s ToolCallDelta) -> Cow<'s, str> {
        match step {
            ToolCallDelta::Begin { id, name, .. } => self.begin_call(id, name),
            ToolCallDelta::Arguments { fragment, .. } => match self.items.last_mut() {
                Some(OutputItem::FunctionCall { arguments, .. }) => {
                    arguments.push_str(fragment);
                    return fragment.into();
                }
                Some(OutputItem::CustomToolCall { input, .. }) => {
                    let more = self.input.feed(fragment);
                    input.push_str(&more);
                    return more.into();
                }
                _ => {}
            },
            ToolCallDelta::End { .. } => {
                if let Some(OutputItem::CustomToolCall { input, .. }) = self.items.last_mut() {
                    let rest = self.input.finish();
                    input.push_str(&rest);
                    return rest.into();
                }
            }
        }
        Cow::Borrowed("")
    }

    fn begin_call(&mut self, call_id: &str, name: &str) {
        self.close(OutputStatus::Completed);
        let (call_id, status) = (call_id.to_owned(), OutputStatus::InProgress);
        let client = self.tools.get(name);
        let namespace = client.and_then(|tool| tool.namespace.clone());
        let name = client.map_or(name, |tool| &tool.name).to_owned();
        let item = match client.map_or(ClientToolKind::Function, |tool| tool.kind) {
            ClientToolKind::Function => {
                let (id, arguments) = (self.new_id("fc"), String::new());
                OutputItem::FunctionCall { id, call_id, name, namespace, arguments, status }
            }
            ClientToolKind::Custom => {
                self.input = InputReader::default();
                let (id, input) = (self.new_id("ctc"), String::new());
                OutputItem::CustomToolCall { id, call_id, name, namespace, input, status }
            }
        };
        self.items.push(item);
        self.is_open = true;
    }

    /// Ends the output. A response without output gets one empty message.
    pub fn finish(&mut self, reason: FinishReason) {
        if self.items.is_empty() {
            self.open_message();
        }
        self.close(last_status(reason));
    }

    /// Returns the items.
    pub fn into_items(self) -> Vec<OutputItem> {
        self.items
    }

    /// The items so far.
    pub fn items(&self) -> &[OutputItem] {
        &self.items
    }

    /// Opens an empty message.
    pub(super) fn open_message(&mut self) {
        self.turn_to(OutputKind::Message);
    }

    /// Returns true if the open item is of this kind.
    pub(super) fn is_in(&self, kind: OutputKind) -> bool {
        self.is_open && self.kind() == Some(kind)
    }

    /// Returns the kind of the last item, if it holds text.
    pub(super) fn kind(&self) -> Option<OutputKind> {
        let (OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. }) = self.items.last()? else {
            return None;
        };
        Some(match content.last()? {
            OutputPart::ReasoningText { .. } => OutputKind::Reasoning,
            OutputPart::OutputText { .. } => OutputKind::Message,
            OutputPart::Refusal { .. } => OutputKind::Refusal,
        })
    }

    /// Returns the index and the id of the last item.
    pub(super) fn place(&self) -> (usize, &str) {
        (self.items.len().saturating_sub(1), self.items.last().map(OutputItem::id).unwrap_or_default())
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Closes the open item and opens one of this kind, with an empty part.
    fn turn_to(&mut self, kind: OutputKind) {
        self.close(OutputStatus::Completed);
        let status = OutputStatus::InProgress;
        let content = vec![kind.empty_part()];
        self.items.push(match kind {
            OutputKind::Reasoning => {
                OutputItem::Reasoning { id: self.new_id("rs"), summary: [], content, encrypted_content: None, status }
            }
            OutputKind::Message | OutputKind::Refusal => {
                OutputItem::Message { id: self.new_id("msg"), status, content, role: "assistant" }
            }
        });
        self.is_open = true;
    }

    /// Closes the open item, if there is one.
    pub(super) fn close(&mut self, end: OutputStatus) {
        if std::mem::replace(&mut self.is_open, false)
            && let Some(last) = self.items.last_mut()
        {
            let (OutputItem::Reasoning { status, .. }
            | OutputItem::Message { status, .. }
            | OutputItem::FunctionCall { status, .. }
            | OutputItem::CustomToolCall { status, .. }) = last;
            *status = end;
        }
    }

    fn part(&mut self) -> Option<&mut OutputPart> {
        match self.items.last_mut() {
            Some(OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. }) => content.last_mut(),
            Some(OutputItem::FunctionCall { .. } | OutputItem::CustomToolCall { .. }) | None => None,
        }
    }

    fn new_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.stem, self.items.len())
    }
}

/// Returns the status of an item that is open when the response ends for this reason.
pub(super) fn last_status(reason: FinishReason) -> OutputStatus {
    match reason {
        FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Refusal => OutputStatus::Completed,
        FinishReason::Length | FinishReason::ContentFilter => OutputStatus::Incomplete,
    }
}

impl OutputItem {
    /// The id that other events refer to.
    pub(super) fn id(&self) -> &str {
        let (OutputItem::Reasoning { id, .. }
        | OutputItem::Message { id, .. }
        | OutputItem::FunctionCall { id, .. }
        | OutputItem::CustomToolCall { id, .. }) = self;
        id
    }

    /// Returns the item as it was when it began.
    pub(super) fn begun(&self) -> OutputItem {
        let mut begun = self.clone();
        match &mut begun {
            OutputItem::Reasoning { content, status, .. } | OutputItem::Message { content, status, .. } => {
                content.clear();
                *status = OutputStatus::InProgress;
            }
            OutputItem::FunctionCall { arguments: text, status, .. }
            | OutputItem::CustomToolCall { input: text, status, .. } => {
                text.clear();
                *status = OutputStatus::InProgress;
            }
        }
        begun
    }
}
