//! `messages` of a chat: their declaration, and their conversion to the form that chat templates read.

mod body;
mod check;
#[cfg(test)]
mod tests;

pub(crate) use body::{Arguments, ChatContent, ChatMessage};
pub(crate) use check::openai_role;
