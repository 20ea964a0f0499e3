use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::mpsc::{Sender, channel};

use futures::FutureExt;
use futures::future::join_all;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use tokio::time::advance;

use super::super::lane::MAX_WAIT;
use super::super::matcher_cache::{BYTES_FOR_SOURCE, MAX_KEPT_BYTES};
use super::progress::{Following, MaskBudget, thread_time};
use super::*;
use crate::llama::backend::backend;
use crate::llama::vocabulary::vocabulary;

/// A compiler for the real model's vocabulary, which is read once for all tests.
fn compiler() -> Arc<Compiler> {
    static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
        let file = std::env::var("BATON_TEST_MODEL").expect("BATON_TEST_MODEL names a GGUF");
        let params = LlamaModelParams::default().with_vocab_only(true);
        Arc::new(vocabulary(&LlamaModel::load_from_file(backend().unwrap(), file, &params).unwrap()))
    });
    Arc::new(Compiler::new(Arc::clone(&VOCABULARY)))
}

/// All compilations wait until the sender is dropped: they need the factory.
fn hold(compiler: &Arc<Compiler>) -> Sender<()> {
    let (gate, opens) = channel();
    let (begun, begins) = channel();
    let compiler = Arc::clone(compiler);
    std::thread::spawn(move || {
        compiler.factory.get_or_init(|| {
            begun.send(()).unwrap();
            let _ = opens.recv();
            factory(&compiler.vocabulary)
        });
    });
    begins.recv().unwrap();
    gate
}

fn constraint(n: u32) -> Constraint {
    Constraint::exactly(json!({ "const": n }), "f")
}

