//! Grammars that clients write: Lark's notation, read and written as one regular expression.
//!
//! The input of a custom tool stands in a call as a JSON string, where some characters are escaped. The engine can escape
//! the texts of one regular expression, but not those of a grammar, so a grammar whose rules do not refer to themselves
//! becomes one.

mod lark;
mod pattern;

pub(crate) use pattern::pattern_of;

/// The most bytes of a client's grammar or regular expression.
pub(crate) const MAX_GRAMMAR: usize = 64 << 10;

/// How deep groups may be nested. A rule is nested six times as deep as JSON for the engine, where 128 is the limit.
const MAX_DEPTH: usize = 16;

/// Why a grammar is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GrammarError {
    #[error("is longer than {} KiB", MAX_GRAMMAR >> 10)]
    TooLong,
    #[error("line {line}: {problem}")]
    Syntax { line: usize, problem: String },
    #[error("has no rule named {0}")]
    NoRule(String),
    #[error("the rule {0} refers to itself; write it with repetitions, such as * or {{1,9}}")]
    Recursive(String),
    #[error("becomes too large when its rules are put together")]
    TooLarge,
}
