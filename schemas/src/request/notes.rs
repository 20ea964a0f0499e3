//! What the parser of a body notes for the reply's header, beside what it returns.
//!
//! As the room that is left, it belongs to the thread, because one thread reads a body from its first byte to its last.

use std::cell::RefCell;

/// The most fields that a header names.
const MAX_NAMED: usize = 8;

/// The most characters of a field's name in a header.
const MAX_NAME_CHARS: usize = 64;

/// What a body has that changes nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BodyNotes {
    /// Fields that no list knows, as a client may read them: printable ASCII, cut, a few.
    pub ignored: Vec<String>,
    /// How often a field was ignored that is not among `ignored`.
    pub n_more_ignored: usize,
}

thread_local! {
    static NOTES: RefCell<BodyNotes> = RefCell::default();
}

/// Takes the notes of the body that this thread has read, and begins those of the next.
pub(super) fn take() -> BodyNotes {
    NOTES.take()
}

/// How much is noted so far.
pub(super) struct Mark {
    n_ignored: usize,
    n_more_ignored: usize,
}

/// Marks what is noted so far.
pub(super) fn mark() -> Mark {
    NOTES.with_borrow(|notes| Mark { n_ignored: notes.ignored.len(), n_more_ignored: notes.n_more_ignored })
}

/// Forgets what was noted after a mark.
pub(super) fn back_to(mark: Mark) {
    NOTES.with_borrow_mut(|notes| {
        notes.ignored.truncate(mark.n_ignored);
        notes.n_more_ignored = mark.n_more_ignored;
    });
}

/// Notes a field that has no effect, once.
pub(crate) fn ignored(path: &str) {
    NOTES.with_borrow_mut(|notes| {
        let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, ',' | ';');
        let shown = |c: char| if is_plain(c) { c } else { '?' };
        let name: String = path.chars().take(MAX_NAME_CHARS).map(shown).collect();
        match notes.ignored.len() {
            _ if notes.ignored.contains(&name) => {}
            MAX_NAMED => notes.n_more_ignored += 1,
            _ => notes.ignored.push(name),
        }
    });
}