async fn all_turns(compiler: &Compiler) -> Vec<LaneTurn> {
    let turns = join_all((0..MAX_COMPILING).map(|_| compiler.compiling.turn(KeyTag::NONE))).await;
    turns.into_iter().collect::<Result<_, _>>().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_compilation_that_takes_too_long_keeps_its_turn_until_it_ends() {
    let compiler = compiler();
    let gate = hold(&compiler);
    let constraints: Vec<_> = (0..MAX_COMPILING).map(constraint).collect();
    let mut slow = Box::pin(join_all(constraints.iter().map(|one| compiler.constrained(one, &[], KeyTag::NONE))));
    assert!(slow.as_mut().now_or_never().is_none());
    advance(COMPILE_TIMEOUT).await;
    for outcome in slow.await {
        assert!(matches!(outcome.err(), Some(EngineError::Unavailable { .. })));
    }
    // Their callers have gone, but they still run. The next caller learns that the engine is busy, not that its
    // schema is at fault.
    let next = constraint(9);
    let mut waiting = Box::pin(compiler.constrained(&next, &[], KeyTag::NONE));
    assert!(waiting.as_mut().now_or_never().is_none());
    advance(MAX_WAIT).await;
    assert_eq!(waiting.await.err(), Some(EngineError::NoTurn { waited_s: MAX_WAIT.as_secs() as u32 }));
    // They notice that nobody waits.
    drop(gate);
    assert!(compiler.constrained(&next, &[], KeyTag::NONE).await.is_ok());
    assert!(constraints.iter().all(|one| compiler.cache.get(&source(one).unwrap()).is_none()));
}

#[test]
fn a_compilation_that_has_used_its_processor_time_up_ends_with_its_next_part() {
    let compiler = compiler();
    let factory = factory(&compiler.vocabulary).unwrap();
    let is_abandoned = CancellationToken::new();
    let fresh = Compilation::new(&factory, &is_abandoned);
    assert!(compiler.compile_with(&fresh, &constraint(0)).is_ok());
    let spent = Compilation { ends_at: Duration::ZERO, ..fresh };
    let error = compiler.compile_with(&spent, &constraint(0)).err().unwrap();
    assert_eq!(error, EngineError::invalid_field("f", "the schema takes too long to compile"));
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_turn_does_not_count_as_compiling() {
    let compiler = compiler();
    let gate = hold(&compiler);
    let turns = all_turns(&compiler).await;
    let constraint = constraint(0);
    let mut waiting = Box::pin(compiler.constrained(&constraint, &[], KeyTag::NONE));
    assert!(waiting.as_mut().now_or_never().is_none());
    advance(MAX_WAIT.mul_f64(0.8)).await;
    drop(turns);
    assert!(waiting.as_mut().now_or_never().is_none());
    advance(COMPILE_TIMEOUT.mul_f64(0.8)).await;
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(gate);
    assert!(waiting.await.is_ok());
    // A cached constraint needs no turn.
    let _turns = all_turns(&compiler).await;
    assert!(compiler.constrained(&constraint, &[], KeyTag::NONE).await.is_ok());
}

#[test]
fn a_cached_constraint_that_is_evicted_meanwhile_is_not_compiled_without_a_turn() {
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).enable_time().build().unwrap();
    runtime.block_on(async {
        let compiler = compiler();
        let constraint = constraint(0);
        assert!(compiler.constrained(&constraint, &[], KeyTag::NONE).await.is_ok());
        let (gate, opens) = channel::<()>();
        let only_thread = spawn_blocking(move || opens.recv());
        let mut request = Box::pin(compiler.constrained(&constraint, &[], KeyTag::NONE));
        assert!(request.as_mut().now_or_never().is_none());
        compiler.cache.clear();
        drop(gate);
        assert!(request.await.is_ok());
        assert!(only_thread.await.unwrap().is_err());
        assert!(compiler.cache.get(&source(&constraint).unwrap()).is_none(), "it was compiled again");
    });
}

#[tokio::test]
async fn a_constraint_that_is_compiled_twice_at_once_is_kept_once() {
    let compiler = compiler();
    let gate = hold(&compiler);
    let constraint = constraint(0);
    let mut same = Box::pin(join_all((0..MAX_COMPILING).map(|_| compiler.constrained(&constraint, &[], KeyTag::NONE))));
    assert!(same.as_mut().now_or_never().is_none());
    drop(gate);
    assert!(same.await.iter().all(Result::is_ok));
    let source = source(&constraint).unwrap();
    compiler.cache.put(source.clone(), Matcher::clone(&compiler.cache.get(&source).unwrap()), 1);
    assert_eq!(compiler.cache.sources().len(), 1);
}

#[tokio::test]
async fn the_cache_is_bounded_in_bytes() {
    let compiler = compiler();
    let matcher = compiler.constrained(&constraint(0), &[], KeyTag::NONE).await.unwrap().matcher;
    for i in 0..3 {
        let quarter = MAX_KEPT_BYTES / 4;
        compiler.cache.put(i.to_string().repeat(quarter / BYTES_FOR_SOURCE), matcher.clone(), quarter);
    }
    let sources = compiler.cache.sources();
    assert!(sources.iter().map(|source| &source[..1]).eq(["1", "2"]), "the oldest ones left");
}

#[tokio::test]
async fn a_constraint_that_becomes_too_large_is_refused_before_it_does() {
    let compiler = compiler();
    let problem = async |constraint: Constraint| match compiler.constrained(&constraint, &[], KeyTag::NONE).await {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    let rule = |rule| Constraint::Grammar { rule, field: "f".to_owned() };
    // 32,000 classes of 26 KB each.
    let classes = problem(rule(Rule::Pattern(r"\W".repeat(32_000)))).await;
    assert!(classes.contains("regular expression is too large"), "{classes}");
    // 100 symbols for each repetition.
    let repeated = |i: u32| Rule::Repeat { rule: Box::new(Rule::Ref(0)), min: 1_000 + i, max: Some(100_000 + 7 * i) };
    let symbols = problem(rule(Rule::Rules(vec![Rule::OneOf(vec![
        Rule::Plain("a".to_owned()),
        Rule::Sequence((0..2_500).map(repeated).collect()),
    ])])));
    let symbols = symbols.await;
    assert!(symbols.contains("grammar size (number of symbols) too big"), "{symbols}");
    // 16,384 combinations of patterns.
    let any = |i: u32| {
        let patterns = (0..4).map(|k| json!({ "pattern": format!("{}{i}{k}", "x".repeat(2_000)) })).collect::<Vec<_>>();
        json!({ "anyOf": patterns })
    };
    let combined = problem(schema(json!({ "allOf": (0..7).map(any).collect::<Vec<_>>() }))).await;
    assert!(combined.contains("combines alternatives"), "{combined}");
}

fn schema(schema: serde_json::Value) -> Constraint {
    Constraint::exactly(schema, "f")
}

impl Compiler {
    /// Writes a text one character at a time. Errors: how many were written, and why no more.
    async fn write(self: &Arc<Self>, constraint: &Constraint, text: &str) -> Result<Constrained, (usize, String)> {
        let vocabulary = &self.vocabulary;
        let pieces = (0..vocabulary.n_tokens() as Token).map(|t| (vocabulary.piece(t), t));
        let tokens: HashMap<Vec<u8>, Token> = pieces.filter(|(piece, _)| piece.len() == 1).collect();
        let mut constrained =
            self.constrained(constraint, &[], KeyTag::NONE).await.map_err(|error| (0, error.to_string()))?;
        let mut drawn = None;
        for (i, byte) in text.bytes().enumerate() {
            if let Following::Nothing(none) = constrained.next(drawn) {
                return Err((i, none.error(Some(constraint)).to_string()));
            }
            drawn = Some(tokens[&vec![byte]]);
        }
        drawn.map(|token| constrained.accept(token));
        Ok(constrained)
    }

    /// Returns true if a text may be the whole reply.
    async fn allows(self: &Arc<Self>, constraint: &Constraint, text: &str) -> bool {
        self.write(constraint, text).await.is_ok_and(|constrained| constrained.is_complete())
    }
}

#[tokio::test]
async fn a_constraint_that_is_too_complex_is_no_dead_end() {
    let compiler = compiler();
    let pattern = |pattern: &str| schema(json!({ "type": "string", "pattern": pattern }));
    // Where each of the last 30 letters was one of a to m is a state of its own.
    let letters = (0..2000_u32).map(|i| if i.wrapping_mul(2_654_435_769) >> 31 == 0 { 'a' } else { 'z' });
    let text = std::iter::once('"').chain(letters).collect::<String>();
    let (_, problem) = compiler.write(&pattern("^.*[a-m].{30}$"), &text).await.err().unwrap();
    assert!(problem.contains("too complex"), "{problem}");
    let Err(error) = compiler.constrained(&pattern("[^\\s\\S]"), &[], KeyTag::NONE).await else {
        panic!("it was accepted")
    };
    assert!(!error.to_string().contains("too complex"), "{error}");
}

#[tokio::test]
async fn only_an_ambiguous_grammar_uses_its_budget_up() {
    let compiler = compiler();
    let plain = |text: &str| Rule::Plain(text.to_owned());
    let two = Rule::Sequence(vec![Rule::Ref(0), Rule::Ref(0)]);
    let ambiguous = Rule::Rules(vec![Rule::OneOf(vec![two, plain("a"), plain("b")])]);
    let ambiguous = Constraint::Grammar { rule: ambiguous, field: "f".to_owned() };
    let began = thread_time();
    let (n_written, problem) = compiler.write(&ambiguous, &"a".repeat(800)).await.err().unwrap();
    assert!(n_written > 30 && problem.contains("too complex"), "{n_written}: {problem}");
    let (took, most) = (thread_time() - began, 2 * (MaskBudget::MOST + n_written as u32 * MaskBudget::PER_TOKEN));
    assert!(took < most, "{n_written} characters took {took:?}");

    let properties = (0..480).map(|i| (format!("property_{i}"), json!({ "type": "integer" })));
    let properties = properties.collect::<serde_json::Map<_, _>>();
    let wide = json!({ "type": "object", "properties": properties, "additionalProperties": false });
    // Each object has all its properties before it, which an object with many of them has not.
    let sparse = schema(json!({ "type": "array", "items": wide }));
    let objects = vec!["{\"property_0\": 1}"; 100].join(", ");
    let wide = schema(wide);
    let some = (0..480).step_by(3).map(|i| format!("\"property_{i}\": {i}")).collect::<Vec<_>>().join(", ");
    let list = schema(json!({ "type": "array", "items": {
        "type": "object",
        "properties": { "name": { "type": "string" }, "size": { "anyOf": [{ "type": "integer" }, { "type": "null" }] } },
        "required": ["name"],
    } }));
    let items = vec!["{\"name\": \"abc def\", \"size\": 12}"; 200].join(", ");
    for (constraint, text) in
        [(wide, format!("{{{some}")), (sparse, format!("[{objects}")), (list, format!("[{items}"))]
    {
        let rest = compiler.write(&constraint, &text).await.map(|constrained| constrained.budget.left);
        assert!(rest.as_ref().is_ok_and(|&rest| rest > MaskBudget::MOST / 2), "{rest:?} after {} bytes", text.len());
    }
}

#[tokio::test]
async fn what_is_left_of_a_schema_without_strict_can_be_enforced() {
    let compiler = compiler();
    let long = baton_schemas::written_number::parse(r#"{ "enum": [12345678901234567890123, 1e-400, 1] }"#).unwrap();
    let formats =
        ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "password"];
    let formats = formats.map(|format| json!({ "type": "string", "format": format }));
    let others = [
        long,
        json!({ "type": "array", "uniqueItems": true, "contains": { "const": 1 } }),
        json!({ "type": "object", "propertyNames": { "pattern": "^a" }, "unevaluatedProperties": false }),
        json!({ "type": "integer", "minimum": i64::MIN, "maximum": i64::MAX }),
        json!({ "type": "integer", "minimum": 1_000_000_000_000_000_000_u64 }),
        json!({ "type": "integer", "maximum": -1_000_000_000_000_000_001_i64 }),
        json!({ "type": "integer", "minimum": 0, "maximum": i64::MAX }),
        json!({ "type": "integer", "exclusiveMinimum": i64::MIN, "exclusiveMaximum": i64::MAX }),
        json!({ "enum": ["a", 12_345_678_901_234_567_u64, [1]] }),
        json!({ "type": "integer", "minimum": -999_999_999_999_999_999_i64, "maximum": 0 }),
        json!({ "type": "string", "pattern": "(?=a)b" }),
        json!({ "oneOf": [{ "type": "integer", "minimum": 1 }, { "type": "integer", "maximum": 5 }] }),
        json!({ "properties": { "a": {}, "b": {} }, "maxProperties": 1, "type": "object" }),
        json!({ "type": "object", "patternProperties": { "^a": {}, "^b": {}, "c": {} }, "additionalProperties": false }),
        json!({ "$ref": "https://example.com/schema", "type": "string", "minLength": 1.0 }),
        json!({ "type": "number", "multipleOf": 1e12 }),
        json!({ "if": { "type": "string" }, "then": { "minLength": 1 }, "not": { "type": "null" } }),
    ];
    for schema in formats.into_iter().chain(others) {
        let constraint = Constraint::json_schema(schema.clone(), "f", false).unwrap();
        let problem = compiler.constrained(&constraint, &[], KeyTag::NONE).await.err().map(|error| error.to_string());
        assert_eq!(problem, None, "{schema}");
    }
    let pattern = Constraint::json_schema(json!({ "type": "string", "pattern": "^[[a]{2}$" }), "f", false).unwrap();
    assert!(compiler.write(&pattern, "\"[a\"").await.is_ok());
    let (_, problem) = compiler.write(&pattern, "\"bb\"").await.err().unwrap();
    assert!(!problem.is_empty());
}

/// Numbers at the ends of what floats, 32-bit and 64-bit integers can be, as JSON.
const EXTREMES: [&str; 24] = [
    "0",
    "1",
    "0.5",
    "0.1234567890123456789",
    "1e-400",
    "1e999",
    "1e-7",
    "1e-300",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740992",
    "9007199254740993",
    "999999999999999999",
    "1000000000000000001",
    "9223372036854775807",
    "9223372036854775808",
    "9223372036854775809",
    "18446744073709551615",
    "18446744073709551616",
    "18446744073709551617",
    "12345678901234567890123",
    "1.5e18",
    "1e308",
];

/// A list of one value.
fn list_of(value: &str) -> serde_json::Value {
    let list = format!(r#"{{"type": "array", "items": {value}, "minItems": 1, "maxItems": 1}}"#);
    baton_schemas::written_number::parse(&list).unwrap()
}

/// What engines hold of a list of one value: `None` if the schema is refused before. Otherwise the constraint, which can be
/// enforced, and the parts that are not held.
async fn held_list(compiler: &Arc<Compiler>, value: &str, is_strict: bool) -> Option<(Constraint, Vec<String>)> {
    let constraint = Constraint::json_schema(list_of(value), "f", is_strict).unwrap();
    let Constraint::JsonSchema { unheld, .. } = &constraint else { panic!("no schema") };
    if unheld.refused.is_some() {
        assert!(is_strict, "{value}");
        return None;
    }
    let parts = unheld.parts.clone();
    // As it crosses to the node.
    let constraint = serde_json::from_str(&serde_json::to_string(&constraint).unwrap()).unwrap();
    let problem = compiler.constrained(&constraint, &[], KeyTag::NONE).await.err().map(|error| error.to_string());
    assert_eq!(problem, None, "{value}, strict: {is_strict}");
    Some((constraint, parts))
}

#[tokio::test]
async fn every_number_in_a_schema_is_held_or_named_and_refused_only_if_it_is_strict() {
    let compiler = compiler();
    let mut n_held = 0;
    for (keywords, types) in [
        (&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"][..], &["\"integer\"", "\"number\""][..]),
        (&["minLength", "maxLength"], &["\"string\""]),
        (&["minItems", "maxItems", "minContains", "maxContains"], &["\"array\""]),
        (&["minProperties", "maxProperties"], &["\"object\""]),
        (&["multipleOf"], &["\"integer\""]),
        (&["const"], &["\"number\""]),
    ] {
        let is_bound = keywords.len() == 4 && types.len() == 2 || keywords == ["const"];
        let signs = if is_bound { &["", "-"][..] } else { &[""] };
        for (keyword, number) in keywords.iter().flat_map(|k| EXTREMES.map(|n| (k, n))) {
            let float: f64 = number.parse().unwrap();
            // JSON Schema allows no other counts and steps.
            if !is_bound
                && (*keyword != "multipleOf" && float.fract() != 0.0 || *keyword == "multipleOf" && float == 0.0)
            {
                continue;
            }
            for (type_of, sign) in types.iter().flat_map(|t| signs.iter().map(move |sign| (t, sign))) {
                let schema = format!(r#"{{"type": {type_of}, "{keyword}": {sign}{number}}}"#);
                let (_, parts) = held_list(&compiler, &schema, false).await.unwrap();
                let is_named = parts == [keyword.to_string()];
                assert!(is_named || parts.is_empty(), "{schema}: {parts:?}");
                n_held += usize::from(!is_named);
                if !is_named {
                    assert!(
                        held_list(&compiler, &schema, true).await.is_some(),
                        "{schema}: held only if it is not strict"
                    );
                }
            }
        }
    }
    println!("{n_held} of these schemas are held");
}

#[tokio::test]
async fn what_is_written_keeps_the_bounds_at_the_ends_of_64_bits() {
    let compiler = compiler();
    let (least, most) = (i64::MIN, i64::MAX);
    for (bounds, allowed, forbidden) in [
        (
            format!(r#""minimum": {least}"#),
            vec!["-9223372036854774784", "0", "99999999999999999999"],
            vec!["-9223372036854775809"],
        ),
        (
            format!(r#""maximum": {most}"#),
            vec!["9223372036854775807", "0", "-99999999999999999999"],
            vec!["9223372036854775808"],
        ),
        (
            format!(r#""minimum": {least}, "maximum": {most}"#),
            vec!["-9223372036854774784", "9223372036854775807"],
            vec!["99999999999999999999"],
        ),
        (format!(r#""exclusiveMaximum": {most}"#), vec!["9223372036854774784"], vec!["9223372036854775807"]),
        (format!(r#""minimum": {most}"#), vec!["9223372036854775807"], vec!["9223372036854775806", "0", "-1"]),
        (
            r#""minimum": 1000000000000000001"#.into(),
            vec!["1000000000000000128", "9223372036854775807"],
            vec!["1000000000000000000", "5"],
        ),
        (r#""maximum": -1000000000000000001"#.into(), vec!["-1000000000000000128"], vec!["-1000000000000000000", "5"]),
        (
            r#""minimum": 1000000000000000000, "maximum": 2000000000000000000"#.into(),
            vec!["1000000000000000000", "2000000000000000000"],
            vec!["999999999999999999", "2000000000000000001"],
        ),
        (
            r#""minimum": 9007199254740992, "exclusiveMinimum": true"#.into(),
            vec!["9007199254740994"],
            vec!["9007199254740992"],
        ),
    ] {
        let schema = format!(r#"{{"type": "integer", {bounds}}}"#);
        for is_strict in [false, true] {
            let (constraint, parts) = held_list(&compiler, &schema, is_strict).await.unwrap();
            assert_eq!(parts, [""; 0], "{schema}");
            for (values, may_be) in [(&allowed, true), (&forbidden, false)] {
                for value in values {
                    assert_eq!(compiler.allows(&constraint, &format!("[{value}]")).await, may_be, "{schema}: {value}");
                }
            }
        }
    }
    // Beyond 64 bits: a strict schema allows what an engine can count to, another names the bound.
    let beyond = r#"{"type": "integer", "maximum": 18446744073709551615}"#;
    let (constraint, parts) = held_list(&compiler, beyond, true).await.unwrap();
    assert_eq!(parts, [""; 0]);
    assert!(compiler.allows(&constraint, "[9223372036854775807]").await);
    assert!(!compiler.allows(&constraint, "[18446744073709551616]").await);
    assert_eq!(held_list(&compiler, beyond, false).await.unwrap().1, ["maximum"]);
    let between = r#"{"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740993}"#;
    assert_eq!(held_list(&compiler, between, false).await.unwrap().1, ["minimum", "maximum"]);
    assert!(held_list(&compiler, between, true).await.is_none());
}

/// Each was refused, or failed when the text came to it.
#[tokio::test]
async fn what_cannot_be_held_beside_something_else_is_no_error_without_strict() {
    let compiler = compiler();
    for (value, right, wrong) in [
        (r#"{"type": "integer", "multipleOf": 50000, "minimum": 50000, "maximum": 10000000}"#, "150000", "10000001"),
        (r#"{"type": "integer", "multipleOf": 86400, "minimum": 0, "maximum": 4102444800}"#, "86400", "-86400"),
        (r#"{"type": "integer", "multipleOf": 9999, "minimum": 0, "maximum": 2147483647}"#, "19998", "19999"),
        (r#"{"type": "integer", "multipleOf": 5000, "minimum": 0, "maximum": 1152921504606846976}"#, "5000", "5001"),
        (r#"{"type": "integer", "multipleOf": 86400, "minimum": 0}"#, "172800", "172801"),
        (
            r#"{"type": "string", "pattern": "^[a-z]{1,50}( [a-z]{1,50})*$", "minLength": 100, "maxLength": 2000}"#,
            r#""a bc""#,
            r#""A""#,
        ),
    ] {
        let (constraint, _) = held_list(&compiler, value, false).await.unwrap();
        assert!(compiler.allows(&constraint, &format!("[{right}]")).await, "{value}: {right}");
        assert!(!compiler.allows(&constraint, &format!("[{wrong}]")).await, "{value}: {wrong}");
    }
    for child in [
        r##"{"$ref": "#", "nullable": true}"##,
        r##"{"$ref": "#", "type": "object", "additionalProperties": false, "minProperties": 1}"##,
        r##"{"allOf": [{"$ref": "#"}, {"minProperties": 1}]}"##,
        r##"{"anyOf": [{"$ref": "#"}, {"type": "null"}], "minProperties": 1}"##,
    ] {
        let tree = format!(
            r#"{{"type": "object", "properties": {{"n": {{"type": "integer"}}, "child": {child}}}, "required": ["n"],
                "additionalProperties": false}}"#
        );
        let constraint = Constraint::json_schema(serde_json::from_str(&tree).unwrap(), "f", false).unwrap();
        assert!(compiler.allows(&constraint, r#"{"n": 1, "child": {"n": 2}}"#).await, "{child}");
        assert!(!compiler.allows(&constraint, r#"{"n": 1, "child": {"n": "2"}}"#).await, "{child}");
    }
}

#[tokio::test]
async fn steps_that_meet_are_held_together_or_named() {
    let compiler = compiler();
    for (steps, parts) in [
        (["7", "5"], 0),
        (["99991", "99989"], 1),
        (["0.00000001", "65537"], 1),
        (["86400000", "1"], 1),
        (["1000000", "1"], 0),
    ] {
        let all = steps.map(|step| format!(r#"{{"type": "number", "multipleOf": {step}}}"#)).join(", ");
        let schema = format!(r#"{{"allOf": [{all}]}}"#);
        assert_eq!(held_list(&compiler, &schema, false).await.unwrap().1.len(), parts, "{schema}");
    }
}

#[tokio::test]
async fn bounds_that_exclude_each_other_are_named_as_such() {
    let compiler = compiler();
    for (value, problem) in [
        (r#"{"type": "integer", "minimum": 5, "maximum": 3}"#, "minimum (5) is greater than maximum (3)"),
        (r#"{"type": "number", "exclusiveMinimum": 5, "maximum": 5}"#, "exclusiveMinimum (5) is equal to maximum (5)"),
        (r#"{"type": "string", "minLength": 5, "maxLength": 3}"#, "minLength (5) is greater than maxLength (3)"),
        (r#"{"type": "array", "minItems": 5, "maxItems": 3}"#, "minItems (5) is greater than maxItems (3)"),
        (r#"{"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}"#, "does not contain a multiple of 5"),
    ] {
        let schema: serde_json::Value = serde_json::from_str(value).unwrap();
        let person = json!({ "type": "object", "properties": { "age": schema }, "required": ["age"] });
        for is_strict in [false, true] {
            let constraint = Constraint::json_schema(person.clone(), "f", is_strict).unwrap();
            let error = compiler.constrained(&constraint, &[], KeyTag::NONE).await.err().unwrap().to_string();
            assert!(error.contains("'age'") && error.contains(problem), "{error}");
        }
    }
}
