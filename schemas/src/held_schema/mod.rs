//! The part of a JSON Schema that sampling can hold a text to.
//!
//! The engines' compiler refuses keywords that it cannot enforce. JSON Schema takes unknown formats for annotations
//! (validation, 7.2), and a schema without `strict` is held as far as it can be, so those parts are left out of it here, and
//! named. Upstreams get the schema as it was written.

mod bounds;
mod circular;
mod ecma;
mod numbers;
mod objects;
mod references;

use serde_json::{Map, Value};

use self::bounds::{BOUNDS, Bounds, n_digits};
use self::circular::CircularReferences;
use self::ecma::of_ecma;
use self::numbers::{HeldCount, Step, has_inexact, near, shortened};
use crate::written_number::nearest;

/// How deep the values of a schema may be nested.
pub(crate) const MAX_DEPTH: usize = 64;

/// The formats of strings that engines hold.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Keywords that engines cannot enforce.
const KEYWORDS: [&str; 18] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "$recursiveAnchor",
    "$dynamicAnchor",
];

/// Keywords whose values are schemas, lists of schemas, or maps of schemas.
const SCHEMAS: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
const LISTS: [&str; 5] = ["items", "prefixItems", "allOf", "anyOf", "oneOf"];
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Counts, which some clients write as `1.0`.
const COUNTS: [&str; 6] = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// Keywords with which several schemas describe one value.
const COMBINING: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];

/// The most schemas of a `oneOf` that are compared with one another.
const MAX_COMPARED: usize = 256;

/// The most digits of bounds beside a step, where these may stand anywhere in a schema: of two of 64 bits.
const MAX_BOUNDS_DIGITS: usize = 40;

/// The longest length of a text whose pattern counts repetitions.
const MAX_LENGTH_OF_COUNTED: f64 = 128.0;

/// The most parts that are named.
const MAX_NAMED: usize = 8;

/// The most characters of a part's name.
const MAX_NAME_CHARS: usize = 40;

/// A schema as engines hold a text to it.
#[derive(Debug, PartialEq)]
pub(crate) struct HeldSchema {
    /// The schema without the parts that cannot be held. `None`: it is the same.
    pub(crate) schema: Option<Value>,
    pub(crate) unheld: Unheld,
}

/// The parts of a schema that are not held: keywords, and formats as `format NAME`. Each once, a few.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unheld {
    /// Their names, in printable ASCII.
    pub parts: Vec<String>,
    /// The client asks to hold every part, so a keyword among them is an error.
    pub refused: Option<String>,
}

/// Returns the part of a schema that can be held. Unknown formats are left out even of a strict one.
pub(crate) fn held(schema: &Value, is_strict: bool) -> HeldSchema {
    let hold = |may_nest| {
        let combines = has_key(schema, &COMBINING);
        let circular = CircularReferences::of(schema);
        let mut holding =
            Holding { root: schema, is_strict, may_nest, combines, circular, steps: None, unheld: Unheld::default() };
        let mut held = schema.clone();
        holding.hold(&mut held);
        (held, holding.unheld)
    };
    let (mut held, mut unheld) = hold(true);
    if depth(&held) > MAX_DEPTH {
        (held, unheld) = hold(false);
    }
    if !is_strict {
        unheld.refused = None;
    }
    HeldSchema { schema: (held != *schema).then_some(held), unheld }
}

struct Holding<'s> {
    root: &'s Value,
    is_strict: bool,
    /// What is held may be nested deeper than the schema.
    may_nest: bool,
    /// Several of its parts may describe one value.
    combines: bool,
    circular: CircularReferences,
    /// The step of numbers that are multiples of all steps so far.
    steps: Option<Step>,
    unheld: Unheld,
}

