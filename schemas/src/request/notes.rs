//! What the parser of a body notes for the reply's header, beside what it returns.
//!
//! As the room that is left, it belongs to the thread, because one thread reads a body from its first byte to its last.

use std::cell::{Cell, RefCell};

/// The most fields that a header names.
const MAX_NAMED: usize = 8;

/// The most characters of a field's name in a header.
const MAX_NAME_CHARS: usize = 64;

/// What a body has that changes nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BodyNotes {
    /// Fields that no list knows, as a client may read them: printable ASCII, cut, a few.
    pub ignored: Vec<String>,
    /// Ignored fields that are not among `ignored`.
    pub n_more_ignored: usize,
    /// Free-form JSON, such as a schema, has an integer of more than 64 bits, which is only the nearest float here.
    pub has_rounded: bool,
}

thread_local! {
    static NOTES: RefCell<BodyNotes> = RefCell::default();
    static HAS_LARGE_FLOAT: Cell<bool> = const { Cell::new(false) };
}

/// Takes the notes of the body that this thread has read, and begins those of the next.
pub(super) fn take() -> BodyNotes {
    NOTES.take()
}

/// Notes a float that may have been written as an integer of more than 64 bits.
pub(super) fn large_float() {
    HAS_LARGE_FLOAT.set(true);
}

/// Reads a JSON text, and notes that a number is not what was written if a large float is read and the text has no such.
pub(super) fn noting_rounded<T>(json: &[u8], read: impl FnOnce() -> T) -> T {
    let before = HAS_LARGE_FLOAT.replace(false);
    let value = read();
    if HAS_LARGE_FLOAT.replace(before) && has_long_integer(json) {
        rounded();
    }
    value
}

/// Digits of the shortest integer of more than 64 bits.
const LONG_DIGITS: usize = 20;

/// Returns true if a JSON text has an integer of so many digits.
pub(crate) fn has_long_integer(json: &[u8]) -> bool {
    let mut in_string = false;
    let mut rest = json;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'\\' if in_string => rest = rest.get(1..).unwrap_or_default(),
            b'"' => in_string = !in_string,
            b'0'..=b'9' if !in_string => {
                let is_number = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'E' | b'+' | b'-');
                let n = rest.iter().take_while(|byte| is_number(byte)).count();
                let (number, after) = rest.split_at(n);
                if n + 1 >= LONG_DIGITS && number.iter().all(u8::is_ascii_digit) {
                    return true;
                }
                rest = after;
            }
            _ => {}
        }
    }
    false
}

/// Notes that an integer is not what was written.
pub(crate) fn rounded() {
    NOTES.with_borrow_mut(|notes| notes.has_rounded = true);
}

/// Notes a field that has no effect.
pub(crate) fn ignored(path: &str) {
    NOTES.with_borrow_mut(|notes| {
        if notes.ignored.len() == MAX_NAMED {
            notes.n_more_ignored += 1;
            return;
        }
        let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, ',' | ';');
        let shown = |c: char| if is_plain(c) { c } else { '?' };
        notes.ignored.push(path.chars().take(MAX_NAME_CHARS).map(shown).collect());
    });
}
