//! Which schemas OpenAI's strict mode takes. Without it, a reply of OpenAI's servers need not follow its schema.

mod strict_schema;

use std::collections::{BTreeMap, BTreeSet};

use baton_schemas::GenerateRequest;
use baton_schemas::constraint::{Constraint, DEFINITIONS, SchemaLabel, SchemaPromise};
use serde::Deserialize;
use serde_json::Value;

use self::strict_schema::{JsonType, JsonTypes, StrictSchema, looks_around};
use crate::StrictGap;

/// The most levels of objects and arrays.
const MAX_LEVELS: usize = 10;
/// The most properties of all objects together.
const MAX_PROPERTIES: usize = 5_000;
/// The most characters of all names and of all texts to choose from.
const MAX_CHARS: usize = 120_000;
/// The most values to choose from.
const MAX_CHOICES: usize = 1_000;
/// A choice of more texts than this may have [`MAX_CHARS_OF_LONG_CHOICE`] at most.
const MAX_SHORT_CHOICE: usize = 250;
const MAX_CHARS_OF_LONG_CHOICE: usize = 15_000;

/// The `strict` that a server gets with a schema: the client's own. A server that needs it for each schema gets true for a
/// promised one without a gap.
pub(super) fn strict_of(label: &SchemaLabel, gap: Option<StrictGap>, is_needed: bool) -> Option<bool> {
    match label.promise {
        SchemaPromise::Unsaid => None,
        SchemaPromise::Strict(strict) => Some(strict),
        SchemaPromise::ByDialect => (is_needed && gap.is_none()).then_some(true),
    }
}

/// The schema of a request's reply, if its dialect promises that the reply follows it.
fn promised_schema(request: &GenerateRequest) -> Option<&Value> {
    match request.constraint.as_deref() {
        Some(Constraint::JsonSchema { schema, label, .. }) if label.promise == SchemaPromise::ByDialect => Some(schema),
        _ => None,
    }
}

/// Returns true if a request's dialect promises that the reply follows its schema.
pub(crate) fn has_promise(request: &GenerateRequest) -> bool {
    promised_schema(request).is_some()
}

impl StrictGap {
    /// Why a server that only holds strict schemas may break the promise that a request's dialect makes of its schema.
    /// `None`: it makes none, or the server keeps it. Reads the whole schema: once per request is enough.
    pub fn of(request: &GenerateRequest) -> Option<StrictGap> {
        promised_schema(request).and_then(gap)
    }
}

/// What keeps strict mode from taking this schema. The rules are those of OpenAI's guide to structured outputs, "Supported
/// schemas" (developers.openai.com/api/docs/guides/structured-outputs, November 2026): a root that is an object, all
/// properties required, `additionalProperties: false` everywhere, a list of keywords, and limits of size. What the guide
/// leaves open counts as not taken, as a refused request is worse than a warning.
fn gap(schema: &Value) -> Option<StrictGap> {
    if has_null_member(schema) {
        return Some(StrictGap::UnknownKeyword);
    }
    let Ok(root) = StrictSchema::deserialize(schema) else { return Some(StrictGap::UnknownKeyword) };
    if !matches!(root.types, Some(JsonTypes::One(JsonType::Object))) || root.any_of.is_some() {
        return Some(StrictGap::RootIsNoObject);
    }
    Checked::default().whole(&root).err()
}

