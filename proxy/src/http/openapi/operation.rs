//! What is said of one method of one path.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};

/// Makes a schema, or a reference to one that the generator keeps.
pub(super) type Schemed = fn(&mut SchemaGenerator) -> Schema;

/// A method of a path. The path says whose error envelope it has.
#[derive(Clone)]
pub(in crate::http) struct Operation {
    pub(super) summary: &'static str,
    pub(super) body: Option<Schemed>,
    pub(super) success: Success,
    pub(super) query: Vec<(&'static str, &'static str)>,
    /// Statuses of failures beside those that every route has.
    pub(super) failures: Vec<u16>,
    /// 503 has a body of its own.
    pub(super) unavailable: Option<Schemed>,
    /// Needs no key.
    pub(super) is_public: bool,
    /// How the request is planned can be chosen, and the reply says what was.
    pub(super) is_planned: bool,
}

/// What a request gets if nothing is wrong.
#[derive(Clone, Default)]
pub(super) struct Success {
    /// With their media types.
    pub(super) contents: Vec<(Cow<'static, str>, Content)>,
}

/// What a reply is made of.
#[derive(Clone, Copy)]
pub(super) enum Content {
    /// One JSON value.
    Json(Schemed),
    /// Server-sent events whose data are JSON values, in OpenAI's older streams but for the last.
    Events { item: Schemed, ends_marked: bool },
    /// Lines that are JSON values.
    Lines(Schemed),
    /// Text.
    Text,
}

/// A body that is no JSON, too slow, too large, or compressed in an unknown way.
const BODY: [u16; 3] = [408, 413, 415];
/// A model that is not there, limits of keys, a full queue.
const MODEL: [u16; 3] = [404, 429, 503];
/// What an engine cannot do.
const UNSUPPORTED: u16 = 501;

impl Operation {
    /// Does this, and never fails but as every route does.
    pub(in crate::http) fn new(summary: &'static str) -> Self {
        Operation {
            summary,
            body: None,
            success: Success::default(),
            query: Vec::new(),
            failures: Vec::new(),
            unavailable: None,
            is_public: false,
            is_planned: false,
        }
    }

    /// Reads such a body.
    pub(in crate::http) fn takes<T: JsonSchema>(mut self) -> Self {
        self.body = Some(|generator| generator.subschema_for::<T>());
        self.failures.extend(BODY);
        self
    }

    /// Has this query parameter. Every text is taken.
    pub(in crate::http) fn asks(mut self, name: &'static str, meaning: &'static str) -> Self {
        self.query.push((name, meaning));
        self
    }

    /// Answers with such a value.
    pub(in crate::http) fn replies<T: JsonSchema>(self) -> Self {
        self.content("application/json", Content::Json(|generator| generator.subschema_for::<T>()))
    }

    /// Answers with such events, if it is asked to.
    pub(in crate::http) fn streams(self, item: Schemed) -> Self {
        self.content("text/event-stream", Content::Events { item, ends_marked: false })
    }

    /// The same, with a last event that is `[DONE]`.
    pub(in crate::http) fn streams_marked(self, item: Schemed) -> Self {
        self.content("text/event-stream", Content::Events { item, ends_marked: true })
    }

    /// Answers with such lines, unless it is asked not to.
    pub(in crate::http) fn streams_lines<T: JsonSchema>(self) -> Self {
        self.content("application/x-ndjson", Content::Lines(|generator| generator.subschema_for::<T>()))
    }

    /// Answers with a text of this type.
    pub(in crate::http) fn replies_text(self, media_type: &'static str) -> Self {
        self.content(media_type, Content::Text)
    }

    fn content(mut self, media_type: &'static str, content: Content) -> Self {
        self.success.contents.push((media_type.into(), content));
        self
    }

    /// Asks a model's node.
    pub(in crate::http) fn of_model(mut self) -> Self {
        self.failures.extend(MODEL);
        self.failures.push(UNSUPPORTED);
        self
    }

    /// Asks a model, by a way that is planned.
    pub(in crate::http) fn planned(mut self) -> Self {
        self.is_planned = true;
        self.of_model()
    }

    /// May also fail so.
    pub(in crate::http) fn fails(mut self, statuses: &[u16]) -> Self {
        self.failures.extend(statuses);
        self
    }

    /// May be unavailable, and then says so in such a value.
    pub(in crate::http) fn unavailable<T: JsonSchema>(mut self) -> Self {
        self.failures.push(503);
        self.unavailable = Some(|generator| generator.subschema_for::<T>());
        self
    }

    /// Needs no key.
    pub(in crate::http) fn public(mut self) -> Self {
        self.is_public = true;
        self
    }
}
