//! Fields that a body's type does not declare: those of other servers, and those that nobody knows.
//!
//! A client of another server sends that server's fields. Ignoring one that changes the reply would give a wrong answer in
//! silence, so each field of the published request types has its effect in a list: none, refused with what serves instead,
//! or ignored and named in the reply's header, as a field is that no list has. A field leaves its list when it is declared.

use std::marker::PhantomData;

use serde::de::MapAccess;

use super::demand::{Demand, Off};
use super::field::{ObjectMember, join};
pub(crate) use super::foreign_fields::{CONTINUED, LAST_MESSAGE, OF_VECTORS, VERBOSITY};
use super::foreign_fields::{NAMED, REFUSED, WITHOUT_EFFECT};
use super::invalid::InvalidRequest;
use super::notes;
use super::read::JsonReader;
pub(crate) use super::refused_field::{OwnName, RefusedField};

/// What a kind of body makes of fields that it does not declare. Its own lists come before those for all bodies.
pub(crate) trait ForeignFields: std::fmt::Debug {
    /// The path of the object that has the fields.
    const AT: &'static str = "";
    /// Fields that do not change the reply.
    const WITHOUT_EFFECT: &'static [&'static str] = &[];
    const REFUSED: &'static [RefusedField] = &[];
    /// This dialect's names for fields of OpenAI's chats.
    const NAMES: &'static [OwnName] = &[];
    /// Whether the request has a reply that a field could change. Without one, the list for all bodies refuses nothing.
    const GENERATES: bool = true;
}

/// Takes every field that the other members of its body do not take, so it is the last one. `/openapi.json` does not
/// mention it.
#[derive(Debug)]
pub(crate) struct Foreign<L> {
    /// The first field that asks for something refused.
    refused: Option<&'static RefusedField>,
    list: PhantomData<L>,
}

/// What becomes of a field.
enum Effect {
    None,
    Refused(&'static RefusedField),
    /// It is ignored, and the reply's header names it unless it is switched off.
    Told(&'static Off),
}

impl<L: ForeignFields> Foreign<L> {
    /// Refuses the first field that asks for something that this server does not do.
    pub(crate) fn check(self) -> Result<(), InvalidRequest> {
        self.refused.map_or(Ok(()), |refused| Err(refused.error(L::AT, L::NAMES)))
    }

    fn effect(key: &str) -> Effect {
        let refused = |list: &'static [RefusedField]| list.iter().find(|refused| refused.field == key);
        match refused(L::REFUSED) {
            Some(refused) => Effect::Refused(refused),
            None if L::WITHOUT_EFFECT.contains(&key) || WITHOUT_EFFECT.contains(&key) => Effect::None,
            None if !L::GENERATES => told(key),
            None => refused(REFUSED).or_else(|| refused(OF_VECTORS)).map_or_else(|| told(key), Effect::Refused),
        }
    }
}

fn told(key: &str) -> Effect {
    Effect::Told(NAMED.iter().find(|(field, _)| *field == key).map_or(&Off::NEVER, |(_, off)| off))
}

impl<L: ForeignFields> ObjectMember for Foreign<L> {
    const IS_REQUIRED: bool = false;

    fn named(_: &'static str) -> Self {
        Foreign { refused: None, list: PhantomData }
    }

    fn accept<'de, A: MapAccess<'de>>(&mut self, _: &'static str, key: &str, fields: &mut A) -> Result<bool, A::Error> {
        let demand = fields.next_value_seed(JsonReader::<Demand>::new())?.unwrap_or(Demand::Other);
        match Self::effect(key) {
            Effect::Refused(refused) if demand.is_one(&refused.off) => {
                self.refused.get_or_insert(refused);
            }
            Effect::Told(off) if demand.is_one(off) => notes::ignored(&join(L::AT, key)),
            Effect::None | Effect::Refused(_) | Effect::Told(_) => {}
        }
        Ok(true)
    }
}

/// A body without lists of its own.
#[derive(Debug)]
pub(crate) struct NoOwnFields;

impl ForeignFields for NoOwnFields {}

/// A body whose request generates nothing. Clients send it the whole body of a chat.
#[derive(Debug)]
pub(crate) struct NoReplyFields;

impl ForeignFields for NoReplyFields {
    const GENERATES: bool = false;
}

/// A body of texts whose vectors or scores are computed.
#[derive(Debug)]
pub(crate) struct VectorFields;

impl ForeignFields for VectorFields {
    const GENERATES: bool = false;
    const REFUSED: &'static [RefusedField] = OF_VECTORS;
}
