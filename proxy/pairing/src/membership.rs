//! What a machine of a cluster has.

use serde::{Deserialize, Serialize};

/// The longest name of a machine, as of a label in DNS.
pub(crate) const MAX_NAME_BYTES: usize = 63;

/// A machine's name, for people. Letters, digits, `.`, `_` and `-`, at most 63: names come from outside and are printed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MachineName(String);

impl MachineName {
    /// `None` if the text is no name.
    pub fn parse(text: &str) -> Option<MachineName> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_name = (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(is_plain);
        is_name.then(|| MachineName(text.to_owned()))
    }

    /// This machine's host name.
    pub fn of_this_machine() -> MachineName {
        let uname = rustix::system::uname();
        MachineName::like(&uname.nodename().to_string_lossy())
    }

    /// The nearest name to a text.
    fn like(text: &str) -> MachineName {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
        let name: String = text.chars().take(MAX_NAME_BYTES).map(plain).collect();
        MachineName(if name.is_empty() { "machine".to_owned() } else { name })
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for MachineName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for MachineName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<MachineName, &'static str> {
        MachineName::parse(&text).ok_or("no name of a machine")
    }
}

impl From<MachineName> for String {
    fn from(name: MachineName) -> String {
        name.0
    }
}

/// What is not secret about a pairing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The cluster's name: the beginning of a hash of its authority's certificate.
    pub cluster: String,
    /// This machine.
    pub machine: MachineName,
    /// The first machine, which admitted this one. `None` on the first machine itself.
    pub admitted_by: Option<MachineName>,
    /// When, in UTC.
    pub since: String,
}

/// All that a machine has of its cluster. No `Debug`: it holds secrets.
pub struct Membership {
    pub about: About,
    /// The secret that all machines share: 64 hexadecimal digits.
    pub cluster_key: String,
    /// The authority's certificate, which all machines pin. PEM, as are the rest.
    pub authority: String,
    /// This machine's certificate, signed by the authority.
    pub certificate: String,
    /// This machine's private key, which was made here and never leaves it.
    pub private_key: String,
    /// The authority's private key. Only the first machine has it.
    pub authority_key: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_names() {
        for name in ["spark", "Anna-s-Mac.local", "a", &"x".repeat(63)] {
            assert_eq!(MachineName::parse(name).map(|name| name.to_string()).as_deref(), Some(name));
        }
        for text in ["", "a b", "a\n", "\u{1b}[2J", "ä", &"x".repeat(64)] {
            assert_eq!(MachineName::parse(text), None);
            assert!(MachineName::parse(MachineName::like(text).as_str()).is_some(), "{text}");
        }
        assert!(MachineName::parse(MachineName::of_this_machine().as_str()).is_some());
    }
}
