//! What is known of a call while its pieces arrive.

use crate::reply::foreign::ForeignArguments;

#[derive(Default)]
pub(super) struct StreamedCall {
    /// The server's number for it: not unique, since some servers number all calls 0.
    pub(super) number: Option<u32>,
    /// How many calls began before it: its number if the server gives none.
    pub(super) ordinal: u32,
    /// The event that it began in.
    pub(super) event: u64,
    /// The event that its last piece came in.
    pub(super) last_event: u64,
    pub(super) before: BeforeEvent,
    /// The server's id for it. May be empty.
    pub(super) their_id: String,
    /// The id that clients get.
    pub(super) id: String,
    /// Empty until it is known.
    pub(super) name: String,
    pub(super) has_begun: bool,
    /// Arguments that were not passed on yet.
    pub(super) held: String,
    pub(super) has_arguments: bool,
    /// An empty object came for its arguments: all of them, unless text follows.
    pub(super) has_empty_object: bool,
    /// It began with no more than the name of a whole call, which some servers repeat: it is none, unless arguments follow.
    pub(super) is_repeat: bool,
    /// Its id came again: this server's ids tell its calls apart.
    pub(super) has_id_again: bool,
    pub(super) extent: ObjectExtent,
}

impl StreamedCall {
    /// Its arguments are an object that has come to its end.
    pub(super) fn is_whole(&self) -> bool {
        self.extent.is_complete || self.has_only_empty_object()
    }

    pub(super) fn has_only_empty_object(&self) -> bool {
        self.has_empty_object && !self.has_arguments
    }

    /// The text that a piece's arguments add; `None` for an empty object, which is text only within others.
    pub(super) fn text_of<'a>(&self, arguments: &'a ForeignArguments) -> Option<&'a str> {
        match arguments {
            // White space before arguments may be all that there is.
            ForeignArguments::Text(text) if self.has_arguments => Some(text),
            ForeignArguments::Text(text) => Some(text.trim_start()).filter(|text| text.trim_end() != "{}"),
            ForeignArguments::EmptyObject => None,
            ForeignArguments::Nothing => Some(""),
        }
    }

    pub(super) fn is_mere_repeat(&self) -> bool {
        self.is_repeat && !self.has_arguments && !self.has_empty_object
    }
}

/// A call as it was before the event that is being read: what pieces of one event do to each other's calls says nothing.
#[derive(Default)]
pub(super) struct BeforeEvent {
    /// The event that its last piece came in.
    pub(super) event: u64,
    pub(super) is_complete: bool,
}

/// Finds the end of a JSON object that arrives in pieces.
#[derive(Default)]
pub(super) struct ObjectExtent {
    depth: u32,
    is_in_string: bool,
    is_escaped: bool,
    pub(super) is_complete: bool,
}

impl ObjectExtent {
    pub(super) fn take(&mut self, text: &str) {
        for byte in text.bytes() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                _ if self.is_in_string => {}
                b'{' | b'[' => self.depth = self.depth.saturating_add(1),
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.is_complete |= self.depth == 0;
                }
                _ => {}
            }
        }
    }
}
