//! Server-sent events that are named after their JSON's `type`, as Anthropic's API and OpenAI's responses have them.

use serde::Serialize;

/// An event whose JSON has a `type`.
pub(crate) trait TypedEvent: Serialize {
    /// Returns the `type` of the event's JSON.
    fn name(&self) -> &'static str;
}

/// Writes an event with its name.
pub(crate) fn typed_event(event: &impl TypedEvent) -> String {
    let json = serde_json::to_string(event).expect("plain structs with string keys always serialize");
    format!("event: {}\ndata: {json}\n\n", event.name())
}

/// Returns the names of the events in a transcript, after checking that each is the `type` of its event's JSON.
#[cfg(test)]
pub(crate) fn checked_names(transcript: &str) -> std::collections::BTreeSet<String> {
    let events = transcript.split_terminator("\n\n").map(|event| {
        let (name, json) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(json["type"], name, "{event}");
        name.to_owned()
    });
    events.collect()
}
