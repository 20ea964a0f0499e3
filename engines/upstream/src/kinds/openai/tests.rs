use std::time::Duration;

use baton_schemas::constraint::{Constraint, SchemaLabel, SchemaPromise};
use baton_schemas::generate::{Conversation, Input, Message, Sampling, Thinking};
use baton_schemas::image::Image;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::sampling_fields::SamplingFields;
use baton_schemas::tools::{Described, Strictness, Tool, ToolChoice, ToolUse};
use baton_schemas::{EngineError, GenerateRequest, MessageRole};
use serde_json::{Value, json};

use super::*;
use crate::request::images::MessagePiece;
use crate::{
    ApiPath, ChoiceRequest, StrictGap, TextDelta, UpstreamDeadlines, UpstreamError, UpstreamKind, UpstreamSettings,
};

/// An upstream of this kind with its default fields.
pub(crate) fn settings(kind: UpstreamKind) -> UpstreamSettings {
    let second = Duration::from_secs(1);
    UpstreamSettings {
        name: "up".into(),
        kind,
        url: "http://127.0.0.1:1".into(),
        key: None,
        headers: Vec::new(),
        models: Vec::new(),
        aliases: Vec::new(),
        is_adopted: false,
        hidden: Vec::new(),
        fields: kind.default_fields().iter().copied().collect(),
        same_models: false,
        capabilities: None,
        max_concurrent: 1,
        num_ctx: None,
        default_max_tokens: None,
        images: None,
        image_urls: false,
        abort: true,
        prefill: Vec::new(),
        deadlines: UpstreamDeadlines { connect: second, first: 120 * second, idle: second },
    }
}

/// A chat that asks for nothing in particular.
pub(crate) fn request() -> GenerateRequest {
    let message = Message::new(MessageRole::User, "hi".into());
    GenerateRequest {
        model: "m".into(),
        input: Input::Chat(Conversation { messages: vec![message], ..Conversation::default() }),
        n: 1,
        max_tokens: None,
        stop: [].into(),
        sampling: Sampling::default(),
        chosen: SamplingFields::default(),
        top_logprobs: None,
        ignore_eos: false,
        constraint: None,
        tools: ToolUse::default(),
        thinking: Thinking::AsSaid,
        keep_alive: None,
        num_ctx: None,
        context: None,
        prompt_logprobs: None,
        predicted: None,
        is_streamed: true,
    }
}

fn call(kind: UpstreamKind, change: impl FnOnce(&mut GenerateRequest)) -> Result<(ApiPath, Value), UpstreamError> {
    let settings = settings(kind);
    let mut request = request();
    change(&mut request);
    let asked =
        ChoiceRequest { request: &request, choice: 0, model: "theirs", n_left: None, gap: StrictGap::of(&request) };
    let call = kind.protocol().generate_call(&asked, &settings)?;
    Ok((call.path, call.body.into()))
}

fn with_args(request: &mut GenerateRequest, args: Value) {
    let Input::Chat(conversation) = &mut request.input else { panic!() };
    conversation.template_args = args.as_object().unwrap().clone();
}

#[test]
fn a_plain_chat_sends_only_fields_of_openai() {
    let (path, body) = call(UpstreamKind::OpenAi, |_| {}).unwrap();
    assert_eq!(
        (path, &body["model"], &body["stream"]),
        (ApiPath::Api("chat/completions"), &json!("theirs"), &json!(true))
    );
    assert_eq!(body["messages"], json!([{ "role": "user", "content": "hi" }]));
    assert_eq!(body["temperature"], 0.8);
    let none = call(UpstreamKind::Vllm, |request| request.max_tokens = Some(0)).unwrap().1;
    assert_eq!(none["max_tokens"], 1, "it refuses 0");
    for absent in ["top_k", "min_p", "repeat_penalty", "max_tokens", "stop", "tools", "tool_choice"] {
        assert_eq!(body.get(absent), None, "{absent}");
    }
}