/// Returns true if a keyword or another member of an object is null, which would be read as a missing one.
fn has_null_member(value: &Value) -> bool {
    match value {
        Value::Object(members) => members.values().any(|member| member.is_null() || has_null_member(member)),
        Value::Array(items) => items.iter().any(has_null_member),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// What references name: the whole schema, or one of its definitions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RefTarget<'s> {
    Whole,
    Definition(&'s str),
}

impl<'s> RefTarget<'s> {
    fn of(reference: &'s str) -> Option<RefTarget<'s>> {
        if reference == "#" {
            return Some(RefTarget::Whole);
        }
        let name =
            DEFINITIONS.iter().find_map(|key| reference.strip_prefix("#/")?.strip_prefix(key)?.strip_prefix('/'))?;
        // Escaped, or a path inside the definition.
        (!name.contains(['/', '~', '%'])).then_some(RefTarget::Definition(name))
    }
}

/// The whole schema, or one of its definitions.
struct RefTargetSchema<'s> {
    schema: &'s StrictSchema,
    /// Its own levels.
    n_levels: usize,
    /// What it refers to, each with the level at which that stands in it.
    uses: Vec<(RefTarget<'s>, usize)>,
    /// The deepest level at which it has been found so far.
    deepest: usize,
    /// Its references are being followed.
    is_open: bool,
}

/// What has been counted of a schema.
#[derive(Default)]
struct Checked<'s> {
    targets: BTreeMap<RefTarget<'s>, RefTargetSchema<'s>>,
    n_properties: usize,
    n_chars: usize,
    n_choices: usize,
    /// Names of properties that were compared between alternatives.
    n_compared: usize,
    /// Of the target that is being taken.
    n_levels: usize,
    uses: Vec<(RefTarget<'s>, usize)>,
    is_recursive: bool,
}

impl<'s> Checked<'s> {
    fn whole(&mut self, root: &'s StrictSchema) -> Result<(), StrictGap> {
        let definitions = || root.defs.iter().chain(&root.definitions);
        let n_targets = 1 + definitions().count();
        let named = definitions().map(|(name, schema)| (RefTarget::Definition(name), schema));
        for (target, schema) in std::iter::once((RefTarget::Whole, root)).chain(named) {
            let found = RefTargetSchema { schema, n_levels: 0, uses: Vec::new(), deepest: 0, is_open: false };
            self.targets.insert(target, found);
        }
        // A reference that is another one's target may go round.
        if self.targets.len() < n_targets || definitions().any(|(_, schema)| schema.reference.is_some()) {
            return Err(StrictGap::UnknownKeyword);
        }
        definitions().try_for_each(|(name, _)| self.chars(name))?;
        for (target, schema) in self.targets.iter().map(|(target, found)| (*target, found.schema)).collect::<Vec<_>>() {
            self.take(schema, 1)?;
            let (n_levels, uses) = (std::mem::take(&mut self.n_levels), std::mem::take(&mut self.uses));
            if let Some(found) = self.targets.get_mut(&target) {
                (found.n_levels, found.uses) = (n_levels, uses);
            }
        }
        self.find_at(RefTarget::Whole, 1)?;
        let n_levels: usize = self.targets.values().map(|found| found.n_levels).sum();
        if self.is_recursive && n_levels > MAX_LEVELS { Err(StrictGap::TooLarge) } else { Ok(()) }
    }

    /// Follows the references of a target that stands at a level. A target is followed again only where it stands deeper, so
    /// at most [`MAX_LEVELS`] times.
    fn find_at(&mut self, target: RefTarget<'s>, level: usize) -> Result<(), StrictGap> {
        let found = self.targets.get_mut(&target).ok_or(StrictGap::UnknownKeyword)?;
        self.is_recursive |= found.is_open;
        if found.is_open || found.deepest >= level {
            return Ok(());
        }
        if level - 1 + found.n_levels > MAX_LEVELS {
            return Err(StrictGap::TooLarge);
        }
        (found.deepest, found.is_open) = (level, true);
        let uses = std::mem::take(&mut found.uses);
        uses.iter().try_for_each(|(used, at)| self.find_at(*used, level - 1 + at))?;
        if let Some(found) = self.targets.get_mut(&target) {
            (found.uses, found.is_open) = (uses, false);
        }
        Ok(())
    }

    /// Takes a schema that stands at a level, from 1.
    fn take(&mut self, schema: &'s StrictSchema, level: usize) -> Result<(), StrictGap> {
        if let Some(target) = &schema.reference {
            let target = RefTarget::of(target).filter(|target| self.targets.contains_key(target));
            let target = target.filter(|_| schema.is_bare_reference()).ok_or(StrictGap::UnknownKeyword)?;
            self.uses.push((target, level));
            return Ok(());
        }
        // References name definitions of the whole alone.
        let is_whole = self.targets.get(&RefTarget::Whole).is_some_and(|whole| std::ptr::eq(whole.schema, schema));
        if schema.has_definitions() && !is_whole {
            return Err(StrictGap::UnknownKeyword);
        }
        // Alternatives have types of their own.
        let are_types_taken = schema.types.as_ref().is_none_or(JsonTypes::are_taken);
        if schema.types.is_some() == schema.any_of.is_some() || !are_types_taken || !schema.is_of_its_types() {
            return Err(StrictGap::UnknownKeyword);
        }
        if schema.pattern.as_ref().is_some_and(|pattern| looks_around(pattern)) {
            return Err(StrictGap::UnknownKeyword);
        }
        if schema.is(JsonType::Object) || schema.is(JsonType::Array) {
            self.n_levels = self.n_levels.max(level);
        }
        if self.n_levels > MAX_LEVELS {
            return Err(StrictGap::TooLarge);
        }
        let types = schema.types.as_ref().map_or(&[][..], JsonTypes::as_slice);
        schema.choices.iter().try_for_each(|choices| self.choices(choices, types))?;
        schema.constant.iter().try_for_each(|constant| self.choices(std::slice::from_ref(constant), types))?;
        schema.any_of.iter().try_for_each(|alternatives| self.alternatives(alternatives, level))?;
        if schema.is(JsonType::Array) {
            let items = schema.items.as_ref().ok_or(StrictGap::UnknownKeyword)?;
            self.take(items, level + 1)?;
        }
        if schema.is(JsonType::Object) { self.object(schema, level) } else { Ok(()) }
    }

    /// Takes alternatives: one at least, none of which has alternatives itself. OpenAI's servers refuse objects with the same
    /// first property (openai-python's issue 2193), and which one is first is not known of all servers on the way: no two
    /// objects may share a property.
    fn alternatives(&mut self, alternatives: &'s [StrictSchema], level: usize) -> Result<(), StrictGap> {
        let mut names = BTreeSet::new();
        for one in alternatives {
            self.take(one, level)?;
            let target = one.reference.as_deref().and_then(RefTarget::of);
            let one = target.and_then(|target| self.targets.get(&target)).map_or(one, |found| found.schema);
            let mut properties = one.properties.iter().flat_map(BTreeMap::keys);
            let n_before = names.len();
            let is_shared = !properties.all(|name| names.insert(name));
            self.n_compared += names.len() - n_before;
            if self.n_compared > MAX_PROPERTIES {
                return Err(StrictGap::TooLarge);
            }
            if is_shared || one.any_of.is_some() {
                return Err(StrictGap::UnknownKeyword);
            }
        }
        if alternatives.is_empty() { Err(StrictGap::UnknownKeyword) } else { Ok(()) }
    }

    fn object(&mut self, schema: &'s StrictSchema, level: usize) -> Result<(), StrictGap> {
        if schema.additional_properties != Some(Value::Bool(false)) {
            return Err(StrictGap::OpenObject);
        }
        let properties = schema.properties.as_ref().ok_or(StrictGap::UnknownKeyword)?;
        let required: BTreeSet<&String> = schema.required.iter().flatten().collect();
        if !properties.keys().all(|name| required.contains(name)) {
            return Err(StrictGap::OptionalProperty);
        }
        if schema.required.iter().flatten().count() > properties.len() {
            return Err(StrictGap::UnknownKeyword);
        }
        self.n_properties += properties.len();
        if self.n_properties > MAX_PROPERTIES {
            return Err(StrictGap::TooLarge);
        }
        properties.iter().try_for_each(|(name, property)| {
            self.chars(name)?;
            self.take(property, level + 1)
        })
    }

    /// Takes values of these types to choose from: one at least, each once.
    fn choices(&mut self, values: &[Value], types: &[JsonType]) -> Result<(), StrictGap> {
        self.n_choices += values.len();
        let before = self.n_chars;
        values.iter().filter_map(Value::as_str).try_for_each(|text| self.chars(text))?;
        let is_long = values.len() > MAX_SHORT_CHOICE && self.n_chars - before > MAX_CHARS_OF_LONG_CHOICE;
        if is_long || self.n_choices > MAX_CHOICES {
            return Err(StrictGap::TooLarge);
        }
        let are_of_types = values.iter().all(|value| types.iter().any(|one| one.has(value)));
        let different: BTreeSet<String> = values.iter().map(Value::to_string).collect();
        let are_taken = are_of_types && !values.is_empty() && different.len() == values.len();
        if are_taken { Ok(()) } else { Err(StrictGap::UnknownKeyword) }
    }

    fn chars(&mut self, text: &str) -> Result<(), StrictGap> {
        self.n_chars += text.chars().count();
        if self.n_chars > MAX_CHARS { Err(StrictGap::TooLarge) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
