//! Charges a reply that is collected before it is sent to the key of its request. An upstream may send a reply without end,
//! and a client may ask for as many as it has places.

use baton_schemas::sequence::{Alternative, Logprobs};
use baton_schemas::tools::ToolCallDelta;
use futures::StreamExt;

use crate::account::request_memory::RequestHold;
use crate::reply_event::EventKind;
use crate::request::generate::EventStream;

/// A reply is charged in steps of this size, of which most replies fill none.
const STEP: usize = 64 << 10;

/// A text is collected, and then written as JSON.
const COPIES: usize = 2;

/// Passes the steps on, and charges what they bring. Ends with an error if there is no memory for it.
pub(in crate::http) fn collected(steps: EventStream, memory: &RequestHold) -> EventStream {
    let memory = memory.clone();
    let mut n_uncharged = 0;
    let charged = steps.map(move |event| {
        let event = event?;
        n_uncharged += COPIES * memory_bytes(&event.kind);
        if n_uncharged >= STEP {
            memory.collect(std::mem::take(&mut n_uncharged))?;
        }
        Ok(event)
    });
    Box::pin(charged)
}

/// Returns the bytes of an event that a whole reply keeps.
fn memory_bytes(kind: &EventKind) -> usize {
    match kind {
        EventKind::Prompt { tokens } => tokens.iter().map(|token| with_alternatives(token.logprobs.as_ref())).sum(),
        EventKind::Text { text, tokens } => {
            text.len() + tokens.iter().map(|token| with_alternatives(Some(&token.logprobs))).sum::<usize>()
        }
        EventKind::Reasoning { text } | EventKind::Refusal { text } => text.len(),
        EventKind::ToolCall { call: ToolCallDelta::Begin { id, name, .. } } => CALL + id.len() + name.len(),
        EventKind::ToolCall { call: ToolCallDelta::Arguments { fragment, .. } } => fragment.len(),
        EventKind::Context { tokens } => size_of_val(&tokens[..]),
        EventKind::Accepted { .. }
        | EventKind::Started(_)
        | EventKind::Handoff { .. }
        | EventKind::Rerouted { .. }
        | EventKind::Usage { .. }
        | EventKind::Prefilled { .. }
        | EventKind::LeftOut(_)
        | EventKind::ToolCall { call: ToolCallDelta::End { .. } }
        | EventKind::Finished { .. } => 0,
    }
}

/// A call without its texts, as a part of a reply.
const CALL: usize = 256;

/// A token with the bytes and numbers of a log-probability.
const TOKEN: usize = size_of::<Alternative>() + 16;

fn with_alternatives(logprobs: Option<&Logprobs>) -> usize {
    TOKEN * (1 + logprobs.map_or(0, |logprobs| logprobs.top.len()))
}
