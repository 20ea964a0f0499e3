//! Server-sent events that are named after their JSON's `type`, as Anthropic's API and OpenAI's responses have them.

use serde::Serialize;

/// Writes an event whose JSON begins with its `type`, which is where serde writes the tag of an enum.
pub(crate) fn typed_event(event: &impl Serialize) -> String {
    let json = serde_json::to_string(event).expect("plain structs with string keys always serialize");
    let name = json.strip_prefix(r#"{"type":""#).and_then(|rest| rest.split('"').next()).unwrap_or_default();
    format!("event: {name}\ndata: {json}\n\n")
}
