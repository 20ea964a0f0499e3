//! Checks that apply to the conversation history of every dialect.

use crate::generate::Message;

/// The system messages become one leading message, since most templates accept only that.
pub(crate) fn with_one_system_message(messages: Vec<Message>) -> Vec<Message> {
    let (system, mut history): (Vec<_>, Vec<_>) = messages.into_iter().partition(|message| message.role == "system");
    if !system.is_empty() {
        let texts: Vec<_> = system.into_iter().map(|message| message.content).filter(|text| !text.is_empty()).collect();
        let content = texts.join("\n\n");
        history.insert(0, Message { role: "system".to_owned(), content, ..Message::default() });
    }
    history
}
