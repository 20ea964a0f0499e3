use serde_json::json;

use super::*;

/// `parts` are the named ones, joined.
fn check(schema: Value, expected: Value, parts: &str) {
    let HeldSchema { schema: held, unheld } = held(&schema, false);
    assert_eq!(
        (held.unwrap_or_else(|| schema.clone()), unheld.parts.join(", ").as_str()),
        (expected, parts),
        "{schema}"
    );
}

fn same(schema: Value) {
    check(schema.clone(), schema, "");
}

#[test]
fn a_schema_that_can_be_held_stays() {
    same(json!({}));
    same(json!({"type": "object", "properties": {"a": {"type": "string", "format": "uuid", "pattern": "^a{2}$"}},
        "required": ["a"], "additionalProperties": false, "minProperties": 1}));
    same(json!({"type": "integer", "minimum": -5, "maximum": 1e15, "multipleOf": 0.25}));
    same(json!({"properties": {"not": {}, "if": {}}, "enum": [{"not": 1, "format": "x"}]}));
    assert_eq!(held(&json!({"type": "object"}), false).schema, None, "nothing is copied");
}

#[test]
fn unknown_formats_are_annotations() {
    for format in ["password", "path", "binary", "idn-email", "no such"] {
        check(json!({"type": "string", "format": format}), json!({"type": "string"}), &format!("format {format}"));
    }
    check(json!({"type": "integer", "format": "int64"}), json!({"type": "integer"}), "");
    let strict = held(&json!({"items": {"type": "string", "format": "password"}}), true);
    assert_eq!((strict.schema, strict.unheld.refused), (Some(json!({"items": {"type": "string"}})), None));
}

