//! With a real vocabulary: text satisfies its grammar, from the point where the grammar constrains it.

use std::sync::Arc;

use baton_engines::registry::{self, EngineOptions};
use baton_link::Engine;
use baton_schemas::constraint::{Constraint, Rule};
use baton_schemas::generate::{Conversation, Sampling};
use baton_schemas::node::TokenizeRequest;
use baton_schemas::{EngineError, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use serde_json::json;

use crate::models;

struct Rig {
    engine: Arc<dyn Engine>,
    prompt: Vec<Token>,
}

impl Rig {
    async fn start() -> Option<Rig> {
        let model = models::whole_smollm2()?;
        let config = EngineOptions { n_threads: Some(1), n_ctx: Some(1024), ..models::of_llama(model) };
        let engine = registry::open(config, None).unwrap();
        let messages = json!([{ "role": "user", "content": "What is the capital of France?" }]);
        let conversation: Conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
        let prompt = engine.render(&conversation, Default::default()).await.unwrap();
        Some(Rig { engine, prompt })
    }

    /// The text that follows `said`, with control tokens spelled out.
    async fn after(&self, said: &str, rule: Option<&Rule>) -> String {
        let text =
            TokenizeRequest { text: said.into(), add_special: false, parse_special: true, key: Default::default() };
        let request = SequenceRequest {
            prompt: self.prompt.clone(),
            generated: self.engine.tokenize(&text).await.unwrap(),
            max_tokens: Some(48),
            sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
            constraint: rule.map(|rule| Constraint::Grammar { rule: rule.clone(), field: "tools".to_owned() }.into()),
            ..SequenceRequest::default()
        };
        let mut events = self.engine.generate(request).await.unwrap();
        let mut bytes = Vec::new();
        while let Some(event) = events.next().await {
            if let SequenceEvent::Token(token) = event.unwrap() {
                bytes.extend(token.bytes);
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Text with up to two calls in it.
fn lazy() -> Rule {
    let number = json!({ "type": "object", "properties": { "n": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["n"], "additionalProperties": false });
    let call = Rule::Sequence(vec![
        Rule::Until("<call>".to_owned()),
        Rule::literal("\n{\"name\": \"f\", \"arguments\": "),
        Rule::Json(number),
        Rule::literal("}</call>"),
    ]);
    Rule::Sequence(vec![Rule::Repeat { rule: Box::new(call), min: 0, max: Some(2) }, Rule::text()])
}

#[tokio::test]
async fn text_is_free_until_a_call_begins() {
    let Some(rig) = Rig::start().await else { return };
    assert_eq!(rig.after("", Some(&lazy())).await, rig.after("", None).await, "plain text is not constrained");
    for said in ["<call>", "Let me see: 7 < 8.\n<call>"] {
        let call = rig.after(said, Some(&lazy())).await;
        println!("{call:?}");
        let rest = call.strip_prefix("\n{\"name\": \"f\", \"arguments\": {\"n\": ").unwrap_or_else(|| panic!("{call}"));
        assert!(rest.starts_with(|c: char| c.is_ascii_digit()) && rest[1..].starts_with("}}</call>"), "{call}");
    }
}

#[tokio::test]
async fn control_tokens_belong_to_the_grammar_and_not_to_text() {
    let Some(rig) = Rig::start().await else { return };
    let framed = Rule::Sequence(vec![
        Rule::literal("a<|im_start|>b"),
        Rule::OneOf(vec![Rule::literal("c"), Rule::literal("d")]),
        Rule::Plain("<|im_start|>".to_owned()),
    ]);
    let said = rig.after("", Some(&framed)).await;
    assert!(["a<|im_start|>bc<|im_start|>", "a<|im_start|>bd<|im_start|>"].contains(&said.as_str()), "{said}");
    let until = Rule::Sequence(vec![Rule::Until("<|im_start|>".to_owned()), Rule::literal("answer")]);
    assert_eq!(rig.after("hm<|im_start|>", Some(&until)).await, "answer");
}

#[tokio::test]
async fn optional_schemas_are_enforced_if_possible() {
    let Some(rig) = Rig::start().await else { return };
    let held = |word: &str| json!({ "type": "object", "properties": { "a": { "enum": [word] } }, "required": ["a"] });
    let mut unknown = held("first");
    unknown["properties"]["b"] = json!({ "type": "array", "uniqueItems": true });
    let either = |name: &str, schema: &serde_json::Value| {
        let with = |schema| Rule::Sequence(vec![Rule::literal(name), Rule::Json(schema)]);
        Rule::FirstKnown(vec![with(schema.clone()), with(json!({ "type": "object" }))])
    };
    let tools = Rule::OneOf(vec![either("one ", &unknown), either("two ", &held("second"))]);
    let said = rig.after("two {\"a\": ", Some(&tools)).await;
    assert!(said.starts_with("\"second\""), "{said}");
    let said = rig.after("one {\"zzz\": ", Some(&tools)).await;
    assert!(!said.is_empty(), "any object will do");
}

#[tokio::test]
async fn schemas_that_cannot_be_enforced_are_refused_with_their_field() {
    let Some(rig) = Rig::start().await else { return };
    let rule = Rule::Sequence(vec![Rule::literal("x"), Rule::Json(json!({ "type": "array", "uniqueItems": true }))]);
    let constraint = Some(Constraint::Grammar { rule, field: "tools".to_owned() }.into());
    let request = SequenceRequest { prompt: rig.prompt.clone(), constraint, ..SequenceRequest::default() };
    let Err(error) = rig.engine.generate(request).await else { panic!("the request was accepted") };
    println!("{error}");
    assert!(error.to_string().contains("tools") && error.to_string().contains("uniqueItems"), "{error}");
}

/// The field and the message of the error.
async fn refusal(rig: &Rig, constraint: Constraint) -> (String, String) {
    let request = SequenceRequest {
        prompt: rig.prompt.clone(),
        constraint: Some(constraint.into()),
        ..SequenceRequest::default()
    };
    let error = match rig.engine.generate(request).await {
        Err(error) => error,
        Ok(events) => events.filter_map(|event| async move { event.err() }).boxed().next().await.unwrap(),
    };
    let EngineError::InvalidRequest { message, field } = error else { panic!("{error:?}") };
    println!("{message}");
    (field.unwrap_or_default(), message)
}

#[tokio::test]
async fn constraints_that_no_text_satisfies_are_refused_before_the_first_token() {
    let Some(rig) = Rig::start().await else { return };
    let schema = |schema| Constraint::exactly(schema, "format");
    for nothing in [
        json!({ "$ref": "#" }),
        json!({ "anyOf": [{ "$ref": "#" }] }),
        json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } }),
        json!({ "type": "object", "properties": { "a": { "$ref": "#" } }, "required": ["a"] }),
    ] {
        let (field, message) = refusal(&rig, schema(nothing)).await;
        assert!(field == "format" && message.contains("'format'"), "{message}");
    }
    // Of several schemas in a rule, the error names the faulty one.
    let of = |tool: &str, schema| Rule::For {
        field: "tools".to_owned(),
        tool: Some(tool.to_owned()),
        rule: Box::new(Rule::Sequence(vec![Rule::literal(tool), Rule::Json(schema)])),
    };
    let rule = Rule::OneOf(vec![of("well", json!({ "type": "object" })), of("ill", json!({ "$ref": "#" }))]);
    let (field, message) = refusal(&rig, Constraint::Grammar { rule, field: "whole".to_owned() }).await;
    assert!(field == "tools" && message.contains("\"ill\"") && !message.contains("well"), "{message}");
    // An optional schema is left out.
    let loose = |schema| Rule::FirstKnown(vec![Rule::Json(schema), Rule::literal("free")]);
    assert_eq!(rig.after("", Some(&loose(json!({ "$ref": "#" })))).await, "free");
}

#[tokio::test]
async fn a_dead_end_in_the_text_is_an_error_of_the_schema() {
    let Some(rig) = Rig::start().await else { return };
    // Each pattern alone is valid. That no text matches both shows at the latest when the text gets there.
    let both = json!({ "type": "string", "allOf": [{ "pattern": "^a+$" }, { "pattern": "^b+$" }] });
    let schema = json!({ "type": "object", "properties": { "n": { "type": "integer" }, "a": both },
        "required": ["n", "a"], "additionalProperties": false });
    let (field, _) = refusal(&rig, Constraint::exactly(schema, "format")).await;
    assert_eq!(field, "format");
    let dead = Rule::Sequence(vec![Rule::literal("word "), Rule::Pattern("[^\\s\\S]".to_owned())]);
    let (field, _) = refusal(&rig, Constraint::Grammar { rule: dead, field: "tools".to_owned() }).await;
    assert_eq!(field, "tools");
}

#[tokio::test]
async fn a_long_chain_of_references_does_not_end_the_process() {
    let Some(rig) = Rig::start().await else { return };
    // Each definition adds something to the next one, so that the compiler resolves all of them at once.
    const N_DEFINITIONS: usize = 6000;
    let definition = |i: usize| match i + 1 {
        N_DEFINITIONS => json!({ "type": "string" }),
        next => json!({ "allOf": [{ "$ref": format!("#/$defs/{next}") }] }),
    };
    let definitions: serde_json::Map<_, _> = (0..N_DEFINITIONS).map(|i| (i.to_string(), definition(i))).collect();
    let schema = json!({ "allOf": [{ "$ref": "#/$defs/0" }], "$defs": definitions });
    let constraint = Constraint::exactly(schema, "format");
    let request = SequenceRequest {
        prompt: rig.prompt.clone(),
        max_tokens: Some(4),
        constraint: Some(constraint.into()),
        ..SequenceRequest::default()
    };
    // A string, or an error that names the field.
    match rig.engine.generate(request).await {
        Ok(events) => assert!(events.collect::<Vec<_>>().await.iter().all(Result::is_ok)),
        Err(error) => assert!(error.to_string().contains("'format'"), "{error}"),
    }
}

#[tokio::test]
async fn generated_tokens_are_replayed_before_the_sequence_is_queued() {
    let Some(rig) = Rig::start().await else { return };
    let rule = Rule::Sequence(vec![Rule::literal("yes"), Rule::text()]);
    let text =
        TokenizeRequest { text: "no, never".into(), add_special: false, parse_special: false, key: Default::default() };
    let request = SequenceRequest {
        prompt: rig.prompt.clone(),
        generated: rig.engine.tokenize(&text).await.unwrap(),
        constraint: Some(Constraint::Grammar { rule, field: "tools".to_owned() }.into()),
        ..SequenceRequest::default()
    };
    // The scheduler's thread would report it as an event.
    let Err(error) = rig.engine.generate(request).await else { panic!("the scheduler has to replay the tokens") };
    assert!(matches!(error, EngineError::Internal { .. }), "{error:?}");
}