#[test]
fn a_short_reply_that_nobody_streams_is_requested_in_one_piece() {
    let streams = |change: fn(&mut GenerateRequest)| {
        let short = |request: &mut GenerateRequest| {
            (request.is_streamed, request.max_tokens) = (false, Some(256));
            change(request);
        };
        let (_, body) = call(UpstreamKind::OpenAi, short).unwrap();
        assert_eq!(body.get("stream_options").is_some(), body["stream"] == true);
        body["stream"].clone()
    };
    assert_eq!(streams(|_| {}), false);
    assert_eq!(streams(|r| with_tools(r, ToolChoice::Auto)), true, "the reply ends after its first call");
    assert_eq!(streams(|r| r.is_streamed = true), true);
    assert_eq!(streams(|r| r.max_tokens = Some(257)), true);
    assert_eq!(streams(|r| r.max_tokens = None), true);
    assert_eq!(streams(|r| r.stop = ["x".into()].into()), true);
}

#[test]
fn fields_that_a_kind_does_not_take_are_refused_and_never_dropped() {
    let refused = |change: fn(&mut GenerateRequest), field: &str| {
        match call(UpstreamKind::OpenAi, change) {
            Err(UpstreamError::Unsupported { field: named }) => assert_eq!(named, field),
            other => panic!("{field}: {other:?}"),
        }
        assert!(call(UpstreamKind::LlamaServer, change).is_ok(), "{field}");
    };
    refused(|r| r.sampling.top_k = 7, "top_k");
    refused(|r| r.sampling.min_p = 0.5, "min_p");
    refused(|r| r.sampling.repeat_penalty = 1.5, "repeat_penalty");
    refused(|r| r.ignore_eos = true, "ignore_eos");
    refused(|r| with_args(r, json!({ "x": 1 })), "chat_template_kwargs");
    let schema = Constraint::exactly(json!({ "type": "object" }), "f");
    let on_text = |r: &mut GenerateRequest| {
        r.input = Input::Text("x".into());
        r.constraint = Some(schema.into());
    };
    assert!(matches!(call(UpstreamKind::Vllm, on_text), Err(UpstreamError::Unsupported { field: "response_format" })));
}

#[test]
fn fields_have_the_names_of_each_server() {
    let penalty = |r: &mut GenerateRequest| r.sampling.repeat_penalty = 1.5;
    assert_eq!(call(UpstreamKind::LlamaServer, penalty).unwrap().1["repeat_penalty"], 1.5);
    assert_eq!(call(UpstreamKind::Vllm, penalty).unwrap().1["repetition_penalty"], 1.5);
    let (path, body) = call(UpstreamKind::Vllm, |r| r.input = Input::Tokens(vec![1, 2])).unwrap();
    assert_eq!((path, &body["prompt"]), (ApiPath::Api("completions"), &json!([1, 2])));
    let (_, body) = call(UpstreamKind::OpenAi, |r| with_args(r, json!({ "enable_thinking": false }))).unwrap();
    assert_eq!(body["reasoning_effort"], "none");
    let (_, body) = call(UpstreamKind::LlamaServer, |r| with_args(r, json!({ "enable_thinking": false }))).unwrap();
    assert_eq!(body["chat_template_kwargs"]["enable_thinking"], false);
}

#[test]
fn a_dialects_default_of_no_thinking_reaches_servers_that_have_a_switch_and_is_no_error_elsewhere() {
    let by_default = |request: &mut GenerateRequest| {
        with_args(request, json!({ "enable_thinking": false }));
        request.thinking = Thinking::OffByDefault;
    };
    let (_, body) = call(UpstreamKind::Vllm, by_default).unwrap();
    assert_eq!(body["chat_template_kwargs"]["enable_thinking"], false);
    let (_, body) = call(UpstreamKind::Ollama, by_default).unwrap();
    assert_eq!(body["think"], false);
    let (_, body) = call(UpstreamKind::OpenAi, by_default).unwrap();
    assert_eq!((&body["reasoning_effort"], &body["chat_template_kwargs"]), (&Value::Null, &Value::Null));
}

