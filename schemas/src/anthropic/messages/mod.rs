//! `system` and `messages`: their declaration, and their conversion to the form that chat templates read.

mod body;
mod check;
#[cfg(test)]
mod tests;

pub(super) use body::{MessagesMessage, SystemText};
pub(super) use check::check_history;
