//! Bounds the memory that the values of one body take. Without this bound, `[{},{},…]` of 32 MiB becomes gigabytes.
//!
//! Each value that is read costs its size in memory, apart from its text, which cannot grow. What is left belongs to the
//! thread, because one thread reads a body from its first byte to its last. Otherwise every reader would have to pass it
//! on.

use std::cell::Cell;

use super::notes::{self, BodyNotes};

/// The most bytes that the values of a body may take: a conversation of more than 10,000 messages, or a prompt of four
/// million tokens.
const MAX_BYTES: usize = 16 << 20;

/// A small allocation, such as that of a short string.
pub(crate) const ALLOCATION: usize = 32;

thread_local! {
    /// The bytes left for the body that this thread reads. `None`: its values did not fit.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Gives room to the body that this thread reads next.
pub(super) fn begin() {
    LEFT.set(Some(MAX_BYTES));
}

/// What the parser of a body returns, and what it noted meanwhile.
#[derive(Debug)]
pub struct MeasuredParse<T> {
    /// What it returns.
    pub value: T,
    /// The most bytes that `value` takes in memory, apart from the body's texts.
    pub n_bytes: usize,
    /// What the reply's header tells.
    pub notes: BodyNotes,
}

/// Runs the parser of a body.
pub fn measured<T>(parse: impl FnOnce() -> T) -> MeasuredParse<T> {
    begin();
    notes::take();
    let value = parse();
    MeasuredParse { value, n_bytes: MAX_BYTES - LEFT.get().unwrap_or_default(), notes: notes::take() }
}

/// Takes room for a value. Returns false if it does not fit. From then on, no value of this body does.
pub(crate) fn take(n_bytes: usize) -> bool {
    let left = LEFT.get().and_then(|left| left.checked_sub(n_bytes));
    LEFT.set(left);
    left.is_some()
}

/// Returns room that is no longer used.
pub(crate) fn give_back(n_bytes: usize) {
    LEFT.set(LEFT.get().map(|left| left.saturating_add(n_bytes).min(MAX_BYTES)));
}

/// Returns true if the values of the body did not fit.
pub(super) fn is_exceeded() -> bool {
    LEFT.get().is_none()
}
