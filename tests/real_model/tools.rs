//! Tool calls and reasoning.

use std::time::Duration;

use harness::{BatonServer, chat, is_alive};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

async fn post(server: &BatonServer, path: &str, body: &Value) -> (u16, Value) {
    let response = reqwest::Client::new().post(format!("{}{path}", server.base)).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn complete(server: &BatonServer, body: &Value) -> Value {
    let (status, reply) = post(server, "/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{reply}");
    reply["choices"][0].clone()
}

/// A stream's chunks.
async fn chunks(server: &BatonServer, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let url = format!("{}/v1/chat/completions", server.base);
    let text = reqwest::Client::new().post(url).json(&body).send().await.unwrap().text().await.unwrap();
    parse_chunks(&text)
}

fn parse_chunks(text: &str) -> Vec<Value> {
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\""), "{text}");
    let chunks = text.lines().filter_map(|line| line.strip_prefix("data: {"));
    chunks.map(|json| serde_json::from_str(&format!("{{{json}")).unwrap()).collect()
}

/// The calls that SDKs would assemble from a stream's fragments.
fn calls_of(chunks: &[Value]) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for call in chunks.iter().filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
        let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
        let function = &call["function"];
        if index == calls.len() {
            assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function", "{call}");
            calls.push((function["name"].as_str().unwrap().to_owned(), String::new()));
        } else {
            assert!(index + 1 == calls.len() && call["id"].is_null() && function["name"].is_null(), "{call}");
        }
        calls[index].1 += function["arguments"].as_str().unwrap();
    }
    calls
}

fn calls_in(choice: &Value) -> Vec<(String, String)> {
    let function = |call: &Value| {
        let of = |key: &str| call["function"][key].as_str().unwrap().to_owned();
        (of("name"), of("arguments"))
    };
    choice["message"]["tool_calls"].as_array().map(|calls| calls.iter().map(function).collect()).unwrap_or_default()
}

fn weather() -> Value {
    json!({ "type": "function", "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": { "type": "string", "minLength": 1, "maxLength": 20 },
                "unit": { "enum": ["celsius", "fahrenheit"] },
                "days": { "type": "integer", "minimum": 1, "maximum": 7 },
            },
            "required": ["city", "unit", "days"],
        },
    } })
}

fn clock() -> Value {
    json!({ "type": "function", "function": { "name": "clock", "parameters": {
        "type": "object", "properties": { "zone": { "enum": ["UTC", "CET"] } }, "required": ["zone"] } } })
}

fn named(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name } })
}

