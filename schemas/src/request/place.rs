//! The place in a body of the object that is being read, and its fields that no type declares.
//!
//! As the room that is left, it belongs to the thread, because one thread reads a body from its first byte to its last.

use std::cell::RefCell;

use super::demand::Demand;
use super::notes;

thread_local! {
    static STEPS: RefCell<Vec<PathStep>> = const { RefCell::new(Vec::new()) };
}

/// A step from a value to one inside it.
#[derive(Clone, Copy)]
pub(super) enum PathStep {
    Field(&'static str),
    /// Any item of an array: a field of many items is named once.
    Item,
}

/// While it exists, the value behind a step is read.
pub(super) struct Inside;

impl Inside {
    pub(super) fn of(step: PathStep) -> Inside {
        STEPS.with_borrow_mut(|steps| steps.push(step));
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        STEPS.with_borrow_mut(Vec::pop);
    }
}

/// Returns the path of a field of the object at `at`. The body itself is at `""`.
pub(crate) fn join(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") }
}

/// Fields of the objects within a body that change nothing: what replies have and clients send back, and what only matters to
/// caches, to a service's own files and to its programs.
const OF_PARTS: &[&str] = &[
    "id",
    "type",
    "index",
    "status",
    "phase",
    "annotations",
    "logprobs",
    "summary",
    "encrypted_content",
    "signature",
    "parsed",
    "parsed_arguments",
    "caller",
    "toolset_name",
    "cache_control",
    "prompt_cache_breakpoint",
    "media_type",
    "detail",
    "include_obfuscation",
    "eager_input_streaming",
    "allowed_callers",
    "defer_loading",
];

/// Notes an undeclared field of the object that is being read, unless the object is the body itself. Items of arrays have no
/// numbers: `messages[].content[].text`.
pub(super) fn note(key: &str, demand: &Demand) {
    if *demand == Demand::Missing || OF_PARTS.contains(&key) {
        return;
    }
    let at = STEPS.with_borrow(|steps| {
        steps.iter().fold(String::new(), |path, step| match step {
            PathStep::Field(name) => join(&path, name),
            PathStep::Item => path + "[]",
        })
    });
    if !at.is_empty() {
        notes::ignored(&join(&at, key));
    }
}
