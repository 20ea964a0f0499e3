//! What a response puts out, item by item: reasoning, text, calls of functions. The same for whole and streamed ones.

use schemars::JsonSchema;
use serde::Serialize;

use crate::openai::logprobs::TokenLogprob;
use crate::sequence::FinishReason;
use crate::tools::ToolCallDelta;

/// An item of a response.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "OutputItem")]
pub enum Item {
    /// What the model thought before it went on.
    Reasoning {
        /// `rs_…`
        id: String,
        /// Always empty: reasoning is not summarised.
        summary: [(); 0],
        /// One part, once there is any.
        content: Vec<Part>,
        /// Always null.
        encrypted_content: Option<()>,
        /// How far it is.
        status: Status,
    },
    /// What it said.
    Message {
        /// `msg_…`
        id: String,
        /// How far it is.
        status: Status,
        /// One part, once there is any.
        content: Vec<Part>,
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
        status: Status,
    },
}

/// How far an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "OutputStatus")]
pub enum Status {
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
#[schemars(rename = "OutputPart")]
pub enum Part {
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
pub(super) enum Kind {
    Reasoning,
    Message,
}

impl Kind {
    pub(super) fn empty_part(self) -> Part {
        match self {
            Kind::Reasoning => Part::ReasoningText { text: String::new() },
            Kind::Message => Part::OutputText { annotations: [], logprobs: Vec::new(), text: String::new() },
        }
    }
}

/// The items so far, of which the last may be open.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// A part of each item's id that no other response has.
    stem: String,
    items: Vec<Item>,
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
        if !self.is_in(Kind::Message) {
            if delta.is_empty() {
                return;
            }
            self.turn_to(Kind::Message);
        }
        if let Some(Part::OutputText { text, logprobs: all, .. }) = self.part() {
            text.push_str(delta);
            all.extend_from_slice(logprobs);
        }
    }

    /// More of what the model thinks.
    pub fn reasoning(&mut self, delta: &str) {
        if !self.is_in(Kind::Reasoning) {
            self.turn_to(Kind::Reasoning);
        }
        if let Some(Part::ReasoningText { text }) = self.part() {
            text.push_str(delta);
        }
    }

    /// A step of a call.
    pub fn call(&mut self, step: &ToolCallDelta) {
        match step {
            ToolCallDelta::Begin { id, name, .. } => {
                self.close(Status::Completed);
                let (call_id, name, arguments) = (id.clone(), name.clone(), String::new());
                let (id, status) = (self.new_id("fc"), Status::InProgress);
                self.items.push(Item::FunctionCall { id, call_id, name, arguments, status });
                self.is_open = true;
            }
            ToolCallDelta::Arguments { fragment, .. } => {
                if let Some(Item::FunctionCall { arguments, .. }) = self.items.last_mut() {
                    arguments.push_str(fragment);
                }
            }
            ToolCallDelta::End { .. } => self.close(Status::Completed),
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
    pub fn into_items(self) -> Vec<Item> {
        self.items
    }

    /// The items so far.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Opens a message that says nothing yet.
    pub(super) fn open_message(&mut self) {
        self.turn_to(Kind::Message);
    }

    /// Returns true if more of this kind continues the open item.
    pub(super) fn is_in(&self, kind: Kind) -> bool {
        let last = self.items.last().filter(|_| self.is_open);
        match kind {
            Kind::Reasoning => matches!(last, Some(Item::Reasoning { .. })),
            Kind::Message => matches!(last, Some(Item::Message { .. })),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Closes the open item and opens one of this kind, with an empty part.
    fn turn_to(&mut self, kind: Kind) {
        self.close(Status::Completed);
        let (status, content) = (Status::InProgress, vec![kind.empty_part()]);
        self.items.push(match kind {
            Kind::Reasoning => {
                Item::Reasoning { id: self.new_id("rs"), summary: [], content, encrypted_content: None, status }
            }
            Kind::Message => Item::Message { id: self.new_id("msg"), status, content, role: "assistant" },
        });
        self.is_open = true;
    }

    /// The open item, if there is one, is at its end.
    pub(super) fn close(&mut self, end: Status) {
        if std::mem::replace(&mut self.is_open, false)
            && let Some(last) = self.items.last_mut()
        {
            let (Item::Reasoning { status, .. } | Item::Message { status, .. } | Item::FunctionCall { status, .. }) =
                last;
            *status = end;
        }
    }

    fn part(&mut self) -> Option<&mut Part> {
        match self.items.last_mut() {
            Some(Item::Reasoning { content, .. } | Item::Message { content, .. }) => content.last_mut(),
            Some(Item::FunctionCall { .. }) | None => None,
        }
    }

    fn new_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.stem, self.items.len())
    }
}

/// The status of what is open when a response ends for this reason.
pub(super) fn last_status(reason: FinishReason) -> Status {
    match reason {
        FinishReason::Stop | FinishReason::ToolCalls => Status::Completed,
        FinishReason::Length => Status::Incomplete,
    }
}

impl Item {
    /// The id that other events refer to.
    pub(super) fn id(&self) -> &str {
        let (Item::Reasoning { id, .. } | Item::Message { id, .. } | Item::FunctionCall { id, .. }) = self;
        id
    }

    /// The item when it began.
    pub(super) fn begun(&self) -> Item {
        let mut begun = self.clone();
        match &mut begun {
            Item::Reasoning { content, status, .. } | Item::Message { content, status, .. } => {
                content.clear();
                *status = Status::InProgress;
            }
            Item::FunctionCall { arguments, status, .. } => {
                arguments.clear();
                *status = Status::InProgress;
            }
        }
        begun
    }
}
