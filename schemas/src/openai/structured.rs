//! The form that a reply must have, under the names of OpenAI, vLLM, SGLang and llama-server. All of them become one
//! [`Constraint`].

use serde::de::MapAccess;
use serde_json::{Map, Value};

use super::response_format::ResponseFormat;
use crate::constraint::{Constraint, Rule};
use crate::grammar::{GrammarError, MAX_GRAMMAR, WriteBudget, rule_of};
use crate::json_values::memory_bytes;
use crate::request::field::{Field, Items, join, object};
use crate::request::read::{Read, Reading, ValueProblem, read_written};
use crate::request::schema::described;
use crate::request::values::{NonEmpty, SchemaObject};
use crate::request::{InvalidRequest, room};

/// The most texts among which a reply may have to choose.
const MAX_CHOICES: usize = 4096;

object! {
    /// The form that the reply must have. At most one of these fields is given. All dialects have them, next to their own.
    pub(crate) struct StructuredBody {
        /// The form that the reply must have.
        response_format: Field<ResponseFormat>,
        /// vLLM's names.
        structured_outputs: Field<StructuredOutputs>,
        /// vLLM's older name of `structured_outputs.json`.
        guided_json: Field<WrittenSchema>,
        /// vLLM's older name of `structured_outputs.regex`.
        guided_regex: Field<NonEmpty>,
        /// vLLM's older name of `structured_outputs.choice`.
        #[schemars(length(min = 1, max = MAX_CHOICES))]
        guided_choice: Field<Items<String>>,
        /// vLLM's older name of `structured_outputs.grammar`.
        guided_grammar: Field<NonEmpty>,
        /// llama-server's name of a schema that the reply follows.
        json_schema: Field<WrittenSchema>,
        /// llama-server's name of a grammar in GBNF. Lark's notation is understood, too. Empty: none.
        grammar: Field<String>,
        /// SGLang's name of a regular expression for the whole reply.
        regex: Field<NonEmpty>,
        /// SGLang's name of a grammar.
        ebnf: Field<NonEmpty>,
    }
}

object! {
    /// The form that the reply must have, as in vLLM: one of these fields.
    pub(crate) struct StructuredOutputs {
        /// A schema that the reply follows.
        json: Field<WrittenSchema>,
        /// A regular expression for the whole reply, in the syntax of Rust's crate `regex`.
        regex: Field<NonEmpty>,
        /// The texts of which the reply is one.
        #[schemars(length(min = 1, max = MAX_CHOICES))]
        choice: Field<Items<String>>,
        /// A grammar for the reply, in Lark's notation or in GBNF.
        grammar: Field<NonEmpty>,
        /// The reply is any JSON object.
        json_object: Field<bool>,
        #[schemars(skip)]
        structural_tag: Field<Value>,
    }
}

/// A JSON schema: an object, or its JSON in a string.
#[derive(Debug)]
pub(crate) struct WrittenSchema(Value);

impl Read for WrittenSchema {
    const EXPECTED: &'static str = "a JSON schema";

    fn string(json: &str) -> Reading<Self> {
        let value = read_written(json).and_then(Result::ok).filter(Value::is_object);
        value.map(WrittenSchema).ok_or_else(|| ValueProblem::value("must be a JSON schema"))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Map::object(fields)?.map(|fields| WrittenSchema(Value::Object(fields))))
    }
}

described!([] WrittenSchema: as SchemaObject);

/// The constraints that a body sets.
#[derive(Default)]
struct Constraints {
    /// Each with the field that sets it.
    set: Vec<(String, Constraint)>,
    /// What their grammars may be written as.
    budget: WriteBudget,
}

impl StructuredBody {
    /// Returns the constraint on the reply. Errors: several fields set one.
    pub(crate) fn check(self) -> Result<Option<Constraint>, InvalidRequest> {
        self.check_beside(None)
    }

