//! A field that this server does not have, and what serves instead.

use super::demand::Off;
use super::field::join;
use super::invalid::InvalidRequest;

/// A field that is refused unless it is switched off.
#[derive(Debug)]
pub(crate) struct RefusedField {
    pub(crate) field: &'static str,
    /// The feature, which begins the error message.
    pub(crate) feature: &'static str,
    /// What serves instead, as an advice to the client. May be empty.
    pub(crate) instead: &'static str,
    pub(crate) off: Off,
}

impl RefusedField {
    pub(crate) const fn new(field: &'static str, off: Off, feature: &'static str, instead: &'static str) -> Self {
        RefusedField { field, feature, instead, off }
    }

    /// The refusal of the field of the object at `at`.
    pub(super) fn error(&self, at: &str) -> InvalidRequest {
        let field = join(at, self.field);
        // A client may show the message alone, so it names the field.
        let is_named = self.feature.starts_with('\'');
        let feature = if is_named { self.feature.to_owned() } else { format!("{} ('{field}')", self.feature) };
        InvalidRequest::unsupported_but(field, &feature, self.instead)
    }
}
