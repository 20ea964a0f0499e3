//! `system` and `messages`: their declaration, and their conversion to the form that chat templates read.

mod body;
mod check;
mod references;
#[cfg(test)]
mod tests;

pub(super) use body::{MessagesMessage, SystemText};
pub(super) use check::check_history;
pub(super) use references::ToolReferences;