#[test]
fn what_cannot_be_enforced_is_left_out_and_named() {
    check(
        json!({"type": "array", "uniqueItems": true, "items": {"not": {"type": "null"}, "type": "string"}, "contains": {"const": 1}}),
        json!({"type": "array", "items": {"type": "string"}}),
        "contains, uniqueItems, not",
    );
    check(json!({"type": "object", "propertyNames": {"pattern": "a"}}), json!({"type": "object"}), "propertyNames");
    check(json!({"if": {}, "then": {"type": "null"}, "else": {}}), json!({}), "");
    check(json!({"uniqueItems": false, "propertyNames": {}, "not": false}), json!({}), "");
    check(json!({"unevaluatedProperties": false}), json!({"additionalProperties": false}), "");
    check(json!({"$ref": "https://example.com/x", "type": "null"}), json!({"type": "null"}), "$ref");
    check(json!({"pattern": "(?=a)b"}), json!({}), "pattern");
    check(json!({"pattern": "^[[a]{2}$"}), json!({"pattern": "^[\\[a]{2}$"}), "");
    check(
        json!({"properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2, "maxProperties": 2}),
        json!({"properties": {"a": {}, "b": {}}, "required": ["a"]}),
        "minProperties, maxProperties",
    );
    check(
        json!({"patternProperties": {"^a": {}, "^b": {}, "c$": {}}, "additionalProperties": false}),
        json!({"patternProperties": {"^a": {}, "^b": {}}, "additionalProperties": true}),
        "patternProperties",
    );
    let strict = held(&json!({"items": {"uniqueItems": true}}), true);
    assert_eq!(strict.unheld.refused.as_deref(), Some("uniqueItems"));
}

#[test]
fn numbers_are_held_exactly_or_named() {
    check(json!({"type": "array", "minItems": 2.0}), json!({"type": "array", "minItems": 2}), "");
    check(
        json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}),
        json!({"type": "integer", "minimum": 0}),
        "maximum",
    );
    let all = json!({"type": "integer", "minimum": i64::MIN + 1024, "maximum": 1_u64 << 63});
    check(json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}), all, "");
    for (key, bound, held) in [
        ("maximum", 9_007_199_254_740_993_i64, json!({"maximum": 9_007_199_254_740_992_u64})),
        ("minimum", 9_007_199_254_740_993, json!({"minimum": 9_007_199_254_740_994_u64})),
        ("minimum", -9_007_199_254_740_993, json!({"minimum": -9_007_199_254_740_992_i64})),
        ("exclusiveMaximum", 1 << 60, json!({"maximum": (1_i64 << 60) - 128})),
        ("exclusiveMinimum", -(1 << 60), json!({"minimum": 128 - (1_i64 << 60)})),
        ("maximum", 1_000_000_000_000_000_000, json!({"maximum": 1_000_000_000_000_000_000_i64})),
        ("minimum", -1_000_000_000_000_000_001, json!({"minimum": -1_000_000_000_000_000_000_i64})),
        ("maximum", i64::MAX - 1, json!({"maximum": i64::MAX - 1023})),
        ("minimum", i64::MAX, json!({"minimum": 1_u64 << 63, "maximum": 1_u64 << 63})),
        (
            "maximum",
            -1_000_000_000_000_000_000,
            json!({"maximum": -1_000_000_000_000_000_000_i64, "minimum": i64::MIN + 1024}),
        ),
    ] {
        let mut expected = held.clone();
        expected["type"] = "integer".into();
        check(json!({"type": "integer", key: bound}), expected, "");
    }
    check(json!({"type": "integer", "maximum": i64::MIN}), json!({"type": "integer"}), "maximum");
    check(json!({"type": "integer", "exclusiveMinimum": i64::MAX}), json!({"type": "integer"}), "exclusiveMinimum");
    let strict = |schema: Value| held(&schema, true);
    assert_eq!(strict(json!({"type": "integer", "minimum": 0, "maximum": i64::MAX})).unheld, Unheld::default());
    let beyond = strict(json!({"type": "integer", "maximum": u64::MAX}));
    assert_eq!(
        (beyond.schema, beyond.unheld.refused),
        (Some(json!({"type": "integer", "maximum": 1_u64 << 63})), None)
    );
    same(json!({"type": "number", "minimum": -1e15, "maximum": 1e15}));
    check(json!({"type": "number", "minimum": 1e-300}), json!({"type": "number", "minimum": 1e-30}), "");
    let beyond = json!({"type": "number", "maximum": f64::from(f32::MAX)});
    check(beyond, json!({"type": "number"}), "maximum");
    check(json!({"maxLength": 1_u64 << 32, "maxItems": 1e300}), json!({}), "");
    check(json!({"minLength": 1_u64 << 32, "minItems": 1e300}), json!({}), "minLength, minItems");
    check(json!({"multipleOf": 1_u64 << 31}), json!({}), "multipleOf");
    same(json!({"multipleOf": 1_000_000}));
    check(json!({"type": "number", "multipleOf": 1e12}), json!({"type": "number"}), "multipleOf");
    let long = |json: &str| crate::written_number::parse(json).unwrap();
    check(long(r#"{"const": 12345678901234567890123}"#), json!({"type": "integer"}), "const");
    check(long(r#"{"const": 1e-400}"#), json!({"const": 0.0}), "const");
    check(long(r#"{"const": 0.1234567890123456789}"#), json!({"const": 0.123_456_789_012_345_68}), "const");
    check(long(r#"{"const": {"a": 1e999}}"#), json!({}), "const");
    check(long(r#"{"enum": [1e999, 5]}"#), json!({"anyOf": [{"type": "integer"}, {"enum": [5]}]}), "enum");
    check(long(r#"{"maximum": 1e999, "maxItems": 1e999}"#), json!({}), "maximum");
    check(long(r#"{"minLength": 12345678901234567890123}"#), json!({}), "minLength");
    check(long(r#"{"minimum": 0.1234567890123456789}"#), json!({"minimum": 0.123_456_789_012_345_68}), "minimum");
    let described = long(r#"{"default": 12345678901234567890123, "examples": [1e999]}"#);
    check(described.clone(), described, "");
    let near = json!({"type": "integer", "minimum": 9_007_199_254_740_991_u64, "maximum": 9_007_199_254_740_994_u64});
    let some = json!({"anyOf": [near, {"enum": ["a", 5]}]});
    check(json!({"enum": ["a", 9_007_199_254_740_993_u64, 5]}), some, "enum");
    check(json!({"enum": ["a", [9_007_199_254_740_993_u64]]}), json!({}), "enum");
    same(json!({"enum": [9_007_199_254_740_992_u64, 0.1, -3]}));
}

#[test]
fn a_step_beside_bounds_is_held_as_far_as_an_engine_can_compare_digits() {
    let of = |step: u32, most: u64| json!({"type": "integer", "multipleOf": step, "minimum": 0, "maximum": most});
    same(of(5_000, 1 << 60));
    same(of(1_000_000, 1 << 40));
    same(of(9_999, i32::MAX as u64));
    for (step, most) in [(9_999, 1 << 60), (50_000, 10_000_000), (86_400, 4_102_444_800)] {
        check(of(step, most), json!({"type": "integer", "minimum": 0, "maximum": most}), "multipleOf");
        assert_eq!(held(&of(step, most), true).unheld.refused.as_deref(), Some("multipleOf"));
    }
    same(json!({"type": "integer", "multipleOf": 86_400, "minimum": 0}));
    // The bound may be that of the same number.
    let apart = json!({"allOf": [{"multipleOf": 9_999}, {"maximum": 1_u64 << 60}]});
    check(apart, json!({"allOf": [{}, {"maximum": 1_u64 << 60}]}), "multipleOf");
}

#[test]
fn a_reference_that_comes_back_stands_alone() {
    let tree = |child: Value| json!({"type": "object", "properties": {"child": child}});
    let alone = tree(json!({"$ref": "#"}));
    check(tree(json!({"$ref": "#", "nullable": true})), alone.clone(), "nullable");
    check(tree(json!({"$ref": "#", "type": "object", "minProperties": 1})), alone, "type, minProperties");
    let described = tree(json!({"$ref": "#", "description": "a child"}));
    check(described.clone(), described, "");
    let all = tree(json!({"allOf": [{"$ref": "#"}, {"minProperties": 1}]}));
    check(all, tree(json!({"allOf": [{"$ref": "#"}]})), "allOf");
    let any = json!([{"$ref": "#"}, {"type": "null"}]);
    check(tree(json!({"anyOf": any, "minProperties": 1})), tree(json!({"anyOf": any})), "minProperties");
    // By way of another one, and at the top, beside the definitions.
    let defs = json!({"a": {"properties": {"b": {"$ref": "#/$defs/b", "type": "object"}}}, "b": {"items": {"$ref": "#/$defs/a"}}});
    let held_defs = json!({"a": {"properties": {"b": {"$ref": "#/$defs/b"}}}, "b": {"items": {"$ref": "#/$defs/a"}}});
    check(json!({"$ref": "#/$defs/a", "$defs": defs}), json!({"$ref": "#/$defs/a", "$defs": held_defs}), "type");
    let other = json!({"$defs": {"a": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/a", "maxLength": 3}}});
    check(other.clone(), other, "");
    assert_eq!(held(&tree(json!({"$ref": "#", "nullable": true})), true).schema, None);
}

#[test]
fn a_pattern_that_counts_is_held_without_long_lengths() {
    let of =
        |pattern: &str, most: u32| json!({"type": "string", "pattern": pattern, "minLength": 3, "maxLength": most});
    for (pattern, most) in [("^[a-z]{1,50}$", 128), ("^[a-z]+$", 2_000)] {
        check(of(pattern, most), of(pattern, most), "");
    }
    let counted = "^[a-z]{1,50}( [a-z]{1,50})*$";
    check(of(counted, 2_000), json!({"type": "string", "pattern": counted}), "minLength, maxLength");
    let digits = of(counted, 2_000).to_string().replace("2000", "2000.000000000000000000001");
    let digits = crate::written_number::parse(&digits).unwrap();
    check(digits, json!({"type": "string", "pattern": counted}), "minLength, maxLength");
}

#[test]
fn what_is_held_is_not_nested_deeper_than_schemas_may_be() {
    let mut schema = json!({"type": "string"});
    while depth(&schema) < MAX_DEPTH - 1 {
        schema = json!({"anyOf": [{"type": "null"}], "oneOf": [schema, {"type": "null"}]});
    }
    let HeldSchema { schema: held, unheld } = held(&schema, false);
    assert!(depth(&held.unwrap()) <= MAX_DEPTH);
    assert_eq!(unheld.parts, ["oneOf"]);
}

#[test]
fn one_of_becomes_any_of_and_is_named_unless_its_schemas_are_apart() {
    let kinds = json!([{"type": "string"}, {"type": "null"}]);
    check(json!({"oneOf": kinds}), json!({"anyOf": kinds}), "");
    let tagged = |tag: &str| json!({"properties": {"t": {"const": tag}}, "required": ["t"]});
    let schema = json!({"$defs": {"a": tagged("a")}, "oneOf": [{"$ref": "#/$defs/a"}, tagged("b")]});
    assert_eq!(held(&schema, false).unheld.parts, [""; 0]);
    let overlapping = json!([{"minimum": 1}, {"maximum": 2}]);
    check(json!({"oneOf": overlapping}), json!({"anyOf": overlapping}), "oneOf");
    check(
        json!({"anyOf": [{}], "oneOf": overlapping}),
        json!({"anyOf": [{}], "allOf": [{"anyOf": overlapping}]}),
        "oneOf",
    );
    assert_eq!(held(&json!({"oneOf": overlapping}), true).schema, None);
}
