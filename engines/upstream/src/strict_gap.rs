//! Why a schema is not sent as a strict one.

/// Why OpenAI's strict mode does not take a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StrictGap {
    /// The whole is no object.
    RootIsNoObject,
    /// An object may have other properties.
    OpenObject,
    /// A property is not required.
    OptionalProperty,
    /// A keyword or its value is not known there.
    UnknownKeyword,
    /// It is larger than the limits.
    TooLarge,
    /// The server has refused it as a strict one.
    Refused,
}

impl StrictGap {
    /// The gap in a sentence's end, for clients.
    pub fn as_str(self) -> &'static str {
        match self {
            StrictGap::RootIsNoObject => "the whole is no object",
            StrictGap::OpenObject => "an object may have other properties",
            StrictGap::OptionalProperty => "a property is not required",
            StrictGap::UnknownKeyword => "a keyword or its value is not known there",
            StrictGap::TooLarge => "it is too large",
            StrictGap::Refused => "it refused it as one",
        }
    }
}
