//! What a response puts out, item by item: reasoning, text, calls of functions. The same for whole and streamed ones.

use schemars::JsonSchema;
use serde::Serialize;

use crate::openai::logprobs::TokenLogprob;
use crate::sequence::FinishReason;
use crate::tools::ToolCallDelta;

/// An item of a response.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// What the model thought before it went on.
    Reasoning {
        /// `rs_…`
        id: String,
        /// Always empty: reasoning is not summarised.
        summary: [(); 0],
        /// One part, once there is any.
        content: Vec<OutputPart>,
        /// Always null.
        encrypted_content: Option<()>,
        /// How far it is.
        status: OutputStatus,
    },
    /// What it said.
    Message {
        /// `msg_…`
        id: String,
        /// How far it is.
        status: OutputStatus,
        /// One part, once there is any.
        content: Vec<OutputPart>,
        /// Always `assistant`.
        role: &'static str,
    },
    /// A call of one of the request's functions.
    FunctionCall {
        /// `fc_…`
        id: String,
        /// By which the function's output will refer to it.
        call_id: String,
        /// Which one.
        name: String,
        /// JSON in a string, in the model's own words.
        arguments: String,
        /// How far it is.
        status: OutputStatus,
    },
}

/// How far an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputStatus {
    /// More may come.
    InProgress,
    /// All is there.
    Completed,
    /// A limit cut it off.
    Incomplete,
}

/// A text in an item.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputPart {
    /// Of a message.
    OutputText {
        /// Always empty.
        annotations: [(); 0],
        /// Empty unless asked for.
        logprobs: Vec<TokenLogprob>,
        /// So far.
        text: String,
    },
    /// Of reasoning.
    ReasoningText {
        /// So far.
        text: String,
    },
}

/// The kinds of items that hold text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutputKind {
    Reasoning,
    Message,
}

impl OutputKind {
    pub(super) fn empty_part(self) -> OutputPart {
        match self {
            OutputKind::Reasoning => OutputPart::ReasoningText { text: String::new() },
            OutputKind::Message => {
                OutputPart::OutputText { annotations: [], logprobs: Vec::new(), text: String::new() }
            }
        }
    }
}

/// The items so far, of which the last may be open.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// A part of each item's id that no other response has.
    stem: String,
    items: Vec<OutputItem>,
    is_open: bool,
}

impl Output {
    /// Nothing yet. Ids end in `stem` and the item's index.
    pub fn new(stem: String) -> Self {
        Output { stem, items: Vec::new(), is_open: false }
    }

    /// More text for the user, with the log-probabilities of its tokens if they were asked for.
    ///
    /// Tokens without text are markup, between items as well as in them; only those in a message are kept.
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

    /// More of what the model thinks.
    pub fn reasoning(&mut self, delta: &str) {
        if !self.is_in(OutputKind::Reasoning) {
            self.turn_to(OutputKind::Reasoning);
        }
        if let Some(OutputPart::ReasoningText { text }) = self.part() {
            text.push_str(delta);
        }
    }

    /// A step of a call.
    pub fn call(&mut self, step: &ToolCallDelta) {
        match step {
            ToolCallDelta::Begin { id, name, .. } => {
                self.close(OutputStatus::Completed);
                self.items.push(OutputItem::FunctionCall {
                    id: self.new_id("fc"),
                    call_id: id.clone(),
                    name: name.clone(),
                    arguments: String::new(),
                    status: OutputStatus::InProgress,
                });
                self.is_open = true;
            }
            ToolCallDelta::Arguments { fragment, .. } => {
                if let Some(OutputItem::FunctionCall { arguments, .. }) = self.items.last_mut() {
                    arguments.push_str(fragment);
                }
            }
            ToolCallDelta::End { .. } => self.close(OutputStatus::Completed),
        }
    }

    /// The end, for this reason. A response that says nothing has one empty message.
    pub fn finish(&mut self, reason: FinishReason) {
        if self.items.is_empty() {
            self.open_message();
        }
        self.close(last_status(reason));
    }

    /// All of it.
    pub fn into_items(self) -> Vec<OutputItem> {
        self.items
    }

    /// The items so far.
    pub fn items(&self) -> &[OutputItem] {
        &self.items
    }

    /// Opens a message that says nothing yet.
    pub(super) fn open_message(&mut self) {
        self.turn_to(OutputKind::Message);
    }

    /// Returns true if more of this kind continues the open item.
    pub(super) fn is_in(&self, kind: OutputKind) -> bool {
        let last = self.items.last().filter(|_| self.is_open);
        match kind {
            OutputKind::Reasoning => matches!(last, Some(OutputItem::Reasoning { .. })),
            OutputKind::Message => matches!(last, Some(OutputItem::Message { .. })),
        }
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
            OutputKind::Message => OutputItem::Message { id: self.new_id("msg"), status, content, role: "assistant" },
        });
        self.is_open = true;
    }

    /// The open item, if there is one, is at its end.
    pub(super) fn close(&mut self, end: OutputStatus) {
        if std::mem::replace(&mut self.is_open, false)
            && let Some(last) = self.items.last_mut()
        {
            let (OutputItem::Reasoning { status, .. }
            | OutputItem::Message { status, .. }
            | OutputItem::FunctionCall { status, .. }) = last;
            *status = end;
        }
    }

    fn part(&mut self) -> Option<&mut OutputPart> {
        match self.items.last_mut() {
            Some(OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. }) => content.last_mut(),
            Some(OutputItem::FunctionCall { .. }) | None => None,
        }
    }

    fn new_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.stem, self.items.len())
    }
}

/// The status of what is open when a response ends for this reason.
pub(super) fn last_status(reason: FinishReason) -> OutputStatus {
    match reason {
        FinishReason::Stop | FinishReason::ToolCalls => OutputStatus::Completed,
        FinishReason::Length => OutputStatus::Incomplete,
    }
}

impl OutputItem {
    /// The id that other events refer to.
    pub(super) fn id(&self) -> &str {
        let (OutputItem::Reasoning { id, .. } | OutputItem::Message { id, .. } | OutputItem::FunctionCall { id, .. }) =
            self;
        id
    }

    /// The item when it began.
    pub(super) fn begun(&self) -> OutputItem {
        let mut begun = self.clone();
        match &mut begun {
            OutputItem::Reasoning { content, status, .. } | OutputItem::Message { content, status, .. } => {
                content.clear();
                *status = OutputStatus::InProgress;
            }
            OutputItem::FunctionCall { arguments, status, .. } => {
                arguments.clear();
                *status = OutputStatus::InProgress;
            }
        }
        begun
    }
}
