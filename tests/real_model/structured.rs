//! Structured output: the reply follows the schema, whatever the model would generate freely.

use std::time::{Duration, Instant};

use harness::{BatonServer, SseReply, chat};
use serde_json::{Value, json};

async fn post(server: &BatonServer, body: &Value) -> (u16, Value) {
    let url = format!("{}/v1/chat/completions", server.base);
    let response = reqwest::Client::new().post(url).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Returns the status, the warning and the body of a reply.
async fn ask(server: &BatonServer, path: &str, body: &Value) -> (u16, String, String) {
    let reply = reqwest::Client::new().post(format!("{}{path}", server.base)).json(body).send().await.unwrap();
    let warning = reply.headers().get("x-baton-warning").map(|warning| warning.to_str().unwrap().to_owned());
    (reply.status().as_u16(), warning.unwrap_or_default(), reply.text().await.unwrap())
}

/// A request whose schema describes a person.
fn person(more: Value) -> Value {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 1, "maxLength": 20 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "colour": { "enum": ["red", "green", "blue"] },
            "tags": { "type": "array", "items": { "$ref": "#/$defs/tag" }, "minItems": 1, "maxItems": 3 },
        },
        "required": ["name", "age", "colour", "tags"],
        "additionalProperties": false,
        "$defs": { "tag": { "type": "string", "pattern": "^[a-z]{2,8}$" } },
    });
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "person", "strict": true, "schema": schema } });
    let mut body = chat("Tell me about a person.", json!({ "response_format": format, "max_tokens": 200 }));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let fields = value.as_object().unwrap();
    assert_eq!(fields.keys().collect::<Vec<_>>(), ["name", "age", "colour", "tags"], "{text}");
    assert!((1..=20).contains(&value["name"].as_str().unwrap().chars().count()), "{text}");
    assert!((0..=150).contains(&value["age"].as_i64().unwrap()), "{text}");
    assert!(["red", "green", "blue"].contains(&value["colour"].as_str().unwrap()), "{text}");
    let tags = value["tags"].as_array().unwrap();
    let is_tag =
        |t: &Value| t.as_str().is_some_and(|t| (2..=8).contains(&t.len()) && t.bytes().all(|b| b.is_ascii_lowercase()));
    assert!((1..=3).contains(&tags.len()) && tags.iter().all(is_tag), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_follows_its_schema_at_any_temperature() {
    let server = BatonServer::start(&[]);
    for (temperature, seed) in [(0.0, 1), (0.8, 2), (1.5, 3), (2.0, 4), (2.0, 5)] {
        let (status, reply) = post(&server, &person(json!({ "temperature": temperature, "seed": seed }))).await;
        assert_eq!(status, 200, "{reply}");
        let choice = &reply["choices"][0];
        println!("{}", choice["message"]["content"]);
        check_person(choice["message"]["content"].as_str().unwrap());
        assert_eq!(choice["finish_reason"], "stop");
    }
    // The same seed gives the same reply, now from the compiled schema.
    let again = person(json!({ "temperature": 1.5, "seed": 3 }));
    let first = post(&server, &again).await.1;
    let second = post(&server, &again).await.1;
    assert_eq!(first["choices"], second["choices"]);

    let object = chat(
        "Give me a JSON object.",
        json!({
            "response_format": { "type": "json_object" }, "max_tokens": 300, "temperature": 1.0, "seed": 7,
        }),
    );
    let (_, reply) = post(&server, &object).await;
    let choice = &reply["choices"][0];
    if choice["finish_reason"] == "stop" {
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_follows_llama_servers_form_of_a_schema() {
    let server = BatonServer::start(&[]);
    let mut body = person(json!({ "temperature": 1.0, "seed": 5 }));
    let schema = body["response_format"]["json_schema"]["schema"].take();
    body["response_format"] = json!({ "type": "json_object", "schema": schema });
    let (status, reply) = post(&server, &body).await;
    assert_eq!(status, 200, "{reply}");
    check_person(reply["choices"][0]["message"]["content"].as_str().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_follows_other_servers_fields() {
    let server = BatonServer::start(&[]);
    let ask = async |fields: Value| {
        let mut body = chat("Answer.", json!({ "max_tokens": 60, "temperature": 1.0, "seed": 3 }));
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, reply) = post(&server, &body).await;
        assert_eq!(status, 200, "{reply}");
        let choice = &reply["choices"][0];
        println!("{fields}: {choice}");
        let is_whole = choice["finish_reason"] == "stop";
        (choice["message"]["content"].as_str().unwrap().to_owned(), is_whole)
    };
    let colours = ["red", "green", "green or red"];
    let (choice, _) = ask(json!({ "guided_choice": colours })).await;
    assert!(colours.contains(&choice.as_str()), "{choice}");
    let (choice, _) = ask(json!({ "structured_outputs": { "choice": colours } })).await;
    assert!(colours.contains(&choice.as_str()), "{choice}");
    let (digits, _) = ask(json!({ "guided_regex": "^[0-9]{3}/[0-9]{2}$" })).await;
    assert!(digits.len() == 6 && digits.as_bytes()[3] == b'/', "{digits}");
    let object = json!({ "type": "object", "properties": { "n": { "type": "integer", "maximum": 9, "minimum": 0 } },
        "required": ["n"], "additionalProperties": false });
    for field in ["guided_json", "json_schema"] {
        let (json, _) = ask(json!({ field: object })).await;
        assert!(serde_json::from_str::<Value>(&json).unwrap()["n"].is_i64(), "{json}");
    }
    // GBNF with a rule that refers to itself: brackets match.
    let gbnf = "root ::= sum\nsum ::= term (\" + \" term){1,2}\nterm ::= [0-9]{1,2} | \"(\" sum \")\"";
    let lark = "start: sum\nsum: term (\" + \" term)~1..2\nterm: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,2}/";
    for fields in [json!({ "grammar": gbnf }), json!({ "structured_outputs": { "grammar": lark } })] {
        let (sum, is_whole) = ask(fields).await;
        assert!(sum.chars().all(|c| "0123456789 +()".contains(c)), "{sum}");
        let opened = |sum: &str| sum.matches('(').count() as i64 - sum.matches(')').count() as i64;
        assert!((0..sum.len()).all(|end| opened(&sum[..end]) >= 0), "{sum}");
        assert!(!is_whole || opened(&sum) == 0 && sum.contains(" + "), "{sum}");
    }
    // What cannot be held names its field.
    let (status, reply) = post(&server, &chat("Answer.", json!({ "guided_regex": "a(?=b)" }))).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("guided_regex")), "{reply}");
}

/// Clients use vLLM's fields with every dialect, since their libraries add them to any body.
#[tokio::test(flavor = "multi_thread")]
async fn every_dialect_holds_other_servers_fields() {
    let server = BatonServer::start(&[]);
    let said = json!([{ "role": "user", "content": "Pick one." }]);
    for (path, body, text, own) in [
        ("/v1/responses", json!({ "input": "Pick one." }), "/output/0/content/0/text", "text"),
        ("/v1/messages", json!({ "messages": said, "max_tokens": 9 }), "/content/0/text", "output_config"),
        ("/api/chat", json!({ "messages": said, "stream": false }), "/message/content", "format"),
        ("/api/generate", json!({ "prompt": "Pick one.", "stream": false }), "/response", "format"),
        ("/completion", json!({ "prompt": "Pick one.", "n_predict": 9 }), "/content", "json_schema"),
    ] {
        let ask = async |more: Value| {
            let mut body = body.clone();
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body["model"] = json!("smollm2");
            let reply = reqwest::Client::new().post(format!("{}{path}", server.base)).json(&body).send().await.unwrap();
            (reply.status().as_u16(), reply.json::<Value>().await.unwrap())
        };
        let (status, reply) = ask(json!({ "guided_regex": "[0-9]{3}" })).await;
        let digits = reply.pointer(text).and_then(Value::as_str).unwrap_or_default();
        assert!(status == 200 && digits.len() == 3 && digits.parse::<u16>().is_ok(), "{path}: {reply}");
        let schema = json!({ "type": "json_schema", "schema": { "type": "object" } });
        let own = match own {
            "format" | "json_schema" => json!({ own: { "type": "object" } }),
            _ => json!({ own: { "format": schema } }),
        };
        let both = [json!({ "guided_regex": "a" }), own].map(|fields| fields.as_object().unwrap().clone());
        let (status, reply) = ask(both.into_iter().flatten().collect::<serde_json::Map<_, _>>().into()).await;
        assert!(status == 400 && reply.to_string().contains("already"), "{path}: {reply}");
        let (status, reply) = ask(json!({ "guided_regex": "" })).await;
        assert!(status == 400 && reply.to_string().contains("guided_regex"), "{path}: {reply}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_is_too_large_to_follow_is_an_error_and_no_part_of_an_object() {
    let server = BatonServer::start(&[]);
    let object = |n: usize| {
        let properties: serde_json::Map<_, _> =
            (0..n).map(|i| (format!("p{i}"), json!({ "type": "integer" }))).collect();
        json!({ "type": "object", "properties": properties, "additionalProperties": false })
    };
    let ask = async |schema: Value| {
        post(&server, &chat("Write JSON.", json!({ "guided_json": schema, "max_tokens": 200, "temperature": 0 }))).await
    };
    for n in [1_000, 3_000] {
        let (status, reply) = ask(object(n)).await;
        let error = &reply["error"];
        let is_named = error["param"] == "guided_json" && error["message"].to_string().contains("too complex");
        assert!(status == 400 && is_named, "{n} properties: {reply}");
    }
    let one_of = json!({ "type": "object", "properties": { "a": { "oneOf": [
        { "type": "object", "properties": { "b": { "type": "integer" } } }, { "type": "object" } ] } } });
    let strict = json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": one_of } });
    let (status, reply) = post(&server, &chat("Write JSON.", json!({ "response_format": strict }))).await;
    let message = reply["error"]["message"].to_string();
    assert!(status == 400 && message.contains("Use anyOf") && !message.contains("coerce"), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dialect_names_its_own_field_for_an_unsupported_constraint() {
    let server = BatonServer::start(&[]);
    let schema = json!({ "type": "object", "properties": { "a": { "$ref": "#" } }, "required": ["a"] });
    let said = json!([{ "role": "user", "content": "Hi" }]);
    let tool = |name: &str, parameters: &Value| {
        json!({ "type": "function",
        "function": { "name": name, "parameters": parameters } })
    };
    let tools = json!([tool("well", &json!({ "type": "object" })), tool("ill", &schema)]);
    let typed = |schema: &Value| json!({ "type": "json_schema", "name": "n", "schema": schema });
    for (path, mut body, field) in [
        (
            "/v1/chat/completions",
            json!({ "messages": said, "response_format": { "type": "json_object", "schema": schema } }),
            "response_format",
        ),
        ("/v1/chat/completions", json!({ "messages": said, "tools": tools, "tool_choice": "required" }), "tools"),
        ("/v1/responses", json!({ "input": "Hi", "text": { "format": typed(&schema) } }), "text.format"),
        ("/api/chat", json!({ "messages": said, "format": schema }), "format"),
        (
            "/v1/messages",
            json!({ "messages": said, "max_tokens": 9, "output_config": { "format": typed(&schema) } }),
            "output_config.format",
        ),
    ] {
        body["model"] = json!("smollm2");
        let url = format!("{}{path}", server.base);
        let response = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 400, "{path}");
        let reply: Value = response.json().await.unwrap();
        println!("{path}: {reply}");
        let message = reply["error"]["message"].as_str().or(reply["error"].as_str()).unwrap();
        assert!(message.contains(&format!("'{field}'")), "{message}");
        if path.starts_with("/v1") && path != "/v1/messages" {
            assert_eq!(reply["error"]["param"], field);
        }
        if field == "tools" {
            assert!(message.contains("\"ill\""), "{message}");
        }
    }
    let metrics = reqwest::get(format!("{}/metrics", server.base)).await.unwrap().text().await.unwrap();
    let requests: Vec<_> = metrics.lines().filter(|line| line.starts_with("baton_requests_total{")).collect();
    assert!(requests.iter().any(|line| line.contains("refused") && line.ends_with(" 5")), "{requests:?}");
    assert!(!requests.iter().any(|line| line.contains("failed")), "{requests:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_keywords_of_a_strict_schema_are_refused_by_name() {
    let server = BatonServer::start(&[]);
    let of = |schema: Value| {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": schema } });
        chat("Hi", json!({ "response_format": format }))
    };
    for wrong in [
        json!({ "type": "object", "properties": { "a": { "type": "strnig" } } }),
        json!({ "type": "array", "uniqueItems": true }),
        json!({ "type": "string", "pattern": "(unclosed" }),
        json!({ "$ref": "https://example.com/schema.json" }),
    ] {
        let (status, reply) = post(&server, &of(wrong.clone())).await;
        assert_eq!(status, 400, "{wrong}: {reply}");
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains("response_format"), "{message}");
        println!("{wrong}: {message}");
    }
    assert_eq!(post(&server, &chat("Hi", json!({}))).await.0, 200, "and the engine lives");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_without_strict_is_held_as_far_as_it_can_be_and_the_header_says_how_far() {
    let server = BatonServer::start(&[]);
    let properties = json!({
        "path": { "type": "string", "format": "path", "maxLength": 3 },
        "code": { "type": "string", "pattern": "^[[a]{2}$" },
        "id": { "type": "integer", "minimum": 0, "maximum": 9000, "multipleOf": 1000 },
        // Without a bound that is held a model may write digits to the end, so there are none of these.
        "none": { "type": "array", "items": { "type": "integer", "maximum": u64::MAX }, "maxItems": 0 },
        "tags": { "type": "array", "items": { "enum": ["a"] }, "minItems": 2, "maxItems": 2, "uniqueItems": true },
    });
    let names = ["path", "code", "id", "none", "tags"];
    let schema = json!({ "type": "object", "properties": properties, "required": names, "additionalProperties": false,
        "propertyNames": { "maxLength": 9 } });
    let named = json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": false, "schema": schema } });
    for (path, body, field) in [
        (
            "/v1/chat/completions",
            chat("Hi", json!({ "response_format": named, "max_tokens": 200, "temperature": 0 })),
            "response_format",
        ),
        (
            "/api/chat",
            json!({ "model": "smollm2", "messages": [{ "role": "user", "content": "Hi" }], "format": schema,
            "stream": false, "options": { "num_predict": 200, "temperature": 0 } }),
            "format",
        ),
    ] {
        let response = reqwest::Client::new().post(format!("{}{path}", server.base)).json(&body).send().await.unwrap();
        let warning = response.headers()["x-baton-warning"].to_str().unwrap().to_owned();
        let reply: Value = response.json().await.unwrap();
        println!("{warning}\n{reply}");
        for part in ["propertyNames", "format path", "maximum", "uniqueItems"] {
            assert!(warning.starts_with(&format!("not held of {field}: ")) && warning.contains(part), "{warning}");
        }
        let text = reply["choices"][0]["message"]["content"].as_str().or(reply["message"]["content"].as_str()).unwrap();
        let held: Value = serde_json::from_str(text).unwrap();
        assert!(held["path"].as_str().unwrap().chars().count() <= 3, "{held}");
        assert!(held["code"].as_str().unwrap().chars().all(|c| "[a".contains(c)), "{held}");
        assert_eq!((held["id"].as_u64().unwrap() % 1000, &held["tags"]), (0, &json!(["a", "a"])), "{held}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_follows_its_schema_after_its_engine_dies() {
    let server = BatonServer::start(&[]);
    let body = person(json!({ "temperature": 1.2, "seed": 11 }));
    let (_, undisturbed) = post(&server, &body).await;
    let mut reply = SseReply::open(&server, &body).await;
    reply.read_pieces(5).await;
    rustix::process::kill_process(server.engine(), rustix::process::Signal::KILL).unwrap();
    let text = reply.whole().await.content;
    check_person(&text);
    println!("{text}\n{}", undisturbed["choices"][0]["message"]["content"]);
}

/// Short patterns and grammars that stand for very many states are refused, or cost no more than they have to: the engine
/// computes their states as the reply reaches them.
#[tokio::test(flavor = "multi_thread")]
async fn a_pattern_that_is_a_bomb_costs_little() {
    let server = BatonServer::start(&[]);
    let doubled: String = (0..40).map(|i| format!("r{i} ::= r{0} r{0}\n", i + 1)).collect();
    let doubled = format!("root ::= r0\n{doubled}r40 ::= \"a\"");
    let nested = format!("{}a{}", "(".repeat(240), ")?".repeat(240));
    let other_case = format!("(?i){}", "[\u{a1}-\u{10ffff}]".repeat(7_000));
    for (field, bomb) in [
        ("guided_regex", "a{1000}{1000}{1000}"),
        ("guided_regex", "(a|b|ab)*c{50000}"),
        ("guided_regex", "((a?){1000}){1000}a{1000}"),
        ("guided_regex", "(a|b)*a(a|b){1000}"),
        ("guided_regex", &nested),
        ("guided_regex", &other_case),
        ("grammar", &doubled),
        ("grammar", "root ::= ((\"a\"{1000}){1000}){1000}"),
        ("grammar", "root ::= root root root | \"a\" | \"\""),
        ("grammar", "start: x~1000..2000\nx: \"(\" x \")\" | \"a\""),
        ("guided_grammar", "start: A\nA: B~1000\nB: C~1000\nC: \"a\"~1000"),
    ] {
        let began = Instant::now();
        let (status, reply) = post(&server, &chat("Say it.", json!({ field: bomb, "max_tokens": 8 }))).await;
        let error = &reply["error"];
        let is_short = error["message"].as_str().is_none_or(|message| message.len() < 1_000);
        assert!(status == 200 || status == 400 && error["param"] == field && is_short, "{field} {bomb}: {reply}");
        assert!(began.elapsed() < Duration::from_secs(10), "{field} {bomb}: {:?}", began.elapsed());
    }
}

/// Every dialect takes a schema whose numbers are at the ends of what engines count to, and names what is not held.
#[tokio::test(flavor = "multi_thread")]
async fn extreme_numbers_in_schemas_end_no_request_in_any_dialect() {
    let server = BatonServer::start(&[]);
    let properties: serde_json::Map<String, Value> = [
        json!({ "type": "integer", "minimum": i64::MIN, "maximum": i64::MAX }),
        json!({ "type": "integer", "exclusiveMinimum": i64::MIN, "exclusiveMaximum": i64::MAX }),
        json!({ "type": "integer", "minimum": i64::MAX }),
        json!({ "type": "integer", "maximum": u64::MAX }),
        json!({ "type": "number", "minimum": 1e18, "exclusiveMaximum": 1e308 }),
        json!({ "type": "string", "minLength": 0, "maxLength": 1_u64 << 32 }),
        json!({ "type": "array", "minItems": 1_u64 << 63, "maxItems": u64::MAX }),
        json!({ "type": "integer", "multipleOf": 1_u64 << 31 }),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, schema)| (format!("p{i}"), schema))
    .collect();
    let schema =
        json!({ "type": "object", "properties": properties, "required": ["p0"], "additionalProperties": false });
    let strict = json!({ "type": "object", "properties": { "id": { "type": "integer", "minimum": i64::MIN,
        "maximum": u64::MAX } }, "required": ["id"], "additionalProperties": false });
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let format = |is_strict: bool, schema: &Value| json!({ "type": "json_schema", "name": "x", "strict": is_strict, "schema": schema });
    let tool = |is_strict: bool, schema: &Value| json!([{ "type": "function", "function": { "name": "f", "strict": is_strict, "parameters": schema } }]);
    let chat = |more: Value| chat("Hi", more);
    let of = |is_strict: bool, schema: &Value| {
        vec![
            (
                "/v1/chat/completions",
                chat(
                    json!({ "max_tokens": 2, "response_format": { "type": "json_schema", "json_schema": format(is_strict, schema) } }),
                ),
            ),
            (
                "/v1/chat/completions",
                chat(json!({ "max_tokens": 2, "tool_choice": "required", "tools": tool(is_strict, schema) })),
            ),
            (
                "/v1/responses",
                json!({ "model": "smollm2", "input": "Hi", "max_output_tokens": 16, "text": { "format": format(is_strict, schema) } }),
            ),
        ]
    };
    let mut loose = of(false, &schema);
    loose.extend([
        ("/api/chat", json!({ "model": "smollm2", "messages": messages, "stream": false, "format": schema, "options": { "num_predict": 2 } })),
        ("/v1/messages", json!({ "model": "smollm2", "messages": messages, "max_tokens": 2, "tool_choice": { "type": "any" },
            "tools": [{ "name": "f", "input_schema": schema }] })),
        ("/v1/messages", json!({ "model": "smollm2", "messages": messages, "max_tokens": 2,
            "output_config": { "format": { "type": "json_schema", "schema": schema } } })),
    ]);
    for (path, body) in loose {
        let reply = ask(&server, path, &body).await;
        assert_eq!(reply.0, 200, "{path} {body}: {}", reply.2);
        println!("{path}: {}", reply.1);
        assert!(reply.1.ends_with("maximum, minItems, multipleOf"), "{path} {body}: {}", reply.1);
    }
    for (path, body) in of(true, &strict) {
        let reply = ask(&server, path, &body).await;
        assert_eq!((reply.0, reply.1.as_str()), (200, ""), "{path} {body}: {}", reply.2);
    }
    for (path, body) in of(true, &schema) {
        let reply = ask(&server, path, &body).await;
        assert!(
            reply.0 == 400 && reply.2.contains("cannot be enforced; without 'strict' it is left out"),
            "{path}: {}",
            reply.2
        );
    }
}
