//! Grammars that clients write, in Lark's notation or in llama.cpp's (GBNF).
//!
//! A grammar whose rules do not refer to themselves becomes one regular expression, any other a
//! [`Rule`](crate::constraint::Rule) of the engine. The input of a custom tool stands in a call as a JSON string, where some
//! characters are escaped. The engine can escape the texts of one regular expression, but not those of a grammar, so a
//! custom tool's grammar may not refer to itself.
//!
//! A rule of 30 KB that is named 10,000 times is a body of 50 KB and a pattern of 300 MB. So all grammars of a request
//! take what they are written as from one [`WriteBudget`], before it is written.

mod budget;
mod gbnf;
mod lark;
mod pattern;
mod rules;

pub(crate) use budget::WriteBudget;
pub(crate) use pattern::{pattern_of, whole};
pub(crate) use rules::rule_of;

/// The most bytes of a client's grammar or regular expression.
pub(crate) const MAX_GRAMMAR: usize = 64 << 10;

/// How deep groups may be nested. A rule is nested six times as deep as JSON for the engine, where 128 is the limit.
const MAX_DEPTH: usize = 16;

/// How many rules may lead from one to the next. Each takes stack.
const MAX_CHAIN: usize = 64;

/// The most references among rules that refer to themselves. With all of them between a few rules, the engine takes seconds.
const MAX_REFERENCES: usize = 4096;

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
    #[error("has rules that lead from one to the next more than {MAX_CHAIN} times")]
    TooDeep,
    #[error("has more than {MAX_REFERENCES} references among rules that refer to themselves")]
    TooManyReferences,
    #[error("becomes too large when its rules are put together")]
    TooLarge,
}