#[test]
fn reasoning_that_is_off_stays_off_whatever_effort_stands_beside_it() {
    for effort in ["none", "minimal", "low", "medium", "high", "xhigh", "max"] {
        let off = |thinking: Thinking| {
            move |request: &mut GenerateRequest| {
                with_args(request, json!({ "enable_thinking": false, "reasoning_effort": effort }));
                request.thinking = thinking;
            }
        };
        for thinking in [Thinking::AsSaid, Thinking::OffByDefault] {
            assert_eq!(call(UpstreamKind::Ollama, off(thinking)).unwrap().1["think"], false, "{effort}");
            for kind in [UpstreamKind::Vllm, UpstreamKind::LlamaServer] {
                let (_, body) = call(kind, off(thinking)).unwrap();
                assert_eq!(body["chat_template_kwargs"]["enable_thinking"], false, "{effort}");
            }
        }
        assert_eq!(
            call(UpstreamKind::OpenAi, off(Thinking::AsSaid)).unwrap().1["reasoning_effort"],
            "none",
            "{effort}"
        );
        let (_, body) = call(UpstreamKind::OpenAi, off(Thinking::OffByDefault)).unwrap();
        assert_eq!(body["reasoning_effort"], Value::Null, "{effort}");
        let on = json!({ "enable_thinking": true, "reasoning_effort": effort });
        let (_, body) = call(UpstreamKind::OpenAi, |r| with_args(r, on.clone())).unwrap();
        assert_eq!(body["reasoning_effort"], effort);
    }
}

fn tool(name: &str, strict: Strictness) -> Tool {
    Tool {
        name: name.into(),
        description: None,
        parameters: Tool::no_parameters(),
        strict,
        held: None,
        unheld: Default::default(),
        described: Described::InList,
    }
}

/// A chat with an earlier call and its result, two tools, and a choice among them.
fn with_tools(request: &mut GenerateRequest, choice: ToolChoice) {
    let tools = vec![tool("f", Strictness::Strict), tool("g", Strictness::IfKnown)];
    request.tools = ToolUse { tools: tools.into(), choice, parallel: false, ..ToolUse::default() };
    let Input::Chat(conversation) = &mut request.input else { panic!() };
    let calls = vec![json!({ "type": "function", "function": { "name": "f", "arguments": { "a": 1 } } })];
    let assistant = Message { role: MessageRole::Assistant, tool_calls: calls, ..Message::default() };
    let result = Message::new(MessageRole::Tool, "1".into());
    conversation.messages.extend([assistant, result]);
}

#[test]
fn tools_and_earlier_calls_are_written_with_ids_and_text_arguments() {
    let (_, body) = call(UpstreamKind::OpenAi, |request| with_tools(request, ToolChoice::Required)).unwrap();
    assert_eq!((&body["tool_choice"], &body["parallel_tool_calls"]), (&json!("required"), &json!(false)));
    assert_eq!(body["tools"][0]["function"]["strict"], true);
    assert_eq!(body["tools"][1]["function"].get("strict"), None, "other servers refuse what they cannot hold");
    let messages = &body["messages"];
    assert_eq!(messages[1]["content"], "", "some servers take no null");
    assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"], r#"{"a":1}"#);
    assert_eq!(messages[1]["tool_calls"][0]["id"], messages[2]["tool_call_id"]);
    let (_, body) = call(UpstreamKind::LlamaServer, |request| with_tools(request, ToolChoice::Required)).unwrap();
    assert_eq!(body["messages"][1]["content"], Value::Null);
}

#[test]
fn a_schema_is_sent_with_what_the_client_says_of_it_and_no_more() {
    let schema = || json!({ "type": "object" });
    let sent = |label| {
        let constraint = Constraint::labelled_schema(schema(), "response_format", label).unwrap();
        let (_, body) = call(UpstreamKind::OpenAi, |request| request.constraint = Some(constraint.into())).unwrap();
        body["response_format"]["json_schema"].clone()
    };
    assert_eq!(sent(SchemaLabel::default()), json!({ "name": "reply", "schema": schema() }));
    for strict in [true, false] {
        let label = SchemaLabel { promise: SchemaPromise::Strict(strict), ..SchemaLabel::default() };
        assert_eq!(sent(label), json!({ "name": "reply", "schema": schema(), "strict": strict }));
    }
    let promise = SchemaPromise::Unsaid;
    let label = SchemaLabel { name: Some("n".into()), description: Some("d".into()), promise };
    assert_eq!(sent(label), json!({ "name": "n", "description": "d", "schema": schema() }));
}

