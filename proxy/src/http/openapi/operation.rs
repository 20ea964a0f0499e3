//! The documented part of a route: what it takes, what it replies and how it fails.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};

/// Makes a schema, or a reference to one that the generator keeps.
pub(super) type SchemaFn = fn(&mut SchemaGenerator) -> Schema;

/// A method of a path.
#[derive(Clone)]
pub(in crate::http) struct Operation {
    pub(super) summary: &'static str,
    pub(super) body: Option<SchemaFn>,
    /// The replies with status 200, each with its media type.
    pub(super) replies: Vec<(Cow<'static, str>, ReplyContent)>,
    /// Query parameters, each with its meaning.
    pub(super) query: Vec<(&'static str, &'static str)>,
    /// Statuses of failures in addition to those of every route.
    pub(super) failures: Vec<u16>,
    /// The body of a 503, if it is not an error envelope.
    pub(super) unavailable: Option<SchemaFn>,
    /// No key is required.
    pub(super) is_public: bool,
    /// It is answered during the shutdown.
    pub(super) is_answered_while_stopping: bool,
    /// The client may choose a policy, and the reply names the route.
    pub(super) is_planned: bool,
    /// Lists of routes for people leave it out.
    pub(super) is_unlisted: bool,
}

/// The form of a reply.
#[derive(Clone, Copy)]
pub(super) enum ReplyContent {
    /// One JSON value.
    Json(SchemaFn),
    /// Server-sent events with JSON values as data. `ends_marked`: the last event's data is `[DONE]`.
    Events {
        item: SchemaFn,
        ends_marked: bool,
    },
    /// Lines that are JSON values.
    Lines(SchemaFn),
    Text,
}

/// A body that is no JSON, too slow, too large, or compressed in an unknown way.
const BODY: [u16; 3] = [408, 413, 415];
/// A model that does not exist, a limit of the key, a full queue.
const MODEL: [u16; 3] = [404, 429, 503];
/// The engine lacks the capability.
const UNSUPPORTED: u16 = 501;

impl Operation {
    /// An operation that fails only as every route does.
    pub(in crate::http) fn new(summary: &'static str) -> Self {
        Operation {
            summary,
            body: None,
            replies: Vec::new(),
            query: Vec::new(),
            failures: Vec::new(),
            unavailable: None,
            is_public: false,
            is_answered_while_stopping: false,
            is_planned: false,
            is_unlisted: false,
        }
    }

    /// Requires a JSON body of this type.
    pub(in crate::http) fn takes<T: JsonSchema>(mut self) -> Self {
        self.body = Some(|generator| generator.subschema_for::<T>());
        self.failures.extend(BODY);
        self
    }

    /// Has this optional query parameter, which takes any text.
    pub(in crate::http) fn asks(mut self, name: &'static str, meaning: &'static str) -> Self {
        self.query.push((name, meaning));
        self
    }

    /// Replies with one JSON value.
    pub(in crate::http) fn replies<T: JsonSchema>(self) -> Self {
        self.content("application/json", ReplyContent::Json(|generator| generator.subschema_for::<T>()))
    }

    /// Replies with events if the client asks for a stream.
    pub(in crate::http) fn streams(self, item: SchemaFn) -> Self {
        self.content("text/event-stream", ReplyContent::Events { item, ends_marked: false })
    }

    /// Like [`Operation::streams`], with a last event that is `[DONE]`.
    pub(in crate::http) fn streams_marked(self, item: SchemaFn) -> Self {
        self.content("text/event-stream", ReplyContent::Events { item, ends_marked: true })
    }

    /// Replies with lines unless the client asks for one object.
    pub(in crate::http) fn streams_lines<T: JsonSchema>(self) -> Self {
        self.content("application/x-ndjson", ReplyContent::Lines(|generator| generator.subschema_for::<T>()))
    }

    pub(in crate::http) fn replies_text(self, media_type: &'static str) -> Self {
        self.content(media_type, ReplyContent::Text)
    }

    fn content(mut self, media_type: &'static str, content: ReplyContent) -> Self {
        self.replies.push((media_type.into(), content));
        self
    }

    /// Adds the failures of an operation that calls a model's node.
    pub(in crate::http) fn of_model(mut self) -> Self {
        self.failures.extend(MODEL);
        self.failures.push(UNSUPPORTED);
        self
    }

    /// Like [`Operation::of_model`], for a request whose route is planned.
    pub(in crate::http) fn planned(mut self) -> Self {
        self.is_planned = true;
        self.of_model()
    }

    /// Adds statuses of failures.
    pub(in crate::http) fn fails(mut self, statuses: &[u16]) -> Self {
        self.failures.extend(statuses);
        self
    }

    /// Adds a 503 whose body is this JSON value.
    pub(in crate::http) fn unavailable<T: JsonSchema>(mut self) -> Self {
        self.failures.push(503);
        self.unavailable = Some(|generator| generator.subschema_for::<T>());
        self
    }

    /// Requires no key, for any method of its path.
    pub(in crate::http) fn public(mut self) -> Self {
        self.is_public = true;
        self
    }

    /// Answers during the shutdown, too, for any method of its path: it reports health or state.
    pub(in crate::http) fn answered_while_stopping(mut self) -> Self {
        self.is_answered_while_stopping = true;
        self
    }

    /// Leaves it out of the lists of routes for people: an alias, or a route that refuses everything.
    pub(in crate::http) fn unlisted(mut self) -> Self {
        self.is_unlisted = true;
        self
    }
}