    /// The same for a body whose dialect has a field of its own for the form of a reply: `own` is its path and what it sets.
    pub(crate) fn check_beside(self, own: Option<(&str, Constraint)>) -> Result<Option<Constraint>, InvalidRequest> {
        let mut all = Constraints::default();
        if let Some((field, constraint)) = own {
            all.push(field, constraint);
        }
        if let Some(constraint) = self.response_format.get("")?.map_or(Ok(None), ResponseFormat::check)? {
            all.push("response_format", constraint);
        }
        if let Some(outputs) = self.structured_outputs.get("")? {
            const AT: &str = "structured_outputs";
            if outputs.structural_tag.is_given() {
                let field = join(AT, "structural_tag");
                return Err(InvalidRequest::at(field, "is not supported; send 'tools', or a grammar as 'grammar'"));
            }
            all.schema(&join(AT, "json"), outputs.json.get(AT)?)?;
            all.regex(&join(AT, "regex"), outputs.regex.get(AT)?)?;
            all.choice(&join(AT, "choice"), outputs.choice.get(AT)?)?;
            all.grammar(&join(AT, "grammar"), outputs.grammar.get(AT)?)?;
            if outputs.json_object.get(AT)? == Some(true) {
                all.push(&join(AT, "json_object"), Constraint::JsonObject);
            }
        }
        all.schema("guided_json", self.guided_json.get("")?)?;
        all.regex("guided_regex", self.guided_regex.get("")?)?;
        all.choice("guided_choice", self.guided_choice.get("")?)?;
        all.grammar("guided_grammar", self.guided_grammar.get("")?)?;
        all.schema("json_schema", self.json_schema.get("")?)?;
        let grammar = self.grammar.get("")?.filter(|grammar| !grammar.is_empty());
        all.grammar("grammar", grammar.map(NonEmpty))?;
        all.regex("regex", self.regex.get("")?)?;
        all.grammar("ebnf", self.ebnf.get("")?)?;
        if let [(first, _), (second, _), ..] = &*all.set {
            return Err(InvalidRequest::at(second, format_args!("the form of the reply is set by '{first}' already")));
        }
        let constraint = all.set.pop().map(|(_, constraint)| constraint);
        if let Some(Constraint::JsonSchema { held: Some(held), .. }) = &constraint {
            room::take(memory_bytes(held));
        }
        Ok(constraint)
    }
}

impl Constraints {
    fn push(&mut self, field: &str, constraint: Constraint) {
        self.set.push((field.to_owned(), constraint));
    }

    fn schema(&mut self, field: &str, schema: Option<WrittenSchema>) -> Result<(), InvalidRequest> {
        let Some(WrittenSchema(schema)) = schema else { return Ok(()) };
        let constraint = Constraint::json_schema(schema, field, false);
        self.push(field, constraint.map_err(|error| InvalidRequest::at(field, error))?);
        Ok(())
    }

    fn regex(&mut self, field: &str, regex: Option<NonEmpty>) -> Result<(), InvalidRequest> {
        let Some(NonEmpty(regex)) = regex else { return Ok(()) };
        if regex.len() > MAX_GRAMMAR {
            return Err(InvalidRequest::at(field, GrammarError::TooLong));
        }
        self.rule(field, Rule::Pattern(format!("(?:{})", crate::grammar::whole(&regex))));
        Ok(())
    }

    fn choice(&mut self, field: &str, choices: Option<Items<String>>) -> Result<(), InvalidRequest> {
        let Some(choices) = choices else { return Ok(()) };
        let texts = choices.each(field).map(|text| text.map(|(_, text)| text)).collect::<Result<Vec<_>, _>>()?;
        if texts.is_empty() || texts.len() > MAX_CHOICES {
            return Err(InvalidRequest::at(field, format_args!("must have 1 to {MAX_CHOICES} texts")));
        }
        if texts.iter().map(String::len).sum::<usize>() > MAX_GRAMMAR {
            return Err(InvalidRequest::at(field, GrammarError::TooLong));
        }
        self.rule(field, Rule::OneOf(texts.into_iter().map(Rule::Plain).collect()));
        Ok(())
    }

    fn grammar(&mut self, field: &str, grammar: Option<NonEmpty>) -> Result<(), InvalidRequest> {
        let Some(NonEmpty(grammar)) = grammar else { return Ok(()) };
        let rule = rule_of(&grammar, &mut self.budget).map_err(|error| InvalidRequest::at(field, error))?;
        self.rule(field, rule);
        Ok(())
    }

