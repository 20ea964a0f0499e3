use serde_json::json;

use super::*;

/// An object whose only property has this schema.
fn of(property: Value) -> Value {
    named("a", property)
}

/// An object whose only property has this name and this schema.
fn named(name: &str, property: Value) -> Value {
    json!({ "type": "object", "properties": { name: property }, "required": [name], "additionalProperties": false })
}

/// Returns the schema with these definitions.
fn with_definitions(mut schema: Value, definitions: Value) -> Value {
    schema["$defs"] = definitions;
    schema
}

#[test]
fn schemas_of_the_guide_are_taken() {
    for property in [
        json!({ "type": "string", "pattern": "^(?:a|b)$", "description": "d", "title": "A" }),
        json!({ "type": "string", "pattern": r"^\(?\d{3}\\(?:a)\" }),
        json!({ "type": ["string", "null"], "format": "date-time", "enum": ["x", null] }),
        json!({ "type": "number", "minimum": 0, "exclusiveMaximum": 1.5, "multipleOf": 0.1 }),
        json!({ "type": "integer", "const": 3 }),
        json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 1, "maxItems": 3 }),
        json!({ "anyOf": [of(json!({ "type": "string" })), { "type": "null" }] }),
        json!({ "anyOf": [of(json!({ "type": "string" })), named("b", json!({ "type": "string" })), { "$ref": "#/$defs/none" }] }),
        json!({ "type": ["integer", "null"], "enum": [1, 2, null], "minimum": 1.5 }),
        json!({ "$ref": "#" }),
        of(of(json!({ "type": "string" }))),
    ] {
        let mut schema = of(property.clone());
        schema["$defs"] = json!({ "none": { "type": "null" } });
        assert_eq!(gap(&schema), None, "{property}");
    }
    let mut list = of(json!({ "$ref": "#/$defs/node" }));
    list["$defs"] = json!({ "node": of(json!({ "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] })) });
    list["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    assert_eq!(gap(&list), None);
    assert_eq!(
        gap(&json!({ "type": "object", "properties": {}, "additionalProperties": false })),
        None,
        "an empty object requires nothing"
    );
}

#[test]
fn what_the_guide_does_not_have_is_a_gap() {
    let (text, closed) = (json!({ "type": "string" }), of(json!({ "type": "string" })));
    let with = |key: &str, value: Value| {
        let mut schema = closed.clone();
        schema[key] = value;
        schema
    };
    let open = json!({ "type": "object", "properties": { "a": text }, "required": ["a"] });
    assert_eq!(gap(&open), Some(StrictGap::OpenObject));
    assert_eq!(gap(&of(open)), Some(StrictGap::OpenObject), "everywhere");
    assert_eq!(gap(&with("additionalProperties", json!(true))), Some(StrictGap::OpenObject));
    assert_eq!(gap(&with("additionalProperties", text.clone())), Some(StrictGap::OpenObject));
    assert_eq!(gap(&with("required", json!([]))), Some(StrictGap::OptionalProperty));
    assert_eq!(gap(&of(with("required", json!(null)))), Some(StrictGap::UnknownKeyword));
    for root in [
        json!({ "type": "array", "items": text }),
        with("type", json!(["object", "null"])),
        json!({ "anyOf": [closed] }),
        json!({ "$ref": "#" }),
        json!({}),
    ] {
        assert_eq!(gap(&root), Some(StrictGap::RootIsNoObject), "{root}");
    }
    for property in [
        json!({}),
        json!(true),
        json!({ "enum": ["x"] }),
        json!({ "type": "string", "default": "x" }),
        json!({ "type": "string", "minLength": 1 }),
        json!({ "type": "string", "format": "uri" }),
        json!({ "type": "string", "pattern": "a(?=b)" }),
        json!({ "type": "string", "minItems": 1 }),
        json!({ "type": "tuple" }),
        json!({ "type": "array" }),
        json!({ "type": "array", "items": { "type": "string" }, "uniqueItems": true }),
        json!({ "type": "array", "prefixItems": [{ "type": "string" }] }),
        json!({ "type": "object", "additionalProperties": false }),
        json!({ "allOf": [{ "type": "string" }] }),
        json!({ "oneOf": [{ "type": "string" }] }),
        json!({ "not": { "type": "string" } }),
        json!({ "$ref": "#", "description": "d" }),
        json!({ "$ref": "#/$defs/missing" }),
        json!({ "$ref": "http://elsewhere/schema" }),
        json!({ "$ref": "#/properties/a" }),
        json!({ "$ref": "#/$defs/missing/properties" }),
        json!({ "type": ["array", "null"], "items": { "type": "string" } }),
        with("type", json!(["object", "null"])),
        json!({ "type": [] }),
        json!({ "type": ["string", "string"] }),
        json!({ "type": ["string", "integer", "null"] }),
        json!({ "anyOf": [] }),
        json!({ "anyOf": [{ "anyOf": [{ "type": "null" }] }] }),
        json!({ "anyOf": [closed, with("title", json!("t"))] }),
        json!({ "anyOf": [closed, { "$ref": "#" }] }),
        json!({ "type": "string", "enum": [] }),
        json!({ "type": "string", "enum": ["a", "a"] }),
        json!({ "type": "string", "enum": ["a", 1] }),
        json!({ "type": "integer", "const": 1.5 }),
        json!({ "type": "integer", "minimum": "x" }),
        json!({ "type": "string", "pattern": null }),
        json!({ "type": "string", "format": null }),
        json!({ "type": "string", "enum": null }),
        json!({ "type": "null", "const": null }),
        json!({ "type": "string", "title": null }),
        json!({ "type": "string", "anyOf": null }),
        json!({ "type": "string", "items": null }),
        json!({ "type": "string", "pattern": r"\\(?=b)" }),
        with_definitions(closed.clone(), json!({ "inner": text })),
    ] {
        assert_eq!(gap(&of(property.clone())), Some(StrictGap::UnknownKeyword), "{property}");
    }
    assert_eq!(gap(&with("required", json!(["a", "b"]))), Some(StrictGap::UnknownKeyword));
    assert_eq!(gap(&with("required", json!(["a", "a"]))), Some(StrictGap::UnknownKeyword));
    let refers = of(json!({ "$ref": "#/$defs/n" }));
    for round in [json!({ "$ref": "#/$defs/n" }), json!({ "anyOf": [{ "$ref": "#/$defs/n" }, { "type": "null" }] })] {
        let schema = with_definitions(refers.clone(), json!({ "n": round }));
        assert_eq!(gap(&schema), Some(StrictGap::UnknownKeyword), "{schema}");
    }
}

#[test]
fn levels_are_counted_through_references() {
    let used = |name: String| of(json!({ "$ref": format!("#/$defs/{name}") }));
    // A chain of `n` definitions, each of one level.
    let chain = |n: usize, last: Value| {
        let links = (1..n).map(|i| (format!("d{i}"), used(format!("d{}", i + 1))));
        let definitions: serde_json::Map<_, _> = links.chain([(format!("d{n}"), last)]).collect();
        with_definitions(used("d1".to_owned()), definitions.into())
    };
    let flat = || of(json!({ "type": "string" }));
    assert_eq!((gap(&chain(9, flat())), gap(&chain(10, flat()))), (None, Some(StrictGap::TooLarge)));
    // Levels of what goes round have no end: all are added.
    let round = || of(json!({ "anyOf": [{ "$ref": "#/$defs/d1" }, { "type": "null" }] }));
    assert_eq!((gap(&chain(9, round())), gap(&chain(10, round()))), (None, Some(StrictGap::TooLarge)));
    // Each definition is used twice by the one before: the ways through them double with each.
    let twice = |i: usize| {
        let next = json!({ "$ref": format!("#/$defs/d{}", i + 1) });
        json!({ "type": "object", "properties": { "a": next, "b": next }, "required": ["a", "b"],
            "additionalProperties": false })
    };
    let definitions = |n: usize| {
        let links = (1..n).map(|i| (format!("d{i}"), twice(i)));
        links.chain([(format!("d{n}"), flat())]).collect::<serde_json::Map<_, _>>()
    };
    let doubled = |n: usize| gap(&with_definitions(twice(0), definitions(n).into()));
    assert_eq!((doubled(9), doubled(2_000)), (None, Some(StrictGap::TooLarge)));
    // Definitions side by side are as deep as the deepest.
    let n = 30;
    let names: Vec<String> = (0..n).map(|i| format!("d{i}")).collect();
    let properties: serde_json::Map<_, _> =
        names.iter().map(|name| (name.clone(), json!({ "$ref": format!("#/$defs/{name}") }))).collect();
    let defined: serde_json::Map<_, _> = names.iter().map(|name| (name.clone(), flat())).collect();
    let wide = json!({ "type": "object", "properties": properties, "required": names, "additionalProperties": false, "$defs": defined });
    assert_eq!(gap(&wide), None);
}

#[test]
fn limits_of_size_are_those_of_the_guide() {
    let nested = |n: usize| (1..n).fold(of(json!({ "type": "string" })), |inner, _| of(inner));
    assert_eq!((gap(&nested(10)), gap(&nested(11))), (None, Some(StrictGap::TooLarge)));
    let wide = |n: usize, name: &dyn Fn(usize) -> String| {
        let names: Vec<String> = (0..n).map(name).collect();
        let properties: serde_json::Map<_, _> = names.iter().map(|n| (n.clone(), json!({ "type": "null" }))).collect();
        json!({ "type": "object", "properties": properties, "required": names, "additionalProperties": false })
    };
    let short = |i: usize| format!("p{i}");
    assert_eq!((gap(&wide(5_000, &short)), gap(&wide(5_001, &short))), (None, Some(StrictGap::TooLarge)));
    let long = |i: usize| format!("{i:01200}");
    assert_eq!((gap(&wide(100, &long)), gap(&wide(101, &long))), (None, Some(StrictGap::TooLarge)));
    let choice = |n: usize, width: usize| {
        let values: Vec<String> = (0..n).map(|i| format!("{i:0width$}")).collect();
        gap(&of(json!({ "type": "string", "enum": values })))
    };
    assert_eq!((choice(1_000, 15), choice(1_001, 4)), (None, Some(StrictGap::TooLarge)));
    assert_eq!((choice(250, 400), choice(251, 60)), (None, Some(StrictGap::TooLarge)));
}
