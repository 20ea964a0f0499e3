//! What a person types: a message, or a command that begins with a slash.

/// A typed line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Typed {
    /// Nothing.
    Empty,
    /// A message to the model.
    Message(String),
    /// `/help`
    Help,
    /// `/model`: `None` lists them.
    Model(Option<String>),
    /// `/clear`
    Clear,
    /// `/system`: `None` removes the message.
    System(Option<String>),
    /// `/quit`
    Quit,
    /// A command that does not exist.
    Unknown(String),
}

/// What `/help` prints.
pub(super) const HELP: &str = "\
/model [NAME]   answer with another model, or list them
/system [TEXT]  set the system message, or remove it
/clear          forget the conversation
/quit           end, as Ctrl-C and Ctrl-D do
//TEXT          send a message that begins with a slash
Ctrl-C stops a reply. Pasted lines are one message.";

impl Typed {
    pub(super) fn parse(line: &str) -> Typed {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            return if line.is_empty() { Typed::Empty } else { Typed::Message(line.to_owned()) };
        };
        if command.starts_with('/') {
            return Typed::Message(command.to_owned());
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = Some(rest.trim()).filter(|rest| !rest.is_empty()).map(str::to_owned);
        match name {
            "help" | "?" => Typed::Help,
            "model" => Typed::Model(rest),
            "clear" => Typed::Clear,
            "system" => Typed::System(rest),
            "quit" | "exit" | "bye" => Typed::Quit,
            other => Typed::Unknown(other.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_messages_are_told_apart() {
        let check = |line: &str, expected: Typed| assert_eq!(Typed::parse(line), expected, "{line:?}");
        check("  ", Typed::Empty);
        check(" hi there ", Typed::Message("hi there".into()));
        check("/model", Typed::Model(None));
        check("/model  a b", Typed::Model(Some("a b".into())));
        check("/system be\nbrief", Typed::System(Some("be\nbrief".into())));
        check("/bye", Typed::Quit);
        check("//etc is a folder", Typed::Message("/etc is a folder".into()));
        check("/nope x", Typed::Unknown("nope".into()));
    }
}