#[test]
fn a_promised_schema_is_strict_where_a_server_holds_no_other_and_strict_mode_takes_it() {
    let closed = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    let sent = |kind, schema: &Value| {
        let constraint = Constraint::json_schema(schema.clone(), "format", false).unwrap();
        let (_, body) = call(kind, |request| request.constraint = Some(constraint.into())).unwrap();
        assert_eq!(body["response_format"]["json_schema"]["schema"], *schema);
        body["response_format"]["json_schema"].get("strict").cloned()
    };
    assert_eq!(sent(UpstreamKind::OpenAi, &closed), Some(json!(true)));
    assert_eq!(sent(UpstreamKind::OpenAi, &json!({ "type": "object" })), None);
    for kind in [UpstreamKind::Vllm, UpstreamKind::LlamaServer] {
        assert_eq!(sent(kind, &closed), None, "it holds every schema");
    }
}

#[test]
fn forced_calls_are_strict_where_a_server_needs_that() {
    let strict = |choice| {
        let (_, body) = call(UpstreamKind::Vllm, |request| with_tools(request, choice)).unwrap();
        body["tools"][1]["function"]["strict"].as_bool()
    };
    assert_eq!(strict(ToolChoice::Required), Some(true));
    assert_eq!(strict(ToolChoice::Named("g".into())), Some(true));
    assert_eq!(strict(ToolChoice::Named("f".into())), None, "another tool is not called");
    assert_eq!(strict(ToolChoice::Auto), None);
}

#[test]
fn a_named_tool_is_the_only_one_where_names_are_not_understood() {
    let named = |kind| call(kind, |request| with_tools(request, ToolChoice::Named("g".into()))).unwrap().1;
    for kind in [UpstreamKind::OpenAi, UpstreamKind::Vllm] {
        let body = named(kind);
        assert_eq!(body["tool_choice"], json!({ "type": "function", "function": { "name": "g" } }));
        assert_eq!(body["tools"].as_array().unwrap().len(), 2);
    }
    let body = named(UpstreamKind::LlamaServer);
    assert_eq!((&body["tool_choice"], body["tools"].as_array().unwrap().len()), (&json!("required"), 1));
    assert_eq!(body["tools"][0]["function"]["name"], "g");
}

/// The text of a reply of these chunks, and its tokens, where log-probabilities were asked for.
fn read_with_logprobs(kind: UpstreamKind, input: Input, chunks: &[Value]) -> Result<(String, usize), UpstreamError> {
    let settings = settings(kind);
    let request = GenerateRequest { top_logprobs: Some(0), input, ..request() };
    let asked =
        ChoiceRequest { request: &request, choice: 0, model: "theirs", n_left: None, gap: StrictGap::of(&request) };
    let call = kind.protocol().generate_call(&asked, &settings)?;
    let mut reader = kind.protocol().delta_reader(&call);
    let mut out = Vec::new();
    for chunk in chunks {
        reader.read(chunk.to_string().as_bytes(), &mut out)?;
    }
    let mut said = String::new();
    let mut n_tokens = 0;
    for delta in out {
        if let TextDelta::Text { text, tokens } = delta {
            said += &text;
            n_tokens += tokens.len();
        }
    }
    Ok((said, n_tokens))
}