impl Holding<'_> {
    fn name(&mut self, part: &str) {
        let shown = |c: char| if c.is_ascii_graphic() && !matches!(c, ',' | ';') || c == ' ' { c } else { '?' };
        let part: String = part.chars().take(MAX_NAME_CHARS).map(shown).collect();
        if self.unheld.parts.len() < MAX_NAMED && !self.unheld.parts.contains(&part) {
            self.unheld.parts.push(part);
        }
    }

    /// Names a keyword that is not held, which is an error in a strict schema.
    fn leave_out(&mut self, keyword: &str) {
        self.name(keyword);
        self.unheld.refused.get_or_insert_with(|| keyword.to_owned());
    }

    fn hold(&mut self, schema: &mut Value) {
        let Value::Object(fields) = schema else { return };
        self.references(fields);
        self.keywords(fields);
        self.strings(fields);
        self.numbers(fields);
        self.objects(fields);
        self.alternatives(fields);
        let is_remote = |reference: &Value| reference.as_str().is_some_and(|reference| !reference.starts_with('#'));
        if fields.get("$ref").is_some_and(is_remote) {
            fields.remove("$ref");
            self.leave_out("$ref");
        }
        for key in SCHEMAS {
            if let Some(inner) = fields.get_mut(key) {
                self.hold(inner);
            }
        }
        for key in LISTS {
            let list = fields.get_mut(key).and_then(Value::as_array_mut);
            list.into_iter().flatten().for_each(|inner| self.hold(inner));
        }
        for key in MAPS {
            let map = fields.get_mut(key).and_then(Value::as_object_mut);
            map.into_iter().flat_map(Map::values_mut).for_each(|inner| self.hold(inner));
        }
    }

    /// Leaves out keywords that cannot be enforced. Values that allow everything do not count.
    fn keywords(&mut self, fields: &mut Map<String, Value>) {
        const IN_PLACE: [&str; 6] = ["allOf", "anyOf", "oneOf", "$ref", "if", "additionalProperties"];
        let is_closed = fields.get("unevaluatedProperties") == Some(&Value::Bool(false));
        if is_closed && !IN_PLACE.iter().any(|key| fields.contains_key(*key)) {
            // Nothing else evaluates properties, so it means the same.
            fields.remove("unevaluatedProperties");
            fields.insert("additionalProperties".to_owned(), false.into());
        }
        for key in KEYWORDS {
            let Some(value) = fields.remove(key) else { continue };
            let allows_all = match key {
                "not" | "uniqueItems" => value == Value::Bool(false),
                // They do nothing without the keyword that they belong to.
                "then" | "else" | "minContains" | "maxContains" | "$recursiveAnchor" | "$dynamicAnchor" => true,
                _ => value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty),
            };
            if !allows_all {
                self.leave_out(key);
            }
        }
    }

    fn strings(&mut self, fields: &mut Map<String, Value>) {
        if let Some(Value::String(format)) = fields.get("format").filter(|format| !is_known_format(format)) {
            let format = format!("format {format}");
            // `int32` and its like annotate numbers.
            if may_be(fields, "string") {
                self.name(&format);
            }
            fields.remove("format");
        }
        if let Some(Value::String(pattern)) = fields.get_mut("pattern") {
            match of_ecma(pattern) {
                Some(written) => *pattern = written,
                None => {
                    fields.remove("pattern");
                    self.leave_out("pattern");
                }
            }
        }
        // An engine cannot tell whether some text has such a pattern and such a length.
        let is_counted = |pattern: &str| pattern.contains('{');
        let length = |key: &&str| fields.get(*key).and_then(nearest)?.as_f64();
        let is_long = |key: &&str| length(key).is_some_and(|n| n > MAX_LENGTH_OF_COUNTED);
        if !self.is_strict
            && fields.get("pattern").and_then(Value::as_str).is_some_and(is_counted)
            && ["minLength", "maxLength"].iter().any(is_long)
        {
            for key in ["minLength", "maxLength"] {
                if fields.remove(key).is_some() {
                    self.leave_out(key);
                }
            }
        }
    }

    fn numbers(&mut self, fields: &mut Map<String, Value>) {
        for key in COUNTS.into_iter().chain(BOUNDS).chain(["multipleOf"]) {
            let Some((number, is_same)) = fields.get(key).and_then(shortened) else { continue };
            fields.insert(key.to_owned(), number.into());
            if !is_same {
                self.leave_out(key);
            }
        }
        for key in COUNTS {
            let Some(value) = fields.get_mut(key) else { continue };
            match HeldCount::of(value, key.starts_with("max")) {
                HeldCount::Held(count) => *value = count.into(),
                HeldCount::Wrong => {}
                HeldCount::HoldsAnyway => drop(fields.remove(key)),
                HeldCount::Unreachable => {
                    fields.remove(key);
                    self.leave_out(key);
                }
            }
        }
        let of_integers = may_be(fields, "integer") && !may_be(fields, "number");
        let bounds = Bounds { of_integers, may_end_early: self.is_strict };
        bounds.hold(fields).into_iter().for_each(|key| self.leave_out(key));
        // A bound beside a step may stand in another part of the schema that describes the same number.
        let n_digits = if self.combines { MAX_BOUNDS_DIGITS } else { n_digits(fields) };
        if let Some(step) = fields.get("multipleOf").and_then(Value::as_f64)
            && !self.takes_step(step, n_digits)
        {
            fields.remove("multipleOf");
            self.leave_out("multipleOf");
        }
        if fields.get("const").is_some_and(has_inexact) {
            let number = fields.remove("const").unwrap_or_default();
            self.leave_out("const");
            near(fields, &number);
        }
        if fields.get("enum").and_then(Value::as_array).is_some_and(|values| values.iter().any(has_inexact)) {
            self.near_values(fields);
        }
    }

    /// Returns true if engines hold a step, and that of the numbers that are multiples of all steps that meet.
    fn takes_step(&mut self, step: f64, n_digits: usize) -> bool {
        let Some(step) = Step::of(step).filter(|step| step.is_held_within(n_digits)) else { return false };
        if !self.combines {
            return true;
        }
        let all = self.steps.map_or(Some(step), |earlier| earlier.and(step));
        let all = all.filter(|step| step.is_held_within(n_digits));
        self.steps = all.or(self.steps);
        all.is_some()
    }

    /// Holds a text to the exact ones of some values, or near another one of them.
    fn near_values(&mut self, fields: &mut Map<String, Value>) {
        self.leave_out("enum");
        let Some(Value::Array(values)) = fields.remove("enum") else { return };
        let (inexact, exact): (Vec<Value>, Vec<Value>) = values.into_iter().partition(has_inexact);
        if !self.may_nest || !inexact.iter().all(|value| nearest(value).is_some()) {
            return;
        }
        let near = inexact.iter().map(|number| {
            let mut one = Map::new();
            near(&mut one, number);
            Value::Object(one)
        });
        let mut all: Vec<Value> = near.collect();
        if !exact.is_empty() {
            all.push(serde_json::json!({ "enum": exact }));
        }
        one_of(fields, all.into());
    }

    /// Engines hold `oneOf` only if no text fits two of its alternatives. Any of them is the nearest thing.
    fn alternatives(&mut self, fields: &mut Map<String, Value>) {
        if self.is_strict || !fields.get("oneOf").is_some_and(Value::is_array) {
            return;
        }
        let alternatives = fields.remove("oneOf").unwrap_or_default();
        let is_left_out = fields.contains_key("anyOf") && !self.may_nest;
        if is_left_out || !alternatives.as_array().is_some_and(|all| self.are_apart(all)) {
            self.name("oneOf");
        }
        if !is_left_out {
            one_of(fields, alternatives);
        }
    }

    /// Returns true if no text surely fits two of these schemas: their types differ, or the constant of a property.
    fn are_apart(&self, all: &[Value]) -> bool {
        let all: Vec<&Value> = all.iter().map(|one| self.resolved(one)).collect();
        let apart = |a: &Value, b: &Value| {
            let kinds = (a["type"].as_str(), b["type"].as_str());
            let constants =
                |a: &Value, b: &Value| !a["const"].is_null() && !b["const"].is_null() && a["const"] != b["const"];
            let names = a["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let by_property = |name: &str| constants(&a["properties"][name], &b["properties"][name]);
            matches!(kinds, (Some(a), Some(b)) if a != b && (a, b) != ("integer", "number") && (a, b) != ("number", "integer"))
                || constants(a, b)
                || names.into_iter().any(by_property)
        };
        all.len() <= MAX_COMPARED && (0..all.len()).all(|i| (i + 1..all.len()).all(|k| apart(all[i], all[k])))
    }

    /// Follows a reference within the schema, once.
    fn resolved<'v>(&'v self, schema: &'v Value) -> &'v Value {
        let reference = schema.get("$ref").and_then(Value::as_str).and_then(|reference| reference.strip_prefix('#'));
        reference.and_then(|pointer| self.root.pointer(pointer)).unwrap_or(schema)
    }
}

