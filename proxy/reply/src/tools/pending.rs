//! Text that is held until it is clear whether it contains a tag.

/// Text that has arrived and is not taken yet.
#[derive(Debug, Clone, Default)]
pub(super) struct Pending(pub(super) String);

/// The result of looking for a tag at the front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Front {
    /// The tag with this index, which was taken.
    Tag(usize),
    /// No text, or the beginning of a tag.
    Unknown,
    Other,
}

impl Pending {
    pub(super) fn push(&mut self, text: String) {
        if self.0.is_empty() {
            self.0 = text;
        } else {
            self.0.push_str(&text);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes all text.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.0)
    }

    /// Takes the text before the first tag, and the tag if it is complete. The beginning of a possible tag stays.
    pub(super) fn take_until(&mut self, tags: &[&str]) -> (String, Option<usize>) {
        for (at, _) in self.0.char_indices() {
            let rest = &self.0[at..];
            if let Some(tag) = tags.iter().position(|tag| rest.starts_with(tag)) {
                let text = self.0[..at].to_owned();
                self.0.drain(..at + tags[tag].len());
                return (text, Some(tag));
            }
            if tags.iter().any(|tag| tag.starts_with(rest)) {
                return (self.0.drain(..at).collect(), None);
            }
        }
        (self.take(), None)
    }

    /// Drops leading white space.
    pub(super) fn skip_space(&mut self) {
        let n_space = self.0.len() - self.0.trim_start().len();
        self.0.drain(..n_space);
    }

    /// Takes a tag from the front, if there is one.
    pub(super) fn take_front(&mut self, tags: &[&str]) -> Front {
        if let Some(tag) = tags.iter().position(|tag| self.0.starts_with(tag)) {
            self.0.drain(..tags[tag].len());
            return Front::Tag(tag);
        }
        if tags.iter().any(|tag| tag.starts_with(self.0.as_str())) { Front::Unknown } else { Front::Other }
    }

    /// Takes the first character.
    pub(super) fn next(&mut self) -> Option<char> {
        let first = self.0.chars().next()?;
        self.0.drain(..first.len_utf8());
        Some(first)
    }
}

/// Returns `held` and `text` up to the white space at their end, which `held` keeps.
pub(super) fn without_end_space(held: &mut String, text: String) -> String {
    if held.is_empty() && !text.ends_with(char::is_whitespace) {
        return text;
    }
    held.push_str(&text);
    let n_certain = held.trim_end().len();
    held.drain(..n_certain).collect()
}