#[test]
fn text_without_the_log_probabilities_that_were_asked_for_is_refused() {
    let chunk = |delta: Value, logprobs: Value| json!({ "choices": [{ "delta": delta, "logprobs": logprobs }] });
    let bare = |text: &str| chunk(json!({ "content": text }), Value::Null);
    let with = |text: &str| {
        let token = json!({ "token": text, "logprob": -0.5, "bytes": null, "top_logprobs": [] });
        chunk(json!({ "content": text }), json!({ "content": [token] }))
    };
    let end = || json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] });
    let chat = || request().input;
    for kind in [UpstreamKind::OpenAi, UpstreamKind::LlamaServer, UpstreamKind::Vllm] {
        for silent in [&[bare("Hi"), bare("!")][..], &[bare("Hi"), end()]] {
            let refused = read_with_logprobs(kind, chat(), silent);
            assert!(matches!(refused, Err(UpstreamError::Unsupported { field: "logprobs" })), "{refused:?}");
        }
        let plain = [json!({ "choices": [{ "text": "Hi", "logprobs": null, "finish_reason": "length" }] })];
        assert!(read_with_logprobs(kind, Input::Text("x".into()), &plain).is_err());
        // The second piece has the token of both.
        let late = [bare(" "), with("x"), bare("y"), end()];
        assert_eq!(read_with_logprobs(kind, chat(), &late), Ok((" xy".into(), 1)));
    }
    let thought = chunk(json!({ "reasoning_content": "hm" }), Value::Null);
    let call = json!({ "tool_calls": [{ "index": 0, "id": "a", "function": { "name": "f", "arguments": "{}" } }] });
    let empty = bare("");
    let wordless = [empty, thought, chunk(call, Value::Null), end()];
    assert_eq!(read_with_logprobs(UpstreamKind::OpenAi, chat(), &wordless), Ok((String::new(), 0)), "there is no text");
}

#[test]
fn images_of_a_tools_result_stay_there_or_follow_in_a_message_of_the_user() {
    let image = Image::new(&b"\xff\xd8\xff"[..], "f");
    let shot = || MessagePiece::File(&image).part();
    let conversation = || {
        let tool = |id: &str, content: String| Message {
            tool_call_id: Some(id.into()),
            ..Message::new(MessageRole::Tool, content)
        };
        let messages = vec![
            tool("a", format!("before {} after", image.mark())),
            tool("b", image.mark()),
            Message::new(MessageRole::User, "And now?".into()),
        ];
        Conversation { messages, images: vec![image.clone()], ..Conversation::default() }
    };
    let sent = |kind| call(kind, |request| request.input = Input::Chat(conversation())).unwrap().1["messages"].clone();
    let text = |text: &str| json!({ "type": "text", "text": text });
    let kept = sent(UpstreamKind::Vllm);
    assert_eq!(kept[0]["content"], json!([text("before "), shot(), text(" after")]));
    assert_eq!((&kept[1]["content"], kept.as_array().unwrap().len()), (&json!([shot()]), 3));
    let moved = sent(UpstreamKind::OpenAi);
    assert_eq!((&moved[0]["content"], &moved[0]["tool_call_id"]), (&json!("before [image 1] after"), &json!("a")));
    assert_eq!(moved[1]["content"], "[image 2]");
    let follows = json!([text("[image 1]"), shot(), text("[image 2]"), shot()]);
    assert_eq!(moved[2], json!({ "role": "user", "content": follows }));
    assert_eq!((&moved[3]["content"], moved.as_array().unwrap().len()), (&json!("And now?"), 4));
}

#[test]
fn models_of_other_kinds_stay_in_memory() {
    let keep = |keep_alive| UpstreamKind::Vllm.protocol().keep_call(&settings(UpstreamKind::Vllm), "m", keep_alive);
    assert_eq!(keep(Some(KeepAlive::Forever)), Ok(None));
    let refused = keep(Some(KeepAlive::For(Duration::ZERO)));
    assert!(matches!(refused, Err(UpstreamError::Refused(EngineError::Unsupported { .. }))), "{refused:?}");
}

#[test]
fn servers_that_may_require_a_uuid_get_one_derived_from_each_id() {
    let sent = OpenAi.request_id("req_1-0-abc");
    let lengths: Vec<usize> = sent.split('-').map(str::len).collect();
    assert_eq!(lengths, [8, 4, 4, 4, 12], "{sent}");
    assert!(sent.chars().all(|c| c == '-' || c.is_ascii_hexdigit()), "{sent}");
    assert_eq!(sent.as_bytes()[14], b'4', "{sent}");
    assert!(b"89ab".contains(&sent.as_bytes()[19]), "{sent}");
    assert_eq!(sent, OpenAi.request_id("req_1-0-abc"));
    assert_ne!(sent, OpenAi.request_id("req_1-1-abc"));
    for kind in [UpstreamKind::Ollama, UpstreamKind::LlamaServer, UpstreamKind::Vllm] {
        assert_eq!(kind.protocol().request_id("req_1"), "req_1");
    }
}
