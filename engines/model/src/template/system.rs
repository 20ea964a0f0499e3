//! Where a template's prompt has the system messages.
//!
//! A conversation keeps each system message where its client put it. Moving a later one to the front would change the
//! beginning of the prompt, and everything after it would be computed again. But templates differ: some render a later
//! system message in its place, others raise an exception, leave it out, or move it. Whether a template can do it is
//! found by rendering small conversations, once for each template, and once more for conversations with tools, which
//! many templates render in another branch. Where it cannot, the text becomes part of a user message, between marks.

use std::borrow::Cow;

use baton_schemas::MessageRole;
use baton_schemas::generate::{Conversation, Message};
use serde_json::{Value, json};

/// How a template takes system messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SystemRoles {
    /// A system message that begins the conversation.
    first: RenderedAs,
    /// The same in a conversation whose last turn has results of tools. Mistral Nemo's template has the system message in
    /// the user's message at the end, so it is lost there.
    before_results: RenderedAs,
    /// A system message anywhere else.
    later: RenderedAs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RenderedAs {
    /// The template renders it in its place.
    System,
    /// It becomes text of a user message.
    User,
}

/// Texts of the small conversations. No template contains these words.
const FIRST_SYSTEM: &str = "zirconprobe";
const QUESTION: &str = "quartzprobe";
const ANSWER: &str = "agateprobe";
const LATER_SYSTEM: &str = "topazprobe";
const NEXT_QUESTION: &str = "opalprobe";

impl SystemRoles {
    /// Finds out what a template does. `render` renders a conversation, or returns `None` if the template fails.
    pub(super) fn try_out(with_tools: bool, render: impl Fn(&Conversation) -> Option<String>) -> SystemRoles {
        use MessageRole::{Assistant, System, User};
        let tools: Vec<Value> = with_tools.then(any_tool).into_iter().collect();
        let render_all = |messages| render(&Conversation { messages, tools: tools.clone(), ..Conversation::default() });
        let message = |(role, text): &(MessageRole, &str)| Message::new(*role, (*text).to_owned());
        let render = |messages: &[(MessageRole, &str)]| render_all(messages.iter().map(message).collect());
        let is_lost = with_tools && {
            let mut messages = [(System, FIRST_SYSTEM), (User, QUESTION)].iter().map(message).collect::<Vec<_>>();
            messages.extend(call_and_result());
            render_all(messages).is_some_and(|text| !text.contains(FIRST_SYSTEM))
        };
        let with_first = render(&[(System, FIRST_SYSTEM), (User, QUESTION)]);
        let first = match with_first {
            Some(text) if text.contains(FIRST_SYSTEM) => RenderedAs::System,
            // A template that renders nothing at all gets the conversation as it is, so that its error is the client's.
            None if render(&[(User, QUESTION)]).is_none() => RenderedAs::System,
            _ => RenderedAs::User,
        };
        let before_results = if is_lost { RenderedAs::User } else { first };
        let mut history = vec![(User, QUESTION), (Assistant, ANSWER)];
        if first == RenderedAs::System {
            history.insert(0, (System, FIRST_SYSTEM));
        }
        let with = |later: &[(MessageRole, &str)]| render(&[&history[..], later].concat());
        let Some(without_system) = with(&[(User, NEXT_QUESTION)]) else {
            return SystemRoles { first, before_results, later: RenderedAs::User };
        };
        let stays = |later: &dyn Fn(MessageRole) -> [(MessageRole, &'static str); 2]| {
            let Some(text) = with(&later(System)) else { return false };
            let words = [ANSWER, later(System)[0].1, later(System)[1].1];
            let is_once = text.matches(LATER_SYSTEM).count() == 1;
            // A template that tells only users from others would show the text as the assistant's.
            let is_distinct = [User, Assistant].iter().all(|role| with(&later(*role)).as_ref() != Some(&text));
            is_once && is_distinct && is_in_order(&text, &words) && up_to_answer(&text) == up_to_answer(&without_system)
        };
        let before_question = |role| [(role, LATER_SYSTEM), (User, NEXT_QUESTION)];
        let after_question = |role| [(User, NEXT_QUESTION), (role, LATER_SYSTEM)];
        let later = match stays(&before_question) && stays(&after_question) {
            true => RenderedAs::System,
            false => RenderedAs::User,
        };
        SystemRoles { first, before_results, later }
    }

    /// The forms in which the template may get a conversation, the best first. A next one is for the case that the
    /// template rejects this conversation in the ones before; the last has all system messages at the front.
    pub(super) fn forms<'c>(self, conversation: &'c Conversation) -> Vec<Cow<'c, Conversation>> {
        let is_system = |message: &Message| message.role == MessageRole::System;
        let begins_with_system = conversation.messages.first().is_some_and(is_system);
        let has_later = conversation.messages.iter().skip(1).any(is_system);
        let of_last_turn =
            conversation.messages.iter().rev().take_while(|message| message.role != MessageRole::Assistant);
        let has_results = of_last_turn.into_iter().any(|message| message.role == MessageRole::Tool);
        let first = if has_results { self.before_results } else { self.first };
        let first_is_user = begins_with_system && first == RenderedAs::User;
        if !has_later && !first_is_user {
            return vec![Cow::Borrowed(conversation)];
        }
        let form = |messages: Vec<Message>| {
            let messages = if first == RenderedAs::User { without_first_system(messages) } else { messages };
            Cow::Owned(Conversation { messages, ..conversation.clone() })
        };
        let mut forms = Vec::new();
        if has_later {
            if self.later == RenderedAs::System {
                forms.push(form(conversation.messages.clone()));
            }
            forms.push(form(later_as_user(&conversation.messages)));
        }
        forms.push(form(conversation.with_system_first().into_owned()));
        forms
    }
}

