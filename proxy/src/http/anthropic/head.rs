//! Data shared by a whole message and a streamed message.

use baton_schemas::anthropic::reply::{MessageReply, MessageUsage};

use crate::http::reply::reply_totals::ReplyTotals;

/// The fields of a message that are known before its first token.
#[derive(Debug, Clone)]
pub(super) struct MessageHead {
    pub(super) id: String,
    pub(super) model: String,
    /// The client wants the model's reasoning.
    pub(super) shows_thinking: bool,
}

impl MessageHead {
    pub(super) fn begun(&self, usage: MessageUsage) -> MessageReply {
        MessageReply::begun(self.id.clone(), self.model.clone(), usage)
    }
}

pub(super) fn usage(totals: &ReplyTotals) -> MessageUsage {
    MessageUsage::new(totals.counts.n_prompt, totals.n_cached(), totals.counts.n_completion, totals.n_reasoning)
}
