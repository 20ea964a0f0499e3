//! Tool calls in every dialect. The choice of a tool is forced, so that the protocol is judged and not the model.

use harness::BatonServer;
use serde_json::{Value, json};

const ASK: &str = "What is the weather in Paris?";

async fn post(server: &BatonServer, path: &str, body: &Value) -> (u16, String) {
    let response = reqwest::Client::new().post(format!("{}{path}", server.base)).json(body).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn whole(server: &BatonServer, path: &str, body: &Value) -> Value {
    let (status, text) = post(server, path, body).await;
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// The JSON of a stream's events.
async fn events(server: &BatonServer, path: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let (status, text) = post(server, path, &body).await;
    assert_eq!(status, 200, "{text}");
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn parameters() -> Value {
    json!({ "type": "object", "required": ["city", "unit"], "additionalProperties": false, "properties": {
        "city": { "type": "string", "minLength": 1, "maxLength": 20 }, "unit": { "enum": ["celsius", "fahrenheit"] } } })
}

fn check(arguments: &Value) {
    assert!(["celsius", "fahrenheit"].contains(&arguments["unit"].as_str().unwrap()), "{arguments}");
    assert!((1..=20).contains(&arguments["city"].as_str().unwrap().chars().count()), "{arguments}");
}

fn model() -> Value {
    harness::chat("", json!({}))["model"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_calls_a_function_and_takes_its_output() {
    let server = BatonServer::start(&[]);
    let tool = json!({ "type": "function", "name": "get_weather", "parameters": parameters() });
    let body = json!({ "model": model(), "input": ASK, "temperature": 0, "max_output_tokens": 100,
        "tools": [{ "type": "web_search" }, tool], "tool_choice": { "type": "function", "name": "get_weather" } });
    let response = whole(&server, "/v1/responses", &body).await;
    let call = response["output"][0].clone();
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("get_weather")), "{response}");
    assert_eq!((&response["status"], response["output"].as_array().unwrap().len()), (&json!("completed"), 1));
    check(&serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap());

    let events = events(&server, "/v1/responses", &body).await;
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
    let deltas = of("response.function_call_arguments.delta");
    let arguments: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(json!(arguments), call["arguments"]);
    assert!(deltas.len() > 3, "arguments come as they are generated");
    assert_eq!(of("response.function_call_arguments.done")[0]["arguments"], call["arguments"]);
    assert!(events.iter().zip(0..).all(|(event, number)| event["sequence_number"] == number));

    // A limit leaves the call and the response incomplete.
    let mut cut = body.clone();
    cut["max_output_tokens"] = json!(12);
    let cut = whole(&server, "/v1/responses", &cut).await;
    assert_eq!((&cut["status"], &cut["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")), "{cut}");

    let output = json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "Sunny, 21 degrees." });
    let mut next = body.clone();
    (next["tool_choice"], next["input"]) = (json!("none"), json!([{ "role": "user", "content": ASK }, call, output]));
    let answer = whole(&server, "/v1/responses", &next).await;
    assert_eq!(answer["output"][0]["type"], "message", "{answer}");
    // The call and its output are in the prompt.
    let plain =
        whole(&server, "/v1/responses", &json!({ "model": model(), "input": ASK, "max_output_tokens": 1 })).await;
    let n_prompt = |reply: &Value| reply["usage"]["input_tokens"].as_u64().unwrap();
    assert!(n_prompt(&answer) > n_prompt(&plain) + 30, "{answer}");
}

/// The parts of a Claude Code request that matter here.
fn claude_code(more: Value) -> Value {
    let ephemeral = json!({ "type": "ephemeral" });
    let mut body = json!({
        "model": model(),
        "max_tokens": 100,
        "temperature": 0,
        "system": [
            { "type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=00000;" },
            { "type": "text", "text": "You are Claude Code.", "cache_control": ephemeral },
        ],
        "messages": [{ "role": "user", "content": [{ "type": "text", "text": ASK, "cache_control": ephemeral }] }],
        "tools": [
            { "name": "get_weather", "description": "The weather in a city.", "input_schema": parameters(),
                "cache_control": ephemeral, "eager_input_streaming": true },
            { "type": "web_search_20250305", "name": "web_search", "max_uses": 8 },
        ],
        "metadata": { "user_id": "user_0_account__session_0" },
        "thinking": { "type": "enabled", "budget_tokens": 31999 },
        "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] },
        "output_config": { "effort": "medium" },
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_uses_a_tool_and_takes_its_result() {
    let server = BatonServer::start(&[]);
    let path = "/v1/messages?beta=true";
    let body = claude_code(json!({ "tool_choice": { "type": "tool", "name": "get_weather" } }));
    let message = whole(&server, path, &body).await;
    let block = &message["content"][0];
    assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("get_weather")), "{message}");
    assert_eq!(message["stop_reason"], "tool_use");
    check(&block["input"]);

    let events = events(&server, path, &body).await;
    let deltas: Vec<&str> = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert!(deltas.len() > 3, "input comes as it is generated");
    assert_eq!(serde_json::from_str::<Value>(&deltas.concat()).unwrap(), block["input"]);
    assert!(events.iter().any(|event| event["delta"]["stop_reason"] == "tool_use"));

    // The count equals the tokens that are computed.
    let counted = whole(&server, "/v1/messages/count_tokens?beta=true", &body).await["input_tokens"].as_u64().unwrap();
    let usage = &message["usage"];
    let n_prompt = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(counted, n_prompt);

    let result = json!({ "type": "tool_result", "tool_use_id": block["id"], "is_error": true,
        "content": [{ "type": "text", "text": "No such city.", "cache_control": { "type": "ephemeral" } }] });
    let messages = json!([{ "role": "user", "content": ASK }, { "role": "assistant", "content": message["content"] },
        { "role": "user", "content": [result] }]);
    let next = claude_code(json!({ "messages": messages, "tool_choice": { "type": "none" }, "max_tokens": 20 }));
    let answer = whole(&server, path, &next).await;
    assert_eq!(answer["content"][0]["type"], "text", "{answer}");
    // A free choice ends in text or in whole calls, and no field is refused.
    let free = whole(&server, path, &claude_code(json!({ "max_tokens": 32 }))).await;
    assert!(free["stop_reason"].is_string(), "{free}");
}

#[tokio::test(flavor = "multi_thread")]
async fn apply_template_returns_the_prompt_that_generation_uses() {
    let server = BatonServer::start(&[]);
    let tool = json!({ "type": "function", "function": { "name": "get_weather", "parameters": parameters() } });
    let mut body = harness::chat(ASK, json!({ "tools": [tool], "max_tokens": 1 }));
    let rendered = whole(&server, "/apply-template", &body).await["prompt"].as_str().unwrap().to_owned();
    assert!(rendered.contains("get_weather"), "{rendered}");
    let tokens = whole(&server, "/tokenize", &json!({ "content": rendered })).await["tokens"].as_array().unwrap().len();
    let usage = whole(&server, "/v1/chat/completions", &body).await["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(tokens as u64, usage);
    body["tool_choice"] = json!("none");
    assert!(!whole(&server, "/apply-template", &body).await["prompt"].as_str().unwrap().contains("get_weather"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_is_called_in_the_form_of_its_definition() {
    let server = BatonServer::start(&[]);
    let functions = json!({ "functions": [{ "name": "get_weather", "parameters": parameters() }],
        "function_call": { "name": "get_weather" }, "max_tokens": 100 });
    let body = harness::chat(ASK, functions);
    let choice = whole(&server, "/v1/chat/completions", &body).await["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "function_call", "{choice}");
    let call = &choice["message"]["function_call"];
    check(&serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap());
    let chunks = events(&server, "/v1/chat/completions", &body).await;
    let fragments = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["function_call"]["arguments"].as_str());
    assert_eq!(json!(fragments.collect::<String>()), call["arguments"]);
    let mut next = body.clone();
    next["function_call"] = json!("none");
    let history =
        [choice["message"].clone(), json!({ "role": "function", "name": "get_weather", "content": "Sunny." })];
    next["messages"].as_array_mut().unwrap().extend(history);
    let answer = whole(&server, "/v1/chat/completions", &next).await["choices"][0].clone();
    assert!(answer["message"]["content"].is_string(), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dialect_reports_a_call_that_a_limit_cut_off() {
    let server = BatonServer::start(&[]);
    let tool = json!({ "type": "function", "function": { "name": "get_weather", "parameters": parameters() } });
    let body = harness::chat(ASK, json!({ "tools": [tool], "tool_choice": "required", "max_tokens": 20 }));
    let choice = whole(&server, "/v1/chat/completions", &body).await["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length", "{choice}");
    let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap().to_owned();
    assert!(!arguments.is_empty() && serde_json::from_str::<Value>(&arguments).is_err(), "{arguments}");
    let body = claude_code(json!({ "tool_choice": { "type": "any" }, "max_tokens": 20 }));
    let message = whole(&server, "/v1/messages", &body).await;
    assert_eq!(message["stop_reason"], "max_tokens", "{message}");
    assert!(message["content"][0]["input"]["INVALID_JSON"].is_string(), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_for_a_model_without_image_support_is_refused_in_every_dialect() {
    let server = BatonServer::start(&[]);
    let chat = |content: Value| json!({ "model": model(), "max_tokens": 5, "messages": [{ "role": "user", "content": content }] });
    let text = json!({ "type": "text", "text": "What is this?" });
    let image_url = |url: &str| chat(json!([text, { "type": "image_url", "image_url": { "url": url } }]));
    let png = "iVBORw0KGgo=";
    let uri = format!("data:image/png;base64,{png}");
    let source = json!({ "type": "base64", "media_type": "image/png", "data": png });
    let block = json!({ "type": "image", "source": source });
    let result = json!({ "type": "tool_result", "tool_use_id": "t", "content": [block] });
    let input_image = json!({ "type": "input_image", "image_url": uri });
    let ollama = json!({ "model": model(), "messages": [{ "role": "user", "content": "What?", "images": [png] }] });
    for (path, body, field) in [
        ("/v1/chat/completions", image_url(&uri), "messages[0].content[1].image_url.url"),
        (
            "/v1/responses",
            json!({ "model": model(), "input": [{ "role": "user", "content": [input_image] }] }),
            "input[0].content[0].image_url",
        ),
        ("/v1/messages", chat(json!([text, block])), "messages[0].content[1].source.data"),
        ("/v1/messages", chat(json!([result])), "messages[0].content[0].content[0].source.data"),
        ("/v1/messages/count_tokens", chat(json!([text, block])), "messages[0].content[1].source.data"),
        ("/api/chat", ollama, "messages[0].images[0]"),
        ("/api/generate", json!({ "model": model(), "prompt": "What?", "images": [png] }), "images[0]"),
    ] {
        let (status, reply) = post(&server, path, &body).await;
        println!("{path}: {reply}");
        assert_eq!(status, 400, "{path}: {reply}");
        assert!(reply.contains("no projector") && reply.contains(field), "{path}: {reply}");
    }
    let (status, reply) = post(&server, "/v1/chat/completions", &image_url("http://example.com/a.png")).await;
    assert!(status == 400 && reply.contains("never fetches"), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_continues_the_tokens_of_an_earlier_one() {
    let server = BatonServer::start(&[]);
    let ask = async |prompt: &str, context: &Value, options: Value| {
        let mut body = json!({ "model": model(), "prompt": prompt, "stream": false, "context": context });
        body["options"] = json!({ "temperature": 0, "num_predict": 8 });
        body["options"].as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        whole(&server, "/api/generate", &body).await
    };
    let count = |reply: &Value, what: &str| reply[what].as_u64().unwrap();
    let n_context = |reply: &Value| reply["context"].as_array().unwrap().len() as u64;
    let first = ask(ASK, &Value::Null, json!({})).await;
    assert_eq!(n_context(&first), count(&first, "prompt_eval_count") + count(&first, "eval_count"), "{first}");
    let second = ask("And in Rome?", &first["context"], json!({})).await;
    let n_prompt = count(&second, "prompt_eval_count");
    let state: Value = reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap();
    let n_cached = state["routes"][0]["n_cached"].as_u64().unwrap();
    assert!(n_cached >= n_context(&first) - 1, "{n_cached} of {n_prompt}: {first}");
    let alone = ask("And in Rome?", &Value::Null, json!({})).await;
    assert_eq!(n_prompt, n_context(&first) + count(&alone, "prompt_eval_count"), "{second}");
    // A context size from the client ends the reply, or refuses the prompt.
    let cut = ask("And in Rome?", &first["context"], json!({ "num_ctx": n_prompt + 2 })).await;
    assert_eq!((&cut["done_reason"], count(&cut, "eval_count")), (&json!("length"), 2), "{cut}");
    let body = json!({ "model": model(), "prompt": "And in Rome?", "context": first["context"],
        "options": { "num_ctx": n_prompt } });
    let (status, refused) = post(&server, "/api/generate", &body).await;
    assert!(status == 400 && refused.contains("context_length_exceeded"), "{refused}");
    let (status, refused) =
        post(&server, "/api/generate", &json!({ "model": model(), "prompt": "x", "context": [9_999_999] })).await;
    assert!(status == 400 && refused.contains("context"), "{refused}");
}

/// Panics if a stream is incomplete.
type Check = fn(&str);

/// The streams of every dialect, for a forced call or text, and how each has to end.
fn mixed() -> Vec<(&'static str, Value, Check)> {
    let chat_tool = json!({ "type": "function", "function": { "name": "get_weather", "parameters": parameters() } });
    let flat_tool = json!({ "type": "function", "name": "get_weather", "parameters": parameters() });
    // Without "additionalProperties": false the model may go on with members of its own until `num_predict` cuts the reply.
    let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"],
        "additionalProperties": false });
    let model = model();
    vec![
        (
            "/v1/chat/completions",
            harness::chat(
                ASK,
                json!({ "tools": [chat_tool], "tool_choice": "required", "parallel_tool_calls": false,
                "max_tokens": 100, "stream": true }),
            ),
            |text| {
                assert!(
                    text.contains("\"finish_reason\":\"tool_calls\"") && text.ends_with("data: [DONE]\n\n"),
                    "{text}"
                )
            },
        ),
        (
            "/v1/completions",
            json!({ "model": model, "prompt": "Once upon a time", "max_tokens": 12, "stream": true }),
            |text| assert!(text.contains("\"finish_reason\":\"") && text.ends_with("data: [DONE]\n\n"), "{text}"),
        ),
        (
            "/v1/responses",
            json!({ "model": model, "input": ASK, "tools": [flat_tool], "tool_choice": "required", "stream": true,
                "parallel_tool_calls": false, "max_output_tokens": 100 }),
            |text| {
                let last = text.trim_end().rsplit("\n\n").next().unwrap();
                assert!(last.starts_with("event: response.completed\n") && last.contains("function_call"), "{text}");
            },
        ),
        (
            "/v1/messages",
            claude_code(json!({ "tool_choice": { "type": "any", "disable_parallel_tool_use": true }, "stream": true })),
            |text| assert!(text.contains("\"tool_use\"") && text.contains("event: message_stop\n"), "{text}"),
        ),
        (
            "/api/chat",
            json!({ "model": model, "messages": [{ "role": "user", "content": "Is it so?" }], "format": schema,
                "options": { "num_predict": 40 } }),
            |text| {
                let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
                let said: String = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
                assert!(lines.last().unwrap()["done"] == true, "{text}");
                assert!(serde_json::from_str::<Value>(&said).unwrap()["ok"].is_boolean(), "{said}");
            },
        ),
        ("/api/generate", json!({ "model": model, "prompt": "Hello", "options": { "num_predict": 8 } }), |text| {
            assert!(text.lines().last().unwrap().contains("\"done\":true"), "{text}")
        }),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_different_dialects_do_not_mix() {
    let server = BatonServer::start(&[]);
    let requests = (0..3).flat_map(|_| mixed()).map(|(path, body, check)| {
        let server = &server;
        async move {
            let (status, text) = post(server, path, &body).await;
            assert_eq!(status, 200, "{path}: {text}");
            check(&text);
        }
    });
    let all = futures::future::join_all(requests);
    tokio::time::timeout(std::time::Duration::from_secs(120), all).await.expect("all streams to end");
}
