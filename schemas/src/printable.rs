//! Texts that other machines choose and people read: names of models, nodes and devices.
//!
//! They are cleaned and cut once, where they enter a process: in a node's description ([`NodeInfo::with_printable_names`]), an
//! announcement in the network, a list of models, an endpoint's answer to a command. What prints them need not think of it.

use std::fmt::Display;

use crate::node::NodeInfo;

/// The longest name, characters.
pub const MAX_NAME_CHARS: usize = 200;

/// The most devices, and the most workers, of a node that are named.
const MAX_DEVICES: usize = 64;

/// A name for a terminal, a log or a page: at most [`MAX_NAME_CHARS`], without control characters and what changes how others are
/// shown.
pub fn printable(name: &str) -> String {
    printable_within(name, MAX_NAME_CHARS)
}

/// The same with at most `max_chars` characters.
pub fn printable_within(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).map(|c| if is_printable(c) { c } else { char::REPLACEMENT_CHARACTER }).collect()
}

/// The longest reason, characters.
const MAX_REASON_CHARS: usize = 300;

/// A reason in one line. It may quote a file or a peer, which must not make it endless.
pub fn one_line(reason: impl Display) -> String {
    printable_within(&reason.to_string(), MAX_REASON_CHARS)
}

fn is_printable(c: char) -> bool {
    // Invisible characters, and those that reverse the direction of writing.
    let is_invisible =
        matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    !(c.is_control() || is_invisible)
}

impl NodeInfo {
    /// What a node says of itself, with names that can be printed. Templates and tokens stay: they are for clients.
    pub fn with_printable_names(mut self) -> NodeInfo {
        let NodeInfo { model, engine, architecture, projector, devices, workers, facts, version, .. } = &mut self;
        devices.truncate(MAX_DEVICES);
        workers.truncate(MAX_DEVICES);
        workers.iter_mut().for_each(|worker| worker.devices.truncate(MAX_DEVICES));
        let of_workers =
            workers.iter_mut().flat_map(|worker| [&mut worker.name].into_iter().chain(&mut worker.devices));
        let names = [model, engine, architecture, version, &mut facts.quantization].into_iter();
        for name in names.chain(projector).chain(devices).chain(of_workers) {
            *name = printable(name);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_printable_and_short() {
        assert_eq!(printable("evil\u{1b}[2Jname\u{202e}\u{9b}"), "evil\u{fffd}[2Jname\u{fffd}\u{fffd}");
        assert_eq!(printable(&"x".repeat(1_000)).len(), MAX_NAME_CHARS);
        assert_eq!(printable("Ünïcode Mac 2"), "Ünïcode Mac 2");
    }

    #[test]
    fn what_a_node_says_of_itself_can_be_printed() {
        let evil = "\u{1b}]0;title\u{7}".repeat(30);
        let info: NodeInfo = serde_json::from_value(json!({
            "model": evil, "engine": evil, "architecture": evil, "n_ctx": 1, "n_ctx_train": 1, "n_vocab": 1, "n_slots": 1,
            "memory": {}, "has_chat_template": true, "projector": evil, "devices": vec![evil.clone(); 100],
            "workers": vec![json!({ "name": evil, "devices": vec![evil.clone(); 100], "layers": 1 }); 100],
            "facts": { "quantization": evil, "chat_template": "{{ a }}\n{{ b }}" },
        }))
        .unwrap();
        let shown = info.with_printable_names();
        assert_eq!(shown.facts.chat_template, "{{ a }}\n{{ b }}");
        let text = format!("{shown:?}");
        assert!(!text.contains("\\u{1b}") && !text.contains("\\u{7}"), "{text}");
        let n_names = 5 + MAX_DEVICES * (1 + 1 + MAX_DEVICES);
        assert!(text.chars().count() < n_names * (MAX_NAME_CHARS + 100), "{}", text.len());
    }
}