fn any_tool() -> Value {
    let parameters = json!({ "type": "object", "properties": {} });
    json!({ "type": "function", "function": { "name": "f", "description": "f", "parameters": parameters } })
}

/// A call of [`any_tool`], with an identifier as Mistral's templates require, and its result.
fn call_and_result() -> [Message; 2] {
    let id = "abcdefghi";
    let function = json!({ "name": "f", "arguments": {} });
    let call = json!({ "id": id, "type": "function", "function": function });
    [
        Message { tool_calls: vec![call], ..Message::new(MessageRole::Assistant, String::new()) },
        Message { tool_call_id: Some(id.into()), ..Message::new(MessageRole::Tool, ANSWER.into()) },
    ]
}

fn is_in_order(text: &str, words: &[&str]) -> bool {
    let places: Option<Vec<usize>> = words.iter().map(|word| text.find(word)).collect();
    places.is_some_and(|places| places.is_sorted())
}

/// The part of a prompt that the prefix cache holds when a later system message arrives.
fn up_to_answer(text: &str) -> Option<&str> {
    text.find(ANSWER).map(|at| &text[..at + ANSWER.len()])
}

/// Makes the first message, if it is of the system, the beginning of the first user message.
fn without_first_system(mut messages: Vec<Message>) -> Vec<Message> {
    if messages.first().is_some_and(|first| first.role == MessageRole::System) {
        let system = messages.remove(0).content;
        match messages.first_mut() {
            Some(first) if first.role == MessageRole::User => prepend(first, system),
            _ if system.is_empty() => {}
            _ => messages.insert(0, Message::new(MessageRole::User, system)),
        }
    }
    messages
}

/// Moves each system message after the first into a user message, because many templates require that roles alternate. It
/// joins the one before it, else the one after it, else it is a message of its own.
fn later_as_user(messages: &[Message]) -> Vec<Message> {
    let mut placed: Vec<Message> = Vec::with_capacity(messages.len());
    // The last placed message holds only system text.
    let mut is_marked_only = false;
    for (idx, message) in messages.iter().enumerate() {
        let is_later_system = idx > 0 && message.role == MessageRole::System;
        match placed.last_mut() {
            Some(last) if is_later_system && last.role == MessageRole::User => {
                last.append(&marked(&message.content));
            }
            Some(last) if is_marked_only && message.role == MessageRole::User => {
                let system = std::mem::replace(last, message.clone()).content;
                prepend(last, system);
                is_marked_only = false;
            }
            _ => {
                is_marked_only = is_later_system;
                placed.push(match is_later_system {
                    true => Message::new(MessageRole::User, marked(&message.content)),
                    false => message.clone(),
                });
            }
        }
    }
    placed
}

fn marked(system: &str) -> String {
    format!("<system>\n{system}\n</system>")
}

fn prepend(message: &mut Message, text: String) {
    let after = std::mem::replace(&mut message.content, text);
    message.append(&after);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
        let message = |(role, text): &(&str, &str)| Message::new(MessageRole::of(role).unwrap(), (*text).to_owned());
        turns.iter().map(message).collect()
    }

    #[track_caller]
    fn check(turns: &[(&str, &str)], expected: &[(&str, &str)]) {
        assert_eq!(later_as_user(&messages(turns)), messages(expected));
    }

    #[test]
    fn later_system_text_joins_the_user_message_next_to_it() {
        let marked = "<system>\nS\n</system>";
        let question = [("system", "first"), ("user", "a"), ("assistant", "b")];
        let with = |rest: &[(&'static str, &'static str)]| [&question[..], rest].concat();
        check(&question, &question);
        check(&with(&[("system", "S"), ("user", "c")]), &with(&[("user", "<system>\nS\n</system>\n\nc")]));
        check(&with(&[("user", "c"), ("system", "S")]), &with(&[("user", "c\n\n<system>\nS\n</system>")]));
        check(&with(&[("system", "S")]), &with(&[("user", marked)]));
        check(&with(&[("tool", "4"), ("system", "S")]), &with(&[("tool", "4"), ("user", marked)]));
        // Two user messages of the client stay two.
        check(
            &[("user", "a"), ("system", "S"), ("user", "b")],
            &[("user", "a\n\n<system>\nS\n</system>"), ("user", "b")],
        );
    }

    #[test]
    fn a_first_system_message_begins_the_first_user_message_where_the_template_refuses_it() {
        let check = |turns: &[(&str, &str)], expected: &[(&str, &str)]| {
            assert_eq!(without_first_system(messages(turns)), messages(expected));
        };
        check(&[("system", "S"), ("user", "a")], &[("user", "S\n\na")]);
        check(&[("system", ""), ("user", "a")], &[("user", "a")]);
        check(&[("system", "S"), ("assistant", "b")], &[("user", "S"), ("assistant", "b")]);
        check(&[("system", "S")], &[("user", "S")]);
        check(&[("user", "a")], &[("user", "a")]);
    }
}
