//! A field that this server does not have, and what serves instead.

use super::demand::Off;
use super::field::join;
use super::invalid::InvalidRequest;

/// A dialect's name for a field of OpenAI's chats that an advice may name.
#[derive(Debug)]
pub(crate) struct OwnName {
    pub(crate) openai: &'static str,
    /// Its name with quotes. Empty: nothing, so the advice does not help here.
    pub(crate) here: &'static str,
}

impl OwnName {
    pub(crate) const fn new(openai: &'static str, here: &'static str) -> OwnName {
        OwnName { openai, here }
    }
}

/// A field that is refused unless it is switched off.
#[derive(Debug)]
pub(crate) struct RefusedField {
    pub(crate) field: &'static str,
    /// The feature, which begins the error message.
    pub(crate) feature: &'static str,
    /// What serves instead, as an advice to the client. May be empty. Fields have OpenAI's names.
    pub(crate) instead: &'static str,
    pub(crate) off: Off,
}

impl RefusedField {
    pub(crate) const fn new(field: &'static str, off: Off, feature: &'static str, instead: &'static str) -> Self {
        RefusedField { field, feature, instead, off }
    }

    /// The advice with a dialect's own names.
    pub(super) fn advice(&self, names: &[OwnName]) -> String {
        let mut advice = self.instead.to_owned();
        for OwnName { openai, here } in names {
            let quoted = format!("'{openai}'");
            if advice.contains(&quoted) {
                advice = if here.is_empty() { String::new() } else { advice.replace(&quoted, here) };
            }
        }
        advice
    }

    /// The refusal of the field of the object at `at`.
    pub(super) fn error(&self, at: &str, names: &[OwnName]) -> InvalidRequest {
        let field = join(at, self.field);
        // A client may show the message alone, so it names the field.
        let is_named = self.feature.starts_with('\'');
        let feature = if is_named { self.feature.to_owned() } else { format!("{} ('{field}')", self.feature) };
        InvalidRequest::unsupported_but(field, &feature, &self.advice(names))
    }
}