/// How deep values are nested.
fn depth(value: &Value) -> usize {
    let inner = match value {
        Value::Array(items) => items.iter().map(depth).max(),
        Value::Object(fields) => fields.values().map(depth).max(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    };
    1 + inner.unwrap_or(0)
}

/// Returns true if one of these is a key in a value.
fn has_key(value: &Value, keys: &[&str]) -> bool {
    match value {
        Value::Array(items) => items.iter().any(|item| has_key(item, keys)),
        Value::Object(fields) => fields.iter().any(|(key, value)| keys.contains(&key.as_str()) || has_key(value, keys)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Adds alternatives, beside others that the schema has.
fn one_of(fields: &mut Map<String, Value>, alternatives: Value) {
    if !fields.contains_key("anyOf") {
        fields.insert("anyOf".to_owned(), alternatives);
    } else if let Value::Array(all) = fields.entry("allOf").or_insert_with(|| Value::Array(Vec::new())) {
        all.push(serde_json::json!({ "anyOf": alternatives }));
    }
}

fn is_known_format(format: &Value) -> bool {
    format.as_str().is_none_or(|format| FORMATS.contains(&format))
}

/// Returns true if a value that the schema describes may have this type.
fn may_be(fields: &Map<String, Value>, kind: &str) -> bool {
    match fields.get("type") {
        Some(Value::String(only)) => only == kind,
        Some(Value::Array(kinds)) => kinds.iter().any(|one| one == kind),
        _ => true,
    }
}

#[cfg(test)]
mod tests;