fn ask(more: Value) -> Value {
    let mut body = chat("What is the weather in Paris?", json!({ "max_tokens": 200, "tools": [weather(), clock()] }));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn check_weather(arguments: &str) {
    let value: Value = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e}: {arguments}"));
    assert_eq!(value.as_object().unwrap().keys().collect::<Vec<_>>(), ["city", "unit", "days"], "{arguments}");
    assert!((1..=20).contains(&value["city"].as_str().unwrap().chars().count()), "{arguments}");
    assert!(["celsius", "fahrenheit"].contains(&value["unit"].as_str().unwrap()), "{arguments}");
    assert!((1..=7).contains(&value["days"].as_i64().unwrap()), "{arguments}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_call_follows_its_schema_whole_and_streamed() {
    let server = BatonServer::start(&[]);
    for (temperature, seed) in [(0.0, 1), (1.0, 2), (2.0, 3)] {
        let body = ask(
            json!({ "tool_choice": named("get_weather"), "temperature": temperature, "seed": seed, "stop": ["city"] }),
        );
        let whole = complete(&server, &body).await;
        println!("{}", whole["message"]);
        assert_eq!(whole["finish_reason"], "tool_calls");
        assert!(whole["message"]["content"].is_null(), "{whole}");
        let calls = calls_in(&whole);
        assert_eq!(calls.len(), 1, "{whole}");
        assert_eq!(calls[0].0, "get_weather");
        check_weather(&calls[0].1);

        let chunks = chunks(&server, &body).await;
        assert_eq!(calls_of(&chunks), calls);
        let fragments = chunks.iter().filter(|c| c["choices"][0]["delta"]["tool_calls"].is_array()).count();
        assert!(fragments > 3, "the arguments come in pieces: {fragments}");
        let reasons: Vec<&str> = chunks.iter().filter_map(|c| c["choices"][0]["finish_reason"].as_str()).collect();
        assert_eq!(reasons, ["tool_calls"]);
        assert!(chunks.iter().all(|c| c["choices"][0]["delta"]["content"].as_str().is_none_or(str::is_empty)));
        assert!(chunks.last().unwrap()["usage"]["completion_tokens"].as_u64().unwrap() > 10);
    }
}

/// A template that shows the format of gpt-oss.
const HARMONY: &str = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}\
    <|start|>assistant{# <|channel|> #}";

#[tokio::test(flavor = "multi_thread")]
async fn calls_follow_their_schema_in_every_familys_format() {
    let fixture = |name: &str| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/engines/tests/fixtures/templates");
        std::fs::read_to_string(format!("{folder}/{name}.jinja")).unwrap()
    };
    let newer_mistral = fixture("mistral") + "{# [ARGS] #}";
    let templates = [
        fixture("qwen3"),
        fixture("llama3"),
        fixture("mistral"),
        newer_mistral,
        fixture("tool_schema"),
        HARMONY.into(),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("template.jinja");
    // Qwen3-Coder's format cannot keep a length, so the city is one of two.
    let mut tool = weather();
    let mut strict = weather();
    tool["function"]["parameters"]["properties"]["city"] = json!({ "enum": ["Paris", "Rome"] });
    strict["function"]["strict"] = json!(true);
    for (temperature, template) in [0.0, 0.7, 1.0, 1.0, 1.5, 1.0].into_iter().zip(templates) {
        std::fs::write(&path, &template).unwrap();
        let server = BatonServer::start(&["--chat-template-file", path.to_str().unwrap()]);
        let forced = |seed| {
            let choice = named("get_weather");
            json!({ "tools": [tool], "tool_choice": choice, "temperature": temperature, "seed": seed })
        };
        // Where a family may reason before its call, some draws reason until no tokens are left. Which ones depends on the
        // processor.
        let mut seed = 5;
        let mut whole = complete(&server, &ask(forced(seed))).await;
        while whole["finish_reason"] == "length" && seed < 15 {
            seed += 1;
            whole = complete(&server, &ask(forced(seed))).await;
        }
        println!("{}", whole["message"]);
        assert_eq!(whole["finish_reason"], "tool_calls", "{template}");
        let calls = calls_in(&whole);
        assert_eq!(calls.len(), 1, "{whole}");
        check_weather(&calls[0].1);
        assert_eq!(calls_of(&chunks(&server, &ask(forced(seed))).await), calls);
        let free = ask(json!({ "tools": [strict], "max_tokens": 8, "temperature": temperature, "seed": 5 }));
        println!("{}", complete(&server, &free).await["message"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_call_is_of_one_of_the_tools() {
    let server = BatonServer::start(&[]);
    let body = ask(json!({ "tool_choice": "required", "parallel_tool_calls": false }));
    let calls = calls_in(&complete(&server, &body).await);
    assert_eq!(calls.len(), 1);
    match calls[0].0.as_str() {
        "get_weather" => check_weather(&calls[0].1),
        "clock" => assert!(["{\"zone\": \"UTC\"}", "{\"zone\": \"CET\"}"].contains(&calls[0].1.as_str()), "{calls:?}"),
        other => panic!("there is no tool {other}"),
    }
    // Several calls in one reply, each whole.
    let several =
        complete(&server, &ask(json!({ "tool_choice": "required", "tools": [clock()], "max_tokens": 400 }))).await;
    println!("{}", several["message"]);
    if several["finish_reason"] == "tool_calls" {
        for (name, arguments) in calls_in(&several) {
            assert_eq!(name, "clock");
            assert!(serde_json::from_str::<Value>(&arguments).unwrap()["zone"].is_string(), "{arguments}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_of_responses_are_strict_if_their_schema_allows() {
    let server = BatonServer::start(&[]);
    let mut flat = clock()["function"].clone();
    flat["type"] = json!("function");
    flat["parameters"]["properties"]["zones"] = json!({ "type": "array", "uniqueItems": true });
    let mut body = json!({ "model": "smollm2", "input": "Hi", "max_output_tokens": 8, "tools": [flat] });
    let (status, reply) = post(&server, "/v1/responses", &body).await;
    assert_eq!((status, &reply["tools"][0]["strict"]), (200, &Value::Null), "{reply}");
    body["tools"][0]["strict"] = json!(true);
    let (status, reply) = post(&server, "/v1/responses", &body).await;
    assert_eq!(status, 400, "{reply}");
    assert!(reply["error"]["message"].as_str().unwrap().contains("uniqueItems"), "{reply}");
    body["tools"][0]["strict"] = json!(false);
    let (status, reply) = post(&server, "/v1/responses", &body).await;
    assert_eq!((status, &reply["tools"][0]["strict"]), (200, &json!(false)), "{reply}");
}

/// A request of `/v1/responses` with a custom tool in a namespace, whose grammar is a part of the patches of Codex.
fn patch_tool(grammar: &str, more: Value) -> Value {
    let format = json!({ "type": "grammar", "syntax": "lark", "definition": grammar });
    let patch = json!({ "type": "custom", "name": "apply_patch", "description": "Edits files.", "format": format });
    let space = json!({ "type": "namespace", "name": "files", "description": "Files.", "tools": [patch] });
    let choice = json!({ "type": "custom", "name": "apply_patch", "namespace": "files" });
    let mut body = json!({ "model": "smollm2", "input": "Delete the file a.txt.", "max_output_tokens": 120,
        "tools": [space], "tool_choice": choice });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The events of a streamed response.
async fn response_events(server: &BatonServer, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let url = format!("{}/v1/responses", server.base);
    let text = reqwest::Client::new().post(url).json(&body).send().await.unwrap().text().await.unwrap();
    text.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|json| serde_json::from_str(json).unwrap())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_input_of_a_custom_tool_follows_its_grammar_in_every_familys_format() {
    let fixture = |name: &str| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/engines/tests/fixtures/templates");
        std::fs::read_to_string(format!("{folder}/{name}.jinja")).unwrap()
    };
    let grammar = "start: begin_patch hunk end_patch\nbegin_patch: \"*** Begin Patch\" LF\n\
        end_patch: \"*** End Patch\" LF?\nhunk: \"*** Delete File: \" filename LF\n\
        filename: /\"[a-z]{1,8}\\.(txt|rs)\"/\n%import common.LF\n";
    let templates = [fixture("qwen3"), fixture("llama3"), fixture("mistral"), fixture("tool_schema"), HARMONY.into()];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("template.jinja");
    for template in templates {
        std::fs::write(&path, &template).unwrap();
        let server = BatonServer::start(&["--chat-template-file", path.to_str().unwrap()]);
        let body = patch_tool(grammar, json!({ "temperature": 0 }));
        let (status, reply) = post(&server, "/v1/responses", &body).await;
        assert_eq!(status, 200, "{reply}");
        let call = reply["output"].as_array().unwrap().last().unwrap();
        println!("{call}");
        assert_eq!(
            (&call["type"], &call["name"], &call["namespace"], &call["status"]),
            (&json!("custom_tool_call"), &json!("apply_patch"), &json!("files"), &json!("completed")),
            "{reply}"
        );
        let input = call["input"].as_str().unwrap();
        let name = input.strip_prefix("*** Begin Patch\n*** Delete File: \"").and_then(|rest| rest.split_once("\"\n"));
        let (name, end) = name.unwrap_or_else(|| panic!("{input}"));
        assert!(name.ends_with(".txt") || name.ends_with(".rs"), "{input}");
        assert!(["*** End Patch", "*** End Patch\n"].contains(&end), "{input}");

        let events = response_events(&server, &body).await;
        let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
        let deltas = of("response.custom_tool_call_input.delta");
        let streamed: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!((streamed.as_str(), deltas.len() > 3), (input, true));
        assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], input);

        // The call and its output can be sent back.
        let output = json!({ "type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done." });
        let history = json!([{ "role": "user", "content": "Delete it." }, call, output]);
        let next = patch_tool(grammar, json!({ "input": history, "tool_choice": "none", "max_output_tokens": 4 }));
        let (status, reply) = post(&server, "/v1/responses", &next).await;
        assert_eq!((status, &reply["output"][0]["type"]), (200, &json!("message")), "{reply}");
    }
}

/// The grammar that Codex sends with `apply_patch`.
const CODEX_PATCH: &str = "start: begin_patch hunk+ end_patch
begin_patch: \"*** Begin Patch\" LF
end_patch: \"*** End Patch\" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: \"*** Add File: \" filename LF add_line+
delete_hunk: \"*** Delete File: \" filename LF
update_hunk: \"*** Update File: \" filename LF change_move? change?

filename: /(.+)/
add_line: \"+\" /(.*)/ LF -> line

change_move: \"*** Move to: \" filename LF
change: (change_context | change_line)+ eof_line?
change_context: (\"@@\" | \"@@ \" /(.+)/) LF
change_line: (\"+\" | \"-\" | \" \") /(.*)/ LF
eof_line: \"*** End of File\" LF

%import common.LF
";

#[tokio::test(flavor = "multi_thread")]
async fn the_grammar_of_codex_holds_and_wrong_ones_are_named() {
    let server = BatonServer::start(&[]);
    let (status, reply) = post(&server, "/v1/responses", &patch_tool(CODEX_PATCH, json!({ "temperature": 0 }))).await;
    assert_eq!(status, 200, "{reply}");
    let input = reply["output"][0]["input"].as_str().unwrap();
    println!("{input}");
    let mut lines = input.split('\n');
    assert_eq!(lines.next(), Some("*** Begin Patch"));
    let hunk = lines.next().unwrap();
    let starts = ["*** Add File: ", "*** Delete File: ", "*** Update File: "];
    assert!(starts.iter().any(|start| hunk.starts_with(start) || start.starts_with(hunk)), "{input}");
    // A look-around is beyond the engine.
    let regex = json!({ "type": "grammar", "syntax": "regex", "definition": "a(?=b)b" });
    let tool = json!({ "type": "custom", "name": "patch", "format": regex });
    let (status, reply) =
        post(&server, "/v1/responses", &patch_tool("", json!({ "tools": [tool], "tool_choice": "auto" }))).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("tools")), "{reply}");
    assert!(reply["error"]["message"].as_str().unwrap().contains("patch"), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_free_choice_ends_in_text_or_whole_calls() {
    let server = BatonServer::start(&[]);
    let mut strict = weather();
    strict["function"]["strict"] = json!(true);
    for seed in 1..4 {
        let body = ask(json!({ "tools": [strict], "temperature": 1.0, "seed": seed, "max_tokens": 80 }));
        let choice = complete(&server, &body).await;
        println!("{}", choice["message"]);
        for (name, arguments) in calls_in(&choice) {
            assert_eq!(name, "get_weather");
            if choice["finish_reason"] == "tool_calls" {
                check_weather(&arguments);
            }
        }
    }
    // With `none` the prompt does not mention the tools.
    let none = ask(json!({ "tool_choice": "none", "max_tokens": 16 }));
    let without = ask(json!({ "tools": [], "max_tokens": 16 }));
    let (_, none) = post(&server, "/v1/chat/completions", &none).await;
    let (_, without) = post(&server, "/v1/chat/completions", &without).await;
    assert_eq!(none["choices"][0]["message"], without["choices"][0]["message"]);
    assert_eq!(none["usage"]["prompt_tokens"], without["usage"]["prompt_tokens"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_calls_result_continues_as_text() {
    let server = BatonServer::start(&[]);
    let call = json!({ "id": "call_1", "type": "function",
        "function": { "name": "get_weather", "arguments": "{\"city\": \"Paris\", \"unit\": \"celsius\", \"days\": 1}" } });
    let messages = json!([
        { "role": "user", "content": "What is the weather in Paris?" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees." },
    ]);
    let body = ask(json!({ "messages": messages, "max_tokens": 40, "tool_choice": "none" }));
    let (status, reply) = post(&server, "/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{reply}");
    println!("{}", reply["choices"][0]["message"]);
    // The call is in the prompt, which is shorter without it.
    let mut without = body.clone();
    without["messages"].as_array_mut().unwrap().remove(1);
    let (_, without) = post(&server, "/v1/chat/completions", &without).await;
    let n_prompt = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(n_prompt(&reply) > n_prompt(&without) + 25, "{reply} {without}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_tools_are_refused_by_name() {
    let server = BatonServer::start(&[]);
    let with = |parameters: Value| {
        let tool = json!({ "type": "function", "function": { "name": "f", "strict": true, "parameters": parameters } });
        ask(json!({ "tools": [tool], "tool_choice": "required" }))
    };
    for (body, words) in [
        (with(json!({ "type": "object", "properties": { "a": { "type": "strnig" } } })), "tools"),
        (
            with(json!({ "type": "object", "properties": { "a": { "type": "array", "uniqueItems": true } } })),
            "uniqueItems",
        ),
        (ask(json!({ "tool_choice": named("nope") })), "tool_choice"),
        (ask(json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] })), "tools[0].function.name"),
    ] {
        let (status, reply) = post(&server, "/v1/chat/completions", &body).await;
        assert_eq!(status, 400, "{body}: {reply}");
        let message = reply["error"]["message"].as_str().unwrap();
        println!("{message}");
        assert!(message.contains(words), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_continues_when_its_engine_is_killed() {
    let server = BatonServer::start(&[]);
    let long = json!({ "type": "function", "function": { "name": "note", "parameters": { "type": "object",
        "properties": { "words": { "type": "array", "items": { "type": "string", "pattern": "^[a-z]{3,6}$" },
            "minItems": 30, "maxItems": 30 } }, "required": ["words"] } } });
    let body = ask(json!({ "tools": [long], "tool_choice": named("note"), "max_tokens": 400, "stream": true }));
    let undisturbed = calls_of(&chunks(&server, &body).await);
    let engine = server.engine();
    let client = reqwest::Client::new();
    let mut stream = client.post(format!("{}/v1/chat/completions", server.base)).json(&body).send().await.unwrap();
    let mut text = String::new();
    let whole = async {
        while let Some(chunk) = stream.chunk().await.unwrap() {
            text.push_str(&String::from_utf8_lossy(&chunk));
            if text.matches("arguments").count() > 10 && is_alive(engine) {
                kill_process(engine, Signal::KILL).unwrap();
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), whole).await.expect("the stream to end");
    assert!(!is_alive(engine));
    let calls = calls_of(&parse_chunks(&text));
    assert_eq!(calls, undisturbed);
    let words: Value = serde_json::from_str(&calls[0].1).unwrap();
    assert_eq!(words["words"].as_array().unwrap().len(), 30);
}

/// The default model with a template whose prompts have this end.
fn with_prompt_end(end: &str) -> (tempfile::TempDir, BatonServer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("thinking.jinja");
    let turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}";
    std::fs::write(&path, format!("{turns}<|im_start|>assistant\n{end}")).unwrap();
    let server = BatonServer::start(&["--chat-template-file", path.to_str().unwrap()]);
    (folder, server)
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_separate_from_the_answer() {
    let body = chat("Why is the sky blue?", json!({ "max_tokens": 24 }));
    let (_folder, server) = with_prompt_end(
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}",
    );
    let (_, thinking) = post(&server, "/v1/chat/completions", &body).await;
    let message = &thinking["choices"][0]["message"];
    assert!(message["content"] == "" && !message["reasoning_content"].as_str().unwrap().is_empty(), "{message}");
    assert_eq!(message["reasoning"], message["reasoning_content"]);
    let usage = &thinking["usage"];
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], usage["completion_tokens"]);
    let streamed = chunks(&server, &body).await;
    let said =
        |name: &str| -> String { streamed.iter().filter_map(|c| c["choices"][0]["delta"][name].as_str()).collect() };
    assert_eq!(
        (said("reasoning_content"), said("content")),
        (message["reasoning"].as_str().unwrap().to_owned(), String::new())
    );

    let mut off = body.clone();
    off["chat_template_kwargs"] = json!({ "enable_thinking": false });
    let (_, answer) = post(&server, "/v1/chat/completions", &off).await;
    let message = &answer["choices"][0]["message"];
    assert!(message["reasoning_content"].is_null() && !message["content"].as_str().unwrap().is_empty(), "{message}");
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
    // A schema applies to the answer, and without thinking there is only the answer.
    let schema = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": {
        "type": "object", "properties": { "why": { "enum": ["light", "air"] } }, "required": ["why"] } } });
    off["response_format"] = schema;
    let object = complete(&server, &off).await;
    assert!(object["message"]["content"].as_str().unwrap().starts_with("{\"why\": "), "{object}");

    let ollama = |think: Value| {
        json!({ "model": "smollm2", "messages": body["messages"], "think": think, "stream": false,
        "options": { "temperature": 0, "num_predict": 12 } })
    };
    let (_, on) = post(&server, "/api/chat", &ollama(json!(true))).await;
    assert!(on["message"]["content"] == "" && !on["message"]["thinking"].as_str().unwrap().is_empty(), "{on}");
    let (_, off) = post(&server, "/api/chat", &ollama(json!(false))).await;
    assert!(off["message"]["thinking"].is_null() && !off["message"]["content"].as_str().unwrap().is_empty(), "{off}");
    let (_, shown) = post(&server, "/api/show", &json!({ "model": "smollm2" })).await;
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
}