    fn rule(&mut self, field: &str, rule: Rule) {
        // Grammars have a budget of their own, so this only notes what the rule takes.
        room::take(size_of::<Constraint>() + rule.memory_bytes());
        self.push(field, Constraint::Grammar { rule, field: field.to_owned() });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::read::read;
    use crate::request::{MeasuredParse, measured};

    fn parsed(body: &Value) -> Result<Option<Constraint>, InvalidRequest> {
        read::<StructuredBody>(body.to_string().as_bytes()).and_then(StructuredBody::check)
    }

    fn refused(body: Value) -> (String, String) {
        let error = parsed(&body).unwrap_err();
        (error.param.unwrap_or_default(), error.message)
    }

    #[test]
    fn a_schema_in_a_string_has_no_more_values_than_the_body_may_have() {
        let written = |n: usize| json!({ "json_schema": json!({ "enum": vec![json!([0]); n] }).to_string() });
        assert!(parsed(&written(5_000)).is_ok());
        let MeasuredParse { value: parsed, n_bytes, .. } = measured(|| parsed(&written(2_000_000)));
        assert!(parsed.is_err());
        assert_eq!(n_bytes, 16 << 20, "no more than the room of a body was used");
    }

    #[test]
    fn what_a_body_becomes_is_measured() {
        let schema = json!({ "json_schema": { "enum": vec![json!([0]); 5_000] } });
        let MeasuredParse { value: constraint, n_bytes, .. } = measured(|| parsed(&schema).unwrap().unwrap());
        let held = constraint.memory_bytes();
        assert!((held..3 * held).contains(&n_bytes), "{n_bytes} of {held}");
        let grammar = json!({ "grammar": format!("root ::= a a\na ::= \"{}\"", "x".repeat(10_000)) });
        let MeasuredParse { value: constraint, n_bytes, .. } = measured(|| parsed(&grammar).unwrap().unwrap());
        assert!(n_bytes >= constraint.memory_bytes(), "{n_bytes} of {}", constraint.memory_bytes());
    }

    #[test]
    fn every_servers_name_becomes_one_constraint() {
        let schema = json!({ "type": "object" });
        let held = |field: &str| Constraint::json_schema(schema.clone(), field, false).unwrap();
        let rule = |field: &str, rule| Constraint::Grammar { rule, field: field.to_owned() };
        let choice = || Rule::OneOf(vec![Rule::Plain("a".into()), Rule::Plain("b".into())]);
        let pattern = |pattern: &str| Rule::Pattern(pattern.to_owned());
        for (body, expected) in [
            (json!({ "response_format": { "type": "json_object" } }), Constraint::JsonObject),
            (json!({ "structured_outputs": { "json": schema } }), held("structured_outputs.json")),
            (json!({ "structured_outputs": { "json_object": true } }), Constraint::JsonObject),
            (
                json!({ "structured_outputs": { "regex": "^[a-z]+$", "json": null } }),
                rule("structured_outputs.regex", pattern("(?:[a-z]+)")),
            ),
            (json!({ "structured_outputs": { "choice": ["a", "b"] } }), rule("structured_outputs.choice", choice())),
            (
                json!({ "structured_outputs": { "grammar": "root ::= \"a\" | [b]" } }),
                rule("structured_outputs.grammar", pattern("(?:(?:a)|(?:[b]))")),
            ),
            (json!({ "guided_json": schema }), held("guided_json")),
            (json!({ "guided_json": "{\"type\": \"object\"}" }), held("guided_json")),
            (json!({ "guided_regex": "a|b" }), rule("guided_regex", pattern("(?:a|b)"))),
            (json!({ "guided_choice": ["a", "b"] }), rule("guided_choice", choice())),
            (json!({ "guided_grammar": "start: \"a\"" }), rule("guided_grammar", pattern("(?:a)"))),
            (json!({ "json_schema": schema }), held("json_schema")),
            (json!({ "grammar": "root ::= \"a\"" }), rule("grammar", pattern("(?:a)"))),
            (json!({ "regex": "a" }), rule("regex", pattern("(?:a)"))),
            (json!({ "ebnf": "root ::= \"a\"" }), rule("ebnf", pattern("(?:a)"))),
        ] {
            assert_eq!(parsed(&body), Ok(Some(expected)), "{body}");
        }
        for nothing in [json!({}), json!({ "grammar": "", "guided_json": null }), json!({ "structured_outputs": {} })] {
            assert_eq!(parsed(&nothing), Ok(None), "{nothing}");
        }
    }

    #[test]
    fn what_cannot_be_held_is_named() {
        let (param, message) = refused(json!({ "guided_regex": "a", "response_format": { "type": "json_object" } }));
        assert_eq!((param.as_str(), message.contains("'response_format'")), ("guided_regex", true), "{message}");
        assert_eq!(
            refused(json!({ "structured_outputs": { "structural_tag": "x" } })).0,
            "structured_outputs.structural_tag"
        );
        for field in ["guided_regex", "guided_grammar", "regex", "ebnf"] {
            assert_eq!(refused(json!({ field: "" })).0, field);
        }
        assert_eq!(refused(json!({ "structured_outputs": { "regex": "" } })).0, "structured_outputs.regex");
        assert_eq!(refused(json!({ "guided_json": "no JSON" })).0, "guided_json");
        assert_eq!(refused(json!({ "json_schema": [] })).0, "json_schema");
        assert_eq!(refused(json!({ "guided_choice": [] })).0, "guided_choice");
        assert_eq!(refused(json!({ "guided_choice": ["a", 1] })).0, "guided_choice[1]");
        assert_eq!(refused(json!({ "grammar": "root ::= x" })).0, "grammar");
        assert_eq!(refused(json!({ "guided_regex": "x".repeat(MAX_GRAMMAR + 1) })).0, "guided_regex");
        assert_eq!(refused(json!({ "guided_choice": vec!["x".repeat(MAX_GRAMMAR); 2] })).0, "guided_choice");
    }
}
