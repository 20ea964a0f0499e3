//! Rules for the values between the tags of Qwen3-Coder's calls, from a tool's schema.

use baton_schemas::constraint::{DEFINITIONS, Rule};
use serde_json::Value;

/// The rule of a schema's parameters, in its order. For strings only `enum` and `const` apply, because strings stand
/// between the tags without quotes.
pub(super) fn parameters(arguments: &Rule) -> Rule {
    let schema = if let Rule::Json(schema) = arguments { schema } else { &Value::Null };
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        let any = Rule::Sequence(vec![
            Rule::literal("<parameter="),
            Rule::Pattern("[^>\\n]{1,64}".to_owned()),
            Rule::literal(">\n"),
            Rule::Until("\n</parameter>\n".to_owned()),
        ]);
        return Rule::Repeat { rule: Box::new(any), min: 0, max: Some(MAX_PARAMETERS) };
    };
    let required = |key: &String| {
        schema.get("required").and_then(Value::as_array).is_some_and(|all| all.iter().any(|name| name == key))
    };
    let parameter = |(key, value): (&String, &Value)| {
        let open = Rule::Plain(format!("<parameter={key}>\n"));
        let rule = Rule::Sequence([vec![open], value_rule(value, schema)].concat());
        if required(key) { rule } else { Rule::optional(rule) }
    };
    Rule::Sequence(properties.iter().map(parameter).collect())
}

/// The maximum number of parameters of a tool whose schema names none.
const MAX_PARAMETERS: u32 = 32;

fn value_rule(schema: &Value, root: &Value) -> Vec<Rule> {
    let close = || Rule::literal("\n</parameter>\n");
    if !is_text(schema) {
        return vec![Rule::Json(with_definitions(schema, root)), close()];
    }
    let fixed =
        schema.get("enum").and_then(Value::as_array).cloned().or_else(|| Some(vec![schema.get("const")?.clone()]));
    match fixed {
        Some(values) => {
            let literals = values.iter().filter_map(Value::as_str).map(|text| Rule::Plain(text.to_owned())).collect();
            vec![Rule::OneOf(literals), close()]
        }
        // The end is a part of the pattern: a text that its own grammar could continue with a newline must not take the
        // newline before the tag.
        None => match whole_pattern(schema) {
            Some(pattern) => vec![Rule::Pattern(format!("(?:{pattern})\\n</parameter>\\n"))],
            None => vec![Rule::Until("\n</parameter>\n".to_owned())],
        },
    }
}

/// Returns the pattern that a string must match from its beginning to its end, in the form of the inputs of custom tools.
fn whole_pattern(schema: &Value) -> Option<&str> {
    schema.get("pattern")?.as_str()?.strip_prefix("^(?:")?.strip_suffix(")$")
}

/// Makes a part of a schema complete: adds the root's definitions, which references use. The check of tools bounds how
/// much memory these copies take.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = schema.clone();
    for key in DEFINITIONS {
        if let (Some(fields), Some(definitions)) = (schema.as_object_mut(), root.get(key)) {
            fields.entry(key).or_insert_with(|| definitions.clone());
        }
    }
    schema
}

/// Returns true if the schema allows only strings.
pub(super) fn is_text(schema: &Value) -> bool {
    let fixed = schema.get("enum").and_then(Value::as_array);
    match (schema.get("type"), fixed, schema.get("const")) {
        (Some(kind), _, _) => kind == "string",
        (None, Some(values), _) => values.iter().all(Value::is_string),
        (None, None, Some(value)) => value.is_string(),
        (None, None, None) => false,
    }
}
